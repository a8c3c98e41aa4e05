"""The agent: capture, windows, board, and what hangs on it, from start to stop.

In: a configuration. Out: what is published on the board, one line of log for each finding. The thread of
``Source`` takes packets in; the thread that calls ``run`` analyses, publishes and keeps house.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.agent.board import Board, Health, Window
from dpuflow.agent.budget import Budget
from dpuflow.agent.config import base_bytes
from dpuflow.agent.folder import claim, release
from dpuflow.agent.history import History, Missed, Stand
from dpuflow.agent.limits import Governor
from dpuflow.agent.meter import Meter
from dpuflow.agent.notify import notify, reloading, watchdog_s
from dpuflow.agent.pace import Pace
from dpuflow.agent.source import Source
from dpuflow.agent.stream import Stream
from dpuflow.agent.told import in_words, tell
from dpuflow.agent.tracker import Tracker
from dpuflow.agent.traffic import pauses_of, traffic_between
from dpuflow.agent.usage import TRIM_S, Memory, give_back, memory, resident_bytes, restrain_allocator
from dpuflow.agent.windows import Windows
from dpuflow.errors import DpuflowError
from dpuflow.results import Analysis
from dpuflow.schedules.remembered import STORE
from dpuflow.schema.ring import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.agent.config import Config
    from dpuflow.agent.limits import Orders
    from dpuflow.agent.log import Log
    from dpuflow.agent.outlets import Outlets
    from dpuflow.agent.outside import Outside
    from dpuflow.agent.stream import Counts, Snapshot
    from dpuflow.agent.windows import Settled
    from dpuflow.identity.rankmap import Place
    from dpuflow.schema.tables import CaptureTables

IDLE_S: Final = 60.0
"""Findings outlast a job's silence for this long: its next step may still be coming."""
HEALTH_S: Final = 1.0
TURN_S: Final = 600.0
"""What no analysis used for so long, and up to twice as long, is kept no more (``schedules.remembered``)."""
SHORT: Final = 0.8
SHORT_TRIM_S: Final = 5.0
"""Free memory goes back to the kernel so often where more than SHORT of the ceiling is used."""


class Service:
    """One agent. ``start``, then ``step`` as often as ``config.windows.step`` says, then ``close``."""

    def __init__(self, config: Config, log: Log, board: Board | None = None) -> None:
        self.config, self.log = config, log
        self.board = board or Board()
        self.lock = threading.Lock()
        self.stream = Stream(config.node or socket.gethostname())
        self.budget = Budget(config.limits.cpu)
        self.pace = Pace(self.budget, self.stream.held, self._shed, 0, config.limits.memory)
        self.source = Source(config.capture, self.stream, self.lock, log, self.pace)
        self.meter = Meter(self.budget, self.pace, self.source, self.stream)
        self._warm_up()
        self.governor = _governor(config)
        self.tracker = Tracker(
            config.analysis.confirm, config.analysis.hold, IDLE_S, config.analysis.runbooks
        )
        from dpuflow.identity.rankmap import read_hosts

        self.windows = Windows(config.windows, _ranks(config), read_hosts())
        self.generation = 1
        self._started_s = time.monotonic()
        self._number = self._collectives = 0
        self._counts: Counts | None = None
        self._losses: dict[str, int] = {}
        self._paused_ns = 0
        self._published_ns = time.time_ns()
        self._seen = -1  # packets when last analysed
        self._unsettled = 0
        self._sampled: deque[tuple[int, int]] = deque()  # until when, packets left out by then
        self._let_go = 0  # messages that there was no room for
        self._cpu_share = 0.0
        self._told_s = self._trimmed_s = self._turned_s = self._started_s
        self._reason: str | None = None
        self._obey(self.governor.orders)
        self.history: History | None = None
        self.outlets: Outlets | Outside | None = None

    def _warm_up(self) -> None:
        """Analyse nothing: the first analysis loads what all use, and says little of what a message costs."""
        from dpuflow.analysis import analyze_tables

        analyze_tables([self.stream.snapshot(0).tables()])

    def start(self) -> None:
        """Attach and begin. Raises OptionError, MissingError, DpuflowError."""
        restrain_allocator()
        # First: an address in use, or another agent's history, leaves nothing attached.
        self._start_history()
        try:
            self._start_outlets()
            self.source.start()
        except BaseException:
            if self.outlets is not None:
                self.outlets.close()
            if self.history is not None:
                self.history.close()
            raise
        self.budget.forgive()

    def _start_outlets(self) -> None:
        from dpuflow.agent import outlets
        from dpuflow.agent.outside import Outside as Process

        try:
            self.outlets = outside = Process(self.board, self.config, self.log)
            self.budget.beside = outside.cpu_s
            self.board.keep(1)  # whoever asks for older ones asks that process
        except OSError as error:
            self.log.warning("api_shared", f"no process of its own for the API: {error.strerror or error}")
            self.outlets = outlets.start(self.board, self.config)

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
        tables.info.skipped |= self._left_out(until_ns)
        counts = taken.counts()
        settled: Settled | None = None
        if packets != self._seen or self._unsettled:
            settled = self.windows.step(tables, counts, until_ns)
            self._unsettled = settled.held
            with self.lock:
                self.stream.forget(settled.before_ns)
                self.stream.forget_flows(tables, until_ns, round(self.config.windows.longest * 1e9))
        self._seen = packets
        window = self._window(taken, tables, counts, settled)
        changed = self.tracker.step(settled.analysis if settled else None, until_ns)
        self.board.publish(window, changed)
        for state in changed:
            tell(self.log, state)
            if self.history is not None:
                self.history.note(state)
        if self.history is not None:
            most = self.windows.most
            soon = self.windows.span_s < self.config.windows.span or (
                most is not None and len(tables.messages) > most
            )
            self.history.take(tables, counts, window.end_ns, self._missed(), soon)
        self._counts, self._published_ns = counts, window.end_ns
        return window

    def _missed(self) -> Missed:
        """What was not captured since the start."""
        losses = self.source.state.losses
        return Missed(losses.get("sampled_out", 0), sum(losses.get(name, 0) for name in LOSSES))

    def _left_out(self, until_ns: int) -> dict[str, int]:
        """What sampling left out of the span that is analysed."""
        span_ns = round(self.windows.span_s * 1e9)
        self._sampled.append((until_ns, self._missed().sampled_out))
        while len(self._sampled) > 1 and self._sampled[1][0] <= until_ns - span_ns:
            self._sampled.popleft()
        count = self._sampled[-1][1] - self._sampled[0][1]
        return {"sampled_out": count} if count else {}

    def safe_step(self) -> None:
        """A step whose fault costs what is held, not the agent; its CPU is accounted for."""
        used_s, held = time.thread_time(), self.stream.held()
        with self.budget.analysing():
            self._make_room(held)
            try:
                self.step()
            except Exception as error:  # traffic is foreign: nobody can promise what it does to an analysis
                self.board.count_error("analysis")
                at = traceback.extract_tb(error.__traceback__)[-1]
                told = f"{str(error) or type(error).__name__} ({os.path.basename(at.filename)}:{at.lineno})"
                self.log.error("analysis_failed", f"a window was lost: {told}")
                self.log.debug("traceback", traceback.format_exc())
                with self.lock:
                    self.stream.forget(np.full(self.stream.held_flows(), self.source.read_until_ns))
        self.meter.analysed(time.thread_time() - used_s, held)

    def _make_room(self, held: int) -> None:
        """Before an analysis: no more is held than there is memory to analyse."""
        if held > self.pace.room:
            self._shed(self.pace.room)

    def _shed(self, keep: int | None = None) -> None:
        """Let go of the oldest messages but for ``keep``, by default half; give their memory back."""
        with self.lock:
            self._let_go += self.stream.shed(self.stream.held() // 2 if keep is None else keep)
        give_back()

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
        self._collectives += len(settled.analysis.collectives) if settled else 0
        return Window(
            number=self._number,
            start_ns=self._published_ns,
            end_ns=end_ns,
            analysis=settled.analysis if settled else Analysis(),
            late=settled.late if settled else frozenset(),
            counted=settled.counted if settled else None,
            traffic=traffic_between(self._counts, counts, tables),
            pauses=pauses,
            losses={name: count for name, count in new_losses.items() if count},
            fidelity="sampled" if self.source.sample else self.source.mode,  # type: ignore[arg-type]
        )

    def look(self) -> None:
        """Measure what is used, and take in more or less detail by it; report the health."""
        use, seconds = self.meter.look()
        self._cpu_share, now_s = use.cpu, time.monotonic()
        self._obey(self.governor.look(use, seconds))
        health, limits = self.health(), self.config.limits
        self.board.report(health)
        if now_s - self._turned_s >= TURN_S:
            self._turned_s = now_s
            STORE.turn()
        if now_s - self._trimmed_s >= (SHORT_TRIM_S if use.rss > SHORT * limits.memory else TRIM_S):
            self._trimmed_s = now_s
            give_back()
        every_s = self.config.log.status
        if every_s and now_s - self._told_s >= every_s:
            self._told_s = now_s
            self.log.info("status", in_words(health), **asdict(health))

    def _obey(self, orders: Orders) -> None:
        """Take in as much detail as ordered, and tell of a change."""
        if orders.reason != self._reason:
            if orders.reason is None:
                self.log.info("restored", "back to full detail")
            else:
                self.log.warning("degraded", f"reduced detail: {orders.reason}")
            self._reason = orders.reason
        self.source.degrade(orders.mode, orders.sample)
        self.windows.span_s, self.windows.most = orders.span_s, orders.most
        self.pace.room, self.pace.memory = orders.room, self.config.limits.memory

    def health(self) -> Health:
        """How the agent fares now."""
        state, limits = self.source.state, self.config.limits
        status = state.status
        degraded = f"not capturing: {state.error}" if state.error else self._reason
        stand = self.history.stand if self.history is not None else Stand(writing=False)
        return Health(
            time_ns=time.time_ns(),
            uptime_s=time.monotonic() - self._started_s,
            cpu_share=self._cpu_share,
            cpu_limit=limits.cpu,
            rss_bytes=resident_bytes(),
            memory_limit=limits.memory,
            lag_s=max(time.time_ns() - self._published_ns, 0) / 1e9,
            ring_used_share=self.source.ring_share(),
            packet_rate=status.packet_rate if status else 0.0,
            message_rate=status.message_rate if status else 0.0,
            bit_rate=status.bit_rate if status else 0.0,
            collectives=self._collectives,
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
            errors={name: n for name, n in (("history", stand.lost), ("memory", self._let_go)) if n},
        )

    def reload(self, config: Config) -> None:
        """Go on by another configuration. Raises DpuflowError, having changed nothing."""
        ranks = _ranks(config)
        folder = config.history.directory
        if folder not in (None, self.config.history.directory):
            release(claim(folder, self.stream.info.vantage))  # before anything has changed
        if self.outlets is not None:
            self.outlets.reload(config)
        before, self.config = self.config, config
        self.generation += 1
        self.log.set(config.log.level, config.log.format)
        self.tracker.confirm_s, self.tracker.hold_s = config.analysis.confirm, config.analysis.hold
        self.tracker.runbooks = config.analysis.runbooks
        self.windows.settings = config.windows
        self.budget.share = config.limits.cpu
        self.governor = _governor(config)
        self._obey(self.governor.orders)
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
            self.history.take(taken.tables(), taken.counts(), taken.time_ns, self._missed(), last=True)
            self.history.close()
        if self.outlets is not None:
            self.outlets.close()
        self.board.close()


def _governor(config: Config) -> Governor:
    capture = config.capture
    folds = capture.backend == "ebpf"
    base = Memory(base_bytes(capture.buffer), memory().own)
    return Governor(config.limits, capture.mode, capture.sample, config.windows.span, folds, base)


def _ranks(config: Config) -> dict[str, Place] | None:
    if config.analysis.ranks is None:
        return None
    from dpuflow.identity.rankmap import read_rank_map

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
    longest_s = min(HEALTH_S, watchdog or HEALTH_S)
    next_s = time.monotonic() + service.config.windows.step
    look_s = time.monotonic() + HEALTH_S
    try:
        while not stop.wait(_pause(service, next_s, min(look_s, time.monotonic() + longest_s))):
            fresh = _reloaded(reload, log)
            if fresh is not None:
                reloading()
                try:
                    service.reload(fresh)
                    log.info("reloaded", "configuration reloaded")
                except DpuflowError as error:
                    log.error("reload_failed", f"{error}; keeping the previous configuration")
                notify("READY=1")
            now_s = time.monotonic()
            if now_s >= next_s and not service.budget.analysis_wait():
                service.safe_step()
                next_s = max(next_s + service.config.windows.step, time.monotonic())
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + HEALTH_S
                service.look()
            if watchdog is not None:
                notify("WATCHDOG=1")
    finally:
        notify("STOPPING=1")
        service.close()


def _pause(service: Service, next_s: float, latest_s: float) -> float:
    """For how long there is nothing to do: until the next step that may be paid, or ``latest_s``."""
    now_s = time.monotonic()
    return max(min(max(next_s - now_s, service.budget.analysis_wait()), latest_s - now_s), 0.0)


def _reloaded(reload: Callable[[], Config | None], log: Log) -> Config | None:
    """The new configuration, if one was asked for and is good; else the log says what is wrong with it."""
    try:
        return reload()
    except (DpuflowError, OSError) as error:
        log.error("reload_failed", f"{error}; keeping the previous configuration")
        notify("READY=1")
        return None
