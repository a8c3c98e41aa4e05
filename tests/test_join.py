"""Several captures as one: who is local, which sightings are one message, what each transfer says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from worlds import START, Sent, World

from dpuflow.errors import OptionError
from dpuflow.join import join
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Pairing, Role, Seen, Transport

if TYPE_CHECKING:
    from dpuflow.schema.tables import CaptureTables

BOTH = Seen.AT_SENDER | Seen.AT_RECEIVER


def ring_captures(nodes: int, *vantages: str, rounds: int = 100, **facts: Any) -> list[CaptureTables]:
    return World(nodes, **facts).ring(rounds).captures(*vantages)


@pytest.mark.parametrize("transport", [Transport.ROCE, Transport.TCP])
def test_one_clock_gives_each_message_once_with_both_ends(transport: Transport) -> None:
    captures = ring_captures(4, "node0", "node1", "node2", "node3", transport=transport)
    joined = join(captures)
    assert joined.local == [[0], [1], [2], [3]]
    assert [c.method for c in joined.clocks] == ["reference", "trusted", "trusted", "trusted"]
    rows = joined.transfers
    assert len(rows) == 400
    assert (rows["seen"] == BOTH).all()
    assert (np.diff(rows["sent_ns"]) >= 0).all()
    assert ((rows["src"] + 1) % 4 == rows["dst"]).all()
    for row in rows:
        sent = captures[row["capture"]].messages[row["message"]]
        arrived = captures[row["arrival_capture"]].messages[row["arrival_message"]]
        assert (row["capture"], row["arrival_capture"]) == (row["src"], row["dst"])
        assert (row["sent_ns"], row["sent_end_ns"]) == (sent["first_ns"], sent["last_ns"])
        assert (row["arrived_ns"], row["arrived_end_ns"]) == (arrived["first_ns"], arrived["last_ns"])
        assert row["acked_ns"] == sent["acked_ns"]
        assert row["tag"] == sent["tag"] == arrived["tag"]
    assert joined.limits == []
    assert joined.start_ns == min(t.info.first_ns for t in captures)
    assert joined.end_ns == max(t.info.last_ns for t in captures)


@pytest.mark.parametrize("vantage", ["node0", "switch"])
def test_an_only_capture_gives_what_it_gives_beside_an_untied_one(vantage: str) -> None:
    (capture,) = ring_captures(3, vantage)
    capture.messages["flags"][::7] = MessageFlag.HIDDEN | MessageFlag.REORDERED
    capture.messages["first_ns"][::5] -= 10**6  # sent in another order than completed
    nothing = replace(capture, messages=capture.messages[:0], flows=capture.flows[:0])
    alone, beside = join([capture]), join([capture, nothing])
    assert len(alone.transfers) == len(capture.messages)
    assert (alone.transfers == beside.transfers).all()
    assert (np.diff(alone.transfers["sent_ns"]) >= 0).all()


def test_order_of_captures_changes_nothing_but_their_numbers() -> None:
    a, b, c = ring_captures(3, "node0", "node1", "node2")
    one, other = join([a, b, c]), join([c, a, b])
    names = [n for n in one.transfers.dtype.names if "capture" not in n and "seq" not in n]
    assert (one.transfers[names] == other.transfers[names]).all()
    assert other.local == [[2], [0], [1]]
    assert (one.endpoints == other.endpoints).all()


def test_flows_are_counted_at_their_sender() -> None:
    captures = ring_captures(3, "node0", "node1", "node2", "switch")
    joined = join(captures)
    assert joined.flows["messages"].sum() == 300
    assert joined.flows["bytes"].sum() == joined.transfers["bytes"].sum()
    for flow in joined.flows[joined.flows["messages"] > 0]:
        assert flow["first_ns"] == joined.transfers["sent_ns"][joined.transfers["src"] == flow["src"]].min()
    peers = joined.flows["peer"]
    assert (peers[peers] == np.arange(len(peers))).all()
    assert len(np.unique(joined.transfers["connection"])) == 3


def test_one_capture_alone() -> None:
    (capture,) = ring_captures(3, "node1")
    joined = join([capture])
    assert joined.local == [[1]]
    assert [c.method for c in joined.clocks] == ["reference"]
    assert len(joined.transfers) == len(capture.messages)
    sent = joined.transfers["src"] == 1
    assert (joined.transfers["seen"][sent] == Seen.AT_SENDER).all()
    assert (joined.transfers["seen"][~sent] == Seen.AT_RECEIVER).all()
    assert len(joined.limits) == 1
    assert "10.0.0.1, 10.0.0.3" in joined.limits[0]


@pytest.mark.parametrize("how", [how for how in Pairing if how not in (Pairing.UNKNOWN, Pairing.PORTS)])
def test_opposite_flows_stay_together_however_they_were_told(how: Pairing) -> None:
    (capture,) = ring_captures(3, "node1", transport=Transport.ROCE)
    told = capture.flows["peer"] != NONE32
    assert told.any()
    before = len(set(join([capture]).transfers["connection"].tolist()))
    capture.flows["pairing"][told] = how
    joined = join([capture])
    assert (joined.flows["peer"] != NONE32).sum() == told.sum()
    assert len(set(joined.transfers["connection"].tolist())) == before


def test_two_ranks_are_told_apart_by_their_waits_for_acks() -> None:
    captures = ring_captures(2, "node1", "node0", clocks={"node1": (3_000_000_000, 20e-6)})
    assert join(captures).local == [[1], [0]]
    assert join(ring_captures(2, "node0", "switch", "node1")).local == [[0], [], [1]]
    assert join(ring_captures(2, "node1")).local == [[1]]


def test_a_switch_next_to_one_of_two_ranks_is_not_taken_for_the_other() -> None:
    joined = join(ring_captures(2, "node0", "switch"))
    assert joined.local == [[0], []]
    assert "switch may sit at" in joined.limits[0]


def test_a_switch_between_two_ranks_is_not_decided() -> None:
    joined = join(ring_captures(2, "switch"))
    assert joined.local == [[]]
    assert (joined.transfers["seen"] == 0).all()
    assert "10.0.0.1 or 10.0.0.2" in joined.limits[0]


def test_a_switch_that_sees_a_star_gives_way_to_the_middle_itself() -> None:
    world = World(4)
    for number in range(200):
        world.sent.append(Sent(0, 1 + number % 3, START + number * 1_000_000))
    assert join(world.captures("switch", "node0", "node1")).local == [[], [0], [1]]


def test_central_alone_has_no_local_endpoint() -> None:
    joined = join(ring_captures(4, "switch"))
    assert joined.local == [[]]
    assert len(joined.transfers) == 400


def test_a_node_that_was_not_captured() -> None:
    joined = join(ring_captures(4, "node0", "node1", "node2"))
    by_source = {src: joined.transfers[joined.transfers["src"] == src] for src in range(4)}
    assert (by_source[3]["seen"] == Seen.AT_RECEIVER).all()
    assert (by_source[3]["capture"] == 0).all()
    assert (by_source[2]["seen"] == Seen.AT_SENDER).all()
    assert len(joined.transfers) == 400
    (limit,) = joined.limits
    assert limit.startswith("Not captured at their own nodes: 10.0.0.4.")


def test_the_switch_stands_in_for_a_node_that_was_not_captured() -> None:
    joined = join(ring_captures(4, "node0", "switch"))
    from_2 = joined.transfers[joined.transfers["src"] == 2]
    assert (from_2["capture"] == 1).all()
    assert (from_2["seen"] == 0).all()
    from_3 = joined.transfers[joined.transfers["src"] == 3]
    assert (from_3["capture"] == 1).all()
    assert (from_3["arrival_capture"] == 0).all()
    assert (from_3["seen"] == Seen.AT_RECEIVER).all()


def test_captures_with_nothing_in_common_are_islands() -> None:
    first = World(2).ring(50).captures("node0", "node1")
    other = World(6)
    for number in range(20):
        other.sent.append(Sent(*((4, 5) if number % 2 else (5, 4)), START + number * 1_000_000))
    (stranger,) = other.captures("node4")
    joined = join([*first, stranger])
    assert [(c.method, c.island) for c in joined.clocks] == [
        ("reference", 0),
        ("trusted", 0),
        ("reference", 1),
    ]
    assert len(joined.transfers) == 100
    here, there = joined.islands
    assert np.array_equal(here.transfers, joined.transfers)
    assert (here.used, there.used) == ({0, 1}, {2})
    assert len(there.transfers) == 20
    assert set(there.transfers["capture"].tolist()) == {2}
    assert [bool(rows) for rows in there.local] == [False, False, True]
    assert not there.at_a_switch
    assert (there.start_ns, there.end_ns) == (stranger.info.first_ns, stranger.info.last_ns)
    assert any("2 islands that share no packets" in line for line in joined.limits)
    trusted = join([*first, stranger], clock="trust")
    assert len(trusted.transfers) == 120
    assert trusted.islands == []


def test_rails_of_nodes_whose_clocks_nothing_ties_are_whole_each() -> None:
    """Each rail gives what it gives alone, whatever its clocks are and in whatever order captures come."""
    rails = []
    for rail in range(3):
        clocks = {f"node{2 * rail + 1}": (rail * 10**9 + 5_000, 10e-6)}
        world = World(2 * rail + 2, clocks=clocks)
        for number in range(200):
            a, b = (2 * rail, 2 * rail + 1) if number % 2 else (2 * rail + 1, 2 * rail)
            world.sent.append(Sent(a, b, START + number * (1_000_000 + 10_000 * rail)))
        rails.append(world.captures(f"node{2 * rail}", f"node{2 * rail + 1}"))
    joined = join([rails[rail][side] for side in (0, 1) for rail in range(3)], clock="estimate")
    assert [c.island for c in joined.clocks] == [0, 1, 2, 0, 1, 2]
    assert [c.reference for c in joined.clocks] == [True] * 3 + [False] * 3
    for view, captures in zip(joined.islands, rails, strict=True):
        alone = join(captures, clock="estimate")
        for name in ("sent_ns", "arrived_ns", "acked_ns", "bytes"):
            assert np.array_equal(view.transfers[name], alone.transfers[name])


def test_the_first_island_is_that_of_the_first_capture_that_is_tied_to_others() -> None:
    other = World(6)
    other.sent.append(Sent(4, 5, START))
    (stranger,) = other.captures("node4")
    joined = join([stranger, *World(2).ring(50).captures("node0", "node1")])
    assert [(c.method, c.island) for c in joined.clocks] == [
        ("reference", 1),
        ("reference", 0),
        ("trusted", 0),
    ]


def test_a_message_lost_on_the_way_is_seen_at_its_sender_only() -> None:
    world = World(3).ring(50)
    world.sent[7].lost_before = {f"node{world.sent[7].dst}"}
    joined = join(world.captures("node0", "node1", "node2"))
    assert len(joined.transfers) == 150
    (lost,) = joined.transfers[joined.transfers["seen"] != BOTH]
    assert lost["seen"] == Seen.AT_SENDER
    assert (lost["sent_ns"], lost["acked_ns"]) == (world.sent[7].at_ns, NEVER)
    assert lost["arrival_capture"] == lost["capture"] == world.sent[7].src


def test_a_sequence_number_used_again_is_another_message() -> None:
    """A queue pair starts over with the same PSN; one of its messages is lost each time."""
    world = World(3)
    for run in range(2):
        for number in range(40):
            at_ns = START + run * 500_000_000 + number * 1_000_000
            tag = 100 * run + number
            world.sent += [Sent(i, (i + 1) % 3, at_ns, seq=64 * number, tag=tag) for i in range(3)]
    world.sent[10].lost_before = {f"node{world.sent[10].dst}"}
    world.sent[-5].lost_before = {f"node{world.sent[-5].src}"}
    joined = join(world.captures("node0", "node1", "node2"))
    assert len(joined.transfers) == 240
    assert np.bincount(joined.transfers["seen"]).tolist() == [0, 1, 1, 238]
    truth = {(m.src, m.tag): m.at_ns for m in world.sent}
    for row in joined.transfers[joined.transfers["seen"] == BOTH]:
        assert truth[int(row["src"]), int(row["tag"])] == row["sent_ns"]


def test_rounds_of_the_psn_are_laid_over_each_other_without_a_common_clock() -> None:
    """1024 messages go once round the PSN space; the second capture begins in the second round."""
    clocks = {"node1": (-2_000_000_000, 40e-6)}
    world = World(2, clocks=clocks)
    at_ns = START
    for number in range(3000):
        at_ns += int(world.random.integers(500_000, 1_500_000))
        late = {"node1"} if number < 1500 else set()
        seq = (1 << 14) * number
        world.sent.append(Sent(0, 1, at_ns, seq=seq, tag=number))
        world.sent.append(Sent(1, 0, at_ns + 200_000, seq=seq, tag=number))
        for m in world.sent[-2:]:
            m.bytes, m.unseen_by = 1024 << 14, late
    captures = world.captures("node0", "node1")
    joined = join(captures)
    assert joined.clocks[1].method == "estimated"
    assert joined.clocks[1].offset_ns is not None
    start = joined.start_ns - START
    assert abs(joined.clocks[1].offset_ns - (-2_000_000_000 + start * 40e-6)) < 30_000
    assert len(joined.transfers) == 6000
    both = joined.transfers[joined.transfers["seen"] == BOTH]
    assert len(both) == 3000
    assert both["tag"].min() == 1500
    assert (both["arrived_ns"] - both["sent_ns"]).max() < 1_000_000


def test_headers_hidden_at_one_place_are_completed_from_the_other() -> None:
    world = World(2).ring(30)
    world.sent[4].flags = {f"node{world.sent[4].src}": MessageFlag.HIDDEN}
    world.sent[6].flags = dict.fromkeys(("node0", "node1"), MessageFlag.HIDDEN)
    captures = world.captures("node0", "node1")
    for tables in captures:
        hidden = (tables.messages["flags"] & MessageFlag.HIDDEN) != 0
        tables.messages["tag"][hidden], tables.messages["role"][hidden] = 9999, Role.BURST.value - 1
    joined = join(captures)
    assert len(joined.transfers) == 60
    (row,) = joined.transfers[joined.transfers["sent_ns"] == world.sent[4].at_ns]
    assert (row["tag"], row["role"], row["flags"]) == (world.sent[4].tag, Role.DATA, 0)
    (row,) = joined.transfers[joined.transfers["sent_ns"] == world.sent[6].at_ns]
    assert (row["tag"], row["flags"]) == (9999, MessageFlag.HIDDEN)


def test_a_message_cut_by_the_start_of_one_capture_is_one_transfer() -> None:
    world = World(2).ring(30)
    captures = world.captures("node0", "node1")
    cut = int(np.flatnonzero(captures[1].messages["tag"] == 5)[0])
    message = captures[1].messages[cut]
    message["flags"] |= MessageFlag.STARTS_BEFORE
    message["seq"] += 2
    message["first_ns"] += 5_000
    message["bytes"] -= 2048
    joined = join(captures)
    assert len(joined.transfers) == 60
    assert (joined.transfers["bytes"] == 4096).all()
    assert (joined.transfers["flags"] == 0).all()
    assert np.count_nonzero(joined.transfers["seen"] == BOTH) == 59


def test_a_message_cut_by_the_start_of_both_captures_is_one_transfer() -> None:
    world = World(2).ring(30)
    world.sent[0].tag = 77
    captures = world.captures("node0", "node1")
    for tables, lost in zip(captures, (1, 2), strict=True):
        message = tables.messages[int(np.flatnonzero(tables.messages["tag"] == 77)[0])]
        message["flags"] |= MessageFlag.STARTS_BEFORE
        message["seq"] += lost
        message["bytes"] -= 1024 * lost
    joined = join(captures)
    assert len(joined.transfers) == 60
    (row,) = joined.transfers[joined.transfers["flags"] != 0]
    assert (row["flags"], row["bytes"]) == (MessageFlag.STARTS_BEFORE, 3072)


def test_counters_are_the_most_that_any_place_saw() -> None:
    captures = ring_captures(2, "node0", "node1", rounds=20)
    captures[0].messages["retransmitted"][3] = 4
    captures[1].messages["ecn_marked"][:] = 2
    captures[0].messages["flags"][3] |= MessageFlag.REORDERED
    joined = join(captures)
    row = joined.transfers[joined.transfers["retransmitted"] > 0]
    assert row["retransmitted"].tolist() == [4]
    assert row["flags"].tolist() == [MessageFlag.REORDERED]
    assert (joined.transfers["ecn_marked"] == 2).all()


def test_bursts_cut_otherwise_at_two_places_count_once() -> None:
    world = World(2, transport=Transport.TCP).ring(30)
    captures = world.captures("node0", "node1")
    for tables in captures:
        tables.messages["role"] = Role.BURST
    captures[1].messages["seq"][4] += 100  # node 1 cuts this one later
    captures[1].messages["bytes"][4] -= 100
    joined = join(captures)
    assert len(joined.transfers) == 60
    assert joined.transfers["bytes"].sum() in (60 * 4096, 60 * 4096 - 100)


def test_bursts_before_the_framing_was_known_stay() -> None:
    captures = World(2, transport=Transport.TCP).ring(30).captures("node0", "node1")
    captures[0].messages["role"][captures[0].messages["tag"] < 3] = Role.BURST
    captures[1].messages["role"] = Role.BURST
    joined = join(captures)
    assert len(joined.transfers) == 60
    assert np.count_nonzero(joined.transfers["role"] == Role.BURST) == 6


def test_addresses_of_one_port() -> None:
    """Data over an IPv6 link-local address, bootstrap over IPv4: one endpoint, called by the busier."""
    captures = ring_captures(3, "node0", "node1", "node2")
    for tables in captures:
        ends, flows = tables.endpoints, tables.flows
        more, plain = ends.copy(), ends.copy()
        more["addr_hi"], more["addr_lo"] = 0xFE80 << 48, ends["mac"]
        more["packets_out"] *= 2
        more["packets_in"] *= 2
        tables.endpoints = np.concatenate([plain, more])
        extra = flows.copy()
        extra["transport"], extra["messages"], extra["dest_qp"], extra["sport"] = Transport.TCP, 0, 0, 7000
        extra["dport"] = 22
        flows["src"] += len(ends)
        flows["dst"] += len(ends)
        tables.flows = np.concatenate([flows, extra])
    joined = join(captures)
    assert joined.local == [[3], [4], [5]]
    assert joined.addresses == [[], [], [], [0], [1], [2]]
    assert set(joined.flows["src"].tolist()) == {3, 4, 5}
    assert (joined.transfers["seen"] == BOTH).all()


def test_a_rare_second_address_of_a_local_port() -> None:
    captures = ring_captures(3, "node0", "node1", "node2")
    ends = captures[0].endpoints
    (own,) = np.flatnonzero(ends["addr_lo"] == 0xFFFF0A000001)
    second = ends[own : own + 1].copy()
    second["addr_lo"], second["packets_out"], second["packets_in"] = 0xFFFF0A000901, 1, 1
    captures[0].endpoints = np.concatenate([ends, second])
    joined = join(captures)
    assert joined.local == [[0], [1], [2]]
    assert joined.addresses == [[3], [], [], []]


def test_hosts_behind_one_router_stay_apart() -> None:
    (capture,) = ring_captures(4, "node0")
    capture.endpoints["mac"][capture.endpoints["addr_lo"] != 0xFFFF0A000001] = 0x0200000000FF
    joined = join([capture])
    assert joined.local == [[0]]
    assert joined.addresses == [[], [], []]


def test_no_messages_and_no_packets() -> None:
    captures = World(2).captures("node0", "node1")
    joined = join(captures)
    assert len(joined.transfers) == 0
    assert [c.method for c in joined.clocks] == ["reference", "none"]
    assert (joined.start_ns, joined.end_ns) == (0, 0)


def test_an_unknown_clock_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="sundial"):
        join(World(2).captures("node0"), clock="sundial")
