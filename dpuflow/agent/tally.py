"""What the windows add up to since the agent's start: the counters and histograms behind /metrics.

In: windows as they are published. Out: totals by label values, of which there are at most as many as was said
(``bounded``). Times are kept in seconds, as Prometheus wants them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dpuflow.agent.bounded import OTHER, Bounded
from dpuflow.agent.rolling import counted_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpuflow.agent.board import Traffic, Window
    from dpuflow.results import Analysis, Collective, Steps, Transfer

BUCKETS: Final = (*(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 3)), 10.0)
"""Upper bounds of the histograms, 1 us to 10 s, two a decade. Below 1 us are the stamps' own errors; a small
all_reduce within a rack takes some ten us, a bucket of gradients ms, a straggler tens of ms to seconds, and
what takes 10 s is a job that stands still. Steps of a factor of 3 keep an estimated quantile within a factor
of 3, which tells such cases apart, at 16 series instead of the 23 of 1-2-5."""

JUDGED_S: Final = 60.0
"""How long what was judged is shown after the last window that judged it: as findings do, it outlasts a job's
silence between two steps."""

FLOW_FIELDS: Final = (
    *("packets", "bytes", "messages", "retransmitted", "out_of_order", "missing", "ecn_marked"),
    *("cnp", "nak", "rnr", "zero_window"),
)
ROCE_ONLY: Final = frozenset({"cnp", "nak", "rnr"})
TCP_ONLY: Final = frozenset({"zero_window"})


def group_name(addresses: Iterable[str]) -> str:
    """A short name of a group, the same at every agent and after every restart: a digest of its addresses."""
    text = "\n".join(sorted(addresses))
    return "g" + hashlib.blake2s(text.encode(), digest_size=5).hexdigest()


@dataclass
class Histogram:
    """Counts by bucket, the last one being beyond all bounds, and the sum of what was observed."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``; a bound belongs to the bucket below it."""
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value


@dataclass
class Entries:
    """Of one endpoint in one group: how often it entered a collective, and what is known of its lateness."""

    bounds: dict[str, int] = field(default_factory=dict)
    late: int = 0
    caused_wait_s: float = 0.0
    lateness: Histogram = field(default_factory=Histogram)
    at_least: Histogram = field(default_factory=Histogram)


@dataclass
class Operations:
    """Of one operation of one group."""

    algorithms: dict[str, int] = field(default_factory=dict)
    wire_bytes: int = 0
    duration: Histogram = field(default_factory=Histogram)


@dataclass
class Moved:
    """Of the transfers of one way."""

    count: int = 0
    bytes: int = 0
    pages: int = 0
    busy_s: float = 0.0


class Shown(NamedTuple):
    """What a window said of the present; ``at`` is when (monotonic, s)."""

    at: float
    verdict: str
    rank: int | None
    label: str | None
    late_ns: int | None
    late_bound: str | None


class Job(NamedTuple):
    """What a job repeats, as the last window that told it had it."""

    at: float
    steps: Steps


class Tally:
    """Totals since the start. ``add`` and reading within ``lock`` may be called from different threads."""

    def __init__(self, peers: int, groups: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.lock = threading.Lock()
        self.windows = 0
        self.last_end_ns: int | None = None
        self.traffic: dict[tuple[str, str, str], list[int]] = {}  # transport, src, dst
        self.pauses: dict[tuple[str, str], tuple[int, int]] = {}  # sender, priority: frames, quanta
        self.operations: dict[tuple[str, str], Operations] = {}  # group, operation
        self.entries: dict[tuple[str, str], Entries] = {}  # group, peer
        self.opened: dict[tuple[str, str], int] = {}  # condition, severity
        self.named: Bounded[tuple[str, ...]] = Bounded(peers, lambda _: None, now=now)  # findings' series
        self.kinds: dict[str, tuple[str, int]] = {}  # group: kind, how many endpoints
        self.judged: dict[str, Shown] = {}  # peer
        self.jobs: dict[str, Job] = {}  # by the name of the group of all its endpoints
        self.without: dict[str, tuple[float, int]] = {}  # peer: when told, a step without its lateness, ns
        self.pairs: Bounded[tuple[str, str, str]] = Bounded(peers, self._forget_pair, now=now)
        self.members: Bounded[tuple[str, str]] = Bounded(peers, self._forget_member, now=now)
        self.groups: Bounded[tuple[str]] = Bounded(groups, self._forget_group, now=now)
        self.senders: Bounded[tuple[str, str]] = Bounded(peers, self._forget_sender, now=now)
        self.moved: dict[tuple[str, str, str], Moved] = {}  # verb, src, dst
        self.waited: dict[tuple[str], Histogram] = {}  # peer
        self.ways: Bounded[tuple[str, str, str]] = Bounded(peers, self._forget_way, now=now)
        self.receivers: Bounded[tuple[str]] = Bounded(peers, self._forget_receiver, now=now)

    def add(self, window: Window) -> None:
        """Take in what ``window`` newly settled."""
        with self.lock:
            self.windows += 1
            self.last_end_ns = window.end_ns
            for row in window.traffic:
                self._traffic(row)
            for pause in window.pauses:
                priority = "" if pause.priority is None else str(pause.priority)
                key = self.senders.place((pause.src_mac, priority)) or (OTHER, OTHER)
                frames, quanta = self.pauses.get(key, (0, 0))
                self.pauses[key] = (frames + pause.frames, quanta + pause.quanta)
            for collective in window.analysis.collectives:
                self._collective(window, collective)
            for transfer in window.analysis.transfers:
                self._transfer(window.analysis, transfer)
            self._present(window.analysis)

    def finding(self, condition: str, severity: str) -> None:
        """Count a finding that opened."""
        with self.lock:
            key = (condition, severity)
            self.opened[key] = self.opened.get(key, 0) + 1

    def _present(self, analysis: Analysis) -> None:
        now = self._now()
        endpoints = analysis.endpoints
        for row in analysis.lateness:
            known = endpoints[row.endpoint]
            self.judged[known.address] = Shown(
                now, row.verdict, known.rank, known.label, row.late_ns, row.late_bound
            )
        for steps in analysis.steps:
            self.jobs[group_name(_addresses(analysis, steps.endpoints))] = Job(now, steps)
        for what_if in analysis.what_if:
            self.without[endpoints[what_if.endpoint].address] = (now, what_if.step_without_ns)
        told: tuple[dict[str, Any], ...] = (self.judged, self.jobs, self.without)
        for each in told:
            for key in [key for key, value in each.items() if now - value[0] > JUDGED_S]:
                del each[key]

    def _traffic(self, row: Traffic) -> None:
        key = self.pairs.place((row.transport, row.src, row.dst)) or (row.transport, OTHER, OTHER)
        totals = self.traffic.setdefault(key, [0] * len(FLOW_FIELDS))
        for at, name in enumerate(FLOW_FIELDS):
            totals[at] += getattr(row, name)

    def _collective(self, window: Window, collective: Collective) -> None:
        analysis = window.analysis
        name = group_name(_addresses(analysis, analysis.groups[collective.group].endpoints))
        group = (self.groups.place((name,)) or (OTHER,))[0]
        if group != OTHER:
            of = analysis.groups[collective.group]
            self.kinds[group] = (of.kind or self.kinds.get(group, ("", 0))[0], len(of.endpoints))
        done = self.operations.setdefault((group, collective.op), Operations())
        done.algorithms[collective.algorithm] = done.algorithms.get(collective.algorithm, 0) + 1
        done.wire_bytes += int(collective.wire_bytes)
        if collective.complete:
            done.duration.observe((collective.end_ns - collective.start_ns) / 1e9)
        if collective.op == "send_recv":  # a transfer has no lateness
            return
        waits = counted_of(window, collective)
        for rank in collective.ranks:
            address = analysis.endpoints[rank.endpoint].address
            place = None if group == OTHER else self.members.place((group, address))
            entries = self.entries.setdefault(place or (OTHER, OTHER), Entries())
            entries.bounds[rank.bound] = entries.bounds.get(rank.bound, 0) + 1
            entries.late += (collective.id, rank.endpoint) in window.late
            entries.caused_wait_s += waits.get(rank.endpoint, 0) / 1e9
            if rank.bound in ("exact", "at_least") and rank.lateness_ns is not None:
                into = entries.lateness if rank.bound == "exact" else entries.at_least
                into.observe(rank.lateness_ns / 1e9)

    def _transfer(self, analysis: Analysis, transfer: Transfer) -> None:
        src, dst = (analysis.endpoints[end].address for end in (transfer.src, transfer.dst))
        way = self.ways.place((transfer.verb, src, dst)) or (transfer.verb, OTHER, OTHER)
        moved = self.moved.setdefault(way, Moved())
        moved.count += 1
        moved.bytes += transfer.bytes
        moved.pages += transfer.pages
        moved.busy_s += transfer.busy_ns / 1e9
        if transfer.wait_before_first_token_ns is not None:
            peer = self.receivers.place((dst,)) or (OTHER,)
            self.waited.setdefault(peer, Histogram()).observe(transfer.wait_before_first_token_ns / 1e9)

    def _forget_way(self, key: tuple[str, str, str]) -> None:
        self.moved.pop(key, None)

    def _forget_receiver(self, key: tuple[str]) -> None:
        self.waited.pop(key, None)

    def _forget_pair(self, key: tuple[str, str, str]) -> None:
        self.traffic.pop(key, None)

    def _forget_member(self, key: tuple[str, str]) -> None:
        self.entries.pop(key, None)

    def _forget_sender(self, key: tuple[str, str]) -> None:
        self.pauses.pop(key, None)

    def _forget_group(self, key: tuple[str]) -> None:
        self.kinds.pop(key[0], None)
        for operation in [each for each in self.operations if each[0] == key[0]]:
            del self.operations[operation]


def _addresses(analysis: Analysis, members: Iterable[int]) -> list[str]:
    return [analysis.endpoints[member].address for member in members]
