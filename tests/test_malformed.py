"""Sixty broken captures: each ends with its whole packets and a sentence, as the plain parser reads it.

Never a crash, a hang, a packet beyond its record, or a loss that nobody is told of.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from naive_parse import read
from readings import differences, problems, read_bytes, read_file

from dpuflow import analyze
from dpuflow.errors import DpuflowError, FormatError
from dpuflow.ingest import ingest
from dpuflow.schema.rows import BthFlag, Kind
from dpuflow.schema.tables import Vantage

MAGIC = {"a1b2c3d4", "d4c3b2a1", "a1b23c4d", "4d3cb2a1", "a1b2cd34", "34cdb2a1", "0a0d0d0a"}


@pytest.fixture(scope="module")
def files(shared) -> list[Path]:
    found = sorted(p for p in (shared / "captures/malformed").glob("*/*") if p.suffix.startswith(".pcap"))
    assert len(found) == 60
    return found


def test_each_is_read_as_the_plain_parser_reads_it(files):
    refused, damaged, packets = 0, 0, 0
    for path in files:
        raw = path.read_bytes()
        if raw[:4].hex() not in MAGIC:
            with pytest.raises(FormatError, match=path.name):
                read_file(path)
            refused += 1
            continue
        rows, whole = read(raw)
        reading = read_bytes(raw)
        assert problems(reading) == [], path.name
        assert differences(reading, rows) == [], path.name
        assert reading.info.complete == whole, path.name
        packets += len(rows)
        damaged += not whole
        again = read_file(path)
        again.info.vantage = reading.info.vantage
        assert again.same(reading), path.name
        for warning in again.info.warnings:
            assert str(path) in warning
            assert " at byte " in warning
    assert refused + damaged > 10
    assert packets > 200


def test_as_many_packets_as_tshark_finds(files):
    """Its list is a reference: fewer are read only where a sentence says what is wrong."""
    from oracles import tshark

    for path in files:
        its = len(tshark(path, fields=("frame.time_epoch", "frame.protocols")))
        with suppress(FormatError):
            info = read_file(path).info
            assert info.packets >= its or info.warnings, f"{path.name}: {info.packets}, tshark lists {its}"


def test_the_whole_analysis_ends(files, tmp_path):
    for path in files:
        packed = tmp_path / f"{path.name}.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        for name in (path, packed):
            said = None
            try:
                result = analyze([Vantage("one", (str(name),))], threads=1)
            except DpuflowError as error:
                said = str(error)
            assert name.name in said if said is not None else result.collectives == []


def test_memory_does_not_follow_what_a_record_claims(files):
    """All of them in a process that may not take more than a little."""
    code = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from dpuflow.errors import DpuflowError
from dpuflow.ingest import ingest
ingest([sys.argv[2]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[3:]:
    try:
        ingest([name])
    except DpuflowError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    good = next(p for p in files if p.name == "roce_time_goes_backwards.pcap")
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", code, root, str(good), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 64 << 10  # KiB


# -- the derived files, whose answers are known ----------------------------------------------------


def derived(shared, name: str):
    return read_file(shared / f"captures/malformed/derived/{name}.pcap")


def test_cut_mid_packet(shared):
    reading = derived(shared, "roce_cut_mid_packet")
    assert reading.info.packets == 8
    assert not reading.info.complete
    (warning,) = reading.info.warnings
    start = 24 + int((reading.columns["wire_len"] + 16).sum())
    assert f"cut short in the middle of a packet at byte {start}" in warning


def test_cut_mid_record_header(shared):
    info = derived(shared, "roce_cut_mid_record_header").info
    assert (info.packets, info.complete) == (0, False)
    (warning,) = info.warnings
    assert "cut short" in warning
    assert "at byte 24" in warning


def test_snap_length_58(shared):
    """BTH and AETH are there; RETH is not, and sizes come from the lengths on the wire."""
    reading = derived(shared, "roce_snaplen58_no_icrc")
    whole = read_file(shared / "captures/public/rxe-cm-write-read/roce_capture_read-write-ecn.pcap")
    assert (reading.columns["kind"] == Kind.ROCE_V2).all()
    for name in ("time_ns", "opcode", "psn", "dest_qp", "payload", "wire_len"):
        assert np.array_equal(reading.columns[name], whole.columns[name]), name
    assert np.array_equal(reading.sparse["aeth"], whole.sparse["aeth"])
    assert len(whole.sparse["reth"]) == 2
    assert len(reading.sparse["reth"]) == 0
    cut = np.flatnonzero(reading.columns["flags"] & BthFlag.EXTENSION_CUT)
    assert set(whole.sparse["reth"]["packet"]) <= set(cut)
    assert (reading.columns["data_len"][cut] == 0).all()


def test_snap_length_48(shared):
    info = derived(shared, "roce_snaplen48_half_bth").info
    assert info.packets == 12
    assert info.skipped == {"cut_bth": 12}
    assert info.complete


def test_time_goes_backwards(shared):
    path = shared / "captures/malformed/derived/roce_time_goes_backwards.pcap"
    reading = read_file(path)  # which asserts the order of time within a block
    assert reading.info.packets == 12
    assert reading.info.disordered == 11
    good = ingest([str(shared / "captures/public/rxe-cm-write-read/roce_capture_read-write-ecn.pcap")])
    turned = ingest([str(path)])
    for name in ("first_ns", "last_ns", "bytes", "wire", "packets", "acked_ns"):
        assert np.array_equal(good.messages[name], turned.messages[name]), name


def test_captured_length_huge(shared):
    reading = derived(shared, "roce_caplen_huge")
    assert reading.info.packets == 3
    (warning,) = reading.info.warnings
    assert "claims more captured bytes" in warning


def test_unknown_opcode(shared):
    reading = derived(shared, "roce_unknown_opcode")
    assert reading.info.skipped == {"unsupported_opcode": 1}
    assert np.count_nonzero(reading.columns["kind"] == Kind.ROCE_V2) == 11
    assert reading.columns["kind"][3] == Kind.UNSUPPORTED_OPCODE


def test_udp_length_short(shared):
    reading = derived(shared, "roce_udp_length_short")
    whole = read_file(shared / "captures/public/rxe-cm-write-read/roce_capture_read-write-ecn.pcap")
    assert reading.info.skipped == {"malformed_roce": 1}
    rest = np.arange(12) != 3
    for name in ("kind", "opcode", "psn", "payload", "flags"):
        assert np.array_equal(reading.columns[name][rest], whole.columns[name][rest]), name
