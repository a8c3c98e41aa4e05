"""Column files: the tables of one capture, saved and loaded; analysing them equals analysing the packets.

A file: eight bytes of magic, format version and header length (two u4), the CRC-32 of these and of the header
(u4), four bytes of zero, a header in JSON (what was captured, and of each table its fields, rows, place and
the CRC-32 of each ``BLOCK`` of its bytes), then the tables' rows, each table at a multiple of 64 bytes. All
is little endian.

A damaged block of messages or pauses is left out and named; the other tables are what these refer to, so that
damage there costs the file.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from dpuflow.errors import CaptureError, DpuflowError, FormatError
from dpuflow.schema import rows as schema
from dpuflow.schema.tables import CaptureTables
from dpuflow.store.checked import check_tables, info_of

if TYPE_CHECKING:
    import zlib
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.rows import Record
    from dpuflow.schema.tables import Rows
else:
    try:
        from zlib_ng import zlib_ng as zlib  # the same CRC-32, five times as fast
    except ImportError:
        import zlib

MAGIC: Final = b"DPUFLOW\0"
VERSION: Final = 7
OLDEST: Final = 1
"""Clear-to-send entries of this format have the address that they were written to, not what they announce."""
_LATER: Final = ("setups", "members")
"""Tables that files before format ``_LATER_FROM`` do not have."""
_LATER_FROM: Final = 3
_ADDED: Final = {"flow": ("spurious", "closed"), "message": ("rkey",)}
"""Fields that rows before formats 5, 7 and 6 do not have: 0 there."""
_CHECKED: Final = 4
"""The first format with checksums."""
BLOCK: Final = 1 << 16
"""Bytes of a table that share a checksum: what one flipped bit costs, at most, and a row more."""
_SPARE: Final = ("messages", "pauses")
"""Tables whose rows no other row refers to."""
_ALIGN: Final = 64
_START: Final = struct.Struct("<8sII")
_SUM: Final = struct.Struct("<II")
_TABLES: Final = {
    "endpoints": schema.ENDPOINT,
    "flows": schema.FLOW,
    "messages": schema.MESSAGE,
    "pauses": schema.PAUSE,
    "setups": schema.SETUP,
    "members": schema.MEMBER,
}


def is_saved(name: str) -> bool:
    """Whether the file is a column file; False for anything that cannot be told, which others will name.

    Of a pipe nothing is read: it would be missing afterwards.
    """
    if not os.path.isfile(name):
        return False
    try:
        with open(name, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def save_tables(tables: CaptureTables, name: str, durable: bool = False, made_of: Sequence[str] = ()) -> None:
    """Write ``tables``, whole or not at all; ``durable``: also if the power fails. Raises DpuflowError.

    ``made_of`` says what of, to whoever asks (``read_made_of``).
    """
    parts: list[bytes | memoryview] = []
    described, at = {}, 0
    for table, record in _TABLES.items():
        rows = getattr(tables, table)
        record.check(rows)
        data = _whole(rows, record)
        described[table] = {"fields": _fields(record), "rows": len(rows), "at": at, "crc": _sums(data)}
        parts += [data, bytes(-len(data) % _ALIGN)]
        at += len(parts[-2]) + len(parts[-1])
    header = {"schema": schema.SCHEMA_ID, "info": asdict(tables.info), "tables": described}
    if made_of:
        header["made_of"] = list(made_of)
    text = json.dumps(header).encode()
    text += b" " * (-(_START.size + _SUM.size + len(text)) % _ALIGN)
    start = _START.pack(MAGIC, VERSION, len(text))
    new = f"{name}.new"
    try:
        with open(new, "wb") as file:
            file.write(start + _SUM.pack(zlib.crc32(text, zlib.crc32(start)), 0) + text)
            for part in parts:
                file.write(part)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, name)
        if durable:
            _sync_folder(os.path.dirname(name) or ".")
    except OSError as error:
        if os.path.exists(new):
            os.unlink(new)
        raise DpuflowError(f"{name}: {error.strerror or error}") from None


def _sync_folder(folder: str) -> None:
    """Have the names in a folder written, too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_tables(name: str) -> CaptureTables:
    """Read a column file. Raises FormatError for one of another version, CaptureError for a damaged one."""
    try:
        size = os.path.getsize(name)
        with open(name, "rb") as file:
            version, body, header = _head(file, name, size)
        damaged: list[str] = []
        tables = {
            table: _rows(name, table, header["tables"][table], body, size, damaged)
            for table in _TABLES
            if version >= _LATER_FROM or table not in _LATER
        }
        info = info_of(header["info"])
    except OSError as error:
        raise DpuflowError(f"{name}: {error.strerror or error}") from None
    except _UNREADABLE as error:
        raise CaptureError(name, _START.size, f"the column file's header is damaged ({error})") from None
    try:
        check_tables(tables)
    except ValueError as error:
        raise CaptureError(name, body, f"the column file is damaged: its {error}") from None
    if version == OLDEST:
        messages = tables["messages"]
        messages["va"][
            (messages["role"] == schema.Role.GRANT) & (messages["wire"] == schema.Wire.ROCE_WRITE)
        ] = 0
    info.warnings += damaged
    info.complete &= not damaged
    return CaptureTables(info, **tables)


_UNREADABLE: Final = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What a header raises that says something else than headers do, or nests it without end."""


def _head(file: BinaryIO, name: str, size: int) -> tuple[int, int, dict[str, Any]]:
    """A file's format version, where its tables begin, and its header, if its checksum is right.

    Raises CaptureError, FormatError, OSError and ``_UNREADABLE``.
    """
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise CaptureError(name, len(start), "the column file is cut short")
    magic, version, length = _START.unpack(start)
    if magic != MAGIC:
        raise FormatError(name, "not a dpuflow column file")
    if not OLDEST <= version <= VERSION:
        raise FormatError(
            name, f"a column file of format {version}; this dpuflow reads {OLDEST} to {VERSION}"
        )
    told = file.read(_SUM.size) if version >= _CHECKED else b""
    body = _START.size + len(told) + length
    if body > size:
        raise CaptureError(name, size, "the column file is cut short")
    text = file.read(length)
    if told and _SUM.unpack(told)[0] != zlib.crc32(text, zlib.crc32(start)):
        raise CaptureError(name, _START.size, "the column file's header is damaged (its checksum differs)")
    header: dict[str, Any] = json.loads(text)
    if header["schema"] != schema.SCHEMA_ID:
        raise FormatError(
            name, f"its records are {header['schema']!s:.60}; this dpuflow reads {schema.SCHEMA_ID}"
        )
    return version, body, header


def machine_of(name: str) -> str:
    """Which machine's agent wrote a column file; "" where it does not say, or cannot be read."""
    told = _told(name, "info")
    machine = told.get("machine", "") if isinstance(told, dict) else ""
    return machine if isinstance(machine, str) else ""


def read_made_of(name: str) -> list[str]:
    """What a column file was made of, as ``save_tables`` was told; nothing where it does not say."""
    told = _told(name, "made_of")
    return [str(each) for each in told] if isinstance(told, list) else []


def _told(name: str, key: str) -> Any:
    """What a whole header says under ``key``; None where there is none."""
    try:
        with open(name, "rb") as file:
            return _head(file, name, os.path.getsize(name))[2].get(key)
    except (OSError, DpuflowError, *_UNREADABLE):
        return None


def _whole(rows: Rows, record: Record) -> memoryview:
    """The bytes of the rows, those between fields being 0, so that the same rows give the same file."""
    if not len(rows):
        return memoryview(b"")
    ends = sorted((at, at + kind.itemsize) for kind, at, *_ in (record.dtype.fields or {}).values())
    ends.append((record.dtype.itemsize, 0))
    between = [slice(end, at) for (_, end), (at, _) in pairwise(ends) if end < at]
    rows = rows.copy() if between else np.ascontiguousarray(rows)
    data = rows.view(np.uint8)
    for gap in between:
        data.reshape(len(rows), -1)[:, gap] = 0
    return data.data


def _fields(record: Record) -> list[list[str]]:
    return [[field.name, field.type] for field in record.fields]


def _dtype(record: Record, described: list[list[str]]) -> np.dtype[np.void] | None:
    """How a file's rows lie: as this version's, or as those of a format without fields that came later."""
    if described == _fields(record):
        return record.dtype
    later = _ADDED.get(record.name, ())
    known = {name for name, _ in described}
    if described != [each for each in _fields(record) if each[0] in known or each[0] not in later]:
        return None
    return np.dtype([(name, type_) for name, type_ in described], align=True)


def _sums(data: memoryview) -> list[int]:
    """The CRC-32 of each block."""
    return [zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


def _rows(name: str, table: str, described: dict[str, Any], body: int, size: int, damaged: list[str]) -> Rows:
    """One table, if its fields are those of this version and the file holds it, less what is damaged.

    ``damaged`` gets a sentence on what was left out.
    """
    record = _TABLES[table]
    dtype = _dtype(record, described["fields"])
    if dtype is None:
        raise FormatError(name, f"its {record.name} rows have other fields than this dpuflow's")
    count, at, wide = int(described["rows"]), body + int(described["at"]), dtype.itemsize
    if count < 0 or at < body or at + count * wide > size:
        raise CaptureError(name, size, f"the column file ends inside its {record.name} rows")
    if not count:
        return record.zeros(0)
    rows = np.fromfile(name, dtype, count, offset=at)
    sums = described.get("crc")
    bad = _bad_blocks(rows, sums) if sums else []
    if dtype != record.dtype:
        older, rows = rows, record.zeros(count)
        for field in dtype.names or ():
            rows[field] = older[field]
    if not bad:
        return rows
    if table not in _SPARE:
        raise CaptureError(
            name, at + bad[0] * BLOCK, f"the column file is damaged: a checksum of its {table} differs"
        )
    whole = _undamaged(count, wide, bad)
    spans = ", ".join(f"{at + k * BLOCK}" for k in bad[:4]) + (" ..." if len(bad) > 4 else "")
    damaged.append(
        f"{name}: {int((~whole).sum())} of {count} {table} were left out, as they are damaged (blocks of"
        f" {BLOCK >> 10} KiB at byte {spans})"
    )
    return rows[whole]


def _bad_blocks(rows: Rows, sums: list[int]) -> list[int]:
    """Numbers of the blocks whose checksums differ from those that were kept."""
    found = zip_longest(sums, _sums(rows.view(np.uint8).data))
    return [block for block, (told, own) in enumerate(found) if told != own]


def _undamaged(count: int, wide: int, bad: list[int]) -> NDArray[np.bool_]:
    """Rows, each so many bytes ``wide``, of which nothing lies in a bad block."""
    whole = np.ones(count, bool)
    for k in bad:
        whole[k * BLOCK // wide : -(-(k + 1) * BLOCK // wide)] = False
    return whole
