"""Memory of an analysis is bounded in advance: 64 B for each captured byte plus 300 MiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from shapes import SHAPES, capture

MEASURE = """
import sys
from dpuflow.cli import run
status = run(["analyze", sys.argv[1], "--json", sys.argv[2]])
# Not getrusage: its peak counts the parent's memory, which a new process shares until it starts its program.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(status, peak, file=sys.stderr)
"""
SIZE = 200_000


def most_bytes(file: Path) -> tuple[int, dict]:
    """The most memory that an analysis of ``file`` took, in a process of its own, and its result."""
    out = file.with_suffix(".json")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file), str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    status, kilobytes = done.stderr.split()[-2:]
    assert status == "0"
    return int(kilobytes) << 10, json.loads(out.read_text())


@pytest.mark.parametrize("shape", SHAPES)
def test_no_shape_takes_more(shape: str, tmp_path: Path) -> None:
    """A ring of 800 addresses took 514 MiB for 280 kB, headers of four bytes wrote beyond their rows."""
    file = tmp_path / f"{shape}.pcap"
    file.write_bytes(capture(SHAPES[shape](SIZE, Random(shape))))
    taken, result = most_bytes(file)
    assert taken < 64 * file.stat().st_size + (300 << 20)
    assert result["captures"][0]["packets"] > 0


def test_streams_of_tiny_messages_become_bursts_and_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "tiny.pcap"
    file.write_bytes(capture(SHAPES["small_nccl"](600_000, Random(1))))
    taken, result = most_bytes(file)
    assert taken < 64 * file.stat().st_size + (300 << 20)
    assert sum(flow["messages"] for flow in result["flows"]) < 140_000
    assert any("too many messages, smaller than any library's" in each for each in result["limits"])
