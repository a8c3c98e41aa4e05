"""NCCL over slow sockets: where the network makes the pauses, they part nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import dpuflow
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

SLOW = """
name: test
seed: {seed}
cluster: {{nodes: {nodes}, link_gbps: {gbps}, latency_us: 30}}
nccl: {{transport: socket, channels: {channels}}}
machine: {{profile: host}}
"""
PIPELINE = """
job: {kind: training, tp: 1, pp: 2, steps: 3, microbatches: 2, layers: 1, buckets: 1, bucket_bytes: 300000,
      pp_bytes: 1143456, forward_us: 3750, optimizer_us: 3750, jitter_us: 200}
"""
TREE = """
job: {kind: loop, iterations: 20, compute_us: 2000, jitter_us: 50, ops: [
      {op: all_reduce, bytes: 65536, algorithm: tree, protocol: ll},
      {op: all_reduce, bytes: 65536, algorithm: tree, protocol: ll, gap_us: 2000}]}
faults: [{kind: gpu_late, rank: 1, us: 5000}]
"""
CHAIN = """
job: {kind: loop, iterations: 12, compute_us: 30000, jitter_us: 200, ops: [{op: reduce, bytes: 12280}]}
observation: {only: [0, 1, 2, 4]}
faults: [{kind: gpu_late, rank: 3, us: 10000}]
"""
LONG = """
name: test
seed: {seed}
cluster: {{nodes: 4, link_gbps: 25, latency_us: 5}}
nccl: {{transport: socket, channels: 2}}
job: {{kind: loop, iterations: 12, compute_us: 300, jitter_us: 5, ops: [{{op: broadcast, bytes: 651968}}]}}
observation: {{loss: 0.02}}
"""


def analysed(text: str, folder: Path) -> Analysis:
    captures = write_case(parse_scenario(text, "test.yaml"), str(folder))
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


@pytest.mark.parametrize("seed", [1, 2])
def test_sends_that_end_with_a_rest_are_parted_by_it(seed: int, tmp_path: Path) -> None:
    """A part is four chunks and a rest; the link pauses between chunks as its sender does between parts."""
    result = analysed(SLOW.format(seed=seed, nodes=4, gbps=0.1, channels=4) + PIPELINE, tmp_path)
    found = Counter((str(c.op), c.bytes) for c in result.collectives)
    assert found == {("send_recv", 1_143_456): 24, ("all_reduce", 300_000): 6}
    assert [each.microbatches for each in result.pipelines] == [2, 2]


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_what_no_pause_parts_is_no_all_clear(seed: int, tmp_path: Path) -> None:
    """Two ranks, one late, send all the time: their messages may be operations of any number and size."""
    result = analysed(SLOW.format(seed=seed, nodes=2, gbps=0.1, channels=4) + TREE, tmp_path)
    assert "on_time" not in {row.verdict for row in result.lateness if row.endpoint == 1}


@pytest.mark.parametrize("seed", [1, 2])
def test_the_first_of_a_chain_whose_others_are_not_told_is_not_cleared(seed: int, tmp_path: Path) -> None:
    """All others wait for it, so it always comes first; it has no capture of its own, and is late."""
    result = analysed(SLOW.format(seed=seed, nodes=5, gbps=0.1, channels=1) + CHAIN, tmp_path)
    assert {row.verdict for row in result.lateness} == {"unknown"}


@pytest.mark.parametrize("seed", [1, 2])
def test_clocks_are_tied_though_every_message_lacks_packets(seed: int, tmp_path: Path) -> None:
    """2 % of the packets missing, hundreds in a message."""
    result = analysed(LONG.format(seed=seed), tmp_path)
    assert {clock.island for clock in result.clocks} == {0}
    found = Counter((str(c.op), c.bytes, len(c.ranks)) for c in result.collectives)
    assert found[("broadcast", 651_968, 4)] >= 10
