"""Messages that go over several queue pairs in turn, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.exchanges.stripes import bundled, striped
from dpuflow.schema.rows import TRANSFER, Role, Wire

if TYPE_CHECKING:
    from dpuflow.schema.tables import Rows

SLOT = 1 << 20


def traffic(count: int = 24, late: int = 0, base: int = 1 << 40) -> Rows:
    """Entries on connection 7, data in turn on 7 and 8; ``late``: entries come so much after their data."""
    rows = TRANSFER.zeros(2 * count)
    for k in range(count):
        entry, data = rows[2 * k], rows[2 * k + 1]
        entry["role"], entry["wire"], entry["announces"] = Role.GRANT, Wire.ROCE_WRITE, SLOT
        entry["connection"], entry["src"], entry["dst"], entry["sent_ns"] = 7, 1, 0, 1000 * k + late
        data["role"], data["wire"], data["bytes"] = Role.DATA, Wire.ROCE_WRITE_IMM, k
        data["connection"], data["src"], data["dst"], data["sent_ns"] = 7 + k % 2, 0, 1, 1000 * k + 500
        data["va"] = base + k % 4 * SLOT
    return rows


def test_put_together_in_turn() -> None:
    rows = traffic()
    # The wire may swap neighbours on different queue pairs.
    swapped = np.arange(len(rows))
    swapped[[9, 11]] = swapped[[11, 9]]
    joined, part = bundled(rows[swapped], np.arange(len(rows)))
    data = part[joined["role"][part] == Role.DATA]
    assert (joined["connection"] == 7).all()
    assert joined["bytes"][data].tolist() == list(range(24))


def test_with_adaptive_routing() -> None:
    """Each message is a WRITE and an empty one with immediate, which go over one queue pair."""
    whole = traffic()
    head = whole["role"] == Role.DATA
    rows = np.repeat(whole, np.where(head, 2, 1))
    data = np.flatnonzero(rows["role"] == Role.DATA)
    rows["wire"][data[::2]] = Wire.ROCE_WRITE
    rows["bytes"][data[::2]] += 1
    rows["bytes"][data[1::2]] = 0
    joined, part = bundled(rows, np.arange(len(rows)))
    told = part[joined["role"][part] == Role.DATA]
    assert (joined["connection"] == 7).all()
    assert joined["bytes"][told].tolist() == [n for k in range(24) for n in (k + 1, 0)]


def test_left_alone() -> None:
    part = np.arange(48)
    early = traffic(late=700)  # data comes before what would allow it
    assert bundled(early, part)[0] is early
    far = traffic()
    far["va"][far["connection"] == 8] += 64 * SLOT  # another buffer
    assert bundled(far, part)[0] is far
    whole = traffic()
    whole["connection"] = 7
    assert bundled(whole, part)[0] is whole


def test_few_messages() -> None:
    """No more entries are left over than may be out at a capture's end anyway: the turns tell."""
    rows = traffic(17)
    granted, written = np.array([17, 0]), np.array([9, 8])
    assert striped(granted, written)
    joined, _ = bundled(rows, np.arange(34))
    assert (joined["connection"] == 7).all()
    assert striped(granted, np.array([9, 4]))  # addresses may tell, else nothing does:
    uneven = rows[(rows["connection"] == 7) | (rows["bytes"] < 8)]
    assert bundled(uneven, np.arange(len(uneven)))[0] is uneven


def test_addresses_tell_whose_entries_are_whose() -> None:
    """Of a capture that begins in mid-job: as few messages and entries as may be, in any turn."""
    rows = traffic(17)
    entry = rows["role"] == Role.GRANT
    rows["va"][entry] = (1 << 40) + np.arange(17) % 4 * SLOT
    uneven = rows[(rows["connection"] == 7) | (rows["bytes"] < 8)]
    joined, _ = bundled(uneven, np.arange(len(uneven)))
    assert (joined["connection"] == 7).all()
    # The first message of the second queue pair was under way, and is seen after the one behind it.
    late = rows[3:].copy()
    order = np.arange(len(late))
    order[[0, 2]] = order[[2, 0]]
    joined, part = bundled(late[order], np.arange(len(late)))
    data = part[joined["role"][part] == Role.DATA]
    assert joined["bytes"][data].tolist() == list(range(1, 17))


def test_buffers_right_behind_each_other() -> None:
    """Two connections of two queue pairs: the second buffer begins at a queue pair with entries."""
    one, other = traffic(), traffic(base=(1 << 40) + 2 * SLOT)
    other["connection"] += 2
    other["sent_ns"] += 1
    for rows in (one, other):
        rows["va"] += SLOT * (rows["connection"] % 2 == 0).astype(np.uint64) - rows["va"] % (2 * SLOT)
    both = np.stack([one, other], axis=1).ravel()
    joined, _ = bundled(both, np.arange(len(both)))
    assert sorted(set(joined["connection"].tolist())) == [7, 9]
    assert (joined["connection"] == np.tile([7, 9], 48)).all()


def test_what_was_under_way_when_a_capture_began_may_come_in_any_order() -> None:
    rows = traffic()
    data = np.flatnonzero(rows["role"] == Role.DATA)
    rows["connection"][data] = 7 + np.arange(24) % 4
    rows["va"][data] = (1 << 40) + np.arange(24) % 8 * SLOT
    rows["va"][rows["role"] == Role.GRANT] = rows["va"][data]
    mixed = np.arange(len(rows))
    mixed[data[:4]] = data[[2, 0, 3, 1]]
    joined, part = bundled(rows[mixed], np.arange(len(rows)))
    told = part[joined["role"][part] == Role.DATA]
    assert (joined["connection"] == 7).all()
    assert joined["bytes"][told].tolist() == list(range(24))


def test_whether_queue_pairs_may_share() -> None:
    some, none, more = 20, 0, 40
    assert striped(np.array([more, none]), np.array([some, some]))
    assert not striped(np.array([some, none]), np.array([some, some]))  # nobody has entries to spare
    assert not striped(np.array([more, some]), np.array([some, some]))  # nobody lacks any


def test_channels_alike_are_not_guessed() -> None:
    """Two flows of entries and two of data apart from them, all in step: any pairing would fit."""
    one, other = traffic(), traffic(base=1 << 41)
    for rows, entries, data in ((one, 1, 2), (other, 3, 4)):
        rows["connection"] = np.where(rows["role"] == Role.GRANT, entries, data)
    both = np.stack([one, other], axis=1).ravel()
    joined, _ = bundled(both, np.arange(len(both)))
    assert joined is both
    alone, _ = bundled(one, np.arange(len(one)))
    assert set(alone["connection"].tolist()) == {1}
