"""The local history: messages as column files by time, findings as lines of JSON; bounded by size and age.

In: the tables of what is held, step by step. Out: files in one folder that ``dpuflow analyze FOLDER`` reads.
A thread of its own writes, so that a slow disk holds nothing up. A file has its final name only once it is
whole and on the disk; a process that is killed loses what was not yet settled, and the segment in progress.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from dpuflow.agent.folder import DAMAGED, FINDINGS, FINDINGS_BEFORE, UNFINISHED, claim, release
from dpuflow.agent.stream import COUNTERS
from dpuflow.agent.windows import grown
from dpuflow.errors import DpuflowError
from dpuflow.schema.rows import NEVER, MessageFlag
from dpuflow.store.columns import load_tables, machine_of, save_tables
from dpuflow.store.segments import (
    Segment,
    join_segments,
    named_segments,
    only_flows,
    place_name,
    segment_name,
    widest,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.agent.board import FindingState
    from dpuflow.agent.config import History as Settings
    from dpuflow.agent.log import Log
    from dpuflow.agent.stream import Counts
    from dpuflow.schema.tables import CaptureTables

QUEUE: Final = 8  # segments that wait for the disk; beyond it they are lost, and counted
MERGED: Final = 24  # so many small files become one
MERGED_BYTES: Final = 8 << 20  # unless they have grown to this, all together
FINDINGS_BYTES: Final = 4 << 20  # then another one is begun; the one before is kept


@dataclass(frozen=True)
class Stand:
    """How the history stands."""

    bytes: int = 0
    oldest_ns: int | None = None
    writing: bool = True
    lost: int = 0  # segments that could not be written


class Missed(NamedTuple):
    """Packets that were not captured: left out by sampling, and lost."""

    sampled_out: int = 0
    lost: int = 0


NOTHING: Final = Missed()


class History:
    """Writes segments; ``settings.directory`` must not be None. DpuflowError where another one does."""

    def __init__(self, settings: Settings, vantage: str, log: Log) -> None:
        """Make the folder, tidy it up, and start. What fails now is tried again later."""
        assert settings.directory is not None
        self.settings, self.vantage, self.log = settings, vantage, log
        self.folder = settings.directory
        self._lock = claim(self.folder, vantage)
        self.stand = Stand()
        self._machine = machine_id()
        self._from_ns = NEVER  # messages that ended later have not been handed over
        self._before: Counts | None = None
        self._missed = Missed()
        self._waiting: queue.Queue[CaptureTables | dict[str, Any] | None] = queue.Queue(QUEUE)
        self._thread = threading.Thread(target=self._run, name="dpuflow-history", daemon=True)
        self._thread.start()

    def take(
        self, tables: CaptureTables, counts: Counts, until_ns: int, missed: Missed = NOTHING,
        soon: bool = False, last: bool = False,
    ) -> None:  # fmt: skip
        """Hand over what ended until ``until_ns`` once that fills a segment, or as the ``last`` one.

        ``missed``: what was not captured since the agent's start. ``soon``: less than a segment is held.
        """
        if self._from_ns == NEVER:
            first_ns = tables.info.first_ns
            self._from_ns = until_ns if first_ns is None else min(first_ns - 1, until_ns)
        if until_ns - self._from_ns < self.settings.segment * 1e9 and not last and not soon:
            return
        part = cut(tables, self._before, counts, self._from_ns, until_ns, last)
        part.info.machine = self._machine
        self._from_ns = until_ns
        if len(part.messages) or (last and part.info.packets):
            self._before = counts  # else what was counted goes into the next one
            left_out = missed.sampled_out - self._missed.sampled_out
            part.info.skipped = {"sampled_out": left_out} if left_out else {}
            part.info.lost_packets = missed.lost - self._missed.lost
            self._missed = missed
            self._put(part)

    def note(self, state: FindingState) -> None:
        """Keep a finding that opened, changed or closed."""
        self._put({"time_ns": time.time_ns()} | asdict(state))

    def shift(self, step_ns: int) -> None:
        """The clock was set by so much."""
        if self._from_ns != NEVER:
            self._from_ns += step_ns

    def close(self) -> None:
        """Write what waits, and end."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=10)
        self._thread.join(30)
        release(self._lock)
        self._lock = None

    def _put(self, item: CaptureTables | dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.stand = replace(self.stand, lost=self.stand.lost + 1)

    def _run(self) -> None:
        """Write until told to end; what fails is tried again until there is space."""
        ready = False
        while True:
            item = self._waiting.get()
            if item is None:
                return
            while True:
                try:
                    if not ready:
                        self._prepare()
                        ready = True
                    self._write(item)
                    self._succeeded()
                    break
                except (DpuflowError, OSError) as error:
                    ready = False
                    self._failed(error)
                    if self._waiting.full() or self._ending():
                        self.stand = replace(self.stand, lost=self.stand.lost + 1)
                        break  # newer ones matter more
                    time.sleep(1.0)

    def _ending(self) -> bool:
        return None in self._waiting.queue

    def _failed(self, error: Exception) -> None:
        if self.stand.writing:
            self.log.error("history_stopped", f"history not written: {error}")
        self.stand = replace(self.stand, writing=False)

    def _succeeded(self) -> None:
        if not self.stand.writing:
            self.log.info("history_resumed", f"writing history again, to {self.folder}")
        self.stand = replace(self.stand, writing=True)

    def _prepare(self) -> None:
        """The folder, without what a killed process has left."""
        if self._lock is None:  # the folder could not be used before
            self._lock = claim(self.folder, self.vantage)
        for half in named_segments(self.folder, UNFINISHED):
            if half.vantage == place_name(self.vantage):
                os.unlink(half.path)
        self._tidy()

    def _write(self, item: CaptureTables | dict[str, Any]) -> None:
        if isinstance(item, dict):
            self._append(item)
            return
        assert item.info.first_ns is not None
        assert item.info.last_ns is not None
        name = segment_name(self.vantage, item.info.first_ns, item.info.last_ns)
        save_tables(item, os.path.join(self.folder, name), durable=True)
        self._tidy()

    def _append(self, line: dict[str, Any]) -> None:
        path = os.path.join(self.folder, FINDINGS)
        with suppress(FileNotFoundError):
            if os.path.getsize(path) > FINDINGS_BYTES:
                os.replace(path, os.path.join(self.folder, FINDINGS_BEFORE))
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _tidy(self) -> None:
        """Merge small segments, and let the oldest go that are beyond size or age."""
        # Of this vantage point alone: what else lies in the folder is another's.
        own = place_name(self.vantage)
        found = [
            s
            for s in named_segments(self.folder)
            if s.vantage == own and machine_of(s.path) in ("", self._machine)
        ]
        mine = widest(found)
        for part in set(found) - set(mine):  # of what has been merged already
            os.unlink(part.path)
        sizes = {s.path: os.path.getsize(s.path) for s in mine}
        mine = self._merge(mine, sizes)
        mine.sort(key=lambda s: s.end_ns)
        total = sum(sizes[s.path] for s in mine)
        too_old_ns = time.time_ns() - round(self.settings.keep_age * 1e9)
        while mine and (total > self.settings.keep_size or mine[0].end_ns < too_old_ns):
            total -= sizes[mine[0].path]
            os.unlink(mine.pop(0).path)
        oldest_ns = min((s.start_ns for s in mine), default=None)
        self.stand = replace(self.stand, bytes=total, oldest_ns=oldest_ns)

    def _merge(self, segments: list[Segment], sizes: dict[str, int]) -> list[Segment]:
        """The last small segments as one, once there are enough of them."""
        limit_ns = 2 * round(self.settings.segment * 1e9)
        small = [s for s in segments if s.end_ns - s.start_ns < limit_ns and sizes[s.path] < MERGED_BYTES]
        if len(small) < 2 * MERGED:
            return segments
        first, total = small[:MERGED], 0
        for number, segment in enumerate(first):
            total += sizes[segment.path]
            if total > MERGED_BYTES and number > 1:
                first = first[:number]
                break
        loaded = []
        for segment in first:
            try:
                loaded.append(load_tables(segment.path))
            except DpuflowError as error:
                os.replace(segment.path, segment.path + DAMAGED)
                self.log.warning("segment_damaged", f"put aside as *{DAMAGED}: {error}")
                return [s for s in segments if s.path != segment.path]
        joined = join_segments(loaded)
        start_ns, end_ns = first[0].start_ns, max(s.end_ns for s in first)
        # Wider than each of its parts by name, so that they count no more even if they cannot be removed.
        name = segment_name(self.vantage, start_ns, end_ns)
        path = os.path.join(self.folder, name)
        save_tables(joined, path, durable=True)
        for segment in first:
            if segment.path != path:
                os.unlink(segment.path)
        sizes[path] = os.path.getsize(path)
        gone = {s.path for s in first}
        rest = [s for s in segments if s.path not in gone]
        return [*rest, Segment(path, first[0].vantage, start_ns, end_ns)]


def machine_id() -> str:
    """What this machine is called for good, derived from machine-id(5), which itself is to stay here."""
    try:
        with open("/etc/machine-id", "rb") as file:
            return hashlib.blake2s(b"dpuflow history", key=file.read(32).strip(), digest_size=8).hexdigest()
    except OSError:
        return ""


def cut(
    tables: CaptureTables, before: Counts | None, counts: Counts, from_ns: int, until_ns: int, last: bool
) -> CaptureTables:
    """The part of ``tables`` that ended after ``from_ns`` and until ``until_ns``, as a capture of its own.

    Counters of flows are what they have grown by since ``before``. Messages on their way are left for later,
    unless it is the ``last`` part.
    """
    ended = tables.messages["last_ns"]
    within = (ended > from_ns) & (ended <= until_ns)
    if not last:
        within &= tables.messages["flags"] & np.uint8(MessageFlag.ENDS_AFTER) == 0
    messages = tables.messages[within]
    flows = tables.flows.copy()
    values = counts.values if before is None else grown(before, counts)
    for name, column in zip(COUNTERS, values.T, strict=True):
        flows[name] = column.astype(flows[name].dtype)
    used: NDArray[np.bool_] = np.asarray(values.any(axis=1))
    used[messages["flow"]] = True
    part = only_flows(replace(tables, flows=flows, messages=messages, pauses=tables.pauses[:0]), used)
    flows = part.flows
    flows["first_ns"] = np.maximum(flows["first_ns"], from_ns + 1)
    first_ns = int(messages["first_ns"].min()) if len(messages) else until_ns
    info = replace(
        tables.info,
        files=["live"],
        packets=int(flows["packets"].sum()),
        bytes=int(flows["bytes"].sum()),
        first_ns=min(max(first_ns, from_ns + 1), until_ns),
        last_ns=until_ns,
        skipped={},
    )
    return replace(part, info=info)
