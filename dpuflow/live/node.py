"""One node's side of a capture on several (``live/nodes``): clock, window, file; ends with its input."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dpuflow.live.nodes import ATTACH, HELLO, NOW
from dpuflow.live.sync import clock_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.live.capture import LiveCapture, Status
    from dpuflow.live.record import Watcher


def serve(
    take: Callable[[str, Watcher, Callable[[], bool]], None],
    ending: str,
    source: BinaryIO,
    target: BinaryIO,
) -> None:
    """Answer on ``target`` what ``source`` asks; ``take`` captures.

    The file is sent whatever ``take`` raises, and then that is raised. ``source`` has no buffer.
    """
    _say(target, clock=clock_state())
    for line in source:
        if line.strip() == NOW:
            _say(target, now_ns=time.time_ns())
        elif line.strip() == ATTACH:
            break
    else:
        return  # nobody is there any more
    folder = Path(tempfile.mkdtemp(prefix="dpuflow-"))
    file = folder / f"capture{ending}"
    window = _Window(source)
    try:
        try:
            take(str(file), _Attached(target), window.is_over)
        finally:
            if file.exists():
                _say(target, bytes=file.stat().st_size)
                with file.open("rb") as captured:
                    shutil.copyfileobj(captured, target)
                target.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Window:
    """It is over when its end, which is told once all nodes capture, has come; or the input's."""

    def __init__(self, source: BinaryIO) -> None:
        self._end_s = math.inf
        threading.Thread(target=self._listen, args=(source,), daemon=True).start()

    def _listen(self, source: BinaryIO) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in source:
                left_ns = json.loads(line)["end_ns"] - time.time_ns()
                self._end_s = time.monotonic() + left_ns / 1e9
        self._end_s = -math.inf  # nobody is there any more

    def is_over(self) -> bool:
        return time.monotonic() >= self._end_s


class _Attached:
    """Says when packets are being taken."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target

    def started(self, capture: LiveCapture) -> None:
        _say(self._target, attached=True)

    def show(self, status: Status) -> None:
        pass


def _say(target: BinaryIO, **what: Any) -> None:
    target.write(HELLO + json.dumps(what).encode() + b"\n")
    target.flush()
