"""What NCCL's own net_ib put on the wire (bundled capture, 2.21.5) and the simulator keep the same rules."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
from synth_worlds import loop, settings

from dpuflow.synth.case import write_case
from dpuflow.synth.transport import LAYOUTS

REAL = Path(__file__).resolve().parents[1] / "traces" / "nccl-allreduce-n2"
WRITE_FIRST, WRITE_LAST_IMM, WRITE_ONLY, ACK = 0x06, 0x09, 0x0A, 0x11


class Packet(NamedTuple):
    """A RoCE packet of a capture; ``body`` begins after the BTH."""

    stamp_ns: int
    source: bytes
    source_port: int
    code: int
    pair: int
    ask: bool
    psn: int
    body: bytes


def packets(file: Path) -> list[Packet]:
    data, at, found = gzip.decompress(file.read_bytes()), 24, []
    while at < len(data):
        seconds, nanos, kept, _ = struct.unpack_from("<IIII", data, at)
        frame = data[at + 16 : at + 16 + kept]
        at += 16 + kept
        if frame[12:14] != b"\x08\x00" or frame[23] != 17 or frame[36:38] != b"\x12\xb7":
            continue
        bth = frame[42:54]
        found.append(
            Packet(
                stamp_ns=seconds * 10**9 + nanos,
                source=frame[26:30],
                source_port=int.from_bytes(frame[34:36], "big"),
                code=bth[0],
                pair=int.from_bytes(bth[5:8], "big"),
                ask=bool(bth[8] >> 7),
                psn=int.from_bytes(bth[9:12], "big"),
                body=frame[54:],
            )
        )
    return found


@pytest.fixture(scope="module", params=["real", "simulated"])
def capture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Packet]:
    if request.param == "real":
        return packets(REAL / "node0.pcap.gz")
    folder = tmp_path_factory.mktemp("case")
    like = settings(cluster={"nodes": 2, "mtu": 1024}, nccl={"version": "2.20", "channels": 1})
    write_case(loop("op: all_reduce, bytes: 256KiB", like, iterations=30), str(folder))
    return packets(folder / "node0.pcap.gz")


def test_clear_to_send_entries_are_laid_out_alike(capture: list[Packet]) -> None:
    layout = LAYOUTS["2.20"]
    entries = [p for p in capture if p.code == WRITE_ONLY]
    assert len(entries) > 100
    first: dict[tuple[bytes, int], int] = {}
    for packet in entries:
        va, _, length = struct.unpack_from(">QII", packet.body)
        entry = packet.body[16:]
        target, size = struct.unpack_from("<Qi", entry)
        requests, tag = struct.unpack_from("<ii", entry, layout.requests_at)
        (number,) = struct.unpack_from("<Q", entry, layout.number_at)
        assert length == layout.entry
        assert number == packet.psn + 1
        base = first.setdefault((packet.source, packet.pair), va - (number - 1) % 256 * layout.stride)
        assert va == base + (number - 1) % layout.rows * layout.stride
        assert (requests, packet.ask) == (1, True)
        assert tag in (0, 1)
        assert target > 1 << 40
        assert 16 * 1024 <= size <= 4 << 20


def test_data_goes_where_the_entry_says_and_its_immediate_is_its_size(capture: list[Packet]) -> None:
    """Little endian before 2.29. The connection of an entry's sender is the one whose data it asks for."""
    targets: dict[bytes, list[int]] = {}
    sizes: list[tuple[int, int]] = []
    length = -1
    for packet in capture:
        if packet.code == WRITE_ONLY:
            targets.setdefault(packet.source, []).append(struct.unpack_from("<Q", packet.body, 16)[0])
        elif packet.code == WRITE_FIRST:
            va, _, length = struct.unpack_from(">QII", packet.body)
            (receiver,) = (source for source in targets if source != packet.source)
            assert va == targets[receiver].pop(0)
        elif packet.code == WRITE_LAST_IMM:
            sizes.append((length, struct.unpack_from("<I", packet.body)[0]))
    assert len(sizes) > 50
    mine = {size for size, _ in sizes}
    assert {said for _, said in sizes} == mine


def test_both_directions_share_the_source_port_and_acks_repeat_psns(capture: list[Packet]) -> None:
    ports = {p.source_port for p in capture if p.code in (WRITE_FIRST, WRITE_ONLY, ACK)}
    assert len(ports) <= 2  # one for each of the two connections
    for packet in capture:
        if packet.code == ACK:
            syndrome, msn = packet.body[0], int.from_bytes(packet.body[1:4], "big")
            assert syndrome == 0x1F
            assert msn <= len(capture)


def test_first_packets_have_psn_0_and_messages_end_by_asking_for_an_ack(capture: list[Packet]) -> None:
    seen: dict[tuple[bytes, int], int] = {}
    for packet in capture:
        key = (packet.source, packet.pair)
        if packet.code == ACK:
            continue
        if key not in seen:
            assert packet.psn == 0
        elif packet.psn > seen[key]:
            assert packet.psn == seen[key] + 1
        seen[key] = max(packet.psn, seen.get(key, 0))
        if packet.code == WRITE_LAST_IMM:
            assert packet.ask
