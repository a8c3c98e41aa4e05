"""What floods of requests may cost: turns by address, a share of CPU by listener; others are answered."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from agent_http import serving
from agent_worlds import board

from dpuflow.agent import server, turns
from dpuflow.agent.board import Health
from dpuflow.agent.config import Api
from dpuflow.agent.turns import WAIT_S, Share, Turns

ASKED = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_an_address_has_its_burst_then_its_rate_and_too_much_is_refused() -> None:
    made = Turns(rate=5, burst=20)
    assert [made.wait("a", 100.0) for _ in range(20)] == [0.0] * 20
    waits = [made.wait("a", 100.0) for _ in range(12)]
    assert waits[:10] == pytest.approx([0.2 * k for k in range(1, 11)])
    assert waits[10:] == [None, None]
    assert made.wait("b", 100.0) == 0.0
    assert made.wait("a", 100.0 + WAIT_S) == pytest.approx(0.2)  # what was refused costs no turn
    assert [made.wait("a", 1000.0) for _ in range(21)] == [0.0] * 20 + [pytest.approx(0.2)]


def test_what_is_remembered_of_addresses_is_bounded() -> None:
    made = Turns(rate=5, burst=20)
    for k in range(3 * turns.ADDRESSES):
        made.wait(str(k), 100.0)
    assert len(made._next_s) == turns.ADDRESSES


class Clock:
    now_s = used_s = 50.0

    def monotonic(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.used_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "time", made)
    return made


def test_a_share_is_kept_whatever_a_piece_costs(clock: Clock) -> None:
    made = Share(lambda: 0.1)
    made.look()
    begun_s, used_s = clock.now_s, clock.used_s
    while clock.now_s < begun_s + 100:
        clock.used_s += 0.03
        clock.now_s += 0.04
        made.count(0.02)  # by another thread
        made.look()
    pieces = (clock.used_s - used_s) / 0.03
    assert pieces * 0.05 == pytest.approx(0.1 * (clock.now_s - begun_s + turns.CREDIT_S), rel=0.02)


def test_what_one_rest_does_not_pay_has_requests_refused(clock: Clock) -> None:
    """Scrapes of 256 pairs, 0.17 s each, took a seventh of a core where their share was a hundredth."""
    made = Share(lambda: 0.01)
    made.look()
    begun_s, used_s, answered = clock.now_s, clock.used_s, 0
    while clock.now_s < begun_s + 600:
        made.look()
        answered += not made.owes()
        cost_s = 0.002 if made.owes() else 0.17
        clock.used_s += cost_s
        clock.now_s += cost_s
    assert clock.used_s - used_s == pytest.approx(0.01 * (clock.now_s - begun_s + turns.CREDIT_S), rel=0.05)
    assert answered > 20


def test_calls_that_wait_for_a_thread_are_refused_once_those_before_have_used_it_up(clock: Clock) -> None:
    """A crowd at its first second had hundreds let in: 5 % of a core over 50 s, of 1 %."""
    made = Share(lambda: 0.01)
    made.look()
    assert not made.owes()
    made.count(turns.CREDIT_S * 0.01 + 0.17)
    assert made.owes()
    clock.sleep(16.5)
    assert not made.owes()


@pytest.mark.parametrize("asked", [[True], [False, True]], ids=["at once", "when a thread has time"])
def test_a_refusal_says_when_to_come_again(asked: list[bool]) -> None:
    with serving(board(), Api(listen="127.0.0.1:0"), limited=True) as running:
        assert running.parts.server is not None
        share = running.parts.server.door.share
        assert share is not None
        answers = iter([*asked, False, False])
        share.owes = lambda: next(answers)  # type: ignore[method-assign]
        refused = running.get("/metrics")
        assert (refused.status, refused.headers["retry-after"]) == (429, "10")
        assert "share of limits.cpu" in refused.json["detail"]
        assert running.get("/metrics").status == 200  # all of its calls


def flood(port: int, path: bytes, source: str, over: threading.Event, again: bool) -> None:
    """Ask as often as can be, on one connection or on one after the other."""
    while not over.is_set():
        with contextlib.suppress(OSError), socket.socket() as client:
            client.bind((source, 0))
            client.settimeout(1)
            client.connect(("127.0.0.1", port))
            while not over.is_set():
                client.sendall(ASKED % path)
                if again or not client.recv(1 << 16):
                    break


@contextlib.contextmanager
def flooded(*arguments: object) -> Iterator[None]:
    over = threading.Event()
    threads = [
        threading.Thread(target=flood, args=(*arguments[:2], f"127.0.0.{2 + k % 4}", over, *arguments[2:]))
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def used_by(name: str) -> Callable[[], float]:
    """CPU seconds of the thread of that name."""
    (found,) = [thread for thread in threading.enumerate() if thread.name == name]
    assert found.ident is not None
    clock = time.pthread_getcpuclockid(found.ident)
    return lambda: time.clock_gettime(clock)


def test_a_capture_that_leaves_out_pairs_has_more_of_the_cpu() -> None:
    """In a flood of packets a crowd at the API left 31 % of them kept, where without it 51 % were."""
    told = board()
    told.report(Health(degraded="more than 50 % of a core", fidelity="sampled"))
    with serving(told, Api(listen="127.0.0.1:0", health="127.0.0.1:0"), limited=True) as running:
        assert running.parts.server is not None
        assert server.share_of(running.parts._context) == server.API_SHARE_SHORT < server.API_SHARE
        used = used_by("http")
        begun_s, used_s = time.monotonic(), used()
        with flooded(running.parts.server.address[1], b"/api/v1/openapi.json", False):
            time.sleep(5)
            allowed_s = 0.05 * 0.5 * (time.monotonic() - begun_s + turns.CREDIT_S)
            assert used() - used_s < 1.2 * allowed_s + 0.1
        told.report(Health(degraded="messages only", fidelity="messages"))
        assert server.share_of(running.parts._context) == server.API_SHARE


@pytest.mark.parametrize("again", [False, True], ids=["connections kept", "ever new connections"])
@pytest.mark.parametrize("part", ["probes", "http"])
def test_a_flood_has_a_small_share_and_others_are_answered(part: str, again: bool) -> None:
    """27,000 requests at /healthz took two thirds of a core, and the capture gave up most pairs of hosts."""
    with serving(board(), Api(listen="127.0.0.1:0", health="127.0.0.1:0"), limited=True) as running:
        served = running.parts.probes if part == "probes" else running.parts.server
        assert served is not None
        path = b"/healthz" if part == "probes" else b"/api/v1/openapi.json"
        share = (server.PROBE_SHARE if part == "probes" else server.API_SHARE) * 0.5
        used = used_by(part)
        begun_s, used_s = time.monotonic(), used()
        with flooded(served.address[1], path, again):
            for _ in range(6):
                time.sleep(0.7)
                with socket.create_connection(served.address, timeout=20) as client:
                    client.sendall(ASKED % b"/healthz")
                    assert client.recv(64).startswith(b"HTTP/1.1 200")
            allowed_s = share * (time.monotonic() - begun_s + turns.CREDIT_S)
            assert used() - used_s < 1.2 * allowed_s + 0.1
