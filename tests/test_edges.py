"""Clock-free differences of lateness: they need no common clock, agree with one, and find a wrong one."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dpuflow.entries import Entries, build_entries, weigh
from dpuflow.exchanges.build import build_exchanges
from dpuflow.identity.endpoints import endpoint_ranks, rank_order, seen_whole
from dpuflow.ingest import ingest
from dpuflow.join import join
from dpuflow.matching import Instance, Job, build_collectives
from dpuflow.schema.rows import NEVER
from dpuflow.schema.tables import CaptureTables, Joined
from dpuflow.verdicts.edges import Measured, View, disagreements, measure_edges

TRACES = Path(__file__).resolve().parents[1] / "traces"


@cache
def captures(case: str) -> list[CaptureTables]:
    nodes = range(2 if "n2" in case else 4)
    return [ingest([str(TRACES / case / f"node{n}.pcap.gz")], f"node{n}", n, 1) for n in nodes]


def measured(
    tables: list[CaptureTables], clock: str = "auto"
) -> tuple[Joined, list[Instance], Entries, list[Measured]]:
    joined = join(deepcopy(tables), clock=clock)
    exchanges = build_exchanges(joined.transfers)
    position = rank_order(joined, endpoint_ranks(joined, None))
    instances = build_collectives(Job(exchanges, position, seen_whole(joined)))
    names = {tuple(sorted(i.order)): n for n, i in enumerate(instances)}
    group = np.array([names[tuple(sorted(i.order))] for i in instances])
    entries = weigh(build_entries(exchanges, instances), exchanges, joined, instances, group)
    return joined, instances, entries, measure_edges(joined, exchanges, instances, entries)


def shifted(tables: CaptureTables, by_ns: int) -> CaptureTables:
    tables = deepcopy(tables)
    for rows, names in (
        (tables.messages, ("first_ns", "last_ns", "acked_ns")),
        (tables.flows, ("first_ns", "last_ns")),
    ):
        for name in names:
            rows[name] += np.where(rows[name] == NEVER, 0, by_ns)
    tables.info.first_ns = (tables.info.first_ns or 0) + by_ns
    tables.info.last_ns = (tables.info.last_ns or 0) + by_ns
    return tables


CASES = ["gloo-allreduce-n4", "mpi-allreduce-n4", "nccl-allreduce-n2"]


@pytest.mark.parametrize("case", CASES)
def test_they_agree_with_the_common_clock(case: str) -> None:
    joined, _, entries, edges = measured(captures(case))
    assert len(edges) >= len(joined.local) // 2
    assert disagreements(joined, edges, entries) == []
    for edge, collective, _ in edges:
        rows = [
            entries.enter_ns[(entries.endpoint == end) & np.isin(entries.collective, collective)]
            for end in (edge.from_, edge.to)
        ]
        assert edge.error_ns is not None
        assert abs(float(np.median(rows[1] - rows[0])) - edge.median_ns) <= edge.error_ns


@pytest.mark.parametrize("case", CASES)
def test_they_do_not_depend_on_clocks(case: str) -> None:
    tables = captures(case)
    moved = [tables[0], *(shifted(t, 400_000_000 * n) for n, t in enumerate(tables[1:], 1))]
    usual = {(e.from_, e.to): e.median_ns for e, _, _ in measured(tables)[3]}
    found = {(e.from_, e.to): e.median_ns for e, _, _ in measured(moved, "estimate")[3]}
    assert found.keys() == usual.keys()
    # The slopes of estimated clocks are not exactly one.
    assert all(found[pair] == pytest.approx(usual[pair], abs=2_000) for pair in usual)


def test_a_clock_that_is_trusted_wrongly_is_found_out() -> None:
    tables = captures("gloo-allreduce-n4")
    moved = [shifted(t, 5_000_000) if n == 2 else t for n, t in enumerate(tables)]
    joined, _, entries, edges = measured(moved, "trust")
    for clock in joined.clocks:
        clock.error_ns = 0
    told = disagreements(joined, edges, entries)
    assert len(told) == 2
    for line in told:
        assert "node2" in line
        assert abs(float(line.split(" differ by ")[1].split(" us")[0])) == pytest.approx(5000, abs=100)


def test_one_capture_shows_its_own_edges() -> None:
    tables = captures("gloo-allreduce-n4")
    _, _, _, every = measured(tables)
    joined, _, _, edges = measured([tables[1]])
    usual = {(e.from_, e.to): e for e, _, _ in every}
    assert [(e.from_, e.to) for e, _, _ in edges] == [(1, 0), (1, 2)]
    assert joined.local == [[1]]
    for edge, _, _ in edges:
        other = usual[min(edge.from_, edge.to), max(edge.from_, edge.to)]
        sign = 1 if edge.from_ == other.from_ else -1
        assert edge.error_ns is not None
        assert other.error_ns is not None
        assert abs(edge.median_ns - sign * other.median_ns) <= edge.error_ns + other.error_ns


def test_no_collective_no_edge() -> None:
    joined = join(captures("gloo-allreduce-n4")[:2])
    nothing = build_exchanges(joined.transfers[:0])
    entries = build_entries(nothing, [])
    assert measure_edges(joined, nothing, [], entries) == []
    assert disagreements(joined, [], entries) == []


def test_the_error_holds_where_one_way_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues one way in all collectives but one: halved, the delay looks like a difference of lateness."""
    number = np.arange(9)
    there, back = np.where(number == 0, 10_000, 2_000_000), np.full(9, 10_000)
    views = {(0, 1): View(number, there), (1, 0): View(number, back)}
    monkeypatch.setattr("dpuflow.verdicts.edges._views", lambda *_: views)
    joined = join(captures("gloo-allreduce-n4")[:2])
    nothing = build_exchanges(joined.transfers[:0])
    (found,) = measure_edges(joined, nothing, [], build_entries(nothing, []))
    assert found.edge.error_ns is not None
    assert abs(found.edge.median_ns) <= found.edge.error_ns
