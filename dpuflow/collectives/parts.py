"""The parts that NCCL's connections for sends and receives carry, one way each.

In: EXCHANGE rows of connections whose clear-to-send entries announce the chunk of point-to-point buffers.
Out: which rows of each make up a part, from times and sizes, and from how often parts are alike. Facts of
NCCL's that carry this (2.30, src/transport/net.cc, src/enqueue.cc addP2pToPlan, src/device/sendrecv.h):

- point-to-point connections are never a collective's (connIndex 1), and have buffers of their own;
- a transfer is cut into parts, one a channel, and each part into equal chunks but for the last;
- a connection takes up a part when the one before it is done there, so the entry for a part's first chunk
  comes after the last chunk before it (``credited``); as many entries as there are slots come with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.collectives.buffers import CHUNKS, RING, STEP
from dpuflow.ncclwire import NCCL_STEPS
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.buffers import Buffer
    from dpuflow.collectives.streams import Columns, Edge
    from dpuflow.tables import Rows

    Ints = NDArray[np.int64]

ALIKE: Final = 0.9
"""Share of cases that must agree: what loss or a capture's edge disturbs is left room for."""
TWICE: Final = 2
"""Times the usual time for one slot that is no more than one; a part's end takes as many as there are."""
PIECES: Final = NCCL_STEPS
"""A receiver that comes late frees as many slots one by one, and no more."""


def lines_of(
    exchanges: Rows, rows: Ints, announced: Ints, buffers: Mapping[int, Buffer]
) -> list[tuple[Edge, Ints]]:
    """(sender, receiver) and rows of each way of a connection whose entries announce a chunk."""
    from dpuflow.kernels import streams

    key = np.empty(len(rows), np.int64)
    keys = streams.directions(exchanges, rows, key) + 1
    room = announced[rows]
    # Rings of Simple have such slots where NCCL_BUFFSIZE is 512 KiB or 1 MiB, others where it is 2 MiB.
    sizes = [s for s in CHUNKS if buffers.get(s) != RING and (s == min(CHUNKS) or buffers.get(s) != STEP)]
    chunk = np.isin(room, sizes)
    other = np.bincount(key[(room != 0) & ~chunk], minlength=keys)
    own = ((np.bincount(key[chunk], minlength=keys) > 0) & (other == 0))[key]
    mine, line = rows[own], key[own]
    if not len(mine):
        return []
    order = np.lexsort((exchanges["order"][mine], line))
    parts = np.split(mine[order], np.flatnonzero(np.diff(line[order])) + 1)
    parts.sort(key=lambda part: int(part[0]))
    return [((int(exchanges["src"][p[0]]), int(exchanges["dst"][p[0]])), p) for p in parts]


class Parts:
    """The parts that one connection carries one way: ``begins[k]:begins[k + 1]`` are places in ``rows``."""

    def __init__(self, exchanges: Rows, columns: Columns, edge: Edge, rows: Ints, asked: Ints) -> None:
        self.edge, self.rows = edge, rows
        self.bytes, self.starts = columns.sizes[rows], columns.starts[rows]
        self.sizes = self.bytes // asked  # of several senders' messages that go together one
        self.several = bool((asked > 1).any())
        self.arrivals = columns.arrivals[rows]
        self.grants = exchanges["grant_ns"][rows]
        self.lossy = bool(exchanges["retransmitted"][rows].any())
        self.number = exchanges["sub"][rows].astype(np.int64)  # clear-to-send entries count from 1
        self.begins = self._cut()

    def _cut(self) -> Ints:
        """Where parts begin, the end as the last."""
        count = len(self.rows)
        granted, before = self.grants[1:], self.arrivals[:-1]
        unknown = (granted == NEVER) | (before == NEVER)
        # A part's chunks never grow.
        new = np.where(unknown, self.sizes[1:] != self.sizes[:-1], granted > before)
        new |= (self.sizes[1:] > self.sizes[:-1]) | (np.diff(self.number) > 1)
        begins = np.flatnonzero(np.r_[True, new])
        # A receiver that comes late frees slots one by one and looks like a beginning: there the entries
        # come one by one, too, at a true one as many at once as there are slots.
        ends = np.append(begins[1:], count)
        at_once = np.array(
            [
                int(np.searchsorted(self.grants[a:b], self.arrivals[a], "right"))
                for a, b in zip(begins.tolist(), ends.tolist(), strict=True)
            ]
        )
        slots = self.slots = int(at_once.max(initial=1))
        kept = [0]
        for number in range(1, len(begins)):
            at, last = int(begins[number]), int(begins[number]) - 1
            even = last > kept[-1] and self.sizes[kept[-1]] == self.sizes[last] >= self.sizes[at]
            doubt = even and at - kept[-1] >= slots
            rest = self.sizes[at : ends[number]]
            # A busy proxy has not posted all of them by the time the first chunk is there, but most.
            few = 2 * at_once[number] <= min(slots, len(rest)) and len(rest) > 1
            one_by_one = few or rest.max() > _chunk(int(rest.sum()))
            goes_on = self._goes_on(kept[-1] + slots, at) and not self._at_once(at, slots)
            if not (doubt and (one_by_one or goes_on)):
                kept.append(at)
        return np.array([*kept, count])

    def _goes_on(self, begin: int, at: int) -> bool:
        """Whether the entry ``at`` comes as those from ``begin`` on do, which wait for one slot each.

        Where a part ends all slots are emptied before the next entry.
        """
        gaps = np.diff(self.grants[begin - 1 : at + 1])
        return len(gaps) > 1 and bool(gaps[-1] <= TWICE * np.median(gaps[:-1]))

    def _at_once(self, at: int, slots: int) -> bool:
        """Whether the entries from ``at`` on come together, not one by one as those that wait for a slot.

        Messages that several senders' go with share fewer slots: these are empty after one or two more.
        """
        if not self.several or slots < TWICE:
            return False
        gaps, mine = np.diff(self.grants[:at]), np.diff(self.grants[at : at + slots])
        return len(mine) > 0 and bool(TWICE * mine.max() < np.median(gaps))

    def cut_by_rule(self, lanes: int) -> bool:
        """Whether chunks are as large as NCCL cuts parts of ``lanes`` that a transfer may have."""
        total = lanes * np.add.reduceat(self.sizes, self.begins[:-1])
        largest = np.maximum.reduceat(self.sizes, self.begins[:-1])
        unit = np.where(total < 131_072, 32_768, np.where(total < 1 << 20, 65_536, max(CHUNKS)))
        return bool((largest <= unit).mean() >= ALIKE)

    def signatures(self) -> list[tuple[int, int]]:
        """Messages and bytes of every part."""
        total = np.add.reduceat(self.sizes, self.begins[:-1])
        return list(zip(np.diff(self.begins).tolist(), total.tolist(), strict=True))

    def mend(self, known: Counter[tuple[int, int]]) -> None:
        """Put together what a late receiver or a proxy that stalled made look like several parts.

        Where others show it as one: parts as long as the whole are ``known``, and come more often than ones
        like the pieces, or the first piece alone shows chunks of one size.
        """
        bounds, pieces = self.begins.tolist(), self.signatures()
        kept, place = [], 0
        longest = max(count for count, _ in known)
        while place < len(pieces):
            kept.append(bounds[place])
            place = self._whole(place, bounds, pieces, known, longest)
        self.begins = np.array([*kept, len(self.rows)])
        begins = self.begins[:-1]
        self.start_ns = self.starts[begins]
        self.end_ns = self.arrivals[self.begins[1:] - 1]
        self.size = np.add.reduceat(self.bytes, begins)
        self.whole = np.ones(len(begins), bool)
        if self.number[0] > 1:
            self.whole[0] = (int(self.begins[1]), int(self.size[0])) in known
        self.next_ns = np.r_[self.grants[begins[1:]], NEVER]

    def _whole(
        self,
        place: int,
        bounds: Sequence[int],
        pieces: Sequence[tuple[int, int]],
        known: Counter[tuple[int, int]],
        longest: int,
    ) -> int:
        """Behind which of ``pieces`` the part that begins with number ``place`` ends."""
        count, size = pieces[place]
        begin, rarest, best = bounds[place], known[pieces[place]], (0, place + 1)
        even = count >= 2 and bool(self.sizes[begin] == self.sizes[begin + count - 1])
        for last in range(place + 1, min(place + PIECES, len(pieces))):
            # Chunks of a part are as large as its first, but for the last.
            before = bounds[last] - 1
            if self.sizes[before] != self.sizes[begin] or self.sizes[before + 1] > self.sizes[begin]:
                break
            count, size = count + pieces[last][0], size + pieces[last][1]
            rarest = max(rarest, known[pieces[last]])
            often = known[count, size]
            sure = even and (last == place + 1 or pieces[place][0] == self.slots)
            if often > best[0] and (often > rarest or sure):
                best = often, last + 1
            if count >= longest:
                break
        return best[1]

    def piece(self, number: int) -> Ints:
        """The rows of a part."""
        return self.rows[self.begins[number] : self.begins[number + 1]]


def _chunk(size: int) -> int:
    """The largest chunk of a part of ``size`` bytes."""
    return 32_768 if size < 131_072 else 65_536 if size < 1 << 20 else max(CHUNKS)
