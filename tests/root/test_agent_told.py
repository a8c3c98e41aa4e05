"""The agent as a process, on a live job: API, metrics and webhooks tell of the rank that turns late."""

from __future__ import annotations

import bisect
import contextlib
import http.client
import json
import re
import shutil
import signal
import statistics
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from network import Pair, inside
from test_live_job import job, run_job  # noqa: F401

from dpuflow.agent.tracker import pages_here

pytest.importorskip("uvicorn", reason="the extra agent is not installed")

PORT = 9477
STEPS, FROM, LATE_MS = 400, 150, 40
RULES = Path(__file__).parents[2] / "deploy/prometheus/rules.yml"
ALERT = (
    'ALERTS{alertname=~"DpuflowCriticalFinding|DpuflowFinding",condition="straggler",endpoint="10.77.0.2"}'
)
DASHBOARD = RULES.parents[1] / "grafana/dpuflow.json"
ABSENT = {
    *("Transfers (KV caches): rate while under way", "Transfers and their pages per second"),
    *("Wait for a transfer before the first token: median and 99th percentile", "Tokens per second"),
    *("Pause frames captured", "Time paused, by the NIC", "Congestion, by the NIC"),
    *("Retransmission, by the NIC", "History"),
}
"""Panels about what this job or machine lacks: KV caches, tokens, PFC, counters of a NIC, a history."""
TOKENS = ("first-token-0123456789", "second-token-0123456789")


def ask(pair: Pair, path: str, token: str, port: int = PORT) -> Any:
    with inside(pair.b):  # a socket stays in the namespace that it was made in
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
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


def until(said: Any, seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (found := said()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def prometheus(pair: Pair, folder: Path, token: Path) -> Iterator[Callable[[str], float | None]]:
    """Prometheus beside the agent; what is yielded evaluates an expression, None while there is no answer."""
    config = folder / "prometheus.yml"
    scraped = f"job_name: dpuflow, authorization: {{credentials_file: {token}}}"
    config.write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{RULES}]\n"
        f"scrape_configs: [{{{scraped}, static_configs: [{{targets: ['127.0.0.1:{PORT}']}}]}}]\n"
    )
    port = 9476
    process = pair.start(
        pair.b,
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
    )

    def evaluate(expression: str) -> float | None:
        path = "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            found = ask(pair, path, "", port)["data"]["result"]
        except (OSError, ValueError, KeyError):  # not ready yet
            return None
        return float(found[0]["value"][1]) if found else None

    try:
        yield evaluate
    finally:
        process.terminate()
        process.communicate(timeout=120)


def empty_panels(evaluate: Callable[[str], float | None]) -> set[str]:
    """The dashboard's panels without any data, over the last five minutes."""

    def shown(expression: str) -> bool:
        for name, value in (("$__rate_interval", "5m"), ("$instance", ".*"), ("$group", ".*")):
            expression = expression.replace(name, value)
        return evaluate(expression) is not None

    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]
        for panel in panels
        if panel.get("targets") and not any(shown(target["expr"]) for target in panel["targets"])
    }


def ready(pair: Pair) -> bool:
    try:
        return bool(ask(pair, "/readyz", "")["http"] == 200)
    except OSError:
        return False


def settled(pair: Pair) -> bool:
    """Whether nothing was published for longer than analyses may be apart."""
    before = ask(pair, "/api/v1/health", TOKENS[0])["collectives"]
    time.sleep(6)
    return bool(ask(pair, "/api/v1/health", TOKENS[0])["collectives"] == before)


def lateness_of(
    address: str, page: dict[str, Any], entered: dict[int, list[int]]
) -> Iterator[tuple[int, int]]:
    """Of each collective of the page where its lateness is known: the step of the job, and the lateness."""
    began = [min(both) for both in zip(entered[0], entered[1], strict=True)]
    for collective in page["collectives"]:
        for rank in collective["ranks"]:
            known = rank["lateness_ns"] is not None and rank["bound"] in ("exact", "at_least")
            if known and page["endpoints"][rank["endpoint"]]["address"] == address:
                yield bisect.bisect(began, collective["end_ns"]) - 1, rank["lateness_ns"]


def of_the_late_rank(receiver: Receiver, since_ns: int) -> tuple[int, dict[str, Any]] | None:
    """The first notice of it alone. (On a busy machine, both may have been late in turn before.)"""
    for told_ns, notice in receiver.notices:
        addresses = [notice["endpoints"][each]["address"] for each in notice["finding"]["endpoints"]]
        if addresses == ["10.77.0.2"] and told_ns > since_ns:
            return told_ns, notice
    return None


def test_a_rank_that_turns_late_is_told_by_all_outlets(
    pair: Pair,
    job: Path,  # noqa: F811
    configured: tuple[Receiver, Path, Path],
    tmp_path: Path,
) -> None:
    receiver, token, config = configured
    log = tmp_path / "log"
    command = ("dpuflow", "agent", "--user", "root", "--config", str(config))
    with log.open("wb") as stream:
        process = pair.start(pair.b, sys.executable, "-m", *command, stderr=stream)
    with contextlib.ExitStack() as beside:
        evaluate = None
        if shutil.which("prometheus"):  # Debian's, which the other tests of metrics need, too
            evaluate = beside.enter_context(prometheus(pair, tmp_path, token))
        beside.callback(process.wait, 120)
        beside.callback(process.send_signal, signal.SIGTERM)
        until(lambda: ready(pair))
        entered = run_job(pair, job, STEPS, FROM, LATE_MS)
        late_from_ns = entered[1][FROM]
        told_ns, notice = until(lambda: of_the_late_rank(receiver, late_from_ns))
        assert (notice["finding"]["condition"], notice["finding"]["active"]) == ("straggler", True)
        print(f"from the first late step to the webhook: {(told_ns - late_from_ns) / 1e9:.2f} s")
        if evaluate is not None:  # the shipped rules name the late one, with a link that leads somewhere
            assert until(lambda: evaluate(ALERT)) == 1
            assert evaluate(f'{ALERT[:-1]},runbook=~"{pages_here()}/.*[.]md#straggler"}}') == 1

        # The last steps, too, are settled once there is nothing left to wait for.
        until(lambda: ask(pair, "/api/v1/health", TOKENS[0])["collectives"] >= STEPS - 2)
        until(lambda: settled(pair))
        lateness = ask(pair, "/api/v1/lateness", TOKENS[0])
        address = [each["address"] for each in lateness["endpoints"]]
        verdicts = {address[each["endpoint"]]: each["verdict"] for each in lateness["lateness"]}
        assert verdicts["10.77.0.2"] in ("late", "intermittent")
        count, late_by = 0, dict[int, int]()
        page = ask(pair, "/api/v1/collectives?since_ns=0&limit=100", TOKENS[0])
        while page["collectives"]:
            count += len(page["collectives"])
            for step, late_ns in lateness_of("10.77.0.2", page, entered):
                late_by[step] = max(late_by.get(step, 0), late_ns)
            page = ask(pair, f"/api/v1/collectives?after={page['next']}&limit=100", TOKENS[0])
        print(f"collectives by the API: {count} of {STEPS}")
        # How many collectives the messages are read as is the analysis' matter (a part of a job of two ranks
        # may be read as two exchanges for each ring); here, that none is missing and metrics and API agree.
        assert count >= STEPS - 2
        text = ask(pair, "/metrics", TOKENS[0])
        said = dict(re.findall(r"^(dpuflow_\w+\{[^}]*\}) ([\d.e+]+)$", text, re.MULTILINE))
        total = sum(float(n) for name, n in said.items() if name.startswith("dpuflow_collectives_total"))
        assert total == count
        waits = {name: float(n) for name, n in said.items() if name.startswith("dpuflow_caused_wait_seconds")}
        wait_s = sum(seconds for name, seconds in waits.items() if '"10.77.0.2"' in name)
        told = next(row for row in lateness["lateness"] if address[row["endpoint"]] == "10.77.0.2")
        assert wait_s == pytest.approx(told["caused_wait_ns"] / 1e9, rel=1e-9)
        waited_ns = [late - ours for ours, late in zip(entered[0], entered[1], strict=True)]
        logged_s = sum(max(each, 0) for each in waited_ns) / 1e9
        print(f"rank-seconds waited: {wait_s:.2f}, by the ranks' own logs {logged_s:.2f}")
        # A busy machine holds a rank up between its line of log and its first packet: that moves the sum by
        # what the worst steps were held up, the median by what half of them were. Where a step is read as two
        # exchanges, the rank is late in the first alone, and the median over all is that of both.
        assert len(late_by) >= STEPS - 2
        assert statistics.median(late_by.values()) == pytest.approx(statistics.median(waited_ns), rel=0.2)
        if count == STEPS:
            assert told["median_ns"] == pytest.approx(statistics.median(waited_ns), rel=0.2)
        assert wait_s == pytest.approx(logged_s, rel=0.5)  # neither left out nor counted twice

        if evaluate is not None:
            until(lambda: evaluate('up{job="dpuflow"} == 1'))
            until(lambda: evaluate("sum(dpuflow_collectives_total)") == total)
            caused = until(lambda: evaluate('sum(dpuflow_caused_wait_seconds_total{peer="10.77.0.2"})'))
            assert caused == pytest.approx(wait_s, rel=1e-6)
            quantile = "histogram_quantile(0.9, sum by (le) (dpuflow_lateness_seconds_bucket))"
            assert 0.01 < until(lambda: evaluate(quantile)) <= 0.1  # LATE_MS, in its bucket

        token.write_text(TOKENS[1])
        process.send_signal(signal.SIGHUP)
        until(lambda: ask(pair, "/api/v1/health", TOKENS[1])["http"] == 200)
        assert ask(pair, "/api/v1/health", TOKENS[0])["http"] == 401
        token.write_text("too short")  # refused, and the one in use stays
        process.send_signal(signal.SIGHUP)
        until(lambda: "api.token_file" in log.read_text())
        assert ask(pair, "/api/v1/health", TOKENS[1])["errors"].get("api", 0) == 0
    assert process.returncode == 0, log.read_text()
    for each in TOKENS:
        assert each not in log.read_text()


def test_every_panel_has_data_on_one_live_node(
    pair: Pair,
    job: Path,  # noqa: F811
    configured: tuple[Receiver, Path, Path],
    tmp_path: Path,
) -> None:
    """Of the dashboard as it is shipped, but for what the job or the machine does not have."""
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (package prometheus; make setup installs it)")
    _, token, config = configured
    command = (sys.executable, "-m", "dpuflow", "agent", "--user", "root", "--config", str(config))
    with (tmp_path / "log").open("wb") as stream, prometheus(pair, tmp_path, token) as evaluate:
        process = pair.start(pair.b, *command, stderr=stream)
        try:
            until(lambda: ready(pair))
            work = threading.Thread(target=run_job, args=(pair, job, 150, 50, 100))
            work.start()
            empty, end = empty_panels(evaluate), time.monotonic() + 300
            while empty - ABSENT and time.monotonic() < end:  # steps are shown while there are any
                empty &= empty_panels(evaluate)
            work.join()
            assert not empty - ABSENT
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
