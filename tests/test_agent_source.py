"""The capturing thread where nothing can be captured."""

from __future__ import annotations

import errno
import io
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from dpuflow.agent import interfaces
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


class Kernel:
    """A routing socket of a kernel with these links: index -> (name, flags)."""

    def __init__(self, links: dict[int, tuple[str, int]]) -> None:
        self.links, self.reads = links, 0
        self.parts: list[bytes] = []
        self.waits = self.overrun = False

    def bind(self, address: tuple[int, int]) -> None:
        assert address == (0, 1)  # RTMGRP_LINK

    def setblocking(self, waits: bool) -> None:
        self.waits = waits

    def close(self) -> None:
        self.parts.clear()

    def send(self, request: bytes) -> None:
        assert struct.unpack_from("=IHH", request)[0] == len(request)
        said = [self.message(16, index) for index in self.links]
        self.parts = [b"".join(said[at : at + 30]) for at in range(0, len(said), 30)]
        self.parts.append(struct.pack("=IHHIIi", 20, 3, 2, 1, 0, 0))

    def message(self, kind: int, index: int) -> bytes:
        name, flags = self.links[index]
        text = name.encode() + b"\0"
        mtu = struct.pack("=HHI", 8, 4, 1500)
        attributes = mtu + struct.pack("=HH", 4 + len(text), 3) + text + bytes(-len(text) % 4)
        return (
            struct.pack("=IHHIIBxHiII", 32 + len(attributes), kind, 2, 1, 0, 0, 1, index, flags, 0)
            + attributes
        )

    def recv(self, size: int) -> bytes:
        self.reads += 1
        if self.overrun:
            self.overrun = False
            raise OSError(errno.ENOBUFS, "No buffer space available")
        if not self.parts:
            raise BlockingIOError
        return self.parts.pop(0)


def test_of_ten_thousand_interfaces_those_are_looked_at_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of many containers: each was asked for its flags once a second, a quarter of a core."""
    kernel = Kernel(
        {number: (f"veth{number}", 0) for number in range(2, 10_002)} | {1: ("lo", 9), 5: ("p7x", 1)}
    )
    monkeypatch.setattr(interfaces.socket, "socket", lambda *_: kernel)
    links = interfaces.Links()
    assert links.wanted(["auto"]) == ["p7x"]
    assert links.told == 10_001
    before = kernel.reads
    for _ in range(100):
        assert links.wanted(["auto"]) == ["p7x"]
    assert (links.told, kernel.reads) == (10_001, before + 100)
    kernel.links[77] = ("veth77", 1)
    kernel.parts.append(kernel.message(16, 77) + kernel.message(17, 5))
    assert links.wanted(["auto"]) == ["veth77"]
    assert links.told == 10_003
    kernel.links[77] = ("renamed", 1)
    kernel.parts.append(kernel.message(16, 77))
    assert links.wanted(["auto"]) == ["renamed"]
    kernel.overrun = True  # more changed at a time than there was room for
    kernel.links[78] = ("veth78", 1)
    assert links.wanted(["auto"]) == ["p7x", "renamed", "veth78"]
    assert links.wanted(["eth0", "eth1"]) == ["eth0", "eth1"]
    links.close()


def test_less_is_let_in_even_while_nothing_may_be_read() -> None:
    """An order was obeyed with the next piece only: where memory was full, the ring filled by the old one."""
    ordered: list[tuple[str, float]] = []
    options = SimpleNamespace(mode="packets", sample=0.0)

    def switch(mode: str, sample: float) -> None:
        ordered.append((mode, sample))
        options.mode, options.sample = mode, sample

    def pieces(hold: Callable[[], float], **_: object) -> Iterator[np.ndarray]:
        assert hold() == 0.02
        source.degrade("messages", 2.0)
        assert not source.obeyed()
        assert [hold(), hold()] == [0.02, 0.02]
        return iter(())

    source = Source(
        Capture(), Stream("node0"), threading.Lock(), Log("debug", "text", stream=io.StringIO()), lambda: 0.02
    )
    source._capture = SimpleNamespace(  # type: ignore[assignment]
        head=lambda: b"", options=options, switch=switch, pieces=pieces,
        summary=lambda: SimpleNamespace(reason=None),
        backend=SimpleNamespace(
            clock=SimpleNamespace(start=SimpleNamespace(real_ns=0)), name="ebpf", hooks="tcx", interfaces=[]
        ),
    )  # fmt: skip
    source._take()
    assert ordered == [("messages", 2.0)]
    assert source.obeyed()
    assert source.switches == 1
