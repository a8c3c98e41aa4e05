"""Stamps that cannot be: a few packets of 1970 or 2106 among a job's change nothing but a warning."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from dpuflow import Vantage, analyze

CASE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"


def restamped(source: Path, target: Path, share: float, seconds: list[int], seed: int) -> None:
    """A copy of a classic pcap in which a share of the packets has one of ``seconds`` in its stamp."""
    data = bytearray(gzip.decompress(source.read_bytes()))
    random = np.random.default_rng(seed)
    at = 24
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at + 8)
        if random.random() < share:
            struct.pack_into("<I", data, at, seconds[int(random.integers(len(seconds)))])
        at += 16 + length
    target.write_bytes(data)


@pytest.mark.parametrize("seconds", [[0], [0xFFFFFFFF], [0, 1, 0x7FFFFFFF, 0xFFFFFFFF]])
def test_a_few_absurd_stamps(tmp_path: Path, seconds: list[int]) -> None:
    files = sorted(CASE.glob("node*.pcap.gz"))
    restamped(files[1], tmp_path / "node1.pcap", 0.001, seconds, 1)
    changed = [files[0], tmp_path / "node1.pcap", *files[2:]]
    result = analyze([Vantage(f"node{k}", (str(f),)) for k, f in enumerate(changed)])
    capture = result.captures[1]
    assert capture.last_ns - capture.first_ns < 10_000_000_000
    assert any("more than a year apart" in warning for warning in capture.warnings)
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [2]


@pytest.mark.parametrize("seed", range(4))
def test_absurd_stamps_alone(tmp_path: Path, seed: int) -> None:
    """Nothing is left to say; nothing breaks, and NumPy says nothing (a warning is an error here)."""
    vantages = []
    for k, file in enumerate(sorted(CASE.glob("node*.pcap.gz"))):
        restamped(file, tmp_path / f"{k}.pcap", 0.6, [seed, 1 << 30, 1 << 31, 0xFFFFFFFF], seed)
        vantages.append(Vantage(f"node{k}", (str(tmp_path / f"{k}.pcap"),)))
    analyze(vantages)
