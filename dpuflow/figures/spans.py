"""Operations of a result in, the time of the jobs they belong to out: shares of a job's time are of this.

Groups that share an endpoint are one job. Of captures whose clocks nothing ties an endpoint is in the groups
of one island alone (``islands``), so no job's time is taken across two clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.components import least_connected
from dpuflow.arrays.ordering import classes

if TYPE_CHECKING:
    from collections.abc import Collection

    from dpuflow.results import Analysis


class Job(NamedTuple):
    """Endpoints that work together, and from when to when: before its first and after its last operation a
    job does nothing together that could take longer, whatever was captured meanwhile."""

    endpoints: frozenset[int]
    start_ns: int
    end_ns: int

    @property
    def span_ns(self) -> int:
        return max(self.end_ns - self.start_ns, 1)


def list_jobs(result: Analysis) -> list[Job]:
    """All jobs of a result, by their first group; bulk one-sided transfers tie their ends together, too."""
    leads = [group.endpoints[0] for group in result.groups]
    rows = [(each.src, each.dst, each.start_ns, each.end_ns) for each in result.transfers]
    rows += [
        (leads[each.group], leads[each.group], each.start_ns, each.end_ns) for each in result.collectives
    ]
    if not rows:
        return []
    src, dst, begin, end = np.array(rows, np.int64).T
    groups = {each.group for each in result.collectives}
    ties = [(leads[number], other) for number in groups for other in result.groups[number].endpoints]
    a, b = np.concatenate([np.stack([src, dst]), np.array(ties, np.int64).reshape(-1, 2).T], axis=1)
    ends, of = np.unique(np.r_[a, b], return_inverse=True)
    job = least_connected(of[: len(a)], of[len(a) :], len(ends))
    _, at, number = np.unique(job[of[: len(src)]], return_index=True, return_inverse=True)
    first, last = np.stack([begin[at], end[at]])
    np.minimum.at(first, number, begin)
    np.maximum.at(last, number, end)
    members = [frozenset(ends[part].tolist()) for part in classes(job)]
    return [Job(members[n], int(first[n]), int(last[n])) for n in np.argsort(at).tolist()]


def jobs_with(jobs: list[Job], endpoints: Collection[int]) -> list[Job]:
    """The jobs that some of ``endpoints`` take part in; all where they take part in none."""
    return [job for job in jobs if not job.endpoints.isdisjoint(endpoints)] or jobs
