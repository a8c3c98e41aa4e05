"""Captures at one rank of played worlds: who may have been the last, where no lateness can be claimed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from collective_worlds import Played, World, algorithm_of, run_job
from test_later_steps import CLAIMS, DOUBLING, MS, RING, named, one_node, seen_by

import dpuflow
from dpuflow import Vantage
from dpuflow.agent.board import Window
from dpuflow.agent.rolling import counted_of
from dpuflow.entries.heard import heard_of
from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Job, build_collectives
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis, RankEntry
from dpuflow.schema.rows import NEVER, Op, Wire

if TYPE_CHECKING:
    from pathlib import Path

LINEAR = algorithm_of(Op.ALL_TO_ALL, "linear")
PAIRWISE = algorithm_of(Op.ALL_TO_ALL, "pairwise")
BROADCAST = algorithm_of(Op.BROADCAST, "binomial")


def row_of(result: Analysis, number: int, endpoint: int) -> RankEntry:
    return next(r for r in result.collectives[number].ranks if r.endpoint == endpoint)


def pointed(result: Analysis, number: int) -> int:
    """Whose lateness is the largest of all bounds."""
    told = {r.endpoint: r.lateness_ns for r in result.collectives[number].ranks if r.lateness_ns is not None}
    return max(told, key=lambda endpoint: told[endpoint])


def check_bounds(result: Analysis, played: list[Played]) -> None:
    for collective, truth in zip(result.collectives, played, strict=True):
        for rank in collective.ranks:
            true_ns = truth.lateness_ns(rank.endpoint)
            if rank.bound == "at_most":
                assert rank.lateness_ns is not None
                assert rank.lateness_ns >= true_ns
            elif rank.bound == "at_least":
                assert rank.lateness_ns is not None
                assert rank.lateness_ns <= true_ns + 100_000


@pytest.mark.parametrize("guilty", [2, 3])
def test_the_second_partner_or_the_one_it_waits_for(guilty: int) -> None:
    """Of rank 2's message rank 0 cannot tell whether it waited for rank 3: a bound, no claim, no verdict."""
    world = World()
    played = run_job(world, DOUBLING, 4096, list(range(4)), 20, late={guilty: 5 * MS})
    _, result = one_node(world, 0, 4)
    check_bounds(result, played)
    for number in range(2, 20):
        assert named(result, number) is None
        assert row_of(result, number, 2).bound == "at_most"
        assert pointed(result, number) == 2
    (row,) = (row for row in result.lateness if row.endpoint == 2)
    assert row.perhaps_last >= 18
    assert row.perhaps_ns is not None
    assert 4 * MS < row.perhaps_ns < 6 * MS
    assert row.verdict == "unknown"
    assert not [f for f in result.findings if f.condition == "straggler"]
    first, *_ = text_lines(result)
    assert ", OR ONE THAT IT WAITS FOR, CAME LATE." in first


@pytest.mark.parametrize("guilty", [0, 1])
def test_who_is_known_to_have_been_last_is_not_doubted(guilty: int) -> None:
    world = World()
    played = run_job(world, DOUBLING, 4096, list(range(4)), 20, late={guilty: 5 * MS})
    _, result = one_node(world, 0, 4)
    check_bounds(result, played)
    for number in range(2, 20):
        assert pointed(result, number) == named(result, number) == guilty
        assert row_of(result, number, 2).bound == "unobservable"
    assert {row.perhaps_last for row in result.lateness if row.endpoint == 2} == {0}


def test_a_barrier_of_eight_seen_at_one(shared: Path) -> None:
    """Rank 6 is late. Rank 4 hears of it in the second step: it may have waited for 7, which nobody saw."""
    file = shared / "captures" / "tcp" / "gloo_barrier_n8_late6" / "node4.pcap.gz"
    result = dpuflow.analyze([Vantage("node4", (str(file),))])
    most = max(result.lateness, key=lambda row: row.perhaps_last)
    assert result.endpoints[most.endpoint].address == "10.77.0.7"
    assert most.perhaps_last >= 38
    assert "10.77.0.7, OR ONE THAT IT WAITS FOR" in next(text_lines(result))


def test_nobody_may_have_been_last_by_more_than_noise_where_nobody_was() -> None:
    world = World()
    run_job(world, DOUBLING, 4096, list(range(4)), 20)
    _, result = one_node(world, 0, 4)
    assert all((row.perhaps_ns or 0) < 100_000 for row in result.lateness)
    assert "OR ONE THAT" not in "\n".join(text_lines(result))


@pytest.mark.parametrize("guilty", range(4))
def test_a_linear_all_to_all_dates_every_peer(guilty: int) -> None:
    """All sends are posted at once: what a peer sends here waited for nobody, in whatever order they go."""
    world = World()
    played = run_job(world, LINEAR, 4096, list(range(4)), 20, late={guilty: 5 * MS})
    instances, result = one_node(world, 0, 4)
    if guilty:  # late itself in all of them, a rank shows nowhere what it sends unasked
        assert all(instance.view.at_once for instance in instances)
    check_bounds(result, played)
    assert [named(result, number) for number in range(2, 20)] == [guilty] * 18
    assert result.edges == [] or {edge.from_ for edge in result.edges} == {0}


def test_a_pairwise_all_to_all_is_none_that_sends_all_at_once() -> None:
    world = World()
    run_job(world, PAIRWISE, 4096, list(range(4)), 20, late={2: 5 * MS})
    instances, _ = one_node(world, 0, 4)
    assert not any(instance.view.at_once for instance in instances)


def test_a_leaf_of_a_tree_says_who_or_whose_parent() -> None:
    """When anyone can have entered is not known there: no bound in figures, only that it came last."""
    world = World("gloo")
    run_job(world, BROADCAST, 4096, list(range(4)), 20, late={0: 5 * MS})
    _, result = one_node(world, 1, 4)
    assert {row_of(result, number, 0).bound for number in range(2, 20)} == {"unobservable"}
    assert {row.endpoint for row in result.lateness if row.perhaps_last > 15} == {0}


def test_clear_to_send_is_no_sign_of_an_entry() -> None:
    """NCCL's host posts it ahead of the GPU: rank 0 hears of rank 2, and of 1 by way of it, by data alone."""
    world = World("rendezvous")
    run_job(world, RING, 4096, list(range(3)), 4)
    exchanges = build_exchanges(seen_by(world, 0))
    (instance, *_) = build_collectives(Job(exchanges, np.arange(3), frozenset({0})))
    assert (exchanges["grant_ns"] != NEVER).all()
    exchanges["wire"] = Wire.ROCE_WRITE_IMM
    first, second, *_ = heard_of(exchanges, instance)
    assert (first.src, first.must) == (2, {2})
    assert (second.src, second.must) == (2, {1, 2})


def test_the_agent_counts_entries_that_an_upper_bound_is_shown_of() -> None:
    """Late by 0 or more was known of them all the same: what is left out would make shares too large."""
    world = World()
    run_job(world, DOUBLING, 4096, list(range(4)), 20)
    _, result = one_node(world, 0, 4)
    collective = result.collectives[5]
    window = Window(0, 0, 1, result)
    claimed = {rank.endpoint for rank in collective.ranks if rank.bound in CLAIMS}
    assert counted_of(window, collective).keys() == claimed
    given = {(collective.id, end): 7 for end in (0, 1)}
    assert counted_of(Window(0, 0, 1, result, counted=given), collective) == {0: 7, 1: 7}
