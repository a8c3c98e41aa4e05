"""The capturing thread where nothing can be captured."""

from __future__ import annotations

import io
import threading
import time

import pytest

from dpuflow.agent.config import Capture
from dpuflow.agent.log import Log
from dpuflow.agent.source import Source
from dpuflow.agent.stream import Stream
from dpuflow.errors import DpuflowError


def test_other_settings_that_cannot_be_opened_are_tried_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[float] = []
    began = threading.Event()

    def opened(source: Source) -> None:
        tries.append(time.monotonic())
        if len(tries) > 1:
            raise DpuflowError("nosuch: there is no such interface")

    def take(source: Source) -> None:
        began.set()
        while not (source._again.is_set() or source._stop.is_set()):
            time.sleep(0.01)

    monkeypatch.setattr(Source, "_open", opened)
    monkeypatch.setattr(Source, "_take", take)
    source = Source(Capture(), Stream("node0"), threading.Lock(), Log("debug", "text", stream=io.StringIO()))
    source.start()
    assert began.wait(5)
    source.reconfigure(Capture(interfaces=["nosuch"]))
    time.sleep(0.5)
    source.close()
    assert len(tries) == 2
    assert source.state.error == "nosuch: there is no such interface"
    assert source.ring_share() is None
