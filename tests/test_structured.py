"""NCCL's collectives, told from the structure of scripted traffic whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from synth_worlds import loop

import dpuflow
from dpuflow.analysis import analyze_tables
from dpuflow.ingest import ingest
from dpuflow.matching import Job, build_collectives
from dpuflow.matching.model import Instance
from dpuflow.matching.streams import columns_of
from dpuflow.matching.structured import _merged
from dpuflow.schema.rows import EXCHANGE, NEVER, Op
from dpuflow.synth.case import write_case

if TYPE_CHECKING:
    from dpuflow.results import Analysis


def analysed(folder: Path, op: str, more: str = "", iterations: int = 12) -> tuple[Analysis, int]:
    """The result for a loop of the operation ``op``, and how many collectives there truly were."""
    captures = write_case(loop(op, more + "\nobservation: {compress: false}\n", iterations), str(folder))
    files = sorted(str(folder / capture.name) for capture in captures)
    truth = json.loads((folder / "truth.json").read_text())["collectives"]
    return dpuflow.analyze([dpuflow.Vantage(file, (file,)) for file in files]), len(truth)


@pytest.mark.parametrize(
    ("nodes", "channels", "size", "protocol"),
    [
        (5, 4, 2153220, "simple"),  # the last block lacks 3 times 16 bytes
        (6, 4, 73800, "ll"),  # two rounds of a block of 9568 bytes, one of 9504
        (4, 2, 30352, "ll"),
        (5, 2, 83960, "simple"),  # second slices of no bytes
        (2, 2, 157936, "simple"),  # two ranks: nothing but time tells it from all_gathers
    ],
)
def test_uneven_rings(tmp_path: Path, nodes: int, channels: int, size: int, protocol: str) -> None:
    """NCCL rounds all blocks but the last up to 16 bytes."""
    more = f"cluster: {{nodes: {nodes}}}\nnccl: {{channels: {channels}}}"
    op = f"op: all_reduce, algorithm: ring, protocol: {protocol}, bytes: {size}"
    result, true = analysed(tmp_path, op, more)
    assert len(result.collectives) == true
    assert {(c.op, c.algorithm) for c in result.collectives} == {("all_reduce", "ring")}
    assert {c.bytes for c in result.collectives} == {size}  # of data: LL puts a flag beside every four bytes


def test_jobs_one_after_the_other_with_other_peers_are_two(tmp_path: Path) -> None:
    """One node's real capture, and half a minute later the same with another rank beside it."""
    capture = Path(__file__).parents[1] / "traces" / "nccl-allreduce-n2" / "node0.pcap.gz"
    first = analyze_tables([ingest([str(capture)], "node0", 0)])
    then = first.exchanges.copy()
    other = next(each for each in (0, 1) if [each] not in first.joined.local)
    for name in ("src", "dst"):
        then[name][then[name] == other] = 2
    for name in then.dtype.names or ():
        if name.endswith("_ns"):
            then[name][then[name] != NEVER] += 30_000_000_000
    then["connection"] += first.exchanges["connection"].max() + 1
    found = build_collectives(
        Job(np.concatenate([first.exchanges, then]), np.arange(3), frozenset(first.joined.local[0]))
    )
    assert {(i.op, len(i.order)) for i in found} == {(Op.ALL_REDUCE, 2)}
    assert len(found) == 2 * len(first.instances) == 60


def test_ll128_does_not_tell_the_size_of_its_data(tmp_path: Path) -> None:
    """Of 2048 bytes up to 1920 are data: the last line of every message need not be full."""
    size = 1 << 20
    result, true = analysed(tmp_path, f"op: all_reduce, algorithm: ring, protocol: ll128, bytes: {size}")
    assert len(result.collectives) == true
    assert {c.algorithm for c in result.collectives} == {"ring"}
    assert {c.bytes for c in result.collectives} == {None}
    assert all(c.wire_bytes > 2 * size for c in result.collectives)


@pytest.mark.parametrize("qps", [2, 4])
def test_queue_pairs_that_share_a_connection(tmp_path: Path, qps: int) -> None:
    """Messages are dealt out to them in turn; they are one stream, and its credits are of the first."""
    more = f"cluster: {{nodes: 4}}\nnccl: {{channels: 2, qps_per_connection: {qps}}}"
    result, true = analysed(tmp_path, "op: all_reduce, algorithm: ring, bytes: 1048576", more)
    found = [(c.op, c.algorithm, c.bytes) for c in result.collectives]
    assert found == [("all_reduce", "ring", 1048576)] * true


def test_who_waits_for_the_credit_of_a_slow_host_is_not_exact(tmp_path: Path) -> None:
    """Slices that stream show no reactions; that the others' credits came before they left tells enough."""
    more = """
cluster: {nodes: 5}
nccl: {channels: 2}
faults: [{kind: slow_host, rank: 4, us: 300}]
"""
    result, true = analysed(tmp_path, "op: reduce_scatter, bytes: 2628900", more)
    assert len(result.collectives) == true
    for collective in result.collectives[2:]:
        told = {rank.endpoint: rank.bound for rank in collective.ranks}
        assert told[3] != "exact"  # it could not send before rank 4 let it
    verdicts = {row.endpoint: row.verdict for row in result.lateness}
    assert verdicts[3] not in ("late", "intermittent")


def test_channels_that_carry_parts_of_different_size(tmp_path: Path) -> None:
    """Each edge may use its channels in another order: sizes tell which connections belong together."""
    result, true = analysed(
        tmp_path, "op: broadcast, bytes: 538576", "cluster: {nodes: 4}\nnccl: {channels: 2}"
    )
    assert [(c.op, c.algorithm, c.bytes) for c in result.collectives] == [
        ("broadcast", "chain", 538576)
    ] * true


def test_entries_that_wait_for_the_next_operation_join_nothing() -> None:
    """A small operation uses one channel; the other's entries for the next one are out before it begins."""
    exchanges = np.zeros(3, EXCHANGE.dtype)
    for name in ("offer_ns", "grant_ns", "data_ns", "data_end_ns", "arrived_end_ns"):
        exchanges[name] = NEVER
    exchanges["grant_ns"] = [0, 200, 10]
    exchanges["data_ns"] = [100, 300, 310]
    exchanges["data_end_ns"] = exchanges["arrived_end_ns"] = exchanges["data_ns"] + 50

    def part(row: int, size: int) -> Instance:
        return Instance(np.array([row]), Op.ALL_REDUCE, [0, 1], None, [], None, size)

    channels = [[part(0, 8), part(1, 64)], [part(2, 64)]]
    merged = _merged(channels, exchanges, columns_of(exchanges))
    assert [i.size for i in merged] == [8, 128]
