"""NCCL's ranks that pass data on: how fast slots are given back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import Picked
from dpuflow.entries.reactions import consumed
from dpuflow.matching.model import Instance, Slicing
from dpuflow.schedules.nccl import BROADCAST_CHAIN, looped_ring
from dpuflow.schema.rows import EXCHANGE, Op, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

FAR = np.iinfo(np.int64).max


def stream(count: int, every: int, gap: int, connection: int = 0, first: int = 0) -> NDArray[np.void]:
    """``count`` messages from 0 to 1, one ``every`` ns; each slot granted again ``gap`` ns after its input.

    The first eight are granted at once.
    """
    rows = EXCHANGE.zeros(count)
    rows["src"], rows["dst"], rows["connection"] = 0, 1, connection
    rows["order"] = np.arange(first, first + count)
    rows["wire"], rows["bytes"], rows["context"] = Wire.ROCE_WRITE_IMM, 4096, 77 + connection
    rows["arrived_end_ns"] = 1_000 + every * np.arange(count)
    rows["grant_ns"] = 0
    rows["grant_ns"][8:] = rows["arrived_end_ns"][:-8] + gap if count > 8 else 0
    return rows


def chain(rows: NDArray[np.void], protocol: str = "simple") -> Instance:
    return Instance(
        np.arange(len(rows)), Op.BROADCAST, [0, 1], BROADCAST_CHAIN, root=0, size=1, slicing=Slicing(protocol)
    )


def test_slots_given_back_tell_how_fast_a_rank_takes_its_inputs() -> None:
    rows = stream(20, 500, 300)
    picked = Picked(rows, np.arange(20))
    receiver = np.ones(20, np.int64)
    (where, taken), (_, between) = consumed(
        picked, [chain(rows)], np.zeros(20, np.int64), receiver, np.array([0, 0])
    )
    assert taken.tolist() == [300] * 12
    assert set(where.tolist()) == {1}
    assert not len(between)
    # What came before the rank had entered waited for the rank.
    (_, late), _ = consumed(
        picked, [chain(rows)], np.zeros(20, np.int64), receiver, np.array([0, 1_000 + 500 * 5])
    )
    assert len(late) == 7
    ring = replace(chain(rows), algorithm=looped_ring(Op.ALL_REDUCE, 1))
    (_, slots), _ = consumed(picked, [ring], np.zeros(20, np.int64), receiver, np.array([0, 0]))
    assert not len(slots)  # a ring of Simple grants four ahead: these would come before their inputs


def test_the_next_operations_first_entry_is_no_sooner_than_the_last_input() -> None:
    one, two = stream(4, 500, 0), stream(4, 500, 0, first=4)
    one["bytes"][-1] = 1024  # its last message is a quarter
    two["grant_ns"] = one["arrived_end_ns"][-1] + 200
    two["arrived_end_ns"] += 10_000
    rows = np.concatenate([one, two])
    of = np.repeat([0, 1], 4)
    _, (where, between) = consumed(
        Picked(rows, np.arange(8)), [chain(one), chain(two)], of, 2 * of + 1, np.zeros(4, np.int64)
    )
    assert where.tolist() == [1]
    assert between.tolist() == [800]  # four times as much as of the small one
