"""Scripted worlds for the join: nodes with clocks, links with delays, messages; the answer is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpuflow.schema.rows import ENDPOINT, FLOW, MESSAGE, NEVER, PAUSE, Pairing, Role, Transport, Wire
from dpuflow.schema.tables import CaptureInfo, CaptureTables

START = 1_700_000_000_000_000_000
PSN_MASK = 0xFFFFFF


@dataclass
class Sent:
    """One message of the script: true times at the sender's wire, before any clock is applied."""

    src: int
    dst: int
    at_ns: int
    bytes: int = 4096
    lost_before: set[str] = field(default_factory=set)  # vantage points it never reached; no ACK
    unseen_by: set[str] = field(default_factory=set)  # vantage points that did not capture it
    flags: dict[str, int] = field(default_factory=dict)  # vantage point -> MessageFlag bits
    seq: int | None = None
    duration_ns: int = 10_000
    tag: int = 0


@dataclass
class World:
    """Nodes 0..n-1 with one address each; vantage points ``node0``... and ``switch``."""

    nodes: int
    delay_ns: int = 20_000  # least delay from node to node; the switch sits half-way
    noise_ns: int = 30_000  # mean of the exponential delay on top, each way
    answer_ns: int = 4_000  # from a message's end to its ACK leaving the receiver
    clocks: dict[str, tuple[int, float]] = field(default_factory=dict)  # offset, drift from START
    transport: Transport = Transport.ROCE
    sent: list[Sent] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    seq0: dict[tuple[int, int], int] = field(default_factory=dict)

    def ring(self, rounds: int, gap_ns: int = 1_000_000) -> World:
        """Each node sends to the next one, ``rounds`` times."""
        for number in range(rounds):
            for src in range(self.nodes):
                jitter = int(self.random.integers(0, gap_ns // 4))
                self.sent.append(
                    Sent(src, (src + 1) % self.nodes, START + number * gap_ns + jitter, tag=number)
                )
        return self

    def local_ns(self, vantage: str, true_ns: int) -> int:
        """A true time on the clock of a vantage point."""
        offset, drift = self.clocks.get(vantage, (0, 0.0))
        return true_ns + offset + round((true_ns - START) * drift)

    def captures(self, *vantages: str) -> list[CaptureTables]:
        """What each vantage point saw, numbered in this order."""
        rows: dict[str, list[dict[str, int]]] = {v: [] for v in vantages}
        seq = dict(self.seq0)
        for m in sorted(self.sent, key=lambda s: s.at_ns):
            way = (m.src, m.dst)
            start = m.seq if m.seq is not None else seq.get(way, 0xFFFF00 if self.transport == 1 else 1000)
            length = -(-m.bytes // 1024) if self.transport == Transport.ROCE else m.bytes
            seq[way] = start + length
            hops = [self.delay_ns // 2 + int(self.random.exponential(self.noise_ns / 2)) for _ in range(4)]
            there = {f"node{m.src}": 0, "switch": hops[0], f"node{m.dst}": hops[0] + hops[1]}
            answered = m.at_ns + m.duration_ns + hops[0] + hops[1] + self.answer_ns
            back = {f"node{m.dst}": 0, "switch": hops[2], f"node{m.src}": hops[2] + hops[3]}
            for vantage in vantages:
                acked = NEVER if m.lost_before else self.local_ns(vantage, answered + back.get(vantage, 0))
                if vantage in there and vantage not in m.lost_before | m.unseen_by:
                    rows[vantage].append(
                        {
                            "src": m.src, "dst": m.dst, "bytes": m.bytes,
                            "seq": start, "seq_end": start + length,
                            "first_ns": self.local_ns(vantage, m.at_ns + there[vantage]),
                            "last_ns": self.local_ns(vantage, m.at_ns + m.duration_ns + there[vantage]),
                            "acked_ns": acked,
                            "flags": m.flags.get(vantage, 0), "tag": m.tag,
                        }
                    )  # fmt: skip
        return [self._tables(number, v, rows[v]) for number, v in enumerate(vantages)]

    def _tables(self, number: int, vantage: str, rows: list[dict[str, int]]) -> CaptureTables:
        rows = sorted(rows, key=lambda r: r["last_ns"])
        ways = sorted({(r["src"], r["dst"]) for r in rows} | {(r["dst"], r["src"]) for r in rows})
        ends = sorted({e for way in ways for e in way}, reverse=number % 2 == 1)  # rows differ by capture
        endpoints = ENDPOINT.zeros(len(ends))
        endpoints["addr_lo"] = [0xFFFF0A000001 + e for e in ends]
        endpoints["mac"] = [0x020000000001 + e for e in ends]
        flows = FLOW.zeros(len(ways))
        messages = MESSAGE.zeros(len(rows))
        base: dict[tuple[int, int], int] = {}
        for row, r in enumerate(rows):
            way = (r["src"], r["dst"])
            mask = PSN_MASK if self.transport == Transport.ROCE else 0xFFFFFFFF
            # each capture extends sequence numbers from what it saw first
            base.setdefault(way, r["seq"] - (r["seq"] & mask))
            m = messages[row]
            for name in ("bytes", "first_ns", "last_ns", "acked_ns", "flags", "tag"):
                m[name] = r[name]
            m["seq"], m["seq_end"] = r["seq"] - base[way], r["seq_end"] - base[way]
            m["flow"], m["packets"] = ways.index(way), r["seq_end"] - r["seq"]
            m["wire"] = Wire.ROCE_WRITE if self.transport == Transport.ROCE else Wire.GLOO_DATA
            m["role"] = Role.DATA
        for row, way in enumerate(ways):
            f = flows[row]
            f["src"], f["dst"], f["peer"] = ends.index(way[0]), ends.index(way[1]), ways.index(way[::-1])
            f["dest_qp"], f["transport"] = 100 + way[1] * 16 + way[0], self.transport
            if self.transport == Transport.TCP:
                f["dest_qp"], f["sport"], f["dport"] = 0, 5000 + min(way), 5000 + max(way)
            f["pairing"] = Pairing.ACKS
            of = messages[messages["flow"] == row]
            acks = messages[messages["flow"] == f["peer"]]
            f["messages"], f["bytes"], f["packets"] = (
                len(of),
                of["bytes"].sum(),
                of["packets"].sum() + len(acks),
            )
            f["rtt_min_ns"] = (of["acked_ns"] - of["last_ns"]).min() if len(of) else NEVER
            f["first_ns"] = min([*of["first_ns"], *acks["acked_ns"]], default=0)
            f["last_ns"] = max([*of["last_ns"], *acks["acked_ns"]], default=0)
            endpoints["packets_out"][f["src"]] += f["packets"]
            endpoints["packets_in"][f["dst"]] += f["packets"]
        times = [t for r in rows for t in (r["first_ns"], r["last_ns"], r["acked_ns"]) if t != NEVER]
        info = CaptureInfo(
            number,
            vantage,
            [f"{vantage}.pcap"],
            first_ns=min(times, default=None),
            last_ns=max(times, default=None),
        )
        return CaptureTables(info, endpoints, flows, messages, PAUSE.zeros(0))
