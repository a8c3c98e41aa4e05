"""Messages mode: the kernel folds, and what is told apart in the end is the same as from packets."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from network import Pair, inside
from send import frames
from test_filters_live import pcap_of

from dpuflow.errors import DpuflowError
from dpuflow.ingest import ingest
from dpuflow.live import libbpf, place
from dpuflow.live.capture import LiveCapture
from dpuflow.live.options import LiveOptions
from dpuflow.live.record import journal_of
from dpuflow.schema import MESSAGE
from dpuflow.tables import CaptureTables

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
        assert np.abs(apart[np.abs(apart) < 1 << 60]).max() < 5_000_000, name


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


def test_runs_end_where_programs_of_user_space_may_not_lock(
    pair: Pair, nccl: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Linux 6.1 and before, where the kernel refuses the program that ends runs elsewhere."""
    load = libbpf.Loaded.__init__

    def refuse(self: libbpf.Loaded, path: Path, names: tuple[str, ...], *more: object) -> None:
        if place.FLUSH in names:
            self._object = None
            raise DpuflowError("sleepable progs cannot use bpf_spin_lock yet")
        load(self, path, names, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(libbpf.Loaded, "__init__", refuse)
    with inside(pair.b):
        capture = LiveCapture(LiveOptions(("east",), protocols=("any",), mode="messages"))
        try:
            sent = pair.send(pair.a, "west", *nccl)
            for _ in capture.pieces(duration_s=0.3):
                pass
        finally:
            capture.close()
    summary = capture.summary()
    assert summary.counters[0]["folded"] > 5000
    assert summary.status.packets == summary.counters[0]["seen"] == sent
