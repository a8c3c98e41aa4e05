"""Messages mode: the kernel folds, and what is told apart in the end is the same as from packets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from network import Pair

from dpuflow.ingest import ingest
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
