"""``python -m bench.ablation``: what changes when one rule of the inference is switched off."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from bench.ablation.measure import Effect, Seen, measure
from bench.ablation.rules import RULES
from bench.ablation.switch import lines_of
from bench.robustness.cases import case_names
from dpuflow.reports.layout import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TWINS: Final = (
    "whole", "late-0.2%", "jitter-8us", "lost-1%-all", "without-other", "alone", "begin-apart",
)  # fmt: skip
HEADER: Final = (
    "rule", "lines", "spoke in", "changed", "entries", "bounds violated", "figures better", "worse",
    "verdicts better", "worse", "other", "failed",
)  # fmt: skip


@click.command()
@click.option(
    "--cases", "patterns", multiple=True, metavar="GLOB", help="Only cases named so; may be repeated."
)
@click.option(
    "--twins", "kinds", multiple=True, metavar="NAME", help="These twins instead of the usual ones."
)
@click.option("--rules", "named", multiple=True, metavar="GLOB", help="Only rules named so; may be repeated.")
@click.option(
    "--count", type=click.IntRange(min=0), default=0, show_default=True, help="Scenarios drawn besides."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Of the twins, and number of the first scenario.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--told", is_flag=True, help="Each verdict that changes, with what is said.")
@click.option("--list", "listed", is_flag=True, help="Only the table of rules: lines, and what each claims.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Keep the effect on each analysis."
)
def main(
    patterns: tuple[str, ...],
    kinds: tuple[str, ...],
    named: tuple[str, ...],
    count: int,
    seed: int,
    jobs: int,
    told: bool,
    listed: bool,
    json_file: Path | None,
) -> None:
    """Analyse cases and twins with each rule switched off in turn, and judge what changes by truth.

    The exit status says nothing about what was found.
    """
    rules = [rule for rule in RULES if not named or any(fnmatch(rule.name, glob) for glob in named)]
    if listed:
        for rule in rules:
            claim = " ".join((rule.function.__doc__ or "").split("\n\n")[0].split())
            print(f"{rule.name:<46} {lines_of(rule):>4}  {claim}")
        return
    cases = case_names(patterns, count, seed)
    run = partial(_one, twins=kinds or TWINS, named=[rule.name for rule in rules], seed=seed)
    total, effects = Seen(), []
    with ProcessPoolExecutor(jobs) as pool:
        every = pool.map if jobs > 1 else map
        results: Iterable[tuple[Seen, list[Effect]]] = every(run, cases)
        for number, (seen, found) in enumerate(results, 1):
            for name, value in asdict(seen).items():
                setattr(total, name, getattr(total, name) + value)
            effects += found
            if sys.stderr.isatty():
                print(f"\r{number}/{len(cases)}", end="", file=sys.stderr)
            if json_file is not None:
                _keep(json_file, total, effects)
    rows = [_row(rule.name, lines_of(rule), [e for e in effects if e.rule == rule.name]) for rule in rules]
    print("\n".join(table(list(HEADER), rows)))
    print(
        f"{total.analyses} analyses of {len(cases)} cases, {total.entries:,} entries, "
        f"{total.violated} of {total.bounds:,} bounds violated with all rules"
    )
    for effect in effects if told else ():
        if effect.worth or effect.failed:
            print(f"{effect.rule} {effect.case} {effect.twin}: {effect.verdict}")


def _one(case: str, twins: Sequence[str], named: Sequence[str], seed: int) -> tuple[Seen, list[Effect]]:
    return measure(case, twins, [rule for rule in RULES if rule.name in set(named)], seed)


def _keep(file: Path, total: Seen, effects: Sequence[Effect]) -> None:
    rows = ",\n".join(json.dumps(asdict(effect)) for effect in effects)
    file.write_text(f'{{"seen": {json.dumps(asdict(total))}, "effects": [\n{rows}\n]}}\n', encoding="utf-8")


def _row(name: str, lines: int, effects: Sequence[Effect]) -> list[str]:
    return [
        name, str(lines), str(len(effects)), str(sum(e.changed for e in effects)),
        str(sum(e.entries for e in effects)), f"{sum(e.violated for e in effects):+d}",
        str(sum(e.gained > 0 for e in effects)), str(sum(e.gained < 0 for e in effects)),
        str(sum(e.worth > 0 for e in effects)), str(sum(e.worth < 0 for e in effects)),
        str(sum(bool(e.verdict) and not e.worth and not e.failed for e in effects)),
        str(sum(e.failed for e in effects)),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
