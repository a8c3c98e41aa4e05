"""What was found of what jobs have, as tables: by condition, and each figure against what is asked."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import mean, median
from typing import TYPE_CHECKING

from bench.conditions.beside import Beside
from bench.conditions.draw import NETWORK
from bench.conditions.others import SHADOWS
from dpuflow.conditions import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.conditions.others import Told
    from bench.conditions.outcome import Outcome

HEADER = ("condition", "drawn", "found", "above info", "other place", "missed", "invented")
PERCENT = 10_000
"""Of a million."""


def matrix(outcomes: list[Outcome]) -> list[str]:
    """Lines of a table: by condition, and the healthy jobs."""
    drawn: Counter[str] = Counter()
    found: Counter[str] = Counter()
    loud: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    invented: Counter[str] = Counter()
    healthy = noisy = incidents = findings = 0
    for each in outcomes:
        above = [(name, ends) for name, severity, ends in each.found if severity != "info"]
        sound = not each.true and not each.unsure
        healthy += sound
        noisy += sound and bool(above)
        incidents += len(each.true)
        findings += len(above) if each.true else 0
        for name, at in each.true.items():
            drawn[name] += 1
            mine = [ends for condition, _, ends in each.found if condition == name]
            found[name] += bool(mine) or name in each.parts
            loud[name] += any(condition == name for condition, _ in above)
            elsewhere[name] += bool(mine) and not any(set(at) & set(ends) for ends in mine)
        for name in {name for name, _ in above} - set(each.true) - each.unsure:
            invented[name] += 1
    rows: list[tuple[str, ...]] = [HEADER]
    for name in sorted(set(drawn) | set(invented)):
        counts = (
            drawn[name],
            found[name],
            loud[name],
            elsewhere[name],
            drawn[name] - found[name],
            invented[name],
        )
        rows.append((name, *map(str, counts)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "| --- |" + " ---: |" * (len(HEADER) - 1))
    lines.append("")
    off = [
        abs(share - each.costs[name].share) / each.costs[name].share
        for each in outcomes
        for name, share in each.stated.items()
        if share is not None and len(each.true) == 1 and name in each.costs
    ]
    told = sum(loud.values()) + sum(invented.values())
    lines.append(
        f"{len(outcomes)} jobs; found {sum(found.values())} of {incidents} conditions;"
        f" {sum(loud.values())} of {told} told above info are there; {noisy} of {healthy} healthy jobs have a"
        f" finding above info; {findings / max(incidents, 1):.2f} findings above info an incident; the cost"
        f" stated of {len(off)} single conditions is off by {100 * median(off) if off else 0:.0f} % (median)."
        f" Left out: {sum(len(each.unsure) for each in outcomes)} whose cost may be chance."
    )
    return lines


def asked(outcomes: Sequence[Outcome], others: Sequence[Told]) -> list[str]:
    """Lines of a table: each measure, what is asked, what was found."""
    rows = [
        ("measure", "asked", "here"),
        *_of_findings(outcomes),
        *_of_hangs(outcomes),
        *_of_others(others),
        *_of_lists(sum((each.beside for each in outcomes), Beside())),
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "| --- | --- | --- |")
    return lines


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" + (f" ({100 * part / whole:.0f} %)" if whole else "")


def _right(values: Sequence[int], limit_ppm: int = PERCENT) -> str:
    """How many errors are within ``limit_ppm``."""
    return _share(sum(each <= limit_ppm for each in values), len(values))


def _direct(names: Iterable[str]) -> set[str]:
    return {name for name in names if TABLE[name].observability == "direct"}


def _of_findings(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    drawn = hit = told = there = noisy = sound = mixed = single = 0
    each_incident: list[int] = []
    elsewhere: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for each in outcomes:
        loud = [name for name, severity, _ in each.found if severity != "info"]
        named = {name for name, _, _ in each.found} | set(each.parts)
        drawn += len(_direct(each.true))
        hit += len(_direct(each.true) & named)
        counted = _direct(set(loud)) - each.unsure
        told += len(counted)
        there += len(counted & set(each.true))
        healthy = not each.true and not each.unsure
        sound += healthy
        noisy += healthy and bool(loud)
        each_incident += [len(loud)] if len(each.true) == 1 and not each.unsure else []
        of_network = [name in NETWORK for name in each.true]
        if len(each.true) == 1 and not each.unsure and (of_network[0] or "straggler" in each.true):
            single += 1
            wrong = {"straggler"} if of_network[0] else set(NETWORK)
            mixed += bool(wrong & set(loud)) and not set(each.true) & set(loud)
        for name, at in each.partly.items():
            counts = elsewhere[name]
            counts[0] += len(_direct(at) - each.unsure)
            # Who is out of step enters nothing that the others wait in: at its peers' nodes that is a hang.
            present = {*each.true, *(("hang",) if "desync" in each.true else ())}
            counts[1] += len(_direct(at) & present)
            counts[2] += healthy
            counts[3] += healthy and bool(at)
    rows = [
        ("recall, direct conditions", "97 %", _share(hit, drawn)),
        ("precision, direct conditions, above info", "97 %", _share(there, told)),
        ("sound jobs with a finding above info", "1 %", _share(noisy, sound)),
        (
            "findings above info of a single incident: median, mean", "1.0, 1.2",
            f"{median(each_incident):.1f}, {mean(each_incident):.2f}" if each_incident else "none drawn",
        ),
        ("network taken for a late GPU, or the other way", "1 %", _share(mixed, single)),
    ]  # fmt: skip
    for name, (all_told, true, healthy, noisy) in elsewhere.items():
        of = "half of the nodes" if name == "half" else "one node"
        rows.append((f"captured at {of}: precision", "97 %", _share(true, all_told)))
        rows.append(
            (f"captured at {of}: sound jobs with a finding above info", "1 %", _share(noisy, healthy))
        )
    return rows


def _of_hangs(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str]]:
    rows = []
    for where, want in (("all nodes", "100 %"), ("one", "90 %")):
        words = Counter(each.missing[where] for each in outcomes if where in each.missing)
        said = ", ".join(f"{words[word]} {word}" for word in sorted(words, reverse=True)) or "none drawn"
        of = "one node beside it" if where == "one" else where
        rows.append((f"hang: missing rank, captured at {of}", want, said))
    return rows


def _of_others(others: Sequence[Told]) -> list[tuple[str, str, str]]:
    known = [each for each in others if each.word is not None]
    rows = []
    shadows = [each for each in known if each.name in SHADOWS]
    named = [each for each in shadows if each.word in ("right", "alternative")]
    wanted = "90 %"
    rows.append(("indirect: it, or what else it may be, named", wanted, _share(len(named), len(shadows))))
    onsets = [each for each in known if each.steps is not None]
    rows.append(
        ("onset within 3 steps", "all", _share(sum(each.word == "right" for each in onsets), len(onsets)))
    )
    for name in sorted({each.name for each in known if each not in shadows and each.steps is None}):
        words = Counter(each.word for each in known if each.name == name and each.steps is None)
        said = ", ".join(f"{words[word]} {word}" for word in sorted(map(str, words)))
        rows.append((name, "95 %", said))
    return rows


def _of_lists(figures: Beside) -> list[tuple[str, str, str]]:
    moved, waits = figures.transfers, sorted(figures.wait_ppm)
    return [
        ("requests found", "all", _share(figures.found, figures.requests)),
        ("tokens of a request", "all", _share(figures.tokens_right, figures.found)),
        ("time to first token within 1 %", "all", _right(figures.first_ppm)),
        ("time between tokens within 1 %", "all", _right(figures.gap_ppm)),
        ("caches moved: bytes", "100 %", _share(moved.bytes_right, moved.true)),
        (
            "caches moved: error of the wait, median", "5 %",
            f"{median(waits) / PERCENT:.1f} %" if waits else "none drawn",
        ),
        (
            "CPU of all detectors, of the analysis", "10 %",
            f"{100 * figures.detectors_ns / max(figures.cpu_ns, 1):.1f} %",
        ),
    ]  # fmt: skip
