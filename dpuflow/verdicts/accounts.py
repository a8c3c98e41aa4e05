"""Where the time of steps went: each step along its critical path, in parts that add up to it.

In: entries, causes, what ranks answer for, and the job's steps. Out: one account a job. The path is walked
back from the end of a step: a rank left its collective when the last one to enter it had come (what lies
between is transfer), and that one came when it had worked since it left its collective before. Unexplained
is the excess over what is usual of work whose end is not told exactly, and of transfers without a loss, a
slow link or a late credit. Pipelines have none: of their stages no one waits for all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.entries import Rule, previous_row
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.causes import NETWORK, RECEIVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.verdicts.causes import Causes
    from dpuflow.verdicts.own import Own
    from dpuflow.verdicts.steps import Steps

MOST: Final = 400
"""Steps that are walked: the last ones stand for all."""


@dataclass
class Account:
    """The mean of a job's typical steps, ns: those of the middle half by length; all parts add up to it.

    ``waited`` is of ``work``: what a rank worked longer than its peers while these waited for it.
    ``hidden_share``: of all steps' time, the unexplained share.
    """

    group: int
    steps: int
    work: dict[int, int] = field(default_factory=dict)
    waited: dict[int, int] = field(default_factory=dict)
    library: int = 0
    transfer: int = 0
    network: int = 0
    credit: int = 0
    unexplained: int = 0
    hidden_share: float = 0.0

    @property
    def step_ns(self) -> int:
        """How long the step is."""
        named = self.library + self.transfer + self.network + self.credit
        return sum(self.work.values()) + named + self.unexplained


def account_for(
    steps: Sequence[Steps],
    entries: Entries,
    causes: Causes,
    own: Own,
    slow: NDArray[np.bool_],
    kind: NDArray[np.int64],
    group: NDArray[np.int64],
    tied: NDArray[np.bool_],
) -> list[Account]:
    """One account for each job with steps of collectives; ``slow`` marks rows whose endpoint has a slow link.

    ``kind`` numbers each collective's operation, size and group (``kinds_of``), ``group`` its group; ``tied``
    as of ``tied_rows``.
    """
    before, found = previous_row(entries), []
    for each in steps:
        if 2 * tied[np.isin(entries.endpoint, each.endpoints)].mean() < 1:
            continue
        ends = each.ends[-MOST - 1 :]
        walks = [
            _walk(entries, before, *pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        walks = [walk for walk in walks if walk]
        if walks:
            number = int(group[entries.collective[each.ends[-1]]])
            found.append(_sum_up(walks, number, entries, causes, own, slow, kind))
    return found


Segment = tuple[int, int, bool]
"""Length in ns; row of the last rank to enter the collective, -1 where none is known; whether it is work."""


def _walk(entries: Entries, before: NDArray[np.int64], first: int, last: int) -> list[Segment]:
    """The step from leaving row ``first`` to leaving row ``last``, from its end to its beginning."""
    begin, now, row = int(entries.leave_ns[first]), int(entries.leave_ns[last]), last
    found: list[Segment] = []
    while now > begin and row >= 0:
        number = int(entries.collective[row])
        rows = slice(int(entries.offsets[number]), int(entries.offsets[number + 1]))
        enter = entries.enter_ns[rows]
        there = np.where((enter != NEVER) & (enter < now), enter, NEVER)
        latest = rows.start + int(np.argmax(there))
        came = max(int(there.max()), begin)
        if there.max() == NEVER:
            break
        found.append((now - came, latest, False))
        now, row = came, int(before[latest])
        if row >= 0 and entries.leave_ns[row] != NEVER and now > begin:
            left = max(min(int(entries.leave_ns[row]), now), begin)
            found.append((now - left, latest, True))
            now = left
    if now > begin:
        found.append((now - begin, -1, False))
    return found


def _sum_up(
    walks: Sequence[Sequence[Segment]],
    group: int,
    entries: Entries,
    causes: Causes,
    own: Own,
    slow: NDArray[np.bool_],
    kind: NDArray[np.int64],
) -> Account:
    usual = _usual_ns(walks, entries, kind)
    sums = [_parts(walk, usual, entries, causes, own, slow, kind) for walk in walks]
    lengths = np.array([sum(each[0] for each in walk) for walk in walks])
    low, high = np.percentile(lengths, (25, 75))
    typical = [part for part, length in zip(sums, lengths.tolist(), strict=True) if low <= length <= high]
    total: defaultdict[tuple[str, int], int] = defaultdict(int)
    for part in typical:
        for key, ns in part.items():
            total[key] += ns
    account = Account(group, len(walks))
    for (name, endpoint), ns in sorted(total.items()):
        mean = round(ns / len(typical))
        if name in ("work", "waited"):
            getattr(account, name)[endpoint] = mean
        else:
            setattr(account, name, mean)
    hidden = sum(part.get(("unexplained", -1), 0) for part in sums)
    account.hidden_share = hidden / max(int(lengths.sum()), 1)
    return account


def _usual_ns(
    walks: Sequence[Sequence[Segment]], entries: Entries, kind: NDArray[np.int64]
) -> dict[tuple[int, bool], float]:
    """The median segment of each kind of collective, work and transfer apart."""
    seen: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
    for walk in walks:
        for length, row, works in walk:
            if row >= 0:
                seen[int(kind[entries.collective[row]]), works].append(length)
    return {key: float(np.median(lengths)) for key, lengths in seen.items()}


def _parts(
    walk: Sequence[Segment],
    usual: dict[tuple[int, bool], float],
    entries: Entries,
    causes: Causes,
    own: Own,
    slow: NDArray[np.bool_],
    kind: NDArray[np.int64],
) -> dict[tuple[str, int], int]:
    """The parts of one step, by name and endpoint (-1 for none)."""
    parts: defaultdict[tuple[str, int], int] = defaultdict(int)
    for length, row, works in walk:
        if row < 0:
            parts["unexplained", -1] += length
            continue
        number, endpoint = int(entries.collective[row]), int(entries.endpoint[row])
        rows = slice(int(entries.offsets[number]), int(entries.offsets[number + 1]))
        beyond = max(length - round(usual[int(kind[number]), works]), 0)
        cause = causes.cause[row : row + 1] if works else causes.cause[rows]
        if (cause == NETWORK).any() or (
            not works and bool((entries.retransmitted[rows] > 0).any() or slow[rows].any())
        ):
            why = "network"
        elif (cause == RECEIVER).any():
            why = "credit"
        elif works and entries.rule[row] == Rule.QUEUED:
            why = "library"
        else:
            why = "" if works and entries.exact[row] else "unexplained"
        if why:
            parts[why, -1] += beyond
            length -= beyond
        parts[("work", endpoint) if works else ("transfer", -1)] += length
        if works and own.amount_ns[row] > 0:
            parts["waited", endpoint] += min(int(own.amount_ns[row]), length)
    return parts
