"""Kinds of ``fuzz.py`` beside captures: requests to the agent's API, and texts that people hand in.

requests: HTTP requests, changed, to a server that runs: each is answered, never by an error of the server's,
or its connection is closed, and a good one after them is served. texts: configurations, rank maps, scenarios,
filter expressions, saved results, records of a job's software, changed: what is wrong with them is told in a
sentence.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import socket
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import mutants

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

REQUESTS = 40  # of a case, at once: an address may have 64 connections
TEXTS = 100
ANSWER_S = 20.0
PIECES = (
    b"\n", b"\n\n", b" ", b"  ", b"\t", b":", b": ", b"- ", b"{", b"}", b"[", b"]", b"'", b'"', b",", b"#",
    b"&a", b"*a", b"!!int ", b"!!python/object:os.system ", b"<<: *a", b"|\n", b"\0", b"\xff", b"\xc3\xa9",
    b"null", b"true", b"~", b"-1", b"0", b"1e308", b"1e999", b"nan", b"inf", b"-inf", b"9" * 25,
    b"9" * 5000, b"0x10", b"1:30", b"2026-11-23", b"10.0.0.1", b"[" * 5000, b"{a: " * 2000,
    b"{}", b"[]", b'""', b"%", b"s",
    b"ms", b"MiB", b"TiB", b"::", b"fe80::1%eth0", b"or", b"and", b"not", b"host 10.0.0.1", b"port 4791",
    b"vlan 5", b"(", b")", b"A" * 3000,
)  # fmt: skip
_AT_FAULT = re.compile(rb"^HTTP/1\.1 50[0-2]", re.MULTILINE)


class Told(Exception):
    """A property that does not hold."""


def _short(said: bytes) -> str:
    """Its repetitions left out."""
    return repr(re.sub(rb"(.{1,4}?)\1{20,}", rb"\1..", said)[:600])


class Served:
    """A server that runs, and what it logs as errors."""

    def __init__(self) -> None:
        import agent_http
        import agent_worlds

        from dpuflow.agent import connection
        from dpuflow.agent.config import Api

        self.stack, self.errors = ExitStack(), []
        connection.REQUEST_S = 0.05  # requests that never end are let go soon
        self.running = self.stack.enter_context(
            agent_http.serving(agent_worlds.board(), Api(listen="127.0.0.1:0", max_clients=4))
        )
        self.port = self.running.parts.server.address[1]
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self.errors.append(
            f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}"
        )  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)

    def ask(self, *said: bytes) -> list[bytes]:
        """What is answered to each, on connections of their own at once, whole or cut."""
        clients = [socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_S) for _ in said]
        got = [b""] * len(said)
        for client, request in zip(clients, said, strict=True):
            with suppress(ConnectionError):
                client.sendall(request)
        for number, client in enumerate(clients):
            with client, suppress(ConnectionError):
                while not _whole(got[number]) and (part := client.recv(1 << 16)):
                    got[number] += part
        return got


def _whole(answer: bytes) -> bool:
    """Whether an answer is there, or one of those that have no end."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(end) and (length is None or len(body) >= int(length[1]) or body == b"")


@cache
def served() -> Served:
    """One a process."""
    return Served()


def requests(rng: Random) -> int:
    """Changed requests, and a good one."""
    server = served()
    said = [mutants.mutant_request(rng) for _ in range(REQUESTS)]
    try:
        answers = server.ask(*said)
    except TimeoutError:
        raise Told("no answer and no end") from None
    for request, answer in zip(said, answers, strict=True):
        if _AT_FAULT.search(answer):
            raise Told(f"{_short(request)}: {answer[:200]!r}")
    if server.errors:
        logged = server.errors.copy()
        server.errors.clear()
        raise Told(f"logged {logged}")
    (answer,) = server.ask(b"GET /api/v1/groups HTTP/1.1\r\nHost: localhost\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        raise Told(f"a good request is answered by {answer[:200]!r}")
    return REQUESTS


# -- texts --------------------------------------------------------------------------------------


def _config(path: Path) -> None:
    from dpuflow.agent.config import as_yaml, read_config

    as_yaml(read_config(str(path)))


def _ranks(path: Path) -> None:
    from dpuflow.identity.rankmap import read_rank_map

    read_rank_map(str(path))


def _scenario(path: Path) -> None:
    from dpuflow.synth.scenario import read_scenario

    read_scenario(str(path))


def _expression(path: Path) -> None:
    from dpuflow.live.expression import translate

    translate(path.read_bytes().decode("utf-8", "surrogateescape"))


def _result(path: Path) -> None:
    import dpuflow
    from dpuflow.reports.json import json_lines
    from dpuflow.reports.markdown import markdown_lines
    from dpuflow.reports.text import text_lines

    result = dpuflow.load(str(path))
    for lines in (json_lines, text_lines, markdown_lines):
        for _ in lines(result):
            pass


def _recorded(path: Path) -> None:
    from dpuflow.recorded import read_recorded

    read_recorded(str(path))


@cache
def texts_of() -> dict[str, tuple[Callable[[Path], None], list[bytes]]]:
    """Who reads them, and good ones."""
    from test_loading import RESULTS, text_of

    from dpuflow.agent.config import Config, as_yaml
    from dpuflow.synth.scenario import ready, ready_text

    home = Path(__file__).resolve().parents[1]
    examples = [path.read_bytes() for path in sorted((home / "deploy").rglob("agent*.yaml"))]
    call = {
        "profiling_name": "nccl:all_reduce", "input_sizes": [[512]], "input_dtypes": ["BFloat16"],
        "time_created_ns": 17,
    }  # fmt: skip
    event = {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "ts": 1.5, "dur": 9,
        "args": {
            "Collective name": "allreduce", "In msg nelems": 512, "Out msg nelems": 512, "dtype": "BFloat16",
            "Group size": 4, "Process Group Name": "0",
        },
    }  # fmt: skip
    log = (
        b"n:4:4 [0] NCCL INFO ncclCommInitRank comm 0xabc rank 3 nranks 4 cudaDev 0 - Init START\n"
        b"n:4:9 [0] NCCL INFO AllReduce: opCount 1 sendbuff 0x1 recvbuff 0x2 count 512 datatype 9 op 0 root 0"
        b" comm 0xabc [nranks=4] stream 0x5\n"
    )
    dump = {"version": "2.4", "entries": [call] * 3}
    recorded = [
        json.dumps({"distributedInfo": {"rank": 2}, "traceEvents": [event] * 3}).encode(),
        json.dumps(dump).encode(), pickle.dumps(dump, protocol=2), pickle.dumps(dump, protocol=4), log * 2,
    ]  # fmt: skip
    return {
        "config.yaml": (_config, [as_yaml(Config()).encode(), *examples]),
        "ranks.yaml": (
            _ranks, [b"10.0.0.1: 0\n10.0.0.2: {rank: 1, gpu: 3, host: node1}\nfe80::1:\n  host: node1\n"]
        ),
        "scenario.yaml": (_scenario, [ready_text(name).encode() for name in ready()]),
        "expression": (
            _expression,
            [b"tcp and host 10.0.0.1 and (port 4791 or port 18515)", b"udp port 4791 or tcp", b"vlan 7"],
        ),
        "result.json": (_result, [text_of(make()).encode() for make in RESULTS.values()]),
        "recorded": (_recorded, recorded),
    }  # fmt: skip


def texts(rng: Random) -> int:
    """Changed texts to those who read them."""
    from dpuflow.errors import DpuflowError

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(TEXTS):
            name = rng.choice(sorted(texts_of()))
            read, good = texts_of()[name]
            path = Path(folder, name)
            path.write_bytes(said := mutants.mutant_text(rng, rng.choice(good), PIECES))
            try:
                read(path)
            except DpuflowError as error:
                if "\n" in str(error) or not str(error):
                    raise Told(f"{name}: no sentence: {error!r} for {_short(said)}") from None
            except Exception as error:
                raise Told(f"{name}: {error!r} for {_short(said)}") from error
    return TEXTS
