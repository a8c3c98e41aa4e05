"""NCCL's captures that begin and end in mid-job: what is whole in them is read, nothing is invented."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from synth_worlds import loop, settings

import dpuflow
from bench.accuracy.midjob import Span, cut
from dpuflow.exchanges.build import build_exchanges
from dpuflow.ingest import ingest
from dpuflow.schema.rows import NEVER, NONE32, TRANSFER, Role, Wire
from dpuflow.synth.case import write_case
from dpuflow.synth.observe import epoch_ns
from dpuflow.synth.scenario import Scenario, parse_scenario

TRACES = Path(__file__).resolve().parents[1] / "traces"
SLOT = 1 << 20
LATE = "faults: [{kind: gpu_late, rank: 2, us: 300}]"


# -- which entry pays for which data ------------------------------------------------------------


def connection(slots: int, random: Random, apart: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one direction in order of time, and the number of each one's message from 1; a receiver with
    ``slots`` grants one again when it has emptied it. ``apart``: seen at its own node, and 400 ns later."""
    count, way = 120, 400 * apart
    granted, sent, arrived = np.zeros((3, count), np.int64)
    emptied = 0
    for k in range(count):
        free = 0 if k < slots else arrived[k - slots] + random.choice((10, 700, 3000))
        granted[k] = max(free, granted[k - 1] + 1 if k else 1, emptied)
        sent[k] = max(granted[k] + 401, sent[k - 1] + 50 if k else 0) + random.choice((0, 200, 2500))
        arrived[k] = sent[k] + 450
    rows = TRANSFER.zeros(2 * count)
    number = np.tile(np.arange(1, count + 1), 2)
    rows["role"] = np.repeat([Role.GRANT, Role.DATA], count)
    rows["wire"] = np.repeat([Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM], count)
    rows["connection"], rows["packets"], rows["seen"], rows["acked_ns"] = 3, 1, 3, NEVER
    rows["src"], rows["dst"] = np.repeat([1, 0], count), np.repeat([0, 1], count)
    rows["va"] = (1 << 40) + (number - 1) % slots * SLOT
    rows["announces"][:count], rows["sub"][:count] = SLOT, number[:count]
    rows["bytes"][count:] = 4096
    rows["sent_ns"] = np.r_[granted, sent]
    rows["sent_end_ns"] = rows["sent_ns"]
    rows["arrived_ns"] = rows["arrived_end_ns"] = np.r_[granted + way, sent + way]
    order = np.argsort(rows["sent_ns"], kind="stable")
    return rows[order], number[order]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("slots", [2, 4, 8])
@pytest.mark.parametrize("seed", range(12))
def test_entries_pay_for_data_as_before_the_capture_began(seed: int, slots: int, apart: bool) -> None:
    random = Random(seed)
    rows, number = connection(slots, random, apart)
    begin = random.randrange(1, 120)
    rows, number = rows[begin:], number[begin:]
    found = build_exchanges(rows)
    both = found[(found["grant"] != NONE32) & (found["data"] != NONE32)]
    assert (number[both["grant"]] == number[both["data"]]).all()
    grants = set(number[rows["role"] == Role.GRANT].tolist())
    data = set(number[rows["role"] == Role.DATA].tolist())
    assert len(both) == len(grants & data)
    alone = found[found["grant"] == NONE32]
    assert sorted(number[alone["data"]].tolist()) == sorted(data - grants)
    assert (alone["sub"] == number[alone["data"]]).all()  # the numbers of entries that nobody saw
    order = np.argsort(found["order"])
    assert (np.diff(found["sub"][order].astype(np.int64)) == 1).all()


@pytest.mark.parametrize("seed", range(12))
def test_without_addresses_no_entry_comes_behind_its_data(seed: int) -> None:
    """As in old column files: the smallest shift that the times allow, so that credits come no sooner."""
    random = Random(seed)
    rows, number = connection(4, random, apart=True)
    begin = random.randrange(1, 120)
    rows, number = rows[begin:], number[begin:]
    rows["va"][rows["role"] == Role.GRANT] = 0
    found = build_exchanges(rows)
    both = found[(found["grant"] != NONE32) & (found["data"] != NONE32)]
    assert (both["grant_arrived_ns"] <= both["data_ns"]).all()
    assert (number[both["grant"]] >= number[both["data"]]).all()


def test_data_goes_where_entries_announce() -> None:
    """NCCL's own net_ib, captured: the i-th entry announces the address of the i-th data."""
    tables = ingest([str(TRACES / "nccl-allreduce-n2" / "node0.pcap.gz")], "node0")
    rows, flows = tables.messages, tables.flows
    entries = np.flatnonzero(rows["role"] == Role.GRANT)
    assert len(entries)
    for flow in np.unique(rows["flow"][entries]):
        granted = rows[entries[rows["flow"][entries] == flow]]
        data = rows[(rows["flow"] == flows["peer"][flow]) & (rows["wire"] == Wire.ROCE_WRITE_IMM)]
        granted, data = np.sort(granted, order="seq"), np.sort(data, order="seq")
        assert len(granted) == len(data)
        assert granted["va"].tolist() == data["va"].tolist()


# -- what becomes of operations -----------------------------------------------------------------


def analysed(scenario: Scenario, folder: Path, shares: list[tuple[float, float]]) -> dpuflow.Analysis:
    """The scenario, each node's capture cut to a share of the job."""
    captures = write_case(scenario, str(folder))
    rows = json.loads((folder / "truth.json").read_text())["collectives"]
    first = min(time for row in rows for time in row["enter_ns"] if time is not None)
    last = max(time for row in rows for time in row["leave_ns"] if time is not None)
    spans: list[Span] = [
        (first + round(a * (last - first)), first + round(b * (last - first))) for a, b in shares
    ]
    cut(folder, captures, epoch_ns(scenario), spans)
    return dpuflow.analyze([dpuflow.Vantage(each.name, (str(folder / each.name),)) for each in captures])


def rings(more: str = "") -> Scenario:
    return loop(
        "op: all_reduce, bytes: 4MiB", settings(observation={"compress": False}) + more, iterations=18
    )


WHERE = {
    "together": [(0.33, 0.66)] * 4,
    "last fifth": [(0.8, 1.1)] * 4,
    "apart": [(0.2, 0.8), (0.31, 0.75), (0.25, 0.9), (0.28, 0.71)],
    "one later": [(-0.1, 1.1), (0.4, 1.1), (-0.1, 1.1), (-0.1, 1.1)],
}


@pytest.mark.parametrize("where", WHERE)
def test_whole_operations_are_dated(where: str, tmp_path: Path) -> None:
    analysis = analysed(rings(LATE), tmp_path, WHERE[where])
    whole = [c for c in analysis.collectives if c.complete]
    assert len(whole) >= (2 if where == "last fifth" else 4)
    assert {(str(c.op), c.bytes, len(c.ranks)) for c in whole} == {("all_reduce", 4 << 20, 4)}
    late = next(end.id for end in analysis.endpoints if end.address.endswith(".3"))
    assert {max(c.ranks, key=lambda rank: rank.lateness_ns or 0).endpoint for c in whole} == {late}
    if where != "one later":
        assert {str(rank.bound) for c in whole for rank in c.ranks} == {"exact"}


OTHERS = {
    "tree": ("op: all_reduce, bytes: 2MiB, algorithm: tree", "", ("all_reduce", 2 << 20)),
    "chain": ("op: broadcast, bytes: 1MiB, root: 1", "", ("broadcast", 1 << 20)),
    "pat": ("op: all_gather, bytes: 300KiB, algorithm: pat", "", ("all_gather", 300 << 10)),
    "ll": ("op: all_reduce, bytes: 24KiB, protocol: ll", "", ("all_reduce", 24 << 10)),
    "all_to_all": ("op: all_to_all, bytes: 1MiB", "", ("all_to_all", 1 << 20)),
    "queue pairs": (
        "op: all_reduce, bytes: 1MiB",
        "nccl: {qps_per_connection: 2, channels: 4}\n",
        ("all_reduce", 1 << 20),
    ),
    "adaptive": ("op: all_reduce, bytes: 1MiB", "nccl: {adaptive_routing: true}\n", ("all_reduce", 1 << 20)),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("where", ["together", "apart"])
def test_nothing_is_invented(kind: str, where: str, tmp_path: Path) -> None:
    op, more, told = OTHERS[kind]
    scenario = loop(op, settings(observation={"compress": False}) + more, iterations=18)
    collectives = analysed(scenario, tmp_path, WHERE[where]).collectives
    whole = Counter((str(c.op), c.bytes, len(c.ranks)) for c in collectives if c.complete)
    assert set(whole) == {(*told, 4)}
    assert whole[(*told, 4)] >= 4


def test_several_communicators(tmp_path: Path) -> None:
    text = """
name: parallel
cluster: {nodes: 6}
observation: {compress: false}
job: {kind: training, tp: 2, steps: 12, layers: 2, buckets: 2, bucket_bytes: 3145728}
"""
    scenario = parse_scenario(text, "parallel.yaml")
    collectives = analysed(scenario, tmp_path, [(0.3, 0.8)] * 6).collectives
    whole = Counter((str(c.op), c.bytes, len(c.ranks)) for c in collectives if c.complete)
    assert {(ranks, op) for op, _, ranks in whole} == {(2, "all_reduce"), (3, "all_reduce")}
    assert whole["all_reduce", 3145728, 3] >= 12
