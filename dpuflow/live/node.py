"""One node's side of a capture on several (``live/nodes``): clock, window, file; ends with its input."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dpuflow.live.nodes import HELLO
from dpuflow.live.sync import clock_state

if TYPE_CHECKING:
    from collections.abc import Callable


def serve(
    take: Callable[[str, float | None, Callable[[], bool]], None],
    ending: str,
    source: BinaryIO,
    target: BinaryIO,
) -> None:
    """Answer on ``target`` what ``source`` asks; ``take`` captures.

    The file is sent whatever ``take`` raises, and then that is raised. ``source`` has no buffer.
    """
    _say(target, clock=clock_state())
    window: dict[str, Any] | None = None
    for line in source:
        if line.strip() == b"now":
            _say(target, now_ns=time.time_ns())
        elif line.strip():
            window = json.loads(line)
            break
    if window is None:
        return  # nobody is there any more
    folder = Path(tempfile.mkdtemp(prefix="dpuflow-"))
    file = folder / f"capture{ending}"
    over = threading.Event()
    threading.Thread(target=_until_end, args=(source, over), daemon=True).start()
    try:
        over.wait(max(window["start_ns"] - time.time_ns(), 0) / 1e9)
        left = window["duration_s"]
        if left is not None:
            left = max(left - max(time.time_ns() - window["start_ns"], 0) / 1e9, 0.001)
        try:
            take(str(file), left, over.is_set)
        finally:
            if file.exists():
                _say(target, bytes=file.stat().st_size)
                with file.open("rb") as captured:
                    shutil.copyfileobj(captured, target)
                target.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _until_end(source: BinaryIO, over: threading.Event) -> None:
    """Set ``over`` when nobody is there any more."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(source.fileno(), 1):  # not by a buffer, whose lock would outlive the main thread
            pass
    over.set()


def _say(target: BinaryIO, **what: Any) -> None:
    target.write(HELLO + json.dumps(what).encode() + b"\n")
    target.flush()
