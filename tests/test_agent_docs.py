"""docs/api.md and docs/metrics.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from dpuflow.agent import counters, metricnames
from dpuflow.agent.config import Config, Webhook
from dpuflow.agent.routes import ROUTES
from dpuflow.agent.tally import BUCKETS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_tables_of_metrics_are_those_of_the_code() -> None:
    text = (DOCS / "metrics.md").read_text()
    said = " ".join(text.split())
    for table in (metricnames.table(), counters.table()):
        assert table in text, f"docs/metrics.md should have:\n{table}"
    assert f"| {Config().metrics.max_peers} | `metrics.max_peers` |" in text
    assert f"| {Config().metrics.max_groups} | `metrics.max_groups` |" in text
    assert f"at {len(BUCKETS) + 1} series" in said


def test_every_path_is_described() -> None:
    text = (DOCS / "api.md").read_text()
    for route in ROUTES:
        assert f"`{route.path}`" in text, route.path
    known = {route.path for route in ROUTES}
    assert set(re.findall(r"`(/(?:api/v1/|metrics|healthz|readyz)[^`]*)`", text)) <= known


def test_the_numbers_are_the_defaults() -> None:
    text = (DOCS / "api.md").read_text()
    api, hook = Config().api, Webhook(url="https://x/")
    assert api.listen in text
    assert f"`api.events` ({api.events})" in text
    assert f"`api.max_clients` ({api.max_clients})" in text
    assert f"`queue` ({hook.queue})" in text
    assert f"`give_up` ({hook.give_up / 60:g} min)" in text


def test_names_follow_the_conventions() -> None:
    for metric in metricnames.METRICS:
        assert re.fullmatch(r"dpuflow_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), metric.name
        assert metric.about.endswith("."), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith("_seconds")
    assert len({metric.name for metric in metricnames.METRICS}) == len(metricnames.METRICS)
