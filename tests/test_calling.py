"""Ranks that their own first credit dates: hosts that post credits when they call, and others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpuflow.arrays.ordering import Picked
from dpuflow.entries import Entries, Rule
from dpuflow.entries.blockers import Scene
from dpuflow.entries.calling import called, without_calls
from dpuflow.entries.reactions import Law
from dpuflow.entries.rows import blank
from dpuflow.matching import Instance
from dpuflow.schema.rows import EXCHANGE, NEVER, TRANSFER, Op, Wire

US = 1_000
STEP = 10_000
OPERATIONS = 6


def world(granted_us: int, late_us: int = 5_000) -> Scene:
    """Two ranks that left the operation before at 0 of each step; rank 1 sends ``late_us`` after 6,000, and
    rank 0 soon after its credit. Both had given their first credits ``granted_us`` before they came."""
    starts = np.arange(OPERATIONS) * STEP
    collective, endpoint = np.repeat(np.arange(OPERATIONS), 2), np.tile([0, 1], OPERATIONS)
    came = (starts[:, None] + [6_000, 6_000 + late_us]).ravel()
    granted = (came - granted_us) * US
    first = np.repeat(starts + 6_000 + late_us, 2) + np.tile([30, 0], OPERATIONS)
    entries = replace(
        blank(collective, endpoint, np.arange(OPERATIONS + 1) * 2),
        enter_ns=first * US,
        since_ns=np.repeat(starts, 2) * US,
        granted_ns=granted,
        rule=np.tile([int(Rule.CREDIT), int(Rule.FREE_STEP)], OPERATIONS),
    )
    exchanges = EXCHANGE.zeros(2 * OPERATIONS)
    exchanges["wire"], exchanges["dst"] = Wire.ROCE_WRITE_IMM, endpoint
    exchanges["grant_ns"], exchanges["grant"] = granted, np.arange(2 * OPERATIONS)
    rows = np.arange(2 * OPERATIONS).reshape(-1, 2)
    instances = [Instance(mine, Op.ALL_GATHER, [0, 1], size=1 << 20) for mine in rows]
    level, group = np.full(2 * OPERATIONS, 20.0 * US), np.zeros(2 * OPERATIONS, np.int64)
    law = Law(level, level, level, level, level, level, level > 0)
    return Scene(
        entries, Picked.exchanges(exchanges), TRANSFER.zeros(0), instances, group, law, level, group, group
    )


def dated(scene: Scene) -> Entries:
    found = called(scene, scene.entries.rule)
    return replace(scene.entries, enter_ns=found.enter_ns, rule=np.where(found.rows, 22, 0), act=found.act)


def test_a_rank_that_waited_for_a_late_peer_was_there_when_it_gave_its_credit() -> None:
    found = dated(world(granted_us=40))
    assert found.rule.tolist() == [int(Rule.CALLED), 0] * OPERATIONS  # only what was open
    came = found.enter_ns.reshape(-1, 2) // US - STEP * np.arange(OPERATIONS)[:, None]
    # As soon after the credit as the other's messages follow theirs.
    assert (came == [6_000, 11_000]).all()
    assert found.act[::2].tolist() == list(range(0, 2 * OPERATIONS, 2))


@pytest.mark.parametrize("granted_us", [6_000, 10_990])
def test_hosts_that_run_ahead_of_their_gpus_date_nothing(granted_us: int) -> None:
    """Credits come long before GPUs do: when the operation before is done, or somewhere in between."""
    scene = world(granted_us)
    found = dated(scene)
    assert not found.rule.any()
    assert (found.enter_ns == scene.entries.enter_ns).all()


def test_where_all_come_together_their_messages_tell_though_each_may_have_waited() -> None:
    scene = world(40, late_us=0)
    found = called(scene, np.full(2 * OPERATIONS, int(Rule.CREDIT)))
    assert found.rows.all()


def test_times_between_calls_are_no_reactions() -> None:
    scene = world(40)
    times = np.arange(2 * OPERATIONS), np.full(2 * OPERATIONS, 6_000 * US)
    reactions = scene.entries.reactions._replace(between=times)
    entries, none = replace(scene.entries, reactions=reactions), np.zeros(2 * OPERATIONS, bool)
    assert len(without_calls(entries, none, scene.of_row).reactions.between[1]) == 2 * OPERATIONS
    assert not len(without_calls(entries, ~none, scene.of_row).reactions.between[1])


def test_a_host_that_runs_ahead_beside_a_late_one_is_not_dated() -> None:
    """Rank 1 calls late, and shows that by its messages; rank 0 gives its credit when it has left."""
    scene = world(40)
    scene.entries.granted_ns[::2] = scene.entries.since_ns[::2] + 50 * US
    assert not called(scene, scene.entries.rule).rows.any()


def test_credits_that_come_long_after_the_first_message_are_no_calls() -> None:
    """Rank 1 is a slow receiver: its first message is out long before its host posts a receive."""
    scene = world(40)
    scene.entries.granted_ns[1::2] = scene.entries.enter_ns[1::2] + 9_000 * US
    assert not called(scene, scene.entries.rule).rows.any()


def test_few_operations_and_other_transports_say_nothing() -> None:
    scene = world(40)
    scene.entries.granted_ns[2:] = NEVER
    assert not called(scene, scene.entries.rule).rows.any()
    scene = world(40)
    scene.exchanges["wire"][:] = Wire.GLOO_DATA
    assert not called(scene, scene.entries.rule).rows.any()
