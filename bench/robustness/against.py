"""What changed since a kept run: each twin whose verdict, or whose figures, became better or worse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.robustness.judge import Outcome

WORTH: Final = {"failed": 0, "accused": 0, "cleared": 1, "untold": 2, "unasked": 3, "right": 3}
FIGURES: Final = {"found": 1, "op_right": 1, "last_right": 1, "invented": -1, "violated": -1, "astray": -1}
"""What more of is better, and what less of is. Astray: stated as exact, and off by more than its error."""


def changes(before: Sequence[dict[str, Any]], after: Sequence[Outcome]) -> list[str]:
    """Verdicts that changed, worse ones first, with what the report said; figures in one line each."""
    was = {(row["case"], row["twin"]): row for row in before}
    verdicts: dict[int, list[str]] = {-1: [], 1: []}
    figures: dict[int, list[str]] = {-1: [], 1: []}
    common = 0
    for outcome in after:
        old = was.get((outcome.case, outcome.twin))
        if old is None:
            continue
        common += 1
        gained = WORTH[outcome.verdict] - WORTH[old["verdict"]]
        if gained:
            verdicts[1 if gained > 0 else -1] += [
                f"  {outcome.case} {outcome.twin}: {old['verdict']} -> {outcome.verdict}",
                f"    was: {_said(old['said'], old['rows'])}",
                f"    now: {_said(outcome.said, outcome.rows)}",
            ]
        then, now = figures_of(old), figures_of(vars(outcome))
        worth = sum((now[name] - then[name]) * by for name, by in FIGURES.items())
        if worth:
            told = ", ".join(f"{name} {then[name]} -> {now[name]}" for name in now if now[name] != then[name])
            figures[1 if worth > 0 else -1].append(f"  {outcome.case} {outcome.twin}: {told}")
    return [
        "",
        f"against the kept run, {common} twins in common of {len(was)} then and {len(after)} now",
        *(
            line
            for title, found, each in (
                ("figures better", figures[1], 1), ("figures worse", figures[-1], 1),
                ("verdicts better", verdicts[1], 3), ("verdicts worse", verdicts[-1], 3),
            )
            for line in (f"{title}: {len(found) // each}", *found)
        ),
    ]  # fmt: skip


def figures_of(outcome: Mapping[str, Any]) -> dict[str, int]:
    """The FIGURES of an outcome, given its fields."""
    return {
        name: outcome["exact"] - outcome["held"] if name == "astray" else outcome[name] for name in FIGURES
    }


def _said(headline: str, rows: Sequence[str]) -> str:
    return f"{headline} [{'; '.join(rows)}]"
