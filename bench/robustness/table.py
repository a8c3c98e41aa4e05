"""Outcomes as a table: by twin, by fault, by kind of case, and in all; and confidence against truth."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.robustness.twins import SINGLE, TWINS
from dpuflow.reports.layout import table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.robustness.judge import Outcome

HEADER: Final = (
    "", "twins", "asked", "right", "untold", "cleared", "accused", "failed", "found", "invent", "op", "last",
    "exact", "bounds violated", "CPU s",
)  # fmt: skip
BINS: Final = 10
HIDDEN: Final = ("network", "receiver")
"""Faults that an account may well leave unexplained."""


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The table, and what stands below it."""
    names = [twin.name for twin in TWINS]
    rows = _by(outcomes, _twin, lambda name: names.index(name) if name in names else len(names))
    for title, key in (("fault", lambda o: o.fault or "-"), ("case", lambda o: o.case.partition("/")[0])):
        rows += [[f"by {title}", *[""] * (len(HEADER) - 1)], *_by(outcomes, key)]
    rows.append(_row("all", outcomes))
    sometimes = sum(outcome.sometimes for outcome in outcomes)
    cleared = sum(outcome.sometimes_cleared for outcome in outcomes)
    return [
        *table(list(HEADER), rows),
        f"ranks late in 10 to 50 % of their collectives: {cleared} of {sometimes} called on time",
        *_wrong(outcomes),
        *_single(outcomes),
        *_unexplained(outcomes),
        *_sure(outcomes),
    ]


def _wrong(outcomes: Sequence[Outcome]) -> list[str]:
    """The shares that count most: of a user's trust."""
    late = [outcome for outcome in outcomes if outcome.fault == "throughout" and outcome.verdict != "unasked"]
    cleared = sum(outcome.verdict == "cleared" for outcome in late)
    accused = sum(outcome.verdict == "accused" for outcome in outcomes)
    return [
        f"a rank late throughout cleared: {100 * cleared / max(len(late), 1):.2f} % of {len(late)} twins; "
        f"an innocent accused: {100 * accused / max(len(outcomes), 1):.2f} % of {len(outcomes)}"
    ]


def _single(outcomes: Sequence[Outcome]) -> list[str]:
    """How often a single missing packet changes who is said to be late."""
    whole = {outcome.case: outcome for outcome in outcomes if outcome.twin == "whole"}
    less = [outcome for outcome in outcomes if _twin(outcome) == SINGLE and outcome.case in whole]
    changed = [outcome for outcome in less if outcome.rows != whole[outcome.case].rows]
    accused = sum(each.verdict == "accused" and whole[each.case].verdict != "accused" for each in changed)
    told = (
        f"a single packet missing: {len(changed)} of {len(less)} change a verdict, {accused} to an innocent"
    )
    return [told] if less else []


def _unexplained(outcomes: Sequence[Outcome]) -> list[str]:
    """Of whole captures of jobs without a fault of the network or a receiver."""
    shares = [
        outcome.unexplained
        for outcome in outcomes
        if outcome.twin == "whole" and outcome.fault not in HIDDEN and outcome.unexplained is not None
    ]
    if not shares:
        return []
    median, most = (100 * float(np.percentile(shares, q)) for q in (50, 95))
    return [
        f"unexplained time of {len(shares)} whole captures without hidden causes:"
        f" median {median:.1f} %, p95 {most:.1f} %"
    ]


def _twin(outcome: Outcome) -> str:
    return SINGLE if outcome.twin.startswith(f"{SINGLE}-") else outcome.twin


def _by(
    outcomes: Sequence[Outcome], key: Callable[[Outcome], str], order: Callable[[str], int] = lambda name: 0
) -> list[list[str]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return [_row(f"  {name}", groups[name]) for name in sorted(groups, key=lambda name: (order(name), name))]


def _row(name: str, group: Sequence[Outcome]) -> list[str]:
    verdicts = Counter(outcome.verdict for outcome in group)
    asked = len(group) - verdicts["unasked"]

    def total(field: str) -> int:
        return sum(getattr(outcome, field) for outcome in group)

    def share(part: int, of: int) -> str:
        return f"{100 * part / of:.1f}" if of else "-"

    found = total("found")
    return [
        name, str(len(group)), str(asked), share(verdicts["right"], asked), share(verdicts["untold"], asked),
        str(verdicts["cleared"]), str(verdicts["accused"]), str(verdicts["failed"]),
        share(found, total("true")), share(total("invented"), found + total("invented")),
        share(total("op_right"), found), share(total("last_right"), total("last_asked")),
        share(total("held"), total("exact")), f"{total('violated')}/{total('bounds')}",
        f"{sum(outcome.cpu_s for outcome in group):.0f}",
    ]  # fmt: skip


def _sure(outcomes: Sequence[Outcome]) -> list[str]:
    """Of verdicts given with a confidence in each bin: how many are right."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for outcome in outcomes:
        for confidence, right in outcome.sure:
            bins.setdefault(min(int(confidence * BINS), BINS - 1), []).append((confidence, right))
    rows = []
    for number, each in sorted(bins.items()):
        said = sum(confidence for confidence, _ in each) / len(each)
        held = sum(right for _, right in each) / len(each)
        between = f"{100 * number // BINS} to {100 * (number + 1) // BINS} %"
        rows.append([between, str(len(each)), f"{100 * said:.1f}", f"{100 * held:.1f}"])
    return ["", *table(["confidence", "verdicts", "said", "right"], rows)] if rows else []
