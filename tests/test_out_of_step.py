"""Ranks whose messages are of other sizes than their peers', and what may as well be a ring's last chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from dpuflow.findings.out_of_step import Apart, other_sizes
from dpuflow.schema.rows import EXCHANGE, NEVER

if TYPE_CHECKING:
    from dpuflow.schema.tables import Rows

RING = (0, 1, 2, 3)


def sent(*sizes: tuple[int, list[int]], connections: int = 1) -> Rows:
    """Messages of ranks to their successors, each rank's one after the other, on so many connections."""
    flat = [(src, at, nbytes) for src, many in sizes for at, nbytes in enumerate(many)]
    rows = EXCHANGE.zeros(len(flat))
    rows["src"], when, rows["bytes"] = np.array(flat).T
    rows["dst"] = (rows["src"] + 1) % 4
    rows["connection"] = rows["src"] * connections + when % connections
    rows["data_ns"] = 1000 + when
    return rows


BEFORE = sent(*((rank, [4096] * 6) for rank in RING))


def test_who_sends_another_size_is_apart() -> None:
    what = "messages of 8,192 bytes instead of 4,096"
    rows = sent((0, [4096] * 3), (1, [4096] * 2), (2, [8192] * 2), (3, [4096]))
    assert other_sizes(BEFORE, rows, RING) == Apart([2], what, [0, 1, 3])


def test_who_sends_more_than_anybody_has_to_pass_on_is_apart() -> None:
    """A chunk of 6 KiB in slices of the usual size and half of it."""
    rows = sent((0, [4096] * 3), (1, [4096] * 2), (2, [6144, 4096] * 2), (3, [4096]))
    told = Apart([2], "messages of 6,144 bytes instead of 4,096", [0, 1, 3])
    assert other_sizes(BEFORE, rows, RING) == told


def test_where_chunks_are_uneven_a_larger_one_is_another_size_all_the_same() -> None:
    before = sent((0, [4096] * 6), (1, [4096] * 6), (2, [4096] * 6), (3, [3072] + [4096] * 5))
    rows = sent((0, [4096] * 3), (1, [4096] * 2), (2, [8192] * 2), (3, [3072, 4096]))
    told = Apart([2], "messages of 8,192 bytes instead of 4,096 or less", [0, 1, 3])
    assert other_sizes(before, rows, RING) == told
    assert other_sizes(before, sent((0, [5120] * 3), (1, [5120] * 2), (2, [8192]), (3, [3072])), RING) is None


def test_of_two_halves_all_are_named() -> None:
    rows = sent((0, [4096] * 3), (1, [4096] * 3), (2, [8192] * 3), (3, [8192] * 3))
    assert other_sizes(BEFORE, rows, RING) == Apart([0, 1, 2, 3], "messages of 4,096 and of 8,192 bytes", [])


@pytest.mark.parametrize("connections", [1, 2])
def test_a_last_chunk_is_no_other_size(connections: int) -> None:
    """Rank 3 has none yet, as rank 2 never came; rank 1's chunk is what was left of the buffer."""
    chunk = [1024] * 2 * connections
    rows = sent((0, [4096] * 4), (1, chunk), (3, [4096] * 2), connections=connections)
    assert other_sizes(BEFORE, rows, RING) is None
    more = sent((0, [4096] * 4), (1, chunk + [1024] * connections), (3, [4096] * 2), connections=connections)
    assert other_sizes(BEFORE, more, RING) is not None


def test_who_goes_on_with_the_others_sizes_is_not_apart() -> None:
    rows = sent((0, [4096] * 4), (1, [1024, 1024, 4096]), (2, [4096]), (3, [4096] * 2))
    assert other_sizes(BEFORE, rows, RING) is None


def test_where_sizes_differed_before_nothing_is_told() -> None:
    before = sent((0, [4096]), (1, [4096]), (2, [512]), (3, [4096]))
    assert other_sizes(before, sent((0, [4096] * 3), (1, [4096] * 3), (2, [2048] * 3)), RING) is None


def test_messages_that_were_not_seen_and_empty_ones_do_not_count() -> None:
    rows = sent((0, [4096] * 3), (1, [4096] * 3), (2, [0, 4096]), (3, [8192] * 3))
    rows["data_ns"][rows["src"] == 3] = NEVER
    assert other_sizes(BEFORE, rows, RING) is None
