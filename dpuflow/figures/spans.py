"""Operations of a result in, the time of the jobs they belong to out: shares of a job's time are of this.

Groups that share an endpoint are one job. Of captures whose clocks nothing ties an endpoint is in the groups
of one island alone (``islands``), so no job's time is taken across two clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dpuflow.arrays.components import connected

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
    ways: dict[tuple[int, int], tuple[int, int]] = {}
    for each in result.transfers:
        first, last = ways.get(way := (each.src, each.dst), (each.start_ns, each.end_ns))
        ways[way] = min(first, each.start_ns), max(last, each.end_ns)
    seen = [(frozenset(way), *times) for way, times in ways.items()]
    members = [frozenset(group.endpoints) for group in result.groups]
    seen += [(members[each.group], each.start_ns, each.end_ns) for each in result.collectives]
    ran: dict[frozenset[int], tuple[int, int]] = {}
    for ends, begin, end in seen:
        first, last = ran.get(ends, (begin, end))
        ran[ends] = min(first, begin), max(last, end)
    return [
        Job(frozenset().union(*part), min(ran[ends][0] for ends in part), max(ran[ends][1] for ends in part))
        for part in connected(ran, lambda ends: ends)
    ]


def jobs_with(jobs: list[Job], endpoints: Collection[int]) -> list[Job]:
    """The jobs that some of ``endpoints`` take part in; all where they take part in none."""
    return [job for job in jobs if not job.endpoints.isdisjoint(endpoints)] or jobs
