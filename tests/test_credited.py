"""NCCL's rings, from whole captures of scripted jobs: chunks that do not divide, loops, protocols."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.matching import Job
from dpuflow.matching.buffers import RING_SLOT
from dpuflow.matching.credited import Lockstep, Pipe, connections_of, credited_instances
from dpuflow.matching.reading import Reading
from dpuflow.matching.streams import Columns
from dpuflow.schedules.graph import dependencies
from dpuflow.schedules.nccl import looped_ring
from dpuflow.schema.rows import EXCHANGE, NEVER, Op
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

ONE = settings(nccl={"channels": 1})


@pytest.mark.parametrize(
    ("op", "more", "told"),
    [
        # The last of four chunks is shorter: 1000000 is no multiple of 64.
        ("op: all_reduce, bytes: 1000000", ONE, ("all_reduce", 1_000_000)),
        # 16 bytes a chunk: the last two of eight are empty.
        (
            "op: all_reduce, bytes: 96",
            settings(nccl={"channels": 1}, cluster={"nodes": 8}),
            ("all_reduce", 96),
        ),
        # Two loops on each channel.
        ("op: all_reduce, bytes: 20000000", "", ("all_reduce", 20_000_000)),
        # Messages in turn over several queue pairs, clear-to-send entries on one of them.
        *(
            (
                f"op: all_reduce, bytes: {size}",
                settings(nccl={"qps_per_connection": qps}),
                ("all_reduce", size),
            )
            for qps, size in ((2, 1_000_000), (3, 999_996))
        ),
        ("op: all_gather, bytes: 9000000", "", ("all_gather", 9_000_000)),
        ("op: all_reduce, bytes: 145488, protocol: ll", ONE, ("all_reduce", 145_488)),
        # LL cannot tell 4 bytes from 8.
        ("op: all_reduce, bytes: 145484, protocol: ll", ONE, ("all_reduce", 145_488)),
    ],
)
def test_ring_of_nccl(op: str, more: str, told: tuple[str, int], tmp_path: Path) -> None:
    captures = write_case(loop(op, more, iterations=6), tmp_path)
    vantages = [dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures]
    collectives = dpuflow.analyze(vantages).collectives
    assert Counter((str(c.op), c.bytes) for c in collectives) == {told: 6}


SHARDED = """
name: sharded
cluster: {{nodes: {nodes}}}
job:
  kind: loop
  iterations: 6
  compute_us: {pause}
  ops:
    - {{op: all_gather, bytes: {block}, algorithm: pat}}
    - {{op: reduce_scatter, bytes: {buffer}, algorithm: pat, gap_us: {pause}}}
"""


@pytest.mark.parametrize(
    ("nodes", "block", "pause"), [(4, 1 << 20, 0), (4, 307_200, 500), (6, 262_144, 0), (8, 307_200, 0)]
)
def test_two_operations_that_take_turns_are_not_one(
    nodes: int, block: int, pause: int, tmp_path: Path
) -> None:
    """As in sharded training: as many messages on connections that lead opposite ways."""
    text = SHARDED.format(nodes=nodes, block=block, buffer=block * nodes, pause=pause)
    write_case(parse_scenario(text, "sharded.yaml"), str(tmp_path))
    collectives = _analysed(tmp_path).collectives
    told = Counter((str(c.op), c.bytes, len(c.ranks)) for c in collectives)
    assert told == {("all_gather", block, nodes): 6, ("reduce_scatter", block * nodes, nodes): 6}


@pytest.mark.parametrize(("nodes", "gpus", "block"), [(4, 1, 307_200), (3, 2, 307_200), (4, 1, 4 << 20)])
def test_rings_that_gather_and_scatter_in_turns(nodes: int, gpus: int, block: int, tmp_path: Path) -> None:
    """As in sharded training: the same messages on the same connections, told apart by what is passed on."""
    n = nodes * gpus
    ops = f"op: all_gather, bytes: {block}}}, {{op: reduce_scatter, bytes: {block * n}, gap_us: 200"
    more = settings(cluster={"nodes": nodes, "gpus_per_node": gpus}, nccl={"channels": 2 * gpus})
    write_case(loop(ops, more, iterations=6), tmp_path)
    collectives = _analysed(tmp_path).collectives
    told = Counter((str(c.op), c.bytes, tuple(map(str, c.op_alternatives))) for c in collectives)
    assert told == {("all_gather", block, ()): 6, ("reduce_scatter", block * n, ()): 6}


PARALLEL = """
name: parallel
cluster: {nodes: 6}
job: {kind: training, tp: 2, steps: 6, layers: 2, buckets: 2, bucket_bytes: 3145728}
"""


@pytest.mark.parametrize("faults", ["", "faults: [{kind: slow_link, node: 3, gbps: 10}]"])
def test_communicators_with_as_many_messages(faults: str, tmp_path: Path) -> None:
    """96 on each connection: 24 all_reduces of two ranks, or 12 of three."""
    write_case(parse_scenario(PARALLEL + faults, "parallel.yaml"), str(tmp_path))
    analysis = _analysed(tmp_path)
    told = Counter((str(c.op), c.bytes, len(c.ranks)) for c in analysis.collectives)
    assert told == {("all_reduce", 1 << 20, 2): 72, ("all_reduce", 3 << 20, 3): 24}
    assert {str(rank.verdict) for rank in analysis.lateness} <= {"on_time", "unknown"}


def _analysed(case: Path) -> dpuflow.Analysis:
    vantages = [dpuflow.Vantage(each.name, (str(each),)) for each in sorted(case.glob("node*"))]
    return dpuflow.analyze(vantages)


def test_a_later_loop_waits_for_the_one_before() -> None:
    twice = looped_ring(Op.ALL_GATHER, 2)
    needs = dict(dependencies(twice, 3))
    # Each rank sends two chunks a loop; its third send needs the second one that it received.
    assert needs[(0, 1), 2] == ((2, 0), 1)
    assert ((0, 1), 0) not in needs


def test_a_small_operation_on_one_channel_between_large_ones_on_two() -> None:
    """Channel 0 sends first in each operation, so alone it would look like the next one as well."""
    n, messages = 3, 8  # an all_reduce of one loop: 2 (n - 1) chunks of two slices
    sizes: list[int] = []
    starts: list[int] = []

    def channel(ops: list[tuple[int, int]], delay: int) -> Lockstep:
        pipes, rows = [], []
        for rank in range(n):
            mine = np.arange(len(sizes), len(sizes) + len(ops) * messages)
            for begin, size in ops:
                sizes.extend(
                    [size, size if size > 32768 else 0] * (messages // 2)
                )  # slices of 32 KiB or more
                starts.extend(range(begin + rank + delay, begin + 100 * messages, 100))
            slots = np.full(len(mine), RING_SLOT)
            pipes.append(Pipe(rank, (rank + 1) % n, mine, 1, np.ones(len(mine), bool), slots))
            rows.append(mine)
        bounds = messages * np.arange(len(ops) + 1)
        return Lockstep(pipes, np.stack(rows), bounds, np.full(len(ops), RING_SLOT))

    sets = [
        channel([(0, 65536), (10_000, 65536), (30_000, 65536)], 5),
        channel([(0, 65536), (10_000, 65536), (20_000, 64), (30_000, 65536)], 0),
    ]
    start = np.array([*starts, 0])
    columns = Columns(np.array([*sizes, -1]), start, start + 20, np.zeros(len(start), np.uint32))
    found = Reading(_job(columns, np.arange(n)), sets).instances()
    told = sorted((int(start[i.rows].min()), i.size) for i in found)
    large, small = 2 * n * 2 * 65536, n * 64  # channels, chunks, slices
    assert told == [(0, large), (10_000, large), (20_000, small), (30_000, large)]


def _job(columns: Columns, nodes: np.ndarray) -> Job:
    """A job of which nothing but columns is known."""
    job = Job(EXCHANGE.zeros(0), np.arange(len(nodes)), places=nodes)
    vars(job)["columns"] = columns
    return job


def test_few_connections_whose_receivers_are_slow() -> None:
    """Four connections, one message in six looks like the first one of an operation: pairs of them share by
    chance as many places as there are operations, and only all together show these."""
    n, operations, messages = 4, 17, 60  # five loops of 2 (n - 1) chunks of two slices
    random = np.random.default_rng(0)
    count = operations * messages
    size = np.full(messages, RING_SLOT)
    size[-2 * 2 * (n - 1) :] = 65536
    begins = random.random((n, count)) < 1 / 6
    begins[:, ::messages] = True
    exchanges = EXCHANGE.zeros(n * count)
    rows = exchanges.reshape(count, n)
    rows["src"], rows["dst"] = np.arange(n), (np.arange(n) + 1) % n
    rows["connection"] = np.arange(n)
    rows["order"] = np.arange(count)[:, None]
    rows["sub"] = 1 + np.arange(count)[:, None]
    rows["bytes"] = np.tile(size, operations)[:, None]
    start = 1_000_000 + 1000 * np.arange(count)[:, None]
    rows["data_ns"] = rows["data_end_ns"] = start
    rows["arrived_ns"] = rows["arrived_end_ns"] = start + 100
    rows["grant_ns"] = rows["grant_arrived_ns"] = np.where(begins.T, start - 800, start - 1000)
    rows["offer_ns"] = rows["acked_ns"] = rows["taken_ns"] = NEVER
    every = np.arange(n * count)
    found, told = credited_instances(
        Job(exchanges, np.arange(n)),
        connections_of(exchanges, every),
        np.full(len(exchanges), RING_SLOT),
    )
    assert told.all()
    assert Counter((i.op, i.size, len(i.rows)) for i in found) == {
        (Op.ALL_REDUCE, 8 * (4 * RING_SLOT + 65536), n * messages): operations
    }


def _sets(
    ops: list[list[tuple[int, int, int]]], ends: list[list[tuple[int, int]]], more: dict[int, list[int]]
) -> tuple[Columns, list[Lockstep]]:
    """Sets in lockstep: for each its operations as (begin, messages, size) and the pairs of its connections.

    ``more``: for a set further messages with which an operation seems to begin. A message each 100 ns.
    """
    sizes: list[int] = []
    starts: list[int] = []
    sets = []
    for number, (mine, pairs) in enumerate(zip(ops, ends, strict=True)):
        total = sum(messages for _, messages, _ in mine)
        pipes = []
        for src, dst in pairs:
            rows = np.arange(len(sizes), len(sizes) + total)
            for begin, messages, size in mine:
                sizes.extend([size] * messages)
                starts.extend(range(begin + src, begin + src + 100 * messages, 100))
            slots = np.full(total, RING_SLOT)
            pipes.append(Pipe(src, dst, rows, 1, np.ones(total, bool), slots))
        true = np.cumsum([0, *(messages for _, messages, _ in mine)]).tolist()
        bounds = np.unique([*true, *more.get(number, [])])
        every = np.stack([pipe.rows for pipe in pipes])
        sets.append(Lockstep(pipes, every, bounds, np.full(len(bounds) - 1, RING_SLOT)))
    start = np.array([*starts, 0])
    return Columns(np.array([*sizes, -1]), start, start + 20, np.zeros(len(start), np.uint32)), sets


def test_a_part_of_an_operation_is_none_of_fewer_ranks() -> None:
    """30 messages of an all_gather of 16 ranks; three times ten are as many as three of six ranks have."""
    ops = [(10_000 * k, 30, 65536) for k in range(6)]
    columns, sets = _sets([ops], [[(0, 1), (1, 0)]], {0: [70, 80]})
    found = Reading(_job(columns, np.arange(2)), sets).instances()
    assert Counter((i.op, i.size, i.placement.ranks, len(i.rows)) for i in found) == {
        (Op.ALL_GATHER, 131_072, 16, 60): 6
    }
