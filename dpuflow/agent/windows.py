"""Windows: what is held of an endless capture in, each collective once it is settled out.

In: the tables of all messages held (``Stream.tables``) and until when the capture was read. Out: what was
newly settled, and before which time each flow's messages are needed no more. The whole span is analysed at
each step, as a capture of that span would be; a collective that was published is known by its messages.
docs/agent.md ("How windows settle") gives the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.agent.baseline import Baseline
from dpuflow.entries import AT_LEAST, EXACT
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Role
from dpuflow.store.segments import only_flows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dpuflow.agent.config import Windows as Settings
    from dpuflow.agent.stream import Counts
    from dpuflow.analysis import Worked
    from dpuflow.identity.rankmap import Place
    from dpuflow.results import Analysis, Collective, Transfer
    from dpuflow.schema.tables import CaptureTables, Rows

    Ints = NDArray[np.int64]

PATIENCE: Final = 3.0
"""A collective whose members have not all gone on to another transfer may be incomplete: it is settled after
this many settling times."""
HANDSHAKES: Final = 3
"""Offers and grants wait for their data for so many spans: a receiver may be ready long before."""
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Settled:
    """What a step came to. ``before_ns``: by flow row, what ended earlier is needed no more."""

    analysis: Analysis
    late: frozenset[tuple[int, int]]
    counted: dict[tuple[int, int], int]
    until_ns: int
    before_ns: Ints
    held: int  # collectives that are not settled yet


class Windows:
    """Decides step by step what is settled. ``step`` is to be called with growing times."""

    def __init__(
        self,
        settings: Settings,
        ranks: Mapping[str, Place] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.ranks, self.names = ranks, names
        self.span_s = settings.span  # may be set lower for want of memory,
        self.most: int | None = None  # and so may the messages that are held
        self._published = np.zeros(0, np.uint64)  # keys of messages of collectives published, sorted
        self._frontier_ns = NEVER  # what began before has been published, or never will be
        self._recognised: dict[
            tuple[int, int, str, int], int
        ] = {}  # since when a collective is told like this
        self._handed: dict[tuple[str, str, str], int] = {}  # way of transfers: end of the last one published
        self._shifted_ns = 0  # by how much the clock has been set since the start
        self._baseline = Baseline()  # counters of the flows at some times within the span

    def step(self, tables: CaptureTables, counts: Counts, until_ns: int) -> Settled:
        """Settle what can be, ``tables`` holding all that came before ``until_ns``; ``counts`` are theirs."""
        from dpuflow.analysis import analyze_tables

        held = self._within(tables, counts)
        if held.info.last_ns is not None:  # who sends nothing is silent until now, not until the last packet
            held = replace(held, info=replace(held.info, last_ns=max(held.info.last_ns, until_ns)))
        worked = analyze_tables([held], ranks=self.ranks, names=self.names)
        keys = _message_keys(tables.messages, counts.flow, self._shifted_ns)
        spans = _Spans(worked, tables.messages, keys, self._shifted_ns)
        fresh = self._fresh(spans)
        settled = fresh & self._is_settled(spans, until_ns)
        chosen = np.flatnonzero(settled)
        self._published = _merged(self._published, spans.keys_of(chosen))
        cut_ns = self._cut(tables, until_ns)
        open_ = fresh & ~settled
        before_ns = self._needed(tables, spans, open_, cut_ns, until_ns)
        self._published = self._published[np.isin(self._published, keys, assume_unique=True)]
        waiting = spans.start_ns[open_]
        settled_ns = min(cut_ns, int(waiting.min())) if len(waiting) else cut_ns
        self._frontier_ns = max(self._frontier_ns, settled_ns)
        analysis, late, counted = _only(worked, chosen)
        analysis.transfers = self._transfers(worked.analysis, cut_ns, until_ns)
        self._baseline.note(counts, self.span_s * 1e9 / 12, cut_ns)
        return Settled(analysis, late, counted, until_ns, before_ns, int(open_.sum()))

    def shift(self, step_ns: int) -> None:
        """The clock was set by so much, and all that is held moved along."""
        self._shifted_ns += step_ns
        if self._frontier_ns != NEVER:
            self._frontier_ns += step_ns
        self._handed = {way: end_ns + step_ns for way, end_ns in self._handed.items()}
        self._baseline.shift(step_ns)

    def _within(self, tables: CaptureTables, counts: Counts) -> CaptureTables:
        """The tables with the flows of what is held of messages alone, and counters that cover about that."""
        flows, info = tables.flows, tables.info
        base = self._baseline.before(counts)
        if base is not None:
            flows = flows.copy()
            for name, values in zip(_counter_names(), grown(base, counts).T, strict=True):
                flows[name] = values.astype(flows[name].dtype)
            flows["first_ns"] = np.maximum(flows["first_ns"], base.time_ns)
            info = replace(info, packets=max(counts.packets - base.packets, 0),
                           bytes=max(counts.bytes - base.bytes, 0), first_ns=base.time_ns)  # fmt: skip
        used = flows["packets"] > 0
        used[tables.messages["flow"]] = True
        return only_flows(replace(tables, flows=flows, info=info), used)

    def _fresh(self, spans: _Spans) -> NDArray[np.bool_]:
        """Collectives most of whose messages were in none before, and that began in what is held whole."""
        known = np.isin(spans.keys, self._published)
        share = np.bincount(spans.of, known, spans.count) / np.maximum(spans.members(), 1)
        fresh: NDArray[np.bool_] = (share < 0.5) & (spans.start_ns >= self._frontier_ns)
        return fresh

    def _is_settled(self, spans: _Spans, until_ns: int) -> NDArray[np.bool_]:
        """Over for long enough, and all of it there."""
        settle_ns = round(self.settings.settle * 1e9)
        age = until_ns - spans.end_ns
        followed = spans.followed & spans.whole
        settled: NDArray[np.bool_] = (age >= settle_ns) & followed
        settled |= (age >= PATIENCE * settle_ns) & spans.whole
        # With more to see the same messages may turn out to be something else.
        settled &= until_ns - self._known_since(spans, until_ns) >= settle_ns
        # What never becomes whole is published as it is, so that it does not hold the rest up for ever.
        return settled | (age >= self.span_s * 1e9)

    def _transfers(self, analysis: Analysis, cut_ns: int, until_ns: int) -> list[Transfer]:
        """Those of one-sided pages that are over for long enough and were not published before.

        Of one way they come one after the other, so the end of the last one tells what is new; what of one
        way was held no longer when it was looked at is not told again in part.
        """
        settled_ns = until_ns - round(self.settings.settle * 1e9)
        self._handed = {way: end_ns for way, end_ns in self._handed.items() if end_ns > cut_ns}
        fresh: list[Transfer] = []
        for transfer in sorted(analysis.transfers, key=lambda each: each.end_ns):
            src, dst = (analysis.endpoints[end].address for end in (transfer.src, transfer.dst))
            way = (src, dst, transfer.verb)
            if transfer.end_ns > settled_ns or transfer.start_ns <= self._handed.get(way, cut_ns):
                continue
            self._handed[way] = transfer.end_ns
            fresh.append(replace(transfer, id=len(fresh)))
        return fresh

    def _known_since(self, spans: _Spans, until_ns: int) -> Ints:
        """Since when each collective has been recognised as it is now."""
        before = self._recognised
        self._recognised = {what: before.get(what, until_ns) for what in spans.told}
        return np.array([self._recognised[what] for what in spans.told], np.int64)

    def _cut(self, tables: CaptureTables, until_ns: int) -> int:
        """What ended before is let go, unless something open needs it."""
        span_ns, longest_ns = round(self.span_s * 1e9), round(self.settings.longest * 1e9)
        ends = tables.messages["last_ns"]
        cut_ns = until_ns - span_ns
        if len(ends) <= self.settings.messages or self.span_s < self.settings.span:
            older = int(np.searchsorted(ends, cut_ns))  # in order of time
            more = self.settings.messages - (len(ends) - older)
            if self.span_s >= self.settings.span and more > 0:
                first = max(older - more, 0)
                cut_ns = int(ends[first]) if first else until_ns - longest_ns
        if self.most is not None and len(ends) > self.most:
            cut_ns = max(cut_ns, int(ends[-self.most]))
        return max(cut_ns, until_ns - longest_ns)

    def _needed(
        self, tables: CaptureTables, spans: _Spans, open_: NDArray[np.bool_], cut_ns: int, until_ns: int
    ) -> Ints:
        """By flow row the time from which on its messages are needed."""
        before_ns = np.full(len(tables.flows), cut_ns)
        messages = tables.messages
        if self.most is not None and len(messages) > self.most:
            return before_ns  # there is no room for what is open
        oldest_ns = until_ns - round(self.settings.longest * 1e9)
        alive = (open_ & (spans.start_ns > oldest_ns)) | (spans.end_ns >= cut_ns)
        rows = spans.rows[alive[spans.of]]
        np.minimum.at(before_ns, messages["flow"][rows].astype(np.int64), messages["first_ns"][rows])
        waiting = np.isin(messages["role"], (Role.OFFER, Role.GRANT))
        waiting &= messages["first_ns"] > until_ns - HANDSHAKES * round(self.span_s * 1e9)
        waiting[spans.rows] = False
        waiting[spans.matched] = False
        rows = np.flatnonzero(waiting)
        np.minimum.at(before_ns, messages["flow"][rows].astype(np.int64), messages["first_ns"][rows])
        return before_ns


class _Spans:
    """When each collective of a result began and ended, and by which messages it is known."""

    def __init__(self, worked: Worked, messages: Rows, keys: NDArray[np.uint64], shifted_ns: int) -> None:
        collectives = worked.analysis.collectives
        self.count = len(collectives)
        self.told = [
            (c.start_ns - shifted_ns, c.end_ns - shifted_ns, c.op, c.wire_bytes) for c in collectives
        ]
        self.start_ns = np.array([c.start_ns for c in collectives], np.int64)
        self.end_ns = np.array([c.end_ns for c in collectives], np.int64)
        instances = [worked.instances[n] for n in worked.listed]
        lengths = [len(instance.rows) for instance in instances]
        exchange = np.concatenate([i.rows for i in instances]) if instances else np.zeros(0, np.int64)
        of = np.repeat(np.arange(self.count), lengths)
        transfers, exchanges = worked.joined.transfers, worked.exchanges
        parts, owners = [], []
        for name in ("offer", "grant", "data"):
            row = exchanges[name][exchange]
            seen = row != NONE32
            parts.append(transfers["message"][row[seen]].astype(np.int64))
            owners.append(of[seen])
        self.rows = np.concatenate(parts)  # MESSAGE rows
        self.of = np.concatenate(owners)
        self.keys = keys[self.rows]
        told = exchanges["data"] != NONE32
        matched = [
            transfers["message"][exchanges[name][told & (exchanges[name] != NONE32)]]
            for name in ("offer", "grant")
        ]
        self.matched = np.concatenate(matched).astype(np.int64)  # handshakes that have their data
        first = np.full(self.count, np.iinfo(np.int64).max)
        last = np.full(self.count, NEVER)
        np.minimum.at(first, self.of, messages["first_ns"][self.rows])
        np.maximum.at(last, self.of, messages["last_ns"][self.rows])
        self.start_ns, self.end_ns = np.minimum(self.start_ns, first), np.maximum(self.end_ns, last)
        cut = (messages["flags"][self.rows] & np.uint8(MessageFlag.ENDS_AFTER)) != 0
        unended = np.bincount(self.of, cut, self.count) > 0
        complete = np.array([c.complete for c in collectives], bool)
        self.whole = complete & ~unended
        self.followed = self._followed(worked)

    def _followed(self, worked: Worked) -> NDArray[np.bool_]:
        """Whether each member has begun something else afterwards."""
        exchanges = worked.exchanges
        begun = exchanges["data_ns"]
        latest = np.full(len(worked.joined.endpoints), NEVER)
        for end in ("src", "dst"):
            np.maximum.at(latest, exchanges[end].astype(np.int64), begun)
        groups = worked.analysis.groups
        return np.array(
            [
                all(latest[member] > end_ns for member in groups[c.group].endpoints)
                for c, end_ns in zip(worked.analysis.collectives, self.end_ns.tolist(), strict=True)
            ],
            bool,
        )

    def members(self) -> Ints:
        """How many messages each collective has."""
        members: Ints = np.bincount(self.of, minlength=self.count)
        return members

    def keys_of(self, chosen: Ints) -> NDArray[np.uint64]:
        """Keys of the messages of these collectives."""
        picked = np.zeros(self.count, bool)
        picked[chosen] = True
        keys: NDArray[np.uint64] = self.keys[picked[self.of]]
        return keys


def grown(before: Counts, now: Counts) -> NDArray[np.uint64]:
    """How counters have grown since, flows x COUNTERS; of flows that were not there, all of them."""
    values: NDArray[np.uint64] = now.values.copy()
    if len(before.flow):
        at = np.minimum(np.searchsorted(before.flow, now.flow), len(before.flow) - 1)
        same = before.flow[at] == now.flow
        values[same] -= before.values[at[same]]
        values[:, _narrow()] &= NONE32  # counters of 32 bits begin anew
    return values


def _counter_names() -> tuple[str, ...]:
    from dpuflow.agent.stream import COUNTERS

    return COUNTERS


def _narrow() -> list[int]:
    from dpuflow.schema.rows import FLOW

    return [n for n, name in enumerate(_counter_names()) if FLOW.dtype[name].itemsize == 4]


def _message_keys(messages: Rows, numbers: Ints, shifted_ns: int) -> NDArray[np.uint64]:
    """What tells a message from all others, for as long as its flow lives: its flow and when it began."""
    flow = numbers[messages["flow"]].astype(np.uint64)
    begun = (messages["first_ns"] - shifted_ns).astype(np.uint64)
    keys: NDArray[np.uint64] = (begun + flow * _MIX) ^ messages["wire"].astype(np.uint64)
    return keys


def _merged(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> NDArray[np.uint64]:
    both: NDArray[np.uint64] = np.unique(np.concatenate([old, new]))
    return both


def _only(
    worked: Worked, chosen: Ints
) -> tuple[Analysis, frozenset[tuple[int, int]], dict[tuple[int, int], int]]:
    """The result with those collectives alone and without flows; which of their entries were late; the wait
    charged to each entry that says how late it was.
    """
    collectives: list[Collective] = []
    late = []
    counted: dict[tuple[int, int], int] = {}
    entries, charges = worked.inferred.entries, worked.inferred.charges
    known = np.isin(worked.inferred.relative.bound, (EXACT, AT_LEAST))
    for number, at in enumerate(chosen.tolist()):
        collectives.append(replace(worked.analysis.collectives[at], id=number))
        instance = worked.listed[at]
        rows = slice(*entries.offsets[instance : instance + 2].tolist())
        late += [(number, int(end)) for end in entries.endpoint[rows][charges.late[rows]]]
        for row in (np.flatnonzero(known[rows]) + rows.start).tolist():
            counted[number, int(entries.endpoint[row])] = int(charges.wait_ns[row])
    return replace(worked.analysis, collectives=collectives, flows=[]), frozenset(late), counted
