"""Scripted RoCE connections whose messages are known."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Pairing, Role, Wire
from tests.blocks import Script

A, B = 0, 1
QA, QB = 17, 23  # A's QP, which packets to A name; B's
BASE = 1 << 24


def exchange(script: Script, messages: int, start: int = 0, packets: int = 4, first_ns: int = 1_000) -> int:
    """``messages`` WRITEs from A to B, each acknowledged 500 ns after its end; returns the next PSN."""
    psn = start
    for k in range(messages):
        t = first_ns + k * 10_000
        psn = script.message(t, A, B, QB, psn, packets, imm=k)
        script.ack(t + (packets - 1) * 100 + 500, B, A, QA, psn - 1)
    return psn


def test_messages_have_bytes_times_tags_and_acks():
    script = Script()
    exchange(script, 10)
    messages, flows = script.run()
    assert len(messages) == 10
    assert (messages["bytes"] == 4096).all()
    assert (messages["packets"] == 4).all()
    assert (messages["wire"] == Wire.ROCE_WRITE_IMM).all()
    assert messages["tag"].tolist() == list(range(10))
    assert messages["first_ns"].tolist() == [1_000 + 10_000 * k for k in range(10)]
    assert (messages["last_ns"] - messages["first_ns"] == 300).all()
    assert (messages["acked_ns"] - messages["last_ns"] == 500).all()
    assert messages["seq"].tolist() == [BASE + 4 * k for k in range(10)]
    assert messages["seq_end"].tolist() == [BASE + 4 * k + 4 for k in range(10)]
    assert (messages["flags"] == 0).all()
    assert (messages["va"] == 0x1000).all()
    assert messages["first_frame"].tolist() == [5 * k for k in range(10)]
    assert messages["last_frame"].tolist() == [5 * k + 3 for k in range(10)]
    assert flows["peer"].tolist() == [1, 0]
    assert flows["pairing"].tolist() == [Pairing.ACKS, Pairing.ACKS]
    assert flows["rtt_min_ns"].tolist() == [500, NEVER]
    assert flows["messages"].tolist() == [10, 0]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000])
def test_blocks_may_end_anywhere(rows):
    script = Script()
    exchange(script, 40, start=0xFFFFF0)
    whole, flows = script.run()
    parts, part_flows = script.run(rows)
    assert parts.tolist() == whole.tolist()
    assert part_flows.tolist() == flows.tolist()


def test_psn_wraps():
    script = Script()
    exchange(script, 20, start=0xFFFFFA)
    messages, flows = script.run()
    assert messages["seq"].tolist() == [BASE + 0xFFFFFA + 4 * k for k in range(20)]
    assert (messages["acked_ns"] != NEVER).all()
    assert flows["retransmitted"].sum() == flows["missing"].sum() == 0


def test_go_back_n_seen_by_the_sender():
    script = Script()
    psn = exchange(script, 10)
    script.message(200_000, A, B, QB, psn, 4, imm=50)  # its second packet is lost further on
    script.ack(200_400, B, A, QA, psn + 1, syndrome=0x60)
    for k, place in enumerate(["MIDDLE", "MIDDLE", "LAST_IMM"]):
        script.add(210_000 + 100 * k, A, B, QB, f"RC_WRITE_{place}", psn + 1 + k, payload=1024, imm=50)
    script.ack(211_000, B, A, QA, psn + 3)
    messages, flows = script.run()
    assert len(messages) == 11
    late = messages[10]
    assert (late["packets"], late["retransmitted"], late["bytes"]) == (4, 3, 4096)
    assert (late["first_ns"], late["last_ns"], late["acked_ns"]) == (200_000, 210_200, 211_000)
    assert late["last_frame"] == len(script.packets) - 2
    assert flows["retransmitted"].tolist() == [3, 0]
    assert flows["nak"].tolist() == [0, 1]
    assert flows["missing"].tolist() == [0, 0]


def test_loss_before_a_receiver_leaves_no_gap_once_repaired():
    script = Script()
    psn = exchange(script, 10)
    script.add(200_000, A, B, QB, "RC_WRITE_FIRST", psn, payload=1024, length=4096, va=5)
    script.add(200_200, A, B, QB, "RC_WRITE_MIDDLE", psn + 2, payload=1024)
    script.add(200_300, A, B, QB, "RC_WRITE_LAST", psn + 3, payload=1024)
    script.ack(200_400, B, A, QA, psn + 1, syndrome=0x60)
    for k, place in enumerate(["MIDDLE", "MIDDLE", "LAST"]):
        script.add(210_000 + 100 * k, A, B, QB, f"RC_WRITE_{place}", psn + 1 + k, payload=1024)
    script.ack(211_000, B, A, QA, psn + 3)
    messages, flows = script.run()
    late = messages[10]
    assert (late["packets"], late["retransmitted"]) == (4, 2)
    assert late["flags"] == MessageFlag.REORDERED
    assert (late["last_ns"], late["acked_ns"]) == (210_200, 211_000)
    assert flows["out_of_order"].tolist() == [1, 0]
    assert flows["missing"].tolist() == [0, 0]


def test_packets_lost_by_the_capture_are_missing_once_acknowledged():
    script = Script()
    exchange(script, 30)
    gone = {(12, "RC_WRITE_MIDDLE"), (13, "RC_WRITE_LAST_IMM"), (14, "RC_WRITE_FIRST")}
    lost = [p for p in script.packets if ((p.psn // 4), p.name) in gone]
    script.packets = [p for p in script.packets if p not in lost]
    messages, flows = script.run()
    assert flows["missing"].tolist() == [len(lost), 0]
    assert flows["retransmitted"].tolist() == [0, 0]
    assert len(messages) == 30
    hurt = messages[messages["flags"] & MessageFlag.GAP != 0]
    assert hurt["seq_end"].tolist() == [BASE + 4 * 13, BASE + 4 * 14, BASE + 4 * 15]
    assert hurt["packets"].tolist() == [2, 3, 3]
    assert (messages["acked_ns"] != NEVER).all()


def test_one_ack_covers_many_messages():
    script = Script()
    psn = exchange(script, 10)
    start = psn
    for k in range(5):
        psn = script.message(300_000 + 1000 * k, A, B, QB, psn, 2)
    script.ack(310_000, B, A, QA, start + 3)
    script.ack(320_000, B, A, QA, psn - 1)
    messages, _ = script.run()
    assert messages["acked_ns"][10:].tolist() == [310_000] * 2 + [320_000] * 3


def test_frames_captured_twice_are_no_new_messages():
    script = Script()
    exchange(script, 12)
    script.packets = [p for q in script.packets for p in (q, q)]
    messages, flows = script.run()
    assert len(messages) == 12
    assert (messages["packets"] == 4).all()
    assert (messages["retransmitted"] == 4).all()
    assert flows["retransmitted"].tolist() == [48, 0]


def test_whole_message_sent_again_after_its_ack_keeps_its_times():
    script = Script()
    psn = exchange(script, 10)
    script.message(500_000, A, B, QB, psn - 4, 4, imm=9)
    messages, flows = script.run()
    assert len(messages) == 10
    assert messages["last_ns"][9] == 1_000 + 90_000 + 300
    assert messages["retransmitted"][9] == 4
    assert flows["retransmitted"][0] == 4


def test_a_repetition_in_vain_completes_nothing():
    """The ACK came late, and the sender sent again what had long arrived."""
    script = Script()
    psn = exchange(script, 10)
    script.message(200_000, A, B, QB, psn, 4, imm=50)
    script.message(300_000, A, B, QB, psn, 4, imm=50)
    script.ack(300_500, B, A, QA, psn + 3)
    messages, _ = script.run()
    late = messages[10]
    assert (late["last_ns"], late["acked_ns"], late["retransmitted"]) == (200_300, 300_500, 4)
    assert late["last_frame"] == messages["last_frame"][9] + 5  # an ACK and four packets


def test_what_came_behind_a_loss_counts_when_it_comes_again():
    """A receiver that misses a packet takes nothing behind it, whatever its own capture holds."""
    script = Script()
    psn = exchange(script, 10)
    script.message(200_000, A, B, QB, psn, 2)
    del script.packets[-2:]  # lost before the tap
    script.message(201_000, A, B, QB, psn + 2, 2)
    script.ack(201_500, B, A, QA, psn, syndrome=0x60)
    script.message(210_000, A, B, QB, psn, 2)
    script.message(211_000, A, B, QB, psn + 2, 2)
    script.ack(212_000, B, A, QA, psn + 3)
    messages, _ = script.run()
    assert messages["last_ns"][-2:].tolist() == [210_100, 211_100]
    assert messages["retransmitted"][-2:].tolist() == [0, 2]


def test_requests_to_read_out_of_order():
    """A request takes as many PSNs as its answer has packets, late or not; none of them is a hole."""
    script = Script()
    psn = 0
    for k in range(12):
        psn = read(script, 10_000 * (k + 1), psn, 4)
    for k in range(4):
        script.add(200_000 + 100 * k, A, B, QB, "RC_READ_REQUEST", psn + 4 * k, va=k, length=4096)
    for k in range(4):
        read(script, 300_000 + 1000 * k, psn + 4 * k, 4, request=False)
    wanted, _ = script.run()
    p = script.packets
    at = next(i for i, packet in enumerate(p) if packet.time_ns == 200_100)
    p[at], p[at + 1] = p[at + 1], p[at]
    messages, flows = script.run()
    names = ["seq", "seq_end", "role", "announces", "bytes", "packets", "flags"]
    assert sorted(messages[names].tolist()) == sorted(wanted[names].tolist())
    assert flows["out_of_order"].tolist() == [1, 0]
    assert flows["missing"].tolist() == [0, 0]


@pytest.mark.parametrize("first", [1, 3, 5])
def test_the_first_packets_out_of_order(first):
    """What lies before the first packet seen is no repetition, unless it is acknowledged already."""
    script = Script()
    psn = exchange(script, 10)
    moved = script.packets.pop(first)
    script.packets.insert(0, moved)
    messages, flows = script.run()
    assert np.sort(messages["seq"]).tolist() == [BASE + 4 * k for k in range(10)]
    assert (messages["packets"] == 4).all()
    assert (messages["flags"] & ~np.uint8(MessageFlag.REORDERED) == 0).all()
    assert flows["retransmitted"].sum() == flows["missing"].sum() == 0
    assert flows["out_of_order"][0] == min(first, 4)
    script.message(500_000, A, B, QB, psn - 44, 4)
    assert len(script.run()[0]) == 10


def test_packets_out_of_order():
    script = Script()
    exchange(script, 10)
    p = script.packets
    p[1], p[2] = p[2], p[1]  # within a message
    p[13], p[15] = p[15], p[13]  # the FIRST of the next message (after an ACK) before the LAST of this one
    messages, flows = script.run()
    assert len(messages) == 10
    assert (messages["packets"] == 4).all()
    assert (messages["bytes"] == 4096).all()
    assert flows["out_of_order"][0] == 2
    assert flows["retransmitted"][0] == flows["missing"][0] == 0
    flags = {int(m["seq"]) - BASE: int(m["flags"]) for m in messages}
    assert flags[0] == flags[8] == MessageFlag.REORDERED
    assert sum(flags.values()) == 2 * MessageFlag.REORDERED
    tags = {int(m["seq"]) - BASE: int(m["tag"]) for m in messages}
    assert tags == {4 * k: k for k in range(10)}


def test_a_capture_may_start_and_end_within_a_message():
    script = Script()
    exchange(script, 10)
    script.packets = script.packets[2:-2]
    messages, flows = script.run()
    assert len(messages) == 10
    assert messages["flags"].tolist() == [MessageFlag.STARTS_BEFORE] + [0] * 8 + [MessageFlag.ENDS_AFTER]
    assert messages["packets"].tolist() == [2] + [4] * 8 + [3]
    assert messages["bytes"].tolist() == [2048] + [4096] * 9
    assert messages["seq_end"][9] == BASE + 40
    assert messages["acked_ns"][9] == NEVER
    assert flows["messages"][0] == 10
    assert flows["missing"][0] == 0


def read(script: Script, t: int, psn: int, packets: int, request: bool = True) -> int:
    """A READ by A of ``packets`` kB, answered by B; returns the PSN after it."""
    if request:
        script.add(t, A, B, QB, "RC_READ_REQUEST", psn, va=0x9000 + psn, length=packets * 1024)
    for k in range(packets):
        end = k == packets - 1
        place = ("ONLY" if end else "FIRST") if k == 0 else ("LAST" if end else "MIDDLE")
        at = t + 1000 + 100 * k
        script.add(at, B, A, QA, f"RC_READ_RESPONSE_{place}", psn + k, payload=1024, syndrome=0x1F)
    return psn + packets


def test_reads_join_request_and_answer():
    script = Script()
    psn = 0xFFFFF0
    for k, packets in enumerate([4, 1, 32, 7, 2, 4, 4, 4, 4, 4]):
        psn = read(script, 10_000 * (k + 1), psn, packets)
        psn = script.message(10_000 * (k + 1) + 5000, A, B, QB, psn, 1, kind="RC_SEND")
        script.ack(10_000 * (k + 1) + 5500, B, A, QA, psn - 1)
    messages, flows = script.run()
    asked = messages[(messages["wire"] == Wire.ROCE_READ) & (messages["flow"] == 0)]
    answered = messages[(messages["wire"] == Wire.ROCE_READ) & (messages["flow"] == 1)]
    assert (asked["role"] == Role.GRANT).all()
    assert (asked["bytes"] == 0).all()
    assert (answered["role"] == Role.DATA).all()
    sizes = [1024 * n for n in [4, 1, 32, 7, 2, 4, 4, 4, 4, 4]]
    assert asked["announces"].tolist() == answered["bytes"].tolist() == sizes
    assert (asked["va"] == answered["va"]).all()
    assert (asked["acked_ns"] == answered["last_ns"]).all()
    assert (asked["seq_end"] - asked["seq"] == np.array(sizes) // 1024).all()
    for counter in ("missing", "out_of_order", "retransmitted"):
        assert flows[counter].tolist() == [0, 0]
    sends = messages[messages["wire"] == Wire.ROCE_SEND]
    assert len(sends) == 10
    assert (sends["acked_ns"] - sends["last_ns"] == 500).all()


def test_read_asked_for_again():
    script = Script()
    psn = 0
    for k in range(10):
        psn = read(script, 10_000 * (k + 1), psn, 4)
    script.add(200_000, A, B, QB, "RC_READ_REQUEST", psn, va=1, length=4096)
    for k, place in enumerate(["FIRST", "MIDDLE"]):  # the rest is lost before this tap
        script.add(201_000 + k, B, A, QA, f"RC_READ_RESPONSE_{place}", psn + k, payload=1024)
    script.add(300_000, A, B, QB, "RC_READ_REQUEST", psn + 2, va=2049, length=2048)
    for k, place in enumerate(["FIRST", "LAST"]):
        script.add(301_000 + k, B, A, QA, f"RC_READ_RESPONSE_{place}", psn + 2 + k, payload=1024)
    messages, flows = script.run()
    assert len(messages) == 22
    answer = messages[(messages["flow"] == 1)][10]
    assert (answer["packets"], answer["bytes"], answer["flags"]) == (4, 4096, 0)
    assert (answer["first_ns"], answer["last_ns"]) == (201_000, 301_001)
    assert flows["retransmitted"].tolist() == [1, 0]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_read_whose_answer_lost_a_packet_before_the_tap(lost):
    """The requester's own node: it sees what follows the hole, and the second answer from there on."""
    script = Script()
    psn = 0xFFFFE0
    for k in range(10):
        psn = read(script, 10_000 * (k + 1), psn, 6)
    script.add(200_000, A, B, QB, "RC_READ_REQUEST", psn, va=1, length=6 * 1024)
    places = ["FIRST", "MIDDLE", "MIDDLE", "MIDDLE", "MIDDLE", "LAST"]
    for k, place in enumerate(places):
        if not 2 <= k < 2 + lost:
            script.add(
                201_000 + k, B, A, QA, f"RC_READ_RESPONSE_{place}", psn + k, payload=1024, syndrome=0x1F
            )
    script.add(300_000, A, B, QB, "RC_READ_REQUEST", psn + 2, va=2049, length=4096)
    for k, place in enumerate(["FIRST", "MIDDLE", "MIDDLE", "LAST"]):
        script.add(
            301_000 + k, B, A, QA, f"RC_READ_RESPONSE_{place}", psn + 2 + k, payload=1024, syndrome=0x1F
        )
    read(script, 400_000, psn + 6, 6)
    messages, flows = script.run()
    assert len(messages) == 24
    answers = messages[messages["flow"] == 1]
    assert answers["bytes"].tolist() == [6 * 1024] * 12
    assert answers["packets"].tolist() == [6] * 12
    assert (answers["flags"] & MessageFlag.GAP == 0).all()
    assert flows["retransmitted"].tolist() == [1, 4 - lost]
    assert flows["missing"].tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(6))
def test_no_message_holds_more_than_was_sent(seed):
    """Packets in no order at all, with more holes than are remembered, as a broken capture may have them."""
    rng = Random(seed)
    script = Script()
    kinds = [
        f"RC_{kind}_{place}" for kind in ("SEND", "WRITE") for place in ("FIRST", "MIDDLE", "LAST", "ONLY")
    ]
    kinds += [f"RC_READ_RESPONSE_{place}" for place in ("FIRST", "MIDDLE", "LAST", "ONLY")]
    for k in range(5000):
        psn = rng.randrange(1 << rng.choice((9, 23)))
        script.add(1000 * k, A, B, QB, rng.choice(kinds), psn, payload=1024, length=rng.randrange(9999))
    messages, _ = script.run()
    assert messages["packets"].max() <= 5000
    assert messages["retransmitted"].max() <= 5000
    assert messages["bytes"].max() <= 5000 * 1024


def test_rnr_and_atomics():
    script = Script()
    psn = exchange(script, 8)
    for k in range(3):
        t = 100_000 * (k + 1)
        script.add(t, A, B, QB, "RC_SEND_ONLY", psn, payload=100)
        script.ack(t + 500, B, A, QA, psn, syndrome=0x20 | 12)
    script.add(500_000, A, B, QB, "RC_SEND_ONLY", psn, payload=100)
    script.ack(500_500, B, A, QA, psn)
    script.add(600_000, A, B, QB, "RC_FETCH_ADD", psn + 1, va=77)
    script.add(600_900, B, A, QA, "RC_ATOMIC_ACKNOWLEDGE", psn + 1)
    messages, flows = script.run()
    send, atomic = messages[8:]
    assert flows["rnr"].tolist() == [0, 3]
    assert (send["retransmitted"], send["last_ns"], send["acked_ns"]) == (3, 500_000, 500_500)
    assert (atomic["wire"], atomic["bytes"], atomic["va"]) == (Wire.ROCE_ATOMIC, 8, 77)
    assert atomic["acked_ns"] == 600_900


def test_marks_and_cnps_count_on_the_data():
    script = Script()
    psn = exchange(script, 10)
    for k, place in enumerate(["FIRST", "MIDDLE", "LAST"]):
        script.add(200_000 + k, A, B, QB, f"RC_WRITE_{place}", psn + k, payload=1024, length=3072, ce=k > 0)
    script.add(200_500, B, A, QA, "CNP", 0)
    messages, flows = script.run()
    assert messages["ecn_marked"].tolist() == [0] * 10 + [2]
    assert flows["ecn_marked"].tolist() == [2, 0]
    assert flows["cnp"].tolist() == [1, 0]


def test_cnp_before_pairing_moves_to_the_slowed_flow():
    script = Script()
    script.add(0, B, A, QA, "CNP", 0)
    exchange(script, 10)
    _, flows = script.run(rows=7)
    by_qp = {int(f["dest_qp"]): int(f["cnp"]) for f in flows}
    assert by_qp == {QA: 0, QB: 1}


def test_datagrams():
    script = Script()
    for k in range(5):
        script.add(1000 * k, A, B, QB, "UD_SEND_ONLY", k, payload=256, src_qp=QA)
        script.add(1000 * k + 400, B, A, QA, "UD_SEND_ONLY_IMM", 100 + k, payload=64, src_qp=QB, imm=k)
    script.add(4450, B, A, QA, "UD_SEND_ONLY_IMM", 104, payload=64, src_qp=QB, imm=4)
    messages, flows = script.run()
    assert len(messages) == 10
    assert (messages["wire"] == Wire.ROCE_DATAGRAM).all()
    assert messages["bytes"].tolist() == [256, 64] * 5
    assert messages["sub"].tolist() == [QA, QB] * 5
    assert flows["retransmitted"].tolist() == [0, 1]
    assert flows["peer"].tolist() == [1, 0]
    assert flows["pairing"].tolist() == [Pairing.HANDSHAKE] * 2


def test_single_direction_leaves_peers_unknown():
    script = Script()
    exchange(script, 20)
    script.packets = [p for p in script.packets if p.src == A]
    messages, flows = script.run()
    assert len(messages) == 20
    assert (messages["acked_ns"] == NEVER).all()
    assert flows["peer"].tolist() == [NONE32]


def cts(index: int, version: int, size: int = 1 << 20, sender: int = 3) -> bytes:
    """NCCL's clear-to-send entry, as net_ib of that era writes it."""
    entry = bytearray(64)
    entry[8:12] = size.to_bytes(4, "little")
    tag, at = {220: (24, 32), 225: (36, 40), 230: (52, 56)}[version]
    entry[tag : tag + 4] = sender.to_bytes(4, "little")
    entry[at : at + 8] = index.to_bytes(8, "little")
    return bytes(entry)


@pytest.mark.parametrize(
    ("version", "captured"), [(220, 64), (220, 58), (225, 64), (230, 64), (230, 58), (225, 20)]
)
@pytest.mark.parametrize("first", [0, 300, 70_000])
def test_clear_to_send(version, captured, first):
    script = Script()
    psn = 0
    for k in range(first, first + 40):
        t = 10_000 * k
        va = 0x7000 + 512 * (k % 256)
        data = cts(k + 1, version)[:captured]
        script.add(t, B, A, QA, "RC_WRITE_ONLY", k, payload=64, va=va, length=64, data=data)
        script.ack(t + 200, A, B, QB, k)
        psn = script.message(t + 1000, A, B, QB, psn, 3, imm=3072)
        script.ack(t + 2000, B, A, QA, psn - 1)
    messages, flows = script.run()
    grants = messages[messages["role"] == Role.GRANT]
    assert len(grants) == 40
    assert (grants["announces"] == 1 << 20).all()
    assert flows["dest_qp"][grants["flow"]].tolist() == [QA] * 40
    visible = (captured > 40 and version != 230) or captured > 56
    # An entry whose index was not captured is numbered by its PSN, which counts entries as well.
    assert grants["sub"].tolist() == list(range(first + 1, first + 41))
    assert (grants["tag"] == (3 if visible else 0)).all()
    assert (messages["role"] == Role.DATA).sum() == 40


@pytest.mark.parametrize("swapped", [False, True])
def test_clear_to_send_out_of_order(swapped):
    script = Script()
    psn = 0
    for k in range(0, 40, 2):
        for j in (k + 1, k) if swapped and k > 10 else (k, k + 1):
            entry = cts(j + 1, 220)
            script.add(
                10_000 * k, B, A, QA, "RC_WRITE_ONLY", j, payload=64, va=512 * j, length=64, data=entry
            )
        script.ack(10_000 * k + 200, A, B, QB, k + 1)
        for j in range(2):
            psn = script.message(10_000 * k + 1000 * (j + 1), A, B, QB, psn, 3, imm=3072)
        script.ack(10_000 * k + 3000, B, A, QA, psn - 1)
    messages, flows = script.run()
    assert flows["out_of_order"].tolist() == [14 if swapped else 0, 0]
    grants = np.sort(messages[messages["role"] == Role.GRANT], order="seq")
    assert grants["sub"].tolist() == list(range(1, 41))
    assert (grants["announces"] == 1 << 20).all()
    assert (grants["tag"] == 3).all()
    assert (messages["role"] == Role.DATA).sum() == 40


def test_small_writes_without_immediates_the_other_way_are_data():
    script = Script()
    for k in range(20):
        script.add(
            1000 * k, B, A, QA, "RC_WRITE_ONLY", k, payload=64, va=512 * k, length=64, data=cts(k + 1, 220)
        )
        script.ack(1000 * k + 100, A, B, QB, k)
    messages, _ = script.run()
    assert (messages["role"] == Role.DATA).all()
    assert (messages["announces"] == 0).all()
    assert len(np.unique(messages["sub"])) == 1  # a sample of what they carry, no count


@pytest.mark.parametrize(("captured", "seen"), [(64, True), (12, True), (11, False), (0, False)])
def test_a_sample_of_what_a_write_carries(captured: int, seen: bool):
    """Words of data alone: LL has flags between them, which change from hop to hop."""
    script = Script()
    one, other, flags = 0x89ABCDEF, 0x01234567, 5
    for k in range(8):
        words = (one + k, flags + k, other, flags + k)
        body = b"".join(word.to_bytes(4, "little") for word in words) + bytes(48)
        script.add(1000 * k, A, B, QB, "RC_WRITE_ONLY_IMM", k, payload=64, va=64 * k, length=64, imm=64,
                   data=body[:captured])  # fmt: skip
    messages, _ = script.run()
    wanted = [((one + k) * 0x9E3779B1 + other) & 0xFFFFFFFF if seen else 0 for k in range(8)]
    assert messages["sub"].tolist() == wanted
