"""What holds up messages on the way, and what was sent again for nothing: worked examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dpuflow
from dpuflow.findings.ports import held_ns, joined_up, stood_ns
from dpuflow.results import Finding
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

LOOP = """
name: ports
cluster: {nodes: 4}
job:
  kind: loop
  iterations: 15
  ops: [{op: all_reduce, bytes: 1MiB}]
"""


def found(folder: Path, text: str) -> dict[str, Finding]:
    write_case(parse_scenario(text, "ports"), str(folder))
    result = dpuflow.analyze([str(path) for path in sorted(folder.glob("*.pcap.gz"))])
    return {each.condition: each for each in result.findings if each.severity != "info"}


def test_what_is_held_is_beyond_the_quickest_quarter_of_its_pair() -> None:
    took = np.array([10] * 29 + [510] + [7] * 29)
    pair = np.array([1] * 30 + [2] * 29)
    late, known = held_ns(took, pair, surely=True)
    assert late.tolist() == [0] * 29 + [500] + [0] * 29
    assert known.tolist() == [True] * 30 + [False] * 29  # of fewer messages nothing is usual


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_job_of_one_step_has_no_port_that_others_fill(tmp_path: Path, seed: int) -> None:
    """Of few messages some receiver's are late by more than three times the others'."""
    job = "job: {kind: training, steps: 1, buckets: 1, bucket_bytes: 1MiB}"
    assert found(tmp_path, f"seed: {seed}\ncluster: {{nodes: 3}}\n{job}") == {}


def test_a_port_that_stands_still_is_told_without_any_mark(tmp_path: Path) -> None:
    pauses = "faults: [{kind: pause, node: 2, at_us: 1000, us: 900, every_us: 2500, times: 40}]"
    told = found(tmp_path, LOOP + pauses)
    assert list(told) == ["head_of_line"]
    assert told["head_of_line"].endpoints[0] == 2
    assert "its port stood still" in told["head_of_line"].summary


def test_a_paused_port_to_which_little_goes_is_not_slow(tmp_path: Path) -> None:
    """Messages and credits of a packet each, over unlike paths: gaps between them are no port's."""
    cluster = "seed: 1\ncluster: {nodes: 6, spray: 4}\n"
    job = "job: {kind: decode, tokens: 12, layers: 4, bytes: 16384}\n"
    pauses = "faults: [{kind: pause, node: 2, at_us: 1000, us: 900, every_us: 3000, times: 200}]"
    told = found(tmp_path, cluster + job + pauses)
    assert list(told) == ["head_of_line"]
    assert told["head_of_line"].endpoints[0] == 2


def test_what_scatter_explains_was_not_held() -> None:
    took, pair = np.arange(10, 30).repeat(2), np.ones(40, np.int64)
    assert held_ns(took, pair, surely=True)[0].tolist() == [0] * 40
    assert held_ns(took, pair, surely=False)[0].tolist() == np.maximum(took - 15, 0).tolist()


def test_the_longest_standstill_of_each_stretch() -> None:
    held = np.array([[0, 50, 200], [60, 100, 260]])
    assert joined_up(held).tolist() == [[0, 200], [100, 260]]
    passed = np.array([[90, 200, 230], [100, 210, 260]])
    assert stood_ns(held, passed) == (90 + 20, 100 + 60)


def test_a_port_that_others_fill_lets_something_through(tmp_path: Path) -> None:
    full = (
        "faults: [{kind: cross_traffic, node: 2, gbps: 95, at_us: 1000, us: 3000, every_us: 6000, times: 30}]"
    )
    assert list(found(tmp_path, LOOP + full)) == ["congestion"]


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_what_a_starved_host_repeats_needlessly_is_no_loss(tmp_path: Path, share: float) -> None:
    assert found(tmp_path, LOOP + f"machine: {{repeat_share: {share}}}") == {}


def test_a_lost_packet_is_counted_once_however_many_are_sent_again(tmp_path: Path) -> None:
    told = found(tmp_path, LOOP + "faults: [{kind: loss, share: 0.005, src: 1}]")["packet_loss"]
    assert told.endpoints[0] == 1
    lost, packets = (int(word.replace(",", "")) for word in told.summary.split()[:3:2])
    assert lost / packets == pytest.approx(0.005, rel=0.4)
    assert "were retransmitted spuriously" in told.summary


def test_a_port_that_others_fill_is_no_slow_link(tmp_path: Path) -> None:
    """One incident: the marks, the messages that take long, and the credits that wait behind them."""
    full = (
        "faults: [{kind: cross_traffic, node: 2, gbps: 95, at_us: 1000, us: 3000, every_us: 6000, times: 30}]"
    )
    told = found(tmp_path, LOOP.replace("1MiB", "8MiB") + full)
    assert list(told) == ["congestion"]
    assert told["congestion"].endpoints[-1] == 2


def test_a_slow_link_is_no_others_traffic(tmp_path: Path) -> None:
    """It marks as well; but nothing on it is ever quick."""
    slow = "faults: [{kind: slow_link, node: 2, gbps: 10, where: down}]"
    told = found(tmp_path, LOOP.replace("1MiB", "8MiB") + slow)
    assert list(told) == ["slow_link"]
    assert 2 in told["slow_link"].endpoints


@pytest.mark.parametrize(("node", "gbps"), [(1, 15), (1, 100)])
def test_a_slow_port_where_no_other_pair_does_the_same(tmp_path: Path, node: int, gbps: int) -> None:
    """Of two ranks that prefill: what comes to a port is held to the pace of all others, whatever they do."""
    job = "{kind: prefill_decode, requests: 6, prefill_us: 6000, kv_bytes: 1MiB, tokens: 16}"
    slow = f"faults: [{{kind: slow_link, node: {node}, gbps: {gbps}}}]"
    told = found(tmp_path, f"cluster: {{nodes: 4}}\njob: {job}\n{slow}")
    assert ("slow_link" in told) == (gbps < 100)
    assert "congestion" not in told
    if gbps < 100:
        assert told["slow_link"].endpoints[0] == node
        assert told["slow_link"].cost_share == pytest.approx(0.35, rel=0.3)


def test_losses_that_keep_a_window_small_are_one_incident(shared: Path) -> None:
    """1 % of the frames are lost: most messages take four times as long, some are as quick as elsewhere."""
    folder = shared / "captures/tcp/net_loss_gloo_allreduce_256k_n4_node1"
    result = dpuflow.analyze([str(path) for path in sorted(folder.glob("node*.pcap.gz"))])
    assert [(row.condition, len(row.consists_of)) for row in result.findings] == [("packet_loss", 0)]
