"""From when a rank's own time counts, and whether its group waits for the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpuflow
from dpuflow.analysis import analyze_tables, read_captures
from dpuflow.arrays.stretches import covered_ns
from dpuflow.entries import Entries, build_entries
from dpuflow.reports.json import json_lines
from dpuflow.schema.rows import EXCHANGE, NEVER, Wire
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import (
    Cluster,
    Fault,
    GpuLate,
    Job,
    Loop,
    Operation,
    Scenario,
    SlowLink,
    Training,
)
from dpuflow.verdicts.inferred import infer
from dpuflow.verdicts.links import excused_ns, held_stretches
from dpuflow.verdicts.waits import group_before, left_before, unread_until

MS = 1_000_000


def blamed(job: Job, faults: list[Fault], folder: Path, nodes: int) -> tuple[set[int], dict[str, Any]]:
    """Endpoints that are called late or intermittent by their own doing; the whole result."""
    scenario = Scenario(name="awaited", seed=7, cluster=Cluster(nodes=nodes), job=job, faults=faults)
    captures = write_case(scenario, str(folder))
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
    analysis = json.loads("\n".join(json_lines(result)))
    rows = [row for row in analysis["lateness"] if row["verdict"] in ("late", "intermittent")]
    return {row["endpoint"] for row in rows if row["cause"] in ("compute", "host")}, analysis


def mixed() -> Loop:
    """Behind a slow link the broadcasts are not recognised."""
    ops = [
        Operation(op="all_reduce", bytes=1 << 20),
        Operation(op="all_gather", bytes=256 << 10, gap_us=300),
        Operation(op="broadcast", bytes=512 << 10, gap_us=300),
    ]
    return Loop(ops=ops, iterations=12, compute_us=1500)


def training() -> Training:
    """Buckets of gradients are reduced beside the tensor parallel all_reduces."""
    return Training(tp=2, pp=1, steps=6, layers=2, tp_bytes=256 << 10, bucket_bytes=1 << 20)


@pytest.mark.parametrize("where", ["down", "up"])
@pytest.mark.parametrize(("job", "nodes"), [(mixed(), 4), (training(), 8)])
def test_a_slow_link_is_no_late_gpu(job: Job, nodes: int, where: Any, tmp_path: Path) -> None:
    found, analysis = blamed(job, [SlowLink(node=1, gbps=5, where=where)], tmp_path, nodes)
    assert not found
    assert "slow_link" in {finding["condition"] for finding in analysis["findings"]}


def test_a_late_gpu_beside_a_slow_link_is_found(tmp_path: Path) -> None:
    job = Loop(ops=[Operation(op="all_reduce", bytes=2 << 20)], iterations=20, compute_us=2000)
    faults: list[Fault] = [SlowLink(node=1, gbps=8, where="up"), GpuLate(rank=3, us=600)]
    found, analysis = blamed(job, faults, tmp_path, 4)
    assert len(found) == 1
    assert {f["condition"] for f in analysis["findings"]} >= {"slow_link", "straggler"}


def entries(rows: list[tuple[int, int, int, int]]) -> Entries:
    """Only what is asked for here: (collective, endpoint, enter, leave) of each row."""
    made = object.__new__(Entries)
    table = np.array(rows, np.int64).T
    made.collective, made.endpoint, made.enter_ns, made.leave_ns = table
    return made


def test_one_after_the_other_within_a_group() -> None:
    """Group 0 has collectives 0 and 2, group 1 has 1, which goes on while 2 begins."""
    rows = entries([(0, 5, 0, 10), (1, 5, 12, 40), (2, 5, 20, 30), (0, 6, 0, 25), (2, 6, 20, 30)])
    kin = group_before(rows, np.array([0, 1, 0]))
    assert kin.tolist() == [-1, -1, 0, -1, 3]
    # Endpoint 6 was still in the first of them.
    assert left_before(rows, kin).tolist() == [NEVER, NEVER, 10, NEVER, NEVER]


def exchange(src: int, dst: int, begin: int, end: int, **more: int) -> dict[str, int]:
    return {
        "src": src, "dst": dst, "data_ns": begin, "data_end_ns": end - 1, "arrived_ns": begin + 1,
        "arrived_end_ns": end, "bytes": 1000, "packets": 4, "wire": Wire.ROCE_WRITE_IMM, **more,
    }  # fmt: skip


def table(*rows: dict[str, int]) -> np.ndarray:
    out = EXCHANGE.zeros(len(rows))
    for row, values in zip(out, rows, strict=True):
        for name, value in values.items():
            row[name] = value
    return out


def test_what_no_collective_was_made_of_may_have_been_waited_for() -> None:
    rows = entries([(0, 5, 100, 110), (1, 5, 300, 310), (1, 6, 300, 310), (1, 7, 300, 310)])
    unread = table(
        exchange(6, 5, 120, 180),
        exchange(6, 5, 350, 390),  # too late for that
        exchange(5, 9, 200, 260),  # to one that takes part in nothing
        exchange(6, 5, 200, 270, wire=Wire.TCP_BURST),  # another program's
    )
    assert unread_until(unread, [], rows).tolist() == [NEVER, 180, 179, NEVER]


def test_only_repetitions_that_hold_something_up_are_trouble() -> None:
    """The second of four took 4 ms longer, a third was repeated for nothing."""
    usual = [exchange(0, 1, 10 * MS * k, 10 * MS * k + MS) for k in range(8)]
    held = exchange(0, 1, 100 * MS, 105 * MS, retransmitted=1)
    vain = exchange(0, 1, 200 * MS, 201 * MS, retransmitted=1)

    def alone(*rows: dict[str, int]) -> int:
        every = table(*usual, *rows)
        again = every["retransmitted"] > 0
        held, _ = held_stretches(every, np.arange(len(every)), again)
        return covered_ns(held, 0, 300 * MS)

    assert alone() == 0
    assert alone(vain) == 0
    assert alone(held, vain) == 4 * MS
    beside = exchange(2, 1, 101 * MS, 105 * MS, retransmitted=1)
    assert alone(held, beside) == 4 * MS  # the same time, once


def test_loss_excuses_those_that_it_kept_no_others(shared: Path) -> None:
    """Ranks that are late by turns; one message of a late collective is held up for a fifth of its job."""
    files = sorted((shared / "captures/tcp/gloo_ddp_n4_rotating").glob("node*.pcap*"))
    vantages = [dpuflow.Vantage(file.name.partition(".")[0], (str(file),)) for file in files]
    worked = analyze_tables(read_captures(vantages, 1, None))
    exchanges, entries = worked.exchanges.copy(), worked.inferred.entries
    span = int(entries.leave_ns.max() - entries.enter_ns[entries.enter_ns != NEVER].min())
    row = int(worked.instances[-3].rows[0])
    exchanges["retransmitted"][row] = 1
    exchanges["arrived_end_ns"][row] += span // 5
    excused = excused_ns(exchanges, worked.instances, entries, exchanges["retransmitted"] > 0)
    assert set(entries.collective[excused > 0].tolist()) <= {len(worked.instances) - k for k in (3, 2, 1)}
    rows = build_entries(exchanges, worked.instances)
    again = infer(worked.joined, exchanges, worked.instances, rows)
    told = [(each.endpoint, each.verdict) for each in worked.inferred.judgements]
    assert {verdict for _, verdict in told} == {"intermittent"}
    assert [(each.endpoint, each.verdict) for each in again.judgements] == told
