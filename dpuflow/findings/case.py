"""What detectors read, and the finding they make of it: its severity follows from its cost alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.arrays.stretches import Covered, covered_ns
from dpuflow.conditions import TABLE
from dpuflow.entries.rows import QUARTER_IN_SIGMAS
from dpuflow.figures.spans import jobs_with, list_jobs
from dpuflow.findings.evidence import ByEnd
from dpuflow.findings.keys import keys_of
from dpuflow.findings.repeats import find_repeats
from dpuflow.join.common import number_connections
from dpuflow.quantities import sentence
from dpuflow.requests import find_requests
from dpuflow.results import Finding
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.chance import CRITICAL_SHARE, SIGMAS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from dpuflow.figures.spans import Job
    from dpuflow.findings.keys import Keys
    from dpuflow.findings.repeats import Repeats
    from dpuflow.matching import Instance
    from dpuflow.requests import Requests
    from dpuflow.results import Analysis
    from dpuflow.results.tokens import Severity
    from dpuflow.schema.tables import CaptureTables, Joined, Rows
    from dpuflow.verdicts import Inferred

SMALL_SHARE: Final = 0.01
"""What took less than a hundredth of the time it affected is told as information."""


class NotJudgedError(Exception):
    """A detector cannot judge this case: the message says why."""


@dataclass
class Case:
    """All that was read and inferred; ``result`` has all but findings."""

    captures: Sequence[CaptureTables]
    joined: Joined
    exchanges: Rows
    instances: Sequence[Instance]
    inferred: Inferred
    result: Analysis
    # By sender: stretches in which losses held its messages up (``losses.held_by_losses``).
    held_of: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    @cached_property
    def received(self) -> ByEnd:
        """Rows of TRANSFER by receiver."""
        return ByEnd(self.joined, "dst")

    @cached_property
    def sent(self) -> ByEnd:
        """Rows of TRANSFER by sender."""
        return ByEnd(self.joined, "src")

    @cached_property
    def requests(self) -> Requests:
        """What clients asked."""
        return find_requests(self.joined, self.exchanges, self.instances)

    @cached_property
    def repeats(self) -> Repeats:
        """What was sent again, and what of that was lost."""
        return find_repeats(self.captures, self.joined)

    @cached_property
    def keys(self) -> Keys:
        """What memory keys messages named."""
        return keys_of(self.captures, self.joined.transfers, self.exchanges)

    @cached_property
    def held_by_losses(self) -> NDArray[np.int64]:
        """From when to when messages between ranks were held up because packets were lost; two rows."""
        from dpuflow.findings.losses import held_by_losses

        flows = self.joined.flows
        senders = distinct(flows["src"][(self.repeats.lost > 0) & ~self.of_clients]).tolist()
        held = [held_by_losses(self, sender) for sender in senders]
        return np.concatenate(held, axis=1) if held else np.zeros((2, 0), np.int64)

    @cached_property
    def lost_ns(self) -> int:
        """For how long any message was, while the job ran."""
        return covered_ns(self.held_by_losses, *self.job_ns())

    @cached_property
    def of_clients(self) -> NDArray[np.bool_]:
        """Of each flow whether it is one way of a client's connection."""
        numbers = number_connections(self.joined.flows)
        found: NDArray[np.bool_] = np.isin(numbers, self.requests.connections.number)
        return found

    @cached_property
    def spans_ns(self) -> NDArray[np.int64]:
        """Of each operation the first and the last sign of its ranks (two rows); NEVER where nothing dates
        any."""
        entries = self.inferred.entries
        times = np.stack([entries.enter_ns, entries.leave_ns])
        if not times.size:
            return np.zeros((2, 0), np.int64)
        starts = entries.offsets[:-1]
        least = np.where(times == NEVER, np.iinfo(np.int64).max, times).min(axis=0)
        first = np.minimum.reduceat(least, starts)
        last = np.maximum.reduceat(times.max(axis=0), starts)
        return np.stack([np.where(last == NEVER, NEVER, first), last])

    @cached_property
    def jobs(self) -> list[Job]:
        """Who works together, and when."""
        return list_jobs(self.result)

    def job_ns(self, endpoints: Collection[int] = ()) -> tuple[int, int]:
        """From when to when the jobs of ``endpoints`` ran, or all jobs without one; what was captured where
        no operation was."""
        mine = jobs_with(self.jobs, endpoints)
        if not mine:
            return self.joined.start_ns, self.joined.end_ns
        return min(job.start_ns for job in mine), max(job.end_ns for job in mine)

    def span_ns(self, endpoints: Collection[int] = ()) -> int:
        """The time that every cost at ``endpoints`` is a share of: what lies before and after the job,
        however long it was captured, dilutes none."""
        begin, end = self.job_ns(endpoints)
        return max(end - begin, 1)

    def cost(self, share: float, endpoints: Collection[int]) -> Cost:
        """Of a ``share`` of the time of the jobs of ``endpoints``."""
        return Cost(round(share * self.span_ns(endpoints)), share)

    def taken_share(self, held: NDArray[np.int64], endpoints: Collection[int]) -> float:
        """Of its time what the job lost while messages from or to one of ``endpoints`` were ``held`` (from
        when to when, two rows): as far as they lay on the critical path of its steps. Of several jobs what
        those of ``endpoints`` lost, where they are in any.

        A step that is longer than others ever are is so because of what held messages meanwhile, wherever its
        path went. What of the job lies before the first step's end or after the last one's counts whole.
        """
        if not held.size:
            return 0.0
        held_by = Covered(held).before
        whole = covered_ns(held, *self.job_ns(endpoints))
        found = [] if self.inferred.accounts else [whole]
        every = list(zip(self.inferred.accounts, self._beyond, strict=True))
        own = [each for each in every if not set(each[0].endpoints).isdisjoint(endpoints)]
        for account, beyond in own or every:
            steps = np.r_[account.ends_ns[:1] - account.lengths_ns[:1], account.ends_ns]
            _, _, begin, end = account.moves[:, np.isin(account.moves[:2], [-1, *endpoints]).any(axis=0)]
            of = np.clip(np.searchsorted(steps, begin, side="right") - 1, 0, account.steps - 1)
            on_path = np.bincount(of, held_by(end) - held_by(begin), account.steps)
            by_steps = held_by(steps)
            by_step = np.maximum(on_path, np.minimum(np.diff(by_steps), beyond))
            outside = whole - int(by_steps[-1] - by_steps[0])
            found.append(int(by_step.sum()) + max(outside, 0))
        return min(max(found) / self.span_ns(endpoints), 1.0)

    @cached_property
    def _beyond(self) -> list[NDArray[np.float64]]:
        """Of each account's steps by how much they are longer than the usual one."""
        return [beyond_others(account.lengths_ns) for account in self.inferred.accounts]


def beyond_others(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of each step that is longer than chance makes any, by how much it is longer than the usual one."""
    quarter, middle = np.percentile(lengths, (25, 50))
    surely = middle + SIGMAS * (middle - quarter) / QUARTER_IN_SIGMAS
    return np.where(lengths > surely, lengths - middle, 0.0)


def severity_of(share: float) -> Severity:
    """By what a condition took of the time that it affected."""
    return "critical" if share >= CRITICAL_SHARE else "warning" if share >= SMALL_SHARE else "info"


@dataclass
class Cost:
    """What a condition took; ``ns`` None where that is not told."""

    ns: int | None
    share: float


def make_finding(
    condition: str,
    endpoints: Sequence[int],
    times: tuple[int | None, int | None],
    cost: Cost,
    confidence: float,
    summary: str,
    **changes: object,
) -> Finding:
    """A finding with its condition's runbook, advice and alternatives, where ``changes`` says nothing"
    " else."""
    row = TABLE[condition]
    found = Finding(
        id=0,
        condition=condition,
        runbook=row.runbook,
        endpoints=list(endpoints),
        start_ns=times[0],
        end_ns=times[1],
        severity=severity_of(cost.share),
        confidence=confidence,
        summary=sentence(summary),
        advice=row.advice,
        alternatives=list(row.alternatives),
        cost_ns=cost.ns,
        cost_share=cost.share if cost.ns is not None else None,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found
