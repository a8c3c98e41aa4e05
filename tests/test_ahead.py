"""Chains whose root runs ahead of a late receiver, as far as NCCL's slots allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

if TYPE_CHECKING:
    from pathlib import Path

    from dpuflow.synth.scenario import Scenario


def analyzed(scenario: Scenario, directory: Path) -> dpuflow.Result:
    captures = write_case(scenario, directory)
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(directory / c.name),)) for c in captures])


def said(result: dpuflow.Result) -> dict[str, str]:
    address = {end.id: end.address for end in result.endpoints}
    return {address[each.endpoint]: each.verdict for each in result.lateness}


UNTOLD = pytest.mark.xfail(strict=True, reason="slots given back date nothing: the receiver is unknown")
EVEN = pytest.mark.xfail(strict=True, reason="late in half of all, as one of two in turn is: called steady")


@pytest.mark.parametrize(("size", "late"), [("8200", 1), pytest.param("27KiB", 2, marks=UNTOLD)])
def test_a_root_that_waits_for_credits_hides_no_late_receiver(size: str, late: int, tmp_path: Path) -> None:
    """When its slots are used up the root takes as long for an operation as the late rank: the lateness
    came in the first operations only, and was called intermittent."""
    keys = settings(
        cluster={"nodes": 4}, nccl={"channels": 2}, faults=[{"kind": "gpu_late", "rank": late, "us": 40}]
    )
    result = analyzed(loop(f"op: broadcast, bytes: {size}", keys, iterations=28), tmp_path)
    found = said(result)
    assert found[f"10.0.0.{late + 1}"] == "late"
    assert "late" not in {v for k, v in found.items() if k != f"10.0.0.{late + 1}"}


@pytest.mark.parametrize(("root", "late"), [(2, 3), (0, 1)])
def test_a_root_that_is_held_from_the_second_operation_on(root: int, late: int, tmp_path: Path) -> None:
    """It shows its own pace once only, and the late rank was unknown: late in too few collectives."""
    keys = settings(
        cluster={"nodes": 4}, nccl={"channels": 2}, faults=[{"kind": "gpu_late", "rank": late, "us": 1000}]
    )
    found = said(analyzed(loop(f"op: broadcast, bytes: 92928, root: {root}", keys, iterations=24), tmp_path))
    assert found[f"10.0.0.{late + 1}"] == "late"
    assert "late" not in {v for k, v in found.items() if k != f"10.0.0.{late + 1}"}


def test_a_peer_that_waits_for_credits_is_no_measure_of_hosts(tmp_path: Path) -> None:
    """The rank before the late one waits for its credits, its data long there. How long it takes to send was
    taken for what a host needs, and the late rank for one that might have waited as well."""
    keys = settings(
        cluster={"nodes": 8},
        nccl={"channels": 2, "qps_per_connection": 4, "split_data_on_qps": True},
        faults=[{"kind": "gpu_late", "rank": 3, "us": 50}],
    )
    found = said(analyzed(loop("op: broadcast, bytes: 60800", keys, iterations=28), tmp_path))
    assert found["10.0.0.4"] == "late"
    assert not {"late", "intermittent"} & {v for k, v in found.items() if k != "10.0.0.4"}


@pytest.mark.parametrize("us", [pytest.param(60, marks=EVEN), 100, 150])
def test_two_ranks_in_turn_are_no_steps_of_two(us: int, tmp_path: Path) -> None:
    """Every other operation begins late, and its pause made steps of two operations, late at each."""
    keys = settings(cluster={"nodes": 2}, faults=[{"kind": "gpu_late", "mode": "rotating", "us": us}])
    ops = "[{op: all_reduce, bytes: 590000, algorithm: tree}]"
    job = f"{{kind: loop, iterations: 16, compute_us: 300, jitter_us: 0.5, ops: {ops}}}"
    result = analyzed(parse_scenario(f"name: turns\njob: {job}\n{keys}", "test.yaml"), tmp_path)
    assert {(each.verdict, each.steadiness) for each in result.lateness} == {("intermittent", "rotating")}


def test_a_wire_that_is_still_busy_hides_no_late_gpu_over_sockets(tmp_path: Path) -> None:
    """A rank is done when its last data is in the staging buffer. It was taken to have left when the wire
    had sent it, 50 us after its peers each time, and to have worked no longer than they."""
    keys = settings(
        cluster={"nodes": 4, "link_gbps": 25},
        nccl={"transport": "socket", "channels": 1},
        faults=[{"kind": "gpu_late", "rank": 1, "us": 50}],
    )
    found = said(analyzed(loop("op: all_reduce, bytes: 3MiB", keys, iterations=20), tmp_path))
    assert found == {"10.0.0.1": "on_time", "10.0.0.2": "late", "10.0.0.3": "on_time", "10.0.0.4": "on_time"}
