"""One case and its twins with each rule switched off that had something to say there: what changes."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.ablation.switch import switched_off, watched
from bench.robustness.against import FIGURES, WORTH, figures_of
from bench.robustness.cases import read_subject
from bench.robustness.play import asked, judged, twins_of, vantages
from dpuflow.analysis import analyze_tables, read_captures
from dpuflow.reports.json import json_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    import dpuflow
    from bench.ablation.switch import Rule
    from bench.robustness.judge import Outcome

Told = Counter[tuple[int, int, str, int | None]]


@dataclass
class Effect:
    """What became of one analysis without one rule."""

    rule: str
    case: str
    twin: str
    entries: int = 0
    """Ranks of collectives of which something else is told."""
    violated: int = 0
    """Bounds violated without the rule, less those with it."""
    gained: int = 0
    """Of found, operations and last ranks right, less invented, violated and astray ones: more without it."""
    worth: int = 0
    """Whether the verdict is better (1) or worse (-1) without it."""
    verdict: str = ""
    """The verdict with it and without it, where anything of what is said differs."""
    changed: bool = False
    """Whether anything at all of the result differs."""
    failed: bool = False


@dataclass
class Seen:
    """What was looked at in all."""

    analyses: int = 0
    entries: int = 0
    bounds: int = 0
    violated: int = 0


def measure(
    case: str, twins: Sequence[str], rules: Sequence[Rule], seed: int = 0
) -> tuple[Seen, list[Effect]]:
    """The effects of all rules on these twins of ``case``."""
    subject, seen, effects = read_subject(case), Seen(), []
    asked(case)
    for name, captures in twins_of(subject, twins, seed):
        with tempfile.TemporaryDirectory() as folder:
            tables = read_captures(vantages(subject, captures, Path(folder)), 1, None)
        with watched(rules) as spoke:
            result = analyze_tables(tables).analysis
        told, outcome, text = _told(result), judged(subject, name, captures, result), _text(result)
        seen.analyses += 1
        seen.entries += told.total()
        seen.bounds += outcome.bounds
        seen.violated += outcome.violated
        for rule in rules:
            if rule.name in spoke:
                effect = Effect(rule.name, case, name)
                effects.append(effect)
                with switched_off(rule):
                    try:
                        without = analyze_tables(tables).analysis
                    except Exception as error:  # what a rule holds up may fall without it
                        effect.failed = effect.changed = True
                        effect.verdict = f"{type(error).__name__}: {error}"
                        continue
                effect.changed = _text(without) != text
                if effect.changed:
                    _compare(effect, told, outcome, _told(without), judged(subject, name, captures, without))
    return seen, effects


def _text(result: dpuflow.Analysis) -> str:
    return "\n".join(json_lines(result))


def _told(result: dpuflow.Analysis) -> Told:
    return Counter(
        (each.start_ns, rank.endpoint, rank.bound, rank.lateness_ns)
        for each in result.collectives
        for rank in each.ranks
    )


def _compare(effect: Effect, told: Told, outcome: Outcome, told_without: Told, without: Outcome) -> None:
    effect.entries = max((told - told_without).total(), (told_without - told).total())
    effect.violated = without.violated - outcome.violated
    then, now = figures_of(vars(outcome)), figures_of(vars(without))
    effect.gained = sum(worth * (now[name] - then[name]) for name, worth in FIGURES.items())
    gained = WORTH[without.verdict] - WORTH[outcome.verdict]
    effect.worth = (gained > 0) - (gained < 0)
    if (outcome.verdict, outcome.said, outcome.rows) != (without.verdict, without.said, without.rows):
        effect.verdict = (
            f"{outcome.verdict} -> {without.verdict}: {outcome.said} [{'; '.join(outcome.rows)}]"
            f" -> {without.said} [{'; '.join(without.rows)}]"
        )
