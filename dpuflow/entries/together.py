"""Nodes whose GPUs send together: which of them a call of all with all had waited for.

Entries and exchanges in, entries out. With PXN a node's messages leave when all of its GPUs have made theirs
(``matching.pxn``), so its first one shows that all had entered. Which was the last shows in what they
receive, each for itself: the entry for the first message of the next call comes when the GPU has taken all of
this one, so it had entered. Where all but one of a node had entered long before the node's first message, and
the credit for that had been there as long, it waited for that one alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import percentile
from dpuflow.entries.build import Entries, Rule
from dpuflow.schema.rows import NEVER, NONE32, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

FAR_BEYOND: Final = 3.0
"""Times the quickest taking of what had come beyond which nothing but a GPU had been waited for."""
QUICK: Final = 5.0
"""Percent of what came: as often as that at least a GPU is waiting for it."""
_FAR: Final = int(np.iinfo(np.int64).max)


class _Node(NamedTuple):
    """One node in one call."""

    rows: Ints  # of Entries, of its GPUs
    sent_ns: int  # its first message
    data: int  # TRANSFER row of that
    idle_ns: int  # since the credit for it had come
    shown_ns: Ints  # by GPU: what shows first that it had entered; far in the future without
    grants: Ints  # ... TRANSFER rows
    taken_ns: Ints  # ... and how long that was after what it took had come; NEVER without


def date_the_last(entries: Entries, exchanges: Rows, instances: Sequence[Instance]) -> Entries:
    """Date GPUs that their whole node had waited for, and say when the others had entered at the latest."""
    calls = [n for n, i in enumerate(instances) if i.inside and i.op == Op.ALL_TO_ALL and i.size is not None]
    if not calls:
        return entries
    following = _Following(exchanges)
    nodes = [node for n in calls for node in _nodes(entries, exchanges, instances[n], n, following)]
    taken = np.concatenate([node.taken_ns for node in nodes]) if nodes else np.zeros(0, np.int64)
    taken = taken[taken != NEVER]
    if not len(taken):
        return entries
    margin = FAR_BEYOND * percentile(taken, QUICK)
    rule, enter, act = entries.rule.copy(), entries.enter_ns.copy(), entries.act.copy()
    after = entries.after.copy()
    for node in nodes:
        had = node.shown_ns < node.sent_ns
        rows = node.rows[had]
        rule[rows], enter[rows], act[rows] = Rule.WAITED, node.shown_ns[had], node.grants[had]
        left = node.rows[~had]
        rule[left], enter[left], act[left] = Rule.WAITED, node.sent_ns, node.data
        after[node.rows] = NONE32
        again = entries.retransmitted[node.rows].any()
        before = node.sent_ns - node.shown_ns[had].max() if had.any() else 0
        if len(left) == 1 and len(rows) and min(before, node.idle_ns) > margin and not again:
            rule[left] = Rule.BEHIND
    leave = np.where(entries.leave_ns != NEVER, np.maximum(entries.leave_ns, enter), entries.leave_ns)
    return replace(
        entries, rule=rule, enter_ns=enter, act=act, after=after, leave_ns=leave,
        idle_ns=np.maximum(entries.idle_ns, leave),
    )  # fmt: skip


def _nodes(
    entries: Entries, exchanges: Rows, instance: Instance, number: int, following: _Following
) -> list[_Node]:
    at = int(entries.offsets[number])
    picked = exchanges[instance.rows]
    order, of = np.array(instance.order), np.array(instance.nodes)
    shown = np.full(len(order), _FAR)
    grants, taken = np.full(len(order), NONE32, np.int64), np.full(len(order), NEVER)
    for place, end in enumerate(order.tolist()):
        mine = instance.rows[picked["dst"] == end]
        shown[place], grants[place], taken[place] = following.shown(exchanges, mine)
    node_of = dict(zip(order.tolist(), of.tolist(), strict=True))
    src = np.array([node_of[end] for end in picked["src"].tolist()])
    found = []
    for node in np.unique(of).tolist():
        sends = picked[(src == node) & (picked["data_ns"] != NEVER)]
        if not len(sends):
            continue
        first = sends[int(np.argmin(sends["data_ns"]))]
        credit = int(first["grant_arrived_ns"])
        found.append(
            _Node(
                at + np.flatnonzero(of == node),
                int(first["data_ns"]),
                int(first["data"]),
                int(first["data_ns"]) - credit if credit != NEVER else -1,
                shown[of == node],
                grants[of == node],
                taken[of == node],
            )
        )
    return found


class _Following:
    """Finds the grant that comes after others on the same connection."""

    def __init__(self, exchanges: Rows) -> None:
        self.line = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
        turn = exchanges["order"].astype(np.int64)
        self.width = int(turn.max(initial=0)) + 2
        key = self.line * self.width + turn
        self.order = np.argsort(key, kind="stable")
        self.keys = key[self.order]

    def shown(self, exchanges: Rows, rows: Ints) -> tuple[int, int, int]:
        """What shows first that the receiver of a call's messages had entered: when, its TRANSFER row, and
        how long after what it took had come.
        """
        best, which, taken = _FAR, NONE32, NEVER
        for line in np.unique(self.line[rows]).tolist():
            mine = rows[self.line[rows] == line]
            mine = mine[np.argsort(exchanges["order"][mine], kind="stable")]
            granted, arrived = exchanges["grant_ns"][mine], exchanges["arrived_end_ns"][mine]
            if (granted == NEVER).any() or (arrived == NEVER).any():
                continue
            last = mine[-1]
            key = line * self.width + int(exchanges["order"][last]) + 1
            place = int(np.searchsorted(self.keys, key))
            if place < len(self.keys) and self.keys[place] == key:
                then = int(self.order[place])
                when = int(exchanges["grant_ns"][then])
                if when != NEVER and int(arrived.max()) <= when < best:
                    best, which = when, int(exchanges["grant"][then])
                    taken = when - int(arrived.max())
        return best, which, taken
