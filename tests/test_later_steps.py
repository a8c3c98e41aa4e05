"""Captures at one rank of played worlds: who is named by messages that waited for others, and who not."""

from __future__ import annotations

import numpy as np
import pytest
from collective_worlds import World, algorithm_of, analysed, run_job

from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Instance, Job, build_collectives
from dpuflow.results import Analysis
from dpuflow.schema.rows import Op, Seen

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
DOUBLING = algorithm_of(Op.ALL_REDUCE, "recursive_doubling")
RABENSEIFNER = algorithm_of(Op.ALL_REDUCE, "rabenseifner")


def seen_by(world: World, me: int) -> np.ndarray:
    """The messages of one rank, with its own stamps only."""
    rows = world.transfers()
    rows = rows[(rows["src"] == me) | (rows["dst"] == me)]
    own = rows["src"] == me
    for there, here in (("arrived_ns", "sent_ns"), ("arrived_end_ns", "sent_end_ns")):
        rows[there] = np.where(own, rows[here], rows[there])
        rows[here] = np.where(own, rows[here], rows[there])
    rows["seen"] = np.where(own, Seen.AT_SENDER, Seen.AT_RECEIVER)
    rows["message"] = np.arange(len(rows))
    return rows[np.argsort(rows["sent_ns"], kind="stable")]


def one_node(world: World, me: int, ranks: int) -> tuple[list[Instance], Analysis]:
    transfers = seen_by(world, me)
    exchanges = build_exchanges(transfers)
    instances = build_collectives(Job(exchanges, np.arange(ranks), frozenset({me})))
    return instances, analysed(transfers, exchanges, instances, ranks)


def named(result: Analysis, number: int) -> int | None:
    """The latest of those whose lateness is claimed."""
    told = {r.endpoint: r.lateness_ns or 0 for r in result.collectives[number].ranks if r.bound in CLAIMS}
    best = max(told, key=lambda endpoint: told[endpoint])
    return best if told[best] > MS else None


CLAIMS = ("exact", "at_least")


@pytest.mark.parametrize("guilty", range(5))
def test_the_step_at_which_a_ring_stalls_tells_who_was_late(guilty: int) -> None:
    world = World()
    played = run_job(world, RING, 5 * 1024, list(range(5)), 20, late={guilty: 5 * MS})
    _, result = one_node(world, 2, 5)
    expected = guilty if guilty in (1, 2) else None
    for number, truth in enumerate(played[2:-2], 2):
        assert named(result, number) == expected
        if guilty == 3:  # links that nobody saw may have held the message that tells: it is pointed to
            row = next(r for r in result.collectives[number].ranks if r.endpoint == 3)
            assert row.bound == "at_most"
            assert row.lateness_ns == max(r.lateness_ns or 0 for r in result.collectives[number].ranks)
            assert row.lateness_ns >= truth.lateness_ns(3)
        for rank in result.collectives[number].ranks:
            if rank.bound == "at_least":
                assert rank.lateness_ns <= truth.lateness_ns(rank.endpoint) + 100_000
    blamed = [row.endpoint for row in result.lateness if row.verdict == "late" and row.cause == "compute"]
    assert blamed == ([2] if guilty == 2 else [])  # the others may have waited for links nobody saw
    late = {row.endpoint: row.cause for row in result.lateness if row.verdict == "late"}
    assert set(late) <= {guilty}
    assert guilty not in (1, 2) or guilty in late
    assert guilty != 1 or late[1] == "unknown"


def test_a_message_that_waited_for_two_unknown_ranks_names_none() -> None:
    world = World()
    played = run_job(world, DOUBLING, 4096, list(range(4)), 20, late={2: 5 * MS})
    _, result = one_node(world, 0, 4)  # its second partner, who may have waited for rank 3
    assert {named(result, number) for number in range(2, len(played))} == {None}


def test_hosts_whose_reaction_was_never_seen_are_not_named_by_it() -> None:
    """In an all_gather every step waits for a rank not heard of before."""
    world = World()
    run_job(world, algorithm_of(Op.ALL_GATHER, "ring"), 4096, list(range(4)), 20, late={1: 5 * MS})
    _, result = one_node(world, 0, 4)
    assert {named(result, number) for number in range(2, 20)} == {None}


@pytest.mark.parametrize("me", range(4))
def test_a_communicator_has_one_number_of_ranks(me: int) -> None:
    """One rank of four in recursive doubling sees what one of three may; other algorithms tell."""
    world = World()
    start_ns = MS
    for turn in range(12):
        algorithm = DOUBLING if turn % 3 else RABENSEIFNER
        (played,) = run_job(world, algorithm, 4096, [0, 1, 2, 3], 1, start_ns=start_ns, late={me: 3 * MS})
        start_ns = max(played.leave_ns.values())
    instances, _ = one_node(world, me, 4)
    assert len(instances) == 12
    assert {instance.rank_count for instance in instances} == {4}
    assert [i.algorithm is DOUBLING for i in instances] == [turn % 3 != 0 for turn in range(12)]


def test_no_what_if_where_ranks_were_not_seen() -> None:
    world = World(packets=4)
    run_job(world, RING, 65536, list(range(5)), 30, late={2: 5 * MS})
    _, result = one_node(world, 2, 5)
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [2]
    assert result.what_if == []
