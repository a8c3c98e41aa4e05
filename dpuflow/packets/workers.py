"""Windows of one mapped file parsed ahead by threads, and taken in order by the reader.

A thread guesses where the first record of its window starts (``kernels/guess``); the reader takes
the result only if its own walk lands just there, and parses the window itself otherwise. Threads
number flows and endpoints for themselves; ``kernels/tables.adopt`` gives their rows the reader's
numbers, so that blocks and numbers are the same with any number of threads.
"""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass, field
from queue import LifoQueue, SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.capture.base import SLACK, WINDOW
from dpuflow.kernels import columns as c
from dpuflow.packets.blocks import Buffers, Interned, Parser
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.capture.base import Bytes, CaptureFile, Format, Numbers

AHEAD: Final = 5  # blocks a thread may be ahead of the reader


@dataclass
class Parsed:
    """One block of a thread, before its numbers are the reader's."""

    buffers: Buffers
    data: Bytes
    state: Numbers
    skipped: Numbers
    comments: Numbers
    first_ns: int
    tables: Interned
    adopted: Adopted


@dataclass
class WindowEnd:
    """Before a window's blocks: where it starts. After them: where the walk ended, and whether early."""

    stop: int
    complete: bool = True


@dataclass
class Adopted:
    """The reader's flow for each flow of one thread, -1 where it has none yet."""

    known: Numbers = field(default_factory=lambda: np.full(1024, -1, np.int64))

    def reaching(self, flows: int) -> Numbers:
        """The table, with room for ``flows`` rows."""
        if flows > len(self.known):
            more = np.full(2 * flows, -1, np.int64)
            more[: len(self.known)] = self.known
            self.known = more
        return self.known


class Workers:
    """Threads that parse the windows ``first``, ``first + 1``, ... of a file in turn."""

    def __init__(self, file: CaptureFile, threads: int, first: int, near_ns: int) -> None:
        assert file.bytes.size is not None
        self._first, self._count = first, threads
        self.windows = (file.bytes.size + WINDOW - 1) // WINDOW
        self._next = first
        self._stop = threading.Event()
        self._out: list[SimpleQueue[Parsed | WindowEnd | BaseException]] = []
        self._free: list[LifoQueue[Buffers | None]] = []
        self._threads = []
        self.version = file.format.version
        for number in range(threads):
            self._out.append(SimpleQueue())
            free: LifoQueue[Buffers | None] = LifoQueue()  # the last used one is still in the cache
            for _ in range(AHEAD):
                free.put(Buffers())
            self._free.append(free)
            form = copy(file.format)  # the reader goes on changing its own
            form.form, form.interfaces = form.form.copy(), form.interfaces.copy()
            thread = threading.Thread(
                target=self._run,
                args=(number, file, form, near_ns),
                name=f"dpuflow-parse-{number}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def has(self, window: int) -> bool:
        """Whether the window is still to come."""
        return self._next <= window < self.windows

    def start_of(self, window: int) -> int:
        """Where the window's first record is believed to be, -1 if that cannot be told."""
        answer = self._get(window)
        assert isinstance(answer, WindowEnd)
        return answer.stop

    def blocks(self, window: int) -> Iterator[Parsed | WindowEnd]:
        """The blocks of a window, then its end. A block is valid until the next is asked for."""
        while True:
            answer = self._get(window)
            if isinstance(answer, WindowEnd):
                self._next = window + 1
                yield answer
                return
            yield answer
            self._free[(window - self._first) % self._count].put(answer.buffers)

    def skip_to(self, window: int, *, started: bool = False) -> None:
        """Throw away what lies before ``window``; ``started``: and the rest of that one."""
        for number in range(self._next, min(window, self.windows)):
            self.start_of(number)
            self._drain(number)
        if started:
            self._drain(window)

    def _drain(self, window: int) -> None:
        for _ in self.blocks(window):
            pass

    def _get(self, window: int) -> Parsed | WindowEnd:
        answer = self._out[(window - self._first) % self._count].get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """Stop the threads and wait for them."""
        self._stop.set()
        for free in self._free:
            free.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, number: int, file: CaptureFile, form: Format, near_ns: int) -> None:
        """One thread: every ``threads``-th window."""
        out = self._out[number]
        try:
            parser, adopted = Parser(), Adopted()
            for window in range(self._first + number, self.windows, self._count):
                base = window * WINDOW
                data = file.bytes.window(base, base + WINDOW + SLACK)
                guess = _guess(data, form, near_ns)
                out.put(WindowEnd(base + guess if guess >= 0 else -1))
                if guess < 0:
                    out.put(WindowEnd(-1, complete=False))
                    continue
                parser.state[c.S_LIMIT] = min(WINDOW - guess, len(data) - guess)
                # Data as the reader would have it.
                end = self._parse(number, data[guess:], form, parser, adopted)
                if end is None:
                    return
                out.put(WindowEnd(base + guess + end.stop, end.complete))
        except BaseException as error:  # handed to the reader, who raises it
            out.put(error)

    def _parse(
        self, number: int, data: Bytes, form: Format, parser: Parser, adopted: Adopted
    ) -> WindowEnd | None:
        """Put out a window's blocks; returns where they end in ``data``, None if it is time to stop."""
        out, free, state = self._out[number], self._free[number], parser.state
        state[c.S_POS], state[c.S_END] = 0, len(data)
        state[c.S_PREVIOUS] = NEVER
        status = c.FULL
        while status == c.FULL:
            buffers = free.get()
            if buffers is None or self._stop.is_set():
                return None
            start = int(state[c.S_POS])
            parser.start_block()
            state[c.S_DROPS], state[c.S_COMMENTS] = -1, 0
            parser.skipped[:] = 0
            while (status := parser.run(form, data, buffers)) == c.GROW:
                parser.grow()
            if status not in (c.FULL, c.LIMIT) or state[c.S_ROW] == 0:
                free.put(buffers)
                if status != c.LIMIT:  # the reader does this block itself
                    state[c.S_POS] = start
                break
            first_ns = int(buffers.times[0])
            out.put(
                Parsed(
                    buffers, data, state.copy(), parser.skipped.copy(), parser.comments.copy(), first_ns,
                    copy(parser.known), adopted,
                )
            )  # fmt: skip
        return WindowEnd(int(state[c.S_POS]), complete=status == c.LIMIT)


def _guess(data: Bytes, form: Format, near_ns: int) -> int:
    """Offset of the first record in a window, -1 if it cannot be told."""
    from dpuflow.kernels.guess import find_record

    multiply = int(form.interfaces[0, c.I_MULTIPLY])
    per_second = 1_000_000_000 // multiply if multiply else 1 << 32
    limit = min(WINDOW, len(data))
    return int(find_record(data, 0, limit, form.form, per_second, near_ns // 1_000_000_000))
