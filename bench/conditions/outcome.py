"""One drawn job: what it has, what an analysis says of it, all of its captures or some."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import dpuflow
from bench.conditions.beside import Beside, beside, timed
from bench.conditions.draw import draw
from bench.conditions.truth import costs, play, waited

if TYPE_CHECKING:
    from bench.conditions.draw import Drawn
    from bench.conditions.truth import Cost
    from dpuflow.results import Analysis
    from dpuflow.results.tokens import Severity


@dataclass
class Outcome:
    """What one job has, and what is found: condition, severity, ranks. ``unsure``: put in, and what it cost
    may be chance; such a one is neither missed nor invented."""

    number: int
    true: dict[str, list[int]]
    found: list[tuple[str, Severity, list[int]]]
    parts: list[str]
    said: list[str]
    costs: dict[str, Cost]
    stated: dict[str, float | None]
    unsure: set[str]
    beside: Beside = field(default_factory=Beside)
    partly: dict[str, set[str]] = field(default_factory=dict)
    """What is told above info by the captures of half of the nodes, and of one."""
    missing: dict[str, str] = field(default_factory=dict)
    """Of a job that hangs, whether the missing rank, and no other, is named (right), others are (wrong), or
    who it is is said not to be known (not named); by what is captured."""


def one(number: int) -> Outcome:
    """Play and analyse job ``number``."""
    drawn = draw(number)
    figures = Beside()
    with tempfile.TemporaryDirectory() as folder:
        play(drawn.scenario, folder)
        true = costs(number, drawn, folder)
        by_nature = waited(folder)
        files = [str(path) for path in sorted(Path(folder).glob("*.pcap.gz"))]
        with timed(figures):
            result = dpuflow.analyze(files, clock=drawn.clock)
        figures += beside(folder, result)
        partly = {
            name: dpuflow.analyze(some, clock=drawn.clock)
            for name, some in _some(number, drawn, files).items()
        }
    found = _told(result)
    parts = [part.condition for each in result.findings for part in each.consists_of]
    said = [f"{each.severity} {each.condition}: {each.summary}" for each in result.findings]
    costly = {name: ends for name, ends in drawn.conditions.items() if true[name].there}
    costly |= by_nature
    unsure = {name for name, cost in true.items() if cost.unsure}
    stated = {each.condition: each.cost_share for each in result.findings if each.condition in costly}
    outcome = Outcome(number, costly, found, parts, said, true, stated, unsure, figures)
    for name, each in partly.items():
        outcome.partly[name] = {condition for condition, severity, _ in _told(each) if severity != "info"}
    if "hang" in drawn.conditions:
        for name, each in {"all nodes": result, **partly}.items():
            outcome.missing[name] = _missing(each, drawn.conditions["hang"])
    return outcome


SURE: Final = 0.5
"""Confidence of a hang whose missing rank is not known."""


def _missing(result: Analysis, true: list[int]) -> str:
    """What the hangs that are found say of who is missing."""
    sure = replace(result, findings=[each for each in result.findings if each.confidence > SURE])
    named = {end for condition, _, ends in _told(sure) if condition == "hang" for end in ends}
    return "right" if named == set(true) else "wrong" if named else "not named"


def _some(number: int, drawn: Drawn, files: list[str]) -> dict[str, list[str]]:
    """Captures of half of the nodes, and of one: beside the one at fault, where that is a single one."""
    random = Random(f"captured {number}")
    faulty = next(iter(drawn.conditions.values()), [])
    others = [file for node, file in enumerate(files) if [node] != faulty]
    return {"half": sorted(random.sample(files, max(len(files) // 2, 1))), "one": [random.choice(others)]}


def _told(result: Analysis) -> list[tuple[str, Severity, list[int]]]:
    """Each finding's condition, severity and ranks."""
    found: list[tuple[str, Severity, list[int]]] = []
    for each in result.findings:
        ends = [result.endpoints[end] for end in each.endpoints]
        ranks = [int(end.address.split(".")[-1]) - 1 if end.rank is None else end.rank for end in ends]
        found.append((each.condition, each.severity, ranks))
    return found
