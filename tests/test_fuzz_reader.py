"""Packets made at random and files damaged at random: the kernel against the plain parser.

Every file ends right before memory that may not be touched. More of the same, for as long as one
likes: ``tools/fuzz.py``.
"""

from __future__ import annotations

import gzip
from random import Random

import mutations
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_parse import read, records
from readings import Reading, differences, problems, read_bytes, read_file

SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


def check(raw: bytes) -> Reading:
    """What the reader gives is what the plain parser gives."""
    rows, whole = read(raw)
    reading = read_bytes(raw)
    assert problems(reading) == []
    assert differences(reading, rows) == []
    assert reading.info.complete == whole
    return reading


@settings(max_examples=400, **SETTINGS)
@given(st.integers(0, 2**64 - 1), st.sampled_from((1, 3, 40, 200)))
def test_random_packets(seed, packets):
    """VLANs, tunnels, IP options, all opcodes and link types, each cut anywhere, with faults."""
    check(mutations.random_capture(Random(seed), packets))


def test_random_packets_reach_every_kind():
    """The generator leaves no Kind out, so that the test above means something."""
    from dpuflow.schema.rows import Kind

    seen = {row.kind for seed in range(60) for row in read(mutations.random_capture(Random(seed)))[0]}
    assert seen == set(Kind) - {Kind.NONE}


@settings(max_examples=300, **SETTINGS)
@given(st.integers(0, 2**64 - 1))
def test_damaged_random_captures(seed):
    rng = Random(seed)
    _damaged(mutations.random_capture(rng, 20), rng)


@settings(max_examples=300, **SETTINGS)
@given(st.integers(0, 2**64 - 1))
def test_damaged_public_captures(public, seed):
    rng = Random(seed)
    _damaged(rng.choice(public), rng)


def _damaged(good: bytes, rng: Random) -> None:
    bad = mutations.mutate(good, rng)
    if len(bad) < 24:
        return
    reading = check(bad)
    untouched = mutations.first_difference(good, bad)
    whole = sum(1 for record in records(good) if record.end <= untouched)
    assert reading.info.packets >= whole, "packets before the damage are kept"
    assert check(bad).same(reading), "read twice, it is the same"


@pytest.fixture(scope="module")
def public(shared) -> list[bytes]:
    folder = shared / "captures/public"
    files = [p for end in ("pcap", "pcapng") for p in sorted(folder.glob(f"**/*.{end}"))]
    return [raw for p in files if 24 < len(raw := p.read_bytes()) < 30_000]


@settings(max_examples=60, **SETTINGS)
@given(seed=st.integers(0, 2**64 - 1))
def test_plain_and_compressed_alike(tmp_path_factory, seed):
    rng = Random(seed)
    raw = mutations.random_capture(rng, 30)
    if rng.random() < 0.7:
        raw = mutations.mutate(raw, rng)
    if len(raw) < 24:
        return
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    plain, packed = folder / "a.pcap", folder / "a.pcap.gz"
    plain.write_bytes(raw)
    packed.write_bytes(gzip.compress(raw, 1))
    assert read_file(plain).same(read_file(packed))


@settings(max_examples=40, **SETTINGS)
@given(seed=st.integers(0, 2**64 - 1), cut=st.floats(0, 1), flip=st.booleans())
def test_damaged_compression(tmp_path_factory, seed, cut, flip):
    """What can be decompressed is read, and the damage is told; or an error names the file."""
    from dpuflow.errors import DpuflowError

    raw = mutations.random_capture(Random(seed), 50)
    packed = bytearray(gzip.compress(raw, 1))
    if flip:
        packed[10 + int(cut * (len(packed) - 11))] ^= 1 << seed % 8
    else:
        del packed[10 + int(cut * (len(packed) - 11)) :]
    path = tmp_path_factory.mktemp("fuzz", numbered=True) / "a.pcap.gz"
    path.write_bytes(packed)
    said = None
    try:
        reading = read_file(path)
    except DpuflowError as error:
        said = str(error)
    if said is not None:
        assert "a.pcap.gz" in said
    else:
        assert problems(reading) == []
        assert not reading.info.complete
