"""/metrics: what the board holds, as Prometheus wants it, with bounded and never falling series."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from agent_worlds import ADDRESSES, S, board, finding, health, window
from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from dpuflow.agent import metrics
from dpuflow.agent.board import Board, Traffic, Window
from dpuflow.agent.bounded import IDLE_S, Bounded
from dpuflow.agent.config import Metrics as Settings
from dpuflow.agent.tally import BUCKETS, JUDGED_S, Histogram, Tally, group_name
from dpuflow.results import Analysis

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
GROUP = group_name(ADDRESSES)


def scrape(made: metrics.Metrics) -> Series:
    families = text_string_to_metric_families(generate_latest(made.registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def of(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def settled(made: metrics.Metrics, windows: int) -> None:
    for _ in range(500):
        if made.tally.windows >= windows:
            return
        made._thread.join(0.01)
    raise AssertionError("the windows did not arrive")


@pytest.fixture
def running() -> Iterator[tuple[Board, metrics.Metrics]]:
    held = Board()
    made = metrics.start(held, Settings(nic_counters=False))
    yield held, made
    made.close()


def publish(held: Board, made: metrics.Metrics, count: int) -> None:
    for number in range(count):
        held.publish(window(number), (finding(active=number < 3),))
    held.report(health())
    settled(made, count)


def test_transfers_add_up_by_way_and_places_are_bounded() -> None:
    held = Board()
    made = metrics.start(held, Settings(nic_counters=False, max_peers=2))
    try:
        publish(held, made, 3)
        series = scrape(made)
        way = {"verb": "write", "src": "10.0.0.1", "dst": "10.0.0.3"}
        assert of(series, "dpuflow_transfers_total", **way) == 3
        assert of(series, "dpuflow_transfer_bytes_total", **way) == 3 << 20
        assert of(series, "dpuflow_transfer_pages_total", **way) == 48
        assert of(series, "dpuflow_transfer_busy_seconds_total", **way) == pytest.approx(0.024)
        assert of(series, "dpuflow_transfer_wait_seconds_count", peer="10.0.0.3") == 3
        assert of(series, "dpuflow_transfer_wait_seconds_sum", peer="10.0.0.3") == pytest.approx(0.027)
        for number in range(3, 8):
            held.publish(window(number, peers=(f"10.1.0.{number}", "10.0.0.2", f"10.2.0.{number}")))
        settled(made, 8)
        series = scrape(made)
        ways = {labels for name, labels in series if name == "dpuflow_transfers_total"}
        assert len(ways) == 3
        other = {"verb": "write", "src": "other", "dst": "other"}
        assert of(series, "dpuflow_transfers_total", **other) == 4
        assert of(series, "dpuflow_agent_label_names", kind="ways") == 2
    finally:
        made.close()


def test_windows_add_up(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    publish(held, made, 3)
    series = scrape(made)
    pair = {"transport": "roce", "src": "10.0.0.2", "dst": "10.0.0.3"}
    assert of(series, "dpuflow_flow_packets_total", **pair) == 3000
    assert of(series, "dpuflow_flow_payload_bytes_total", **pair) == 12_000_000
    assert of(series, "dpuflow_flow_messages_total", **pair) == 24
    assert of(series, "dpuflow_flow_retransmitted_packets_total", **pair) == 9
    assert of(series, "dpuflow_flow_ecn_marked_packets_total", **pair) == 150
    assert of(series, "dpuflow_flow_cnp_packets_total", **pair) == 6
    assert of(series, "dpuflow_flow_nak_packets_total", **pair) == 12
    assert of(series, "dpuflow_flow_rnr_nak_packets_total", **pair) == 15
    assert of(series, "dpuflow_pfc_frames_total", sender="02:00:00:00:00:aa", priority="3") == 21
    assert of(series, "dpuflow_collectives_total", group=GROUP, op="all_reduce", algorithm="ring") == 12
    assert of(series, "dpuflow_collective_wire_bytes_total", group=GROUP, op="all_reduce") == 12 * (4 << 20)
    late = {"group": GROUP, "peer": "10.0.0.2"}
    assert of(series, "dpuflow_late_entries_total", **late) == 12
    # 5 ms before the others are in, of whom two wait, one of them for 1 ms less
    assert of(series, "dpuflow_caused_wait_seconds_total", **late) == pytest.approx(12 * 2 * 0.004)
    assert of(series, "dpuflow_lateness_seconds_sum", **late) == pytest.approx(0.060)
    assert of(series, "dpuflow_lateness_seconds_bucket", **late, le="0.003") == 0
    assert of(series, "dpuflow_lateness_seconds_bucket", **late, le="0.01") == 12
    assert of(series, "dpuflow_lateness_seconds_count", **late) == 12
    assert of(series, "dpuflow_peer_verdict", peer="10.0.0.2", verdict="late") == 1
    assert of(series, "dpuflow_peer_verdict", peer="10.0.0.2", verdict="on_time") == 0
    assert of(series, "dpuflow_group_info", group=GROUP, kind="dp", size="3") == 1
    assert of(series, "dpuflow_peer_info", peer="10.0.0.2", rank="1", label="node1 gpu0") == 1


def test_what_a_job_repeats(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    publish(held, made, 1)
    series = scrape(made)
    job = {"group": GROUP, "kind": "decode"}
    assert of(series, "dpuflow_step_seconds", **job) == 0.025
    assert of(series, "dpuflow_step_tail_seconds", **job) == 0.030
    assert of(series, "dpuflow_step_collectives", **job) == 2
    assert of(series, "dpuflow_tokens_per_second", **job) == 40
    assert of(series, "dpuflow_step_without_lateness_seconds", peer="10.0.0.2") == 0.020


def test_verdicts_outlast_a_silence_between_steps_but_not_the_job() -> None:
    clock = [0.0]
    tally = Tally(peers=8, groups=8, now=lambda: clock[0])
    tally.add(window(0))
    silent = Window(1, S, 2 * S, Analysis())
    clock[0] = JUDGED_S
    tally.add(silent)
    assert set(tally.judged) == {"10.0.0.1", "10.0.0.2"}
    assert len(tally.jobs) == len(tally.without) == 1
    clock[0] = JUDGED_S + 1
    tally.add(silent)
    assert not tally.judged
    assert not tally.jobs
    assert not tally.without


def test_a_bound_is_no_lateness(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    publish(held, made, 1)
    series = scrape(made)
    bound = {"group": GROUP, "peer": "10.0.0.3"}
    assert of(series, "dpuflow_lateness_seconds_count", **bound) == 0
    assert of(series, "dpuflow_entries_total", **bound, bound="at_most") == 4


def test_lower_bounds_have_a_histogram_of_their_own(running: tuple[Board, metrics.Metrics]) -> None:
    """One node's agent knows most of its peers by such alone: no panel may be empty for that."""
    held, made = running
    one = window(0)
    for collective in one.analysis.collectives:
        collective.ranks[1].bound = "at_least"
    held.publish(one)
    settled(made, 1)
    series = scrape(made)
    peer = {"group": GROUP, "peer": "10.0.0.2"}
    assert of(series, "dpuflow_lateness_seconds_count", **peer) == 0
    assert of(series, "dpuflow_lateness_lower_bound_seconds_count", **peer) == 4
    assert of(series, "dpuflow_lateness_lower_bound_seconds_sum", **peer) == pytest.approx(0.02)
    assert of(series, "dpuflow_peer_late_seconds", peer="10.0.0.2", bound="exact") == 0.005


@pytest.mark.parametrize(
    ("condition", "ends", "shown"),
    [
        ("straggler", ("a", "b"), {"a", "b"}),
        ("packet_loss", ("a", "b", "c"), {"a"}),
        ("congestion", ("a", "b", "c"), {"c"}),
        ("capture_loss", (), {""}),
    ],
)
def test_a_findings_series_name_what_it_is_about(
    condition: str, ends: tuple[str, ...], shown: set[str], running: tuple[Board, metrics.Metrics]
) -> None:
    held, made = running
    state = replace(finding(condition=condition), addresses=ends, labels=(None,) * len(ends), ranks=())
    held.publish(window(0), (state,))
    settled(made, 1)
    labels = [dict(labels) for name, labels in scrape(made) if name == "dpuflow_findings_active"]
    assert {each["endpoint"] for each in labels} == shown


def test_what_a_transport_cannot_have_is_absent(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    publish(held, made, 1)
    names = {name for name, labels in scrape(made) if ("transport", "tcp") in labels}
    assert "dpuflow_flow_zero_window_segments_total" in names
    assert not names & {
        "dpuflow_flow_cnp_packets_total",
        "dpuflow_flow_nak_packets_total",
        "dpuflow_flow_rnr_nak_packets_total",
    }


def test_findings_open_and_close(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    which = {"condition": "straggler", "severity": "warning"}
    publish(held, made, 3)
    series = scrape(made)
    about = which | {
        "endpoint": "10.0.0.2",
        "rank": "1",
        "label": "node1 gpu0",
        "runbook": "dpuflow/straggler",
    }
    assert of(series, "dpuflow_findings_active", **about) == 1
    assert of(series, "dpuflow_findings_total", **which) == 1
    held.publish(window(3), (finding(active=False),))
    settled(made, 4)
    series = scrape(made)
    assert of(series, "dpuflow_findings_active", **about) == 0  # not absent: an alert ends at once
    held.publish(window(4), (finding(key="straggler-2"),))
    held.publish(window(5))
    settled(made, 6)
    assert of(scrape(made), "dpuflow_findings_total", **which) == 2


def test_the_agents_own_health(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    held.report(health(degraded="less is captured", sample=2, fidelity="sampled"))
    held.count_error("history")
    series = scrape(made)
    assert of(series, "dpuflow_agent_lag_seconds") == 2
    assert of(series, "dpuflow_agent_cpu_ratio") == 0.25
    assert of(series, "dpuflow_agent_ring_used_ratio") == 0.125
    assert of(series, "dpuflow_agent_degraded") == 1
    assert of(series, "dpuflow_agent_fidelity", fidelity="sampled") == 1
    assert of(series, "dpuflow_agent_followed_ratio") == 0.25
    assert of(series, "dpuflow_agent_interface_captured", interface="p1") == 0
    assert of(series, "dpuflow_agent_errors_total", kind="history") == 1
    assert of(series, "dpuflow_agent_errors_total", kind="webhook") == 0
    assert of(series, "dpuflow_capture_packets_total", outcome="seen") == 1000
    assert of(series, "dpuflow_capture_lost_packets_total", kind="ring_full") == 10
    assert of(series, "dpuflow_capture_lost_packets_total", kind="rx_missed_errors") == 4
    assert ("dpuflow_capture_lost_packets_total", (("kind", "captured"),)) not in series
    assert of(series, "process_resident_memory_bytes") > 1 << 20
    held.report(health(ring_used_share=None))
    assert ("dpuflow_agent_ring_used_ratio", ()) not in scrape(made)


def test_peers_beyond_the_bound_are_other_until_one_has_been_idle() -> None:
    clock = [0.0]
    tally = Tally(peers=2, groups=1, now=lambda: clock[0])

    def traffic(*pairs: tuple[str, str]) -> None:
        rows = tuple(Traffic(src, dst, "roce", packets=10) for src, dst in pairs)
        tally.add(Window(0, 0, S, Analysis(), traffic=rows))

    before: dict[tuple[str, str, str], list[int]] = {}
    total = 0
    for step in range(50):
        clock[0] += IDLE_S / 10
        pairs = [("a", "b"), ("b", "a"), ("c", "a"), ("a", "c")][: 4 if step < 10 else 3]
        if step >= 20:
            pairs = [("c", "a"), ("a", "b")]  # b -> a is idle from now on
        traffic(*pairs)
        total += len(pairs)
        assert len(set(tally.traffic) - {("roce", "other", "other")}) <= 2
        for key, totals in tally.traffic.items():
            assert totals[0] >= before.get(key, [0])[0], "a series fell"
        before = {key: list(totals) for key, totals in tally.traffic.items()}
    assert ("roce", "b", "a") not in tally.traffic
    assert tally.pairs.evicted == 1
    # c -> a counted as other until the place of b -> a was free, and on its own from then on.
    alone = tally.traffic["roce", "c", "a"][0]
    assert 0 < alone < 300
    gone = 20 * 10  # what b -> a had
    assert alone + tally.traffic["roce", "other", "other"][0] + tally.traffic["roce", "a", "b"][0] == (
        total * 10 - gone
    )


def test_groups_beyond_the_bound_are_other() -> None:
    tally = Tally(peers=4, groups=1)
    for number, peers in enumerate([("a", "b"), ("c", "d"), ("a", "b"), ("e", "f", "g")]):
        tally.add(window(number, peers=peers))
    assert {group for group, _ in tally.operations} == {group_name("ab"), "other"}
    assert sum(each.algorithms["ring"] for each in tally.operations.values()) == 16
    assert set(tally.entries) == {(group_name("ab"), "a"), (group_name("ab"), "b"), ("other", "other")}


def test_with_no_names_allowed_all_is_other() -> None:
    tally = Tally(peers=0, groups=0)
    tally.add(window(0))
    assert set(tally.traffic) == {("roce", "other", "other"), ("tcp", "other", "other")}
    assert set(tally.entries) == {("other", "other")}


def test_a_name_gives_up_its_place_only_when_idle() -> None:
    clock, gone = [0.0], []
    held: Bounded[tuple[str]] = Bounded(1, gone.append, idle_s=10, now=lambda: clock[0])
    assert held.place(("a",)) == ("a",)
    clock[0] = 9.9
    assert held.place(("b",)) is None
    assert held.place(("a",)) == ("a",)  # seen again: the time begins anew
    clock[0] = 19.8
    assert held.place(("b",)) is None
    clock[0] = 20.0
    assert held.place(("b",)) == ("b",)
    assert gone == [("a",)]
    assert list(held) == [("b",)]


def test_a_groups_name_is_its_addresses_alone() -> None:
    assert group_name(["10.0.0.2", "10.0.0.1"]) == group_name(("10.0.0.1", "10.0.0.2"))
    assert group_name(["10.0.0.1", "10.0.0.2"]) != group_name(["10.0.0.1", "10.0.0.3"])


def test_buckets_reach_from_microseconds_to_seconds_and_a_bound_belongs_below() -> None:
    assert BUCKETS[0] == 1e-6
    assert BUCKETS[-1] == 10.0
    assert all(2 < high / low < 4 for low, high in pairwise(BUCKETS))
    made = Histogram()
    for value in (0.0, 1e-6, 1.1e-6, 3.0, 11.0):
        made.observe(value)
    assert made.counts[0] == 2
    assert made.counts[1] == 1
    assert made.counts[BUCKETS.index(3.0)] == 1
    assert made.counts[-1] == 1


def test_a_window_that_cannot_be_counted_ends_nothing(running: tuple[Board, metrics.Metrics]) -> None:
    held, made = running
    broken = window(0)
    broken.analysis.groups.clear()  # its collectives now point nowhere
    subscription = made._subscription
    from dpuflow.agent.board import Event

    subscription.put(Event("window", 0, window=broken))
    held.publish(window(1))
    settled(made, 2)
    assert held.health().errors["metrics"] == 1
    assert of(scrape(made), "dpuflow_flow_packets_total", transport="tcp", src="10.0.0.1", dst="10.0.0.2")


def test_openmetrics_and_promtool_accept_it(tmp_path: Path) -> None:
    held = board()
    made = metrics.start(held, Settings())
    try:
        publish(held, made, 3)
        assert len(list(parse_openmetrics(openmetrics(made.registry).decode()))) > 40
        text = generate_latest(made.registry)
    finally:
        made.close()
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (package prometheus)")
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
