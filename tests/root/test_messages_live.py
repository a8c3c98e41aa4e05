"""Messages mode: the kernel folds, and what is told apart in the end is the same as from packets."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from network import HERE, Pair, inside, until_passed_on
from send import frames
from test_filters_live import pcap_of

from dpuflow.errors import DpuflowError
from dpuflow.ingest import ingest
from dpuflow.live import libbpf, place
from dpuflow.live.capture import LiveCapture
from dpuflow.live.options import LiveOptions
from dpuflow.live.record import journal_of
from dpuflow.live.ring import Ring
from dpuflow.schema.rows import MESSAGE
from dpuflow.schema.tables import CaptureTables

# Two captures of the same packets stamp them apart, and a run stands behind what came during it.
TIMES = ("first_ns", "last_ns", "acked_ns")
FRAMES = ("first_frame", "last_frame")


def same_messages(packets: CaptureTables, messages: CaptureTables) -> None:
    assert len(packets.messages) == len(messages.messages) > 0
    assert np.array_equal(packets.flows["packets"], messages.flows["packets"])
    for name in (
        "bytes",
        "missing",
        "retransmitted",
        "ecn_marked",
        "cnp",
        "nak",
        "rnr",
        "messages",
        "pairing",
    ):
        assert packets.flows[name].tolist() == messages.flows[name].tolist(), name
    for field in MESSAGE.fields:
        if field.name not in TIMES + FRAMES:
            assert np.array_equal(packets.messages[field.name], messages.messages[field.name]), field.name
    for name in TIMES:
        apart = packets.messages[name] - messages.messages[name]
        known = np.abs(apart[np.abs(apart) < 1 << 60])
        # Now and then a busy machine does something else between two captures' stamps of a packet.
        assert np.mean(known >= 5_000_000) <= 0.05, name


@pytest.mark.parametrize("way", [("--hook", "tcx"), ("--hook", "xdp"), ("--backend", "afpacket")], ids=str)
@pytest.mark.parametrize("case", ["nccl", "gloo"])
def test_the_same_messages_as_from_packets(
    pair: Pair, request: pytest.FixtureRequest, tmp_path: Path, way: tuple[str, str], case: str
) -> None:
    files = request.getfixturevalue(case)
    packets, messages = tmp_path / "x.pcapng", tmp_path / "x.dpuflow"
    with (
        pair.capturing(pair.b, "-i", "east", "-w", str(packets), "--protocol", "any"),
        pair.capturing(
            pair.b, "-i", "east", "-w", str(messages), "--protocol", "any", "--mode", "messages", *way
        ),
    ):
        sent = pair.send(pair.a, "west", *files, rate=30000)
    folded = ingest([str(messages)])
    assert folded.info.packets == sent
    assert folded.info.lost_packets == 0
    same_messages(ingest([str(packets)]), folded)


@pytest.mark.parametrize(
    "case", ["nccl-net-loss-n4-128k", "net-ecn-n3-96k", "ar-ring-n2-256k-ucx-random", "perftest-read-bw"]
)
def test_with_losses_marks_and_reads(pair: Pair, shared: Path, tmp_path: Path, case: str) -> None:
    packets, messages = tmp_path / "x.pcapng", tmp_path / "x.dpuflow"
    with (
        pair.capturing(pair.b, "-i", "east", "-w", str(packets)),
        pair.capturing(pair.b, "-i", "east", "-w", str(messages), "--mode", "messages") as capture,
    ):
        pair.send(pair.a, "west", shared / "captures" / "roce" / case / "node1.pcap.gz", rate=30000)
    assert " folded" in capture.said
    same_messages(ingest([str(packets)]), ingest([str(messages)]))


def as_v1(frame: bytes) -> bytes:
    """A RoCEv2 packet over IPv4 as RoCEv1 has it: a GRH in place of IP and UDP, GIDs made of addresses."""
    if frame[12:14] != b"\x08\x00" or frame[23] != 17 or frame[36:38] != b"\x12\xb7":
        return frame
    gids = b"".join(bytes(10) + b"\xff\xff" + frame[at : at + 4] for at in (26, 30))
    bth = frame[42:]
    grh = bytes([0x60, 0, 0, 0]) + len(bth).to_bytes(2, "big") + bytes([0x1B, 64]) + gids
    return frame[:12] + b"\x89\x15" + grh + bth


@pytest.mark.parametrize("way", [("--hook", "tcx"), ("--hook", "xdp")], ids=str)
def test_rocev1_is_folded_as_v2_is(
    pair: Pair, nccl: list[Path], tmp_path: Path, way: tuple[str, str]
) -> None:
    packets, messages = tmp_path / "x.pcapng", tmp_path / "x.dpuflow"
    source = pcap_of([as_v1(frame) for frame in frames(nccl[0])], tmp_path / "v1.pcap.gz")
    with (
        pair.capturing(pair.b, "-i", "east", "-w", str(packets)),
        pair.capturing(pair.b, "-i", "east", "-w", str(messages), "--mode", "messages", *way) as capture,
    ):
        pair.send(pair.a, "west", source, rate=30000)
    folded = re.search(r"([\d,]+) folded", capture.said)
    assert folded is not None
    assert int(folded[1].replace(",", "")) > 5000
    same_messages(ingest([str(packets)]), ingest([str(messages)]))


@pytest.mark.parametrize("mode", ["packets", "messages"])
def test_a_kill_loses_the_last_second_at_most(
    pair: Pair, nccl: list[Path], tmp_path: Path, mode: str
) -> None:
    """What came more than a second before SIGKILL is in a file that is read, and said not to have ended."""
    path = tmp_path / ("x.dpuflow" if mode == "messages" else "x.pcapng.zst")
    left = Path(journal_of(str(path))) if mode == "messages" else path
    options = ("-i", "east", "-w", str(path), "--protocol", "any", "--mode", mode)
    with pair.capturing(pair.b, *options) as capture:
        before = pair.send(pair.a, "west", *nccl, rate=30000)
        time.sleep(2.2)  # two looks: the second one ends runs that had not yet stood long enough at the first
        end = time.monotonic() + 60
        while ingest([str(left)]).info.packets < before and time.monotonic() < end:
            time.sleep(0.1)  # on a slow machine, looks are late
        after = pair.send(pair.a, "west", *nccl, rate=30000)
        assert capture.end(signal.SIGKILL, settle_s=0) == -signal.SIGKILL
    assert mode == "packets" or not path.exists()
    info = ingest([str(left)]).info
    assert before <= info.packets <= before + after
    assert info.lost_packets == 0
    assert not info.complete
    assert info.warnings


def test_nothing_but_the_column_file_is_left(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    with pair.capturing(pair.b, "-i", "east", "-w", str(tmp_path / "x.dpuflow"), "--mode", "messages"):
        pair.send(pair.a, "west", *nccl)
    assert [file.name for file in tmp_path.iterdir()] == ["x.dpuflow"]


@pytest.mark.parametrize("lacks", ["locks of user space", "atomic operations"])
@pytest.mark.parametrize("ordered", [1, 0])
def test_kernels_that_can_do_less_fold_as_well(
    pair: Pair, nccl: list[Path], monkeypatch: pytest.MonkeyPatch, lacks: str, ordered: int
) -> None:
    """Linux 6.1 and before refuse the program that ends runs from elsewhere; before 5.12, on arm64 before
    5.18, operations by which runs are held, and records published where stores are reordered."""
    load, taken = libbpf.Loaded.__init__, []

    def refuse(
        self: libbpf.Loaded, path: Path, names: tuple[str, ...], settings: np.ndarray, *more: object
    ) -> None:
        if place.FLUSH in names if lacks == "locks of user space" else settings["atomic"]:
            self._object = None
            raise DpuflowError("the kernel refused the eBPF program")
        taken.append((int(settings["atomic"][0]), int(settings["cell_mask"][0]) > 0))
        load(self, path, names, settings, *more)  # type: ignore[arg-type]

    def of_such_a_processor(self: Ring, settings: np.ndarray) -> None:
        settings["cell_mask"], settings["ordered"] = self.cell_size - 1, ordered

    monkeypatch.setattr(libbpf.Loaded, "__init__", refuse)
    monkeypatch.setattr(Ring, "set", of_such_a_processor)
    with inside(pair.b):
        capture = LiveCapture(LiveOptions(("east",), protocols=("any",), mode="messages"))
        try:
            sent = pair.send(pair.a, "west", *nccl)
            for _ in capture.pieces(duration_s=0.3):
                pass
        finally:
            capture.close()
    assert taken == [(1, True) if lacks == "locks of user space" else (0, ordered == 1)]
    summary = capture.summary()
    assert summary.counters[0]["folded"] > 5000
    assert summary.status.packets == summary.counters[0]["seen"] == sent


@pytest.mark.parametrize("atomic", [1, 0])
def test_a_flow_on_two_cpus_at_a_time_is_folded_without_loss(
    pair: Pair, nccl: list[Path], monkeypatch: pytest.MonkeyPatch, atomic: int
) -> None:
    """Each run is one CPU's at a time: every packet is in one run, or in the ring as it is."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU alone")
    monkeypatch.setattr(place, "_allow", lambda settings, _: settings.__setitem__("atomic", atomic))
    command = [sys.executable, str(HERE / "send.py"), "west", "0", *map(str, nccl * 3)]
    with inside(pair.b):
        capture = LiveCapture(LiveOptions(("east",), protocols=("any",), mode="messages"))
        try:
            senders = [
                pair.start(pair.a, "taskset", "-c", str(cpu), *command, stdout=-1)
                for cpu in sorted(os.sched_getaffinity(0))[:2]
            ]

            def over() -> bool:
                if any(sender.poll() is None for sender in senders):
                    return False
                until_passed_on()
                return True

            for _ in capture.pieces(duration_s=300, stopped=over):
                pass
            sent = sum(int(sender.communicate()[0]) for sender in senders)
        finally:
            capture.close()
    (counters,) = capture.summary().counters
    assert counters["ring_full"] == counters["unreadable"] == 0
    assert capture.summary().status.packets == counters["captured"] + counters["folded"] == sent
