"""Captures that hold one of so many packets: told from captures that lost some, and what they show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synth_worlds import settings

import dpuflow
from dpuflow.ingest import ingest
from dpuflow.join.sampled import find_sample, set_aside_samples
from dpuflow.reports.json import json_lines
from dpuflow.reports.sampled import share_interval
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.schema.rows import FLOW, MESSAGE, Transport, Wire
from dpuflow.schema.tables import CaptureInfo, CaptureTables
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

RING = {"kind": "loop", "iterations": 20, "ops": [{"op": "all_reduce", "bytes": "1MiB"}]}
SMALL = {"kind": "loop", "iterations": 200, "ops": [{"op": "all_reduce", "bytes": "64KiB", "protocol": "ll"}]}
PAYLOAD = 20 * 3 * (1 << 20) // 2
"""Of one way of the ring: each rank sends three halves of the buffer in each of the iterations."""


def written(folder: Path, job: dict, *, transport: str = "ib", **observation: object) -> list[Path]:
    text = settings(
        job={**job, "compute_us": 100},
        nccl={"transport": transport},
        observation={**observation, "compress": False},
    )
    write_case(parse_scenario(text, "test.yaml"), str(folder))
    return sorted(folder.glob("*.pcap"))


def analysed(files: list[Path]) -> Analysis:
    return dpuflow.analyze([dpuflow.Vantage(file.stem, (str(file),)) for file in files])


@pytest.mark.parametrize("transport", ["ib", "socket"])
@pytest.mark.parametrize(("job", "one_of"), [(RING, 2), (RING, 8), (RING, 64), (SMALL, 2), (SMALL, 16)])
def test_a_sample_is_told_by_its_numbers(job: dict, one_of: int, transport: str, tmp_path: Path) -> None:
    if transport == "socket":
        job = {**job, "ops": [{"op": "all_reduce", "bytes": job["ops"][0]["bytes"]}]}
    files = written(tmp_path, job, transport=transport, sample=one_of, vantages="switch")
    result = analysed(files)
    (capture,) = result.captures
    assert capture.sampled is not None
    assert abs(capture.sampled / one_of - 1) < 0.15
    assert not result.collectives
    assert not result.findings
    (sentence,) = [line for line in result.limits if "sampled at about 1 of" in line]
    assert "lateness" in sentence
    text = " ".join(" ".join(text_lines(result)).split())
    assert text.startswith("NO VERDICT: about 1 in ")
    assert json.loads("\n".join(json_lines(result)))["captures"][0]["sampled_one_of"] == round(
        capture.sampled, 2
    )


def test_bytes_of_a_sample_hold_within_its_error(tmp_path: Path) -> None:
    result = analysed(written(tmp_path, RING, sample=16, vantages="switch"))
    (capture,) = result.captures
    assert capture.sampled is not None
    for src in range(4):
        mine = [flow for flow in result.flows if (flow.src, flow.dst) == (src, (src + 1) % 4)]
        error = 3 / sum(flow.packets for flow in mine) ** 0.5
        assert abs(capture.sampled * sum(flow.bytes for flow in mine) / PAYLOAD - 1) < error + 0.05


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.1, 0.25])
@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_what_a_capture_lost_is_no_sample(loss: float, transport: str, tmp_path: Path) -> None:
    for file in written(tmp_path, RING, transport=transport, loss=loss):
        assert find_sample(ingest([str(file)], "node", 0, 1, None)) is None


def test_a_sample_beside_whole_captures_is_set_aside(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", RING)
    sampled = written(tmp_path / "sampled", RING, sample=32, vantages="switch")
    alone, beside = analysed(whole), analysed([*whole, *sampled])
    assert len(beside.collectives) == len(alone.collectives) == 20
    assert [row.verdict for row in beside.lateness] == [row.verdict for row in alone.lateness]
    assert any("sampled at about" in line for line in beside.limits)
    assert "NO VERDICT" not in "".join(text_lines(beside))


def capture(seq: list[int], packets: list[int]) -> CaptureTables:
    rows = np.zeros(len(seq), MESSAGE.dtype)
    rows["seq"], rows["packets"], rows["wire"] = seq, packets, Wire.ROCE_WRITE
    rows["seq_end"] = rows["seq"] + rows["packets"]
    flows = np.zeros(1, FLOW.dtype)
    flows["transport"], flows["packets"] = Transport.ROCE, sum(packets)
    nothing = np.zeros(0, MESSAGE.dtype)
    return CaptureTables(CaptureInfo(0, "a", ["a"]), nothing, flows, rows, nothing)


def test_a_queue_pair_that_is_used_again_is_no_sample() -> None:
    first = list(range(0, 1000, 10))
    assert find_sample(capture([*first, *(n + 8_000_000 for n in first)], [10] * 200)) is None
    assert find_sample(capture(list(range(0, 1000, 10)), [2] * 100)) is not None
    assert find_sample(capture(list(range(0, 200, 10)), [2] * 20)) is None  # too few to tell


def test_uneven_holes_are_not_called_a_sample() -> None:
    """One flow lacks half of its packets, the other most: no switch samples so."""
    one, other = capture(list(range(0, 4000, 4)), [2] * 1000), capture(list(range(0, 40_000, 20)), [2] * 2000)
    rows = np.concatenate([one.messages, other.messages])
    rows["flow"][1000:] = 1
    _, said = set_aside_samples([replace(one, messages=rows, flows=np.concatenate([one.flows, other.flows]))])
    assert "of some flows more than of others" in said[0]


def test_share_interval() -> None:
    assert share_interval(0, 0) == (0.0, 1.0)
    low, high = share_interval(10, 100)
    assert (round(low, 3), round(high, 3)) == (0.055, 0.174)  # Wilson, 1927
    assert share_interval(0, 30)[0] == 0.0
    assert 0.1 < share_interval(0, 30)[1] < 0.12
