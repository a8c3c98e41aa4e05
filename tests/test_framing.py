"""Header tables and the reading of Open MPI frames: roles, match keys, pointers, and what is no header."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from naive_tcp import Segment, cut, gloo, handshake, run

from dpuflow import framing
from dpuflow.kernels import grants
from dpuflow.schema.rows import Framing, MessageFlag, Op, Role, Wire

JOB = 0x59A20001


def hello(rank: int) -> bytes:
    return struct.pack("<II16s", JOB, rank, framing.OB1_MAGIC + b"\0V")


def frame(kind: int, header: bytes, payload: bytes = b"") -> bytes:
    """A BTL header, the ob1 type and flags, the rest of the ob1 header, the payload."""
    body = bytes([kind, 0]) + header + payload
    return struct.pack("<BBHI", kind, framing.BTL_SEND, 0, len(body)) + body


def match(seq: int, payload: int, tag: int = -12, context: int = 3) -> bytes:
    return frame(framing.OB1_MATCH, struct.pack("<HiiH", context, 1, tag, seq), bytes(payload))


def rndv(seq: int, length: int, request: int, tag: int = -12, context: int = 3) -> bytes:
    return frame(framing.OB1_RNDV, struct.pack("<HiiH2xQQ", context, 1, tag, seq, length, request))


def put_request(request: int, fragment: int, address: int, length: int) -> bytes:
    return frame(framing.OB1_PUT, struct.pack("<6xQQQQQQ", request, fragment, 7, 0, address, length))


def put(address: int, length: int) -> bytes:
    head = struct.pack("<BBHI", framing.BTL_TAG_PUT, framing.BTL_PUT, 1, length)
    return head + struct.pack("<QQ", address, length) + bytes(length)


def fin(fragment: int, length: int) -> bytes:
    return frame(framing.OB1_FIN, struct.pack("<6xQQ", length, fragment))


def both(first: list[bytes], second: list[bytes]) -> list[Segment]:
    """A connection on which each frame is a run of segments of its own, the sides taking turns."""
    segments, at, now = handshake(), [0, 0], 100
    for k in range(max(len(first), len(second))):
        for way, frames in ((0, first), (1, second)):
            if k < len(frames):
                made = cut(way, frames[k], [1448], now, at=at[way])
                segments += made
                at[way] += len(frames[k])
                now = segments[-1].time_ns + 100
    return segments


def of(rows: np.ndarray, way: int) -> np.ndarray:
    return np.sort(rows[rows["flow"] == way], order="seq")


@pytest.mark.parametrize("snap", [62, 1500])
def test_rendezvous_carries_its_match_to_all_its_frames(snap: int) -> None:
    sender = [
        hello(1),
        match(1, 100, tag=-16),
        rndv(2, 9000, 0x55AA),
        b"",
        put(0x7000, 9000),
        fin(0xF0, 9000),
    ]
    receiver = [hello(0), match(1, 0, tag=5), b"", put_request(0x55AA, 0xF0, 0x7000, 9000)]
    rows, flows, _ = run(both(sender, receiver), snap=snap)
    assert list(flows["framing"]) == [Framing.OB1, Framing.OB1]
    mine, other = of(rows, 0), of(rows, 1)
    assert [Wire(int(w)).name for w in mine["wire"]] == [
        "OB1_HELLO",
        "OB1_MATCH",
        "OB1_RNDV",
        "OB1_PUT",
        "OB1_FIN",
    ]
    assert list(mine["role"]) == [Role.CONTROL, Role.DATA, Role.OFFER, Role.DATA, Role.DONE]
    assert (mine["sub"][0], mine["bytes"][1], mine["op"][1]) == (1, 100, Op.BARRIER)
    whole = [*mine[2:], other[2]]
    assert {(int(r["context"]), int(r["tag"]), int(r["sub"]), int(r["op"]), int(r["va"])) for r in whole} == {
        (3, 2**32 - 12, 2, Op.ALL_REDUCE, 0x55AA)
    }
    assert (mine["announces"][2], mine["bytes"][3], other["announces"][2]) == (9000, 9000, 9000)
    assert (other["wire"][2], other["role"][2]) == (Wire.OB1_PUT_REQUEST, Role.GRANT)
    assert (other["op"][1], other["tag"][1]) == (Op.SEND_RECV, 5)
    assert not rows["flags"].any()


def test_pointers_are_used_again() -> None:
    sender, receiver = [hello(1)], [hello(0)]
    for seq in (1, 2, 3):
        sender += [rndv(seq, 3000, 0x55AA), b"", put(0x7000, 3000), fin(0xF0, 3000)]
        receiver += [b"", put_request(0x55AA, 0xF0, 0x7000, 3000), b"", b""]
    rows, _, _ = run(both(sender, receiver), snap=62)
    for seq in (1, 2, 3):
        own = rows[(rows["sub"] == seq) & (rows["wire"] != Wire.OB1_HELLO)]
        assert sorted(int(w) for w in own["wire"]) == [
            Wire.OB1_RNDV, Wire.OB1_PUT_REQUEST, Wire.OB1_PUT, Wire.OB1_FIN,
        ]  # fmt: skip


def test_a_pointer_used_again_is_not_taken_for_the_offer_before_whose_answer_was_hidden() -> None:
    """Offer 2 and the answer to offer 1 hide behind data; the answer to 2 names the pointer of both."""
    sender = [
        hello(1),
        rndv(1, 3000, 0x55AA),
        b"",
        put(0x7000, 3000) + fin(0xF0, 3000) + rndv(2, 3000, 0x55AA),
        b"",
        put(0x7100, 3000),
        fin(0xF1, 3000),
        match(3, 100),
    ]
    receiver = [
        hello(0),
        b"",
        match(1, 100) + put_request(0x55AA, 0xF0, 0x7000, 3000),
        b"",
        put_request(0x55AA, 0xF1, 0x7100, 3000),
        match(2, 100),
    ]
    rows, _, tcp = run(both(sender, receiver), snap=62)
    assert tcp.hidden.bytes_unresolved == 0
    for seq in (1, 2):
        own = np.sort(rows[(rows["sub"] == seq) & (rows["wire"] != Wire.OB1_MATCH)], order="first_ns")
        assert [Wire(int(w)) for w in own["wire"][own["wire"] != Wire.OB1_HELLO]] == [
            Wire.OB1_RNDV, Wire.OB1_PUT_REQUEST, Wire.OB1_PUT, Wire.OB1_FIN,
        ], seq  # fmt: skip


@pytest.mark.parametrize("tail", ["fin", "fin and rndv"])
def test_frames_behind_a_put_are_inferred(tail: str) -> None:
    sender, receiver = [hello(1)], [hello(0)]
    for seq in range(1, 6):
        offer = rndv(seq, 3000, 0x55AA)
        if seq == 3 and tail == "fin and rndv":
            last = sender.pop()
            sender[-1] += last + offer
            offer = b""
        sender += [offer, b"", put(0x7000, 3000), fin(0xF0, 3000)]
        receiver += [b""] * (len(sender) - 3 - len(receiver)) + [put_request(0x55AA, 0xF0, 0x7000, 3000)]
        if seq == 2 and tail == "fin":
            last = sender.pop()
            sender[-1] += last
    rows, _, tcp = run(both(sender, receiver), snap=62)
    hidden = rows[(rows["flags"] & MessageFlag.HIDDEN) != 0]
    names = [Wire(int(w)).name for w in of(hidden, 0)["wire"]]
    assert names == ["OB1_FIN"] + ["OB1_RNDV"] * (tail != "fin")
    assert tcp.hidden.bytes_unresolved == 0
    for seq in range(1, 6):
        own = rows[(rows["sub"] == seq) & (rows["op"] == Op.ALL_REDUCE)]
        assert sorted(own["wire"]) == [Wire.OB1_RNDV, Wire.OB1_PUT_REQUEST, Wire.OB1_PUT, Wire.OB1_FIN], seq


def numbered(rows: np.ndarray, way: int = 0) -> list[tuple[int, int]]:
    """Number and bytes of a flow's MATCHes, in stream order."""
    mine = of(rows, way)
    return [(int(r["sub"]), int(r["bytes"])) for r in mine[mine["wire"] == Wire.OB1_MATCH]]


def test_several_frames_hide_in_one_stretch() -> None:
    sender = [hello(1), match(1, 100), match(2, 100) + match(3, 100) + match(4, 100), match(5, 100)]
    sender += [match(6, 100) + match(7, 100) + match(8, 30), match(9, 100), match(10, 100) + match(11, 100)]
    rows, _, tcp = run(both(sender, [hello(0)]), snap=62)
    # Segments of one message, the last one shorter; and at the stream's end.
    assert numbered(rows) == [(k, 30 if k == 8 else 100) for k in range(1, 12)]
    assert tcp.hidden.bytes_unresolved == 0


def test_hidden_frames_follow_the_period_of_a_flow() -> None:
    """Segments of calls that follow each other at once: the shorter last ones lie in the middle."""
    sizes = ([100] * 4 + [30]) * 8
    frames = [match(k + 1, size) for k, size in enumerate(sizes)]
    sender = [hello(1), *frames[:17], b"".join(frames[17:26]), *frames[26:]]
    rows, _, tcp = run(both(sender, [hello(0)]), snap=62)
    assert [size for _, size in numbered(rows)] == sizes
    assert tcp.hidden.bytes_unresolved == 0


def test_two_stretches_between_two_numbers() -> None:
    request = put_request(0x55AA, 0xF0, 0x7000, 3000)
    sender = [hello(1), match(1, 100) + match(2, 40), request + match(3, 40), match(4, 100)]
    rows, _, _ = run(both([hello(0), rndv(1, 3000, 0x55AA)], sender), snap=62)
    assert numbered(rows, 1) == [(1, 100), (2, 40), (3, 40), (4, 100)]


def test_a_hidden_frame_is_of_the_call_that_usually_stands_there() -> None:
    sender, number = [hello(1)], 0
    for turn in range(6):
        calls = [(10, -12), (100, -10), (100, -13)]
        made = [match(number + 1 + k, size, tag) for k, (size, tag) in enumerate(calls)]
        number += 3
        sender += [made[0], made[1] + made[2]] if turn in (0, 3) else made
    rows, _, _ = run(both(sender, [hello(0)]), snap=62)
    ops = [Op(int(r["op"])) for r in of(rows, 0) if r["wire"] == Wire.OB1_MATCH]
    assert ops == [Op.ALL_REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL] * 6


def test_fragments_and_their_ack_belong_to_the_rendezvous() -> None:
    ack = frame(framing.OB1_ACK, struct.pack("<6xQQQQ", 0x55AA, 9, 0, 0))
    fragment = frame(framing.OB1_FRAG, struct.pack("<6xQQQ", 0, 0x55AA, 9), bytes(2000))
    sender = [hello(1), rndv(9, 2000, 0x55AA), b"", fragment]
    rows, _, _ = run(both(sender, [hello(0), b"", ack]), snap=62)
    own = rows[rows["sub"] == 9]
    assert [Role(int(r)) for r in own["role"]] == [Role.OFFER, Role.GRANT, Role.DATA]
    assert int(own["bytes"].sum()) == 2000


def test_every_collective_of_the_tables_is_named() -> None:
    for prefix, op in framing.GLOO_PREFIX.items():
        sent = b"".join(gloo(code, 1, 100, prefix) for code in (2, 1))
        rows, _, _ = run(handshake() + cut(1, sent * 2, [48, 148] * 2, 100))
        assert set(rows["op"]) == {op}
    sent = [hello(1), *(match(k, 10, tag) for k, tag in enumerate(framing.MPI_TAG))]
    rows, _, _ = run(both(sent, [hello(0)]))
    assert [int(op) for op in of(rows, 0)["op"][1:]] == [int(op) for op in framing.MPI_TAG.values()]


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_are_bursts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Small numbers look more like headers than even noise does.
    noise = rng.choice(np.array([0, 0, 0, 1, 2, 3, 48, 0x20, 0x41, 0x42, 0x48], np.uint8), 200_000).tobytes()
    rows, flows, _ = run(handshake() + cut(1, noise, [int(x) for x in rng.integers(1, 1448, 1000)], 100))
    assert flows["framing"][1] == Framing.NONE
    assert int(rows["bytes"].sum()) == len(noise)


def _sampled(snap: int) -> list[int]:
    """``sub`` of four messages of NCCL's sockets, each size in a segment by itself."""
    made, at = handshake(), 0
    for body in (b"one" * 9, b"two" * 9, b"one" * 9, b"short"):
        for part in (len(body).to_bytes(4, "little"), body):
            made.append(Segment(1000 + 100 * len(made), 0, at, part))
            at += len(part)
    return [int(sub) for sub in run(made, snap)[0]["sub"]]


def test_first_bytes_of_nccls_messages() -> None:
    """What is passed on has the same number at every hop; of too short a beginning nothing is said."""
    one, two, again, short = _sampled(1 << 16)
    assert one == again != two
    word = np.frombuffer(b"oneoneoneone", "<u4").astype(np.int64)
    spread = int(grants.SPREAD)
    assert one == (int(word[0]) * spread + int(word[2])) % 2**32
    assert short == 0
    assert _sampled(11) == [0, 0, 0, 0]
