"""``python -m bench.conditions``: conditions that scripted jobs have, against those that are found."""

from __future__ import annotations

import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

import dpuflow
from bench.conditions.draw import draw
from bench.conditions.truth import costs, play, waited

if TYPE_CHECKING:
    from bench.conditions.truth import Cost
    from dpuflow.results.tokens import Severity

HEADER = ("condition", "drawn", "found", "above info", "other place", "missed", "invented")


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


def one(number: int) -> Outcome:
    """Play and analyse job ``number``."""
    drawn = draw(number)
    with tempfile.TemporaryDirectory() as folder:
        play(drawn.scenario, folder)
        true = costs(number, drawn, folder)
        by_nature = waited(folder)
        result = dpuflow.analyze([str(path) for path in sorted(Path(folder).glob("*.pcap.gz"))])
    rank = {endpoint.id: endpoint.rank for endpoint in result.endpoints}
    address = {endpoint.id: endpoint.address for endpoint in result.endpoints}
    found: list[tuple[str, Severity, list[int]]] = []
    for each in result.findings:
        ends = [
            rank[end] if rank[end] is not None else int(address[end].split(".")[-1]) - 1
            for end in each.endpoints
        ]
        found.append((each.condition, each.severity, [end for end in ends if end is not None]))
    parts = [part.condition for each in result.findings for part in each.consists_of]
    said = [f"{each.severity} {each.condition}: {each.summary}" for each in result.findings]
    costly = {name: ends for name, ends in drawn.conditions.items() if true[name].there}
    costly |= by_nature
    unsure = {name for name, cost in true.items() if cost.unsure}
    stated = {each.condition: each.cost_share for each in result.findings if each.condition in costly}
    return Outcome(number, costly, found, parts, said, true, stated, unsure)


@click.command()
@click.option("--count", type=click.IntRange(min=1), default=300, show_default=True, help="Jobs.")
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first."
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--cases", is_flag=True, help="Each job that is not as it should be.")
def main(count: int, first: int, jobs: int, cases: bool) -> None:
    """Draw jobs, analyse them, print what was found of what they have."""
    numbers = range(first, first + count)
    if jobs == 1:
        outcomes = [one(number) for number in numbers]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            outcomes = list(pool.map(one, numbers))
    for line in matrix(outcomes):
        print(line)
    for each in outcomes if cases else ():
        names = {name for name, severity, _ in each.found if severity != "info"}
        if names - each.unsure != set(each.true):
            had = ", ".join(f"{name} ({100 * cost.share:.1f} %)" for name, cost in each.costs.items())
            print(f"{each.number}: has {had or 'nothing'}")
            for said in each.said:
                print(f"    {said[:200]}")


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


if __name__ == "__main__":
    main()
