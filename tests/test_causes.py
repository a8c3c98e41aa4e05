"""Why a rank was late: its own time, a peer's lateness handed on, or the network."""

from __future__ import annotations

import numpy as np
import pytest
from collective_worlds import World, algorithm_of

from dpuflow.causes import COMPUTE, NETWORK, NONE, causes_of
from dpuflow.collectives import Instance
from dpuflow.exchanges import build_exchanges
from dpuflow.judgement import charge
from dpuflow.lateness import build_entries, relate
from dpuflow.schema import NEVER, Op

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
LINEAR = algorithm_of(Op.ALL_TO_ALL, "linear")


def caused(
    world: World, *, slow: int | None = None, op: Op | None = None
) -> dict[tuple[int, int], tuple[int, int]]:
    """(collective, rank) -> (cause, excess in ns)."""
    exchanges = build_exchanges(world.transfers())
    instances: list[Instance] = world.instances(exchanges)
    if op is not None:
        instances[0].op = op
    entries = build_entries(exchanges, instances)
    relative = relate(entries)
    charges = charge(entries, relative, np.zeros(len(instances), np.int64))
    causes = causes_of(instances, entries, relative, charges, entries.endpoint == slow)
    keys = zip(entries.collective.tolist(), entries.endpoint.tolist(), strict=True)
    return dict(zip(keys, zip(causes.cause.tolist(), causes.excess_ns.tolist(), strict=True), strict=True))


def after(world: World, add: dict[int, int]) -> dict[int, int]:
    """Enters of the next collective: each rank's leave, 1 ms of work, and what ``add`` says."""
    leave = world.played[-1].leave_ns
    return {rank: at + MS + add.get(rank, 0) for rank, at in leave.items()}


def test_own_time() -> None:
    world = World("gloo")
    world.play(RING, 4096, dict.fromkeys(range(4), 0))
    world.play(RING, 4096, after(world, {2: 5 * MS}))
    found = caused(world)
    assert found[1, 2][0] == COMPUTE
    assert found[1, 2][1] == pytest.approx(5 * MS, abs=50_000)
    assert {found[1, r][0] for r in (0, 1, 3)} == {NONE}


def test_nothing_was_before_to_wait_for() -> None:
    world = World("gloo")
    world.play(RING, 4096, {0: 0, 1: 5 * MS, 2: 0})
    assert [cause for cause, _ in caused(world).values()] == [NONE, COMPUTE, NONE]
    assert {excess for _, excess in caused(world).values()} == {NEVER}


def test_held_up_by_a_lost_message() -> None:
    world = World("gloo", packets=4)
    world.lose_next = {(1, 2)}
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    world.play(LINEAR, 4096, after(world, {}))
    found = caused(world)
    assert found[1, 2][0] == NETWORK
    assert abs(found[1, 2][1]) < MS


def test_held_up_by_a_slow_link() -> None:
    world = World("gloo", packets=50, slow={(1, 2): 200.0})
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    world.play(LINEAR, 4096, after(world, {}))
    assert caused(world, slow=2)[1, 2][0] == NETWORK
    assert caused(world)[1, 2][0] == NONE  # for all that is known it was handed on


def test_a_lost_message_is_no_excuse_for_long_work() -> None:
    world = World("gloo", packets=4)
    world.lose_next = {(1, 2)}
    world.play(LINEAR, 4096, dict.fromkeys(range(6), 0))
    world.play(LINEAR, 4096, after(world, {2: 300 * MS}))
    assert caused(world)[1, 2][0] == COMPUTE


def test_lateness_handed_on_by_a_peer() -> None:
    """2 waits for 3 in a group of their own; then 0 and 1 wait for 2, which worked no longer."""
    world = World("gloo")
    world.play(RING, 4096, {0: 0, 1: 0}, context=1)
    world.play(RING, 4096, {2: 0, 3: 9 * MS}, context=2)
    leave = {**world.played[0].leave_ns, **world.played[1].leave_ns}
    world.play(RING, 4096, {r: leave[r] + MS for r in (0, 2)}, context=3)
    found = caused(world)
    assert found[2, 2] == (NONE, 0)
    assert found[1, 3][0] == COMPUTE


def test_pipelines_are_not_compared() -> None:
    world = World("gloo")
    world.play(algorithm_of(Op.BROADCAST, "linear"), 4096, dict.fromkeys(range(4), 0))
    world.play(RING, 4096, after(world, {1: 5 * MS}))
    assert caused(world)[1, 1][0] == COMPUTE
    assert caused(world, op=Op.SEND_RECV)[1, 1][0] != COMPUTE
