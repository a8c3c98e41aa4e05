"""Scripted RoCE traffic: a list of packets becomes Blocks and FLOW rows, as the parser would make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dpuflow.messages.roce import RoceMessages
from dpuflow.schema import rows as schema
from dpuflow.schema.tables import Block
from dpuflow.wire import headers as wire

CODES = {opcode.name: code for code, opcode in wire.OPCODES.items()}


@dataclass
class Packet:
    """One captured packet; ``name`` is the opcode's in ``wire.OPCODES``."""

    time_ns: int
    src: int
    dst: int
    qp: int
    name: str
    psn: int
    payload: int = 0
    va: int = 0
    length: int | None = None  # RETH
    rkey: int = 7
    imm: int = 0
    syndrome: int = 0
    src_qp: int = 0
    ce: bool = False
    data: bytes = b""
    sport: int = 49152


@dataclass
class Script:
    """Packets in the order captured, and what is made of them."""

    packets: list[Packet] = field(default_factory=list)

    def add(self, time_ns: int, src: int, dst: int, qp: int, name: str, psn: int, **more: object) -> None:
        """Append one packet; the PSN is taken modulo 2**24."""
        self.packets.append(Packet(time_ns, src, dst, qp, name, psn & wire.PSN_MASK, **more))  # type: ignore[arg-type]

    def message(
        self,
        time_ns: int,
        src: int,
        dst: int,
        qp: int,
        psn: int,
        packets: int,
        *,
        kind: str = "RC_WRITE",
        mtu: int = 1024,
        last: int | None = None,
        imm: int | None = None,
        va: int = 0x1000,
        rkey: int = 7,
        step_ns: int = 100,
    ) -> int:
        """A whole message of ``packets`` packets, one each ``step_ns``; returns the PSN after it."""
        size_last = mtu if last is None else last
        length = (packets - 1) * mtu + size_last
        suffix = "" if imm is None else "_IMM"
        for k in range(packets):
            end = k == packets - 1
            place = ("ONLY" if end else "FIRST") if k == 0 else ("LAST" if end else "MIDDLE")
            self.add(
                time_ns + k * step_ns, src, dst, qp, f"{kind}_{place}{suffix if end else ''}", psn + k,
                payload=size_last if end else mtu, va=va, length=length, rkey=rkey,
                imm=imm or 0,
            )  # fmt: skip
        return psn + packets

    def ack(self, time_ns: int, src: int, dst: int, qp: int, psn: int, syndrome: int = 0x1F) -> None:
        """An ACK (or, by its syndrome, a NAK) that ``src`` sends to QP ``qp`` of ``dst``."""
        self.add(time_ns, src, dst, qp, "RC_ACKNOWLEDGE", psn, syndrome=syndrome)

    def blocks(self, rows: int = 1000) -> Iterator[tuple[Block, np.ndarray]]:
        """Blocks of at most ``rows`` packets, each with the FLOW array as far as known by then."""
        keys: dict[tuple[int, int, int], int] = {}
        flows = schema.FLOW.zeros(0)
        for start in range(0, len(self.packets), rows):
            part = self.packets[start : start + rows]
            for p in part:
                if (p.src, p.dst, p.qp) not in keys:
                    keys[p.src, p.dst, p.qp] = len(keys)
                    new = schema.FLOW.zeros(1)
                    new["src"], new["dst"], new["dest_qp"], new["sport"] = p.src, p.dst, p.qp, p.sport
                    new["transport"], new["dport"] = schema.Transport.ROCE, wire.ROCE_V2_PORT
                    flows = np.concatenate([flows, new])
            yield _block(start, part, [keys[p.src, p.dst, p.qp] for p in part]), flows

    def run(self, rows: int = 1000) -> tuple[np.ndarray, np.ndarray]:
        """MESSAGE and FLOW rows of the whole script."""
        roce = RoceMessages()
        flows = schema.FLOW.zeros(0)
        for block, flows in self.blocks(rows):
            roce.feed(block, flows)
        return roce.finish(flows), flows


def _block(first_frame: int, packets: list[Packet], flow_of: list[int]) -> Block:
    columns = schema.PACKET.columns(len(packets))
    data = b"".join(p.data for p in packets)
    sparse: dict[str, list[tuple]] = {name: [] for name in ("reth", "aeth", "imm", "deth", "atomic")}
    at = 0
    for i, p in enumerate(packets):
        code = CODES[p.name]
        values = {
            "frame": first_frame + i,
            "time_ns": p.time_ns, "flow": flow_of[i], "src": p.src, "dst": p.dst, "payload": p.payload,
            "data_at": at, "dest_qp": p.qp, "psn": p.psn, "sport": p.sport, "dport": wire.ROCE_V2_PORT,
            "data_len": len(p.data), "opcode": code, "tos": 3 if p.ce else 2, "kind": schema.Kind.ROCE_V2,
        }  # fmt: skip
        for name, value in values.items():
            columns[name][i] = value
        at += len(p.data)
        headers = wire.OPCODES[code].headers
        if headers & wire.RETH and p.length is not None:
            sparse["reth"].append((p.va, i, p.length, p.rkey))
        if headers & wire.AETH:
            sparse["aeth"].append((i, 0, p.syndrome))
        if headers & wire.IMM:
            sparse["imm"].append((i, p.imm))
        if headers & wire.DETH:
            sparse["deth"].append((i, 1, p.src_qp))
        if headers & wire.ATOMIC:
            sparse["atomic"].append((p.va, 1, 2, i, 7))
    records = {"reth": schema.RETH, "aeth": schema.AETH, "imm": schema.IMM, "deth": schema.DETH}
    records["atomic"] = schema.ATOMIC
    tables = {name: np.array(sparse[name], records[name].dtype) for name in sparse}
    return Block(
        first_frame, len(packets), columns, np.frombuffer(data + bytes(8), np.uint8).copy(), **tables,
        tcp=schema.TCP.zeros(0), pause=schema.PAUSE.zeros(0),
    )  # fmt: skip
