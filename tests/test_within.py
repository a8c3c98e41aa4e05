"""GPUs behind one adapter: which of a ring's first messages shows which of them, and when."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dpuflow
from dpuflow.entries import acts
from dpuflow.entries.acts import _entry, _Lane
from dpuflow.schema.rows import NEVER, Op
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario


def lane(start: list[int], idle: list[int], lay_ns: int = 1000) -> tuple[np.ndarray, _Lane]:
    starts = np.array(start)
    return starts, _Lane(0, np.arange(len(start)), np.diff(starts), np.array(idle), lay_ns)


@pytest.mark.parametrize(
    ("start", "idle", "when", "waited", "inner"),
    [
        ([0, 3, 6], [1, 1], 0, False, False),  # they follow each other: all had entered with the first
        ([0, 3, 4000], [1, 3990], 4000, False, True),  # the third GPU came late
        ([0, 4000, 4003], [3990, 1], 4000, False, True),  # the second one did; the third was there
        ([0, 3, 4000], [1, 2], 4000, True, True),  # or the credit did
        ([0, 3, 4000], [1, 40], 4000, True, True),  # and a host takes its time to use it
        ([0, 4000, 9000], [3990, 2], 9000, True, True),
        ([4000, 4003, 4006], [1, 1], 4000, False, False),  # that at the exit came late itself
    ],
)
def test_the_last_gpu_of_a_node(
    start: list[int], idle: list[int], when: int, waited: bool, inner: bool
) -> None:
    found = _entry(*lane(start, idle), apart=30.0, idle=10.0)
    assert (found[0], bool(found[1]), bool(found[3])) == (when, waited, inner)


def test_what_waited_for_a_credit_had_waited_for_what_came_before_it() -> None:
    *_, since = _entry(*lane([0, 4000, 9000], [3990, 2]), apart=30.0, idle=10.0)
    assert since == 4000
    *_, since = _entry(*lane([0, 4000], [2], lay_ns=5), apart=30.0, idle=10.0)
    assert since == NEVER  # its own first message may have waited for a credit, too


@pytest.mark.parametrize(
    ("case", "late", "by_node", "exact"),
    [("shared-nic-n4g2-late5", 2, True, 1.0), ("n27-shared-nic-n3g4-ring-late4", 1, False, 0.6)],
)
def test_a_late_gpu_behind_an_adapter_is_told(
    shared: Path, case: str, late: int, by_node: bool, exact: float
) -> None:
    """The node is named where it is not the GPU at the exit, and no entry is off by more than 0.2 ms."""
    folder = shared / "captures" / "nccl" / case
    files = sorted(folder.glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    said = {row.endpoint: row for row in result.lateness}
    assert [end for end, row in said.items() if row.verdict == "late"] == [late]
    assert said[late].node == (late if by_node else None)
    true = json.loads((folder / "truth.json").read_text())["collectives"]
    bounds = [rank.bound for each in result.collectives for rank in each.ranks]
    assert bounds.count("exact") >= exact * len(bounds)
    gpus = len(true[0]["enter_ns"]) // len(files)
    for each, happened in zip(result.collectives, true, strict=True):
        enter = np.array(happened["enter_ns"]).reshape(-1, gpus).max(axis=1)
        for rank in each.ranks:
            if rank.bound == "exact":
                assert rank.lateness_ns is not None
                assert abs(rank.lateness_ns - (enter[rank.endpoint] - enter.min())) < 200_000


def test_lanes_of_unlike_lengths_share_one_usual_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    def lane(row: int, count: int) -> Any:
        apart = np.full(count - 1, 10, np.int64)
        return acts._Lane(row, np.arange(count), apart, apart, 0)

    monkeypatch.setattr(acts, "gpus_within", lambda instance: 2)
    monkeypatch.setattr(acts, "_lanes", lambda *args: [lane(0, 3), lane(1, 5)])
    instance = SimpleNamespace(
        rows=range(5),
        op=Op.ALL_REDUCE,
        placement=SimpleNamespace(ranks=4),
        slicing=SimpleNamespace(protocol="simple"),
    )
    picked = {"data_ns": np.arange(5) * 10}
    places: Any = SimpleNamespace(instances=[instance], picked=picked, sender=np.zeros(5, np.int64))
    assert acts.last_within(places).rows.tolist() == [0, 1]


@pytest.mark.parametrize("nics", [1, 8])
@pytest.mark.parametrize("place", [1, 3])
def test_a_late_gpu_is_told_with_its_cost_behind_the_adapter_of_its_node(
    tmp_path: Path, nics: int, place: int
) -> None:
    """Several loops of large messages: those before it wait for credits, and are accused of nothing.

    With an adapter a GPU the ring may leave its node by one that is not the late one's: no other is accused.
    """
    scenario = {
        "name": "x",
        "cluster": {"nodes": 3, "gpus_per_node": 8, "nics_per_node": nics},
        "nccl": {"channels": 2},
        "job": {"kind": "loop", "iterations": 8, "ops": [{"op": "all_reduce", "bytes": 40 << 20}]},
        "faults": [{"kind": "gpu_late", "us": 2000, "rank": 8 + place}],
    }
    write_case(parse_scenario(json.dumps(scenario), "x"), str(tmp_path))
    result = dpuflow.analyze([str(path) for path in sorted(tmp_path.glob("*.pcap.gz"))])
    late = {result.endpoints[row.endpoint].address for row in result.lateness if row.verdict == "late"}
    if nics > 1:
        assert late <= {f"10.{place}.0.2"}
        return
    assert late == {"10.0.0.2"}
    loud = [each for each in result.findings if each.severity != "info"]
    assert [each.severity for each in loud if each.condition in ("straggler", "node_skew")] == ["critical"]
    assert 0.15 < (loud[0].cost_share or 0) < 0.35  # 2 ms of 7 to 9
