"""A rank's calls as they were recorded beside its collectives as the packets show them.

Both are in the order of the rank's calls; captures and recordings begin and end at other times. So one is
moved along the other, until most calls have the same operation and size. In a job that repeats itself several
places may fit as well: then that is said. A file's clock is tied by the ends of operations, which ranks leave
together; so files of several ranks tell who was last, too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.quantities import count, duration, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.recorded.calls import Call, Recorded
    from dpuflow.results import Analysis

FEWEST: Final = 3
"""Calls that must lie beside each other."""
UNSURE: Final = 1 << 60
"""Error, in ns, of an entry of which only a bound is known: nobody is said to be last by it."""
MOST: Final = 20_000
"""Calls and collectives that are laid beside each other: the first ones."""


@dataclass
class Agreement:
    """Of one rank of one file; ``apart_ns`` is None where the file has no times."""

    file: str
    kind: str
    rank: int | None
    who: str
    both: int
    ops: int
    sizes: int
    told_sizes: int
    only_file: int
    only_captures: int
    places: int
    apart_ns: int | None = None
    apart_p90_ns: int | None = None
    entered: list[tuple[int, int, int, int]] = field(default_factory=list, repr=False)
    """Collective; when the rank entered it by the file, on the captures' clock; by the packets, and the error
    of that (UNSURE of a bound), ns."""

    def __str__(self) -> str:
        head = f"{self.file}, {self.kind}: {self.who}"
        if not self.both:
            return f"{head}: none of its {count(self.only_file, 'call')} matches a collective seen."
        said = [
            f"{head}: of {count(self.both, 'call')} that both have the operation agrees in {self.ops}, the"
            f" size in {self.sizes} of {self.told_sizes}; {self.only_file} in the file alone,"
            f" {self.only_captures} in the captures alone."
        ]
        if self.apart_ns is not None:
            said.append(
                f"Entries lie {duration(self.apart_ns)} apart (median; {duration(self.apart_p90_ns or 0)} in"
                " nine of ten), once the clocks are tied by the ends."
            )
        if self.places > 1:
            said.append(f"{self.places} places fit alike: which calls are which cannot be decided.")
        return " ".join(said)


def compare(result: Analysis, recorded: Recorded) -> Agreement:
    """How far they agree."""
    end, who = _whose(result, recorded.rank)
    seen = [] if end is None else _seen(result, end)
    calls = [call for call in recorded.calls if call.op != "send_recv"][:MOST]
    made = Agreement(recorded.file, recorded.kind, recorded.rank, who, 0, 0, 0, 0, len(calls), len(seen), 0)
    shift, places = best_shift([c.op for c in calls], [c.bytes for c in calls], seen)
    if shift is None:
        return made
    pairs = [(calls[n], seen[n + shift]) for n in range(max(0, -shift), min(len(calls), len(seen) - shift))]
    made.both, made.places = len(pairs), places
    made.only_file, made.only_captures = len(calls) - len(pairs), len(seen) - len(pairs)
    made.ops = sum(call.op == other.op for call, other in pairs)
    sized = [(call, other) for call, other in pairs if call.bytes is not None and other.bytes is not None]
    made.told_sizes, made.sizes = len(sized), sum(call.bytes == other.bytes for call, other in sized)
    made.entered = _entered(pairs)
    if made.entered:
        apart = [abs(begin - entered) for _, begin, entered, _ in made.entered]
        made.apart_ns, made.apart_p90_ns = (round(float(np.percentile(apart, q))) for q in (50, 90))
    return made


def together(found: Sequence[Agreement]) -> str | None:
    """How far files of several ranks agree with the packets on who was late; None where they tell nothing."""
    ranks: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for each in found:
        for collective, *times in each.entered:
            ranks[collective].append((times[0], times[1], times[2]))
    several = [np.array(rows, np.int64).T for rows in ranks.values() if len(rows) > 1]
    if not several:
        return None
    told = same = 0
    differ: list[int] = []
    for by_file, by_packets, error in several:
        differ += np.abs(by_file - by_file.min() - (by_packets - by_packets.min())).tolist()
        second, last = np.argsort(by_packets, kind="stable")[-2:].tolist()
        if by_packets[last] - by_packets[second] > error[last] + error[second]:
            told += 1
            same += int(by_file.argmax()) == last
    middle, most = (duration(round(float(np.percentile(differ, q)))) for q in (50, 90))
    return (
        f"Files of several ranks cover {count(len(several), 'collective')}. In {told} of them the packets"
        f" show which of these ranks entered last, and the files agree in {same}. Lateness differs by"
        f" {middle} (median; at most {most} in nine of ten)."
    )


def _whose(result: Analysis, rank: int | None) -> tuple[int | None, str]:
    """The endpoint of a rank, and how it is called."""
    if rank is None:
        return None, "of a rank that it does not name"
    for end in result.endpoints:
        if end.rank == rank:
            return end.id, name_of(end)
    return None, f"rank {rank}, which is no endpoint's here (--ranks)"


def _seen(result: Analysis, end: int) -> list[Call]:
    from dpuflow.recorded.calls import Call

    found = []
    for each in result.collectives:
        mine = next((rank for rank in each.ranks if rank.endpoint == end), None)
        if mine is not None and each.op != "send_recv":
            error = mine.error_ns or 0 if mine.bound == "exact" else UNSURE
            call = Call(each.op, each.bytes, mine.enter_ns, mine.leave_ns, each.id, error)
            found.append((each.start_ns, call))
    return [call for _, call in sorted(found, key=lambda pair: pair[0])][:MOST]


def best_shift(
    ops: Sequence[str], sizes: Sequence[int | None], seen: Sequence[Call]
) -> tuple[int | None, int]:
    """By how many places the calls lie before what was seen, where most agree; and how many shifts do."""
    if min(len(ops), len(seen)) < FEWEST:
        return None, 0
    kinds = {op: n for n, op in enumerate(sorted({*ops, *(each.op for each in seen)}))}
    mine = np.array([(kinds[op], size or -1) for op, size in zip(ops, sizes, strict=True)], np.int64)
    theirs = np.array([(kinds[each.op], each.bytes or -1) for each in seen], np.int64)
    best, found = 0, []
    for shift in range(FEWEST - len(mine), len(theirs) - FEWEST + 1):
        begin, end = max(0, -shift), min(len(mine), len(theirs) - shift)
        here, there = mine[begin:end], theirs[begin + shift : end + shift]
        same = here[:, 0] == there[:, 0]
        unlike = (here[:, 1] != there[:, 1]) & (here[:, 1] >= 0) & (there[:, 1] >= 0)
        agree = int((same & ~unlike).sum()) - int((~same | unlike).sum())
        if agree > best:
            best, found = agree, [shift]
        elif agree == best and best:
            found.append(shift)
    return (found[0], len(found)) if found else (None, 0)


def _entered(pairs: Sequence[tuple[Call, Call]]) -> list[tuple[int, int, int, int]]:
    """As ``Agreement.entered``, once the file's clock is tied by the ends; empty where it has no times."""
    timed = [
        (other.collective, call.begin_ns, call.end_ns, other.begin_ns, other.end_ns, other.error_ns)
        for call, other in pairs
        if None not in (call.begin_ns, call.end_ns, other.begin_ns, other.end_ns)
    ]
    if len(timed) < FEWEST:
        return []
    number, begin, end, entered, left, error = np.array(timed, np.int64).T
    offset = int(np.median(end - left))
    return list(zip(*(each.tolist() for each in (number, begin - offset, entered, error)), strict=True))
