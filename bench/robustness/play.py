"""A twin is made, written, analysed and judged: names in, an ``Outcome`` out."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dpuflow
from bench.robustness.cases import read_subject
from bench.robustness.judge import Outcome, judge
from bench.robustness.records import write_records
from bench.robustness.truth import Truth, read_truth
from bench.robustness.twins import Captures, Step, make_twin, step_of, twin_named
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines
from dpuflow.scoring.truth import Case, place_case

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.robustness.cases import Capture, Subject

MEMORY = "/dev/shm"


def play(case: str, twins: Sequence[str], seed: int = 0) -> list[Outcome]:
    """The outcomes of these twins of ``case``; a twin that leaves its captures as they are has none."""
    subject = read_subject(case)
    return [_play(subject, name, captures) for name, captures in twins_of(subject, twins, seed)]


def twins_of(subject: Subject, twins: Sequence[str], seed: int = 0) -> Iterator[tuple[str, Captures]]:
    """The captures of those of ``twins`` that change any."""
    late = late_nodes(subject)
    for name in twins:
        captures = make_twin(subject, twin_named(name), late, seed)
        if name == "whole" or captures != subject.captures:
            yield name, captures


def late_nodes(subject: Subject) -> set[int]:
    """The nodes of the ranks that were made late."""
    file_of = {row["rank"]: row.get("capture") or row.get("pcap") or "" for row in subject.meta["nodes"]}
    node_of = {capture.name: capture.node for capture in subject.captures}
    ranks = {
        rank
        for row in subject.truth.get("collectives", [])
        for rank, ns in enumerate(row.get("injected_ns") or [])
        if ns
    }
    stems = {file_of[rank].partition(".")[0] for rank in ranks}
    return {node_of[stem] for stem in stems if stem in node_of}


def _play(subject: Subject, name: str, captures: Captures) -> Outcome:
    asked(subject.name)  # not on this twin's account
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        points = vantages(subject, captures, Path(folder))
        begin = time.process_time()
        try:
            result = dpuflow.analyze(points)
            return judged(subject, name, captures, result, time.process_time() - begin)
        except Exception as error:  # any error is an outcome here, of the program's own making or not
            return Outcome(subject.name, name, said=f"{type(error).__name__}: {error}")


def judged(
    subject: Subject, name: str, captures: Captures, result: dpuflow.Analysis, cpu_s: float = 0.0
) -> Outcome:
    """What the ``result`` of twin ``name`` is worth."""
    outcome = Outcome(subject.name, name, cpu_s=cpu_s, said=_headline(list(text_lines(result))))
    analysis: dict[str, Any] = json.loads("\n".join(json_lines(result)))
    case = place_case(subject.truth, subject.meta, analysis, subject.name)
    _set_back(case, analysis, step_of(subject.captures, captures))
    slack_ns = subject.slack_ns + twin_named(name).scatter_ns
    seen = _seen(subject, captures, case)
    unwatched = frozenset(case.endpoint_of_rank.values()) - seen
    truth = replace(_truth(subject, case), asked=asked(subject.name), unwatched=unwatched)
    return judge(outcome, analysis, _in_sight(seen, case), truth, slack_ns)


def _truth(subject: Subject, case: Case) -> Truth:
    return read_truth(case, subject.meta, subject.scenario, subject.slack_ns)


@lru_cache(maxsize=1)
def asked(name: str) -> bool:
    """Whether its lateness has to be told, by the whole case: a twin that hides it excuses no all-clear."""
    subject = read_subject(name)
    with tempfile.TemporaryDirectory() as folder:
        result = dpuflow.analyze(vantages(subject, subject.captures, Path(folder)))
    analysis = json.loads("\n".join(json_lines(result)))
    return _truth(subject, place_case(subject.truth, subject.meta, analysis, name)).asked


def _headline(lines: Sequence[str]) -> str:
    """The first sentence of a report, which may take several lines; what follows is indented."""
    first = []
    for line in lines:
        if first and (not line or line.startswith(" ")):
            break
        first.append(line)
    return " ".join(first)


def _seen(subject: Subject, captures: Sequence[Capture], case: Case) -> frozenset[int]:
    """Endpoints that were captured at their own nodes."""
    kept = {capture.name for capture in captures}
    return frozenset(
        case.endpoint_of_rank[row["rank"]]
        for row in subject.meta["nodes"]
        if str(row.get("capture") or row.get("pcap")).partition(".")[0] in kept
    )


def _in_sight(seen: frozenset[int], case: Case) -> Case:
    """The case less ranks of which no packet was seen, and collectives none of whose nodes was captured."""
    collectives = []
    for each in case.collectives:
        known = {end for end in each.enter_ns if end >= 0}
        if known & seen:
            enter, leave = (
                {e: t for e, t in of.items() if e in known} for of in (each.enter_ns, each.leave_ns)
            )
            collectives.append(replace(each, enter_ns=enter, leave_ns=leave))
    return replace(case, collectives=collectives)


def _set_back(case: Case, analysis: dict[str, Any], step: Step | None) -> None:
    """Move the truth as the reference clock was set, where it is that clock."""
    if step is None:
        return
    reference = next((row["capture"] for row in analysis["clocks"] if row["reference"]), 0)
    vantage = next(row["vantage"] for row in analysis["captures"] if row["id"] == reference)
    if vantage != step.vantage:
        return

    def moved(times: dict[int, int]) -> dict[int, int]:
        return {end: time + step.by_ns if time >= step.at_ns else time for end, time in times.items()}

    case.collectives = [
        replace(each, enter_ns=moved(each.enter_ns), leave_ns=moved(each.leave_ns))
        for each in case.collectives
    ]


def vantages(subject: Subject, captures: Captures, folder: Path) -> list[dpuflow.Vantage]:
    """One vantage point a clock; captures that a twin left alone are written once a case."""
    files: dict[str, list[str]] = {}
    for capture in captures:
        kept = _kept(subject.name)
        if any(capture is each for each in subject.captures):
            path = Path(kept.name) / f"{capture.name}.pcap"
            if not path.exists():
                write_records(capture.records, path)
        else:
            path = folder / f"{capture.name}.pcap"
            write_records(capture.records, path)
        files.setdefault(capture.vantage, []).append(str(path))
    return [dpuflow.Vantage(name, tuple(sorted(paths))) for name, paths in sorted(files.items())]


@lru_cache(maxsize=1)
def _kept(case: str) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None)
