"""The event stream over a real socket: resuming, heartbeats, clients that are too slow, clients that go."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from agent_http import Running, serving
from agent_worlds import board, finding, health, window

from dpuflow.agent import events
from dpuflow.agent.board import Board
from dpuflow.agent.config import Api


class Told(NamedTuple):
    """One event as a client has it."""

    id: str | None
    kind: str
    data: Any


class Client:
    """A client of the stream, as the specification has them: fields, a blank line ends an event."""

    def __init__(self, running: Running, query: str = "", **headers: str) -> None:
        self.response = running.events(f"/api/v1/events{query}", **headers)
        assert self.response.status == 200, self.response.data
        assert self.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        self.comments = 0
        self.retry: int | None = None
        self._events = self._read()

    def _read(self) -> Iterator[Told]:
        fields: dict[str, str] = {}
        buffer = b""
        for piece in self.response.stream(1 << 16):
            buffer += piece
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                name, _, value = line.decode().partition(":")
                if line and not name:
                    self.comments += 1
                elif line:
                    fields[name] = value.removeprefix(" ")
                elif "data" in fields:
                    yield Told(fields.get("id"), fields["event"], json.loads(fields["data"]))
                    fields = {}
                else:
                    self.retry = int(fields.get("retry", self.retry or 0))
                    fields = {}

    def next(self) -> Told:
        return next(self._events)

    def take(self, count: int) -> list[Told]:
        return [self.next() for _ in range(count)]

    def close(self) -> None:
        self.response.close()


@contextlib.contextmanager
def client(running: Running, query: str = "", **headers: str) -> Iterator[Client]:
    made = Client(running, query, **headers)
    try:
        yield made
    finally:
        made.close()


def waiting(running: Running, count: int) -> None:
    """Until as many clients are listening."""
    stream = running.parts._context.stream
    assert stream is not None
    end = time.monotonic() + 60
    while stream.clients != count:
        assert time.monotonic() < end, f"{stream.clients} clients, not {count}"
        time.sleep(0.01)


def test_what_happens_is_told_in_order() -> None:
    held = board()
    with serving(held) as running, client(running) as listening:
        waiting(running, 1)
        held.publish(window(5), (finding("new"),))
        held.publish(window(6), (finding("new", severity="critical"),))
        held.publish(window(7), (finding("new", active=False),))
        held.report(health())
        told = listening.take(7)
    kinds = ["window", "finding_opened", "window", "finding_changed", "window", "finding_closed", "health"]
    assert [each.kind for each in told] == kinds
    assert told[0].data["number"] == 5
    notice = told[1].data
    assert (notice["schema"], notice["event"]) == ("dpuflow.notice/1", "finding_opened")
    assert notice["finding"]["condition"] == "straggler"
    assert [notice["endpoints"][each]["label"] for each in notice["finding"]["endpoints"]] == ["node1 gpu0"]
    assert told[5].data["finding"]["active"] is False
    assert told[6].data["losses"]["ring_full"] == 10
    numbers = [int(each.id.rpartition("-")[2]) for each in told if each.id]
    assert numbers == list(range(numbers[0], numbers[0] + 7))
    assert listening.retry == 3000


def test_only_the_kinds_asked_for() -> None:
    held = board()
    with serving(held) as running, client(running, "?events=finding_opened,finding_closed") as listening:
        waiting(running, 1)
        for number in range(5, 9):
            held.publish(window(number), (finding("new", active=number < 8),))
        assert [each.kind for each in listening.take(2)] == ["finding_opened", "finding_closed"]


@pytest.mark.parametrize("header", [True, False])
def test_a_client_that_comes_back_goes_on_where_it_was(header: bool) -> None:
    held = board()
    with serving(held) as running:
        with client(running) as listening:
            waiting(running, 1)
            held.publish(window(5))
            first = listening.next()
        waiting(running, 0)
        held.publish(window(6))
        held.publish(window(7))
        assert first.id is not None
        again = {"last-event-id": first.id} if header else {}
        query = "" if header else f"?last_event_id={first.id}"
        with client(running, query, **again) as listening:
            told = listening.take(2)
            held.publish(window(8))
            told.append(listening.next())
    assert [each.data["number"] for each in told] == [6, 7, 8]


def test_a_client_that_stayed_away_too_long_is_told_how_much_it_missed() -> None:
    held = Board()
    with serving(held, Api(listen="127.0.0.1:0", events=10)) as running:
        with client(running) as listening:
            waiting(running, 1)
            held.publish(window(0))
            first = listening.next()
        waiting(running, 0)
        for number in range(1, 31):
            held.publish(window(number))
        stream = running.parts._context.stream
        assert stream is not None
        while stream._last < 31:
            time.sleep(0.001)
        assert first.id is not None
        with client(running, **{"last-event-id": first.id}) as listening:
            gap, *rest = listening.take(11)
        assert (gap.kind, gap.data, gap.id) == ("missed", {"missed": 20}, None)
        assert [each.data["number"] for each in rest] == list(range(21, 31))
        assert "dpuflow_api_events_missed_total 20.0" in running.get("/metrics").body.decode()


@pytest.mark.parametrize("last_id", ["0123abcd-5", "nonsense", "{run}-99999999"])
def test_an_id_that_says_nothing_gives_all_that_is_kept(last_id: str) -> None:
    held = Board()
    with serving(held) as running:
        for number in range(3):
            held.publish(window(number))
        last_id = last_id.format(run=running.parts._run)
        with client(running, **{"last-event-id": last_id}) as listening:
            told = listening.take(4)
    assert (told[0].kind, told[0].data) == ("missed", {"missed": None})
    assert [each.data["number"] for each in told[1:]] == [0, 1, 2]


def test_a_client_that_does_not_read_holds_up_nobody_and_is_told() -> None:
    held = Board()
    with serving(held, Api(listen="127.0.0.1:0", events=50)) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        # Its connections take the listening socket's: what a system has for each holds some MB else.
        running.parts.server.door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # type: ignore[union-attr]
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", port))
            slow.settimeout(60)
            slow.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            waiting(running, 1)
            with client(running) as quick:
                waiting(running, 2)
                for begin in range(0, 2000, 20):  # more than all buffers on the way hold
                    for number in range(begin, begin + 20):
                        held.publish(window(number, count=0))
                    told = [each.data["number"] for each in quick.take(20)]
                    assert told == list(range(begin, begin + 20))
            text = b""
            while b"event: missed" not in text:
                text += slow.recv(1 << 16)
        missed = json.loads(text.partition(b"event: missed\ndata: ")[2].partition(b"\n")[0])["missed"]
        assert missed > 0


def test_quiet_connections_are_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.05)
    held = Board()
    with serving(held) as running, client(running) as listening:
        waiting(running, 1)
        time.sleep(1.0)
        held.publish(window(0))
        assert listening.next().data["number"] == 0
        assert listening.comments >= 3


def test_clients_are_bounded() -> None:
    with serving(Board(), Api(listen="127.0.0.1:0", max_clients=2)) as running:
        with client(running), client(running):
            waiting(running, 2)
            answer = running.get("/api/v1/events")
            assert (answer.status, answer.headers["content-type"]) == (503, "application/problem+json")
            assert "retry-after" in answer.headers
            assert "dpuflow_api_event_clients 2.0" in running.get("/metrics").body.decode()
        waiting(running, 0)
        with client(running):
            waiting(running, 1)


def test_closing_the_agent_ends_the_streams_at_once() -> None:
    with serving(Board()) as running:
        listening = Client(running)
        waiting(running, 1)
        begin = time.monotonic()
        running.parts.close()
        assert time.monotonic() - begin < 30
        with pytest.raises(StopIteration):
            listening.next()
        listening.close()


def test_what_the_streams_own_queue_lost_takes_numbers_too() -> None:
    held = Board()
    stream = events.Stream(held, "run", "here", 100, dict)
    try:
        stream._subscription.missed = 7
        held.publish(window(0))
        while not stream._kept:
            time.sleep(0.001)
        texts, last, gone = stream.after(0, frozenset(events.EVENT_KINDS))
    finally:
        stream.close()
    assert (len(texts), last, gone) == (1, 8, 7)
