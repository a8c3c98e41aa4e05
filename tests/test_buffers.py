"""NCCL's buffers of other sizes than the default: protocol, algorithm and bytes by addresses of slots."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.exchanges.build import build_exchanges
from dpuflow.ingest import ingest
from dpuflow.join import join
from dpuflow.matching.buffers import DEFAULT, LINES_OF_8, RING, STEP, buffers_of
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import Scenario, parse_scenario
from dpuflow.synth.sizes import PROTOCOLS, protocols

MIB = 1 << 20


def analysed(scenario: Scenario, folder: Path) -> Analysis:
    captures = write_case(scenario, str(folder))
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


def mix(ops: str, nccl: dict[str, object]) -> Scenario:
    text = f"name: test\njob: {{kind: loop, iterations: 6, compute_us: 300, ops: [{ops}]}}\n"
    more = settings(cluster={"nodes": 4, "link_gbps": 200}, nccl={"channels": 2, **nccl},
                    faults=[{"kind": "gpu_late", "rank": 2, "us": 300}])  # fmt: skip
    return parse_scenario(text + more, "test.yaml")


@pytest.mark.parametrize(
    ("buffer", "op", "told"),
    [
        (MIB, "op: all_reduce, bytes: 4MiB", ("all_reduce", "ring", 4 * MIB)),  # slots as p2p chunks
        (2 * MIB, "op: reduce_scatter, bytes: 8MiB", ("reduce_scatter", "ring", 8 * MIB)),
        (8 * MIB, "op: all_reduce, bytes: 12MiB", ("all_reduce", "ring", 12 * MIB)),
        # A step is as large as a ring's slot of default buffers.
        (8 * MIB, "op: all_reduce, bytes: 12MiB, algorithm: tree", ("all_reduce", "tree", 12 * MIB)),
        (8 * MIB, "op: all_gather, bytes: 3MiB, algorithm: pat", ("all_gather", "pat", 3 * MIB)),
        (16 * MIB, "op: broadcast, bytes: 24MiB", ("broadcast", "chain", 24 * MIB)),
    ],
)
def test_simple_with_other_buffers(buffer: int, op: str, told: tuple[str, str, int], tmp_path: Path) -> None:
    result = analysed(mix(f"{{{op}}}", {"buffsize": buffer}), tmp_path)
    assert [(c.op, c.algorithm, c.bytes) for c in result.collectives] == [told] * 6
    assert {c.protocol for c in result.collectives} == {"simple"}
    if told[0] != "broadcast":  # there who is late must show itself in slots given back
        assert [e.address for e in result.endpoints if e.id in _late(result)] == ["10.0.0.3"]


def _late(result: Analysis) -> set[int]:
    return {row.endpoint for row in result.lateness if row.verdict == "late"}


def test_all_kinds_of_slots_of_one_job(tmp_path: Path) -> None:
    """A ring of Simple shows the size of the buffer, and so which slots are single steps."""
    ops = (
        "{op: all_reduce, bytes: 4MiB, algorithm: tree}, {op: all_reduce, bytes: 8MiB}, "
        "{op: all_reduce, bytes: 60000, protocol: ll}, {op: all_reduce, bytes: 1MiB, protocol: ll128}"
    )
    scenario = mix(ops, {"buffsize": 2 * MIB})
    result = analysed(scenario, tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())["collectives"]
    assert Counter((c.algorithm, c.protocol, c.bytes) for c in result.collectives) == Counter(
        (t["algorithm"], t["protocol"], None if t["protocol"] == "ll128" else t["bytes"]) for t in truth
    )
    assert _late(result) == {2}
    captures = [ingest([str(f)], f.name, i) for i, f in enumerate(sorted(tmp_path.glob("node*")))]
    transfers = join(captures, clock="trust").transfers
    kinds = buffers_of(transfers, build_exchanges(transfers))
    assert {size: kinds[size] for size in (1 << 19, 1 << 18, 65_536)} == {
        1 << 19: RING, 1 << 18: STEP, 65_536: LINES_OF_8,
    }  # fmt: skip
    assert 1 << 20 not in kinds


def test_default_buffers_are_what_they_were(tmp_path: Path) -> None:
    captures = write_case(loop("op: all_reduce, bytes: 4MiB", iterations=4), str(tmp_path))
    tables = [ingest([str(tmp_path / c.name)], c.name, i) for i, c in enumerate(captures)]
    transfers = join(tables, clock="trust").transfers
    assert buffers_of(transfers, build_exchanges(transfers)) == DEFAULT


def test_slots_of_the_simulator() -> None:
    """A slot's data by protocol: all of Simple's, half of LL's, fifteen sixteenths of LL128's."""
    assert protocols(4 * MIB, 512 << 10, 4_915_200) == PROTOCOLS
    other = protocols(8 * MIB, MIB, 2 * 4_915_200)
    assert (other["simple"].slot, other["simple"].data) == (MIB, MIB)
    assert (other["ll"].slot, other["ll"].data) == (128 << 10, 64 << 10)
    assert (other["ll128"].slot, other["ll128"].data) == (1_228_800, 1_152_000)
