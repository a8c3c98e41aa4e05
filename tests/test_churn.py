"""Memory registered again and again, played and told; keys that come again are nobody's fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpuflow.errors import OptionError
from dpuflow.results import Analysis
from dpuflow.synth.scenario import parse_scenario
from tests.test_hosts import played, state

RING: dict[str, Any] = {
    "seed": 3,
    "cluster": {"nodes": 4},
    "nccl": {"registered": True},
    "job": {
        "kind": "loop",
        "iterations": 16,
        "ops": [
            {"op": "all_reduce", "bytes": 1 << 20},
            {"op": "all_gather", "bytes": 1 << 20, "gap_us": 500},
        ],
    },
}
CACHES: dict[str, Any] = {
    "seed": 3,
    "cluster": {"nodes": 4},
    "job": {"kind": "prefill_decode", "requests": 12, "kv_bytes": 1 << 20},
}


def at_fault(result: Analysis) -> list[str]:
    (finding,) = [row for row in result.findings if row.condition == "registration_churn"]
    return [result.endpoints[end].address for end in finding.endpoints]


@pytest.mark.parametrize("us", [None, 400])
def test_a_rank_that_registers_each_buffer_anew(tmp_path: Path, us: int | None) -> None:
    faults = [{"kind": "churn", "rank": 2, "us": us}] if us else []
    result = played(tmp_path, RING, *faults)
    assert state(result, "registration_churn") == ("found" if us else "not_found")
    if us:
        (finding,) = [row for row in result.findings if row.severity != "info"]
        assert at_fault(result) == ["10.0.0.3"]
        assert finding.cost_share == pytest.approx(0.22, rel=0.2)  # 0.8 of 3.7 ms
        assert any("late for another reason" in other for other in finding.alternatives)


@pytest.mark.parametrize(("mode", "rank"), [("write", 3), ("read", 1)])
@pytest.mark.parametrize("us", [None, 3000])
def test_the_owner_of_memory_that_caches_are_moved_to_or_from(
    tmp_path: Path, mode: str, rank: int, us: int | None
) -> None:
    """Of a WRITE it is the receiver, of a READ the sender."""
    scenario = CACHES | {"job": CACHES["job"] | {"mode": mode}}
    result = played(tmp_path, scenario, *([{"kind": "churn", "rank": rank, "us": us}] if us else []))
    assert state(result, "registration_churn") == ("found" if us else "not_found")
    if us:
        assert at_fault(result) == [f"10.0.0.{rank + 1}"]


def test_where_all_keys_are_new_nothing_tells_what_would_be_without_that(tmp_path: Path) -> None:
    result = played(tmp_path, RING, *({"kind": "churn", "rank": rank, "us": 400} for rank in range(4)))
    assert state(result, "registration_churn") == "not_judged"


def test_keys_beyond_the_snap_length_are_not_judged(tmp_path: Path) -> None:
    """A BTH ends 54 bytes behind the frame's beginning; the key lies 8 bytes further."""
    fault = {"kind": "churn", "rank": 2, "us": 400}
    result = played(tmp_path, RING | {"observation": {"snaplen": 60}}, fault)
    assert state(result, "registration_churn") == "not_judged"


@pytest.mark.parametrize("job", [{"kind": "decode"}, CACHES["job"] | {"mode": "read"}])
def test_who_registers_nothing_cannot_do_so_again(job: dict[str, Any]) -> None:
    text = str({"job": job, "faults": [{"kind": "churn", "rank": 3, "us": 1}]})
    with pytest.raises(OptionError, match=r"registered|memory"):
        parse_scenario(text, "test")


def test_one_of_two_ranks_registers_each_buffer_anew(tmp_path: Path) -> None:
    """Its credits come as late as its data: all of that is one incident."""
    job = {"kind": "loop", "iterations": 30, "ops": [{"op": "all_to_all", "bytes": 1 << 20}]}
    result = played(
        tmp_path, RING | {"cluster": {"nodes": 2}, "job": job}, {"kind": "churn", "rank": 0, "us": 300}
    )
    (finding,) = [row for row in result.findings if row.severity != "info"]
    assert at_fault(result) == ["10.0.0.1"]
    assert finding.cost_share == pytest.approx(0.13, rel=0.1)
    assert {part.condition for part in finding.consists_of} == {"straggler", "credit_starvation"}
