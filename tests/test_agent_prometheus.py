"""Prometheus itself scrapes the agent; each expression of the dashboard and the alerts finds its series."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from agent_http import Running, make_certificate, serving
from agent_worlds import finding, health, window

from dpuflow.agent import counters, ethtool, metricnames
from dpuflow.agent.board import Board
from dpuflow.agent.config import Api, Metrics, Webhook

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dpuflow.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
TOKEN = "0123456789abcdef-token"
MISSING = "Prometheus is not installed (package prometheus; make setup installs it)"


def dashboard_expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    return [each["expr"] for each in [*targets, *board["annotations"]["list"]]]


def rule_expressions() -> list[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"\b(?:dpuflow|process|python)_\w+", bare))


def exported() -> set[str]:
    own = {metric.shown for metric in metricnames.METRICS if metric.kind != "histogram"}
    for metric in metricnames.METRICS:
        if metric.kind == "histogram":
            own |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    nic = {counters.shown(counter) for counter in counters.LABELS}
    return own | nic | {"process_resident_memory_bytes", "process_cpu_seconds_total"}


def test_dashboard_and_alerts_use_exported_names_only() -> None:
    used = set().union(*map(names_in, dashboard_expressions() + rule_expressions()))
    assert used <= exported(), used - exported()
    # And what the agent says of itself and of jobs is on the dashboard, but for what only alerts, joins or
    # a look at the configuration need.
    shown = set().union(*map(names_in, dashboard_expressions()))
    own = {
        name
        for name in exported()
        if not name.startswith(("dpuflow_rdma_", "dpuflow_ethtool_", "dpuflow_netdev_"))
    }
    assert own - shown == {
        "dpuflow_collective_duration_seconds_sum",
        "dpuflow_collective_duration_seconds_count",
        "dpuflow_lateness_seconds_sum",
        "dpuflow_lateness_seconds_count",
        "dpuflow_lateness_lower_bound_seconds_sum",
        "dpuflow_lateness_lower_bound_seconds_count",
        "dpuflow_transfer_wait_seconds_sum",
        "dpuflow_transfer_wait_seconds_count",
        "dpuflow_agent_last_window_timestamp_seconds",
        "dpuflow_agent_interface_captured",
        "dpuflow_agent_held_messages",
        "dpuflow_agent_held_flows",
        "dpuflow_agent_history_oldest_timestamp_seconds",
        "dpuflow_agent_history_writing",
        "dpuflow_agent_clock_steps_total",
        "dpuflow_agent_config_generation",
        "dpuflow_agent_missed_events_total",
        "dpuflow_agent_label_names_evicted_total",
        "dpuflow_api_requests_total",
        "dpuflow_webhook_retries_total",
        "process_cpu_seconds_total",
    }


def test_the_dashboard_is_laid_out_without_overlap() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_promtool_accepts_rules_and_configuration() -> None:
    if shutil.which("promtool") is None:
        pytest.skip(MISSING)
    folder = DEPLOY / "prometheus"
    for command in (
        ["promtool", "check", "rules", "rules.yml"],
        ["promtool", "check", "config", "--syntax-only", "prometheus.yml"],
        ["promtool", "test", "rules", "rules_test.yml"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@dataclass
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **fields: str) -> Any:
        answer = urllib3.request("GET", self.url + path, fields=fields, retries=False, timeout=60)
        told = json.loads(answer.data)
        assert told["status"] == "success", told
        return told["data"]

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.get("/api/v1/query", query=expression)["result"]
        return result

    def until(self, expression: str, seconds: float = 120) -> list[Any]:
        """The answer, once there is one."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.query(expression):
                return found
            time.sleep(0.25)
        raise AssertionError(f"no answer to {expression}: {self.get('/api/v1/targets')['activeTargets']}")


@contextmanager
def prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        *(
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
        ),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            made = Prometheus(f"http://127.0.0.1:{port}")
            end = time.monotonic() + 120
            while True:
                try:
                    if urllib3.request("GET", made.url + "/-/ready", retries=False, timeout=10).status == 200:
                        break
                except urllib3.exceptions.HTTPError:
                    pass
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.1)
            yield made
        finally:
            process.terminate()
            process.wait(60)


def made_sysfs(root: Path) -> str:
    """A BlueField's counters, each at 1000."""
    for counter in counters.RDMA:
        path = root / "class/infiniband/mlx5_0/hw_counters" / counter.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1000\n")
    for counter in counters.NETDEV:
        path = root / "class/net/p0/statistics" / counter.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1000\n")
    (root / "class/net/p0/device").mkdir()
    return str(root)


@contextmanager
def busy(running: Running, board: Board) -> Iterator[None]:
    """Windows, findings and health on the board, five times a second."""
    stop = threading.Event()

    def work() -> None:
        number = 0
        while not stop.wait(0.2):
            states = [finding(f"s{number}", active=True), finding(f"s{number - 8}", active=False)]
            made = window(number)
            for rank in made.analysis.collectives[0].ranks[:1]:
                rank.bound, rank.lateness_ns = "unobservable", None
            for rank in made.analysis.collectives[1].ranks[:1]:
                rank.bound, rank.lateness_ns = "at_least", 2_000_000
            board.publish(made, tuple(states))
            board.report(health(time_ns=time.time_ns()))
            board.count_error("history")
            number += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_prometheus_scrapes_the_agent_and_the_dashboard_has_something_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip(MISSING)
    statistics = {
        counter.name.replace("{priority}", "3").replace("{lane}", "0"): 1000 for counter in counters.ETHTOOL
    }
    monkeypatch.setattr(ethtool.EthtoolStatistics, "read", lambda self, name: statistics)
    cert, key = make_certificate(tmp_path, "agent")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    board = Board()
    api = Api(listen="127.0.0.1:0", token_file=str(token), tls_cert=cert, tls_key=key)
    hooks = [Webhook(url="http://127.0.0.1:9/", name="scheduler", give_up=0.0)]
    metrics = Metrics(sysfs=made_sysfs(tmp_path / "sys"))
    with serving(board, api, hooks, metrics=metrics) as running, busy(running, board):
        target = running.url.removeprefix("https://")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {
                    "job_name": "dpuflow",
                    "scheme": "https",
                    "authorization": {"credentials_file": str(token)},
                    "tls_config": {"ca_file": cert},
                    "static_configs": [{"targets": [target]}],
                }
            ],
        }
        with prometheus(tmp_path, config) as asked:
            (up,) = asked.until('up{job="dpuflow"} == 1')
            assert up["metric"]["instance"] == target
            # Four collectives in each of the five windows a second; less while the range is not filled yet.
            rate = asked.until("sum(rate(dpuflow_collectives_total[6s])) > 12")[0]["value"][1]
            assert float(rate) < 30
            buckets = 'rate(dpuflow_lateness_seconds_bucket{peer="10.0.0.2"}[6s])'
            late = asked.until(f"histogram_quantile(0.5, sum by (le) ({buckets}))")
            assert 0.003 < float(late[0]["value"][1]) <= 0.01  # 5 ms, in that bucket
            for expression in dashboard_expressions():
                meant = expression.replace("$__rate_interval", "6s").replace("[1m]", "[6s]")
                meant = meant.replace('"$instance"', '".*"').replace('"$group"', '".*"')
                asked.until(meant)
            told = {alert["labels"]["alertname"] for alert in asked.get("/api/v1/alerts")["alerts"]}
            assert {"DpuflowFinding", "DpuflowRankLate"} <= told
            about = {a["annotations"]["summary"] for a in asked.get("/api/v1/alerts")["alerts"]}
            assert any("10.0.0.2" in text for text in about), about
            assert not any(target in text for text in about if "straggler" in text)
            loaded = asked.get("/api/v1/rules")["groups"]
            assert {rule["health"] for group in loaded for rule in group["rules"]} == {"ok"}
            families = asked.get("/api/v1/metadata")
            assert families["dpuflow_flow_packets"][0]["type"] == "counter"
