"""BTH, AETH and CNP against scapy, which also shows FECN and BECN; TCP against scapy and dpkt."""

from __future__ import annotations

import io
import ipaddress

import numpy as np
import pytest
from mutations import head
from naive_parse import records
from oracles import ALL, Compared
from readings import read_bytes

from dpuflow.schema.rows import BthFlag, Kind

ROCE = ("rxe-cm-write-read/test.pcap", "huawei-roce-send-imm/roce.pcap", "roce-hex-scapy/roce_uts.pcap")
REAL = (
    "roce/perftest-read-bw/node0.pcap.gz",
    "roce/net-ecn-n3-96k/node1.pcap.gz",
    "roce/nccl-net-loss-n4-128k/node3.pcap.gz",
)
TCP = (
    "tcp/gloo_allreduce_1m_n4_offload_late0/node0.pcap.gz",
    "tcp/net_loss_gloo_allreduce_256k_n4_node1/node1.pcap.gz",
)


def raw_of(path, packets: int) -> bytes:
    """The first packets of a file, unpacked."""
    import gzip

    raw = path.read_bytes()
    return head(gzip.decompress(raw) if path.suffix == ".gz" else raw, packets)


def address(endpoint: np.void) -> str:
    """A row of ENDPOINT as text."""
    parsed = ipaddress.IPv6Address(int(endpoint["addr_hi"]) << 64 | int(endpoint["addr_lo"]))
    return str(parsed.ipv4_mapped or parsed)


@pytest.mark.parametrize("name", [f"public/{name}" for name in ROCE] + list(REAL))
def test_roce_against_scapy(shared, name):
    roce = pytest.importorskip("scapy.contrib.roce")
    from scapy.layers.inet import IP, UDP
    from scapy.layers.inet6 import IPv6
    from scapy.layers.l2 import Ether

    raw = raw_of(shared / "captures" / name, 5000 if ALL else 250)
    reading, done = read_bytes(raw), Compared()
    aeth = {int(row["packet"]): row for row in reading.sparse["aeth"]}
    column = reading.columns
    for i, record in enumerate(records(raw)):
        if column["kind"][i] not in (Kind.ROCE_V1, Kind.ROCE_V2):
            continue
        frame = Ether(record.frame)
        if roce.BTH not in frame:
            # It dissects neither RoCEv1's GRH nor datagrams from ports it knows better.
            assert column["kind"][i] == Kind.ROCE_V1 or frame[UDP].sport == 69
            continue
        done.packets += 1
        bth = frame[roce.BTH]
        flags = int(column["flags"][i])
        if column["kind"][i] == Kind.ROCE_V2:
            ip = frame[IP] if IP in frame else frame[IPv6]
            for mine, its in (("src", ip.src), ("dst", ip.dst)):
                done.same(
                    f"{i} {mine}", address(reading.endpoints[column[mine][i]]), str(ipaddress.ip_address(its))
                )
            done.same(f"{i} tos", int(column["tos"][i]), ip.tos if IP in frame else ip.tc)
            done.same(f"{i} sport", int(column["sport"][i]), frame[UDP].sport)
            done.same(f"{i} dport", int(column["dport"][i]), frame[UDP].dport)
        done.same(f"{i} opcode", int(column["opcode"][i]), bth.opcode)
        done.same(f"{i} dest_qp", int(column["dest_qp"][i]), bth.dqpn)
        done.same(f"{i} psn", int(column["psn"][i]), bth.psn)
        its = {
            BthFlag.ACK_REQ: bth.ackreq, BthFlag.BECN: bth.becn, BthFlag.FECN: bth.fecn,
            BthFlag.SOLICITED: bth.solicited, BthFlag.MIG_REQ: bth.migreq,
        }  # fmt: skip
        done.same(f"{i} flags", flags & 31, sum(int(flag) for flag, is_set in its.items() if is_set))
        done.same(f"{i} pad", flags >> BthFlag.PAD_SHIFT & 3, bth.padcount)
        if roce.AETH in frame:
            done.same(f"{i} syndrome", int(aeth[i]["syndrome"]), frame[roce.AETH].syndrome)
            done.same(f"{i} msn", int(aeth[i]["msn"]), frame[roce.AETH].msn)
    assert done.differences == []
    assert done.packets >= 4
    assert done.values >= 7 * done.packets


@pytest.mark.parametrize("name", TCP)
def test_tcp_against_scapy(shared, name):
    pytest.importorskip("scapy")
    from scapy.layers.inet import IP
    from scapy.layers.inet import TCP as Segment
    from scapy.layers.l2 import Ether

    raw = raw_of(shared / "captures" / name, 5000 if ALL else 250)
    reading, done = read_bytes(raw), Compared()
    rows = {int(row["packet"]): row for row in reading.sparse["tcp"]}
    for i, record in enumerate(records(raw)):
        frame = Ether(record.frame)
        if Segment not in frame:
            done.same(f"{i} TCP", i in rows, False)
            continue
        segment, row = frame[Segment], rows[i]
        done.packets += 1
        for mine, its in (("seq", "seq"), ("ack", "ack"), ("window", "window")):
            done.same(f"{i} {mine}", int(row[mine]), getattr(segment, its))
        done.same(f"{i} flags", int(row["flags"]), int(segment.flags) & 255)
        options = dict(option for option in segment.options if option[0] in ("Timestamp", "WScale", "SAck"))
        done.same(f"{i} timestamps", (int(row["tsval"]), int(row["tsecr"])), options.get("Timestamp", (0, 0)))
        done.same(f"{i} wscale", int(row["wscale"]), options.get("WScale", 255))
        edges = (int(row["sack_left"]), int(row["sack_right"]))
        done.same(f"{i} sack", edges, tuple(options.get("SAck", (0, 0)))[:2])
        payload = frame[IP].len - 4 * frame[IP].ihl - 4 * segment.dataofs
        done.same(f"{i} payload", int(reading.columns["payload"][i]), payload)
    assert done.differences == []
    assert done.packets > 200


@pytest.mark.parametrize("name", TCP)
def test_tcp_against_dpkt(shared, name):
    dpkt = pytest.importorskip("dpkt")
    raw = raw_of(shared / "captures" / name, 20_000 if ALL else 2000)
    reading, done = read_bytes(raw), Compared()
    rows = {int(row["packet"]): row for row in reading.sparse["tcp"]}
    for i, (_, frame) in enumerate(dpkt.pcap.Reader(io.BytesIO(raw))):
        ip = dpkt.ethernet.Ethernet(frame).data
        if not (isinstance(ip, dpkt.ip.IP) and isinstance(ip.data, dpkt.tcp.TCP)):
            done.same(f"{i} TCP", i in rows, False)
            continue
        segment, row = ip.data, rows[i]
        done.packets += 1
        mine = [int(row[name]) for name in ("seq", "ack", "window", "flags")]
        done.same(
            f"{i} seq, ack, window, flags", mine, [segment.seq, segment.ack, segment.win, segment.flags & 255]
        )
        ports = int(reading.columns["sport"][i]), int(reading.columns["dport"][i])
        done.same(f"{i} ports", ports, (segment.sport, segment.dport))
        ends = [address(reading.endpoints[reading.columns[end][i]]) for end in ("src", "dst")]
        done.same(f"{i} addresses", ends, [str(ipaddress.ip_address(a)) for a in (ip.src, ip.dst)])
        done.same(f"{i} payload", int(reading.columns["payload"][i]), ip.len - 4 * ip.hl - 4 * segment.off)
        done.same(f"{i} data", reading.data[i], bytes(segment.data))
    assert done.differences == []
    assert done.packets > 500
