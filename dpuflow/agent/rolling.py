"""Statistics over the windows that are held: groups, and each endpoint's lateness, by address.

Windows come and go (``add``, ``forget``); what is kept of a collective is a few numbers a rank. Verdicts are
those of the last window that judged an endpoint (they rest on the span that was analysed), the figures cover
all the windows held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from dpuflow.results import Told

if TYPE_CHECKING:
    from dpuflow.agent.board import Window
    from dpuflow.results import Collective, Lateness
    from dpuflow.results.tokens import Cause, Steadiness, Unjudged, Verdict


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group of endpoints over the windows held; ``addresses`` tells it from others."""

    addresses: tuple[str, ...]
    ranks: tuple[int | None, ...]
    kind: str | None
    collectives: int
    bytes: int  # wire bytes of its collectives
    operations: tuple[tuple[str, str, int], ...]  # operation, algorithm, how many; most frequent first
    last_ns: int  # end of its last collective
    median_ns: int | None  # duration of its collectives


@dataclass(frozen=True, slots=True)
class LatenessState:
    """One endpoint over the windows held; meanings as in ``results.Lateness``, with an address."""

    address: str
    rank: int | None
    label: str | None
    collectives: int
    late_share: float | None
    last_share: float | None
    median_ns: int | None
    p99_ns: int | None
    caused_wait_ns: int
    verdict: Verdict
    cause: Cause
    steadiness: Steadiness | None
    since_ns: int | None
    relative_to: tuple[str, ...] | None
    perhaps_last: int
    perhaps_ns: int | None
    told: Told  # of the window that the verdict is from, as is what follows
    detectable_ns: int | None
    own_share: float | None
    late_ns: int | None
    late_most_ns: int | None
    late_bound: Literal["exact", "at_least"] | None
    confidence: float | None
    together: tuple[str, ...]
    unjudged: Unjudged | None
    judged_ns: int  # end of the window that the verdict is from


class _Entry(NamedTuple):
    """One endpoint in one collective. ``lateness_ns`` is -1 where it is a bound only or unknown."""

    window: int
    lateness_ns: int
    late: bool
    last: bool
    wait_ns: int


class _Run(NamedTuple):
    """One collective of a group."""

    window: int
    operation: tuple[str, str]
    wire_bytes: int
    duration_ns: int
    end_ns: int


@dataclass
class _Endpoint:
    rank: int | None = None
    label: str | None = None
    entries: deque[_Entry] = field(default_factory=deque)
    judged: Lateness | None = None
    judged_ns: int = 0
    relative_to: tuple[str, ...] | None = None
    together: tuple[str, ...] = ()
    seen: int = 0  # number of the last window that named it


@dataclass
class _Group:
    ranks: tuple[int | None, ...] = ()
    kind: str | None = None
    runs: deque[_Run] = field(default_factory=deque)


class Rolled:
    """Groups and endpoints over the windows between the last ``forget`` and the last ``add``."""

    def __init__(self) -> None:
        self._endpoints: dict[str, _Endpoint] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}

    def add(self, window: Window) -> None:
        """Take a window in."""
        analysis = window.analysis
        address = [endpoint.address for endpoint in analysis.endpoints]
        for row in analysis.lateness:
            state = self._endpoints.setdefault(address[row.endpoint], _Endpoint())
            endpoint = analysis.endpoints[row.endpoint]
            state.rank, state.label = endpoint.rank, endpoint.label
            state.judged, state.judged_ns, state.seen = row, window.end_ns, window.number
            others = row.relative_to
            state.relative_to = None if others is None else tuple(address[other] for other in others)
            state.together = tuple(address[other] for other in row.together)
        for collective in analysis.collectives:
            members = analysis.groups[collective.group].endpoints
            key = tuple(sorted(address[member] for member in members))
            group = self._groups.setdefault(key, _Group())
            ranks = {address[member]: analysis.endpoints[member].rank for member in members}
            group.ranks = tuple(ranks[each] for each in key)
            group.kind = analysis.groups[collective.group].kind or group.kind
            group.runs.append(
                _Run(
                    window.number,
                    (collective.op, collective.algorithm),
                    collective.wire_bytes,
                    collective.end_ns - collective.start_ns,
                    collective.end_ns,
                )
            )
            counted = counted_of(window, collective)
            for rank in collective.ranks:
                state = self._endpoints.setdefault(address[rank.endpoint], _Endpoint())
                state.seen = window.number
                if rank.endpoint in counted and collective.op != "send_recv":
                    wait = counted[rank.endpoint]
                    late = (collective.id, rank.endpoint) in window.late
                    # An upper bound may stand where all that is known is that it was late by 0 or more.
                    lateness = rank.lateness_ns if rank.bound in ("exact", "at_least") else 0
                    state.entries.append(_Entry(window.number, lateness or 0, late, wait > 0, wait))

    def forget(self, window: Window) -> None:
        """Drop what a window, the oldest one, brought."""
        for address, state in list(self._endpoints.items()):
            while state.entries and state.entries[0].window <= window.number:
                state.entries.popleft()
            if not state.entries and state.seen <= window.number:
                del self._endpoints[address]
        for key, group in list(self._groups.items()):
            while group.runs and group.runs[0].window <= window.number:
                group.runs.popleft()
            if not group.runs:
                del self._groups[key]

    def copy(self) -> Rolled:
        """As it is now, so that reading it at leisure holds up nobody who adds."""
        made = Rolled()
        made._endpoints = {
            address: replace(state, entries=state.entries.copy())
            for address, state in self._endpoints.items()
        }
        made._groups = {key: replace(group, runs=group.runs.copy()) for key, group in self._groups.items()}
        return made

    def groups(self) -> list[GroupState]:
        """All groups, most recently active first."""
        found = []
        for key, group in self._groups.items():
            counts: dict[tuple[str, str], int] = {}
            for run in group.runs:
                counts[run.operation] = counts.get(run.operation, 0) + 1
            order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
            found.append(
                GroupState(
                    addresses=key,
                    ranks=group.ranks,
                    kind=group.kind,
                    collectives=len(group.runs),
                    bytes=sum(run.wire_bytes for run in group.runs),
                    operations=tuple((op, algorithm, count) for (op, algorithm), count in order),
                    last_ns=max(run.end_ns for run in group.runs),
                    median_ns=_quantile(sorted(run.duration_ns for run in group.runs), 0.5),
                )
            )
        return sorted(found, key=lambda group: (-group.last_ns, group.addresses))

    def lateness(self) -> list[LatenessState]:
        """All endpoints that were judged or took part in a collective, the costliest first."""
        found = []
        for address, state in self._endpoints.items():
            times = sorted(entry.lateness_ns for entry in state.entries)
            judged, n = state.judged, len(times)
            found.append(
                LatenessState(
                    address=address,
                    rank=state.rank,
                    label=state.label,
                    collectives=n,
                    late_share=sum(entry.late for entry in state.entries) / n if n else None,
                    last_share=sum(entry.last for entry in state.entries) / n if n else None,
                    median_ns=_quantile(times, 0.5) if n else None,
                    p99_ns=_quantile(times, 0.99) if n else None,
                    caused_wait_ns=sum(entry.wait_ns for entry in state.entries),
                    verdict=judged.verdict if judged else "unknown",
                    cause=judged.cause if judged else "unknown",
                    steadiness=judged.steadiness if judged else None,
                    since_ns=judged.since_ns if judged else None,
                    relative_to=state.relative_to,
                    perhaps_last=judged.perhaps_last if judged else 0,
                    perhaps_ns=judged.perhaps_ns if judged else None,
                    told=judged.told if judged else Told(),
                    detectable_ns=judged.detectable_ns if judged else None,
                    own_share=judged.own_share if judged else None,
                    late_ns=judged.late_ns if judged else None,
                    late_most_ns=judged.late_most_ns if judged else None,
                    late_bound=judged.late_bound if judged else None,
                    confidence=judged.confidence if judged else None,
                    together=state.together,
                    unjudged=judged.unjudged if judged else None,
                    judged_ns=state.judged_ns,
                )
            )
        return sorted(found, key=lambda row: (-row.caused_wait_ns, row.address))


def _quantile(ordered: list[int], share: float) -> int:
    """Between the two values on either side, as far as ``share`` is between them."""
    # As numpy.quantile does it. That alone would take 8 MiB of the process that serves the API.
    whole, part = divmod((len(ordered) - 1) * share, 1.0)
    below = ordered[int(whole)]
    step = ordered[min(int(whole) + 1, len(ordered) - 1)] - below
    return round(below + step * part if part < 0.5 else below + step - step * (1.0 - part))


def counted_of(window: Window, collective: Collective) -> dict[int, int]:
    """The wait charged (rank-ns) to each endpoint whose lateness in the collective is known.

    As in the judgement: a lower bound counts, an upper bound says nothing of being late.
    """
    if window.counted is not None:
        ends = [rank.endpoint for rank in collective.ranks]
        return {end: window.counted[key] for end in ends if (key := (collective.id, end)) in window.counted}
    waits = charged(collective)
    return {
        rank.endpoint: waits.get(rank.endpoint, 0)
        for rank in collective.ranks
        if rank.lateness_ns is not None and rank.bound in ("exact", "at_least")
    }


def charged(collective: Collective) -> dict[int, int]:
    """The caused wait of the collective's last rank (rank-ns), by endpoint; empty where none can be told."""
    seen = sorted(
        (rank.enter_ns, rank.endpoint, rank.bound) for rank in collective.ranks if rank.enter_ns is not None
    )
    if len(seen) < 2 or seen[-1][2] not in ("exact", "at_least"):
        return {}
    lead = seen[-1][0] - seen[-2][0]
    return {seen[-1][1]: lead * (len(seen) - 1)} if lead > 0 else {}
