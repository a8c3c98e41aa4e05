"""Which slices a result makes, and on which tracks.

A process a node, a track a rank with its collectives, one with what lies between them; a process with a track
a group of ranks, and one for the phases; transfers with arrows from sender to receiver; findings as instants.
Slices of one track never overlap: what runs at the same time gets a further track of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.quantities import count, duration
from dpuflow.reports.names import Names
from dpuflow.reports.output import replacing_bytes
from dpuflow.reports.perfetto.packets import Trace
from dpuflow.reports.tidy import clean, tidied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.results import Analysis, Collective, RankEntry

    Row = tuple[tuple[int, int], str, list[tuple[str, object]], tuple[int | None, int | None]]

JOB_PID = 1
WORDS = {
    "exact": "",
    "at_most": " (entered at this time or before)",
    "at_least": " (entered at this time or after)",
}
NO_FLOWS = (None, None)


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
        self._lanes(job, "steps", list(self._steps()))
        groups: dict[int, list[Collective]] = {}
        for each in self._result.collectives:
            groups.setdefault(each.group, []).append(each)
        for group, mine in sorted(groups.items()):
            self._lanes(job, f"group {group}", [self._collective(each) for each in mine])
            self._lanes(job, f"group {group} phases", [row for each in mine for row in self._phases(each)])
        self._findings(job)
        self._ranks()

    def _number(self) -> int:
        self._tracks += 1
        return self._tracks

    def _lanes(self, parent: int, name: str, rows: list[Row]) -> None:
        """Rows on as few tracks as keep them apart."""
        ends: list[int] = []
        lanes: list[list[Row]] = []
        for row in sorted(rows, key=lambda row: row[0]):
            begin, end = row[0]
            lane = next((place for place, busy in enumerate(ends) if busy <= begin), len(ends))
            if lane == len(ends):
                ends.append(0)
                lanes.append([])
            ends[lane] = max(end, begin)
            lanes[lane].append(row)
        for each in lanes:
            track = self._number()
            self._trace.track(track, parent, name)
            for span, said, notes, flows in each:
                self._trace.slice(track, (span[0], max(span)), said, notes, flows)

    def _steps(self) -> Iterator[Row]:
        for each in self._result.steps:
            what = {"decode": "token", "prefill": "prompt"}.get(each.kind or "", "step")
            notes: list[tuple[str, object]] = [("step_ns", each.step_ns), ("p99_ns", each.p99_ns)]
            said = f"{count(each.count, what)}, {duration(each.step_ns)} each"
            yield (each.start_ns, each.end_ns), said, notes, NO_FLOWS

    def _collective(self, each: Collective) -> Row:
        notes: list[tuple[str, object]] = [
            ("id", each.id), ("algorithm", each.algorithm), ("bytes", each.bytes),
            ("wire_bytes", each.wire_bytes),
            ("confidence", each.confidence), ("complete", str(each.complete).lower()),
        ]  # fmt: skip
        return (each.start_ns, each.end_ns), each.op, notes, NO_FLOWS

    def _phases(self, each: Collective) -> Iterator[Row]:
        for phase in each.phases:
            yield (phase.start_ns, phase.end_ns), phase.name, [("id", each.id)], NO_FLOWS

    def _findings(self, job: int) -> None:
        times = [each.start_ns for each in self._result.collectives]
        fallback = self._result.start_ns if self._result.start_ns is not None else min(times, default=0)
        track = self._number()
        self._trace.track(track, job, "findings")
        for each in self._result.findings:
            notes: list[tuple[str, object]] = [
                ("id", each.id), ("severity", each.severity), ("confidence", each.confidence),
                ("advice", each.advice),
                ("summary", each.summary), ("cost_ns", getattr(each, "cost_ns", None)),
            ]  # fmt: skip
            for evidence in each.evidence[:1]:
                notes += [("capture", self._result.captures[evidence.capture].vantage)]
                notes += [("first_packet", evidence.packets[0]), ("last_packet", evidence.packets[1])]
                notes += [("filter", clean(evidence.filter))]
            begin = fallback if each.start_ns is None else each.start_ns
            self._trace.instant(track, begin, each.condition, notes)

    def _ranks(self) -> None:
        entries: dict[int, list[tuple[Collective, RankEntry]]] = {}
        for each in self._result.collectives:
            for entry in each.ranks:
                if entry.enter_ns is not None:
                    entries.setdefault(entry.endpoint, []).append((each, entry))
        moved: dict[int, list[Row]] = {}
        for end, row in self._transfers():
            moved.setdefault(end, []).append(row)
        nodes: dict[int, int] = {}
        for endpoint in self._result.endpoints:
            mine, transfers = entries.get(endpoint.id, []), moved.get(endpoint.id, [])
            if not mine and not transfers:
                continue
            node = endpoint.id if endpoint.node is None else endpoint.node
            if node not in nodes:
                nodes[node] = self._number()
                self._trace.process(nodes[node], JOB_PID + 1 + node, self._names.long(node))
            name = self._names.short(endpoint.id)
            rows = [_entry(each, entry) for each, entry in mine]
            self._lanes(nodes[node], name, rows)
            self._lanes(nodes[node], f"{name} between collectives", list(_between(rows)))
            self._lanes(nodes[node], f"{name} transfers", transfers)

    def _transfers(self) -> Iterator[tuple[int, Row]]:
        """Each transfer at both ends, with an arrow from its source."""
        for each in self._result.transfers:
            notes: list[tuple[str, object]] = [
                ("id", each.id), ("bytes", each.bytes), ("pages", each.pages), ("busy_ns", each.busy_ns),
                ("likely", each.likely), ("path", each.path), ("why", clean(each.why)),
                ("wait_before_first_token_ns", each.wait_before_first_token_ns),
            ]  # fmt: skip
            span, arrow = (each.start_ns, each.end_ns), each.id + 1
            yield each.src, (span, f"{each.verb} out", notes, (arrow, None))
            yield each.dst, (span, f"{each.verb} in", notes, (None, arrow))


def _entry(each: Collective, entry: RankEntry) -> Row:
    begin = each.start_ns if entry.enter_ns is None else entry.enter_ns
    end = each.end_ns if entry.leave_ns is None else entry.leave_ns
    notes: list[tuple[str, object]] = [
        ("collective", each.id), ("lateness_ns", entry.lateness_ns), ("error_ns", entry.error_ns),
        ("bound", entry.bound), ("cause", entry.cause), ("why", entry.why),
    ]  # fmt: skip
    return (begin, end), each.op + WORDS.get(entry.bound, ""), notes, NO_FLOWS


def _between(rows: list[Row]) -> Iterator[Row]:
    """From leaving the last collective to entering the next: what the rank did meanwhile is its own."""
    left = None
    for (begin, end), *_ in sorted(rows, key=lambda row: row[0]):
        if left is not None and begin > left:
            yield (left, begin), "own work", [], NO_FLOWS
        left = max(end, begin, begin if left is None else left)
