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


def test_other_settings_that_cannot_be_opened_are_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause between two tries is as long here as any machine needs for two."""
    monkeypatch.setattr("dpuflow.agent.source.RETRY_S", 600.0)
    tries: list[float] = []
    began = threading.Event()

    def opened(source: Source) -> None:
        tries.append(time.monotonic())
        if len(tries) > 1:
            raise DpuflowError("nosuch: no such interface")

    def take(source: Source) -> None:
        began.set()
        while not (source._again.is_set() or source._stop.is_set()):
            time.sleep(0.01)

    monkeypatch.setattr(Source, "_open", opened)
    monkeypatch.setattr(Source, "_take", take)
    source = Source(Capture(), Stream("node0"), threading.Lock(), Log("debug", "text", stream=io.StringIO()))
    source.start()
    assert began.wait(60)
    source.reconfigure(Capture(interfaces=["nosuch"]))
    end = time.monotonic() + 60
    while source.state.error is None and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.3)  # time enough to try again at once
    source.close()
    assert len(tries) == 2
    assert source.state.error == "nosuch: no such interface"
    assert source.ring_share() is None


def test_ten_thousand_interfaces_are_looked_through_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of many containers."""
    from dpuflow.agent import interfaces

    names = [(number, f"veth{number}") for number in range(2, 10_002)]
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: [(1, "lo"), *names])
    started = time.process_time()
    assert interfaces.wanted(["auto"]) == []  # none of them is there
    assert time.process_time() - started < 5.0
