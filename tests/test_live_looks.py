"""How often a capture looks: seldom where little comes, so that what is made of each look costs little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpuflow.kernels import ring as kernel
from dpuflow.live import capture
from dpuflow.live.capture import LiveCapture
from dpuflow.live.options import LiveOptions


class Steady:
    """A backend whose ring gets so many bytes a second, by a clock that only ``wait`` moves."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now_s, self.read_s, self.looks = rate, 100.0, 100.0, 0
        self.name, self.interfaces, self.hooks = "ebpf", [], "none"
        self.tally = np.zeros(kernel.D_SIZE, np.int64)
        self.tally[kernel.D_LEFT] = 1 << 60
        self.clock = SimpleNamespace(check=lambda: 0)

    def read(self, out: Any, at: int) -> int:
        self.looks += 1
        filled = min(round(self.rate * (self.now_s - self.read_s)), len(out))
        self.read_s += filled / self.rate if filled else 0.0
        return filled

    def wait(self, seconds: float) -> None:
        self.now_s += max(seconds, 1e-6)

    def counters(self) -> list[dict[str, int]]:
        return []

    def take_peak(self) -> float:
        return 0.0

    def detach(self) -> None:
        self.rate = 0.0


@pytest.mark.parametrize(("rate", "most"), [(0.0, 25), (1e5, 25), (2e6, 25), (6e6, 60), (5e7, 101)], ids=str)
def test_looks_a_second(rate: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were a hundred wherever anything came: 4 % of a core for 700 packets a second."""
    backend = Steady(rate)
    monkeypatch.setattr(capture, "open_backend", lambda *_: backend)
    monkeypatch.setattr(capture.time, "monotonic", lambda: backend.now_s)
    monkeypatch.setattr(capture.time, "monotonic_ns", lambda: round(backend.now_s * 1e9))
    live = LiveCapture(LiveOptions(("lo",), buffer=64 << 20))
    sizes = [len(piece) for piece in live.pieces(duration_s=10)]
    assert backend.looks <= 10 * most + 10
    assert sum(sizes) == pytest.approx(10 * rate, rel=0.02)
