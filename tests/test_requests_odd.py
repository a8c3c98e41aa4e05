"""Clients' traffic that was captured badly or is not what it seems: no guess; what is not judged says why."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_requests import frames_of, told

import dpuflow
from dpuflow.conditions import TABLE
from dpuflow.results import Analysis

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
Log = list[tuple[int, bool, int, bytes]]
TOKENS = 10


def served(clients: int = 4, requests: int = 6) -> Log:
    """What clients ask and get of a sound server, each on a connection of its own; a prompt is answered by so
    many ``TOKENS``."""
    log: Log = []
    draw = random.Random(5)
    for client in range(clients):
        at = START_NS
        for _ in range(requests):
            at += draw.randrange(5 * MS, 60 * MS)
            log.append((at, True, 40_000 + client, bytes(draw.randrange(500, 1200))))
            at += 8 * MS
            for _ in range(TOKENS):
                at += draw.randrange(4 * MS, 6 * MS)
                log.append((at, False, 40_000 + client, bytes(80)))
    return sorted(log)


def analysed(folder: Path, log: Log, *, snaplen: int = 65535, second: int = 8000) -> Analysis:
    """``second``: the port that clients of odd ports ask."""
    (folder / "front.pcap").write_bytes(frames_of(log, snaplen=snaplen, second=second))
    return dpuflow.analyze([str(folder / "front.pcap")])


def of_clients(result: Analysis) -> dict[str, tuple[str, str | None]]:
    """The states of conditions that need whole requests, with their reasons."""
    rows = (row for row in result.judged if "requests" in TABLE[row.condition].needs)
    return {row.condition: (row.state, row.reason) for row in rows}


def test_what_is_whole_is_judged(tmp_path: Path) -> None:
    result = analysed(tmp_path, served())
    assert [row.tokens for row in result.requests] == [TOKENS] * 24
    assert of_clients(result)["ingress_loss"] == ("not_found", None)
    assert told(result) == set()


@pytest.mark.parametrize("up", [True, False])
def test_one_direction_alone_is_not_judged(tmp_path: Path, up: bool) -> None:
    result = analysed(tmp_path, [each for each in served() if each[1] == up])
    states = of_clients(result)
    assert {state for state, _ in states.values()} == {"not_judged"}
    assert all(reason for _, reason in states.values())
    assert not any(row.complete for row in result.requests)
    assert told(result) == set()


def test_headers_are_enough(tmp_path: Path) -> None:
    """Of TLS nothing but sizes can be read anyway."""
    whole, cut = (analysed(tmp_path, served(), snaplen=size) for size in (65535, 40))
    assert [(row.prompt_bytes, row.tokens) for row in cut.requests] == [
        (row.prompt_bytes, row.tokens) for row in whole.requests
    ]


def test_a_request_that_began_before_the_capture_is_not_whole(tmp_path: Path) -> None:
    whole = served()
    since_ns = whole[len(whole) // 2 + 9][0]
    result = analysed(tmp_path, [each for each in whole if each[0] >= since_ns])
    cut = [row for row in result.requests if row.sent_ns is None]
    assert cut
    assert not any(row.complete for row in cut)
    assert all(row.tokens == TOKENS for row in result.requests if row.sent_ns is not None)
    assert told(result) == set()


def test_an_answer_that_never_ends_is_one_request(tmp_path: Path) -> None:
    whole = served()
    times = range(START_NS, whole[-1][0], 5 * MS)
    endless = [(at, at == START_NS, 50_000, bytes(900 if at == START_NS else 80)) for at in times]
    result = analysed(tmp_path, sorted([*whole, *endless]))
    assert len(result.requests) == 25
    (most,) = (row for row in result.requests if row.tokens > TOKENS)
    assert (most.tokens, most.complete) == (len(times) - 1, False)
    assert told(result) == set()
    alone = analysed(tmp_path, endless)
    assert {state for state, _ in of_clients(alone).values()} == {"not_judged"}


def test_two_services_behind_one_address_are_asked_apart(tmp_path: Path) -> None:
    result = analysed(tmp_path, served(), second=9000)
    assert [row.tokens for row in result.requests] == [TOKENS] * 24
    assert [row.role for row in result.endpoints if row.address == "10.0.0.1"] == ["front_end"]
    assert told(result) == set()
