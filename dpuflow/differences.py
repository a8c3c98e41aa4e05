"""Two results side by side: what changed from one to the other by more than chance and clocks explain.

In: two ``Analysis``. Out: a ``Diff``: step times, lateness rank by rank and collectives kind by kind, each
with an interval; findings gone, new and in both. Intervals hold together: of twenty comparisons of jobs that
are alike one claims something. They speak of the steps captured; what differs from run to run of one job no
single pair of captures tells.

The standard error of a median is from its order statistics (Price and Bonett, 2002), whatever the values'
distribution; fewer values count where one follows the other (lag-one correlation); Student's quantile at 5 %
divided by the number of comparisons (Bonferroni).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.arrays.quantiles import student

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from dpuflow.results import Analysis, Endpoint, Finding

    Samples = tuple[NDArray[np.float64], float]  # values, and their common error (95 %)
    Call = tuple[tuple[int, ...], str, int | None]  # endpoints, operation, bytes

SURE: Final = 0.95
FEWEST: Final = 5
"""Of fewer values no interval is told."""
MOST_FOLLOWING: Final = 0.9

Kind = Literal["step", "lateness", "collective"]
State = Literal["better", "worse", "no_difference", "too_few"]


@dataclass(slots=True)
class Change:
    """A quantity in both results, ns: ``after_ns`` minus ``before_ns`` is from ``low_ns`` to ``high_ns``."""

    kind: Kind
    name: str
    count_before: int
    count_after: int
    before_ns: int | None
    after_ns: int | None
    difference_ns: int | None
    low_ns: int | None
    high_ns: int | None
    state: State

    def share(self, value_ns: int | None) -> float | None:
        """``value_ns`` as a share of what it was before."""
        return value_ns / self.before_ns if value_ns is not None and self.before_ns else None


@dataclass(slots=True)
class FindingChange:
    """A condition of the same endpoints in one result or both."""

    condition: str
    name: str
    state: Literal["gone", "new", "both"]
    cost_before_ns: int | None = None
    cost_after_ns: int | None = None


@dataclass(slots=True)
class Diff:
    """Everything; ``matched_by`` says what ranks of the two jobs were paired by."""

    changes: list[Change] = field(default_factory=list)
    findings: list[FindingChange] = field(default_factory=list)
    matched_by: str = ""
    unmatched: list[str] = field(default_factory=list)


def compare(before: Analysis, after: Analysis) -> Diff:
    """What changed from ``before`` to ``after``."""
    pairs, matched_by = match(before.endpoints, after.endpoints)
    there = {new: old for old, new in pairs.items()}
    names = {old: _name(before.endpoints[old]) for old in pairs}
    first: list[tuple[Kind, str, Samples, Samples]] = []
    second = dict(_steps(after, lambda end: there.get(end, -1 - end)))
    for key, samples in _steps(before, lambda end: end):
        if key in second:
            name = ", ".join(names[end] for end in key[:3]) + more(key)
            first.append(("step", name, samples, second[key]))
    late_after = _lateness(after)
    for end, samples in _lateness(before).items():
        if end in pairs and pairs[end] in late_after:
            first.append(("lateness", names[end], samples, late_after[pairs[end]]))
    calls_after = _calls(after, lambda end: there.get(end, -1 - end))
    for call, samples in _calls(before, lambda end: end).items():
        if call in calls_after:
            first.append(("collective", f"{call[1]} of {call[2]} bytes", samples, calls_after[call]))
    told = [row for row in first if min(len(row[2][0]), len(row[3][0])) >= FEWEST]
    changes = [_change(*row, comparisons=max(len(told), 1)) for row in first]
    lost = [_name(each) for each in before.endpoints if each.id not in pairs]
    lost += [_name(each) for each in after.endpoints if each.id not in there]
    return Diff(changes, list(_findings(before, after, pairs, names)), matched_by, lost)


def more(key: tuple[int, ...]) -> str:
    """`` and 5 more``."""
    return f" and {len(key) - 3} more" if len(key) > 3 else ""


def _name(each: Endpoint) -> str:
    return f"rank {each.rank}" if each.rank is not None else each.label or each.address


def match(before: list[Endpoint], after: list[Endpoint]) -> tuple[dict[int, int], str]:
    """Endpoint of the first job to that of the second; by rank, else label, else address, else place."""
    ways: tuple[tuple[str, Callable[[Endpoint], object]], ...] = (
        ("rank", lambda each: each.rank), ("label", lambda each: each.label),
        ("address", lambda each: each.address), ("place in the list", lambda each: each.id),
    )  # fmt: skip
    for word, key in ways:
        one, two = _by(before, key), _by(after, key)
        both = one.keys() & two.keys()
        if both and (2 * len(both) >= min(len(before), len(after)) or word == ways[-1][0]):
            return {one[each]: two[each] for each in both}, word
    return {}, "nothing"


def _by(rows: list[Endpoint], key: Callable[[Endpoint], object]) -> dict[object, int]:
    """Endpoints by a key that only one of them has."""
    found: dict[object, int] = {}
    twice: set[object] = set()
    for each in rows:
        said = key(each)
        if said is not None:
            twice |= {said} & found.keys()
            found[said] = each.id
    return {said: end for said, end in found.items() if said not in twice}


def _steps(result: Analysis, old: Callable[[int], int]) -> Iterator[tuple[tuple[int, ...], Samples]]:
    """Step times of each job in the result, by its endpoints (as ``old`` numbers them)."""
    for job, ends in zip(result.steps, step_ends(result), strict=True):
        yield tuple(sorted(map(old, job.endpoints))), (np.diff(ends).astype(np.float64), 0.0)


def step_ends(result: Analysis) -> Iterator[NDArray[np.int64]]:
    """Of each job in the result when its steps end, as its first endpoint leaves their last operations."""
    leaves: dict[int, list[int]] = {}
    for call in result.collectives:
        if call.op != "send_recv":
            for entry in call.ranks:
                leaves.setdefault(entry.endpoint, []).append(
                    call.end_ns if entry.leave_ns is None else entry.leave_ns
                )
    for job in result.steps:
        ends = np.sort(np.array(leaves.get(job.endpoints[0] if job.endpoints else -1, []), np.int64))
        yield ends[(ends >= job.start_ns) & (ends <= job.end_ns)][:: max(job.collectives, 1)]


def _lateness(result: Analysis) -> dict[int, Samples]:
    """How late each endpoint entered, where that was measured."""
    values: dict[int, list[int]] = {}
    errors: dict[int, list[int]] = {}
    for call in result.collectives:
        for entry in call.ranks if call.complete and call.op != "send_recv" else ():
            if entry.bound == "exact" and entry.lateness_ns is not None:
                values.setdefault(entry.endpoint, []).append(entry.lateness_ns)
                errors.setdefault(entry.endpoint, []).append(entry.error_ns or 0)
    return {end: (np.array(each, np.float64), float(median_of(errors[end]))) for end, each in values.items()}


def _calls(result: Analysis, old: Callable[[int], int]) -> dict[Call, Samples]:
    """From the last enter to the end, of each kind of operation: what moving data took, not lateness."""
    took: dict[Call, list[int]] = {}
    for call in result.collectives:
        enters = [each.enter_ns for each in call.ranks if each.bound == "exact" and each.enter_ns is not None]
        if call.complete and call.op != "send_recv" and len(enters) == len(call.ranks) > 0:
            who = tuple(sorted(old(entry.endpoint) for entry in call.ranks))
            took.setdefault((who, call.op, call.bytes), []).append(call.end_ns - max(enters))
    return {key: (np.array(each, np.float64), 0.0) for key, each in took.items()}


def _change(kind: Kind, name: str, before: Samples, after: Samples, comparisons: int) -> Change:
    counts = len(before[0]), len(after[0])
    if min(counts) < FEWEST:
        return Change(kind, name, *counts, None, None, None, None, None, "too_few")
    one, two = float(median_of(before[0])), float(median_of(after[0]))
    first, second = _deviation(before[0]), _deviation(after[0])
    spread = (first[0] ** 2 + second[0] ** 2) ** 0.5
    half = spread * student(1 - (1 - SURE) / 2 / comparisons, max(min(first[1], second[1]) - 1, 1))
    half = (half**2 + before[1] ** 2 + after[1] ** 2) ** 0.5
    low, high = two - one - half, two - one + half
    state: State = "worse" if low > 0 else "better" if high < 0 else "no_difference"
    return Change(
        kind, name, *counts, before_ns=round(one), after_ns=round(two), difference_ns=round(two - one),
        low_ns=round(low), high_ns=round(high), state=state,
    )  # fmt: skip


def _deviation(values: NDArray[np.float64]) -> tuple[float, float]:
    """Standard error of the median, and how many independent values it rests on."""
    n, ordered = len(values), np.sort(values)
    place = max(round((n + 1) / 2 - n**0.5), 1)
    outside = sum(comb(n, each) for each in range(place)) / 2**n
    spread = float(ordered[n - place] - ordered[place - 1]) / 2 / NormalDist().inv_cdf(1 - outside)
    order = np.argsort(np.argsort(values)).astype(np.float64)
    order -= order.mean()
    square = float(order @ order)
    following = float(order[1:] @ order[:-1]) / square if square else 0.0
    following = min(max(following, 0.0), MOST_FOLLOWING)
    alone = max(len(values) * (1 - following) / (1 + following), 2.0)
    return spread * (n / alone) ** 0.5, alone


def _findings(
    before: Analysis, after: Analysis, pairs: dict[int, int], names: dict[int, str]
) -> Iterator[FindingChange]:
    def keyed(rows: Iterable[Finding], old: dict[int, int]) -> dict[tuple[str, tuple[int, ...]], Finding]:
        found: dict[tuple[str, tuple[int, ...]], Finding] = {}
        for each in rows:
            if each.severity != "info":
                ends = tuple(sorted(old.get(end, -1 - end) for end in each.endpoints))
                found.setdefault((each.condition, ends), each)
        return found

    one = keyed(before.findings, {end: end for end in pairs})
    two = keyed(after.findings, {new: end for end, new in pairs.items()})
    for key in dict.fromkeys([*one, *two]):
        who = ", ".join(names.get(end, "another endpoint") for end in key[1])
        state: Literal["gone", "new", "both"] = (
            "both" if key in one and key in two else "gone" if key in one else "new"
        )
        costs = [getattr(rows.get(key), "cost_ns", None) for rows in (one, two)]
        yield FindingChange(key[0], who, state, *costs)
