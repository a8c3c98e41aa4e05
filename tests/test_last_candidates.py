"""Captures at one rank of played worlds: when ranks that were only heard of are likely to have entered."""

from __future__ import annotations

import itertools

import pytest
from collective_worlds import World, algorithm_of, captured, run_job
from test_later_steps import MS, RING, one_node, seen_by
from test_upper import check_bounds, pointed, row_of

from dpuflow.entries import build_entries
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schedules.graph import depths
from dpuflow.schema.rows import Op
from dpuflow.verdicts import infer

GATHER = algorithm_of(Op.ALL_GATHER, "ring")
DOUBLING = algorithm_of(Op.ALL_REDUCE, "recursive_doubling")


@pytest.mark.parametrize("guilty", [0, 1, 3])
def test_the_step_at_which_a_gathering_ring_stalls_points_to_who_was_late(guilty: int) -> None:
    """Each step brings in a new rank: none is proved late, but the delay comes with one rank's data."""
    world = World()
    played = run_job(world, GATHER, 4096, list(range(4)), 20, late={guilty: 5 * MS})
    _, result = one_node(world, 0, 4)
    check_bounds(result, played)
    assert [pointed(result, number) for number in range(2, 20)] == [guilty] * 18
    if guilty == 1:  # behind rank 0, to whom it sends nothing
        assert {row_of(result, number, 1).bound for number in range(2, 20)} == {"at_most"}
        assert not [row for row in result.lateness if row.verdict in ("late", "intermittent")]
        assert not [finding for finding in result.findings if finding.condition == "straggler"]


def test_links_of_a_ring_count_its_steps() -> None:
    """What comes in a step has as many links behind it, whosever entry it is."""
    links = depths(RING, 3, 0)
    assert [dict(links[(2, 0), turn]) for turn in range(3)] == [{2: 0}, {2: 1, 1: 1}, {2: 2, 1: 2, 0: 2}]


def test_links_of_a_doubling_count_a_ranks_own_steps() -> None:
    """A second partner sends after its own first exchange, whoever kept it."""
    links = depths(DOUBLING, 4, 0)
    assert dict(links[(2, 0), 0]) == {2: 1, 3: 1}


def test_one_late_call_of_a_busy_host_is_no_lateness() -> None:
    """Where one rank in three is seen with its first act alone, half of the lead is claimed at the most."""
    busy = itertools.cycle([100_000] * 7 + [3 * MS])  # one reaction in eight takes far longer than the others
    world = World(react=lambda: next(busy))
    run_job(
        world,
        RING,
        3 * 1024,
        list(range(3)),
        40,
        late=lambda rank, turn: 2 * MS * (rank == 2 and turn % 5 == 0),
    )
    _, result = one_node(world, 0, 3)
    claims = [
        row.lateness_ns
        for number in range(2, 40)
        for row in result.collectives[number].ranks
        if row.bound == "at_least"
    ]
    leads = [
        max(row.enter_ns for row in collective.ranks if row.enter_ns is not None and row.bound == "at_least")
        - min(row.enter_ns for row in collective.ranks if row.enter_ns is not None)
        for collective in result.collectives[2:40]
        if any(row.bound == "at_least" for row in collective.ranks)
    ]
    assert claims
    assert max(leads) > MS
    assert max(claim for claim in claims if claim is not None) <= max(leads) / 2


def test_the_scatter_of_a_single_known_entry_is_not_nothing() -> None:
    """A leaf of a tree knows its own entry alone: its work scatters all the same."""
    world = World()
    reduce = algorithm_of(Op.REDUCE, "binomial")
    run_job(world, reduce, 4096, list(range(4)), 40, late=lambda rank, turn: (turn * 7919 % 13) * 100_000)
    instances, _ = one_node(world, 1, 4)
    transfers = seen_by(world, 1)
    exchanges = build_exchanges(transfers)
    _, joined = captured(transfers, 4)
    entries = infer(joined, exchanges, instances, build_entries(exchanges, instances)).entries
    assert (entries.exact.reshape(-1, 2).sum(axis=1) == 1).all()
    assert (entries.margins.spread_ns > 100_000).all()
