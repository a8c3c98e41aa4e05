"""Scores as a table for people, or as JSON. In: one ``Score`` a case. Out: text."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from dpuflow.quantities import duration
from dpuflow.reports.layout import table
from dpuflow.reports.output import replacing
from dpuflow.scoring.score import Score, add_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLUMNS = (
    ("found", "found_share"),
    ("invent", "invented_share"),
    ("op", "op_right"),
    ("algo", "algorithm_right"),
    ("bytes", "bytes_right"),
    ("exact", "exact_share"),
    ("last", "last_right"),
    ("prec", "late_precision"),
    ("recall", "late_recall"),
)


def write_scores(scores: Sequence[Score], json_target: str | None = None) -> None:
    """Print the table, and write the figures as JSON where ``json_target`` names a file.

    ``-`` writes the JSON to standard output in place of the table.
    """
    if json_target is not None:
        figures: dict[str, Any] = {"cases": [score.figures() for score in scores]}
        figures["all"] = add_scores(scores).figures()
        with replacing(json_target) as file:
            file.write(json.dumps(figures, indent=1, allow_nan=False) + "\n")
    if json_target != "-":
        sys.stdout.write("\n".join(score_lines(scores)) + "\n")


def score_lines(scores: Sequence[Score]) -> list[str]:
    """One row a case and, for several, one for all of them; then what is wrong with the verdicts."""
    total = add_scores(scores)
    rows = [_row(score, score.cases[0]) for score in scores]
    if len(scores) > 1:
        rows.append(_row(total, f"all {len(scores)}"))
    shares = [name for name, _ in _COLUMNS]
    header = ["case", "true", *shares, "outside", "bounds", "lateness", "p90", "clock", "verdict"]
    lines = table(header, rows)
    if total.intervals:
        held = _percent(total.figures()["intervals_held"])
        lines.append(f"error_ns: {held} % of {total.intervals} exact entries lie within what was stated")
    lines += transfer_lines(total)
    return lines + [f"verdict: {note}" for note in total.verdict_notes]


def transfer_lines(score: Score) -> list[str]:
    """One line of bulk transfers, where the truth lists any."""
    figures, moved = score.figures(), score.moved
    if not moved.true:
        return []
    waits = ""
    if moved.waits:
        median, most = (figures[f"transfers_wait_error_{which}_ns"] for which in ("median", "p90"))
        waits = (
            f"; wait given for {moved.waits_told} of {moved.waits}, off by {duration(median)} (median),"  # type: ignore[arg-type]
            f" {duration(most)} (90 %)"  # type: ignore[arg-type]
        )
    rate = figures["transfers_rate_error_median"]
    return [
        f"transfers: {moved.found} of {moved.true} found, {moved.inferred - moved.found} invented; bytes"
        f" right {_percent(figures['transfers_bytes_right'])} %,"
        f" pages {_percent(figures['transfers_pages_right'])} %,"
        f" rate off by {100 * rate if isinstance(rate, float) else 0:.2g} % (median){waits};"
        f" {moved.waits_false} waits reported that were none"
    ]


def _row(score: Score, name: str) -> list[str]:
    figures = score.figures()
    return [
        name,
        str(score.true),
        *(_percent(figures[key]) for _, key in _COLUMNS),
        f"{score.invented_outside}/{score.invented}",
        f"{score.bounds_violated}/{score.bounds}",
        duration(figures["lateness_error_median_ns"]),  # type: ignore[arg-type]
        duration(figures["lateness_error_p90_ns"]),  # type: ignore[arg-type]
        duration(figures["clock_error_max_ns"]),  # type: ignore[arg-type]
        f"{score.verdicts_right}/{score.verdicts}",
    ]


def _percent(share: object) -> str:
    """Percents with one decimal, cut, not rounded up: 99.96 must not read as 100."""
    if not isinstance(share, float | int):
        return "-"
    return "100" if share == 1 else "0" if share == 0 else f"{int(share * 1000) / 10:.1f}"
