"""Requests of clients: found as they were played, and what goes wrong with them is named."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dpuflow
from dpuflow.findings.answers import _queue, find_drained_batches
from dpuflow.findings.clients import _rest_came_late, rise_of, waiting_ahead
from dpuflow.findings.hosts import since_larger
from dpuflow.findings.standstills import standstills
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

LIGHT = {"kind": "service", "layers": 2, "layer_us": 200, "prefill_us": 800, "bytes": 4096}


SLOW_CLIENTS = {"kind": "slow_link", "node": "client", "gbps": 0.05, "where": "down"}

Written = Callable[[dict[str, Any]], Path]


def service(
    job: dict[str, Any], clients: dict[str, Any], *faults: dict[str, Any], nodes: int = 2
) -> dict[str, Any]:
    """The scenario of a small service."""
    usual = {"hosts": 4, "sessions": 2, "requests": 6, "tokens": 14, "think_us": 30_000}
    return {
        "seed": 7,
        "cluster": {"nodes": nodes},
        "job": LIGHT | job,
        "clients": usual | clients,
        "faults": list(faults),
    }


def analysed(folder: Path) -> Analysis:
    return dpuflow.analyze([str(path) for path in sorted(folder.glob("*.pcap.gz"))])


def told(result: Analysis) -> set[str]:
    return {row.condition for row in result.findings if row.severity != "info"}


def test_requests_are_those_of_the_truth(written: Written) -> None:
    folder = written(service({}, {}))
    result = analysed(folder)
    truth = json.loads((folder / "truth.json").read_text())["requests"]
    assert len(result.requests) == len(truth) == 48
    assert sum(row.complete for row in result.requests) >= 47  # the last one may go on
    for row, true in zip(result.requests, sorted(truth, key=lambda each: each["sent_ns"]), strict=True):
        assert (row.prompt_bytes, row.tokens) == (true["prompt_bytes"], true["tokens"])
        assert row.first_ns is not None
        assert row.sent_ns is not None
        assert row.last_ns is not None
        # Seen at the front end: the prompt a way later, the last token a way earlier.
        assert row.first_ns - row.sent_ns == pytest.approx(true["first_ns"] - true["sent_ns"], rel=0.01)
        assert row.last_ns - row.first_ns == pytest.approx(true["last_ns"] - true["first_ns"], rel=0.01)
    assert told(result) == set()


def test_clients_are_no_ranks_and_one_capture_is_enough(written: Written) -> None:
    folder = written(service({}, {}))
    for files in (("node0.pcap.gz",), ("node0.pcap.gz", "node1.pcap.gz")):
        result = dpuflow.analyze([str(folder / file) for file in files])
        clients = [row for row in result.endpoints if row.role == "client"]
        assert len(clients) == 4
        assert all(row.rank is None for row in clients)
        assert not {row.id for row in clients} & {row.endpoint for row in result.lateness}
        assert [row.role for row in result.endpoints if row.address == "10.0.0.1"] == ["front_end"]
        names = [limit for limit in result.limits if "172.16." in limit]
        assert names == []


def test_who_speaks_rdma_with_a_host_is_no_client_of_it(shared: Path) -> None:
    """The connection over which both ends of perftest agree was taken for one of HTTP/2."""
    files = sorted((shared / "captures/roce/perftest-read-bw").glob("node*.pcap.gz"))
    result = dpuflow.analyze(list(map(str, files)))
    assert {row.role for row in result.endpoints}.isdisjoint({"client", "front_end"})
    assert not any("HTTP/2" in limit for limit in result.limits)


@pytest.mark.parametrize(
    ("condition", "job", "clients", "faults"),
    [
        ("admission_backlog", {"prefill_us": 2400, "max_batch": 3}, {"sessions": 4, "think_us": 4000}, ()),
        (
            "ingress_starvation",
            {},
            {"requests": 12, "think_us": 6000, "until_us": 50_000, "resume_us": 200_000},
            (),
        ),
        ("early_completion", {"batching": "static"}, {"sessions": 3, "tokens": 40, "think_us": 4000}, ()),
        ("egress_backlog", {"egress_us": 150}, {"sessions": 3, "requests": 8}, ()),
        ("egress_jitter", {"egress_jitter_us": 200}, {}, ()),
        ("ingress_loss", {}, {}, ({"kind": "loss", "share": 0.04, "traffic": "from_clients"},)),
        ("egress_loss", {}, {}, ({"kind": "loss", "share": 0.04, "traffic": "to_clients"},)),
        ("egress_loss", {}, {}, ({"kind": "loss", "share": 0.04, "traffic": "clients"},)),
        ("ingress_loss", {}, {}, ({"kind": "loss", "share": 0.04, "traffic": "clients"},)),
        ("saturation", {}, {"token_bytes": 4000}, (SLOW_CLIENTS,)),
    ],
)
def test_what_clients_suffer_is_named(
    written: Written, condition: str, job: dict[str, Any], clients: dict[str, Any], faults: tuple[Any, ...]
) -> None:
    result = analysed(written(service(job, clients, *faults)))
    found = {row.condition: row for row in result.findings}
    assert condition in found, [row.summary for row in result.findings]
    assert found[condition].cost_ns
    assert "packet_loss" not in found  # the fabric loses nothing


def test_a_full_link_to_clients_is_one_incident(written: Written) -> None:
    """What falls behind the decode steps because of it is listed under it."""
    result = analysed(written(service({}, {"token_bytes": 4000}, SLOW_CLIENTS)))
    (row,) = (row for row in result.findings if row.severity != "info")
    assert row.condition == "saturation"
    assert {result.endpoints[end].role for end in row.endpoints} == {"front_end", "client"}
    assert "0.0468 Gbit/s" in row.summary  # of 0.05, headers taken off
    quick = analysed(written(service({}, {"token_bytes": 4000})))
    assert "saturation" not in {row.condition for row in quick.findings}


def test_a_path_that_grows_longer_is_no_full_link() -> None:
    """Tokens at an even pace arrive at that pace however long each takes; behind a full link they do not."""
    left = np.arange(100) * 1000
    longer = np.where(np.arange(100) < 10, 500, 5500)
    pace = 1250
    full = np.cumsum(np.full(100, pace)) + 500 - left
    # Acknowledgments of twenty at a time come late, all at once, or nearly so.
    lost = (np.arange(100) // 20 + 1) * 20_000 + np.arange(100) % 20 * 3 - left
    for late, found in ((longer, None), (full, pace / 100), (lost, None)):
        tokens = SimpleNamespace(token_ns=left, late_ns=late, token_bytes=np.full(100, 100))
        queue = _queue(tokens, np.arange(100))
        assert (queue and queue.pace_ns) == found


@pytest.mark.parametrize("traffic", ["to_clients", "from_clients"])
def test_losses_of_clients_are_told_from_when_they_began(written: Written, traffic: str) -> None:
    from_us = 250_000
    lost = {"kind": "loss", "share": 0.2, "traffic": traffic, "from_us": from_us}
    folder = written(service({}, {"requests": 10}, lost))
    found = {row.condition: row for row in analysed(folder).findings}
    start_ns = found["egress_loss" if traffic == "to_clients" else "ingress_loss"].start_ns
    began_ns = json.loads((folder / "truth.json").read_text())["conditions"][0]["from_ns"]
    assert start_ns is not None
    assert 0 <= start_ns - began_ns < from_us * 100  # a tenth of what was before


@pytest.mark.parametrize("static", [False, True])
def test_a_prompt_that_comes_in_mid_step_waits_for_no_batch(static: bool) -> None:
    """Two sessions in turn, a step of 100 brings a token to each. The one that was first asks again before
    the other one has its last token, and has its first one right behind that; or waits for a batch, as long
    as the other one's answer is longer."""
    longer = 6 if static else 1
    begin = np.arange(20) * 100 * (12 + longer)
    first = np.sort(np.r_[begin + 1, begin])
    last = np.stack([begin + 1100, begin + 100 * (11 + longer)], axis=1).ravel()
    asked = np.r_[0, 0, last[:-2] + 51]
    requests = SimpleNamespace(
        connections=SimpleNamespace(server=np.zeros(1, np.int64)), whole=np.ones(40, bool),
        server=np.zeros(40, np.int64), first_ns=first, last_ns=last, asked_ns=asked,
        gap_p99_ns=np.full(40, 100.0),
    )  # fmt: skip
    ends = [SimpleNamespace(address="10.0.0.1", label=None, rank=None)]
    case = SimpleNamespace(requests=requests, result=SimpleNamespace(endpoints=ends))
    assert len(list(find_drained_batches(case))) == static  # type: ignore[arg-type]


def test_what_losses_delay_is_no_backlog_of_the_front_end(written: Written) -> None:
    clients = {"hosts": 6, "sessions": 3, "requests": 5, "think_us": 4000, "tokens": 24}
    lost = {"kind": "loss", "share": 0.03, "traffic": "to_clients"}
    result = analysed(written(service({"prefill_us": 2400, "max_batch": 3}, clients, lost)))
    assert told(result) == {"admission_backlog", "egress_loss"}


@pytest.mark.parametrize("balance", ["even", "skewed"])
def test_front_ends_are_compared_though_nothing_ties_their_clocks(written: Written, balance: str) -> None:
    """Two replicas that share no packet, each with a front end of its own."""
    clients = {"hosts": 6, "sessions": 4, "requests": 6, "think_us": 10_000}
    result = analysed(written(service({"tp": 2, "balance": balance}, clients, nodes=4)))
    assert {clock.island for clock in result.clocks} == {0, 1}
    found = [row for row in result.findings if row.condition == "session_skew"]
    assert [row.endpoints for row in found] == ([[0]] if balance == "skewed" else [])
    assert "clock_untied" not in told(result)
    for row in found:
        assert "of 2 front ends" in row.summary
        assert row.cost_ns


def test_the_rest_of_a_prompt_that_comes_a_timeout_later() -> None:
    took = np.array([1_000] * 8 + [200_000_000, 2_000])
    requests = SimpleNamespace(
        whole=np.ones(10, bool), server=np.zeros(10, np.int64), sent_ns=np.zeros(10, np.int64), asked_ns=took
    )
    late = _rest_came_late(requests, 0)  # type: ignore[arg-type]
    assert late.tolist() == [0] * 8 + [199_999_000, 0]


def test_waiting_ahead_counts_prompts_without_an_answer() -> None:
    """A queue served one after the other, against a count by hand."""
    draw = random.Random(3)
    asked = sorted(draw.randrange(1000) for _ in range(40))
    first = []
    for at in asked:
        first.append(max([at, *first[-1:]]) + 30)
    slow = [
        sum(other < at and answer > at for other, answer in zip(asked, first, strict=True)) for at in asked
    ]
    mine = waiting_ahead(np.array(asked), np.array(first))
    assert sum(abs(a - b) for a, b in zip(mine.tolist(), slow, strict=True)) <= 2  # of those at the same time
    rise = rise_of(np.array(first) - np.array(asked), mine)
    assert rise.ns == pytest.approx(30, rel=0.2)
    assert rise.error_ns < 5


def test_pages_that_shrink_for_good_and_those_that_vary() -> None:
    assert since_larger(np.array([16] * 7 + [64] * 7)) == 7
    assert since_larger(np.array([16] * 3 + [64] * 20)) == 3
    assert since_larger(np.array([16] * 3 + [64] * 3)) is None  # of any order one in twenty is so
    assert since_larger(np.array([64, 16] * 5)) is None
    assert since_larger(np.array([40] * 5 + [64] * 5)) is None
    assert since_larger(np.array([0] * 7 + [64] * 7)) is None  # there were none to get longer


def test_a_nic_stands_still_where_nothing_ends_for_longer_than_all_of_it_takes() -> None:
    begin = np.arange(0, 10_000, 100)
    end = begin + 150  # two at a time
    size = np.full(len(begin), 150.0)
    assert len(standstills(begin, end, size)) == 0
    later = end.copy()
    later[50] += 3000
    later[49] += 3000
    begin = np.where(np.arange(len(begin)) > 50, begin + 3000, begin)
    later[51:] = begin[51:] + 150
    (stall,) = standstills(begin, later, size).tolist()
    assert stall[0] == 5000
    assert stall[1] >= 8000


def frames_of(log: list[tuple[int, bool, int, bytes]], *, snaplen: int = 65535, second: int = 8000) -> bytes:
    """A pcap of raw IPv4 of (time ns, from client, client's port, data); ACKs are left out. ``second``: the
    server's port for clients of odd ports."""
    made = [struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 101)]
    sent: dict[tuple[int, bool], int] = {}
    client, server = socket.inet_aton("192.0.2.9"), socket.inet_aton("10.0.0.1")
    for at, up, port, data in sorted(log):
        seq, ack = sent.get((port, up), 1), sent.get((port, not up), 1)
        sent[port, up] = seq + len(data)
        service = second if port % 2 else 8000
        ports = (port, service) if up else (service, port)
        tcp = struct.pack(">HHIIBBHHH", *ports, seq, ack, 5 << 4, 0x18, 65535, 0, 0)
        ends = client + server if up else server + client
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 40 + len(data), 0, 0, 64, 6, 0) + ends
        frame = ip + tcp + data
        kept = frame[:snaplen]
        made.append(struct.pack("<IIII", at // 10**9, at % 10**9, len(kept), len(frame)) + kept)
    return b"".join(made)


async def served(requests: int) -> tuple[list[tuple[int, bool, int, bytes]], list[tuple[int, int, int]]]:
    """What a real server and its clients wrote on loopback; of each request its size, tokens, port."""
    log: list[tuple[int, bool, int, bytes]] = []
    true: list[tuple[int, int, int]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("peername")[1]
        while head := await reader.read(65536):
            tokens = int(head.split(b" ")[1])
            await asyncio.sleep(0.02)
            for _ in range(tokens):
                data = b"data: " + bytes(40)
                log.append((time.time_ns(), False, port, data))
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(0.002)
        writer.close()

    async def ask(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        port = writer.get_extra_info("sockname")[1]
        for turn in range(requests):
            tokens = 4 + (number + turn) % 5
            data = f"POST {tokens} ".encode() + bytes(400 + 10 * turn)
            log.append((time.time_ns(), True, port, data))
            true.append((len(data), tokens, port))
            writer.write(data)
            left = 46 * tokens
            while left:
                left -= len(await reader.read(left))
            await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    await asyncio.gather(*(ask(number) for number in range(3)))
    server.close()
    return log, true


def test_a_real_server_and_its_clients(tmp_path: Path) -> None:
    """Times and sizes as asyncio's own sockets had them."""
    log, true = asyncio.run(served(4))
    (tmp_path / "front.pcap").write_bytes(frames_of(log))
    result = dpuflow.analyze([str(tmp_path / "front.pcap")])
    mine = sorted((row.prompt_bytes or 0, row.tokens) for row in result.requests)
    assert mine == sorted((size, tokens) for size, tokens, _ in true)
    assert [row.role for row in result.endpoints if row.address == "192.0.2.9"] == ["client"]
    assert told(result) == set()


def test_without_clients_nothing_of_them_is_judged(tmp_path: Path) -> None:
    scenario = {"cluster": {"nodes": 2}, "job": {"kind": "decode", "tokens": 4}}
    write_case(parse_scenario(json.dumps(scenario), "test"), str(tmp_path))
    result = dpuflow.analyze([str(path) for path in sorted(tmp_path.glob("*.pcap.gz"))])
    states = {row.condition: row for row in result.judged}
    assert states["admission_backlog"].state == "not_judged"
    assert states["admission_backlog"].reason == "no client's connection was captured"
    assert result.requests == []
