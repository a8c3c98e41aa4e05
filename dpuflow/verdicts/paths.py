"""What a step had to wait for: its critical path through messages, from its end back to its beginning.

In: exchanges, collectives and transfers made of them, entries. Out: segments that follow one another and
cover the step without a gap. From when a rank had all it needed the path goes back along the message that
came last to when its sender sent it, and on to what that one had waited for: an input, what it sent before,
a credit, or its own entry. Before that it worked, since it left what it was in before; there the path goes
on.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Latest, Picked
from dpuflow.entries import AT_ONCE, places_of
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts.pipelines import Pipeline

    Hop = tuple[int, tuple[int, int], "What"]
    """A row of Entries, what its rank's act followed from (exchanges, -1: none), and what lies between.

    Of WORK the first of the two is the row that it had finished before."""

NONE: Final = (-1, -1)
HOPS: Final = 1 << 16
"""Messages that one step's path goes along at most: a loop that clocks make must end."""


class What(IntEnum):
    """What a segment is; its row of Entries is the rank's that it passed at."""

    WORK = 0  # a rank was in no collective
    FIRST = 1  # its input was there, and it had not yet acted: nobody knows when it entered
    HANDED = 2  # within a collective a rank had its input, and sent on
    SENT = 3  # a message was leaving its sender's node
    MOVED = 4  # a message was on its way
    CREDIT = 5  # a message waited for its receiver's credit
    NOTHING = 6  # nothing that was captured tells


class Segment(NamedTuple):
    """One piece of a path, ``row`` of Entries and ``exchange`` -1 where there is none."""

    what: What
    length_ns: int
    row: int
    exchange: int


class Paths:
    """Walks back along what each act had waited for; laid out once, for the ``wanted`` collectives."""

    def __init__(
        self,
        exchanges: Rows,
        instances: Sequence[Instance],
        entries: Entries,
        before: Ints,
        pipelines: Sequence[Pipeline],
        beside: Bools,
        wanted: Bools,
    ) -> None:
        """``before`` as of ``previous_row``, ``beside`` marks ranks that go on beside their collectives."""
        self.entries = entries
        number = np.flatnonzero(wanted)
        parts = [np.asarray(instances[n].rows, np.int64) for n in number.tolist()]
        told = np.concatenate([np.zeros(0, np.int64), *parts])
        of = np.repeat(number, [len(part) for part in parts])
        rows = Picked(exchanges, told)
        src, dst = (places_of(of, rows[end], entries) for end in ("src", "dst"))
        data, there = rows["data_ns"], rows["arrived_end_ns"]
        seen = (data != NEVER) & (there != NEVER) & (src >= 0) & (dst >= 0)
        at = np.flatnonzero(seen)
        src, dst = src[at], dst[at]
        self.number = told[at].data
        grant, granted = (rows[name][at] for name in ("grant_ns", "grant_arrived_ns"))
        data, there = data[at], np.maximum(there[at], data[at])
        end = np.clip(rows["data_end_ns"][at], data, there)
        first = np.full(len(entries.endpoint), -1)
        order = np.argsort(-data, kind="stable")
        first[src[order]] = order  # of several the first one, which is assigned last
        # Of each array a walk reads a few places, as Python's numbers.
        self.first = first.data
        asked = (
            (np.arange(len(entries.endpoint)), entries.leave_ns),
            (src, data - 1),  # not the message itself
            (dst, grant),
        )
        into, out = (
            [latest.by(*each) for each in asked] for latest in (Latest(dst, there), Latest(src, end))
        )
        self.at_leave, self.at_send, self.at_grant = (
            (came.data, sent.data) for came, sent in zip(into, out, strict=True)
        )
        self.data, self.there, self.end, self.src, self.dst, self.grant, self.granted = (
            np.ascontiguousarray(each).data for each in (data, there, end, src, dst, grant, granted)
        )
        self.enter, self.leave = entries.enter_ns.data, entries.leave_ns.data
        self.exact, self.beside = entries.exact.data, beside.data
        apart = np.array([i.op == Op.SEND_RECV for i in instances], bool)
        sender = np.zeros(len(entries.endpoint), bool)
        sender[entries.offsets[:-1][apart]] = True
        done = np.where(sender, entries.enter_ns, entries.leave_ns)
        self.done = done.data
        # Who gives a credit for a transfer had finished something else before.
        alone = apart[entries.collective[dst]] & (grant != NEVER)
        at = np.where(alone, grant, NEVER)
        self.gave = Latest(entries.endpoint, done).by(entries.endpoint[dst], at).data
        self.apart, self.sender = apart[entries.collective].data, sender.data
        self.before = before.copy().data
        for row, after in _fed(pipelines):
            self.before[row] = after

    def walk(self, first: int, last: int) -> list[Segment]:
        """From leaving row ``first`` to leaving row ``last``, the end first; lengths add up to that."""
        self.begin, self.now, self.found = self.leave[first], self.leave[last], list[Segment]()
        hop: Hop = last, _pair(self.at_leave, last), What.HANDED
        hops = 0
        while self.now > self.begin and hop[0] >= 0 and hops < HOPS:
            row, events, what = hop
            hop = self._entered(row, events[0]) if what == What.WORK else self._back(row, events, what)
            hops += 1
        if self.now > self.begin:
            self._to(self.begin, What.NOTHING, -1)
        return self.found

    def _to(self, when: int, what: What, row: int, exchange: int = -1) -> None:
        when = max(min(when, self.now), self.begin)
        if when < self.now:
            self.found.append(Segment(what, self.now - when, row, exchange))
            self.now = when

    def _back(self, row: int, events: tuple[int, int], what: What) -> Hop:
        """One hop back from ``now``, when the rank of ``row`` acted after an input and what it had sent."""
        came, sent = events
        arrived = self.there[came] if came >= 0 else NEVER
        left = self.end[sent] if sent >= 0 else NEVER
        entered = self.enter[row] if self.enter[row] <= self.now else NEVER
        bounded = not self.exact[row] and arrived != NEVER  # its first act may have followed from that
        if not bounded and NEVER < entered >= max(arrived, left):
            self._to(entered, what, row)
            return self._entered(row, self.before[row])
        if max(arrived, left) == NEVER or self._called(row, max(arrived, left), what):
            return self._entered(row, self.before[row])
        if left > arrived:
            self._to(left, what, row)
            return self._sent(sent)
        self._to(arrived, What.FIRST if bounded and entered == self.now else what, row)
        return self._sent(came)

    def _called(self, row: int, since: int, what: What) -> bool:
        """Whether a credit came with its rank's own call: nearer to its entry than to what it did before.

        Hosts that run ahead of their GPUs post credits when what was before is done (``entries.calling``).
        """
        ahead = self.enter[row] - self.now
        return what == What.CREDIT and 0 < ahead <= self.now - since

    def _sent(self, exchange: int) -> Hop:
        """Back along a message to what it had waited for at its sender: a credit, or what came before."""
        row, moved = self.src[exchange], self.data[exchange]
        self._to(self.end[exchange], What.MOVED, row, self.number[exchange])
        self._to(moved, What.SENT, row, self.number[exchange])
        came, sent = _pair(self.at_send, exchange)
        since = max(self.there[came] if came >= 0 else NEVER, self.end[sent] if sent >= 0 else NEVER)
        if since == NEVER and self.before[row] >= 0:
            since = self.done[self.before[row]]
        granted = self.granted[exchange]
        if NEVER < since < granted <= moved and moved - granted < AT_ONCE * (moved - since):
            self._to(granted, What.HANDED, row)
            self._to(self.grant[exchange], What.MOVED, row, self.number[exchange])
            to = self.dst[exchange]
            granting = _pair(self.at_grant, exchange)
            if self.apart[row] and granting == NONE:
                return to, (self.gave[exchange], -1), What.WORK
            return to, granting, What.CREDIT
        return row, (came, sent), What.HANDED

    def _entered(self, row: int, before: int) -> Hop:
        """Back over a rank's work, to what it had finished ``before``."""
        if before < 0:
            return -1, NONE, What.HANDED
        beside = self.beside[row]
        since = self.enter[before] if beside or self.sender[before] else self.leave[before]
        if since == NEVER:
            since = max(self.enter[before], self.leave[before])
        if since != NEVER:
            self._to(since, What.WORK, row)
        if beside:
            return before, NONE, What.HANDED
        if self.sender[before]:
            # What it sent there may have gone later than it was offered.
            sent = self.first[before]
            known = sent >= 0 and self.data[sent] <= self.now
            return self._sent(sent) if known else (before, NONE, What.HANDED)
        return before, _pair(self.at_leave, before), What.HANDED


def _fed(pipelines: Sequence[Pipeline]) -> Iterator[tuple[int, int]]:
    """Sends of stages, and the row that each follows from: its input's, or that of what it sent before."""
    for work in (work for each in pipelines for row in each.work for work in row if work is not None):
        told = work.after >= 0
        yield from zip(work.rows[told].tolist(), work.after[told].tolist(), strict=True)


def _pair(events: tuple[memoryview[int], memoryview[int]], at: int) -> tuple[int, int]:
    return events[0][at], events[1][at]
