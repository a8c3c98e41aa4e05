"""Run one live capture from start to end: packets to the output, signals to a clean stop."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dpuflow.errors import OptionError
from dpuflow.live.capture import LiveCapture, Summary
from dpuflow.live.output import Output

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from dpuflow.live.capture import Status
    from dpuflow.live.options import LiveOptions
    from dpuflow.live.output import Rotation


class _Signals:
    """SIGINT and SIGTERM end the capture instead of the process; the second one does as it always did."""

    def __init__(self) -> None:
        self.came = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Until(NamedTuple):
    """What ends a capture, whichever comes first; a signal does, too."""

    duration_s: float | None
    packets: int | None
    stopped: Callable[[], bool]


class Watcher(Protocol):
    """Who is told how a capture goes on."""

    def started(self, capture: LiveCapture) -> None:
        """Packets are being taken."""

    def show(self, status: Status) -> None:
        """Every second."""


def record(
    options: LiveOptions,
    path: str | None,
    *,
    backend: str = "ebpf",
    rotation: Rotation | None = None,
    until: Until,
    watcher: Watcher,
) -> Summary:
    """Capture to ``path`` ("-": standard output; None: nowhere) until told to end.

    In messages mode ``path`` is a column file, made at the end of what was written to ``journal_of(path)``
    meanwhile. Raises OptionError, MissingError, DpuflowError, OSError.
    """
    columns = options.mode == "messages" and path is not None
    if columns and (path == "-" or rotation):
        raise OptionError("messages go to one column file: name it with -w, without rotation")
    capture = LiveCapture(options, backend)
    signals = _Signals()
    output: Output | None = None
    try:
        if path is not None:
            written = journal_of(path) if columns else path
            output = Output(written, capture.head, capture.statistics, rotation)

        def each(status: Status) -> None:
            if output is not None:
                output.note()
            watcher.show(status)

        def ended() -> bool:
            return signals.came or until.stopped()

        watcher.started(capture)
        for piece in capture.pieces(until.duration_s, until.packets, ended, each):
            if output is not None:
                output.write(piece)
    finally:
        signals.restore()
        try:
            if output is not None:
                output.close()
        finally:
            capture.close()
    if path is not None and columns:
        _save_columns(path)
    return capture.summary()


def journal_of(path: str) -> str:
    """Where messages mode keeps what the column file ``path`` will be made of: headers, runs unfolded.

    Whatever happens before the column file is whole, this one stays, and is analysed like any capture.
    """
    return f"{path}.part.pcapng.zst"


def _save_columns(path: str) -> None:
    """The column file from its journal, which is removed once it is written."""
    import os
    from pathlib import PurePath

    from dpuflow.ingest import ingest
    from dpuflow.store.columns import save_tables

    journal = journal_of(path)
    tables = ingest([journal], vantage=PurePath(path).stem)
    tables.info.files = ["live"]
    save_tables(tables, path)
    os.unlink(journal)
