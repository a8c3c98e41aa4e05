"""A rank that the network keeps and that works longer besides; one whose peers' times are bounds alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth_worlds import settings

import dpuflow
from dpuflow.results import Lateness
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario


def of(folder: Path, job: str, address: str, **keys: object) -> Lateness:
    """What is said of the endpoint of that address, in a scripted training job."""
    scenario = parse_scenario(f"name: test\njob: {{kind: training, {job}}}\n" + settings(**keys), "test.yaml")
    captures = write_case(scenario, folder)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
    return next(row for row in result.lateness if row.address == address)


@pytest.mark.parametrize(("late_us", "verdict"), [(200, "unknown"), (0, "on_time")])
def test_a_slow_link_does_not_clear_who_works_longer(late_us: int, verdict: str, tmp_path: Path) -> None:
    """Most of the lateness is the link's; the rest comes in each step, beyond what work scatters by."""
    row = of(
        tmp_path, "steps: 16, layers: 4, buckets: 2, bucket_bytes: 497160, algorithm: ring, forward_us: 83,"
        " optimizer_us: 125, jitter_us: 5", "10.0.0.2",
        cluster={"nodes": 3, "link_gbps": 25, "mtu": 1024},
        faults=[{"kind": "slow_link", "node": 1, "gbps": 2.5, "where": "down"}]
        + [{"kind": "gpu_late", "rank": 1, "us": late_us}] * (late_us > 0),
    )  # fmt: skip
    assert row.verdict == verdict


def test_what_a_rank_works_by_itself_is_no_scatter(tmp_path: Path) -> None:
    """Captured at one node, before its all_to_alls it works for 1 ms, 0.25 ms or not at all: its peers, which
    had entered by then at the latest, show that it comes late in one of them."""
    row = of(
        tmp_path, "steps: 20, layers: 2, buckets: 2, bucket_bytes: 819200, ep_bytes: 819200,"
        " algorithm: ring, forward_us: 500, optimizer_us: 375, jitter_us: 0.5", "10.0.0.2",
        cluster={"nodes": 5, "link_gbps": 400, "mtu": 4096},
        faults=[{"kind": "gpu_late", "rank": 1, "us": 1000, "from_iteration": 6}],
        observation={"only": [1]},
    )  # fmt: skip
    assert row.verdict == "late"
