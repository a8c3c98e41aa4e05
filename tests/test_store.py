"""Column files: what is saved is what is loaded, and nothing else is taken for one."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpuflow import Vantage, analyze
from dpuflow.errors import CaptureError, DpuflowError, FormatError
from dpuflow.ingest import ingest
from dpuflow.reports.json import json_lines
from dpuflow.schema.rows import FLOW, MESSAGE, Record, Role, Wire
from dpuflow.schema.tables import CaptureTables
from dpuflow.store import columns as store

TRACES = Path(__file__).resolve().parents[1] / "traces"
TABLES = ("endpoints", "flows", "messages", "pauses")


@pytest.fixture(scope="module")
def tables() -> CaptureTables:
    return ingest([str(TRACES / "nccl-allreduce-n2" / "node0.pcap.gz")], "node0")


@pytest.fixture
def saved(tables: CaptureTables, tmp_path: Path) -> Path:
    file = tmp_path / "node0.dpuflow"
    store.save_tables(tables, str(file))
    return file


def test_what_is_saved_is_loaded(tables: CaptureTables, saved: Path) -> None:
    loaded = store.load_tables(str(saved))
    for name in TABLES:
        assert np.array_equal(getattr(loaded, name), getattr(tables, name))
        assert getattr(loaded, name).dtype == getattr(tables, name).dtype
    assert loaded.info == tables.info
    assert len(loaded.messages) > 100


def test_bytes_between_fields_are_0_whatever_memory_holds(tables: CaptureTables, tmp_path: Path) -> None:
    messages = tables.messages
    dtype, noisy = messages.dtype, np.full((len(messages), messages.dtype.itemsize), 0xA5, np.uint8)
    rows = noisy.view(dtype)[:, 0]
    for name in dtype.names or ():
        rows[name] = messages[name]
    assert noisy.tobytes() != messages.tobytes(), "no bytes between fields: nothing is tested"
    files = [tmp_path / name for name in ("a", "b")]
    for file, each in zip(files, (messages, rows), strict=True):
        store.save_tables(replace(tables, messages=each), str(file))
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (noisy == 0xA5).any(), "what was given is as it was"


@pytest.mark.parametrize("case", ["nccl-allreduce-n2", "gloo-allreduce-n4"])
def test_the_verdict_is_the_same(case: str, tmp_path: Path) -> None:
    packets = sorted(TRACES.joinpath(case).glob("node*.pcap.gz"))
    columns = [tmp_path / f"{file.name.split('.')[0]}.dpuflow" for file in packets]
    for source, target in zip(packets, columns, strict=True):
        store.save_tables(ingest([str(source)], "x"), str(target))
    results = [
        json.loads(
            "\n".join(json_lines(analyze([Vantage(f"node{k}", (str(f),)) for k, f in enumerate(files)])))
        )
        for files in (packets, columns)
    ]
    for result in results:
        for capture in result["captures"]:
            capture["file"] = capture["files"] = ""
        for finding in result["findings"]:
            for evidence in finding["evidence"]:
                del evidence["unopenable"]  # of column files
    assert results[0] == results[1]


def test_a_name_may_be_given_anew(saved: Path) -> None:
    info = ingest([str(saved)], "another", 3).info
    assert (info.id, info.vantage, info.files) == (3, "another", [str(saved)])


def test_files_that_are_no_parts_of_one_capture_are_refused(saved: Path) -> None:
    with pytest.raises(FormatError, match="covers the same time as"):
        ingest([str(saved), str(saved)])
    with pytest.raises(FormatError, match="cannot be mixed with captures in one vantage point"):
        ingest([str(saved), str(TRACES / "nccl-allreduce-n2" / "node0.pcap.gz")])


def of_format(version: int, data: bytes) -> bytes:
    """The file as dpuflow wrote it then: without a checksum of the header."""
    return data[:8] + struct.pack("<I", version) + data[12:16] + data[24:]


def with_header(data: bytes, text: bytes) -> bytes:
    """The file with another header of the same length, and the checksum that goes with it."""
    (length,) = struct.unpack_from("<I", data, 12)
    text = text.ljust(length)
    return (
        data[:16]
        + struct.pack("<II", zlib.crc32(text, zlib.crc32(data[:16])), 0)
        + text
        + data[24 + length :]
    )


def test_any_bit_that_flips_is_told_and_costs_its_block(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    whole = store.load_tables(str(saved))
    random = np.random.default_rng(1)
    for _ in range(300):
        place, bit = int(random.integers(len(data))), 1 << int(random.integers(8))
        data[place] ^= bit
        saved.write_bytes(data)
        data[place] ^= bit
        try:
            tables = store.load_tables(str(saved))
        except (CaptureError, FormatError):
            continue
        left = [(getattr(tables, name), getattr(whole, name)) for name in TABLES]
        if any(len(a) < len(b) for a, b in left):
            assert len(tables.messages) >= len(whole.messages) - store.BLOCK // MESSAGE.dtype.itemsize - 2
            assert "were left out, as they are damaged" in tables.info.warnings[-1]
            assert not tables.info.complete
        else:  # between tables
            assert all(a.tobytes() == b.tobytes() for a, b in left)


def test_any_cut_is_told(saved: Path) -> None:
    data = saved.read_bytes()
    for size in [*range(8, 200, 7), *range(200, len(data) - 64, len(data) // 50)]:
        saved.write_bytes(data[:size])
        with pytest.raises(CaptureError):
            store.load_tables(str(saved))


@pytest.mark.parametrize(
    ("version", "table", "record", "added"),
    [(4, "flows", FLOW, "spurious"), (5, "messages", MESSAGE, "rkey"), (6, "flows", FLOW, "closed")],
)
def test_rows_of_older_formats_lack_what_came_later(
    saved: Path, monkeypatch: pytest.MonkeyPatch, version: int, table: str, record: Record, added: str
) -> None:
    """Flows had no count of needless repeats and no mark that they were ended, messages no key: 0 there."""
    tables = store.load_tables(str(saved))
    now = getattr(tables, table)
    older = replace(record, fields=tuple(field for field in record.fields if field.name != added))
    rows = older.zeros(len(now))
    for name in rows.dtype.names or ():
        rows[name] = now[name]
    with monkeypatch.context() as then:
        then.setitem(store._TABLES, table, older)
        then.setattr(store, "VERSION", version)
        store.save_tables(replace(tables, **{table: rows}), str(saved))
    read = getattr(store.load_tables(str(saved)), table)
    assert read.dtype == record.dtype
    assert not read[added].any()
    assert all((read[name] == now[name]).all() for name in rows.dtype.names or ())


def test_another_version_or_schema_is_refused_by_name(saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[:8] + struct.pack("<I", 8) + data[12:])
    with pytest.raises(FormatError, match="format 8; this dpuflow reads 1 to 7"):
        store.load_tables(str(saved))
    text = data[24 : 24 + struct.unpack_from("<I", data, 12)[0]]
    saved.write_bytes(with_header(data, text.replace(b"dpuflow.records/1", b"dpuflow.records/0")))
    with pytest.raises(FormatError, match=r"dpuflow\.records/0"):
        store.load_tables(str(saved))
    saved.write_bytes(with_header(data, text.replace(b'"acked_ns", "i8"', b'"acked_ns", "i4"')))
    with pytest.raises(FormatError, match="other fields"):
        store.load_tables(str(saved))


def test_files_of_format_2_say_nothing_of_set_ups(saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes(of_format(2, data))
    tables = store.load_tables(str(saved))
    assert len(tables.setups) == len(tables.members) == 0
    assert len(tables.messages)


def test_older_files_name_no_announced_address(saved: Path) -> None:
    """Up to format 1 an entry had the address that it was written to: it pairs with no data."""
    data = saved.read_bytes()
    now = store.load_tables(str(saved)).messages
    saved.write_bytes(of_format(1, data))
    old = store.load_tables(str(saved)).messages
    entry = (now["role"] == Role.GRANT) & (now["wire"] == Wire.ROCE_WRITE)
    assert entry.any()
    assert now["va"][entry].all()
    assert not old["va"][entry].any()
    assert (old["va"][~entry] == now["va"][~entry]).all()


def test_a_damaged_header_is_told(saved: Path) -> None:
    data = saved.read_bytes()
    for text in (
        b"{",
        b"[]",
        b"{}",
        b"nonsense",
        json.dumps({"schema": "dpuflow.records/1"}).encode(),
    ):
        saved.write_bytes(with_header(data, text))
        with pytest.raises(CaptureError):
            store.load_tables(str(saved))


def test_what_cannot_be_written_leaves_nothing(tables: CaptureTables, tmp_path: Path) -> None:
    with pytest.raises(DpuflowError):
        store.save_tables(tables, str(tmp_path / "no" / "x.dpuflow"))
    (tmp_path / "folder.dpuflow").mkdir()
    with pytest.raises(DpuflowError):
        store.save_tables(tables, str(tmp_path / "folder.dpuflow"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder.dpuflow"]
