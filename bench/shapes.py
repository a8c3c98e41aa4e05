"""Captures of jobs that grow one way (flows, ranks, captures): RoCEv2, classic pcap, one packet a message.

``writes`` are pages that nothing orders, each acknowledged; ``rings`` ring all-reduces as NCCL's net_ib
transport puts them on the wire (clear-to-send, WRITE with immediate). Headers are laid out many at a time.
InfiniBand volume 1, 9 and annex A17; pcap Internet-Draft section 5.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from bench.traffic import START_NS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

PAGE: Final = 4096
WIRE_NS: Final = 2_000  # until a packet is at the other end
STEP_NS: Final = 20_000  # of a ring, from one message of a rank to its next
PAUSE_NS: Final = 3_000_000  # between collectives
_ONCE: Final = 1 << 17  # packets laid out at a time

_WRITE, _WRITE_IMM, _ACK = 0x0A, 0x0B, 0x11

# As on the wire but for the record's header; what a packet does not have of ``ext`` is not kept.
_FRAME: Final = np.dtype(
    [
        ("sec", "<u4"), ("nsec", "<u4"), ("kept", "<u4"), ("wire", "<u4"),
        ("mac", "u1", 12), ("ether", ">u2"),
        ("version", ">u2"), ("length", ">u2"), ("ident", ">u4"), ("ttl", ">u2"), ("sum", ">u2"),
        ("src", ">u4"), ("dst", ">u4"), ("sport", ">u2"), ("dport", ">u2"), ("udp", ">u2"), ("udpsum", ">u2"),
        ("opcode", "u1"), ("flags", "u1"), ("pkey", ">u2"), ("qp", ">u4"), ("psn", ">u4"),
        ("ext", "u1", 80),
    ]
)  # fmt: skip
_HEADERS: Final = 58  # Ethernet to BTH, and the ICRC
_RETH: Final = np.dtype([("va", ">u8"), ("key", ">u4"), ("length", ">u4")])
_CTS: Final = np.dtype(
    [("va", "<u8"), ("bytes", "<u8"), ("keys", "<u4", 8), ("count", "<u4"), ("tag", "<u4"), ("index", "<u8")]
)


class Packets(NamedTuple):
    """Packets of a job, one row each: when and between whom, and what they are."""

    ns: Ints
    src: Ints  # ranks
    dst: Ints
    qp: Ints
    psn: Ints
    opcode: Ints
    bytes: Ints
    cts: NDArray[np.bool_]

    def at(self, rows: Ints | NDArray[np.bool_]) -> Packets:
        """Some of them."""
        return Packets(*(column[rows] for column in self))


def writes(messages: int, flows: int, seed: int = 1) -> Packets:
    """Pages over ``flows`` queue pairs between endpoints drawn at random, one after the other at each."""
    rng = np.random.default_rng(seed)
    ends = max(4, round(2 * flows**0.5))
    src = rng.integers(0, ends, flows)
    dst = (src + rng.integers(1, ends, flows)) % ends
    flow = rng.permutation(np.arange(messages) % flows)
    psn = np.empty(messages, np.int64)
    order = np.argsort(flow, kind="stable")
    psn[order] = np.arange(messages) - np.searchsorted(flow[order], np.arange(flows))[flow[order]]
    ns = START_NS + np.cumsum(rng.integers(100, 900, messages))
    qp = 0x1000 + 2 * flow
    data = Packets(
        ns, src[flow], dst[flow], qp, psn, *_full(messages, _WRITE, PAGE), np.zeros(messages, bool)
    )
    acks = Packets(
        ns + WIRE_NS, dst[flow], src[flow], qp + 1, psn, *_full(messages, _ACK, 0), np.zeros(messages, bool)
    )
    return _in_order(data, acks)


def rings(ranks: int, size: int, collectives: int, seed: int = 1) -> Packets:
    """All-reduces of ``ranks`` in rings of ``size`` neighbours; one rank of each is late in every third."""
    rng = np.random.default_rng(seed)
    steps = 2 * (size - 1)
    rank, step, turn = (a.reshape(-1) for a in np.indices((ranks, steps, collectives)))
    right = rank // size * size + (rank + 1) % size
    number = turn * steps + step
    late = np.where((rank % size + step >= size // 2) & (turn % 3 == 2), 1_000_000, 0)
    ns = START_NS + turn * (PAUSE_NS + steps * STEP_NS) + step * STEP_NS + late
    ns = ns + rng.integers(0, STEP_NS // 4, len(ns))
    n, qp = len(ns), 0x1000 + 2 * rank
    data = Packets(ns, rank, right, qp, number, *_full(n, _WRITE_IMM, PAGE), np.zeros(n, bool))
    offers = Packets(ns - STEP_NS // 2, right, rank, qp + 1, number, *_full(n, _WRITE, 64), np.ones(n, bool))
    return _in_order(offers, data)


def _full(count: int, *values: int) -> tuple[Ints, ...]:
    return tuple(np.full(count, value) for value in values)


def _in_order(*parts: Packets) -> Packets:
    both = Packets(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    return both.at(np.argsort(both.ns, kind="stable"))


def write(packets: Packets, path: Path) -> Path:
    """One capture of all packets, as a switch sees them."""
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 192, 1))
        for at in range(0, len(packets.ns), _ONCE):
            file.write(_records(packets.at(np.arange(at, min(at + _ONCE, len(packets.ns))))))
    return path


def write_nodes(packets: Packets, nodes: int, folder: Path) -> list[Path]:
    """A capture a node, each with its share of the ranks: what it sends, and later what came."""
    share = (int(max(packets.src.max(), packets.dst.max())) + nodes) // nodes
    paths = []
    for node in range(nodes):
        sent, came = packets.src // share == node, packets.dst // share == node
        arrived = packets.at(came & ~sent)
        mine = _in_order(packets.at(sent), arrived._replace(ns=arrived.ns + WIRE_NS))
        paths.append(write(mine, folder / f"node{node}.pcap"))
    return paths


def _records(p: Packets) -> bytes:
    """Records of a capture file."""
    frame = np.zeros(len(p.ns), _FRAME)
    ack, imm = p.opcode == _ACK, p.opcode == _WRITE_IMM
    ext = np.where(ack, 4, 16 + 4 * imm)
    kept = 54 + ext + 64 * p.cts
    length = _HEADERS + ext + p.bytes
    frame["sec"], frame["nsec"] = p.ns // 1_000_000_000, p.ns % 1_000_000_000
    frame["kept"], frame["wire"] = kept, length
    for at, rank in ((0, p.dst), (6, p.src)):
        frame["mac"][:, at] = 2
        frame["mac"][:, at + 3 : at + 6] = rank[:, None] >> np.array([16, 8, 0]) & 0xFF
    frame["ether"], frame["version"], frame["length"] = 0x0800, 0x4502, length - 14
    frame["ident"], frame["ttl"] = 0x4000, 0x4011
    frame["src"], frame["dst"] = 0x0A000001 + p.src, 0x0A000001 + p.dst
    frame["sport"], frame["dport"], frame["udp"] = 0xC000, 4791, length - 34
    frame["opcode"], frame["flags"], frame["pkey"] = p.opcode, 0x40, 0xFFFF
    frame["qp"], frame["psn"] = p.qp, p.psn & 0xFFFFFF | (~ack).astype(np.int64) << 31
    reth = np.zeros(len(p.ns), _RETH)
    reth["va"], reth["key"], reth["length"] = (p.qp << 32) + (p.psn << 13), p.qp, p.bytes
    frame["ext"][:, :16] = reth.view(np.uint8).reshape(-1, 16)
    msn = p.psn[ack] + 1 & 0xFFFFFF
    frame["ext"][ack, :4] = (msn | 0x1F << 24).astype(">u4").view(np.uint8).reshape(-1, 4)
    frame["ext"][imm, 16:20] = p.bytes[imm].astype(">u4").view(np.uint8).reshape(-1, 4)
    offer = np.zeros(np.count_nonzero(p.cts), _CTS)
    offer["va"], offer["bytes"] = (p.qp[p.cts] << 32) + ((p.psn[p.cts] & 3) << 20), 1 << 20
    offer["keys"][:, 0], offer["count"], offer["index"] = p.qp[p.cts], 1, p.psn[p.cts] + 1
    frame["ext"][p.cts, 16:] = offer.view(np.uint8).reshape(-1, 64)
    cells = frame.view(np.uint8).reshape(len(frame), -1)
    return cells[np.arange(cells.shape[1]) < 16 + kept[:, None]].tobytes()
