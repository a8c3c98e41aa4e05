"""Exchanges in, what entries for them say of their receivers out: which rows of Entries granted for buffers
that the application had registered, and when they had taken what came.

A clear-to-send entry for NCCL's own buffers is posted by the host, ahead of the kernel; one for registered
buffers only when the receiver's kernel has started (net.cc, regBufferReady): it says nothing of the host.
NCCL's own buffers have eight slots (NCCL_STEPS, device.h) whose addresses come again and again; data in
registered buffers walks these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.entries import previous_row
from dpuflow.entries.passing import SLOTS
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

MOST: Final = 0.5
"""Of a connection's messages: so many at least come where the eighth before them came, in slots."""


def registered_rows(
    exchanges: Rows, transfers: Rows, instances: Sequence[Instance], entries: Entries
) -> NDArray[np.bool_]:
    """Rows of ranks that take part in a collective by what they granted for registered buffers."""
    found = np.zeros(len(entries.endpoint), bool)
    way = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
    walking = _walking(exchanges, transfers, way)
    if not walking.any():
        return found
    mine = walking[way]
    for number, instance in enumerate(instances):
        rows = instance.rows[mine[instance.rows]]
        if len(rows):
            at = slice(*entries.offsets[number : number + 2].tolist())
            found[at] = np.isin(entries.endpoint[at], exchanges["dst"][rows])
    return found


def taken_until(exchanges: Rows, instances: Sequence[Instance], entries: Entries) -> NDArray[np.int64]:
    """Per row of Entries when its rank had taken what point-to-point connections brought; NEVER if not told.

    A connection takes up its next operation when the GPU has taken all of the one before (proxy.cc,
    ProxyAppend): no later than the next entry is posted. A slow GPU does so long after the data is there.
    """
    found = np.full(len(entries.endpoint), NEVER)
    one_to_one = [n for n, i in enumerate(instances) if i.op in (Op.SEND_RECV, Op.ALL_TO_ALL)]
    if not one_to_one:
        return found
    of = np.full(len(exchanges), -1)
    for number in one_to_one:
        of[instances[number].rows] = number
    rows = np.flatnonzero((of >= 0) & (exchanges["wire"] == Wire.ROCE_WRITE_IMM))
    way = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
    rows = rows[np.lexsort((exchanges["order"][rows], way[rows]))]
    last, after = rows[:-1], rows[1:]
    ends = (way[last] == way[after]) & (of[last] != of[after])
    last, granted = last[ends], exchanges["grant_ns"][after[ends]]
    known = (granted != NEVER) & (granted >= exchanges["arrived_end_ns"][last])
    last, granted = last[known], granted[known]
    places = {
        (int(entries.collective[row]), int(entries.endpoint[row])): row
        for row in np.flatnonzero(np.isin(entries.collective, one_to_one)).tolist()
    }
    dst = exchanges["dst"][last].tolist()
    at = np.array([places.get(key, -1) for key in zip(of[last].tolist(), dst, strict=True)], np.int64)
    np.maximum.at(found, at[at >= 0], granted[at >= 0])
    return found


def taken_before(
    instances: Sequence[Instance], entries: Entries, taken: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Per row when its rank had ``taken`` (``taken_until``) all of the call before, and only then went on to
    work; NEVER where its host may have been what it waited for.
    """
    last = previous_row(entries)
    calls = np.array([i.op == Op.ALL_TO_ALL for i in instances], bool)
    known = (last >= 0) & (entries.enter_ns != NEVER) & (taken[last] != NEVER)
    known &= calls[entries.collective[last]] if len(instances) else known
    out = np.full(len(last), NEVER)
    if known.any():
        since = entries.leave_ns[last]
        later = worked_since(since, taken[last], entries.enter_ns, known)
        out[known] = np.where(later > since, later, NEVER)[known]
    return out


def worked_since(
    since: NDArray[np.int64], taken: NDArray[np.int64], until: NDArray[np.int64], known: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """From when on ranks worked until they acted: they could ``since``, and had ``taken`` their inputs then.

    A GPU that is slow to take what came works from then on, as long as usual. One that acts soon after may
    have waited for its host, which posts entries, too.
    """
    if not known.any():
        return since
    usual = np.median((until - since)[known])
    later = known & (taken > since) & (2 * (until - taken) >= usual)
    return np.asarray(np.where(later, taken, since), np.int64)


def _walking(exchanges: Rows, transfers: Rows, way: NDArray[np.int64]) -> NDArray[np.bool_]:
    """By way of a connection: whether its data goes to more than eight places, not in turn."""
    wire = exchanges["wire"]
    paid = (wire == Wire.ROCE_WRITE_IMM) | (wire == Wire.ROCE_WRITE)
    rows = np.flatnonzero(paid & (exchanges["grant"] != NONE32) & (exchanges["data"] != NONE32))
    count = int(way.max(initial=-1)) + 1
    if len(rows) <= SLOTS:
        return np.zeros(count, bool)
    rows = rows[np.lexsort((exchanges["order"][rows], way[rows]))]
    of, address = way[rows], transfers["va"][exchanges["data"][rows]]
    pairs = of[SLOTS:] == of[:-SLOTS]
    again = pairs & (address[SLOTS:] == address[:-SLOTS])
    compared = np.bincount(of[SLOTS:], pairs, count)
    walking = (compared > 0) & (np.bincount(of[SLOTS:], again, count) < MOST * compared)
    for each in np.flatnonzero(walking).tolist():
        walking[each] = len(np.unique(address[of == each])) > SLOTS
    return np.asarray(walking, np.bool_)
