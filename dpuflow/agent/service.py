"""The agent: capture, windows, board, and what hangs on it, from start to stop.

In: a configuration. Out: what is published on the board, one line of log for each finding. The thread of
``Source`` takes packets in; the thread that calls ``run`` analyses, publishes and keeps house.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from dpuflow.agent.board import Board, FindingState, Health, Window
from dpuflow.agent.history import History, Stand
from dpuflow.agent.notify import notify, reloading, watchdog_s
from dpuflow.agent.source import Source
from dpuflow.agent.stream import Stream
from dpuflow.agent.tracker import Tracker
from dpuflow.agent.traffic import pauses_of, traffic_between
from dpuflow.agent.windows import Windows
from dpuflow.errors import DpuflowError
from dpuflow.results import Analysis

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.agent.config import Config
    from dpuflow.agent.log import Log
    from dpuflow.agent.outlets import Outlets
    from dpuflow.agent.stream import Counts, Snapshot
    from dpuflow.agent.windows import Settled
    from dpuflow.rankmap import Place
    from dpuflow.tables import CaptureTables

IDLE_S: Final = 60.0
"""Findings outlast a job's silence for this long: its next step may still be coming."""
HEALTH_S: Final = 1.0


class Service:
    """One agent. ``start``, then ``step`` as often as ``config.windows.step`` says, then ``close``."""

    def __init__(self, config: Config, log: Log, board: Board | None = None) -> None:
        self.config, self.log = config, log
        self.board = board or Board()
        self.lock = threading.Lock()
        self.stream = Stream(socket.gethostname())
        self.source = Source(config.capture, self.stream, self.lock, log)
        self.tracker = Tracker(config.analysis.hold, IDLE_S)
        self.windows = Windows(config.windows, _ranks(config))
        self.generation = 1
        self._started_s = time.monotonic()
        self._number = 0
        self._counts: Counts | None = None
        self._losses: dict[str, int] = {}
        self._paused_ns = 0
        self._published_ns = time.time_ns()
        self._seen = -1  # packets when last analysed
        self._unsettled = 0
        self._cpu = (time.monotonic(), time.process_time())
        self._cpu_share = 0.0
        self.history: History | None = None
        self.outlets: Outlets | None = None

    def start(self) -> None:
        """Attach and begin. Raises OptionError, MissingError, DpuflowError."""
        from dpuflow.agent import outlets

        # First: an address in use leaves nothing attached.
        self.outlets = outlets.start(self.board, self.config)
        try:
            self.source.start()
        except BaseException:
            self.outlets.close()
            raise
        self._start_history()

    def _start_history(self) -> None:
        if self.config.history.directory is not None:
            self.history = History(self.config.history, self.stream.info.vantage, self.log)

    def step(self) -> Window:
        """Analyse what is held, publish what has been settled, let go of what is needed no more."""
        with self.lock:
            moved_ns = self.source.take_clock_step()
            until_ns = self.source.read_until_ns
            packets = self.stream.info.packets
            taken = self.stream.snapshot(until_ns)
        if moved_ns:
            self.windows.shift(moved_ns)
            self.tracker.shift(moved_ns)
            self._published_ns += moved_ns
            self._paused_ns += moved_ns
            if self.history is not None:
                self.history.shift(moved_ns)
        tables = taken.tables()
        counts = taken.counts()
        settled: Settled | None = None
        if packets != self._seen or self._unsettled:
            settled = self.windows.step(tables, counts, until_ns)
            self._unsettled = settled.held
            with self.lock:
                self.stream.forget(settled.before_ns)
                self.stream.forget_flows(tables, until_ns - round(self.config.windows.longest * 1e9))
        self._seen = packets
        window = self._window(taken, tables, counts, settled)
        changed = self.tracker.step(settled.analysis if settled else None, until_ns)
        self.board.publish(window, changed)
        for state in changed:
            self._tell(state)
            if self.history is not None:
                self.history.note(state)
        if self.history is not None:
            self.history.take(tables, counts, window.end_ns)
        self._counts, self._published_ns = counts, window.end_ns
        return window

    def _window(
        self, taken: Snapshot, tables: CaptureTables, counts: Counts, settled: Settled | None
    ) -> Window:
        """What is published of this step."""
        end_ns = max(taken.time_ns - round(self.config.windows.settle * 1e9), self._published_ns)
        losses = self.source.state.losses
        new_losses = {name: count - self._losses.get(name, 0) for name, count in losses.items()}
        self._losses = losses
        new = taken.pause_ns > self._paused_ns
        pauses = pauses_of(taken.pauses[new])
        self._paused_ns = max(self._paused_ns, int(taken.pause_ns.max())) if len(taken.pause_ns) else 0
        self._number += 1
        return Window(
            number=self._number,
            start_ns=self._published_ns,
            end_ns=end_ns,
            analysis=settled.analysis if settled else Analysis(),
            late=settled.late if settled else frozenset(),
            traffic=traffic_between(self._counts, counts, tables),
            pauses=pauses,
            losses={name: count for name, count in new_losses.items() if count},
            fidelity="sampled" if self.source.sample else self.source.mode,  # type: ignore[arg-type]
        )

    def _tell(self, state: FindingState) -> None:
        """One line of log for a finding that changed."""
        finding = state.finding
        fields = {
            "id": state.id, "condition": state.condition, "addresses": list(state.addresses),
            "severity": state.severity, "since_ns": state.since_ns, "active": state.active,
        }  # fmt: skip
        if not state.active:
            self.log.info("finding_closed", f"over: {state.condition} {state.id}", **fields)
            return
        tell = self.log.info if state.severity == "info" else self.log.warning
        tell("finding", f"{state.severity}: {state.condition} {state.id}: {finding.summary}", **fields)

    def health(self) -> Health:
        """How the agent fares now."""
        from dpuflow.agent.usage import resident_bytes

        now_s, used_s = time.monotonic(), time.process_time()
        before_s, before_used_s = self._cpu
        if now_s - before_s >= HEALTH_S / 2:
            self._cpu_share = (used_s - before_used_s) / (now_s - before_s)
            self._cpu = (now_s, used_s)
        state, limits = self.source.state, self.config.limits
        status = state.status
        degraded = f"nothing is captured: {state.error}" if state.error else None
        stand = self.history.stand if self.history is not None else Stand(writing=False)
        return Health(
            time_ns=time.time_ns(),
            uptime_s=now_s - self._started_s,
            cpu_share=self._cpu_share,
            cpu_limit=limits.cpu,
            rss_bytes=resident_bytes(),
            memory_limit=limits.memory,
            lag_s=max(time.time_ns() - self._published_ns, 0) / 1e9,
            ring_used_share=self.source.ring_share(),
            packet_rate=status.packet_rate if status else 0.0,
            message_rate=status.message_rate if status else 0.0,
            bit_rate=status.bit_rate if status else 0.0,
            held_messages=self.stream.held(),
            held_flows=self.stream.held_flows(),
            losses=state.losses,
            fidelity="sampled" if self.source.sample else self.source.mode,  # type: ignore[arg-type]
            sample=self.source.sample,
            degraded=degraded,
            interfaces=state.interfaces,
            history_bytes=stand.bytes,
            history_oldest_ns=stand.oldest_ns,
            history_writing=stand.writing,
            clock_steps=state.clock_steps,
            generation=self.generation,
            errors={"history": stand.lost} if stand.lost else {},
        )

    def reload(self, config: Config) -> None:
        """Go on by another configuration. Raises DpuflowError, having changed nothing."""
        ranks = _ranks(config)
        if self.outlets is not None:
            self.outlets.reload(config)
        before, self.config = self.config, config
        self.generation += 1
        self.log.set(config.log.level, config.log.format)
        self.tracker.hold_s = config.analysis.hold
        self.windows.settings, self.windows.span_s = config.windows, config.windows.span
        self.windows.ranks = ranks
        if config.history != before.history:
            if self.history is not None:
                self.history.close()
                self.history = None
            self._start_history()
        if config.capture != before.capture:
            self.source.reconfigure(config.capture)

    def close(self) -> None:
        """Detach, publish and keep what is left, and end."""
        self.source.close()
        if self.history is not None:
            with self.lock:
                taken = self.stream.snapshot(max(self.source.read_until_ns, time.time_ns()))
            self.history.take(taken.tables(), taken.counts(), taken.time_ns, last=True)
            self.history.close()
        if self.outlets is not None:
            self.outlets.close()
        self.board.close()


def _ranks(config: Config) -> dict[str, Place] | None:
    if config.analysis.ranks is None:
        return None
    from dpuflow.rankmap import read_rank_map

    return read_rank_map(config.analysis.ranks)


def run(
    config: Config,
    log: Log,
    stop: threading.Event,
    reload: Callable[[], Config | None] = lambda: None,
    board: Board | None = None,
) -> None:
    """Run until ``stop`` is set. ``reload`` gives a new configuration once one is asked for, else None.

    Raises OptionError, MissingError, DpuflowError where it cannot begin.
    """
    service = Service(config, log, board)
    service.start()
    notify("READY=1", "STATUS=capturing")
    watchdog = watchdog_s()
    told_s = 0.0
    try:
        next_s = time.monotonic() + service.config.windows.step
        while not stop.wait(max(next_s - time.monotonic(), 0.0)):
            fresh = _reloaded(reload, log)
            if fresh is not None:
                reloading()
                try:
                    service.reload(fresh)
                    log.info("reloaded", "the configuration was read again")
                except DpuflowError as error:
                    log.error("reload_failed", f"{error}; the configuration stays as it was")
                notify("READY=1")
            try:
                service.step()
            except DpuflowError as error:
                service.board.count_error("analysis")
                log.error("analysis_failed", f"a window was lost: {error}")
            now_s = time.monotonic()
            if now_s - told_s >= HEALTH_S:
                told_s = now_s
                service.board.report(service.health())
            if watchdog is not None:
                notify("WATCHDOG=1")
            next_s = max(next_s + service.config.windows.step, now_s)
    finally:
        notify("STOPPING=1")
        service.close()


def _reloaded(reload: Callable[[], Config | None], log: Log) -> Config | None:
    """The new configuration, if one was asked for and is good; else the log says what is wrong with it."""
    try:
        return reload()
    except (DpuflowError, OSError) as error:
        log.error("reload_failed", f"{error}; the configuration stays as it was")
        notify("READY=1")
        return None
