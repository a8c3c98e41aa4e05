"""What a process that captures for months needs: other modes while packets come, and a new start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from network import HERE, Pair, inside, run, until_passed_on

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.kernels import ring as kernel
from dpuflow.live import libbpf
from dpuflow.live.capture import LiveCapture
from dpuflow.live.options import LiveOptions

pytestmark = pytest.mark.long

STEP = 1500  # packets before the next change
WAYS = [("ebpf", "tcx"), ("ebpf", "clsact"), ("ebpf", "xdp"), ("afpacket", "auto")]


@pytest.fixture
def start(pair: Pair) -> Iterator[Callable[..., LiveCapture]]:
    """What makes captures on ``east``; they are closed in the end."""
    made: list[LiveCapture] = []

    def make(backend: str = "ebpf", **options: object) -> LiveCapture:
        made.append(LiveCapture(LiveOptions(("east",), protocols=("any",), **options), backend))  # type: ignore[arg-type]
        return made[-1]

    with inside(pair.b):
        yield make
        for capture in made:
            capture.close()


def sender(pair: Pair, files: list[Path], rate: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "send.py"), "west", str(rate), *map(str, files)]
    return pair.start(pair.a, *command, stdout=subprocess.PIPE)


def totals(capture: LiveCapture) -> dict[str, int]:
    return capture.summary().counters[0]


@pytest.mark.parametrize(("backend", "hook"), WAYS)
def test_modes_change_while_packets_come_and_each_packet_is_counted_once(
    pair: Pair, nccl: list[Path], start: Callable[..., LiveCapture], backend: str, hook: str
) -> None:
    capture = start(backend, hook=hook)
    steps: list[dict[str, object]] = [
        {"mode": "messages"}, {"sample": 16}, {"mode": "packets", "snaplen": 64}, {"sample": 0},
        {"mode": "messages", "snaplen": 256}, {"mode": "packets"},
    ]  # fmt: skip
    modes = ["packets"]
    sending = sender(pair, nccl * 40, 8000)  # more than will be needed: it is told when to end
    due = STEP

    def over() -> bool:
        """Asked between all looks: the next step when so many packets more have come."""
        nonlocal due
        seen = capture.backend.counters()[0]["seen"]
        if seen >= due and steps:
            capture.switch(**steps.pop(0))  # type: ignore[arg-type]
            modes.append(capture.options.mode)
            due = capture.backend.counters()[0]["seen"] + STEP
        elif seen >= due:
            sending.terminate()
        if sending.poll() is None:
            return False
        until_passed_on()
        return True

    for _ in capture.pieces(duration_s=300, stopped=over):
        pass
    packets = capture.summary().status.packets
    assert sending.stdout is not None
    sent = int(sending.stdout.read())
    sending.communicate()
    counters = totals(capture)
    assert modes == ["packets", "messages", "messages", "packets", "packets", "messages", "packets"]
    assert counters["seen"] == sent == packets + counters["sampled_out"]
    assert counters["captured"] + counters["folded"] == packets
    assert counters["sampled_out"] > 0
    assert (counters["folded"] > 0) == (backend == "ebpf")
    assert counters["ring_full"] == counters["unreadable"] == 0


@pytest.mark.parametrize("hook", ["tcx", "clsact", "xdp"])
def test_another_share_of_the_pairs_needs_no_other_programs(
    pair: Pair,
    nccl: list[Path],
    start: Callable[..., LiveCapture],
    hook: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The verifier took a tenth of a second for each, of a budget that sampling was to keep."""
    capture = start(hook=hook)
    capture.switch(mode="messages")
    loaded = []
    monkeypatch.setattr(libbpf, "Loaded", lambda *_: loaded.append(1))
    left_out = []
    for sample in (16, 2.25, 16, 0):
        capture.switch(sample=sample)
        before = capture.backend.counters()[0]["sampled_out"]
        sent = pair.send(pair.a, "west", *nccl)
        left_out.append((capture.backend.counters()[0]["sampled_out"] - before) / sent)
    assert not loaded
    assert left_out[0] == left_out[2] > 0.9
    assert left_out[3] == 0
    assert capture.options.sample == 0


def test_a_mode_that_cannot_be_leaves_all_as_it_was(
    pair: Pair, nccl: list[Path], start: Callable[..., LiveCapture]
) -> None:
    capture = start()
    with pytest.raises(OptionError, match="is not a mode"):
        capture.switch(mode="words")
    with pytest.raises(OptionError, match="snap length 7"):
        capture.switch(snaplen=7)
    assert (capture.options.mode, capture.options.snaplen) == ("packets", 128)
    sent = pair.send(pair.a, "west", *nccl)
    assert sum(1 for _ in capture.pieces(duration_s=0.01)) > 0
    assert totals(capture)["captured"] == sent


@pytest.mark.parametrize(("backend", "hook"), WAYS)
def test_a_new_start_after_the_interface_was_gone_counts_on(
    pair: Pair, nccl: list[Path], start: Callable[..., LiveCapture], backend: str, hook: str
) -> None:
    capture = start(backend, hook=hook)
    sent = pair.send(pair.a, "west", *nccl)
    drained = 0

    def gone() -> bool:
        nonlocal drained
        if not drained and capture.backend.tally[kernel.D_PACKETS] == sent:
            drained = 1
            run("ip", "-n", pair.b, "link", "del", "east")
        return False

    for _ in capture.pieces(duration_s=120, stopped=gone):
        pass
    assert capture.summary().reason == "east: the interface is gone; everything captured before is kept"
    with pytest.raises(DpuflowError, match="east: no such interface"):
        capture.restart()
    assert capture.ring_share() == 0
    pair.connect()
    capture.restart()
    again = pair.send(pair.a, "west", *nccl)
    for _ in capture.pieces(duration_s=0.3):
        pass
    summary = capture.summary()
    assert summary.reason is None
    assert summary.status.packets == sent + again
    assert totals(capture)["captured"] == totals(capture)["seen"] == sent + again


@pytest.mark.parametrize("backend", ["ebpf", "afpacket"])
def test_the_ring_tells_how_full_it_is(
    pair: Pair, nccl: list[Path], start: Callable[..., LiveCapture], backend: str
) -> None:
    capture = start(backend, buffer=1 << 21)
    assert capture.ring_share() == 0
    pair.send(pair.a, "west", *nccl)
    full = capture.ring_share()
    assert 0.5 < full <= 1
    for _ in capture.pieces(duration_s=0.01):
        pass
    assert capture.ring_share() == 0
    assert capture.summary().status.ring_share == pytest.approx(full, abs=0.1)
