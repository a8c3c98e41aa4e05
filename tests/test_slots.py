"""NCCL's transfers through slots: senders that wait for one, and what slots say of leaving."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import Picked
from dpuflow.entries import build_entries
from dpuflow.entries.blockers import Scene, held_senders
from dpuflow.entries.reactions import law_of
from dpuflow.matching.buffers import STEP_SLOT
from dpuflow.matching.model import Instance, InstanceView
from dpuflow.matching.slots import whole_slots
from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, Op, Seen, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray


TAKE, EVERY, LATE = 400, 1_000, 50_000
"""From an input's arrival to the grant of its slot; from message to message; how late a receiver is, ns."""
SLOTS = 8

SENDER = InstanceView(free=frozenset((0,)))


def transfers(messages: int, late: dict[int, int], count: int = 20) -> NDArray[np.void]:
    """``count`` transfers from 0 to 1 of so many messages, 1 ms apart; ``late``: the receiver's, by number.

    The GPU takes a message TAKE ns after it came, and after the one before; where it is late, so long after
    the first one came. Slots are granted again when they are empty; the next operation's when all are.
    """
    rows = EXCHANGE.zeros(messages * count)
    rows["src"], rows["dst"], rows["connection"], rows["order"] = 0, 1, 0, np.arange(len(rows))
    rows["wire"], rows["bytes"], rows["seen"] = Wire.ROCE_WRITE_IMM, 65_536, Seen.AT_SENDER | Seen.AT_RECEIVER
    rows["offer_ns"] = rows["offer_arrived_ns"] = NEVER
    rows["offer"] = NONE32
    rows["grant"], rows["data"] = 2 * np.arange(len(rows)), 2 * np.arange(len(rows)) + 1
    done = 0
    for number in range(count):
        begin = 1_000_000 * (number + 1)
        came = begin + EVERY * np.arange(messages)
        taken = np.empty(messages, np.int64)
        busy = begin + late.get(number, 0)
        for k in range(messages):
            busy = taken[k] = max(busy, came[k]) + TAKE
        mine = slice(number * messages, (number + 1) * messages)
        first = done + 10 * np.arange(min(messages, SLOTS))
        rows["grant_ns"][mine] = np.r_[first, taken[: max(messages - SLOTS, 0)]]
        rows["data_ns"][mine], rows["data_end_ns"][mine] = came - 300, came - 100
        rows["arrived_ns"][mine], rows["arrived_end_ns"][mine] = came - 200, came
        rows["acked_ns"][mine] = came + 100
        done = int(taken[-1])
    rows["grant_arrived_ns"] = rows["grant_ns"] + 100
    return rows


def test_a_sender_that_had_to_wait_for_its_slot_is_not_dated() -> None:
    rows = transfers(3, {})
    rows["grant_arrived_ns"][::3] = rows["data_ns"][::3] - 50_000
    rows["grant_arrived_ns"][1::3] = rows["data_ns"][1::3] - 500  # what had waited for its credit
    rows["grant_arrived_ns"][15] = rows["data_ns"][15] - 700
    instances = [
        Instance(np.arange(3 * k, 3 * k + 3), Op.SEND_RECV, [0, 1], size=1, view=SENDER) for k in range(20)
    ]
    entries = build_entries(rows, instances)
    columns, group = Picked.exchanges(rows), np.zeros(len(entries.rule), np.int64)
    scene = Scene(
        entries, columns, rows, instances, group, law_of(entries, group), np.zeros(len(group)), group, group
    )
    held = scene.credit(*held_senders(scene)).stands(entries.enter_ns)
    assert np.flatnonzero(held).tolist() == [2 * 5]


def test_transfers_that_may_have_been_launched_as_one_say_nothing_of_each_other() -> None:
    rows = transfers(2, {}, count=2)
    instances = [
        Instance(np.arange(2 * k, 2 * k + 2), Op.SEND_RECV, [0, 1], size=1, view=SENDER) for k in range(2)
    ]
    apart = build_entries(rows, instances)
    assert apart.since_ns[3] == apart.leave_ns[1]
    for name in ("data_ns", "data_end_ns", "arrived_ns", "arrived_end_ns", "acked_ns"):
        rows[name][2:] += rows[name][0] - rows[name][2] + EVERY // 2  # message by message, in turns
    assert build_entries(rows, instances).since_ns[3] == NEVER


def test_streams_that_ever_overlap_say_nothing_of_each_other() -> None:
    """Rank 0 exchanges data with 1 and with 2 in turn, and once begins with 2 before it has that of 1."""
    rows = transfers(2, {}, count=4)
    peer, own = np.array([1, 2, 1, 2]), slice(0, None, 2)
    rows["src"][own], rows["dst"][own], rows["connection"][own] = 0, peer, peer
    rows["src"][1::2], rows["dst"][1::2], rows["connection"][1::2] = peer, 0, 2 + peer
    instances = [
        Instance(
            np.array([2 * k, 2 * k + 1]),
            Op.ALL_REDUCE,
            [0, int(peer[k])],
            size=int(peer[k]),
            view=InstanceView(free=frozenset((0, 1))),
        )
        for k in range(4)
    ]
    apart = build_entries(rows, instances)
    assert apart.since_ns[[2, 4, 6]].tolist() == apart.leave_ns[[0, 2, 4]].tolist()  # rank 0's
    rows["arrived_end_ns"][5] = rows["data_ns"][6] + EVERY  # the fourth begins while the third goes on
    beside = build_entries(rows, instances)
    assert beside.since_ns[[2, 6]].tolist() == [NEVER, NEVER]
    assert beside.since_ns[4] == beside.leave_ns[2]  # the other way round nothing says so


def test_entries_of_pat_that_announce_what_it_needs_are_whole_slots_by_their_addresses() -> None:
    rows = EXCHANGE.zeros(20)
    rows["connection"], rows["src"], rows["dst"], rows["order"] = 3, 0, 1, np.arange(20)
    announced = np.full(20, 40_960)
    in_turn = 4096 + STEP_SLOT * (np.arange(20) % SLOTS)
    assert (whole_slots(rows, announced, in_turn) == STEP_SLOT).all()
    # Not where places of a pool are granted, next to each other or anywhere, nor without an address.
    assert (whole_slots(rows, announced, 4096 + 40_960 * np.arange(20)) == announced).all()
    assert (whole_slots(rows, announced, 4096 + STEP_SLOT * (np.arange(20) * 7 % 16)) == announced).all()
    assert (whole_slots(rows, announced, np.full(20, -1)) == announced).all()
    # A line is judged by itself: the other way's entries stay.
    rows["src"][10:], rows["dst"][10:], rows["order"][10:] = 1, 0, np.arange(10)
    assert (
        whole_slots(rows, announced, np.r_[in_turn[:10], 4096 + 40_960 * np.arange(10)])[10:] == 40_960
    ).all()


def test_over_sockets_too_a_sender_leaves_when_its_last_slot_is_filled() -> None:
    """Not when its data has left: a slow link, or the proxy thread, may take longer than its next call."""
    rows = transfers(4, {}, count=2)
    rows["wire"], rows["grant"] = Wire.NCCL_DATA, NONE32
    rows["grant_ns"] = rows["grant_arrived_ns"] = NEVER
    instances = [
        Instance(np.arange(4 * k, 4 * k + 4), Op.SEND_RECV, [0, 1], size=65_536, view=SENDER)
        for k in range(2)
    ]
    entries = build_entries(rows, instances)
    assert entries.leave_ns[[0, 2]].tolist() == entries.enter_ns[[0, 2]].tolist()
    assert (entries.leave_ns[[1, 3]] >= rows["arrived_end_ns"][[3, 7]]).all()


def test_slots_of_other_protocols_between_those_of_pat_count() -> None:
    """A connection has one step for all of its buffers: a tree's message of LL takes a slot of PAT's, too."""
    rows = EXCHANGE.zeros(24)
    rows["connection"], rows["src"], rows["dst"], rows["order"] = 3, 0, 1, np.arange(24)
    other = np.arange(24) % 4 == 0
    announced = np.where(other, 65_536, 40_960)
    place = np.arange(24) % SLOTS
    granted_at = np.where(other, 4096 + 65_536 * place, (1 << 30) + STEP_SLOT * place)
    assert whole_slots(rows, announced, granted_at).tolist() == np.where(other, 65_536, STEP_SLOT).tolist()
