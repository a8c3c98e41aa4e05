"""The path of usual packets, which the random captures rarely enter: the kernel against the plain parser."""

from __future__ import annotations

from random import Random

import pytest
import runs
from naive_parse import read
from readings import differences, problems, read_bytes

from dpuflow.kernels import columns


def check(raw: bytes) -> None:
    rows, whole = read(raw)
    assert whole
    reading = read_bytes(raw)
    assert problems(reading) == []
    assert differences(reading, rows) == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("oddity", [0, 0.002, 0.05, 0.5])
def test_runs_broken_by_odd_packets(seed: int, oddity: float) -> None:
    rng = Random(seed)
    packets = runs.frames(rng, rng.choice((7, 8, 9, 500, 3000)), oddity=oddity)
    check(runs.pcap(packets))
    check(runs.pcapng(packets, rng.choice((1, 3))))


def test_big_endian_files_take_the_other_path() -> None:
    check(runs.pcap(runs.frames(Random(1), 600), ">"))


@pytest.mark.parametrize("form", [runs.pcap, runs.pcapng])
def test_more_flows_than_the_first_tables_hold(form) -> None:  # type: ignore[no-untyped-def]
    packets = runs.frames(Random(2), 9000, flows=5000)
    check(form(packets))


@pytest.mark.parametrize("count", [columns.CHUNK - 1, columns.CHUNK, columns.CHUNK + 1, columns.ROWS + 9])
def test_runs_as_long_as_a_chunk_and_a_block(count: int) -> None:
    check(runs.pcap(runs.frames(Random(count), count, oddity=0)))


@pytest.mark.parametrize("field", [17, 39, 43], ids=["total length", "UDP length", "BTH version"])
@pytest.mark.parametrize("place", [0, 1, 31, 62, 63, 64])
def test_one_packet_that_proves_odd_after_the_walk(place: int, field: int) -> None:
    packets = runs.frames(Random(place), 3 * columns.CHUNK, oddity=0)
    data, length, stamp = packets[place]
    changed = bytearray(data)
    changed[field] ^= 4
    packets[place] = bytes(changed), length, stamp
    check(runs.pcap(packets))
    check(runs.pcapng(packets, 2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stretch", [1, 7, 100, 10_000])
def test_runs_with_a_vlan_tag(seed: int, stretch: int) -> None:
    rng = Random(seed)
    packets = []
    for k, (data, length, stamp) in enumerate(runs.frames(rng, 700, oddity=0.01 * seed)):
        tag = rng.choice((b"\x81\x00", b"\x81\x00", b"\x81\x00", b"\x88\xa8")) if k % 50 == 0 else b"\x81\x00"
        tagged = len(data) >= 14 and k // stretch % 2 == 0
        frame = data[:12] + tag + b"\x60\x05" + data[12:] if tagged else data
        packets.append((frame, length + 4 * tagged, stamp))
    check(runs.pcap(packets))
    check(runs.pcapng(packets, 2))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stretch", [1, 9, 100, 10_000])
def test_runs_of_ipv6(seed: int, stretch: int) -> None:
    """IPv6 in turn with IPv4, with and without a VLAN tag, usual and odd packets."""
    rng = Random(seed)
    packets = []
    for k, (data, length, stamp) in enumerate(runs.frames(rng, 900, oddity=0.01 * seed)):
        frame = data
        if len(data) >= 34 and k // stretch % 3 != 1:
            frame = runs.over_ipv6(data)
            if rng.random() < 0.02:
                place = rng.choice((14, 18, 19, 20, 56))  # version, payload length, next header, port
                frame = frame[:place] + bytes((frame[place] ^ 1 << rng.randrange(8),)) + frame[place + 1 :]
        if len(data) >= 34 and seed % 2 and k // stretch % 2:
            frame = frame[:12] + b"\x81\x00\x60\x05" + frame[12:]
        packets.append((frame, length + len(frame) - len(data), stamp))
    check(runs.pcap(packets))
    check(runs.pcapng(packets, 2))


@pytest.mark.parametrize("flows", [40, 5000])
def test_ipv6_whole_packets_and_many_flows(flows: int) -> None:
    packets = [
        (runs.over_ipv6(data), length + 20, stamp)
        for data, length, stamp in runs.frames(Random(flows), 6000, flows=flows, oddity=0)
    ]
    check(runs.pcap(packets))
    check(runs.pcapng(packets, 3))
