"""Two results compared, in words and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from dpuflow.quantities import count, duration, listed
from dpuflow.reports.layout import wrap
from dpuflow.reports.output import replacing
from dpuflow.reports.tidy import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.differences import Change, Diff

MOST_LINES = 12
SCHEMA = "dpuflow.diff/1"
_WORDS = {"step": "a step", "lateness": "lateness", "collective": "moving data"}


def diff_lines(diff: Diff) -> Iterator[str]:
    """The report, line by line: what changed, then what did not."""
    changed = [each for each in diff.changes if each.state in ("better", "worse")]
    news = [each for each in diff.findings if each.state != "both"]
    if not diff.changes:
        yield "NOTHING TO COMPARE: the two results have no ranks, steps or collectives in common."
    elif changed:
        worse = sum(each.state == "worse" for each in changed)
        of = count(len(diff.changes), "quantity", "quantities")
        yield f"CHANGED: {worse} worse, {len(changed) - worse} better, of {of}."
    else:
        yield "NO DIFFERENCE that these captures could show."
    for each in sorted(changed, key=lambda each: (each.kind != "step", -abs(each.difference_ns or 0)))[
        :MOST_LINES
    ]:
        yield wrap(f"{each.state}: {_sentence(each)}", "  ", "    ")
    if len(changed) > MOST_LINES:
        yield f"  and {len(changed) - MOST_LINES} more; --json has them all"
    for state, word in (("gone", "gone"), ("new", "new")):
        rows = [
            f"{each.condition.replace('_', ' ')} ({clean(each.name, 80)})"
            for each in news
            if each.state == state
        ]
        if rows:
            yield wrap(f"findings {word}: {listed(rows)}", "  ", "    ")
    alike = [each for each in diff.changes if each.state == "no_difference"]
    for each in alike[:MOST_LINES]:
        yield wrap(f"no difference: {_sentence(each)}", "  ", "    ")
    if len(alike) > MOST_LINES:
        yield f"  and {len(alike) - MOST_LINES} more without difference"
    few = sum(each.state == "too_few" for each in diff.changes)
    if few:
        yield f"  {count(few, 'quantity', 'quantities')} with too few values to compare"
    yield f"  ranks matched by {diff.matched_by}" + (
        f"; {len(diff.unmatched)} without a match" if diff.unmatched else ""
    )


def _sentence(each: Change) -> str:
    """``a step, rank 0, ...: 40 ms before, 42 ms after, +2 ms (+1.6 ms to +2.4 ms), +4.1% to +5.7%``."""
    times = f"{duration(each.before_ns)} before, {duration(each.after_ns)} after"
    between = f"{signed(each.low_ns)} to {signed(each.high_ns)}"
    who = clean(each.name, 80)
    return f"{_WORDS[each.kind]}, {who}: {times}, {signed(each.difference_ns)} ({between}){_shares(each)}"


def _shares(each: Change) -> str:
    low, high = each.share(each.low_ns), each.share(each.high_ns)
    return "" if each.kind != "step" or low is None or high is None else f", {low:+.1%} to {high:+.1%}"


def signed(value_ns: int | None) -> str:
    """``+2.00 ms``."""
    return ("" if (value_ns or 0) < 0 else "+") + duration(value_ns)


def write_diff_json(diff: Diff, target: str) -> None:
    """Write all of it to the file ``target``, ``-`` being standard output. Raises OSError."""
    with replacing(target) as file:
        json.dump({"schema": SCHEMA, **asdict(diff)}, file, indent=1)
        file.write("\n")
