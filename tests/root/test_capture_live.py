"""``dpuflow capture`` on the real kernel: nothing is lost without being counted, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import dpkt
import pytest
from network import HERE, Pair, run
from readings_live import counters_of, packets_of
from send import frames

from dpuflow.ingest import ingest

HOOKS = ("tcx", "clsact", "xdp", "xdp-generic")
WAYS = {hook: ("--hook", hook) for hook in HOOKS} | {
    "afpacket": ("--backend", "afpacket"),
    "bcc": ("--backend", "bcc"),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_file_equals_tcpdumps(pair: Pair, nccl: list[Path], tmp_path: Path, way: str) -> None:
    if way.startswith("bcc"):
        pytest.importorskip("bcc", reason="no python3-bpfcc")
        if not any(Path("/usr/src").glob("linux-headers-*")):
            pytest.skip("no kernel headers, which bcc needs")
    ours, theirs = tmp_path / "ours.pcapng", tmp_path / "theirs.pcap"
    with (
        pair.tcpdump(pair.b, "east", theirs, "-s", "128", "--nano"),
        pair.capturing(pair.b, "-i", "east", "-w", str(ours), *WAYS[way], "--protocol", "any") as capture,
    ):
        sent = pair.send(pair.a, "west", *nccl, rate=20000)
    assert capture.status == 0, capture.said
    with theirs.open("rb") as file:
        expected = [bytes(data) for _, data in dpkt.pcap.Reader(file)]
    found = packets_of(ours)
    assert len(expected) == sent
    assert [packet.data for packet in found] == expected
    assert {packet.direction for packet in found} == {1}


def test_both_directions_and_their_times(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "both.pcapng"
    before = time.time_ns()
    options = ("--protocol", "any", "--timestamps", "kernel")
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), *options):
        there = pair.send(pair.a, "west", *nccl)
        back = pair.send(pair.b, "east", *nccl)
    after = time.time_ns()
    packets = packets_of(file)
    assert [packet.direction for packet in packets] == [1] * there + [2] * back
    stamps = [packet.time_ns for packet in packets]
    assert before < min(stamps)
    assert max(stamps) < after
    assert stamps == sorted(stamps)


def test_whole_packets_and_their_lengths(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.pcapng", tmp_path / "cut.pcapng"
    # Stamped by the programs at both, so that both have the packets of several CPUs in one order.
    options = ("--snaplen", "0", "--timestamps", "kernel")
    with (
        # Room for all of it: on a busy machine the reader may come when everything has been sent.
        pair.capturing(pair.b, "-i", "east", "-w", str(whole), *options, "--buffer", "256Mi"),
        pair.capturing(pair.b, "-i", "east", "-w", str(cut), "--snaplen", "80", "--hook", "xdp"),
    ):
        pair.send(pair.a, "west", *nccl)
    # By their stamps: on a busy machine a CPU may be held up for longer than the reader waits for it.
    packets, short = (sorted(packets_of(file), key=lambda packet: packet.time_ns) for file in (whole, cut))
    assert counters_of(whole)[0]["ring_full"] == counters_of(cut)[0]["ring_full"] == 0
    assert all(len(packet.data) == packet.wire_len for packet in packets)
    assert max(packet.wire_len for packet in packets) > 1000
    assert [packet.data[:80] for packet in packets] == [packet.data for packet in short]
    assert [packet.wire_len for packet in packets] == [packet.wire_len for packet in short]


def test_what_is_left_out_is_counted(pair: Pair, nccl: list[Path], gloo: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--protocol", "roce"):
        roce = pair.send(pair.a, "west", *nccl)
        tcp = pair.send(pair.a, "west", *gloo)
    (counters,) = counters_of(file)
    packets = packets_of(file)
    assert counters["seen"] == roce + tcp
    assert counters["captured"] == len(packets)
    assert counters["captured"] + counters["not_wanted"] == counters["seen"]
    assert counters["ring_full"] == counters["unreadable"] == counters["cut"] == 0


def test_an_expression_takes_what_the_options_take(
    pair: Pair, nccl: list[Path], gloo: list[Path], tmp_path: Path
) -> None:
    one, other = tmp_path / "one.pcapng", tmp_path / "other.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(one), "--filter", "roce or port 5000"):
        pair.send(pair.a, "west", *nccl, *gloo)
    packets = packets_of(one)
    (counters,) = counters_of(one)
    assert counters["not_wanted"] == counters["seen"] - len(packets) > 0
    qp = next(packet.data[47:50] for packet in packets if packet.data[36:38] == b"\x12\xb7")
    with pair.capturing(pair.b, "-i", "east", "-w", str(other), "--filter", f"qp 0x{qp.hex()}"):
        pair.send(pair.a, "west", *nccl, *gloo)
    expected = [p.data for p in packets if p.data[36:38] == b"\x12\xb7" and p.data[47:50] == qp]
    assert [packet.data for packet in packets_of(other)] == expected


def test_what_the_interface_drops_meanwhile_is_told(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    unknown = (
        "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(('west', 0));"
        "[s.send(bytes(12) + b'\\x88\\xb5' + bytes(50)) for _ in range({})]"
    )  # of an experimental ethertype: seen by the programs, then dropped, as nobody in east's host takes it
    pair.call(pair.a, sys.executable, "-c", unknown.format(9))
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file)) as capture:
        pair.call(pair.a, sys.executable, "-c", unknown.format(7))
    (counters,) = counters_of(file)
    assert counters["not_wanted"] == counters["rx_dropped"] == 7
    assert counters["rx_missed_errors"] == 0
    assert "7 dropped by the interface (rx_dropped)" in capture.said
    assert ingest([str(file)]).info.lost_packets == 0


def test_the_interfaces_own_counters_are_those_of_sysfs(pair: Pair) -> None:
    code = (
        "import socket; from dpuflow.live.nic import read_nic;"
        "read = lambda name: int(open('/sys/class/net/east/statistics/' + name).read());"
        "found = read_nic(socket.if_nametoindex('east'));"
        "print(found == {name: read(name) for name in found}, found['rx_dropped'], read_nic(9999))"
    )
    frames = "import socket; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(('west', 0));"
    pair.call(pair.a, sys.executable, "-c", frames + "s.send(bytes(12) + b'\\x88\\xb5' + bytes(50))")
    assert pair.call(pair.b, sys.executable, "-c", code).stdout == "True 1 None\n"


def test_a_flood_beyond_capacity_ends_in_counted_loss(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    with pair.capturing(
        pair.b, "-i", "east", "-w", str(file), "--protocol", "any", "--snaplen", "0", "--buffer", "64Ki"
    ) as capture:
        capture.process.send_signal(signal.SIGSTOP)
        sent = pair.send(pair.a, "west", *nccl)
        capture.process.send_signal(signal.SIGCONT)
    (counters,) = counters_of(file)
    assert counters["seen"] == sent
    assert counters["ring_full"] > 0
    assert counters["captured"] + counters["ring_full"] == sent
    assert len(packets_of(file)) == counters["captured"]
    assert "LOST: ring full" in capture.said


@pytest.mark.parametrize("hook", HOOKS)
def test_nothing_stays_attached_after_sigkill(pair: Pair, tmp_path: Path, hook: str) -> None:
    if not shutil.which("bpftool"):
        pytest.skip("no bpftool, which shows what is attached")

    def loaded(ids: set[str]) -> set[str]:
        """Those of ``ids`` that the kernel has."""
        return {line.split(":")[0] for line in run("bpftool", "prog", "show").splitlines()} & ids

    with pair.capturing(pair.b, "-i", "east", "--hook", hook) as capture:
        files = Path(f"/proc/{capture.process.pid}/fdinfo").iterdir()
        lines = [line.split() for file in files for line in file.read_text().splitlines()]
        own = {words[1] for words in lines if words[:1] == ["prog_id:"]}
        assert own
        assert loaded(own) == own
        capture.end(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while loaded(own) and time.monotonic() < deadline:
        time.sleep(0.1)  # the kernel frees programs a little later
    assert not loaded(own)


def test_what_others_have_attached_stays(pair: Pair, tmp_path: Path) -> None:
    with pair.capturing(pair.b, "-i", "east", "--hook", "xdp") as first:
        second = pair.dpuflow(pair.b, "capture", "-i", "east", "--hook", "xdp")
        assert second.returncode == 1
        assert second.stderr == "dpuflow: east: another XDP program is attached: use --hook tcx\n"
        assert first.process.poll() is None


def test_filters_in_use_are_no_leftovers(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--protocol", "any", "--hook", "clsact"):
        second = pair.dpuflow(pair.b, "capture", "-i", "east", "--hook", "clsact")
        assert second.returncode == 1
        assert "another dpuflow is capturing there through clsact" in second.stderr
        assert pair.dpuflow(pair.b, "doctor", "--clean").stdout == "nothing was left behind\n"
        sent = pair.send(pair.a, "west", *nccl)
    assert len(packets_of(file)) == sent


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_with_a_whole_file(pair: Pair, nccl: list[Path], tmp_path: Path, how: int) -> None:
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file)) as capture:
        sent = pair.send(pair.a, "west", *nccl)
        assert capture.end(how) == 0
    (counters,) = counters_of(file)
    assert counters["seen"] == sent


def test_a_pipe_to_analyze(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    result = tmp_path / "x.json"
    line = (
        f"{sys.executable} -m dpuflow capture -i east --count {len(frames(nccl[0]))} --protocol any -w - |"
        f" {sys.executable} -m dpuflow analyze - --json {result} --quiet"
    )
    process = pair.start(pair.b, "sh", "-c", line)
    assert process.stderr is not None
    process.stderr.readline()
    sent = pair.send(pair.a, "west", *nccl)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    (capture,) = json.loads(result.read_text())["captures"]
    assert capture["packets"] == sent
    assert capture["lost_packets"] == 0
    assert capture["complete"]


def test_count_and_duration(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--count", "100") as capture:
        pair.send(pair.a, "west", *nccl)
        capture.process.wait(timeout=120)
    assert len(packets_of(file)) == 100
    start = time.monotonic()
    done = pair.dpuflow(pair.b, "capture", "-i", "east", "--duration", "1")
    assert done.returncode == 0
    assert time.monotonic() - start >= 1


def test_a_vanishing_interface_ends_it_with_a_sentence(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--protocol", "any") as capture:
        sent = pair.send(pair.a, "west", *nccl)
        run("ip", "-n", pair.a, "link", "del", "west")
        capture.process.wait(timeout=120)
    assert capture.status == 1
    assert (
        capture.said.splitlines()[-1]
        == "dpuflow: east: the interface is gone; everything captured before is kept"
    )
    assert len(packets_of(file)) == sent


def test_files_in_turn(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng.zst"
    with pair.capturing(
        pair.b,
        "-i",
        "east",
        "-w",
        str(file),
        "--protocol",
        "any",
        "--rotate-size",
        "20k",
        "--rotate-time",
        "1",
    ):
        sent = pair.send(pair.a, "west", *nccl, rate=6000)
    files = sorted(tmp_path.glob("x-*.pcapng.zst"))
    assert len(files) > 2
    info = ingest([str(file) for file in files]).info
    assert info.complete
    assert info.packets == sent
    assert info.lost_packets == 0


def test_only_the_last_files_are_kept(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    with pair.capturing(
        pair.b, "-i", "east", "-w", str(tmp_path / "x.pcapng"), "--rotate-size", "300k", "--files", "2"
    ):
        pair.send(pair.a, "west", *nccl, rate=20000)
    left = sorted(tmp_path.glob("x-*.pcapng"))
    assert len(left) == 2
    assert left[0].name > "x-00001.pcapng"
    assert packets_of(left[0])
    assert counters_of(left[1])  # it may have been begun just before the end


def test_two_interfaces_at_once(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    run("ip", "-n", pair.a, "link", "add", "west2", "mtu", "9000", "type", "veth",
        "peer", "name", "east2", "mtu", "9000", "netns", pair.b)  # fmt: skip
    run("ip", "-n", pair.a, "link", "set", "west2", "up")
    run("ip", "-n", pair.b, "link", "set", "east2", "up")
    for way in (("--hook", "tcx"), ("--backend", "afpacket")):
        file = tmp_path / f"{way[1]}.pcapng"
        with pair.capturing(pair.b, "-i", "east", "-i", "east2", "-w", str(file), "--protocol", "any", *way):
            first = pair.send(pair.a, "west", *nccl)
            second = pair.send(pair.a, "west2", *nccl)
        assert [counters["captured"] for counters in counters_of(file)] == [first, second]
        assert [packet.interface for packet in packets_of(file)] == [0] * first + [1] * second


def test_packets_of_several_cpus_are_in_order(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    """Each CPU writes a ring of its own, and both directions of the interface are taken."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU alone")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    file = tmp_path / "x.pcapng"
    command = [sys.executable, str(HERE / "send.py")]
    options = ("--protocol", "any", "--timestamps", "kernel")
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), *options) as capture:
        senders = [
            pair.start(space, "taskset", "-c", str(cpu), *command, device, "20000", str(nccl[0]), stdout=-1)
            for space, device, cpu in ((pair.a, "west", first), (pair.b, "east", second))
        ]
        sent = [int(sender.communicate(timeout=120)[0]) for sender in senders]
    packets = packets_of(file)
    assert capture.status == 0
    assert len(packets) == sum(sent)
    assert [sum(packet.direction == way for packet in packets) for way in (1, 2)] == sent
    stamps = [packet.time_ns for packet in packets]
    assert stamps == sorted(stamps)


@pytest.mark.parametrize("backend", ["ebpf", "afpacket"])
def test_what_is_addressed_to_others_is_taken_from_several_interfaces(
    pair: Pair, nccl: list[Path], tmp_path: Path, backend: str
) -> None:
    """As on a card's interfaces that get mirrored traffic; promiscuous as long as the process lives."""
    file = tmp_path / "x.pcapng"

    def promiscuity(device: str) -> int:
        (row,) = json.loads(run("ip", "-n", pair.b, "-d", "-j", "link", "show", device))
        return int(row["promiscuity"])

    run("ip", "-n", pair.a, "link", "add", "west2", "type", "veth", "peer", "name", "east2", "netns", pair.b)
    for space, device in ((pair.a, "west2"), (pair.b, "east2")):
        run("ip", "-n", space, "link", "set", device, "mtu", "9000", "up")
    both, options = ("-i", "east", "-i", "east2"), ("--backend", backend, "--promiscuous")
    with pair.capturing(pair.b, *both, "-w", str(file), "--protocol", "any", *options) as capture:
        assert [promiscuity(device) for device in ("east", "east2")] == [1, 1]
        sent = [pair.send(pair.a, device, *nccl) for device in ("west", "west2")]
        addresses = {frame[:6] for frame in frames(nccl[0])}
        assert not any(bytes.fromhex(mac.replace(":", "")) in addresses for mac in macs(pair))
    packets = packets_of(file)
    assert [sum(packet.interface == number for packet in packets) for number in (0, 1)] == sent
    assert capture.status == 0
    with pair.capturing(pair.b, *both, *options) as capture:
        capture.end(signal.SIGKILL)
    assert [promiscuity(device) for device in ("east", "east2")] == [0, 0]


@pytest.mark.parametrize("way", ["tcx", "clsact", "afpacket"])
def test_a_loopback_has_each_packet_once(pair: Pair, tmp_path: Path, way: str) -> None:
    """Ranks on one host: what goes out comes in again, and would look like a repetition."""
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "lo", "-w", str(file), *WAYS[way]) as capture:
        done = pair.call(pair.b, sys.executable, "-c", _TALK)
        assert done.returncode == 0, done.stderr
    assert capture.status == 0, capture.said
    flows = ingest([str(file)]).flows
    assert flows["bytes"].tolist() == [500_000, 500_000]
    assert not flows["retransmitted"].any()


_TALK = """
import socket
listening = socket.create_server(("127.0.0.1", 0))
a = socket.create_connection(listening.getsockname())
b, _ = listening.accept()
for source, sink in [(a, b), (b, a)] * 100:
    source.sendall(bytes(5000))
    sink.recv(5000, socket.MSG_WAITALL)
"""


def macs(pair: Pair) -> list[str]:
    return [row["address"] for row in json.loads(run("ip", "-n", pair.b, "-j", "link", "show"))]
