"""The DOCA backend on simulated cards of six releases: what is captured, and production never disturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doca_card import BINDINGS, FLOODS, MIRRORS, RELEASES, Card, built, mixed

from dpuflow.live import doca_abi

sys.path.insert(0, str(Path(__file__).parent / "root"))
from readings_live import counters_of, packets_of

WAYS = [(release, "mirror") for release in MIRRORS] + [(release, "flood") for release in FLOODS]
SANITIZED = ("2.5", "3.1", "3.3")  # each way of settings, copying and receiving once
COMMAND = [sys.executable, "-m", "dpuflow", "capture", "--backend", "doca", "-i", "03:00.0"]


class Capturing:
    """``dpuflow capture --backend doca`` while a block runs."""

    def __init__(self, card: Card, *options: str) -> None:
        self.card, self.options = card, options
        self.said = ""

    def __enter__(self) -> Capturing:
        self.process = subprocess.Popen(
            [*COMMAND, *self.options], env=self.card.environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.2)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.said += self.process.communicate(timeout=60)[1]
        self.status = self.process.returncode


def refused(card: Card, *options: str) -> str:
    """What a capture says that does not begin: one sentence."""
    done = subprocess.run(
        [*COMMAND, *options], env=card.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def layers(frame: bytes) -> tuple[int, int]:
    """IP protocol (0: no IP), and where what follows it stands, as the card's parser sees it."""
    at, kind = 14, frame[12:14]
    if kind == b"\x81\x00":
        at, kind = 18, frame[16:18]
    if kind == b"\x08\x00":
        return frame[at + 9], at + 4 * (frame[at] & 15)
    if kind == b"\x86\xdd":
        return frame[at + 6], at + 40
    return 0, 0


def is_roce(frame: bytes) -> bool:
    protocol, at = layers(frame)
    return protocol == 17 and frame[at + 2 : at + 4] == b"\x12\xb7"


def wanted(frames: list[tuple[int, bytes]], roce: bool = True, tcp: bool = True) -> list[tuple[int, bytes]]:
    """(pcapng's direction, frame) of RoCE and TCP, with the source address as the card got it."""
    return [
        (2 if port else 1, frame[:11] + bytes([frame[11] & 0xFE | port]) + frame[12:])
        for port, frame in frames
        if (roce and is_roce(frame)) or (tcp and layers(frame)[0] == 6)
    ]


def check_copies(file: Path, expected: list[tuple[int, bytes]], snaplen: int = 128) -> None:
    """The file has exactly those packets: byte for byte, in order for each direction (one queue for each)."""
    found = packets_of(file)
    for direction in (1, 2):
        mine = [frame for way, frame in expected if way == direction]
        theirs = [packet for packet in found if packet.direction == direction]
        assert [packet.data for packet in theirs] == [frame[:snaplen] for frame in mine]
        assert [packet.wire_len for packet in theirs] == [len(frame) for frame in mine]


@pytest.mark.parametrize(("release", "method"), WAYS)
def test_copies_are_the_packets_and_production_goes_on(tmp_path: Path, release: str, method: str) -> None:
    card, frames = Card(tmp_path, release), mixed()
    file = tmp_path / "x.pcapng"
    card.send(frames)
    with Capturing(card, "-w", str(file), "--copy-by", method, "--snaplen", "96") as capturing:
        card.send(frames)
    card.send(frames)
    assert capturing.status == 0, capturing.said
    card.check()
    expected = wanted(frames)
    check_copies(file, expected, 96)
    counters = counters_of(file)[0]
    assert counters["captured"] == counters["seen"] == len(expected)
    assert counters["ring_full"] == counters["unreadable"] == 0
    assert ("shared mirror" if method == "mirror" else "flooding") in capturing.said


def test_every_release_is_tried() -> None:
    assert {release for release, _ in WAYS} == set(RELEASES)
    assert {path.name for path in (BINDINGS / "simulator" / "releases").iterdir()} == set(RELEASES)


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "copy_to"), [*((release, "") for release in RELEASES), ("2.7", "sf7"), ("3.3", "sf7")]
)
def test_whichever_call_fails_production_goes_on_and_nothing_leaks(
    tmp_path: Path, release: str, copy_to: str
) -> None:
    """Every call of DOCA and DPDK fails in turn, on three releases under the address and leak sanitizers."""
    drive = built(release, release in SANITIZED) / "drive"
    done = subprocess.run(
        [drive, tmp_path / "card", *([copy_to] * bool(copy_to))], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [int(number) for number in re.findall(r": (\d+) calls", done.stdout)]
    assert len(calls) == (2 if release == "3.1" else 1)
    assert min(calls) > 100


@pytest.mark.parametrize("release", RELEASES)
def test_the_simulator_refuses_what_the_library_refuses(tmp_path: Path, release: str) -> None:
    done = subprocess.run(
        [built(release, release in SANITIZED) / "refuse", tmp_path / "card"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused: ") > 20


@pytest.mark.parametrize("release", ["2.5", "2.9", "3.3"])
def test_killed_in_any_call_it_leaves_production(tmp_path: Path, release: str) -> None:
    """Both where a dead owner's rules go, as mlx5 does, and where they stay."""
    card = Card(tmp_path, release)
    once = card.environment | {"DPUFLOW_DRIVE_ONCE": "1"}
    drive = [card.built / "drive", card.path]
    assert subprocess.run(drive, env=once).returncode == 0
    calls = int(card.state()["calls"])
    frames = mixed(20)
    for stays, step in ((1, 4), (0, 60)):
        for number in range(1, calls + 1, step):
            card.tell("make")
            card.set(die_at=number, stays=stays)
            assert subprocess.run(drive, env=once).returncode == -signal.SIGKILL
            card.send(frames)
            assert card.state()["owned"] == "0"
    card.set(die_at=0, calls=0)
    assert subprocess.run(drive, env=once).returncode == 0  # takes over what the dead ones have left


@pytest.mark.parametrize(("release", "stays"), [("2.7", 0), ("2.9", 1), ("3.3", 0), ("3.3", 1)])
def test_killed_while_it_captures(tmp_path: Path, release: str, stays: int) -> None:
    card, frames = Card(tmp_path, release), mixed(300)
    card.set(stays=stays)
    file = tmp_path / "x.pcapng.zst"
    with Capturing(card, "-w", str(file)) as capturing:
        card.send(frames)
        time.sleep(1.2)  # once a second it is on the disk
        capturing.process.kill()
        card.send(frames)
    card.send(frames)
    again = tmp_path / "again.pcapng"
    with Capturing(card, "-w", str(again)) as capturing:
        card.send(frames)
    assert capturing.status == 0, capturing.said
    check_copies(again, wanted(frames))
    read = subprocess.run(
        [sys.executable, "-m", "dpuflow", "analyze", str(file)],
        env=card.environment,
        capture_output=True,
        text=True,
    )
    assert f"{len(wanted(frames))}" in read.stdout.replace(",", ""), read.stdout + read.stderr


def test_one_owner(tmp_path: Path) -> None:
    for release in ("2.7", "3.3"):
        folder = tmp_path / release
        folder.mkdir()
        card = Card(folder, release)
        with Capturing(card, "-w", str(folder / "x.pcapng")) as capturing:
            said = refused(card)
            assert "does another program own the eSwitch (OVS with doca-init, HBN, DPF)" in said
            card.send(mixed(20))
        assert capturing.status == 0
        check_copies(folder / "x.pcapng", wanted(mixed(20)))


def test_beside_ovs_doca_it_is_refused(tmp_path: Path) -> None:
    card = Card(tmp_path, "3.3")
    tool = tmp_path / "bin" / "ovs-vsctl"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '{doca-init=\"true\"}'\n")
    tool.chmod(0o755)
    card.environment["PATH"] = f"{tool.parent}:{card.environment['PATH']}"
    assert "the eSwitch is in use: OVS-DOCA owns it: use mirror ovs" in refused(card)
    card.check()


def test_what_the_machine_lacks_is_said(tmp_path: Path) -> None:
    card = Card(tmp_path, "3.3")
    card.set(nic_mode=1)
    assert "or this function none?" in refused(card)
    card.set(nic_mode=0)
    assert "03:00.0 has no representor sf9" in refused(card, "--peer", "en3f0pf0sf9")
    assert "hpf or pf0hpf is the host" in refused(card, "--peer", "eth0")
    done = subprocess.run(
        [*COMMAND[:-1], "0000:99:00.0"], env=card.environment, capture_output=True, text=True
    )
    assert "0000:99:00.0: not one of the 2 devices that DOCA sees here" in done.stderr
    assert "is not the interface of a PCI device" in subprocess.run(
        [*COMMAND[:-1], "lo"], env=card.environment, capture_output=True, text=True
    ).stderr  # fmt: skip
    card.check()
    for release, method, why in (
        ("3.3", "mirror", "3.3 has no shared mirror (it was removed in 3.2)"),
        ("2.7", "flood", "2.7 cannot flood (3.1 was the first to)"),
    ):
        other = tmp_path / method
        other.mkdir()
        assert why in refused(Card(other, release), "--copy-by", method)
    old = tmp_path / "old"
    old.mkdir()
    assert "the shared mirror wants a port for production" in refused(
        Card(old, "2.7"), "--production", "kernel"
    )


def test_without_the_adapter(tmp_path: Path) -> None:
    environment = os.environ | {"DPUFLOW_DOCA": str(tmp_path / "none.so"), "PYTHONPATH": str(BINDINGS.parent)}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True)
    assert "none.so not found: build it with `make doca` on the card" in done.stderr
    (tmp_path / "none.so").write_bytes(b"\x7fELF")
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True)
    assert done.stderr.count("\n") == 1
    assert "cannot be loaded" in done.stderr
    usage = subprocess.run(
        [*COMMAND[:4], "-i", "lo", "--peer", "hpf"], env=environment, capture_output=True, text=True
    )
    assert usage.returncode == 2
    assert "Error: --peer goes with --backend doca." in usage.stderr


# -- what is copied -------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["2.5", "3.3"])
def test_protocols(tmp_path: Path, release: str) -> None:
    card, frames = Card(tmp_path, release), mixed(300)
    for name, expected in (
        ("roce", wanted(frames, tcp=False)),
        ("tcp", wanted(frames, roce=False)),
    ):
        file = tmp_path / f"{name}.pcapng"
        with Capturing(card, "-w", str(file), "--protocol", name) as capturing:
            card.send(frames)
        assert capturing.status == 0
        check_copies(file, expected)
        assert counters_of(file)[0]["not_wanted"] == 0  # the card has chosen
    file = tmp_path / "any.pcapng"
    with Capturing(card, "-w", str(file), "--protocol", "any", "--snaplen", "0"):
        card.send(frames)
    everything = [
        (2 if port else 1, frame[:11] + bytes([frame[11] & 0xFE | port]) + frame[12:])
        for port, frame in frames
        if layers(frame)[1]
    ]
    check_copies(file, everything, 1 << 20)
    card.check()


@pytest.mark.parametrize("release", ["2.7", "3.3"])
def test_queue_pairs(tmp_path: Path, release: str) -> None:
    """By the card from 3.3, else by dpuflow; the file is the same."""
    card, frames = Card(tmp_path, release), mixed(600)

    def qp(frame: bytes) -> int:
        at = layers(frame)[1] + 8
        return int.from_bytes(frame[at + 5 : at + 8], "big")

    numbers = sorted({qp(frame) for _, frame in frames if is_roce(frame) and len(frame) > 70})[:2]
    file = tmp_path / "x.pcapng"
    options = [word for number in numbers for word in ("--qp", str(number))]
    with Capturing(card, "-w", str(file), "--protocol", "roce", *options):
        card.send(frames)
    card.check()
    expected = [item for item in wanted(frames, tcp=False) if qp(item[1]) in numbers]
    check_copies(file, expected)
    assert 0 < len(expected) < len(wanted(frames, tcp=False))
    assert (counters_of(file)[0]["not_wanted"] == 0) is (release == "3.3")


@pytest.mark.parametrize("release", ["2.5", "2.9", "3.2", "3.3"])
def test_sampling_by_the_card(tmp_path: Path, release: str) -> None:
    card, frames = Card(tmp_path, release), mixed()
    file = tmp_path / "x.pcapng"
    with Capturing(card, "-w", str(file), "--sample-packets", "3") as capturing:
        card.send(frames)
    card.check()
    assert "1 of 8 packets" in capturing.said
    total, found = len(wanted(frames)), packets_of(file)
    assert total / 12 < len(found) < total / 5
    assert {packet.data for packet in found} <= {frame[:128] for _, frame in wanted(frames)}


@pytest.mark.parametrize("release", FLOODS)
def test_production_by_the_kernel(tmp_path: Path, release: str) -> None:
    card, frames = Card(tmp_path, release), mixed(100)
    file = tmp_path / "x.pcapng"
    with Capturing(card, "-w", str(file), "--production", "kernel") as capturing:
        card.send(frames)
    assert capturing.status == 0, capturing.said
    card.check()
    check_copies(file, wanted(frames))


def test_frames_over_several_buffers(tmp_path: Path) -> None:
    card, frames = Card(tmp_path, "2.7"), mixed(300)
    card.set(split=200)
    file = tmp_path / "x.pcapng"
    with Capturing(card, "-w", str(file), "--snaplen", "0"):
        card.send(frames)
    card.check()
    assert max(len(frame) for _, frame in wanted(frames)) > 1000
    check_copies(file, wanted(frames), 1 << 20)


@pytest.mark.parametrize("release", ["2.7", "3.3"])
def test_stamps(tmp_path: Path, release: str) -> None:
    """The card's where its clock is wall time, else those of the arrival."""
    card, frames = Card(tmp_path, release), mixed(50)
    for wall in (0, 1):
        card.set(clock_is_wall=wall)
        file = tmp_path / f"{wall}.pcapng"
        before = time.time_ns()
        with Capturing(card, "-w", str(file)):
            card.send(frames, rate=1000)
        stamps = [packet.time_ns for packet in packets_of(file)]
        assert before < min(stamps)
        assert max(stamps) < time.time_ns()
        assert max(stamps) - min(stamps) > 50_000_000


@pytest.mark.parametrize("release", ["2.7", "3.3"])
def test_what_is_lost_is_counted(tmp_path: Path, release: str) -> None:
    """A receiver that stands still loses copies, not production; each one is counted."""
    card, frames = Card(tmp_path, release), mixed()
    file = tmp_path / "x.pcapng"
    with Capturing(card, "-w", str(file), "--buffer", "64Ki") as capturing:
        capturing.process.send_signal(signal.SIGSTOP)
        for _ in range(4):
            card.send(frames)
        capturing.process.send_signal(signal.SIGCONT)
    card.check()
    counters = counters_of(file)[0]
    assert counters["ring_full"] > 1000
    assert counters["captured"] == len(packets_of(file))
    assert counters["seen"] == counters["captured"] + counters["ring_full"] == 4 * len(wanted(frames))
    assert "lost" in capturing.said


COUNTED = """
import os, signal, sys, time
from dpuflow.live.doca_session import Session
from dpuflow.live.options import LiveOptions
import numpy as np
session = Session(LiveOptions(("03:00.0",), protocols=("any",)), "0000:03:00.0")
room = np.zeros(1 << 22, np.uint8)
print("ready", flush=True)
for line in sys.stdin:  # a count after each poll, as fast as it goes, until told to end
    if sys.argv[1:] == ["stands"]:  # by itself: stopped from outside it may hold the card's lock
        os.kill(os.getpid(), signal.SIGSTOP)
    until = time.monotonic() + float(line)
    most = 0
    while time.monotonic() < until:
        session.poll(room)
        most = max(most, session.counters()["no_buffer"])
    print(most, flush=True)
session.stop()
print(session.counters()["no_buffer"], flush=True)
session.close()
"""


@pytest.mark.parametrize("release", ["3.2", "3.3"])
@pytest.mark.parametrize("stands", [False, True])
def test_lost_in_the_queue_is_what_the_card_dropped(tmp_path: Path, release: str, stands: bool) -> None:
    """From 3.3 on, packets that were on their way were counted as lost; the card's own account decides."""
    card, frames = Card(tmp_path, release), mixed()
    counting = subprocess.Popen(
        [sys.executable, "-c", COUNTED] + ["stands"] * stands, env=card.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert counting.stdin is not None
    assert counting.stdout is not None
    try:
        assert counting.stdout.readline() == "ready\n"
        print(4 if stands else 1.5, file=counting.stdin, flush=True)
        if stands:
            os.waitpid(counting.pid, os.WUNTRACED)
        for _ in range(3):
            card.send(frames)
        if stands:
            counting.send_signal(signal.SIGCONT)
        most = int(counting.stdout.readline())
        counting.stdin.close()
        last = int(counting.stdout.readline())
    finally:
        counting.kill()
        counting.wait()
    dropped = int(card.state()["dropped"])
    assert most <= last == dropped
    assert not stands or dropped > 0


def test_the_agent_watches_what_a_card_forwards(tmp_path: Path) -> None:
    """Messages of the copies reach it, and after its reload the card is taken again."""
    card, frames = Card(tmp_path, "2.7"), mixed()
    config, log = tmp_path / "agent.yaml", tmp_path / "agent.log"
    config.write_text(
        "capture: {interfaces: ['0000:03:00.0'], backend: doca}\napi: {listen: off}\n"
        f"history: {{directory: {tmp_path}/history}}\nlog: {{format: json, status: 1s}}\n"
    )
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "dpuflow", "agent", "--user", "root", "--config", config],
            env=card.environment,
            stderr=stream,
        )
    try:
        for times in (1, 2):
            end = time.monotonic() + 60
            while log.read_text().count('"capture_started"') < times:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.1)
            card.send(frames)
            if times == 1:
                config.write_text(config.read_text().replace("backend: doca", "backend: doca, snaplen: 160"))
                process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 60
        while not any(float(rate) > 100 for rate in re.findall(r'"packet_rate": ([\d.]+)', log.read_text())):
            assert time.monotonic() < end, log.read_text()
            time.sleep(1)
            card.send(frames)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    card.check()
    assert "shared mirror of DOCA 2.7.85" in log.read_text()


def test_opcodes(tmp_path: Path) -> None:
    """By the adapter's interface: of two QPs the messages' ends alone, which is four entries in the card."""
    card, frames = Card(tmp_path, "3.3"), mixed(600)

    def bth(frame: bytes) -> tuple[int, int]:
        at = layers(frame)[1] + 8
        return frame[at], int.from_bytes(frame[at + 5 : at + 8], "big")

    roce = [(way, frame) for way, frame in wanted(frames, tcp=False) if len(frame) > 70]
    opcodes = sorted({bth(frame)[0] for _, frame in roce})[:2]
    numbers = sorted({bth(frame)[1] for _, frame in roce})[:2]
    script = f"""
import sys
from dpuflow.live import doca_abi, doca_session
library, ffi = doca_session.load_adapter()
o = ffi.new("struct dpuflow_doca_options *")
o.abi, o.bytes = doca_abi.ABI, ffi.sizeof(o[0])
o.device, o.peer, o.copy_to = b"0000:03:00.0", b"hpf", b"sf7"
o.protocols, o.snaplen, o.frame, o.ring = 1, 128, 9216, 1 << 20
o.qps, o.opcodes = {len(numbers)}, {len(opcodes)}
o.qp[0:{len(numbers)}], o.opcode[0:{len(opcodes)}] = {numbers}, {opcodes}
session = ffi.new("dpuflow_doca **")
assert library.dpuflow_doca_open(o, session) == 0, ffi.string(library.dpuflow_doca_error())
print("up", flush=True)
sys.stdin.readline()
assert library.dpuflow_doca_close(session[0]) == 0
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=card.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    card.send(frames)
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    card.check()
    expected = [
        frame
        for _, frame in wanted(frames, tcp=False)
        if bth(frame)[0] in opcodes and bth(frame)[1] in numbers
    ]
    assert card.at_sf == expected
    assert 0 < len(expected) < len(roce)


# -- interface ------------------------------------------------------------------------------------


def test_the_binding_repeats_the_header() -> None:
    header = (BINDINGS / "dpuflow_doca.h").read_text()
    begins = header.index("\n", header.index("repeats begins here")) + 1
    ends = header.index("/* What dpuflow/live/doca_abi.py repeats ends here")
    declared = header[begins:ends]
    assert doca_abi.DECLARATIONS.strip() == declared.replace("\t", " " * 8).strip()
    assert f"DPUFLOW_DOCA_ABI = {doca_abi.ABI}," in declared


@pytest.mark.parametrize("release", RELEASES)
def test_copies_to_a_port(tmp_path: Path, release: str) -> None:
    """To a scalable function instead of a queue."""

    card, frames = Card(tmp_path, release), mixed(100)
    code = (
        "import sys; from dpuflow.live.doca_session import Session;"
        "from dpuflow.live.options import LiveOptions;"
        "s = Session(LiveOptions(('x',)), '0000:03:00.0', 'sf7'); print('up', flush=True);"
        "sys.stdin.readline(); print(s.counters()); s.stop(); s.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=card.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    card.send(frames)
    said, _ = process.communicate("\n", timeout=30)
    assert process.returncode == 0
    card.check()
    expected = [frame for _, frame in wanted(frames)]
    assert card.at_sf == expected
    assert f"'copied': {[sum(way == k for way, _ in wanted(frames)) for k in (1, 2)]}" in said
    assert f"'production': {[sum(port == k for port, _ in frames) for k in (0, 1)]}" in said
