"""What a rank need not have left before its next collective: its last rows in, those it had left out.

A GPU carries out operations of several communicators on several streams (gradients beside activations), and
several transfers as one (NCCL 2.30, src/group.cc ncclGroupEnd). One after the other they look alike where
each waited for a credit or an input, so what was seen elsewhere counts: of two kinds of operations of which
one ever began while the other was going on, the latter never says when a rank entered the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.build import Entries
    from dpuflow.entries.places import Places
    from dpuflow.matching import Instance

_FAR = np.iinfo(np.int64).max


def not_beside(entries: Entries, places: Places, last: NDArray[np.int64]) -> NDArray[np.int64]:
    """``last``, each row's collective before (-1: none), and -1 where its rank need not have left that one.

    What came before that is no stand-in: how long ranks work would be reckoned from there.
    """
    if not len(last):
        return last
    kind, ranks = _kinds(places.instances)
    kind, ranks = kind[entries.collective], ranks[entries.collective]
    known, apart = (last >= 0) & (entries.leave_ns[last] != NEVER), ranks != ranks[last]
    pair = kind[last] * (int(kind.max()) + 1) + kind
    proof = known & apart & (entries.enter_ns != NEVER) & (entries.enter_ns < entries.leave_ns[last])
    doubt = apart & np.isin(pair, np.unique(pair[proof]))
    # Of a rank that only receives, what came before the same peer's last had ended may be one with it.
    transfer = np.array([i.op == Op.SEND_RECV for i in places.instances], bool)[entries.collective]
    grouped = transfer & transfer[last] & ~apart & (entries.enter_ns == NEVER)
    doubt |= grouped & (_first_inputs(places) < entries.leave_ns[last])
    return np.where(known & doubt, -1, last)


def _kinds(instances: Sequence[Instance]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each collective numbers of its kind, which all groups of a job share, and of its ranks."""
    kinds: dict[tuple[object, ...], int] = {}
    groups: dict[tuple[int, ...], int] = {}
    transfer = [i.op == Op.SEND_RECV for i in instances]
    # A transfer is one of many that a call may start at once, whatever their sizes and whichever way they go.
    kind = [
        kinds.setdefault((i.op, None if one else i.size, len(i.order)), len(kinds))
        for i, one in zip(instances, transfer, strict=True)
    ]
    ranks = [
        groups.setdefault((*i.order, -1) if one else tuple(sorted(i.order)), len(groups))
        for i, one in zip(instances, transfer, strict=True)
    ]
    return np.array(kind, np.int64), np.array(ranks, np.int64)


def _first_inputs(places: Places) -> NDArray[np.int64]:
    """When the first data was there by row; far in the future where none was."""
    there = there_ns(places.picked)
    out = np.full(len(places), _FAR)
    known = there != NEVER
    np.minimum.at(out, places.receiver[known], there[known])
    return out
