"""TCP streams on scripted segments: loss, order, repeats, wrap, coalescing, snap length, late starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from naive_tcp import ISN, Message, Segment, cut, frame_gloo, gloo, handshake, reassemble, run

from dpuflow.schema.rows import NEVER, Framing, MessageFlag, Op, Pairing, Role, TcpFlag, Wire

HELLO = (1).to_bytes(8, "little")
SEND, GRANT = 2, 3


def shape(rows: np.ndarray, way: int) -> list[tuple]:
    """Offset, end, wire and tag of a flow's messages in stream order."""
    own = np.sort(rows[rows["flow"] == way], order="seq")
    start = (1 << 32) + ISN[way] + 1
    return [
        (int(r["seq"]) - start, int(r["seq_end"]) - start, Wire(int(r["wire"])), int(r["tag"])) for r in own
    ]


def expected(messages: list[Message]) -> list[tuple]:
    return [(m.at, m.end, m.wire, m.tag) for m in messages]


def stream(*tags: int, length: int = 3000) -> bytes:
    """SEND_READY and DATA for each tag."""
    return b"".join(gloo(SEND, tag, length) + gloo(1, tag, length) for tag in tags)


def test_messages_times_and_acks() -> None:
    sent = HELLO + stream(7, 8)
    segments = handshake() + cut(0, sent, [8, 48, 1448], 100)
    segments += [Segment(10_000, 1, 0, ack=56), Segment(20_000, 1, 0, ack=len(sent))]
    rows, flows, tcp = run(segments)
    assert shape(rows, 0) == expected(frame_gloo(0, sent))
    assert flows["framing"][0] == Framing.GLOO
    assert list(flows["peer"]) == [1, 0]
    assert set(flows["pairing"]) == {Pairing.PORTS}
    ready, data = rows[1], rows[2]
    assert (ready["op"], ready["role"], ready["announces"], ready["bytes"]) == (
        Op.ALL_REDUCE,
        Role.OFFER,
        3000,
        0,
    )
    assert (data["role"], data["bytes"], data["packets"]) == (Role.DATA, 3000, 3)
    assert (data["first_ns"], data["last_ns"], data["acked_ns"]) == (300, 500, 20_000)
    assert (ready["acked_ns"], rows[0]["acked_ns"], rows[0]["sub"]) == (10_000, 10_000, 1)
    assert (data["first_frame"], data["last_frame"]) == (5, 7)
    assert flows["rtt_min_ns"][0] == 10_000 - ready["last_ns"]
    assert (tcp.hidden.headers, tcp.hidden.bytes_unresolved) == (0, 0)


def test_sequence_numbers_wrap() -> None:
    sent = stream(1, 2, 3)
    rows, _, _ = run(handshake() + cut(1, sent, [1448], 100))
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert int(rows["seq_end"].max()) >> 32 == 2


def test_retransmission_counts_on_its_own_message() -> None:
    sent = stream(1, 2)
    segments = cut(1, sent, [48, 1448], 100)
    again = [Segment(5000, 1, 48, sent[48 : 48 + 1448]), Segment(6000, 1, 0, sent[:48])]
    rows, flows, _ = run(handshake() + segments + again)
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert list(np.sort(rows, order="seq")["retransmitted"]) == [1, 1, 0, 0]
    assert (flows["retransmitted"][1], flows["out_of_order"][1], flows["missing"][1]) == (2, 0, 0)


@pytest.mark.parametrize("after_the_ack", [False, True])
def test_a_repeat_that_the_receiver_did_not_need_is_no_loss(after_the_ack: bool) -> None:
    """A probe of the tail, or a segment that was only out of order: told by the ACKs (RFC 2883)."""
    sent = stream(1, 2)
    tail = len(sent) - 100
    acked = [Segment(4000, 0, 0, ack=len(sent))]
    probe = [Segment(5000, 1, tail, sent[tail:])]
    echo = [Segment(6000, 0, 0, ack=len(sent), sack=(tail, len(sent)))]
    later = acked + probe + echo if after_the_ack else probe + echo
    rows, flows, _ = run(handshake() + cut(1, sent, [48, 1448], 100) + later)
    assert (flows["retransmitted"][1], flows["spurious"][1]) == (1, 1)
    assert not rows["retransmitted"].any()


def test_a_repeat_that_filled_a_hole_is_a_loss_though_others_are_sacked() -> None:
    sent = stream(1, 2)
    again = [Segment(5000, 1, 48, sent[48 : 48 + 1448])]
    hole = [Segment(4000, 0, 0, ack=48, sack=(48 + 1448, len(sent)))]
    whole = [Segment(6000, 0, 0, ack=len(sent))]
    rows, flows, _ = run(handshake() + cut(1, sent, [48, 1448], 100) + hole + again + whole)
    assert (flows["retransmitted"][1], flows["spurious"][1]) == (1, 0)
    assert rows["retransmitted"].sum() == 1


def test_flow_counts_every_packet() -> None:
    sent = stream(1, 2)
    segments = [*handshake(), *cut(0, HELLO + sent, [8, 48, 1448], 100)]
    segments[4].ce = True
    segments += [replace(segments[4], time_ns=7000), Segment(8000, 1, 0, ack=56, ce=True)]
    for rows in (1, 4, 1000):
        _, flows, _ = run(segments, rows=rows)
        for way in (0, 1):
            own = [s for s in segments if s.way == way]
            assert flows["packets"][way] == len(own)
            assert flows["bytes"][way] == sum(len(s.data) for s in own)
            assert flows["ecn_marked"][way] == sum(s.ce for s in own) > 0
            assert (flows["first_ns"][way], flows["last_ns"][way]) == (own[0].time_ns, own[-1].time_ns)


def test_packets_that_wait_for_room_are_counted_once() -> None:
    # Segments beyond a hole fill the slots, and wide ones ask for wider slots: the kernel comes back to both.
    sent = stream(*range(1, 200), length=1000)
    segments = cut(1, sent, [48, 1448], 100)
    late = segments.pop(1)
    late.time_ns = 10**6
    segments = [*handshake(), *segments, late]
    _, flows, _ = run(segments)
    assert list(flows["packets"]) == [2, len(segments) - 2]
    assert flows["bytes"][1] == len(sent)


def test_hole_filled_by_the_retransmission_delays_the_messages_behind_it() -> None:
    sent = stream(1, 2, length=1000)
    segments = cut(1, sent, [48, 500], 100)
    late = segments.pop(1)
    late.time_ns = 9000
    rows, flows, _ = run([*handshake(), *segments, late])
    rows = np.sort(rows, order="seq")
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert list(rows["last_ns"]) == [100, 9000, 9000, 9000]
    assert rows["last_frame"][3] == len(segments) + 3
    assert (flows["out_of_order"][1], flows["retransmitted"][1]) == (len(segments) - 1, 0)
    assert rows["flags"][3] & MessageFlag.REORDERED
    assert not rows["flags"][0]


def test_records_swapped_in_the_file_are_not_out_of_order() -> None:
    sent = stream(1, 2, length=1000)
    segments = cut(1, sent, [500], 100)
    segments[1], segments[2] = segments[2], segments[1]
    rows, flows, _ = run(handshake() + segments)
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert flows["out_of_order"][1] == 0
    assert not rows["flags"].any()


def test_hole_that_was_acknowledged_is_missing_from_the_capture() -> None:
    sent = stream(1, 2, 3, 4, length=1000)
    segments = cut(1, sent, [48, 500], 100)
    del segments[2]  # inside the first DATA
    segments.insert(6, Segment(650, 0, 0, ack=2000))
    rows, flows, _ = run(handshake() + segments)
    rows = np.sort(rows, order="seq")
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert [bool(r["flags"] & MessageFlag.GAP) for r in rows[:3]] == [False, True, False]
    assert flows["missing"][1] == 1
    assert rows["acked_ns"][0] == 650


def test_resynchronises_after_a_hole_that_swallowed_headers() -> None:
    messages = [gloo(SEND, k, 1000) + gloo(1, k, 1000) for k in range(1, 9)]
    segments = cut(1, b"".join(messages), [len(messages[0])], 100)
    del segments[3:5]
    segments.append(Segment(5000, 0, 0, ack=8 * len(messages[0])))
    segments.append(Segment(5100, 1, 8 * len(messages[0]), gloo(SEND, 9, 0)))
    rows, flows, tcp = run(handshake() + segments)
    told = [s for s in shape(rows, 1) if s[2] != Wire.TCP_BURST]
    assert [tag for *_, tag in told] == [1, 1, 2, 2, 3, 3, 6, 6, 7, 7, 8, 8, 9]
    gap = rows[rows["wire"] == Wire.TCP_BURST]
    assert [int(r["seq_end"] - r["seq"]) for r in gap] == [2 * len(messages[0])]
    assert (gap["flags"] & MessageFlag.GAP).all()
    assert flows["missing"][1] == 1
    assert tcp.hidden.bytes_unresolved == 2 * len(messages[0])


def test_starts_in_the_middle_of_a_message() -> None:
    sent = stream(1, 2, 3)
    segments = [s for s in cut(1, sent, [48, 1448, 1448, 152] * 3, 100) if s.at >= 1000]
    rows, flows, _ = run(segments)
    assert flows["framing"][1] == Framing.GLOO
    assert [s[3] for s in shape(rows, 1)] == [0, 2, 2, 3, 3]
    head = np.sort(rows, order="seq")[0]
    assert head["role"] == Role.BURST
    assert head["flags"] & MessageFlag.STARTS_BEFORE


def test_ends_in_the_middle_of_a_message() -> None:
    sent = stream(1, 2)
    rows, _, _ = run(handshake() + cut(1, sent[:-500], [1448], 100))
    last = np.sort(rows, order="seq")[-1]
    assert last["flags"] == MessageFlag.ENDS_AFTER
    assert (last["bytes"], last["seq_end"] - last["seq"]) == (3000, 3048)


def test_header_across_two_segments() -> None:
    sent = stream(1, 2, 3)
    for first in (3, 8, 9, 20, 47):
        rows, _, _ = run(
            handshake() + cut(1, sent, [48, 3048, first, 60, 3096 - first - 60, 3096], 100), snap=62
        )
        assert shape(rows, 1)[:4] == expected(frame_gloo(1, sent))[:4], first
        assert not rows["flags"][rows["tag"] == 1].any()
        assert not rows["flags"][(rows["tag"] == 2) & (rows["role"] == Role.OFFER)].any()


def test_partly_seen_header_gives_what_its_bytes_give() -> None:
    sent = gloo(SEND, 1, 1000) + gloo(1, 1, 1000) + stream(2, 3)
    # 62 bytes show the first READY, and length and opcode of the DATA behind it.
    rows, _, tcp = run(handshake() + cut(1, sent, [48 + 1048, 48, 3048, 48, 3048], 100), snap=62)
    rows = np.sort(rows, order="seq")
    data = rows[1]
    assert (data["wire"], data["bytes"], data["tag"], data["op"]) == (Wire.GLOO_DATA, 1000, 1, Op.ALL_REDUCE)
    assert data["flags"] == MessageFlag.HIDDEN
    assert (tcp.hidden.headers, tcp.hidden.resolved) == (1, 1)


def test_hidden_ready_is_told_from_its_transfer() -> None:
    # DATA 1 ends in the middle of a segment, behind it SEND_READY 2, unseen; then DATA 2.
    sent = stream(1, 2, 3)
    cuts = [48, 3048 + 48, 3048, 48, 3048]
    rows, _, tcp = run(handshake() + cut(1, sent, cuts, 100), snap=62)
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    hidden = rows[(rows["flags"] & MessageFlag.HIDDEN) != 0]
    assert [(r["wire"], r["tag"], r["announces"]) for r in hidden] == [(Wire.GLOO_SEND_READY, 2, 3000)]
    assert (tcp.hidden.stretches, tcp.hidden.stretches_resolved, tcp.hidden.bytes_unresolved) == (1, 1, 0)


def taking_turns(*parts: tuple[int, bytes]) -> list[Segment]:
    """A connection of (way, bytes), each one segment, one after the other."""
    segments, at = handshake(), [0, 0]
    for number, (way, payload) in enumerate(parts):
        segments += cut(way, payload, [len(payload)], 1000 * (number + 1), at=at[way])
        at[way] += len(payload)
    return segments


def test_each_hidden_stretch_gets_one_ready_of_both_kinds() -> None:
    """Two stretches with two READYs each: those of one kind in the first would wait for DATA sent before."""
    offer, grant, data = gloo(SEND, 1, 3000), gloo(GRANT, 1, 3000), gloo(1, 1, 3000)
    peer = [(1, grant), (1, offer), (1, grant), (1, offer)]
    once = [(0, grant), (0, offer), *peer, (0, data + grant + offer + data), (1, data), (1, data)]
    rows, _, tcp = run(taking_turns(*once, *once), snap=62)
    assert (tcp.hidden.stretches_resolved, tcp.hidden.bytes_unresolved) == (2, 0)
    hidden = rows[(rows["flags"] & MessageFlag.HIDDEN) != 0]
    kinds = [sorted(hidden["wire"][hidden["first_ns"] == t].tolist()) for t in np.unique(hidden["first_ns"])]
    assert kinds == [sorted([Wire.GLOO_SEND_READY, Wire.GLOO_RECV_READY, Wire.GLOO_DATA])] * 2


def test_a_hidden_ready_is_not_of_an_operation_that_nobody_has_begun() -> None:
    """Of operation 1 a whole transfer hides, both READYs and its DATA; of operation 2 a RECV_READY."""
    grant, offer, data = ({tag: gloo(kind, tag, 3000) for tag in (1, 2, 3)} for kind in (GRANT, SEND, 1))

    def operation(tag: int, *answers: bytes) -> list[tuple[int, bytes]]:
        begin = [(0, grant[tag]), (0, offer[tag]), (1, grant[tag]), (1, offer[tag]), (1, grant[tag])]
        return [
            *begin,
            (0, data[tag] + grant[tag]),
            (0, offer[tag]),
            *((1, each) for each in answers),
            (0, data[tag]),
        ]

    hidden, shown = [data[1] + offer[1] + data[1]], [[data[tag], offer[tag], data[tag]] for tag in (2, 3)]
    parts = [*operation(1, *hidden), *operation(2, *shown[0]), *operation(3, *shown[1])]
    rows, _, tcp = run(taking_turns(*parts), snap=62)
    assert tcp.hidden.bytes_unresolved == 0
    granted = rows[(rows["wire"] == Wire.GLOO_RECV_READY) & (rows["flow"] == 0)]
    assert sorted(granted["tag"].tolist()) == [1, 1, 2, 2, 3, 3]


def test_a_hidden_ready_goes_where_the_next_one_would_be_too_late() -> None:
    """Two slots lack a READY each; the one whose DATA comes first need not be the one whose turn it is.

    Slot 2 has sent its second DATA before its second READY that was seen: the hidden one is its own.
    """
    offer, data = (lambda tag: gloo(SEND, tag, 3000)), (lambda tag: gloo(1, tag, 3000))
    grants = [(1, gloo(GRANT, tag, 3000)) for tag in (1, 2, 1, 2)]
    parts = [
        *grants, (0, offer(2)), (0, data(2) + offer(2)), (0, offer(1)), (0, data(1)),
        (0, data(2) + offer(1)), (0, data(1)),
    ]  # fmt: skip
    rows, _, tcp = run(taking_turns(*parts), snap=62)
    hidden = np.sort(rows[(rows["flags"] & MessageFlag.HIDDEN) != 0], order="seq")
    assert (tcp.hidden.stretches_resolved, tcp.hidden.bytes_unresolved) == (2, 0)
    assert [(int(r["wire"]), int(r["tag"])) for r in hidden] == [
        (Wire.GLOO_SEND_READY, 2), (Wire.GLOO_SEND_READY, 1),
    ]  # fmt: skip


def test_a_slot_whose_last_block_is_shorter() -> None:
    """The receiver's READYs tell each transfer's length; the sender's own are behind its backlog."""
    blocks = [3000, 3000, 2900]
    offers, datas = ([gloo(kind, 1, n) for n in blocks] for kind in (SEND, 1))
    parts = [(1, gloo(GRANT, 1, n)) for n in blocks]
    parts += [(0, offers[0]), (0, datas[0] + offers[1] + datas[1] + offers[2] + datas[2])]
    rows, _, tcp = run(taking_turns(*parts), snap=62)
    assert tcp.hidden.bytes_unresolved == 0
    sent = rows[(rows["flow"] == 0) & (rows["wire"] == Wire.GLOO_DATA)]
    assert sorted(sent["bytes"].tolist()) == sorted(blocks)
    told = rows[(rows["flow"] == 0) & (rows["wire"] == Wire.GLOO_SEND_READY)]
    assert sorted(told["announces"].tolist()) == sorted(blocks)


@pytest.mark.parametrize("length", [0, 1])
def test_keep_alives_are_not_data(length: int) -> None:
    sent = stream(1, 2)
    keep = Segment(10_000, 1, len(sent) - 1, b"\0" * length, ack=0)
    rows, flows, _ = run([*handshake(), *cut(1, sent, [1448], 100), keep])
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert flows["retransmitted"][1] == 0
    assert rows["last_ns"].max() < 10_000


def test_window_probe_is_not_data_until_it_is_acknowledged() -> None:
    sent = stream(1, 2)
    first, second = sent[:3096], sent[3096:]
    head = handshake() + cut(1, first, [1448], 100)
    full = Segment(1000, 0, 0, ack=3096, window=0)
    probe = Segment(2000, 1, 3096, second[:1])
    rest = cut(1, second, [1448], 5000, at=3096)
    rows, flows, _ = run([*head, full, probe, Segment(4000, 0, 0, ack=3096), *rest])
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert flows["zero_window"][0] == 1
    assert flows["retransmitted"][1] == 0
    assert np.sort(rows, order="seq")["first_ns"][2] == 5000
    taken = [*head, full, probe, Segment(4000, 0, 0, ack=3097), *cut(1, second[1:], [1448], 5000, at=3097)]
    rows, flows, _ = run(taken)
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert np.sort(rows, order="seq")["first_ns"][2] == 2000
    assert flows["missing"][1] == 0


def test_segments_of_64_kib() -> None:
    sent = stream(1, 2, length=200_000)
    rest = 200_048 - 3 * 65160
    rows, _, _ = run(handshake() + cut(1, sent, [48, 65160, 65160, 65160, rest] * 2, 100), snap=62)
    assert shape(rows, 1) == expected(frame_gloo(1, sent))
    assert int(rows["bytes"][rows["role"] == Role.DATA].sum()) == 400_000


def test_bursts_end_at_a_reply_or_at_silence() -> None:
    segments = handshake()
    segments += cut(0, b"?" * 3000, [1000], 1000)
    segments += [Segment(2000, 1, 0, ack=3000)]  # round trip: 800 ns
    segments += [Segment(2100, 1, 0, b"!" * 500, ack=3000)]
    segments += cut(0, b"." * 400, [200], 3000, at=3000)
    segments += [Segment(3200, 1, 500, ack=3400)]
    segments += cut(0, b"-" * 100, [100], 900_000, at=3400)
    rows, flows, _ = run(segments)
    assert set(flows["framing"]) == {Framing.NONE}
    assert {Role(int(r)) for r in rows["role"]} == {Role.BURST}
    assert [int(r["bytes"]) for r in rows if r["flow"] == 0] == [3000, 400, 100]
    assert [int(r["bytes"]) for r in rows if r["flow"] == 1] == [500]
    assert rows["acked_ns"][rows["flow"] == 0][0] == 2000


def test_bursts_end_where_a_write_ends_whatever_the_opposite_side_does() -> None:
    push = TcpFlag.ACK | TcpFlag.PSH
    segments = handshake()
    segments += [Segment(100, 0, 0, b"a" * 48, ack=0, flags=push), Segment(110, 0, 48, b"b" * 1448, ack=0)]
    segments += [Segment(120, 1, 0, b"!" * 48, ack=48, flags=push)]  # in the middle of a write
    # Pushed, but full: the socket's buffer was full, and the write goes on.
    segments += [Segment(130, 0, 1496, b"b" * 1448, ack=48, flags=push)]
    segments += [Segment(140, 1, 48, b"!" * 48, ack=1496, flags=push)]
    segments += [Segment(150, 0, 2944, b"b" * 100, ack=96, flags=push)]
    segments += [Segment(160, 0, 3044, b"c" * 70, ack=96, flags=push)]
    rows, _, _ = run(segments)
    assert [int(r["bytes"]) for r in rows if r["flow"] == 0] == [48, 2996, 70]
    assert [int(r["bytes"]) for r in rows if r["flow"] == 1] == [48, 48]
    late = [replace(s, time_ns=s.time_ns + (1000 if s.way else 0)) for s in segments]
    elsewhere, _, _ = run(sorted(late, key=lambda s: s.time_ns))
    assert [int(r["bytes"]) for r in np.sort(elsewhere[elsewhere["flow"] == 0], order="seq")] == [
        48,
        2996,
        70,
    ]
    # Overtaken segments keep their pushes.
    swapped = [*segments[:3], segments[4], segments[3], *segments[5:]]
    rows, _, _ = run([replace(s, time_ns=10 * k) for k, s in enumerate(swapped)])
    assert [int(r["bytes"]) for r in np.sort(rows[rows["flow"] == 0], order="seq")] == [48, 2996, 70]


def test_zeroed_payload_is_bursts_and_one_header_is_no_chain() -> None:
    blind = [*handshake(), *cut(1, bytes(5000), [1448], 100), Segment(9000, 0, 0, ack=5000)]
    rows, flows, _ = run(blind)
    assert flows["framing"][1] == Framing.NONE
    assert int(rows["bytes"].sum()) == 5000
    lone = gloo(SEND, 1, 1000) + bytes(2000)
    rows, flows, _ = run(handshake() + cut(1, lone, [48, 1448], 100))
    assert flows["framing"][1] == Framing.NONE
    assert int(rows["bytes"].sum()) == len(lone)
    assert {Role(int(r)) for r in rows["role"]} == {Role.BURST}


def test_reused_ports_begin_a_new_stream() -> None:
    sent = stream(1, 2)
    first = handshake() + cut(1, sent, [1448], 100)
    first += [Segment(5000, 1, len(sent), ack=0, flags=TcpFlag.FIN | TcpFlag.ACK)]
    later = [Segment(s.time_ns + 10_000, s.way, s.at + 70_000, s.data, s.ack, s.flags) for s in first]
    for s in later:
        s.ack = None
    rows, _, _ = run(first + later)
    assert [int(t) for t in rows["tag"]] == [1, 1, 2, 2] * 2
    assert rows["acked_ns"].max() == NEVER


def conversation(rng: np.random.Generator, transfers: int) -> tuple[bytes, bytes]:
    """Both streams of a Gloo connection; lengths differ from tag to tag."""
    streams = [HELLO, b""]
    for tag in range(1, transfers + 1):
        length = int(rng.integers(0, 5000))
        for way in (0, 1):
            streams[way] += gloo(GRANT, tag, length) + gloo(SEND, tag, length) + gloo(1, tag, length)
    return streams[0], streams[1]


def scrambled(rng: np.random.Generator, streams: tuple[bytes, bytes]) -> list[Segment]:
    """The streams in random segments, some overtaken by later ones, some sent again, with ACKs."""
    timed: list[tuple[float, int, Segment]] = []
    for way in (0, 1):
        for k, s in enumerate(cut(way, streams[way], [int(x) for x in rng.integers(1, 3000, 5000)], 0)):
            delay = rng.integers(0, 12) if rng.random() < 0.2 else 0
            timed.append((k + delay + 0.1 * way, way, s))
            if rng.random() < 0.1:
                extra = streams[way][s.at : s.at + len(s.data) + int(rng.integers(0, 500))]
                timed.append((k + 20, way, Segment(0, way, s.at, extra)))
    made, reached = handshake(), [0, 0]
    have: list[set[int]] = [set(), set()]
    for _, way, s in sorted(timed, key=lambda item: item[0]):
        have[way] |= set(range(s.at, s.at + len(s.data)))
        while reached[way] in have[way]:
            reached[way] += 1
        ack = reached[1 - way] if rng.random() < 0.7 else None
        made.append(Segment(100 + 100 * len(made), way, s.at, s.data, ack))
    return made


@pytest.mark.parametrize("seed", range(12))
def test_random_segments_against_the_plain_reassembler(seed: int) -> None:
    rng = np.random.default_rng(seed)
    segments = scrambled(rng, conversation(rng, 6))
    rows, _, _ = run(segments, rows=int(rng.integers(1, 50)))
    start = [(1 << 32) + isn + 1 for isn in ISN]
    ours = []
    for r in rows:
        way, at, end = int(r["flow"]), int(r["seq"]), int(r["seq_end"])
        what = int(r["wire"]), int(r["tag"]), int(r["bytes"] + r["announces"])
        times = int(r["first_ns"]), int(r["last_ns"]), int(r["acked_ns"])
        ours.append((way, at - start[way], end - start[way], *what, *times))
    plain = sorted(
        (m.way, m.at, m.end, int(m.wire), m.tag, m.length, m.first_ns, m.last_ns, m.acked_ns)
        for m in reassemble(segments)
    )
    assert sorted(ours) == plain


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("snap", [20, 62])
def test_random_segments_cut_short_say_nothing_wrong(seed: int, snap: int) -> None:
    rng = np.random.default_rng(seed)
    streams = conversation(rng, 12)
    segments = handshake()
    for way in (0, 1):
        segments += cut(way, streams[way], [48, *(int(x) for x in rng.integers(40, 3000, 5000))], 100)
    segments.sort(key=lambda s: s.time_ns)
    rows, _, tcp = run(segments, snap=snap)
    for way in (0, 1):
        truth = {m.at: m for m in frame_gloo(way, streams[way])}
        told = shape(rows, way)
        assert [a[1] for a in told[:-1]] == [b[0] for b in told[1:]]
        assert told[-1][1] == len(streams[way])
        own = np.sort(rows[rows["flow"] == way], order="seq")
        for (at, end, wire, tag), row in zip(told, own, strict=True):
            if not row["flags"] & MessageFlag.HIDDEN and wire != Wire.TCP_BURST:
                assert expected([truth[at]]) == [(at, end, wire, tag)]
    assert tcp.hidden.resolved <= tcp.hidden.headers


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_segments_is_survived(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces = [gloo(SEND, 1, 100), gloo(1, 1, 100), gloo(GRANT, 2, 9), b"\0" * 8, b"x" * 700, b""]
    segments = []
    for k in range(4000):
        at = int(rng.integers(0, 60_000)) if rng.random() < 0.9 else int(rng.integers(0, 2**32))
        flags = int(rng.integers(0, 256)) if rng.random() < 0.05 else TcpFlag.ACK
        data = pieces[int(rng.integers(len(pieces)))] * int(rng.integers(1, 4))
        ack = int(rng.integers(0, 60_000)) if rng.random() < 0.2 else None
        segments.append(Segment(100 * k, int(rng.integers(2)), at, data, ack, flags, int(rng.integers(0, 3))))
    rows, flows, _ = run(segments, snap=int(rng.choice([0, 30, 62, 2000])), rows=int(rng.integers(1, 300)))
    assert (rows["seq"] < rows["seq_end"]).all()
    assert (rows["first_ns"] <= rows["last_ns"]).all() or flows["out_of_order"].any()
    assert int(flows["messages"].sum()) == len(rows)
    assert set(np.unique(rows["flow"])) <= {0, 1}
