"""Credits for registered buffers wait for the receiver's kernel: late ones are no sign of a late host."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth_worlds import settings

import dpuflow
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario


@pytest.mark.parametrize(
    ("fault", "registered", "size", "cause"),
    [
        ("gpu_late", True, "8MiB", "compute"),
        ("gpu_late", True, "1MiB", "compute"),
        ("slow_host", True, "8MiB", "compute"),  # the packets are the same
        ("gpu_late", False, "8MiB", "compute"),
        ("slow_host", False, "8MiB", "host"),
    ],
)
def test_only_credits_that_run_ahead_tell_of_a_host(
    fault: str, registered: bool, size: str, cause: str, tmp_path: Path
) -> None:
    text = settings(
        job={"kind": "loop", "iterations": 15, "ops": [{"op": "all_reduce", "bytes": size}]},
        nccl={"registered": registered},
        faults=[{"kind": fault, "rank": 1, "us": 300}],
    )
    write_case(parse_scenario(text, "test.yaml"), str(tmp_path))
    files = sorted(tmp_path.glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    (late,) = [row for row in result.lateness if row.verdict == "late"]
    assert (late.endpoint, late.cause) == (1, cause)
