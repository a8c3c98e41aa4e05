"""Which slices a result makes, and on which tracks.

A process a node, a track a rank with its collectives, one with what lies between them; a process for the job
with its steps, requests, groups, phases and findings; transfers, and messages where the result has them, with
arrows from sender to receiver; counters of what each endpoint has under way (``counters``).
Slices of one track never overlap: what runs at the same time gets a further track of the same name.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from dpuflow.differences import step_ends
from dpuflow.reports.columns import NEVER, entry_columns
from dpuflow.reports.names import Names
from dpuflow.reports.output import replacing_bytes
from dpuflow.reports.perfetto.messages import MessageRows
from dpuflow.reports.perfetto.packets import NONE, Slices, Trace
from dpuflow.reports.tidy import tidied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.results import Analysis, RankEntry

    Ints = NDArray[np.int64]

JOB_PID = 1
WORDS = {
    "exact": "",
    "at_most": " (entered at this time or before)",
    "at_least": " (entered at this time or after)",
    "unobservable": "",
}


def write_perfetto(result: Analysis, target: str) -> None:
    """Write the trace to the file ``target``, ``-`` being standard output. Raises OSError."""
    with replacing_bytes(target) as file:
        Writer(tidied(result), Trace(file)).write()


class Writer:
    """One result going into one trace; tracks are numbered as they come."""

    def __init__(self, result: Analysis, trace: Trace) -> None:
        self._result, self._trace, self._names = result, trace, Names(result)
        self._tracks = 0

    def write(self) -> None:
        """All of it."""
        job = self._number()
        self._trace.process(job, JOB_PID, "job")
        self._steps(job)
        self._requests(job)
        calls = self._result.collectives
        group = np.array([each.group for each in calls], np.int64)
        whole = rows_of(calls, ("id", "algorithm", "bytes", "wire_bytes", "confidence", "complete"),
                        [each.op for each in calls])  # fmt: skip
        for number in np.unique(group).tolist():
            mine = np.flatnonzero(group == number)
            self.lanes(job, f"group {number}", whole.take(mine))
            phases = [(phase, calls[at].id) for at in mine.tolist() for phase in calls[at].phases]
            ids = np.array([of for _, of in phases], np.int64)
            self.lanes(job, f"group {number} phases", rows_of([phase for phase, _ in phases], (),
                       [phase.name for phase, _ in phases], {"id": ids}))  # fmt: skip
        self._findings(job)
        self._ranks()

    def _number(self) -> int:
        self._tracks += 1
        return self._tracks

    def lanes(self, parent: int, name: str, rows: Slices) -> None:
        """Rows on as few tracks as keep them apart."""
        if not len(rows):
            return
        rows = replace(rows, end_ns=np.maximum(rows.begin_ns, rows.end_ns))
        rows = rows.take(np.lexsort((rows.end_ns, rows.begin_ns)))
        lane = lanes_of(rows.begin_ns, rows.end_ns)
        first = self._tracks + 1
        for _ in range(int(lane.max()) + 1):
            self._trace.track(self._number(), parent, name)
        order = np.argsort(lane, kind="stable")
        self._trace.slices(first + lane[order], rows.take(order))

    def counter(self, parent: int, name: str, unit: int, times_ns: Ints, values: Ints) -> None:
        """A counter of its own track; nothing where it never counts."""
        if values.any():
            track = self._number()
            self._trace.track(track, parent, name, unit)
            self._trace.counter(track, times_ns, values)

    def _steps(self, job: int) -> None:
        for each, ends in zip(self._result.steps, step_ends(self._result), strict=True):
            what = {"decode": "token", "prefill": "prompt"}.get(each.kind or "", "step")
            names = [f"{what} {number}" for number in range(1, len(ends))]
            told = {"median_step_ns": each.step_ns, "p99_ns": each.p99_ns, "layers": each.layers}
            notes = {key: np.full(len(names), NONE if n is None else n) for key, n in told.items()}
            self.lanes(job, f"{what}s", Slices(ends[:-1], ends[1:], names, notes))

    def _requests(self, job: int) -> None:
        rows = [each for each in self._result.requests if _times(each)]
        said = ("prompt_bytes", "answer_bytes", "tokens", "gap_ns", "gap_p99_ns", "held_ns", "complete")
        spans = np.array([(_times(each)[0], _times(each)[-1]) for each in rows], np.int64).reshape(-1, 2)
        notes = columns_of(rows, said)
        names = [f"request {each.id}" for each in rows]
        self.lanes(job, "requests", Slices(spans[:, 0], spans[:, 1], names, notes))
        waited = [each for each in rows if each.sent_ns is not None and each.first_ns is not None]
        sent, first = (np.array([getattr(each, key) for each in waited], np.int64)
                       for key in ("sent_ns", "first_ns"))  # fmt: skip
        names = [f"request {each.id} to its first token" for each in waited]
        self.lanes(job, "first tokens awaited", Slices(sent, first, names, {}))

    def _findings(self, job: int) -> None:
        times = [each.start_ns for each in self._result.collectives]
        fallback = self._result.start_ns if self._result.start_ns is not None else min(times, default=0)
        track = self._number()
        self._trace.track(track, job, "findings")
        for each in self._result.findings:
            notes = columns_of([each], ("id", "severity", "confidence", "advice", "summary", "cost_ns"))
            for evidence in each.evidence[:1]:
                notes["capture"] = [self._result.captures[evidence.capture].vantage]
                if (said := self._result.captures[evidence.capture].unopenable) is not None:
                    notes["unopenable"] = [said]
                else:
                    notes["first_packet"], notes["last_packet"] = map(one, evidence.packets)
                notes["filter"] = [evidence.filter]
            begin = one(fallback if each.start_ns is None else each.start_ns)
            self._trace.instants(track, Slices(begin, begin, [each.condition], notes))

    def _ranks(self) -> None:
        columns = entry_columns(self._result)
        entries = [entry for each in self._result.collectives for entry in each.ranks]
        known = np.flatnonzero(columns.enter_ns != NEVER)
        known = known[np.argsort(columns.endpoint[known], kind="stable")]
        ends = columns.endpoint[known]
        moved = self._transfers()
        messages = MessageRows(self._result, self._names)
        nodes: dict[int, int] = {}
        for endpoint in self._result.endpoints:
            mine = known[np.searchsorted(ends, endpoint.id) : np.searchsorted(ends, endpoint.id, "right")]
            out, into = (np.flatnonzero(side == endpoint.id) for _, side in moved)
            if not len(mine) and not len(out) and not len(into) and not messages.has(endpoint.id):
                continue
            node = endpoint.id if endpoint.node is None else endpoint.node
            if node not in nodes:
                nodes[node] = self._number()
                self._trace.process(nodes[node], JOB_PID + 1 + node, self._names.long(node))
            name = self._names.short(endpoint.id)
            rows = self._entries(mine, [entries[at] for at in mine.tolist()], columns.collective[mine])
            self.lanes(nodes[node], name, rows)
            self.lanes(nodes[node], f"{name} between collectives", between(rows))
            for (slices, _), some in zip(moved, (out, into), strict=True):
                self.lanes(nodes[node], f"{name} transfers", slices.take(some))
            messages.write(endpoint.id, nodes[node], self)

    def _entries(self, at: Ints, entries: list[RankEntry], collective: Ints) -> Slices:
        calls = self._result.collectives
        of = [calls[number] for number in collective.tolist()]
        names = [each.op + WORDS.get(entry.bound, "") for each, entry in zip(of, entries, strict=True)]
        ends = [call.end_ns if entry.leave_ns is None else entry.leave_ns
                for call, entry in zip(of, entries, strict=True)]  # fmt: skip
        notes = columns_of(entries, ("lateness_ns", "error_ns", "bound", "cause", "why"))
        begins = np.array([entry.enter_ns for entry in entries], np.int64)
        ids = np.array([call.id for call in of], np.int64)
        return Slices(begins, np.array(ends, np.int64), names, {"collective": ids, **notes})

    def _transfers(self) -> tuple[tuple[Slices, Ints], tuple[Slices, Ints]]:
        """Each transfer at both ends, with an arrow from its source, and which endpoints these are."""
        rows = self._result.transfers
        said = ("id", "bytes", "pages", "busy_ns", "likely", "path", "why", "wait_before_first_token_ns")
        arrows = np.arange(1, len(rows) + 1, dtype=np.uint64)
        out = replace(rows_of(rows, said, [f"{each.verb} out" for each in rows]), starts=arrows)
        into = replace(rows_of(rows, said, [f"{each.verb} in" for each in rows]), ends=arrows)
        src, dst = (np.array([getattr(each, key) for each in rows], np.int64) for key in ("src", "dst"))
        return (out, src), (into, dst)


def _times(request: Any) -> list[int]:
    """What is known of a request's times, in order."""
    return [at for at in (request.sent_ns, request.first_ns, request.last_ns) if at is not None]


def one(value: int) -> Ints:
    """A column of one row."""
    return np.array([value], np.int64)


def columns_of(rows: Sequence[Any], keys: Sequence[str]) -> dict[str, NDArray[np.generic] | Sequence[str]]:
    """Attributes of rows as notes; what none of them has is left out."""
    notes: dict[str, NDArray[np.generic] | Sequence[str]] = {}
    for key in keys:
        values = list(map(attrgetter(key), rows))
        kind = next((type(value) for value in values if value is not None), None)
        if kind is int:
            notes[key] = np.array([NONE if value is None else value for value in values], np.int64)
        elif kind is float:
            notes[key] = np.array(values, np.float64)
        elif kind is not None:
            notes[key] = values if kind is str else [str(value).lower() for value in values]
    return notes


def rows_of(rows: Sequence[Any], keys: Sequence[str], names: Sequence[str],
            more: dict[str, NDArray[np.generic] | Sequence[str]] | None = None) -> Slices:  # fmt: skip
    """Rows with ``start_ns`` and ``end_ns`` as slices."""
    begin, end = (np.array([getattr(row, key) for row in rows], np.int64) for key in ("start_ns", "end_ns"))
    return Slices(begin, end, names, {**columns_of(rows, keys), **(more or {})})


def lanes_of(begin_ns: Ints, end_ns: Ints) -> Ints:
    """For slices in order of their begin the lowest lane that is free then."""
    if not (begin_ns[1:] < np.maximum.accumulate(end_ns)[:-1]).any():
        return np.zeros(len(begin_ns), np.int64)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    lanes, used = [], 0
    for begin, end in zip(begin_ns.tolist(), end_ns.tolist(), strict=True):
        while busy and busy[0][0] <= begin:
            heappush(free, heappop(busy)[1])
        if free:
            lane = heappop(free)
        else:
            lane, used = used, used + 1
        heappush(busy, (end, lane))
        lanes.append(lane)
    return np.array(lanes, np.int64)


def between(rows: Slices) -> Slices:
    """From leaving the last collective to entering the next: what the rank did meanwhile is its own."""
    order = np.argsort(rows.begin_ns, kind="stable")
    begin = rows.begin_ns[order]
    left = np.maximum.accumulate(np.maximum(begin, rows.end_ns[order]))[:-1]
    free = begin[1:] > left
    return Slices(left[free], begin[1:][free], ["own work"] * int(free.sum()), {})
