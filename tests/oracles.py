"""What other programs say of the same packets: tshark, scapy, dpkt, and RoCE's own checksum.

``Compared`` counts what was compared, so that a test can tell a comparison from none at all.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import shutil
import subprocess
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from readings import Reading

from dpuflow.schema.rows import FIRST_SKIP, BthFlag, Kind
from dpuflow.wire import headers as wire

ALL = bool(os.environ.get("DPUFLOW_ALL_PACKETS"))
"""Whether to compare all packets of all captures and not only the first ones of some."""
SAMPLE = 300
"""Packets of a capture otherwise."""

FIELDS = (
    "frame.time_epoch", "frame.len", "frame.interface_id", "frame.protocols",
    "ip.src", "ip.dst", "ip.dsfield", "ipv6.src", "ipv6.dst", "ipv6.tclass",
    "infiniband.grh.sgid", "infiniband.grh.dgid", "infiniband.grh.tclass",
    "udp.srcport", "udp.dstport", "udp.length",
    "infiniband.bth", "infiniband.bth.opcode", "infiniband.bth.se", "infiniband.bth.m",
    "infiniband.bth.padcnt", "infiniband.bth.destqp", "infiniband.bth.a", "infiniband.bth.psn",
    "infiniband.reth.va", "infiniband.reth.r_key", "infiniband.reth.dmalen",
    "infiniband.aeth.syndrome", "infiniband.aeth.msn", "infiniband.immdt", "infiniband.ieth",
    "infiniband.deth.q_key", "infiniband.deth.srcqp",
    "infiniband.atomiceth.swapdt", "infiniband.atomiceth.cmpdt",
    "tcp.srcport", "tcp.dstport", "tcp.seq", "tcp.ack", "tcp.window_size_value", "tcp.flags", "tcp.len",
    "tcp.options.timestamp.tsval", "tcp.options.timestamp.tsecr", "tcp.options.wscale.shift",
    "macc.opcode", "macc.pause_time", "macc.cbfc.enbv",
)  # fmt: skip

# tcp.ack of a segment without ACK is shown as 0 even where relative numbers are off: compared with the flag.


@dataclass
class Compared:
    """Counts of what was compared, and sentences on what differs."""

    packets: int = 0
    values: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def same(self, where: str, mine: object, its: object) -> None:
        """Compare one value."""
        self.values += 1
        if mine != its:
            self.differences.append(f"{where}: {mine!r}, expected {its!r}")

    def add(self, other: Compared) -> None:
        """Take in another's counts."""
        self.packets += other.packets
        self.values += other.values
        self.by_kind += other.by_kind
        self.differences += other.differences


@functools.cache
def need_tshark() -> None:
    """Skip where there is no tshark."""
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")


def tshark(path: Path, most: int | None = None, fields: tuple[str, ...] = FIELDS) -> list[dict[str, str]]:
    """The fields of each packet, the innermost of several, as text.

    TFTP would take every datagram from or to port 69, and the stream analysis would change sequence
    numbers.
    """
    need_tshark()
    command = [
        "tshark",
        "-n",
        "-r",
        str(path),
        "-T",
        "fields",
        "-E",
        "occurrence=l",
        "--disable-protocol",
        "tftp",
    ]
    for preference in ("desegment_tcp_streams", "analyze_sequence_numbers", "relative_sequence_numbers"):
        command += ["-o", f"tcp.{preference}:false"]
    if most is not None:
        command += ["-c", str(most)]
    for name in fields:
        command += ["-e", name]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600).stdout
    packets = [dict(zip(fields, line.split("\t"), strict=True)) for line in out.splitlines()]
    # It lists custom blocks as packets too: without a stamp, and as data without a link header.
    return [p for p in packets if p["frame.time_epoch"] or p["frame.protocols"] != "data"]


def nanoseconds(text: str) -> int:
    """tshark's frame.time_epoch; its fraction has the sign of the whole."""
    whole, _, fraction = text.partition(".")
    ns = int((fraction + "000000000")[:9])
    return int(whole) * 10**9 + (-ns if whole.startswith("-") else ns)


def address(text: str) -> int:
    """An address as 128 bits, IPv4 as ::ffff:a.b.c.d."""
    parsed = ipaddress.ip_address(text)
    return int(parsed) if parsed.version == 6 else 0xFFFF << 32 | int(parsed)


def _number(text: str) -> int:
    return {"True": 1, "False": 0}[text] if text in ("True", "False") else int(text, 0)


def against_tshark(reading: Reading, packets: list[dict[str, str]], times: bool = True) -> Compared:
    """Every value that both give. ``times`` off: one of them took another stamp."""
    done = Compared()
    columns = {name: values.tolist() for name, values in reading.columns.items()}
    sparse = {
        name: dict(zip(table["packet"].tolist(), table, strict=True))
        for name, table in reading.sparse.items()
    }
    ends = [int(e["addr_hi"]) << 64 | int(e["addr_lo"]) for e in reading.endpoints]
    if len(columns["kind"]) < len(packets):
        done.differences.append(f"{len(packets)} packets, of which {len(columns['kind'])} were read")
    for i, its in enumerate(packets[: len(columns["kind"])]):
        kind = Kind(columns["kind"][i])
        at = f"packet {i}"
        done.packets += 1
        done.by_kind[kind.name] += 1
        done.same(f"{at} frame", columns["frame"][i], i)
        if kind == Kind.UNSUPPORTED_LINK_TYPE:
            continue  # some of them carry lengths and stamps of their own
        done.same(f"{at} wire_len", columns["wire_len"][i], int(its["frame.len"]))
        if times and its["frame.time_epoch"]:
            # An int64 of nanoseconds ends in 2262; what lies beyond wraps around.
            done.same(
                f"{at} time", columns["time_ns"][i] % 2**64, nanoseconds(its["frame.time_epoch"]) % 2**64
            )
        if kind >= FIRST_SKIP:
            layers = its["frame.protocols"].split(":")
            if kind in (Kind.OTHER_ETHERTYPE, Kind.OTHER_IP_PROTOCOL, Kind.OTHER_UDP) and not {
                "icmp",
                "icmpv6",
            } & set(layers):
                done.same(f"{at} is skipped as {kind.name}", {"tcp", "infiniband"} & set(layers), set())
            continue
        if kind == Kind.PAUSE:
            row = sparse["pause"][i]
            done.same(f"{at} pause", int(row["opcode"]), _number(its["macc.opcode"]))
            continue
        _ip(done, at, its, kind, ends, columns, i)
        if kind == Kind.TCP:
            _tcp(done, at, its, columns, sparse["tcp"][i], i)
        else:
            _roce(done, at, its, kind, columns, sparse, i)
    return done


def _ip(
    done: Compared,
    at: str,
    its: dict[str, str],
    kind: Kind,
    ends: list[int],
    columns: dict[str, list[int]],
    i: int,
) -> None:
    layers = its["frame.protocols"].split(":")
    if kind == Kind.ROCE_V1:
        src, dst, tos = (its[f"infiniband.grh.{name}"] for name in ("sgid", "dgid", "tclass"))
    elif max(n for n, layer in enumerate(layers) if layer in ("ip", "ipv6")) == _last(layers, "ipv6"):
        src, dst, tos = its["ipv6.src"], its["ipv6.dst"], its["ipv6.tclass"]
    else:
        src, dst, tos = its["ip.src"], its["ip.dst"], its["ip.dsfield"]
    done.same(f"{at} src", ends[columns["src"][i]], address(src))
    done.same(f"{at} dst", ends[columns["dst"][i]], address(dst))
    done.same(f"{at} tos", columns["tos"][i], _number(tos))


def _last(layers: list[str], name: str) -> int:
    return max((n for n, layer in enumerate(layers) if layer == name), default=-1)


def _roce(
    done: Compared, at: str, its: dict[str, str], kind: Kind, columns: dict, sparse: dict, i: int
) -> None:
    mine = {name: values[i] for name, values in columns.items()}
    if kind == Kind.ROCE_V2:
        done.same(f"{at} sport", mine["sport"], int(its["udp.srcport"]))
        done.same(f"{at} dport", mine["dport"], int(its["udp.dstport"]))
    for name, its_name in (("opcode", "opcode"), ("dest_qp", "destqp"), ("psn", "psn")):
        done.same(f"{at} {name}", mine[name], _number(its[f"infiniband.bth.{its_name}"]))
    for flag, its_name in ((BthFlag.SOLICITED, "se"), (BthFlag.MIG_REQ, "m"), (BthFlag.ACK_REQ, "a")):
        done.same(
            f"{at} {flag.name}", int(bool(mine["flags"] & flag)), _number(its[f"infiniband.bth.{its_name}"])
        )
    pad = mine["flags"] >> BthFlag.PAD_SHIFT & 3
    done.same(f"{at} pad", pad, _number(its["infiniband.bth.padcnt"]))
    bth = bytes.fromhex(its["infiniband.bth"])  # this tshark has no fields for FECN and BECN
    done.same(f"{at} FECN, BECN", (mine["flags"] >> 1 & 3), (bth[4] >> 6 & 1) | (bth[4] >> 6 & 2))
    headers = wire.OPCODES[mine["opcode"]].headers
    extended = sum(size for bit, size in wire.HEADER_BYTES.items() if headers & bit)
    if kind == Kind.ROCE_V2:
        done.same(f"{at} length", 8 + 12 + extended + mine["payload"] + pad + 4, int(its["udp.length"]))
    # The headers after the BTH: those tshark shows must be there with the same values, and the reverse.
    for table, pairs in _EXTENSIONS.items():
        row = sparse[table].get(i)
        for name, its_name in pairs:
            text = its[f"infiniband.{its_name}"]
            if table == "reth" and headers & wire.ATOMIC:
                continue  # tshark gives AtomicETH's address and key by the names of RETH's
            if row is None or not text:
                done.same(f"{at} {table}.{name} seen", row is not None, bool(text))
            else:
                done.same(f"{at} {table}.{name}", int(row[name]), _number(text))
    if headers & wire.ATOMIC and (row := sparse["atomic"].get(i)) is not None:
        done.same(f"{at} atomic.va", int(row["va"]), _number(its["infiniband.reth.va"]))
        done.same(f"{at} atomic.rkey", int(row["rkey"]), _number(its["infiniband.reth.r_key"]))
    text = its["infiniband.immdt"] or its["infiniband.ieth"]
    row = sparse["imm"].get(i)
    done.same(f"{at} imm", None if row is None else int(row["value"]), int(text, 16) if text else None)


_EXTENSIONS = {
    "reth": (("va", "reth.va"), ("rkey", "reth.r_key"), ("dma_len", "reth.dmalen")),
    "aeth": (("syndrome", "aeth.syndrome"), ("msn", "aeth.msn")),
    "deth": (("qkey", "deth.q_key"), ("src_qp", "deth.srcqp")),
    "atomic": (("swap_add", "atomiceth.swapdt"), ("compare", "atomiceth.cmpdt")),
}


def _tcp(done: Compared, at: str, its: dict[str, str], columns: dict, row: np.void, i: int) -> None:
    done.same(f"{at} sport", columns["sport"][i], int(its["tcp.srcport"]))
    done.same(f"{at} dport", columns["dport"][i], int(its["tcp.dstport"]))
    done.same(f"{at} payload", columns["payload"][i], int(its["tcp.len"]))
    flags = _number(its["tcp.flags"]) & 255
    done.same(f"{at} flags", columns["opcode"][i], flags)
    done.same(f"{at} tcp.flags", int(row["flags"]), flags)
    done.same(f"{at} seq", int(row["seq"]), int(its["tcp.seq"]))
    if flags & 16:
        done.same(f"{at} ack", int(row["ack"]), int(its["tcp.ack"]))
    done.same(f"{at} window", int(row["window"]), int(its["tcp.window_size_value"]))
    done.same(f"{at} tsval", int(row["tsval"]), int(its["tcp.options.timestamp.tsval"] or 0))
    done.same(f"{at} tsecr", int(row["tsecr"]), int(its["tcp.options.timestamp.tsecr"] or 0))
    if flags & 2:
        done.same(f"{at} wscale", int(row["wscale"]), int(its["tcp.options.wscale.shift"] or 255))


def icrc(frame: bytes) -> tuple[int, int] | None:
    """(checksum computed, checksum carried) of a whole RoCE frame on Ethernet; None where it is none.

    IBA volume 1 annex A17.3.3: CRC-32 over eight 0xff bytes (RoCEv1: the LRH's place, and the GRH), the
    headers with their changeable fields set to ones, and the payload; least significant byte first.
    """
    at, ethertype = 14, int.from_bytes(frame[12:14], "big")
    while ethertype in (wire.ETHERTYPE_VLAN, wire.ETHERTYPE_QINQ):
        at, ethertype = at + 4, int.from_bytes(frame[at + 2 : at + 4], "big")
    packet = bytearray(frame[at:])
    if ethertype == wire.ETHERTYPE_IPV4 and packet[9] == wire.IPPROTO_UDP:
        header, end = (packet[0] & 15) * 4, int.from_bytes(packet[2:4], "big")
        masked = [1, 8, 10, 11]  # TOS, TTL, checksum
    elif ethertype == wire.ETHERTYPE_IPV6 and packet[6] == wire.IPPROTO_UDP:
        header, end = 40, 40 + int.from_bytes(packet[4:6], "big")
        masked = [1, 2, 3, 7]  # traffic class and flow label, hop limit
        packet[0] |= 0x0F
    elif ethertype == wire.ETHERTYPE_ROCE_V1:
        header, end = 40, 40 + int.from_bytes(packet[4:6], "big")
        masked = [1, 2, 3, 7]
        packet[0] |= 0x0F
    else:
        return None
    bth = header
    if ethertype != wire.ETHERTYPE_ROCE_V1:
        if int.from_bytes(packet[header + 2 : header + 4], "big") != wire.ROCE_V2_PORT:
            return None
        masked += [header + 6, header + 7]  # UDP checksum
        bth += 8
    masked.append(bth + 4)  # reserved, with FECN and BECN
    for place in masked:
        packet[place] = 0xFF
    if end > len(packet):
        return None
    computed = zlib.crc32(b"\xff" * 8 + bytes(packet[: end - 4]))
    return computed, int.from_bytes(packet[end - 4 : end], "little")
