"""One-sided puts: messages up to a flag as one, all_to_alls of them, against scripted worlds and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synth_worlds import settings

import dpuflow
from dpuflow.exchanges.flagged import joined_puts
from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, Wire
from dpuflow.scoring.score import score_files
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

FIRST, SECOND = 0, 1


def analysed(tmp_path: Path, **keys: object) -> dict:
    """A scenario's figures, and its analysis under "analysis"."""
    write_case(parse_scenario(settings(**keys), "test.yaml"), str(tmp_path))
    files = sorted(tmp_path.glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    dpuflow.write_json(result, str(tmp_path / "r.json"))
    (score,) = score_files([(str(tmp_path / "r.json"), str(tmp_path))], 30_000, 30_000)
    return {**score.figures(), "analysis": json.loads((tmp_path / "r.json").read_text())}


EXPERTS = {"kind": "experts", "steps": 14, "layers": 2, "tokens": 6}


@pytest.mark.parametrize(
    ("job", "more"),
    [
        ({}, {}),
        ({"flag": "write", "queue_pairs": 1}, {}),
        ({"skew": 0, "queue_pairs": 3}, {}),
        ({}, {"observation": {"clocks": {"offset_us": 3000, "drift_ppm": 10}}}),
        ({}, {"cluster": {"nodes": 3}}),
    ],
)
def test_dispatch_and_combine_are_all_to_alls(job: dict, more: dict, tmp_path: Path) -> None:
    late = [{"kind": "gpu_late", "rank": 2, "us": 100}]
    found = analysed(tmp_path, job={**EXPERTS, **job}, faults=late, **more)
    assert (found["found_share"], found["invented_share"]) == (1.0, 0.0)
    assert (found["op_right"], found["algorithm_right"], found["exact_share"]) == (1.0, 1.0, 1.0)
    assert found["lateness_error_median_ns"] < 2_000
    assert found["bytes_right"] in (1.0, None)
    rows = found["analysis"]["collectives"]
    even = job.get("skew") == 0
    assert all((row["bytes"] is not None) == even for row in rows)
    assert all((row["op_alternatives"] == ["all_gather", "reduce_scatter"]) == even for row in rows)
    late_ones = [row["endpoint"] for row in found["analysis"]["lateness"] if row["verdict"] == "late"]
    assert [found["analysis"]["endpoints"][end]["address"] for end in late_ones] == ["10.0.0.3"]
    assert not any("not matched to a collective" in line for line in found["analysis"]["limits"])


@pytest.mark.parametrize("nodes", [4, 8])
def test_doubling_by_puts_is_recursive_doubling(nodes: int, tmp_path: Path) -> None:
    ops = [{"op": "all_reduce", "bytes": 300_000, "algorithm": "doubling"}]
    job = {"kind": "loop", "iterations": 12, "ops": ops, "compute_us": 100}
    late = [{"kind": "gpu_late", "rank": 1, "us": 60}]
    found = analysed(tmp_path, job=job, cluster={"nodes": nodes}, faults=late)
    for key in ("found_share", "op_right", "algorithm_right", "bytes_right", "exact_share"):
        assert found[key] == 1.0, key


def test_where_some_nodes_alone_were_captured_the_rest_is_not_asked_for(tmp_path: Path) -> None:
    found = analysed(tmp_path, job=EXPERTS, observation={"only": [0, 1]})
    rows = found["analysis"]["collectives"]
    assert len(rows) == 56
    assert {row["op"] for row in rows} == {"all_to_all"}


def row(
    src: int, dst: int, at: int, size: int, order: int, connection: int, wire: Wire = Wire.ROCE_WRITE
) -> np.void:
    out = EXCHANGE.zeros(1)
    for name in EXCHANGE.dtype.names or ():
        if name.endswith("_ns"):
            out[name] = NEVER
    out["src"], out["dst"], out["bytes"], out["order"], out["connection"] = src, dst, size, order, connection
    out["data_ns"], out["data_end_ns"] = at, at + 1
    out["arrived_ns"], out["arrived_end_ns"] = at + 5, at + 6
    out["wire"], out["packets"] = wire, 1
    out["offer"] = out["grant"] = NONE32
    out["data"] = at
    return out[0]


PUT = st.tuples(st.integers(0, 3), st.sampled_from([Wire.ROCE_ATOMIC, Wire.ROCE_WRITE]))


@given(st.lists(st.tuples(PUT, PUT), min_size=1, max_size=6), st.integers(1, 3))
def test_puts_are_joined_up_to_their_flags(puts: list, pairs: int) -> None:
    """Each way the k-th put is the data before the k-th flag of all its queue pairs."""
    rows, expected, at = [], [], 0
    order: dict[tuple[int, int], int] = {}
    for each in puts:
        for way, (count, flag) in enumerate(each):
            total = messages = 0
            first = None
            for pair in range(pairs):
                key = (way, pair)
                for number in range(count + 1):
                    last = number == count
                    size = 8 if last and flag == Wire.ROCE_WRITE else 0 if last else 100 + at
                    wire = flag if last else Wire.ROCE_WRITE
                    rows.append(row(way, 1 - way, at, size, order.get(key, 0), pair, wire))
                    order[key] = order.get(key, 0) + 1
                    first = at if first is None else first
                    total += 0 if last else size
                    messages += 1
                    at += 10
            expected.append((way, first, total, messages, at - 10 + 6))
    table = np.array(rows, EXCHANGE.dtype)
    made = joined_puts(table)
    if not all(any(each[way][0] for each in puts) for way in (FIRST, SECOND)):
        assert made is table  # flags alone, one way, are no puts
        return
    told = [
        (int(r["src"]), int(r["data_ns"]), int(r["bytes"]), int(r["tag"]), int(r["arrived_end_ns"]))
        for r in made
    ]
    assert sorted(told) == sorted(expected)
    for way in (FIRST, SECOND):
        assert made["order"][made["src"] == way].tolist() == list(range(len(puts)))


def test_what_goes_one_way_stays_as_it_is() -> None:
    pages = [row(0, 1, 10 * i, 65536, i, 0) for i in range(5)] + [row(0, 1, 60, 8, 5, 0)]
    table = np.array(pages, EXCHANGE.dtype)
    assert joined_puts(table) is table
