"""Whether two connections carry the same operations: their messages side by side in, counts out."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import i8, inlined, kernel, u1, void

NEVER = np.int64(-(1 << 63))
APART, LEFTS, RIGHTS, SHARED, LEFT_LONGEST, RIGHT_LONGEST, UNLIKE, N_FOUND = range(8)
"""Places in ``found``: messages whose slots differ; those with which an operation may begin on the one
connection, on the other, and on both; from one of these to the next, or to the end, at the most on each;
operations of one message on both that have several times as many bytes on one."""

_I8 = i8[::1]


@kernel(void(u1[::1], u1[::1], _I8, _I8, _I8, _I8, i8, _I8))
def compare(left, right, slots, others, sizes, theirs, several, found):  # type: ignore[no-untyped-def]
    """Fill ``found`` for as many messages of two connections: with which an operation may begin (``left``,
    ``right``), their slots and sizes (none where these are not known)."""
    for k in range(found.shape[0]):
        found[k] = 0
    n = left.shape[0]
    lefts_at, rights_at = np.int64(-1), np.int64(-1)
    for k in range(n):
        if slots[k] != others[k]:
            found[APART] += 1
        if left[k]:
            found[LEFTS] += 1
            if lefts_at >= 0:
                found[LEFT_LONGEST] = max(found[LEFT_LONGEST], k - lefts_at)
            lefts_at = k
        if right[k]:
            found[RIGHTS] += 1
            if rights_at >= 0:
                found[RIGHT_LONGEST] = max(found[RIGHT_LONGEST], k - rights_at)
            rights_at = k
        if left[k] and right[k]:
            found[SHARED] += 1
            single = k + 1 < n and left[k + 1] and right[k + 1] and k < sizes.shape[0]
            if single and max(sizes[k], theirs[k]) > several * min(sizes[k], theirs[k]):
                found[UNLIKE] += 1
    found[LEFT_LONGEST] = max(found[LEFT_LONGEST], n - lefts_at)
    found[RIGHT_LONGEST] = max(found[RIGHT_LONGEST], n - rights_at)


@inlined
def _overlap(at, one, other, low, high, found, row):  # type: ignore[no-untyped-def]
    """Write to a ``row`` of ``found``, of operations from ``low`` on the one connection and from ``high`` on
    the other, how many overlap, and of how many the beginnings are known."""
    both, known = np.int64(0), np.int64(0)
    for k in range(at.shape[0] - 1 - low - high):
        mine, theirs = k + low, k + high
        began, then = one[at[mine]], other[at[theirs]]
        if began == NEVER or then == NEVER:
            continue
        known += 1
        if began <= other[at[theirs + 1] - 1] and then <= one[at[mine + 1] - 1]:
            both += 1
    found[row, 0] = both
    found[row, 1] = known


@kernel(void(_I8, _I8, _I8, i8[:, ::1]))
def overlaps(at, one, other, found):  # type: ignore[no-untyped-def]
    """How many operations of the same number overlap in time, of how many that are known; then of numbers
    one, two, ... apart, the one connection's ahead and the other's.

    Operation k has the messages ``at[k]`` to ``at[k + 1]``; ``one`` and ``other``: when each arrived.
    """
    _overlap(at, one, other, 0, 0, found, 0)
    for shift in range(1, (found.shape[0] + 1) // 2):
        _overlap(at, one, other, shift, 0, found, 2 * shift - 1)
        _overlap(at, one, other, 0, shift, found, 2 * shift)
