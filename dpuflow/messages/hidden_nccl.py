"""Sizes before messages of NCCL's sockets beyond the snap length -> messages, by what stands there elsewhere.

In: MESSAGE and LINK rows, each flow's in stream order (see ``hidden``). Where a socket still holds data, the
size of the next message follows it in one segment. Jobs repeat their operations, and all ranks of a ring send
the same sizes: of all runs of messages with as many bytes as the stretch has, those count that stand between
the most messages like its own. Where there are none, the stretch is divided by the size of its neighbours:
chunks of one operation are alike but for the last. NCCL, src/transport/net_socket.cc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.framing import NCCL_SIZE
from dpuflow.messages.stretches import Part, stretches
from dpuflow.schema.rows import Framing, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dpuflow.messages.stretches import Solved
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

CONTEXT: Final = 12
"""Messages on either side of a stretch that are compared: as many as a channel has slots, and half again."""
CHOICES: Final = 512
"""Runs of messages with the bytes of a stretch that are compared: the nearest."""
_APART: Final = 1 << 52
"""Between the bytes of two runs of known messages: no stretch is as long."""


def resolve_nccl(rows: Rows, links: Rows, flows: Rows, orders: dict[int, np.ndarray], solved: Solved) -> None:
    """As ``hidden_gloo.resolve_gloo``, for the data of NCCL's sockets."""
    data = (rows["wire"] == Wire.NCCL_DATA) & (rows["role"] == Role.DATA)
    sending = distinct(rows["flow"][data])
    mine = {
        int(f): orders[int(f)] for f in sending if flows["framing"][f] == Framing.NCCL and int(f) in orders
    }
    runs = {f: stretches(links, order) for f, order in mine.items()}
    if not any(runs.values()):
        return
    known = _Known(rows, links, mine)
    for f, order in mine.items():
        solved.counts.stretches += len(runs[f])
        place = {int(row): k for k, row in enumerate(order)} if runs[f] else {}
        for run in runs[f]:
            size = int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]])
            low, high = (known.base[f] + place[int(end)] for end in (run[0], run[-1]))
            fill = known.fill(low, high + 1, size, solved.has_room)
            if fill is not None:
                link = solved.put(run, [_part(length) for length in fill.tolist()])
                link["known"] = 1


def _part(length: int) -> Part:
    return Part(length, Wire.NCCL_DATA, Role.DATA, (0, 0, 0), length - NCCL_SIZE)


class _Known:
    """The lengths of all messages, one flow after the other; those of pieces are 0."""

    def __init__(self, rows: Rows, links: Rows, orders: dict[int, np.ndarray]) -> None:
        every = np.concatenate(list(orders.values()))
        ends = np.cumsum([len(order) for order in orders.values()])
        self.base = dict(
            zip(orders, (ends - [len(order) for order in orders.values()]).tolist(), strict=True)
        )
        self.flow = np.repeat(np.arange(len(orders)), [len(order) for order in orders.values()])
        told = (links["piece"][every] == 0) & (rows["wire"][every] == Wire.NCCL_DATA)
        length = rows["seq_end"][every].astype(np.int64) - rows["seq"][every].astype(np.int64)
        self.lengths: Ints = np.where(told, length, 0)
        broken = ~told | np.r_[True, np.diff(self.flow) != 0]
        self.begin = np.cumsum(self.lengths) - self.lengths + np.cumsum(broken) * _APART
        self._told = np.flatnonzero(told)
        self._runs: dict[int, tuple[Ints, Ints]] = {}

    def fill(self, low: int, high: int, size: int, has_room: Callable[[int], bool]) -> Ints | None:
        """The lengths of the messages of ``size`` bytes in place of rows ``low`` to ``high``.

        None unless one choice is the best, and ``has_room`` for as many messages.
        """
        first, behind = self._of(size)
        if len(first) > CHOICES:
            nearest = np.argsort(np.abs(first - low), kind="stable")[:CHOICES]
            first, behind = first[nearest], behind[nearest]
        if not len(first):
            return self._divided(low, high, size, has_room)
        alike = self._alike(first - 1, low - 1, -1) + self._alike(behind, high, 1)
        best = np.flatnonzero(alike == alike.max())
        fill = self.lengths[first[best[0]] : behind[best[0]]]
        for k in best[1:].tolist():
            if not np.array_equal(fill, self.lengths[first[k] : behind[k]]):
                return None
        return fill if has_room(len(fill)) else None

    def _of(self, size: int) -> tuple[Ints, Ints]:
        """From where to where known messages have ``size`` bytes together."""
        if size not in self._runs:
            starts = self.begin[self._told]
            ends = starts + self.lengths[self._told]
            last = np.searchsorted(ends, starts + size)
            fits = ends[np.minimum(last, len(ends) - 1)] == starts + size
            self._runs[size] = self._told[fits], self._told[last[fits]] + 1
        return self._runs[size]

    def _alike(self, places: Ints, own: int, step: int) -> Ints:
        """How many messages from ``places`` on are as long as those from ``own`` on, until one is not."""
        alike = np.zeros(len(places), np.int64)
        going = np.ones(len(places), bool)
        for k in range(CONTEXT):
            at = own + k * step
            if not 0 <= at < len(self.lengths) or self.lengths[at] == 0:
                break
            theirs = places + k * step
            inside = (theirs >= 0) & (theirs < len(self.lengths))
            going &= inside & (self.lengths[np.where(inside, theirs, 0)] == self.lengths[at])
            alike += going
        return alike

    def _divided(self, low: int, high: int, size: int, has_room: Callable[[int], bool]) -> Ints | None:
        """As many messages of a neighbour's length as fill the stretch: 4 GiB may be missing, so these are
        laid out only if there is room."""
        for at in (low - 1, high):
            length = int(self.lengths[at]) if 0 <= at < len(self.lengths) else 0
            if length > NCCL_SIZE and size % length == 0:
                count = size // length
                return np.full(count, length, np.int64) if has_room(count) else None
        return None
