"""Column files whose checksums are right and whose contents cannot be: one sentence that names the file."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from test_store import with_header

from dpuflow import Vantage, analyze
from dpuflow.errors import CaptureError, DpuflowError
from dpuflow.ingest import ingest
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines
from dpuflow.schema.tables import CaptureTables
from dpuflow.store import columns as store
from dpuflow.store.segments import segment_name

CASE = Path(__file__).resolve().parents[1] / "traces" / "nccl-allreduce-n2"
EDGES = [0, 1, 3, 255, 65535, 0xFFFFFFFF, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, -1, -(1 << 63)]
VALUES: list[Any] = [None, "x", [], {}, [1], {"a": "b"}, True, -1, 0, 1e308, 10**30, float("inf"), "\x1b[31m"]


@pytest.fixture(scope="module")
def captures() -> list[CaptureTables]:
    return [ingest([str(CASE / f"node{k}.pcap.gz")], f"node{k}", k) for k in (0, 1)]


@pytest.fixture
def files(captures: list[CaptureTables], tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"node{k}.dpuflow" for k in (0, 1)]
    for path, tables in zip(paths, captures, strict=True):
        store.save_tables(tables, str(path))
    return paths


def judge(files: list[Path]) -> str | None:
    """Both reports of the files; what refuses them, if anything does."""
    try:
        result = analyze([Vantage(file.stem, str(file)) for file in files], threads=1)
        assert "".join([*json_lines(result), *text_lines(result)])
    except DpuflowError as error:
        return str(error)
    return None


def retold(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The file with another header, and the checksum that goes with it."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<I", data, 12)
    header = json.loads(data[24 : 24 + length])
    change(header)
    file.write_bytes(with_header(data, json.dumps(header, separators=(",", ":")).encode()))


@pytest.mark.parametrize(
    "told",
    [
        {"packets": "x"}, {"packets": None}, {"first_ns": 10**30}, {"first_ns": "x"}, {"last_ns": None},
        {"skipped": [1]}, {"skipped": {"cut_ip": "x"}}, {"complete": 3}, {"warnings": [1]},
        {"lost_packets": -1}, {"sampled": 1e308}, {"machine": {}},
    ],
)  # fmt: skip
def test_an_info_that_cannot_be_is_refused(files: list[Path], told: dict[str, Any]) -> None:
    retold(files[1], lambda header: header["info"].update(told))
    said = judge(files)
    assert said
    assert said.startswith(f"{files[1]}: ")
    assert "info" in said


def test_headers_without_an_end_or_an_object(files: list[Path], tmp_path: Path) -> None:
    data = files[1].read_bytes()
    text = b"[" * 200_000
    start = struct.pack("<8sII", store.MAGIC, store.VERSION, len(text))
    total = struct.pack("<II", store.zlib.crc32(text, store.zlib.crc32(start)), 0)
    files[1].write_bytes(start + total + text)
    assert "header is damaged" in (judge(files) or "")
    assert store.machine_of(str(files[1])) == ""
    assert store.read_made_of(str(files[1])) == []
    files[1].write_bytes(data)
    retold(files[1], lambda header: header.update(info=[]))
    assert "info is no object" in (judge(files) or "")


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("messages", "op", 255), ("messages", "wire", 200), ("messages", "flow", 1 << 31),
        ("messages", "bytes", (1 << 64) - 1), ("messages", "announces", 1 << 63),
        ("flows", "transport", 0), ("flows", "src", 99), ("flows", "packets", (1 << 64) - 1),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_are_refused(
    captures: list[CaptureTables], files: list[Path], table: str, column: str, value: int
) -> None:
    rows = getattr(captures[1], table).copy()
    rows[column][len(rows) // 2] = value
    store.save_tables(replace(captures[1], **{table: rows}), str(files[1]))
    said = judge(files)
    assert said
    assert said.startswith(f"{files[1]}: the column file is damaged: its {table} ")


def test_times_that_cannot_be_are_set_aside_whatever_the_header_says(
    captures: list[CaptureTables], files: list[Path]
) -> None:
    rows = captures[1].messages.copy()
    rows["last_ns"][::50], rows["acked_ns"][7::50] = (1 << 63) - 1, 5
    store.save_tables(replace(captures[1], messages=rows), str(files[1]))
    tables = ingest([str(files[1])])
    assert len(tables.messages) == len(rows) - len(rows[::50])
    assert f"{len(rows[::50])} of {len(rows)} messages" in tables.info.warnings[-1]
    assert judge(files) is None


def test_of_a_folder_the_other_files_are_read(captures: list[CaptureTables], tmp_path: Path) -> None:
    info, messages = captures[0].info, captures[0].messages
    assert info.first_ns is not None
    half = len(messages) // 2
    names = [segment_name("node0", info.first_ns + k, info.first_ns + k + 1) for k in (0, 1)]
    for part, name in zip((messages[:half], messages[half:].copy()), names, strict=True):
        store.save_tables(replace(captures[0], messages=part), str(tmp_path / name))
    shutil.copy(tmp_path / names[1], tmp_path / "whole")
    part["op"][0] = 255
    store.save_tables(replace(captures[0], messages=part), str(tmp_path / names[1]))
    (capture,) = analyze([str(tmp_path)]).captures
    assert not capture.complete
    assert "op 255" in capture.warnings[-1]
    assert names[1] in capture.warnings[-1]


def test_a_real_file_is_refused_by_nothing(files: list[Path]) -> None:
    assert judge(files) is None


@pytest.mark.parametrize("seed", range(40))
def test_whatever_rows_hold_an_answer_or_one_sentence_comes(
    captures: list[CaptureTables], files: list[Path], seed: int
) -> None:
    """NumPy's warnings are errors here."""
    random = Random(seed)
    made = {name: getattr(captures[1], name).copy() for name in store._TABLES}
    for _ in range(random.choice((1, 1, 2, 4))):
        rows = made[random.choice([name for name, rows in made.items() if len(rows)])]
        column = rows[random.choice(rows.dtype.names)]
        least, most = (
            int(edge(column.dtype)) for edge in (lambda d: np.iinfo(d).min, lambda d: np.iinfo(d).max)
        )
        for at in random.sample(range(len(rows)), random.choice((1, min(9, len(rows)), len(rows)))):
            value = random.choice(
                (random.choice(EDGES), random.randrange(256), random.randrange(least, most))
            )
            column[at] = min(max(value, least), most)
    store.save_tables(replace(captures[1], **made), str(files[1]))
    said = judge(files)
    assert said is None or str(files[1]) in said


@pytest.mark.parametrize("seed", range(40))
def test_whatever_headers_hold_an_answer_or_one_sentence_comes(files: list[Path], seed: int) -> None:
    random = Random(seed)

    def change(header: dict[str, Any]) -> None:
        place: Any = header
        while True:
            key = random.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not (isinstance(place[key], dict | list) and place[key]) or random.random() < 0.2:
                break
            place = place[key]
        place[key] = random.choice(VALUES)

    retold(files[1], change)
    said = judge(files)
    assert said is None or str(files[1]) in said


def test_a_checksum_of_rows_that_is_none_is_told(files: list[Path]) -> None:
    retold(files[1], lambda header: header["tables"]["flows"].update(crc="x"))
    with pytest.raises(CaptureError, match="a checksum of its flows differs"):
        store.load_tables(str(files[1]))
