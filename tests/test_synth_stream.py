"""TCP that is lost: found, sent again, and called by its name in tshark; nothing is lost for good."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, played, records, settings

import dpuflow
from dpuflow.schema.simulated import LENGTH, SEGMENT_ACK
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.sockets import Socket
from dpuflow.synth.stream import LEAST_RTO_NS, PROBE_NS, Stream
from dpuflow.synth.tcp_window import BETA, FIRST, Window
from dpuflow.synth.world import Played, play

SOCKET = settings(nccl={"transport": "socket"})


def streams(world: Played) -> list[Stream]:
    return [flow for flow in world.flows if isinstance(flow, Stream) and flow.end_psn]


def all_is_there(world: Played) -> None:
    """Every byte of every stream came, and its sender knows it."""
    messages, bursts = world.trace.messages.read(), world.trace.bursts.read()
    for flow in streams(world):
        assert flow.acked_psn == flow.expected_psn == flow.end_psn
        mine = messages["flow"] == flow.number
        assert flow.bytes_in == int((messages["va"] + messages["bytes"])[mine].max())
        there = (bursts["flow"] == flow.number) & (bursts["rx_end_ns"] >= 0)
        psn = messages["psn"][bursts["message"][there]] + bursts["first"][there]
        came = np.zeros(flow.end_psn + 1, np.int64)
        np.add.at(came, psn, 1)
        np.add.at(came, psn + bursts["count"][there], -1)
        assert (np.cumsum(came)[:-1] > 0).all()


@pytest.mark.parametrize("share", [0.001, 0.02, 0.2])
@pytest.mark.parametrize("way", [{"src": 1, "dst": 2}, {"src": 2, "dst": 1}, {}])
def test_what_is_lost_comes_in_the_end(share: float, way: dict[str, int]) -> None:
    world = played(
        "op: all_reduce, bytes: 1MiB", SOCKET + settings(faults=[{"kind": "loss", "share": share, **way}])
    )
    all_is_there(world)
    replies, bursts = world.trace.replies.read(), world.trace.bursts.read()
    if way != {"src": 2, "dst": 1}:  # else acknowledgments are lost: rings send one way
        lost = int((bursts["rx_end_ns"] < 0).sum())
        assert lost > 0
        assert (world.trace.acks.read()["right0"] > 0).any() or lost < 3
    else:
        assert (replies["rx_ns"] < 0).any() or share < 0.01
    assert set(replies["kind"].tolist()) == {SEGMENT_ACK}


def test_nothing_is_sent_again_where_nothing_is_lost() -> None:
    world = played("op: all_reduce, bytes: 1MiB", SOCKET)
    all_is_there(world)
    bursts, messages = world.trace.bursts.read(), world.trace.messages.read()
    assert int(bursts["count"].sum()) == sum(flow.end_psn for flow in streams(world))
    assert int((messages["kind"] == LENGTH).sum()) * 2 >= len(messages["kind"])


def test_a_link_that_was_down_is_found_by_a_probe_or_a_timeout() -> None:
    """Whole windows are lost: nothing comes back that tells of holes."""
    down = {"kind": "flap", "node": 2, "at_us": 300, "us": 30_000}
    world = played("op: all_reduce, bytes: 1MiB", SOCKET + settings(faults=[down]))
    all_is_there(world)
    bursts = world.trace.bursts.read()
    lost = bursts["rx_end_ns"] < 0
    hit = [flow for flow in streams(world) if (bursts["flow"][lost] == flow.number).any()]
    assert hit
    for flow in hit:
        mine = np.sort(bursts["tx_ns"][bursts["flow"] == flow.number])
        pauses = np.diff(mine)
        # A probe two round trips after the last segment, then the timeout.
        assert ((pauses >= PROBE_NS) & (pauses < 10 * PROBE_NS)).any()
        assert (pauses >= 0.9 * LEAST_RTO_NS).any()
    assert world.end_ns > LEAST_RTO_NS


def test_a_window_whose_opening_was_lost_is_asked_for() -> None:
    """The receiver closes its window, and what opens it again is lost while its link is down."""
    late = settings(
        faults=[
            {"kind": "slow_host", "rank": 1, "us": 20_000},
            {"kind": "flap", "node": 1, "at_us": 15_000, "us": 25_000},
        ],
        machine={"run_ahead": 1},
    )
    world = played("op: broadcast, bytes: 16MiB, channels: 1", SOCKET + late, iterations=1)
    all_is_there(world)
    messages, bursts = world.trace.messages.read(), world.trace.bursts.read()
    probes = np.flatnonzero(messages["bytes"] == 0)
    assert len(probes)
    assert np.isin(bursts["message"], probes).any()


def test_segments_out_of_order_are_acknowledged_one_by_one() -> None:
    """Each at once, with what is there beyond the hole; what fills the hole acknowledges all of it."""
    lossy = settings(faults=[{"kind": "loss", "share": 0.002, "src": 1, "dst": 2}])
    world = played("op: all_reduce, bytes: 8MiB", SOCKET + lossy)
    replies, acks = world.trace.replies.read(), world.trace.acks.read()
    beyond = acks["right0"][replies["syndrome"]] > 0
    assert beyond.any()
    for name in ("left0", "right0"):
        assert (acks[name][replies["syndrome"][beyond]] > replies["psn"][beyond]).all()
    for flow in {int(f) for f in replies["flow"][beyond]}:
        mine = replies["flow"] == flow
        assert (np.diff(replies["psn"][mine]) >= 0).all()
        assert (np.diff(replies["tx_ns"][mine]) >= 0).all()


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lossy")
    more = settings(
        cluster={"link_gbps": 10},
        faults=[{"kind": "loss", "share": 0.002, "src": 1, "dst": 2}],
        observation={"snaplen": 0, "compress": False},
    )
    write_case(loop("op: all_reduce, bytes: 4MiB", SOCKET + more, iterations=5), str(folder))
    return folder


def fields(file: Path, *names: str) -> list[list[str]]:
    asked = [word for name in names for word in ("-e", name)]
    command = ["tshark", "-r", str(file), "-o", "tcp.check_checksum:TRUE", "-T", "fields", *asked]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split("\t") for line in shown]


def test_tshark_names_what_was_sent_again(lossy: Path) -> None:
    """At the sender every repetition, at the receiver every hole, and nothing else."""
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    names = ("tcp.analysis.retransmission", "tcp.analysis.fast_retransmission", "tcp.analysis.out_of_order",
             "tcp.analysis.duplicate_ack", "tcp.analysis.lost_segment", "tcp.analysis.ack_lost_segment",
             "tcp.checksum.status", "_ws.malformed")  # fmt: skip
    seen: set[bytes] = set()
    repeated = 0
    for _, frame in records(lossy / "node1.pcap"):
        if frame[46] >> 4 == 8 and len(frame) > 66:  # no ranges: data
            key = frame[26:42]
            repeated += key in seen
            seen.add(key)
    assert repeated > 10
    for file, holes in (("node1.pcap", 0), ("node2.pcap", repeated), ("node3.pcap", 0)):
        rows = np.array([[bool(cell) for cell in row] for row in fields(lossy / file, *names)])
        again, fast, order, double, gaps, unseen, status, malformed = rows.T
        assert status.all()
        assert not unseen.any()
        assert not malformed.any()
        if file == "node3.pcap":
            assert not (again | order | double | gaps).any()
            continue
        # Short tails are called out of order: nothing but the pause tells those from a repetition.
        assert int((again | order).sum()) == repeated
        assert int(fast.sum()) > repeated // 2
        assert int(double.sum()) > 2 * int(fast.sum())
        assert 0.8 * holes <= int(gaps.sum()) <= holes
    assert {row[0] for row in fields(lossy / "node1.pcap", "tcp.checksum.status")} == {"1"}


def test_the_network_is_blamed_and_no_gpu(lossy: Path) -> None:
    files = sorted(lossy.glob("node*.pcap"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    assert "packet_loss" in {finding.condition for finding in result.findings}
    assert not [row for row in result.lateness if row.verdict in ("late", "intermittent")]


def test_clients_whose_packets_are_lost_get_their_answers() -> None:
    keys = {
        "job": {"kind": "decode", "tokens": 20, "layers": 2},
        "clients": {"hosts": 3, "sessions": 2, "requests": 3, "prompt_bytes": 200_000},
        "faults": [{"kind": "flap", "node": 0, "at_us": 6000, "us": 300}],
        "nccl": {"timeout": 8},
    }
    world = play(parse_scenario(settings(**keys), "test.yaml"))
    all_is_there(world)
    assert len(world.requests) == 3 * 2 * 3
    assert all(each.last_ns is not None for each in world.requests)
    assert (world.trace.bursts.read()["rx_end_ns"] < 0).any()


def test_messages_come_in_order_and_once() -> None:
    world = played(
        "op: all_reduce, bytes: 256KiB",
        SOCKET + settings(faults=[{"kind": "loss", "share": 0.1}]),
        iterations=3,
    )
    for link in world.links:
        if isinstance(link, Socket):
            assert link.produced == link.taken == link.freed == link.arrived > 0


def test_the_window_doubles_halves_and_comes_back() -> None:
    window = Window()
    assert window.size == FIRST == 10
    for _ in range(4):
        window.grow(int(window.size), 0.0, 1e5)
    assert window.size == 160
    window.lose(until=500, flight=160)
    assert window.until == 500
    window.reduce(1, 159)
    assert window.size >= 160  # the first is sent again at once
    for flight in range(158, 100, -1):
        window.again(1)
        window.reduce(1, flight)
    window.recovered()
    assert window.until is None
    assert window.size == pytest.approx(160 * BETA)
    now, before = 0.0, window.size
    while window.size < 160 and now < 60e9:
        now += 1e6
        window.grow(int(window.size), now, 1e6)
        assert window.size >= before
        before = window.size
    assert window.size >= 160
    window.time_out(600)
    assert window.size == 1
    window.reduce(1, 0)
    assert window.size == 2
    window.recovered()
    window.rest(1)
    assert window.size == 2  # never larger for a rest
