"""The agent as a process, on a live job: API, metrics and webhooks tell of the rank that turns late."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from network import HERE, Pair, inside

pytest.importorskip("uvicorn", reason="the extra agent is not installed")

PORT = 9477
STEPS, FROM, LATE_MS = 400, 150, 40
TOKENS = ("first-token-0123456789", "second-token-0123456789")


def ask(pair: Pair, path: str, token: str) -> Any:
    with inside(pair.b):  # a socket stays in the namespace that it was made in
        asking = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
        asking.connect()
    asking.request("GET", path, headers={"Authorization": f"Bearer {token}"})
    answer = asking.getresponse()
    body = answer.read()
    asking.close()
    return body.decode() if path == "/metrics" else {"http": answer.status, **json.loads(body)}


class Receiver:
    """Takes webhooks within the namespace; the first two tries fail."""

    def __init__(self, pair: Pair) -> None:
        self.notices: list[tuple[int, dict[str, Any]]] = []
        failing = [503, 503]
        notices = self.notices

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = failing.pop() if failing else 204
                if status == 204:
                    notices.append((time.time_ns(), json.loads(body)))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        with inside(pair.b):
            self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for command in ("mpicc", "mpirun"):
        if not shutil.which(command):
            pytest.skip(f"no {command} (packages openmpi-bin, libopenmpi-dev)")
    program = tmp_path_factory.mktemp("job") / "job"
    subprocess.run(["mpicc", "-O1", "-o", str(program), str(HERE / "job.c")], check=True)
    return program


def run_job(pair: Pair, job: Path) -> dict[int, list[int]]:
    """Rank 0 in namespace a, rank 1, which turns late, in b; when each entered each operation, in ns."""
    agent = job.with_name("agent")
    agent.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {pair.b} sh -c "$*"\n')
    agent.chmod(0o755)
    settings = {
        "plm_rsh_agent": str(agent),
        "btl": "tcp,self",
        "btl_tcp_if_include": "10.77.0.0/24",
        "oob_tcp_if_include": "10.77.0.0/24",
    }
    mca = [word for name, value in settings.items() for word in ("--mca", name, value)]
    hosts = ["-H", "10.77.0.1,10.77.0.2", "-np", "2", "--map-by", "node"]
    words = (str(job), "1", str(LATE_MS), str(STEPS), str(FROM))
    done = pair.call(pair.a, "mpirun", "--allow-run-as-root", *mca, *hosts, *words)
    assert done.returncode == 0, done.stderr
    entered: dict[int, list[int]] = {0: [], 1: []}
    for rank, _, at in re.findall(r"enter (\d+) (\d+) (\d+)", done.stderr):
        entered[int(rank)].append(int(at))
    return entered


@pytest.fixture
def configured(pair: Pair, tmp_path: Path) -> Iterator[tuple[Receiver, Path, Path]]:
    pair.give_addresses()
    receiver = Receiver(pair)
    token, config = tmp_path / "token", tmp_path / "agent.yaml"
    token.write_text(TOKENS[0])
    config.write_text(
        "capture: {interfaces: [east]}\n"
        "history: {directory: null}\n"
        f"api: {{listen: '127.0.0.1:{PORT}', token_file: {token}}}\n"
        f"webhooks: [{{url: 'http://127.0.0.1:{receiver.port}/', conditions: [straggler]}}]\n"
    )
    yield receiver, token, config
    receiver.server.shutdown()


def until(said: Any, seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while not (found := said()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


def ready(pair: Pair) -> bool:
    try:
        return bool(ask(pair, "/readyz", "")["http"] == 200)
    except ConnectionError:
        return False


def of_the_late_rank(receiver: Receiver, since_ns: int) -> tuple[int, dict[str, Any]] | None:
    """The first notice of it alone. (On a busy machine, both may have been late in turn before.)"""
    for told_ns, notice in receiver.notices:
        addresses = [notice["endpoints"][each]["address"] for each in notice["finding"]["endpoints"]]
        if addresses == ["10.77.0.2"] and told_ns > since_ns:
            return told_ns, notice
    return None


def test_a_rank_that_turns_late_is_told_by_all_outlets(
    pair: Pair, job: Path, configured: tuple[Receiver, Path, Path]
) -> None:
    receiver, token, config = configured
    process = pair.start(pair.b, sys.executable, "-m", "dpuflow", "agent", "--config", str(config))
    try:
        until(lambda: ready(pair))
        entered = run_job(pair, job)
        late_from_ns = entered[1][FROM]
        told_ns, notice = until(lambda: of_the_late_rank(receiver, late_from_ns))
        assert (notice["finding"]["condition"], notice["finding"]["active"]) == ("straggler", True)
        assert told_ns - late_from_ns < 15_000_000_000, (
            "from the first late step to the webhook, two retries included"
        )
        print(f"from the first late step to the webhook: {(told_ns - late_from_ns) / 1e9:.2f} s")

        time.sleep(4)  # the last steps, too, are settled by now
        lateness = ask(pair, "/api/v1/lateness", TOKENS[0])
        address = [each["address"] for each in lateness["endpoints"]]
        verdicts = {address[each["endpoint"]]: each["verdict"] for each in lateness["lateness"]}
        assert verdicts["10.77.0.2"] in ("late", "intermittent")
        count = 0
        page = ask(pair, "/api/v1/collectives?since_ns=0&limit=100", TOKENS[0])
        while page["collectives"]:
            count += sum(each["op"] == "all_reduce" for each in page["collectives"])
            page = ask(pair, f"/api/v1/collectives?after={page['next']}&limit=100", TOKENS[0])
        print(f"collectives by the API: {count} of {STEPS}")
        assert abs(count - STEPS) <= 2
        text = ask(pair, "/metrics", TOKENS[0])
        said = dict(re.findall(r"^(dpuflow_\w+\{[^}]*\}) ([\d.e+]+)$", text, re.MULTILINE))
        total = sum(float(n) for name, n in said.items() if name.startswith("dpuflow_collectives_total"))
        assert abs(total - STEPS) <= 3
        waits = {name: float(n) for name, n in said.items() if name.startswith("dpuflow_caused_wait_seconds")}
        wait_s = sum(seconds for name, seconds in waits.items() if '"10.77.0.2"' in name)
        waited_ns = sum(max(late - ours, 0) for ours, late in zip(entered[0], entered[1], strict=True))
        print(f"rank-seconds waited: {wait_s:.2f}, by the ranks' own logs {waited_ns / 1e9:.2f}")
        assert wait_s == pytest.approx(waited_ns / 1e9, rel=0.1)

        token.write_text(TOKENS[1])
        process.send_signal(signal.SIGHUP)
        until(lambda: ask(pair, "/api/v1/health", TOKENS[1])["http"] == 200)
        assert ask(pair, "/api/v1/health", TOKENS[0])["http"] == 401
        token.write_text("too short")  # refused, and the one in use stays
        process.send_signal(signal.SIGHUP)
        time.sleep(2)
        assert ask(pair, "/api/v1/health", TOKENS[1])["errors"].get("api", 0) == 0
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors.decode()
    for each in TOKENS:
        assert each not in errors.decode()
    assert b"api.token_file" in errors
