"""Framing of RoCE SENDs: made-up heads of libfabric's rxm and of UCX, and real ones where captured."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.robustness.play import play
from dpuflow.ingest import ingest
from dpuflow.messages.sends import HEAD, SendHeads
from dpuflow.schema.rows import FLOW, MESSAGE, MessageFlag, Op, Pairing, Role, Wire


def rxm(kind: int, number: int, size: int, tag: int, context: int = 0) -> bytes:
    control = struct.pack("<BBHIQQ", 4, kind, 0x4000, number, 1, 0)
    operation = struct.pack("<BBBBIQQQ", 2, 0, 1, 0, 0, size, 3, (context << 32) | (tag & 0xFFFFFFFF))
    return control + struct.pack("<Q", 0x3D) + operation


def ucx_tag(tag: int, rank: int = 3, context: int = 2) -> int:
    return (tag & 0xFFFFFF) << 40 | rank << 20 | context


def ucx_only(tag: int) -> bytes:
    return bytes([0x42]) + struct.pack("<Q", ucx_tag(tag))  # the upper three bits are flow control


def ucx_first(tag: int, total: int, ident: int) -> bytes:
    return bytes([3]) + struct.pack("<QQQ", ucx_tag(tag), total, ident)


def ucx_middle(ident: int, offset: int) -> bytes:
    return bytes([4]) + struct.pack("<QQ", ident, offset)


def read(
    messages: list[tuple[bytes, int]],
    captured: int = HEAD,
    pairing: Pairing = Pairing.HANDSHAKE,
    gaps: tuple[int, ...] = (),
) -> np.ndarray:
    """Rows of one flow; each message is its head and its length in bytes; ``gaps`` lack packets."""
    rows = MESSAGE.zeros(len(messages))
    rows["wire"], rows["role"] = Wire.ROCE_SEND, Role.DATA
    rows["bytes"] = [length for _, length in messages]
    rows["flags"][list(gaps)] = MessageFlag.GAP
    rows["first_frame"] = rows["first_ns"] = 10 + 3 * np.arange(len(messages))
    heads = SendHeads()
    raw = np.zeros((len(messages), HEAD), np.uint8)
    for row, (head, _) in zip(raw, messages, strict=True):
        row[: min(len(head), captured)] = list(head[:captured])
    heads._heads = [raw]
    heads._lengths = [np.array([min(captured, length) for _, length in messages], np.uint16)]
    rows["last_frame"] = rows["first_frame"] + 2
    rows["seq"] = (1 << 24) + 7 * np.arange(len(messages))
    heads._keys = [7 * np.arange(len(messages))]
    heads._frames = [rows["first_frame"].astype(np.int64)]
    flows = FLOW.zeros(1)
    flows["pairing"] = pairing
    heads.read(rows, flows)
    return rows


def numbered(rows: np.ndarray) -> list[int]:
    """``sub`` as turns: 1 for the first number met, 2 for the next; 0 stays."""
    turns = {0: 0}
    return [turns.setdefault(number, len(turns)) for number in rows["sub"].tolist()]


class Line:
    """A connection's messages in order of time: flow 0 goes one way, flow 1 the other."""

    def __init__(self) -> None:
        self.made: list[tuple[int, Wire, Role, int, int, bytes]] = []  # flow, wire, role, bytes, va, head

    def send(self, flow: int, head: bytes, length: int | None = None) -> None:
        self.made.append((flow, Wire.ROCE_SEND, Role.DATA, length or len(head), 0, head))

    def read(self, flow: int, va: int, size: int) -> None:
        """The request on ``flow``, its answer on the other."""
        self.made.append((flow, Wire.ROCE_READ, Role.GRANT, size, va, b""))
        self.made.append((1 - flow, Wire.ROCE_READ, Role.DATA, size, va, b""))

    def write(self, flow: int, va: int, size: int) -> None:
        self.made.append((flow, Wire.ROCE_WRITE, Role.DATA, size, va, b""))

    def rows(self) -> np.ndarray:
        rows, flows, heads = MESSAGE.zeros(len(self.made)), FLOW.zeros(2), SendHeads()
        flows["peer"], flows["pairing"] = [1, 0], Pairing.HANDSHAKE
        raw = np.zeros((len(self.made), HEAD), np.uint8)
        for n, (flow, wire, role, size, va, head) in enumerate(self.made):
            row = rows[n]
            row["flow"], row["wire"], row["role"], row["va"] = flow, wire, role, va
            row["announces" if role == Role.GRANT else "bytes"] = size
            # An answer has its request's PSN, but counts from another start.
            row["seq"] = (1 << 24) + 3 * n if role == Role.GRANT or wire != Wire.ROCE_READ else 3 * (n - 1)
            raw[n, : len(head)] = list(head[:HEAD])
        rows["first_frame"] = rows["first_ns"] = rows["last_frame"] = 5 * np.arange(len(rows))
        sends = np.flatnonzero(rows["wire"] == Wire.ROCE_SEND)
        heads._keys = [(rows["flow"][sends].astype(np.int64) << 24) | 3 * sends]
        heads._frames = [rows["first_frame"][sends].astype(np.int64)]
        heads._lengths = [np.minimum(rows["bytes"][sends], HEAD).astype(np.uint16)]
        heads._heads = [raw[sends]]
        heads.read(rows, flows)
        return rows


def rxm_offer(ident: int, size: int, address: int) -> bytes:
    head = bytearray(rxm(2, 0, size, -12) + struct.pack("<QQQ", address, size, 99) + bytes(80))
    head[16:24] = struct.pack("<Q", ident)
    return bytes(head)


def rxm_told(kind: int, ident: int, address: int = 0) -> bytes:
    head = bytearray(rxm(kind, 0, 0, 0) + struct.pack("<Q", address))
    head[16:24] = struct.pack("<Q", ident)
    return bytes(head)


def ucx_offer(ident: int, size: int, address: int) -> bytes:
    return bytes([9]) + struct.pack("<QQQQQ", ucx_tag(-12), 7, ident, address, size) + bytes(21)


def ucx_told(kind: int, ident: int, address: int = 0, size: int = 0) -> bytes:
    """11 has a place of its own; the others are an id, a status and a size, 18 bytes as captured."""
    if kind != 11:
        return bytes([kind]) + struct.pack("<QbQ", ident, 0, size)
    return bytes([kind]) + struct.pack("<QQQQ", ident, 5, address, size)


@pytest.mark.parametrize("offer", [rxm_offer, ucx_offer])
def test_what_is_read_has_the_name_of_its_offer(offer: Callable[[int, int, int], bytes]) -> None:
    """Buffers come again; a long transfer is read in pieces; two are under way at once, read in turn."""
    done = rxm_told if offer is rxm_offer else ucx_told
    line = Line()
    for turn in range(2):
        line.send(0, offer(2 * turn, 600_000, 0x10000))
        line.send(0, offer(2 * turn + 1, 500_000, 0x900000))
        line.read(1, 0x900000, 500_000)
        line.read(1, 0x10000, 400_000)
        line.read(1, 0x10000 + 400_000, 200_000)
        line.send(1, done(3 if offer is rxm_offer else 10, 2 * turn + 1))
        line.send(1, done(3 if offer is rxm_offer else 10, 2 * turn))
    line.read(1, 0x5000, 100)  # of no offer
    rows = line.rows()
    offers = rows["role"] == Role.OFFER
    assert rows["announces"][offers].tolist() == [600_000, 500_000] * 2
    assert numbered(rows[offers]) == [1, 2, 3, 4]
    one, two, three, four = rows["sub"][offers].tolist()
    reads = rows["wire"] == Wire.ROCE_READ
    for role in (Role.GRANT, Role.DATA):
        assert rows["sub"][reads & (rows["role"] == role)].tolist() == [two, one, one, four, three, three, 0]
    assert set(rows["op"][reads][:-2].tolist()) == {Op.ALL_REDUCE}
    assert rows["op"][reads][-2:].tolist() == [Op.UNKNOWN] * 2
    assert rows["sub"][rows["role"] == Role.DONE].tolist() == [two, one, four, three]


@pytest.mark.parametrize("offer", [rxm_offer, ucx_offer])
def test_what_is_written_has_the_name_of_its_offer(offer: Callable[[int, int, int], bytes]) -> None:
    """The receiver answers in an order of its own, by the offers' ids."""
    line = Line()
    for turn in range(2):
        for ident in (2 * turn, 2 * turn + 1):
            line.send(0, offer(ident, 500_000, 0))  # UCX tells no address that nobody may read
        for ident in (2 * turn + 1, 2 * turn):
            address = 0x70000 * (1 + ident % 2)
            answer = (
                rxm_told(7, ident, address) if offer is rxm_offer else ucx_told(11, ident, address, 500_000)
            )
            line.send(1, answer)
        for ident in (2 * turn, 2 * turn + 1):
            line.write(0, 0x70000 * (1 + ident % 2), 500_000)
    rows = line.rows()
    one, two, three, four = rows["sub"][rows["role"] == Role.OFFER].tolist()
    assert rows["sub"][rows["wire"] == Wire.ROCE_WRITE].tolist() == [one, two, three, four]
    assert rows["sub"][rows["role"] == Role.GRANT].tolist() == [two, one, four, three]
    assert (rows["op"] == Op.ALL_REDUCE).all()


@pytest.mark.parametrize(("captured", "hidden"), [(54, True), (HEAD, False), (20, False)])
def test_headers_that_are_cut_before_their_tag_are_told(captured: int, *, hidden: bool) -> None:
    """IPv6 leaves 54 bytes of 128, rxm's tag is in the last 8 of its 64."""
    rows = read([(rxm(0, 0, 8192, -12), 8256)] * 3, captured)
    assert ((rows["flags"] & MessageFlag.HIDDEN) != 0).tolist() == [hidden] * 3
    assert set(rows["op"].tolist()) == {Op.ALL_REDUCE if captured == HEAD else Op.UNKNOWN}


def test_rxm_segments_are_one_message() -> None:
    rows = read(
        [
            (rxm(0, 0, 8192, -12), 8256),
            (rxm(1, 0, 32768, -12), 16448),
            (rxm(1, 1, 32768, -12), 16448),
            (rxm(0, 0, 0, -16), 64),
        ]
    )
    assert [Op(o) for o in rows["op"]] == [Op.ALL_REDUCE] * 3 + [Op.BARRIER]
    assert rows["bytes"].tolist() == [8192, 16384, 16384, 0]
    assert numbered(rows) == [1, 2, 2, 3]


def test_the_first_message_of_a_connection_is_marked() -> None:
    opening, holds = int(MessageFlag.OPENING), int(MessageFlag.HOLDS_SENDER)
    messages = [(rxm(0, 0, 8192, -12), 8256)] * 3
    assert read(messages)["flags"].tolist() == [opening | holds, holds, holds]
    assert read(messages, pairing=Pairing.ACKS)["flags"].tolist() == [holds, holds, holds]
    messages = [(ucx_only(-16), 9), (ucx_only(-12), 109)]
    assert read(messages, pairing=Pairing.ACKS)["flags"].tolist() == [0, 0]
    messages.insert(1, (bytes([1]) + bytes(30), 31))  # its connections are set up beside the first messages
    assert read(messages, pairing=Pairing.ACKS)["flags"].tolist() == [opening, 0, 0]


def test_numbers_stay_when_what_came_before_is_forgotten() -> None:
    messages = [(rxm(0, 0, 8192, -12), 8256), (rxm(1, 0, 99, -12), 80), (rxm(1, 1, 99, -12), 80)] * 3
    rows = read(messages)
    assert numbered(rows) == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert rows["sub"].tolist() == [7 * n + 1 for n in (0, 1, 1, 3, 4, 4, 6, 7, 7)]  # by PSN, from 1


def test_ucx_fragments_are_one_message() -> None:
    rows = read(
        [
            (ucx_only(-16), 9),
            (ucx_first(-13, 16384, 77), 8256),
            (ucx_middle(77, 8231), 8170),
            (ucx_only(5), 109),
        ]
    )
    assert [Op(o) for o in rows["op"]] == [Op.BARRIER, Op.ALL_TO_ALL, Op.ALL_TO_ALL, Op.SEND_RECV]
    assert rows["bytes"].tolist() == [0, 8231, 8153, 100]
    assert rows["bytes"][1:3].sum() == 16384
    assert numbered(rows) == [1, 2, 2, 3]
    assert set(rows["context"].tolist()) == {2}
    assert rows["tag"][1] == 0xFFFFFFFF - 12


def test_a_middle_fragment_of_another_message_is_not_taken() -> None:
    good = [(ucx_only(-16), 9)] * 20
    rows = read([*good, (ucx_first(-13, 16384, 77), 8256), (ucx_middle(78, 8231), 8170)])
    assert rows["op"][-2] == Op.ALL_TO_ALL
    assert rows["op"][-1] == Op.UNKNOWN
    assert rows["bytes"][-1] == 8170


def test_acknowledgments_of_synchronous_sends_are_no_messages() -> None:
    """Open MPI lets ranks go from a barrier of three with them."""
    sync = bytes([6]) + struct.pack("<QQQ", ucx_tag(-16), 7, 9)
    for messages in (
        [(rxm(0, 0, 0, -16), 64), (rxm(0, 0, 0, -16, context=4 | 1), 64), (rxm(0, 0, 0, -16, context=2), 64)],
        [(ucx_only(-16), 9), (sync, 25), (bytes([8]) + struct.pack("<QB", 9, 0), 10)],
    ):
        rows = read(messages)
        assert rows["role"].tolist() == [Role.DATA, Role.DATA, Role.CONTROL]
        assert [Op(o) for o in rows["op"]] == [Op.BARRIER, Op.BARRIER, Op.UNKNOWN]
        assert numbered(rows) == [1, 2, 0]
        assert rows["bytes"].tolist() == [0, 0, 0]


def test_the_set_up_of_a_connection_is_no_sign_against_its_messages() -> None:
    rows = read([(ucx_only(-16), 9), (bytes([1]) + bytes(30), 31), (ucx_only(-12), 109), (bytes([1]), 31)])
    assert [Op(o) for o in rows["op"]] == [Op.BARRIER, Op.UNKNOWN, Op.ALL_REDUCE, Op.UNKNOWN]
    assert numbered(rows) == [1, 0, 2, 0]
    rows = read([(bytes([1]) * 64, 8192)] * 40)  # nor a sign for anything
    assert (rows["role"] == Role.DATA).all()
    assert (rows["bytes"] == 8192).all()


def test_fragments_that_do_not_add_up_are_other_payload() -> None:
    """perftest sends whatever its buffer holds: a first byte of 3 makes no fragment."""
    rows = read([(bytes([3] + [0] * 63), 8192)] * 40)
    assert (rows["op"] == Op.UNKNOWN).all()
    assert (rows["bytes"] == 8192).all()


@pytest.mark.parametrize("seed", range(20))
def test_other_payload_is_left_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    messages = [(random.bytes(HEAD), int(random.integers(64, 9000))) for _ in range(50)]
    rows = read(messages)
    assert (rows["op"] == Op.UNKNOWN).all()
    assert rows["bytes"].tolist() == [length for _, length in messages]


def test_heads_beyond_the_snap_length_are_not_read() -> None:
    rows = read([(rxm(0, 0, 8192, -12), 8256)] * 4, captured=40)
    assert (rows["op"] == Op.UNKNOWN).all()


@pytest.mark.parametrize(
    ("case", "op", "size"),
    [
        ("ar-ring-n4-128k-late2-5ms", Op.ALL_REDUCE, 32768),
        ("a2a-linear-n4-64k-random", Op.ALL_TO_ALL, 16384),
        ("ar-ring-n2-256k-ucx-random", Op.ALL_REDUCE, 131072),
    ],
)
def test_real_messages_add_up(shared: Path, case: str, op: Op, size: int) -> None:
    """libfabric and UCX under Open MPI: every message of the operation has the size of one block."""
    file = shared / "captures" / "roce" / case / "node0.pcap.gz"
    rows = ingest([str(file)], "node0", 0, 1, None).messages
    marks = ~np.uint8(MessageFlag.OPENING | MessageFlag.HOLDS_SENDER)
    mine = rows[(rows["op"] == op) & ((rows["flags"] & marks) == 0)]
    keys, number = np.unique(mine[["flow", "sub"]], return_inverse=True)
    sums = np.bincount(number.reshape(-1), mine["bytes"].astype(np.int64))
    assert len(keys) > 70
    assert set(sums.tolist()) == {size}


@pytest.mark.parametrize("case", ["ar-ring-n4-128k-late2-5ms", "a2a-linear-n4-64k-random"])
def test_captures_that_lack_packets_are_read_all_the_same(
    shared: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Of each capture one packet in a hundred is taken out, so that every seventh message has a hole: what
    headers say of messages holds, and what one capture missed the other one has."""
    monkeypatch.setenv("DPUFLOW_SHARED", str(shared))
    (outcome,) = play(f"roce/{case}", ["lost-1%-all"])
    assert outcome.found == outcome.op_right == outcome.true
    assert outcome.last_right >= 0.7 * outcome.last_asked
    assert outcome.verdict in ("right", "unasked")


def test_a_hole_in_a_message_is_filled_by_what_its_header_says() -> None:
    rows = read([(rxm(0, 0, 8192, -12), 8256), (rxm(0, 0, 8192, -12), 7232)], gaps=(1,))
    assert rows["bytes"].tolist() == [8192, 8192]
    rows = read([(rxm(1, 0, 12000, -12), 8256), (rxm(1, 1, 12000, -12), 2848)], gaps=(1,))
    assert rows["bytes"].tolist() == [8192, 3808]
    # Without one it is other payload.
    assert (read([(rxm(0, 0, 8192, -12), 7232)] * 2)["op"] == Op.UNKNOWN).all()


def test_a_fragment_whose_first_one_was_missed_is_left_to_who_saw_it() -> None:
    parts = [(rxm(1, number, 16384, -12), 8256) for number in (0, 1)]
    rows = read([*parts, parts[1], *parts * 20], gaps=(0,))
    assert rows["op"][2] == Op.UNKNOWN
    assert rows["flags"][2] & MessageFlag.HIDDEN
    assert (np.delete(rows["op"], 2) == Op.ALL_REDUCE).all()
