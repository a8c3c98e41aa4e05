"""Prometheus' /metrics: what the board and the tally hold, as series.

In: a ``Board``, settings, counters of the NIC. Out: a registry of the official client, collected anew at each
scrape. A thread reads windows and findings off the board into the tally, so that nothing waits for a scrape.
"""

from __future__ import annotations

import threading
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from dpuflow import __version__
from dpuflow.agent import metricnames as names
from dpuflow.agent.bounded import OTHER
from dpuflow.agent.counters import LABELS, NicCounterFiles
from dpuflow.agent.tally import BUCKETS, FLOW_FIELDS, ROCE_ONLY, TCP_ONLY, Tally
from dpuflow.findings import about
from dpuflow.live.nic import NIC_LOSSES, NIC_NAMES
from dpuflow.schema.ring import COUNTER_NAMES, LOSSES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Protocol

    from prometheus_client.metrics_core import Metric as Family

    from dpuflow.agent.board import Board, FindingState
    from dpuflow.agent.bounded import Bounded
    from dpuflow.agent.config import Metrics as Settings
    from dpuflow.agent.counters import Reading
    from dpuflow.agent.metricnames import Metric
    from dpuflow.agent.tally import Histogram

    class Collector(Protocol):
        """What the client's registry takes."""

        def collect(self) -> Iterable[Family]: ...


_VERDICTS = ("on_time", "late", "intermittent", "unknown")
_PARTS = ("analysis", "api", "events", "history", "memory", "metrics", "webhook")
"""What may fail: counted from 0 on, as a first failure is no increase of a series that begins with it."""
_FIDELITIES = ("packets", "messages", "sampled")


def start(board: Board, settings: Settings, agent: int | None = None) -> Metrics:
    """Begin to count. ``agent``: the process that ``process_*`` are of; None: this one."""
    return Metrics(board, settings, agent)


class Metrics:
    """The registry behind /metrics, and the thread that keeps it up to date."""

    def __init__(self, board: Board, settings: Settings, agent: int | None = None) -> None:
        self.tally = Tally(settings.max_peers, settings.max_groups)
        self.registry = CollectorRegistry()
        self._board = board
        self._counters = NicCounterFiles(settings.sysfs) if settings.nic_counters else None
        self._subscription = board.subscribe()
        self.registry.register(self)
        ProcessCollector(registry=self.registry, pid=lambda: agent or "self")
        GCCollector(registry=self.registry)
        self._thread = threading.Thread(target=self._follow, name="metrics", daemon=True)
        self._thread.start()

    def add(self, collector: Collector) -> None:
        """Show the series of another part, too."""
        self.registry.register(collector)

    def close(self) -> None:
        """Stop counting."""
        self._subscription.close()
        self._thread.join(5)

    def _follow(self) -> None:
        for event in self._subscription:
            try:
                if event.window is not None:
                    self.tally.add(event.window)
                elif event.finding is not None and event.kind == "finding_opened":
                    self.tally.finding(event.finding.condition, event.finding.severity)
            except Exception:  # one bad window must not end the counting
                self._board.count_error("metrics")

    def describe(self) -> Iterator[Family]:
        """Nothing: names are known at a scrape only, and need not be checked against other collectors."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """All families, for the client's registry."""
        yield _gauge(names.BUILD_INFO, [((__version__,), 1)])
        with self.tally.lock:
            families = [*self._flows(), *self._groups(), *self._present(), *self._own()]
        yield from families
        yield from self._findings()
        yield from self._health()
        if self._counters is not None:
            yield from _nic(self._counters.read(self._board.health().interfaces))

    def _flows(self) -> Iterator[Family]:
        for at, name in enumerate(FLOW_FIELDS):
            shown = "roce" if name in ROCE_ONLY else "tcp" if name in TCP_ONLY else None
            rows = self.tally.traffic.items()
            yield _counter(
                names.FLOWS[name],
                [(key, totals[at]) for key, totals in rows if shown is None or key[0] == shown],
            )
        pauses = self.tally.pauses.items()
        yield _counter(names.PFC_FRAMES, [(key, frames) for key, (frames, _) in pauses])
        yield _counter(names.PFC_QUANTA, [(key, quanta) for key, (_, quanta) in pauses])

    def _groups(self) -> Iterator[Family]:
        done = self.tally.operations.items()
        yield _counter(
            names.COLLECTIVES,
            [((*key, algorithm), n) for key, each in done for algorithm, n in each.algorithms.items()],
        )
        yield _counter(names.COLLECTIVE_BYTES, [(key, each.wire_bytes) for key, each in done])
        yield _histogram(names.DURATION, [(key, each.duration) for key, each in done])
        entries = self.tally.entries.items()
        yield _histogram(names.LATENESS, [(key, each.lateness) for key, each in entries])
        yield _histogram(names.LATENESS_BOUND, [(key, each.at_least) for key, each in entries])
        yield _counter(
            names.ENTRIES, [((*key, bound), n) for key, each in entries for bound, n in each.bounds.items()]
        )
        yield _counter(names.LATE_ENTRIES, [(key, each.late) for key, each in entries])
        yield _counter(names.CAUSED_WAIT, [(key, each.caused_wait_s) for key, each in entries])
        yield _counter(names.FINDINGS, self.tally.opened.items())
        moved = self.tally.moved.items()
        yield _counter(names.TRANSFERS, [(key, each.count) for key, each in moved])
        yield _counter(names.TRANSFER_BYTES, [(key, each.bytes) for key, each in moved])
        yield _counter(names.TRANSFER_PAGES, [(key, each.pages) for key, each in moved])
        yield _counter(names.TRANSFER_BUSY, [(key, each.busy_s) for key, each in moved])
        yield _histogram(names.TRANSFER_WAIT, self.tally.waited.items())

    def _own(self) -> Iterator[Family]:
        tally = self.tally
        yield _counter(names.WINDOWS, [((), tally.windows)])
        if tally.last_end_ns is not None:
            yield _gauge(names.LAST_WINDOW, [((), tally.last_end_ns / 1e9)])
        tables: dict[str, Bounded[Any]] = {
            "pairs": tally.pairs,
            "members": tally.members,
            "groups": tally.groups,
            "senders": tally.senders,
            "ways": tally.ways,
            "receivers": tally.receivers,
        }
        yield _gauge(names.NAMES, [((kind,), len(table)) for kind, table in tables.items()])
        yield _counter(names.NAMES_EVICTED, [((kind,), table.evicted) for kind, table in tables.items()])
        yield _counter(names.MISSED, [(("metrics",), self._subscription.missed)])

    def _present(self) -> Iterator[Family]:
        """What holds now rather than what added up. Bounded as the counters are: no name that they lack."""
        tally = self.tally
        yield _gauge(
            names.GROUP_INFO, [((name, kind, str(size)), 1) for name, (kind, size) in tally.kinds.items()]
        )
        known = {peer for _, peer in tally.members}
        peers = {peer: shown for peer, shown in tally.judged.items() if peer in known}
        yield _gauge(
            names.PEER_INFO,
            [
                ((peer, "" if shown.rank is None else str(shown.rank), shown.label or ""), 1)
                for peer, shown in peers.items()
            ],
        )
        verdicts = [
            ((peer, each), int(each == shown.verdict)) for peer, shown in peers.items() for each in _VERDICTS
        ]
        yield _gauge(names.VERDICT, verdicts)
        late = [
            ((peer, shown.late_bound or ""), shown.late_ns / 1e9)
            for peer, shown in peers.items()
            if shown.late_ns is not None
        ]
        yield _gauge(names.LATE_BY, late)
        told = [((name, job.steps.kind or ""), job.steps) for name, job in tally.jobs.items()]
        jobs = told[: tally.groups.most]
        yield _gauge(names.STEP, [(key, steps.step_ns / 1e9) for key, steps in jobs])
        yield _gauge(names.STEP_TAIL, [(key, steps.p99_ns / 1e9) for key, steps in jobs])
        yield _gauge(names.STEP_COLLECTIVES, [(key, steps.collectives) for key, steps in jobs])
        yield _gauge(names.TOKENS, [(key, s.tokens_per_s) for key, s in jobs if s.tokens_per_s is not None])
        yield _gauge(
            names.WITHOUT, [((peer,), ns / 1e9) for peer, (_, ns) in tally.without.items() if peer in known]
        )

    def _findings(self) -> Iterator[Family]:
        shown: dict[tuple[str, ...], int] = {}
        with self.tally.lock:
            for state in self._board.findings(active_only=True):
                for key in _series(state):
                    other = (*key[:2], OTHER, "", "", key[-1])
                    key = self.tally.named.place(key) or other
                    shown[key] = shown.get(key, 0) + 1
            gone = dict.fromkeys(self.tally.named, 0)  # 0, so that an alert on them ends at once
        yield _gauge(names.FINDINGS_ACTIVE, {**gone, **shown}.items())

    def _health(self) -> Iterator[Family]:
        health = self._board.health()
        for metric, value in (
            (names.LAG, health.lag_s),
            (names.CPU, health.cpu_share),
            (names.CPU_LIMIT, health.cpu_limit),
            (names.MEMORY_LIMIT, health.memory_limit),
            (names.RING, health.ring_used_share),
            (names.DEGRADED, int(health.degraded is not None)),
            (names.FOLLOWED, 0.5**health.sample),
            (names.HELD_MESSAGES, health.held_messages),
            (names.HELD_FLOWS, health.held_flows),
            (names.HISTORY_BYTES, health.history_bytes),
            (names.HISTORY_WRITING, int(health.history_writing)),
            (names.GENERATION, health.generation),
        ):
            if value is not None:
                yield _gauge(metric, [((), value)])
        if health.history_oldest_ns is not None:
            yield _gauge(names.HISTORY_OLDEST, [((), health.history_oldest_ns / 1e9)])
        yield _gauge(names.FIDELITY, [((each,), int(each == health.fidelity)) for each in _FIDELITIES])
        yield _gauge(names.INTERFACE, [((name,), int(up)) for name, up in health.interfaces.items()])
        yield _counter(names.CLOCK_STEPS, [((), health.clock_steps)])
        errors = {**dict.fromkeys(_PARTS, 0), **health.errors}
        yield _counter(names.ERRORS, [((kind,), count) for kind, count in errors.items()])
        outcomes = [name for name in COUNTER_NAMES if name in health.losses]
        yield _counter(names.CAPTURE, [((name,), health.losses[name]) for name in outcomes])
        lost = [
            name
            for name in health.losses
            if name in (*LOSSES, *NIC_LOSSES) or name not in (*COUNTER_NAMES, *NIC_NAMES)
        ]
        yield _counter(names.LOST, [((name,), health.losses[name]) for name in lost])


def _series(state: FindingState) -> Iterator[tuple[str, ...]]:
    """Of a finding the labels of its series: one for each endpoint that it is about."""
    head, link = (state.condition, state.severity), state.finding.runbook
    ranks = state.ranks or (None,) * len(state.addresses)
    labels = state.labels or (None,) * len(state.addresses)
    ends = list(zip(state.addresses, ranks, labels, strict=True))
    for address, rank, label in about(state.condition, ends):
        yield (*head, address, "" if rank is None else str(rank), label or "", link)
    if not ends:
        yield (*head, "", "", "", link)


def _nic(readings: Iterable[Reading]) -> Iterator[Family]:
    families: dict[str, CounterMetricFamily] = {}
    for reading in readings:
        name = f"dpuflow_{reading.counter.metric}"
        if name not in families:
            families[name] = CounterMetricFamily(name, reading.counter.about, labels=LABELS[reading.counter])
        families[name].add_metric(reading.labels, reading.value)
    yield from families.values()


def _counter(metric: Metric, rows: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    family = CounterMetricFamily(metric.name, metric.about, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _gauge(metric: Metric, rows: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    family = GaugeMetricFamily(metric.name, metric.about, labels=metric.labels)
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, rows: Iterable[tuple[tuple[str, ...], Histogram]]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.about, labels=metric.labels)
    bounds = [*map(str, BUCKETS), "+Inf"]
    for labels, each in rows:
        counts = zip(bounds, accumulate(each.counts), strict=True)
        family.add_metric(labels, list(counts), each.total)
    return family
