"""Real captures through the whole of ingest, against what their READMEs and meta.json state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpuflow.ingest import ingest
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Pairing, Role, Transport, Wire
from dpuflow.schema.tables import CaptureTables

CASES = [
    "a2a-linear-n4-64k-random",
    "ar-recdbl-n4-8k-random",
    "ar-ring-n2-64k-late1-5ms",
    "nccl-ar-n2-256k-clean",
    "nccl-ar-n3-96k-quiet-random",
    "nccl-net-loss-n4-128k",
    "net-ecn-n3-96k",
    "net-loss-fabric-n3-96k",
]


def read(path: Path) -> CaptureTables:
    return ingest([str(path)], path.parent.name, 0, 1, None)


def address(tables: CaptureTables, endpoint: int) -> int:
    row = tables.endpoints[endpoint]
    return int(row["addr_hi"]) << 64 | int(row["addr_lo"])


def number(text: str) -> int:
    import ipaddress

    parsed = ipaddress.ip_address(text)
    return int(parsed) if parsed.version == 6 else 0xFFFF << 32 | int(parsed)


def of(tables: CaptureTables, wire: Wire) -> np.ndarray:
    return tables.messages[tables.messages["wire"] == wire]


@pytest.mark.parametrize(
    ("name", "qps"),
    [("roce_capture_read-write-ecn.pcap", (17, 17)), ("test.pcap", (17, 23))],
)
def test_cm_write_and_read(shared, name, qps):
    tables = read(shared / "captures/public/rxe-cm-write-read" / name)
    assert len(of(tables, Wire.ROCE_CM)) == 5
    assert of(tables, Wire.ROCE_CM)["tag"].tolist() == [0x10, 0x13, 0x14, 0x15, 0x16]
    data = tables.flows[tables.flows["dest_qp"] > 1]
    assert sorted(data["dest_qp"]) == sorted(qps)
    assert (data["pairing"] == Pairing.HANDSHAKE).all()
    (write,) = of(tables, Wire.ROCE_WRITE)
    assert write["bytes"] == 18
    assert write["acked_ns"] != NEVER
    asked, answer = of(tables, Wire.ROCE_READ)
    assert (asked["role"], asked["bytes"], asked["announces"]) == (Role.GRANT, 0, 4096)
    assert (answer["role"], answer["bytes"], answer["packets"]) == (Role.DATA, 4096, 4)
    assert asked["seq_end"] - asked["seq"] == 4
    assert asked["acked_ns"] == answer["last_ns"]


def test_sends_with_immediate(shared):
    tables = read(shared / "captures/public/huawei-roce-send-imm/roce.pcap")
    sends = of(tables, Wire.ROCE_SEND_IMM)
    assert len(sends) == (tables.flows["transport"][tables.messages["flow"]] == Transport.ROCE).sum()
    assert len(sends) == 35
    assert sends["packets"].sum() == 68
    assert (sends["flags"] == 0).all()
    assert (sends["acked_ns"] != NEVER).all()
    roce = tables.flows[tables.flows["transport"] == Transport.ROCE]
    assert roce["packets"].sum() == 105
    for counter in ("retransmitted", "missing", "out_of_order", "ecn_marked", "cnp", "nak", "rnr"):
        assert roce[counter].sum() == 0, counter


def test_packets_from_real_adapters(shared):
    tables = read(shared / "captures/public/roce-hex-scapy/roce_uts.pcap")
    assert tables.flows["cnp"].tolist() == [1, 0, 0, 0, 0]
    assert of(tables, Wire.ROCE_SEND)["bytes"].tolist() == [18, 18]
    assert (tables.flows["peer"] == NONE32).all()


# case -> Wire, messages, bytes of each; from the command lines
PERFTEST = {
    "perftest-write-bw": (Wire.ROCE_WRITE, 60, 65536),
    "perftest-write-bw-cm": (Wire.ROCE_WRITE, 40, 16384),
    "perftest-send-bw": (Wire.ROCE_SEND, 100, 8192),
    "perftest-read-bw": (Wire.ROCE_READ, 40, 32768),
    "perftest-atomic-fadd-bw": (Wire.ROCE_ATOMIC, 200, 8),
    "perftest-send-lat-ud": (Wire.ROCE_DATAGRAM, 400, 256),
}


@pytest.mark.parametrize("case", PERFTEST)
@pytest.mark.parametrize("file", ["node0", "node1", "central"])
def test_perftest(shared, case, file):
    wire, count, size = PERFTEST[case]
    tables = read(shared / f"captures/roce/{case}/{file}.pcap.gz")
    data = of(tables, wire)
    data = data[data["role"] == Role.DATA]
    assert len(data) == count
    assert (data["bytes"] == size).all()
    assert (data["flags"] == 0).all()
    roce = tables.flows[(tables.flows["transport"] == Transport.ROCE) & (tables.flows["dest_qp"] > 1)]
    assert (roce["peer"] != NONE32).all()
    assert roce["retransmitted"].sum() == roce["missing"].sum() == roce["out_of_order"].sum() == 0
    if wire in (Wire.ROCE_WRITE, Wire.ROCE_SEND, Wire.ROCE_ATOMIC):
        assert (data["acked_ns"] > data["last_ns"]).all()


@pytest.mark.parametrize("case", CASES)
def test_counts_match_the_lab(shared, case):
    """Retransmissions at the sender's node, NAKs, CE marks at the receiver's, per direction."""
    folder = shared / "captures/roce" / case
    meta = json.loads((folder / "meta.json").read_text())
    addresses = {node["node"]: {number(ip) for ip in node["ips"]} for node in meta["nodes"]}
    tables = {node["node"]: read(folder / node["capture"]) for node in meta["nodes"]}

    def total(node: int, src: int, dst: int, field: str) -> int:
        t = tables[node]
        return sum(
            int(f[field])
            for f in t.flows[t.flows["transport"] == Transport.ROCE]
            if address(t, f["src"]) in addresses[src] and address(t, f["dst"]) in addresses[dst]
        )

    for seen in meta["observed"]["flows"]:
        src, dst = seen["src_node"], seen["dst_node"]
        assert total(src, src, dst, "packets") >= seen["left_src_tap"]  # datagrams are not counted there
        assert total(src, src, dst, "retransmitted") == seen["request_psn_sent_again"]
        assert total(dst, src, dst, "ecn_marked") == seen["ce_marked_at_dst"]
        assert total(src, src, dst, "missing") == 0
    for nak in meta["observed"]["naks"]:
        src, dst = nak["from_node"], nak["to_node"]
        assert total(src, src, dst, "nak") + total(src, src, dst, "rnr") == nak["count"]


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("nccl")])
def test_nccl_grants_and_data_alternate(shared, case):
    folder = shared / "captures/roce" / case
    for path in sorted(folder.glob("*.pcap.gz")):
        tables = read(path)
        messages = tables.messages[tables.messages["wire"] != Wire.ROCE_CM]
        messages = messages[tables.flows["transport"][messages["flow"]] == Transport.ROCE]
        grants = messages[messages["role"] == Role.GRANT]
        data = messages[messages["role"] == Role.DATA]
        assert len(grants) == len(data) == len(messages) // 2 > 0
        assert (grants["wire"] == Wire.ROCE_WRITE).all()
        assert (data["wire"] == Wire.ROCE_WRITE_IMM).all()
        assert (tables.flows["peer"][messages["flow"]] != NONE32).all()
        for flow in np.unique(grants["flow"]):
            mine = grants[grants["flow"] == flow]
            assert mine["sub"].tolist() == list(range(1, len(mine) + 1))
            assert (mine["announces"] > 0).all()
            assert len(np.unique(mine["tag"])) == 1
            answers = data[data["flow"] == tables.flows["peer"][flow]]
            assert len(answers) == len(mine)
            assert (answers["bytes"] <= mine["announces"]).all()
            # NCCL up to 2.28 puts the size into the immediate in host byte order
            assert (answers["tag"].byteswap() == answers["bytes"]).all()
            assert (answers["first_ns"] > mine["first_ns"]).all()


@pytest.mark.parametrize(
    "case",
    ["ar-ring-n2-64k-late1-5ms", "net-loss-fabric-n3-96k", "nccl-net-loss-n4-128k"],
)
def test_both_ends_see_the_same_messages(shared, case):
    """Each vantage point tells the same messages, whatever was lost between them."""
    told = []
    for path in sorted((shared / "captures/roce" / case).glob("*.pcap.gz")):
        tables = read(path)
        flows = tables.flows
        messages = tables.messages[flows["transport"][tables.messages["flow"]] == Transport.ROCE]
        fine = np.uint8(MessageFlag.REORDERED | MessageFlag.OPENING | MessageFlag.HOLDS_SENDER)
        assert (messages["flags"] & ~fine == 0).all()
        rows = set()
        for m in messages:
            flow = flows[m["flow"]]
            ends = address(tables, flow["src"]), address(tables, flow["dst"]), int(flow["dest_qp"])
            rows.add((*ends, *(int(m[name]) for name in ("seq", "seq_end", "bytes", "wire", "role"))))
        told.append(rows)
    everything = set().union(*told)
    for rows in told:
        ends = {row[:2] for row in rows}
        assert rows == {row for row in everything if row[:2] in ends}


def test_messages_come_in_order_of_completion(shared):
    for path in sorted((shared / "captures/roce/net-loss-fabric-n3-96k").glob("*.pcap.gz")):
        times = read(path).messages["last_ns"]
        assert len(times)
        assert (np.diff(times) >= 0).all()


def test_nothing_in_an_empty_capture(shared):
    tables = read(shared / "captures/public/reader-variants/tcpdump_empty.pcap")
    assert len(tables.messages) == len(tables.flows) == len(tables.pauses) == 0
