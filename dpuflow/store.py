"""Column files: the tables of one capture, saved and loaded; analysing them equals analysing the packets.

A file: eight bytes of magic, format version and header length (two u4), a header in JSON (what was captured,
and of each table its fields, rows and place), then the tables' rows, each at a multiple of 64 bytes. Little
endian.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow import schema
from dpuflow.errors import CaptureError, DpuflowError, FormatError
from dpuflow.tables import CaptureInfo, CaptureTables

if TYPE_CHECKING:
    from dpuflow.schema import Record
    from dpuflow.tables import Rows

MAGIC: Final = b"DPUFLOW\0"
VERSION: Final = 3
OLDEST: Final = 1
"""Clear-to-send entries of this format have the address that they were written to, not what they announce."""
_LATER: Final = ("setups", "members")
"""Tables that files before format 3 do not have."""
_ALIGN: Final = 64
_START: Final = struct.Struct("<8sII")
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


def save_tables(tables: CaptureTables, name: str, durable: bool = False) -> None:
    """Write ``tables``, whole or not at all; ``durable``: also if the power fails. Raises DpuflowError."""
    parts, described, at = [], {}, 0
    for table, record in _TABLES.items():
        rows = getattr(tables, table)
        record.check(rows)
        described[table] = {"fields": _fields(record), "rows": len(rows), "at": at}
        data = rows.tobytes()
        parts.append(data + bytes(-len(data) % _ALIGN))
        at += len(parts[-1])
    header = {"schema": schema.SCHEMA_ID, "info": asdict(tables.info), "tables": described}
    text = json.dumps(header).encode()
    text += b" " * (-(_START.size + len(text)) % _ALIGN)
    new = f"{name}.new"
    try:
        with open(new, "wb") as file:
            file.write(_START.pack(MAGIC, VERSION, len(text)) + text)
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
            start = file.read(_START.size)
            if len(start) < _START.size:
                raise CaptureError(name, len(start), "the column file is cut short")
            magic, version, length = _START.unpack(start)
            if magic != MAGIC:
                raise FormatError(name, "this is no column file of dpuflow")
            if not OLDEST <= version <= VERSION:
                raise FormatError(
                    name, f"a column file of format {version}; this dpuflow reads {OLDEST} to {VERSION}"
                )
            body = _START.size + length
            if body > size:
                raise CaptureError(name, size, "the column file is cut short")
            header = _header(name, file.read(length))
            tables = {
                table: _rows(name, record, header["tables"][table], body, size)
                for table, record in _TABLES.items()
                if version >= VERSION or table not in _LATER
            }
        _check_places(name, tables, size)
        if version == OLDEST:
            messages = tables["messages"]
            messages["va"][
                (messages["role"] == schema.Role.GRANT) & (messages["wire"] == schema.Wire.ROCE_WRITE)
            ] = 0
        return CaptureTables(_info(header["info"]), **tables)
    except OSError as error:
        raise DpuflowError(f"{name}: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(name, _START.size, f"the column file's header is damaged ({error})") from None


def _fields(record: Record) -> list[list[str]]:
    return [[field.name, field.type] for field in record.fields]


def _header(name: str, text: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(text)
    if header["schema"] != schema.SCHEMA_ID:
        raise FormatError(name, f"its records are {header['schema']}; this dpuflow reads {schema.SCHEMA_ID}")
    return header


def _rows(name: str, record: Record, described: dict[str, Any], body: int, size: int) -> Rows:
    """One table, if its fields are those of this version and the file holds it."""
    if described["fields"] != _fields(record):
        raise FormatError(name, f"its {record.name} rows have other fields than this dpuflow's")
    count, at = int(described["rows"]), body + int(described["at"])
    if count < 0 or at < body or at + count * record.dtype.itemsize > size:
        raise CaptureError(name, size, f"the column file ends inside its {record.name} rows")
    return np.fromfile(name, record.dtype, count, offset=at) if count else record.zeros(0)


def _check_places(name: str, tables: dict[str, Rows], size: int) -> None:
    """Whether rows name rows that are there: else an analysis would fail far from here."""
    flows, endpoints, messages = (tables[each] for each in ("flows", "endpoints", "messages"))
    peers = flows["peer"][flows["peer"] != schema.NONE32]
    for places, count, what in (
        (flows["src"], len(endpoints), "flows"), (flows["dst"], len(endpoints), "flows"),
        (peers, len(flows), "flows"), (messages["flow"], len(flows), "messages"),
    ):  # fmt: skip
        if len(places) and int(places.max()) >= count:
            raise CaptureError(name, size, f"the column file is damaged: its {what} name rows that are not")


def _info(values: dict[str, Any]) -> CaptureInfo:
    known = {field.name for field in fields(CaptureInfo)}
    return CaptureInfo(**{key: value for key, value in values.items() if key in known})
