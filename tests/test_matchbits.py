"""UCX and libfabric over TCP: frames, fragments, rendezvous, tags of MPI libraries, hidden headers."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from naive_tcp import Segment, cut, handshake, run

from dpuflow import framing as fm
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schema.rows import NEVER, TRANSFER, Framing, MessageFlag, Op, Role, Wire
from dpuflow.verdicts.links import _took_ns


def ucx(kind: int, body: bytes) -> bytes:
    return struct.pack("<BI", kind, len(body)) + body


HELLO = struct.pack("<Q", fm.UCX_MAGIC) + ucx(32, bytes(29))


def ompi_tag(tag: int, rank: int, context: int) -> int:
    return (tag & 0xFFFFFF) << 40 | rank << 20 | context


def mpich_tag(tag: int, rank: int, context: int) -> int:
    return context << 48 | rank << 32 | tag


def intel_tag(tag: int, rank: int, context: int) -> int:
    return rank << 40 | context << 20 | tag


def only(tag: int, size: int) -> bytes:
    return ucx(fm.UCX_ONLY, struct.pack("<Q", tag) + bytes(size))


def eager(tag: int, size: int, segment: int) -> bytes:
    """A message in fragments whose frames hold ``segment`` bytes each behind the first five."""
    out = ucx(fm.UCX_FIRST, struct.pack("<QQQ", tag, size, 77) + bytes(segment - 24))
    done = segment - 24
    while done < size:
        part = min(segment - 16, size - done)
        out += ucx(fm.UCX_MIDDLE, struct.pack("<QQ", 77, done) + bytes(part))
        done += part
    return out


def rts(tag: int, request: int, size: int) -> bytes:
    return ucx(fm.UCX_RTS, struct.pack("<QQQQQH", tag, 5, request, 0xABC0, size, 1))


def rtr(request: int, own: int, address: int, size: int) -> bytes:
    return ucx(fm.UCX_RTR, struct.pack("<QQQQQ", request, own, address, size, 0))


def put(address: int, size: int) -> bytes:
    return ucx(fm.UCX_PUT, struct.pack("<QQI", address, size, 1)) + bytes(size)


def atp(own: int) -> bytes:
    return ucx(fm.UCX_ATP, struct.pack("<QB", own, 0))


def ofi(tag: int, size: int, source: int | None = None, flags: int = 0) -> bytes:
    rank = b"" if source is None else struct.pack("<Q", source)
    header = fm.OFI_BASE + len(rank) + 8
    flags |= 0 if source is None else fm.OFI_SOURCE
    base = struct.pack("<BBHBBBBQ", 3, fm.OFI_TAG, flags, 0, 0, header, 0, header + size)
    return base + rank + struct.pack("<Q", tag) + bytes(size)


def ofi_ack() -> bytes:
    return struct.pack("<BBHBBBBQ", 3, fm.OFI_MSG, 0, fm.OFI_ACK, 0, 16, 0, 16)


OFI_HELLO = struct.pack("<BBHIQQQ", 3, 0, 8 << 8, 0, 0, 0, 1) + bytes(8)


def talk(*frames: tuple[int, bytes], mss: int = 1448) -> list[Segment]:
    """A connection on which each (side, frame) is a run of segments of its own."""
    segments, at, now = handshake(), [0, 0], 100
    for way, frame in frames:
        segments += cut(way, frame, [mss], now, at=at[way])
        at[way] += len(frame)
        now = segments[-1].time_ns + 100
    return segments


def named(rows: np.ndarray) -> list[tuple[int, str, int, int, int]]:
    """Side, operation, bytes, context and signed tag of the messages that carry tags, in order of time."""
    rows = rows[(rows["wire"] == Wire.TAGGED) & (rows["role"] == Role.DATA)]
    rows = rows[np.argsort(rows["first_ns"], kind="stable")]
    signed = rows["tag"].astype(np.uint32).view(np.int32)
    return [
        (int(r["flow"]), Op(r["op"]).token, int(r["bytes"]), int(r["context"]), int(t))
        for r, t in zip(rows, signed, strict=True)
    ]


@pytest.mark.parametrize("snap", [62, 1448])
@pytest.mark.parametrize(
    ("tag", "value", "context"), [(ompi_tag, -12, 3), (mpich_tag, 14, 1), (mpich_tag, 14, 17)]
)
def test_ucx_messages_whole_and_in_fragments(snap: int, tag, value: int, context: int) -> None:  # type: ignore[no-untyped-def]
    frames = [(0, HELLO), (1, ucx(32, bytes(4)))]
    for k in range(6):
        frames += [
            (0, only(tag(value, 0, context), 100 + k)),
            (1, eager(tag(value, 1, context), 20000, 8192)),
        ]
    rows, flows, _ = run(talk(*frames), snap)
    assert (flows["framing"] == Framing.UCX).all()
    expected = []
    for k in range(6):
        expected += [(0, "all_reduce", 100 + k, context, value), (1, "all_reduce", 20000, context, value)]
    assert named(rows) == expected
    opening = rows[(rows["flags"] & MessageFlag.OPENING) != 0]
    assert sorted(opening["flow"].tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("make", "rank", "value", "context", "op"),
    [
        (intel_tag, None, 7, 1, "all_gather"),
        (lambda t, r, c: c << 31 | t, 0, 9, 3, "all_to_all"),
        (lambda t, r, c: c << 34 | (t & 0xFFFFFFFF), 0, -10, 2, "all_gather"),
        (lambda t, r, c: c << 34 | (t & 0xFFFFFFFF), 0, 4, 0, "send_recv"),
    ],
)
def test_libfabric_tags_of_three_libraries(make, rank, value, context, op) -> None:  # type: ignore[no-untyped-def]
    frames = [(0, OFI_HELLO), (1, OFI_HELLO)]
    for k in range(5):
        for side in (0, 1):
            source = None if rank is None else side
            frames.append((side, ofi(make(value, side, context), 3000 + k, source)))
    rows, flows, _ = run(talk(*frames), 62)
    assert (flows["framing"] == Framing.OFI).all()
    assert named(rows) == [(side, op, 3000 + k, context, value) for k in range(5) for side in (0, 1)]


def test_an_all_reduce_of_nothing_is_a_barrier() -> None:
    frames = [(0, OFI_HELLO), (1, OFI_HELLO)]
    for _ in range(3):
        frames += [(0, ofi(intel_tag(14, 0, 5), 0)), (1, ofi(intel_tag(14, 1, 5), 0))]
        frames += [(0, ofi(intel_tag(14, 0, 1), 64)), (1, ofi(intel_tag(14, 1, 1), 64))]
    rows, _, _ = run(talk(*frames), 62)
    assert [op for _, op, *_ in named(rows)] == 3 * ["barrier", "barrier", "all_reduce", "all_reduce"]


def test_a_put_belongs_to_its_offer_and_the_sender_knows_when_it_has_come() -> None:
    tag = ompi_tag(-13, 0, 0)
    frames = [(0, HELLO), (1, ucx(32, bytes(4)))]
    for k in range(3):
        size = 50_000 + k
        frames += [(0, rts(tag, 900 + k, size)), (1, rtr(900 + k, 40 + k, 0xD000 + k, size))]
        frames += [(0, put(0xD000 + k, size)), (1, ucx(34, bytes(4))), (0, atp(40 + k))]
    rows, _, _ = run(talk(*frames), 62)
    rows = rows[np.isin(rows["wire"], (Wire.TAGGED, Wire.TAGGED_DONE))]
    assert (rows["op"] == Op.ALL_TO_ALL).all()
    number = rows["sub"]
    assert len(np.unique(number)) == 3
    for each in np.unique(number):
        mine = rows[number == each]
        assert sorted(mine["role"].tolist()) == sorted([Role.OFFER, Role.GRANT, Role.DATA, Role.DATA])
        assert sorted(mine["wire"].tolist()) == 3 * [Wire.TAGGED] + [Wire.TAGGED_DONE]
        assert mine["bytes"].sum() == mine["announces"].max()


def test_fragments_that_a_grant_asked_for_are_one_message() -> None:
    tag, size = mpich_tag(2, 1, 1), 200_000
    data, done = b"", 0
    while done < size:
        part = min(65536 - 16, size - done)
        data += ucx(fm.UCX_DATA, struct.pack("<QQ", 40, done) + bytes(part))
        done += part
    frames = [
        (0, HELLO),
        (1, ucx(32, bytes(4))),
        (1, rts(tag, 8, size)),
        (0, rtr(8, 40, 0xE000, size)),
        (1, data),
    ]
    rows, _, _ = run(talk(*frames, (0, only(mpich_tag(1, 0, 1), 0)), (1, only(mpich_tag(1, 1, 1), 0))), 62)
    mine = rows[(rows["op"] == Op.BROADCAST) & (rows["role"] == Role.DATA)]
    assert mine["bytes"].tolist() == [size]


def test_what_says_that_a_message_has_come_follows_the_one_that_asked() -> None:
    frames = [(0, OFI_HELLO), (1, OFI_HELLO)]
    for k in range(3):
        frames += [(0, ofi(1 << 31 | 14, 200, 0)), (0, ofi(1 << 31 | 14, 5000 + k, 0, fm.OFI_DELIVERED))]
        frames += [(1, ofi_ack())]
    rows, _, _ = run(talk(*frames), 62)
    said = rows[rows["role"] == Role.DONE]
    asked = rows[(rows["role"] == Role.DATA) & (rows["bytes"] >= 5000)]
    assert said["sub"].tolist() == asked["sub"].tolist()


def test_headers_behind_the_snap_length_are_told_by_their_neighbours() -> None:
    """Two messages in one run of segments: the second one's header lies in the middle of a segment."""
    tag = intel_tag(14, 0, 1)
    first, second = ofi(tag, 3000), ofi(tag, 700)
    frames = [(0, OFI_HELLO), (1, OFI_HELLO)]
    for k in range(6):
        frames += [(0, first + second)] if k == 3 else [(0, first), (0, second)]
    rows, _, tcp = run(talk(*frames), 62)
    assert [size for _, _, size, *_ in named(rows)] == 6 * [3000, 700]
    assert tcp.hidden.stretches == tcp.hidden.stretches_resolved == 1
    hidden = rows[(rows["flags"] & MessageFlag.HIDDEN) != 0]
    assert hidden["bytes"].tolist() == [700]
    assert hidden["op"].tolist() == [Op.ALL_REDUCE]


def test_other_bytes_that_begin_alike_are_no_frames() -> None:
    """Type and length, as many protocols have them: what the length promises is not there."""
    rng = np.random.default_rng(4)
    frames = [(0, bytes([3, 1, 0, 0, 0]) + rng.bytes(int(n))) for n in rng.integers(20, 1400, 60)]
    rows, flows, _ = run(talk(*frames))
    assert flows["framing"][0] == Framing.NONE
    assert int(rows["bytes"].sum()) == sum(len(frame) for _, frame in frames)


def test_the_sender_hears_of_its_message_when_the_word_comes_not_when_tcp_acknowledges_that() -> None:
    rows = TRANSFER.zeros(2)
    for name in TRANSFER.dtype.names or ():
        if name.endswith("_ns"):
            rows[name] = NEVER
    rows["sub"], rows["src"], rows["dst"] = 7, (0, 1), (1, 0)
    rows["role"], rows["wire"] = (Role.DATA, Role.DONE), (Wire.TAGGED, Wire.TAGGED_DONE)
    rows["op"], rows["bytes"] = Op.ALL_REDUCE, (5000, 0)
    rows["sent_ns"], rows["sent_end_ns"] = (100, 300), (200, 300)
    rows["arrived_ns"], rows["arrived_end_ns"] = (150, 350), (250, 350)
    rows["acked_ns"], rows["taken_ns"] = (260, 40_000), (260, 40_000)
    exchanges = build_exchanges(rows)
    assert exchanges["acked_ns"].tolist() == [350]
    assert exchanges["wire"].tolist() == [Wire.TAGGED_DONE]


def test_the_word_that_all_was_put_is_no_data_on_its_way() -> None:
    """UCX's ATP: a busy sender says so 12 ms later, and the link was not slow."""
    rows = TRANSFER.zeros(2)
    for name in TRANSFER.dtype.names or ():
        if name.endswith("_ns"):
            rows[name] = NEVER
    rows["sub"], rows["src"], rows["dst"] = 7, 0, 1
    rows["role"], rows["wire"] = Role.DATA, (Wire.TAGGED, Wire.TAGGED_DONE)
    rows["op"], rows["bytes"], rows["packets"] = Op.BROADCAST, (30_000, 0), (21, 1)
    rows["sent_ns"], rows["sent_end_ns"] = (100, 12_000_000), (20_000, 12_000_000)
    rows["arrived_ns"], rows["arrived_end_ns"] = (150, 12_000_050), (20_050, 12_000_050)
    (exchange,) = build_exchanges(rows)
    assert (exchange["data_end_ns"], exchange["arrived_end_ns"]) == (20_000, 12_000_050)
    assert _took_ns(build_exchanges(rows)).tolist() == [19_900]


def test_a_put_beyond_what_its_grant_allowed_belongs_to_one_that_was_not_seen_whole() -> None:
    """The memory is the same every time, and the fourth grant's header lies behind the snap length."""
    tag, size = ompi_tag(-13, 0, 0), 50_000
    frames = [(0, HELLO), (1, ucx(32, bytes(4)))]
    for k in range(6):
        frames += [(0, rts(tag, 900 + k, size)), (1, only(tag, 20))]
        grant = rtr(900 + k, 40 + k, 0xD000, size)
        frames += [(1, only(tag, 30) + grant)] if k == 3 else [(1, only(tag, 30)), (1, grant)]
        frames += [(0, put(0xD000, size)), (1, ucx(34, bytes(4))), (0, atp(40 + k))]
    rows, _, _ = run(talk(*frames), 62)
    puts = rows[(rows["role"] == Role.DATA) & (rows["bytes"] == size)]
    offers = rows[rows["role"] == Role.OFFER]
    assert puts["sub"].tolist() == offers["sub"].tolist()  # each is its own transfer's
