"""Packets field by field against tshark: public captures, real ones, unusual files, tunnels.

By default the first packets of one capture of each case are compared; DPUFLOW_ALL_PACKETS=1 takes all
packets of all captures (three minutes).
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
from naive_parse import records
from oracles import ALL, SAMPLE, Compared, against_tshark, icrc, need_tshark, tshark
from readings import read_file, read_source

from dpuflow.capture import open_capture
from dpuflow.ingest import ingest
from dpuflow.packets.icrc import icrc_of
from dpuflow.schema.rows import Kind

ROCE = (
    "rxe-cm-write-read/roce_capture_read-write-ecn.pcap",
    "rxe-cm-write-read/test.pcap",
    "huawei-roce-send-imm/roce.pcap",
    "roce-hex-scapy/roce_uts.pcap",
)
OTHERS = (
    "wireshark-infiniband-erf/infiniband.pcap",
    "ipoib-dlt242/ipoib.pcap",
    "reader-variants/pcapplusplus_microsecs_big_endian.pcap",
    "reader-variants/pcapplusplus_nanosecs.pcap",
    "reader-variants/pcapplusplus_nanosecs_big_endian.pcap",
    "reader-variants/pcapplusplus_pcapng-example.pcapng",
    "reader-variants/pcapplusplus_many_interfaces-1.pcapng",
    "reader-variants/tcpdump_empty.pcap",
    "reader-variants/tcpdump_empty.pcapng",
    "reader-variants/tcpdump_802.1ad_QinQ.pcap",
    "reader-variants/tcpdump_geneve.pcap",
    "reader-variants/tcpdump_gso-ipv4-vxlan-ipv4.pcap",
    "reader-variants/tcpdump_gso-ipv6-vxlan-ipv4.pcap",
    "reader-variants/tcpdump_erspan-type-ii-1.pcap",
    "reader-variants/tcpdump_erspan-type-iii-ft-0.pcap",
    "reader-variants/tcpdump_LINKTYPE_PKTAP.pcap",
    "reader-variants/zeek_erspanI.pcap",
    "reader-variants/zeek_erspanII.pcap",
    "reader-variants/zeek_erspanIII.pcap",
)
RXE = ROCE[0]


def compare(path: Path, most: int | None = None, times: bool = True) -> Compared:
    """One capture against tshark; all packets of it, or the first ``most``."""
    reading = read_source(open_capture([str(path)]), most)
    done = against_tshark(reading, tshark(path, most), times)
    assert done.differences == []
    assert done.packets == (min(most, reading.info.packets) if most else reading.info.packets)
    return done


@pytest.mark.parametrize("name", ROCE)
def test_public_roce(shared, name):
    done = compare(shared / "captures/public" / name)
    assert done.by_kind["ROCE_V2"] + done.by_kind["ROCE_V1"] == {"roce.pcap": 105, "roce_uts.pcap": 5}.get(
        Path(name).name, 12
    )


@pytest.mark.parametrize("name", OTHERS)
def test_public_others(shared, name):
    compare(shared / "captures/public" / name)


@pytest.mark.parametrize("order", ["le", "be"])
def test_every_shape_of_pcapng(shared, order):
    """Both byte orders, all block types, time resolutions and offsets: stamps, lengths and counts."""
    files = sorted((shared / "captures/public/reader-variants/pcapng-generator").glob(f"{order}_*.pcapng"))
    assert len(files) == 25
    whole = Compared()
    for path in files:
        whole.add(compare(path))
    assert whole.packets == 71


def test_real_captures(shared):
    """RoCE of perftest, Open MPI and NCCL, TCP of Gloo and Open MPI."""
    name = "*.pcap.gz" if ALL else "node0.pcap.gz"
    files = sorted((shared / "captures").glob(f"roce/*/{name}")) + sorted(
        (shared / "captures").glob(f"tcp/*/{name}")
    )
    assert len(files) >= 39
    whole = Compared()
    for path in files:
        whole.add(compare(path, None if ALL else SAMPLE))
    assert whole.packets >= 39 * SAMPLE
    assert whole.by_kind["ROCE_V2"] > 4000
    assert whole.by_kind["TCP"] > 4000
    print(f"{whole.packets} packets, {whole.values} values, {dict(whole.by_kind)}")


BUNDLED = sorted((Path(__file__).resolve().parents[1] / "traces").glob("*/node0.pcap.gz"))


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.parent.name)
def test_bundled_captures(path):
    """What every clone has."""
    assert compare(path, SAMPLE).packets == SAMPLE


# -- tunnels ------------------------------------------------------------------------------------

IPV4 = bytes([45, 0, 0, 0, 0, 7, 0, 0, 64, 0, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2])
MACS = bytes(range(12))


def _ipv4(protocol: int, payload: bytes) -> bytes:
    header = bytearray(
        b"\x45\0" + struct.pack(">HHHBBH", 20 + len(payload), 7, 0, 64, protocol, 0) + IPV4[12:]
    )
    total = sum(struct.unpack(">10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into(">H", header, 10, ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF)
    return MACS + b"\x08\0" + bytes(header) + payload


def _ipv6(protocol: int, payload: bytes, extensions: bytes = b"", first: int | None = None) -> bytes:
    following = protocol if first is None else first
    header = struct.pack(">IHBB", 6 << 28 | 8 << 20, len(extensions) + len(payload), following, 64)
    ends = bytes.fromhex("20010db8" + "00" * 11 + "01" + "20010db8" + "00" * 11 + "02")
    return MACS + b"\x86\xdd" + header + ends + extensions + payload


def _udp(port: int, payload: bytes) -> bytes:
    return struct.pack(">HHHH", 50000, port, 8 + len(payload), 0) + payload


def _erspan_iii(granularity: int, sub_header: bytes, frame: bytes) -> bytes:
    header = struct.pack(">HHIHH", 0x2001, 0x0007, 123_456_789, 0, granularity << 1 | bool(sub_header))
    return struct.pack(">HHI", 0x1000, 0x22EB, 3) + header + sub_header + frame


WRAPPED = {
    "vlan": lambda f: f[:12] + b"\x81\0\x60\x05" + f[12:],
    "QinQ": lambda f: f[:12] + b"\x88\xa8\0\x05\x81\0\0\x06" + f[12:],
    "vxlan": lambda f: _ipv4(17, _udp(4789, b"\x08\0\0\0\0\0\x07\0" + f)),
    "vxlan over IPv6": lambda f: _ipv6(17, _udp(4789, b"\x08\0\0\0\0\0\x07\0" + f)),
    "vxlan in vlan": lambda f: WRAPPED["vlan"](WRAPPED["vxlan"](WRAPPED["vlan"](f))),
    "geneve": lambda f: _ipv4(17, _udp(6081, b"\0\0\x65\x58\0\0\x07\0" + f)),
    "geneve with options": lambda f: _ipv4(
        17, _udp(6081, b"\x02\0\x65\x58\0\0\x07\0" + b"\1\2\3\1" + bytes(4) + f)
    ),
    "gre": lambda f: _ipv4(47, struct.pack(">HH", 0, 0x6558) + f),
    "gre with IPv4": lambda f: _ipv4(47, struct.pack(">HH", 0, 0x0800) + f[14:]),
    "gre with key and number": lambda f: _ipv4(47, struct.pack(">HHII", 0x3000, 0x6558, 9, 8) + f),
    "ERSPAN I": lambda f: _ipv4(47, struct.pack(">HH", 0, 0x88BE) + f),
    "ERSPAN II": lambda f: _ipv4(47, struct.pack(">HHI", 0x1000, 0x88BE, 3) + b"\x10\x05\0\x07\0\0\0\1" + f),
    "ERSPAN III": lambda f: _ipv4(47, _erspan_iii(0, b"", f)),
    "ERSPAN III with a sub-header": lambda f: _ipv4(47, _erspan_iii(0, struct.pack(">II", 3 << 26, 5), f)),
    "IPv4 in IPv4": lambda f: _ipv4(4, f[14:]),
    "IPv4 in IPv6": lambda f: _ipv6(4, f[14:]),
    "IPv6 extension headers": lambda f: _ipv6(17, f[34:], b"\x3c\0" + bytes(6) + b"\x11\0\1\4" + bytes(4), 0),
    "GRE in vxlan": lambda f: WRAPPED["vxlan"](WRAPPED["gre"](f)),
}


def wrapped(raw: bytes, wrap) -> bytes:
    """A classic little-endian file with each frame wrapped."""
    out = [raw[:16] + struct.pack("<I", 262_144) + raw[20:24]]
    for record in records(raw):
        frame = wrap(record.frame)
        out.append(raw[record.start : record.start + 8] + struct.pack("<II", len(frame), len(frame)) + frame)
    return b"".join(out)


@pytest.mark.parametrize("how", WRAPPED)
def test_roce_inside(shared, tmp_path, how):
    raw = (shared / "captures/public" / RXE).read_bytes()
    path = tmp_path / "wrapped.pcap"
    path.write_bytes(wrapped(raw, WRAPPED[how]))
    done = compare(path)
    assert done.by_kind == {"ROCE_V2": 12}


def test_erspan_iii_stamp(shared, tmp_path):
    """IEEE 1588 time of the mirror replaces the capture's stamps."""
    raw = (shared / "captures/public" / RXE).read_bytes()
    path = tmp_path / "erspan.pcap"
    sub = struct.pack(">II", 5 << 26, 1_700_000_000)
    path.write_bytes(wrapped(raw, lambda f: _ipv4(47, _erspan_iii(2, sub, f))))
    compare(path, times=False)
    assert set(read_file(path).columns["time_ns"]) == {1_700_000_000_123_456_789}


# -- ICRC ---------------------------------------------------------------------------------------


def test_icrc_of_whole_packets(shared):
    """The checksum over header fields tells that the frames are what the reader takes them for."""
    checked = 0
    for name in ROCE:
        path = shared / "captures/public" / name
        kinds = read_file(path).columns["kind"]
        for number, record in enumerate(records(path.read_bytes())):
            sums = icrc(record.frame)
            assert (sums is not None) == (kinds[number] in (Kind.ROCE_V1, Kind.ROCE_V2)), (name, number)
            if sums is not None:
                assert sums[0] == sums[1], (name, number)
                assert icrc_of(record.frame) == (sums[1], sums[0]), (name, number)
                checked += 1
    assert checked == 12 + 12 + 105 + 5


def test_icrc_fails_where_a_byte_differs(shared):
    path = shared / "captures/malformed/derived/roce_unknown_opcode.pcap"
    sums = [icrc(record.frame) for record in records(path.read_bytes())]
    assert [pair is not None and pair[0] == pair[1] for pair in sums] == [n != 3 for n in range(12)]


@pytest.mark.parametrize(
    "name",
    [
        "m_bcast_roots_n4_random/node2",
        "gloo_allreduce_1m_n4_offload_late0/node1",
        "net_loss_gloo_allreduce_256k_n4_node1/node1",
        "net_loss_gloo_allreduce_256k_n4_node1/node3",
    ],
)
def test_needless_tcp_repeats_are_those_that_tshark_sees_acknowledged(shared: Path, name: str) -> None:
    """Each that was acknowledged before it came, and each that its receiver reported by a D-SACK."""
    path = shared / "captures/tcp" / f"{name}.pcap.gz"
    flows = ingest([str(path)]).flows

    def count(shown: str) -> int:
        command = ["tshark", "-n", "-r", str(path), "-Y", shown, "-T", "fields", "-e", "frame.number"]
        return len(subprocess.run(command, capture_output=True, check=True).stdout.split())

    need_tshark()
    acked = count("tcp.analysis.spurious_retransmission")
    told = count("tcp.options.sack.dsack")
    assert acked <= flows["spurious"].sum() == told
