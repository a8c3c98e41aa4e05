"""The agent's log: one line an event on standard error, as text for people or as JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, Final, TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
_PRIORITY: Final = {"debug": 7, "info": 6, "warning": 4, "error": 3}  # sd-daemon(3)


class Log:
    """Thread-safe. Under systemd (``JOURNAL_STREAM``) lines carry their priority."""

    def __init__(
        self, level: str = "info", form: str = "text", stream: TextIO | None = None, journal: bool = False
    ) -> None:
        self._least, self._form = LEVELS.index(level), form
        self._stream = stream or sys.stderr
        self._journal = journal
        self._lock = threading.Lock()

    def set(self, level: str, form: str) -> None:
        """Change what is told, and how."""
        self._least, self._form = LEVELS.index(level), form

    def debug(self, event: str, text: str, **fields: Any) -> None:
        """What only those who look for a fault want to see."""
        self._tell("debug", event, text, fields)

    def info(self, event: str, text: str, **fields: Any) -> None:
        """What happened."""
        self._tell("info", event, text, fields)

    def warning(self, event: str, text: str, **fields: Any) -> None:
        """What makes results worse, or may."""
        self._tell("warning", event, text, fields)

    def error(self, event: str, text: str, **fields: Any) -> None:
        """What did not work."""
        self._tell("error", event, text, fields)

    def _tell(self, level: str, event: str, text: str, fields: dict[str, Any]) -> None:
        if LEVELS.index(level) < self._least:
            return
        if self._form == "json":
            stamp = time.time_ns()
            line = json.dumps({"time_ns": stamp, "level": level, "event": event, "text": text, **fields})
        elif self._journal:
            line = f"<{_PRIORITY[level]}>{text}"
        else:
            line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {level:7} {text}"
        with self._lock:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                return  # nobody listens any more; the agent's work goes on


REPEAT_S: Final = 60.0
"""What a library says again and again is told this often: a client's bad requests fill no disk."""
KINDS: Final = 100
"""Of records whose repetitions are counted."""


class FromLogging(logging.Handler):
    """Hands what is told by Python's ``logging``, by libraries above all, to a ``Log``."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self._told: dict[tuple[str, str], tuple[float, int]] = {}  # of each kind when, how many since then

    def emit(self, record: logging.LogRecord) -> None:
        """One record, as one line; of an exception its type and text."""
        text, now_s = record.getMessage(), time.monotonic()
        kind = (record.name, str(record.msg))
        told_s, untold = self._told.get(kind, (-REPEAT_S, 0))
        if now_s - told_s < REPEAT_S:
            self._told[kind] = (told_s, untold + 1)
            return
        if len(self._told) >= KINDS:
            self._told.clear()
        self._told[kind] = (now_s, 0)
        if untold:
            text += f" (and {untold} times more in the last {now_s - told_s:.0f} s)"
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        tell = {"debug": self._log.debug, "info": self._log.info, "warning": self._log.warning}
        tell.get(level, self._log.error)(record.name, text)
