"""``--parquet``: the result as tables, one file a list, for DuckDB, pandas and whatever reads Parquet.

In: an ``Analysis``. Out: ``DIR/lateness.parquet`` and so on, or one job of a data set that grows,
``DIR/lateness/day=2026-11-21/job=.../lateness.parquet``. Columns are the keys of docs/analysis.md, made from
the dataclasses of ``results``; ``entries`` holds the ``ranks`` of all collectives. Nothing is lost:
``read_tables`` gives the same result again.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from datetime import datetime, timezone
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

from dpuflow import __version__
from dpuflow.errors import FormatError, MissingError
from dpuflow.loading import analysis_of, hints_of, plain_type
from dpuflow.reports.meanings import meaning_of
from dpuflow.reports.output import naming
from dpuflow.results import Analysis, RankEntry
from dpuflow.schema import tables
from dpuflow.schema.rows import ANALYSIS_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa

    from dpuflow.message_list import Messages
    from dpuflow.results import Rows

ENTRIES: Final = "entries"
MESSAGES: Final = "messages"
_LEFT_OUT: Final[dict[type, set[str]]] = {
    tables.CaptureInfo: {"disordered", "comments", "machine", "snaplen_needed", "named"}
}
"""Attributes that the result format does not have."""
_KEYS: Final = {"sampled": "sampled_one_of"}
_UNITS: Final = {"_ns": "ns", "bytes": "bytes", "_share": "share of one", "_ppb": "1e-9", "_per_s": "1/s"}
MOST_JOBS: Final = 8
_LEVEL: Final = 19
"""Of zstd: from 16 on it finds the sentences of an entry's rank in the collective before."""
_ROWS: Final = 1 << 20
"""Rows of a row group."""


def check_installed(what: str = "--parquet") -> None:
    """Raise MissingError where pyarrow is not there."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise MissingError(
            f"{what} needs pyarrow: run pip install '.[reports]' in the dpuflow checkout"
        ) from None


def write_parquet(result: Analysis, folder: str, append: bool = False, site: str | None = None) -> None:
    """Write all tables below ``folder``; ``append``: as one job of a data set; ``site`` is kept in each file.

    The same job again takes its own place. Tables appear when all are written. Raises MissingError, OSError.
    """
    check_installed()
    import pyarrow.parquet as pq

    part = _part(result) if append else None
    with naming(folder), _room(folder) as partial:
        for name, table in tables_of(result, site):
            pq.write_table(
                table, f"{partial}/{name}.parquet", compression="zstd", compression_level=_LEVEL,
                row_group_size=_ROWS, **_encodings(table),
            )  # fmt: skip
        for file in sorted(Path(partial).iterdir()):
            target = Path(folder, file.stem, part) if part is not None else Path(folder)
            target.mkdir(parents=True, exist_ok=True)
            os.replace(file, target / file.name)
        if result.messages is None:  # those of a result that was here before are not this one's
            before = Path(folder, MESSAGES, part) if part is not None else Path(folder)
            (before / f"{MESSAGES}.parquet").unlink(missing_ok=True)


@contextmanager
def _room(folder: str) -> Iterator[str]:
    """A folder within ``folder`` to write in; both are gone where nothing came of it."""
    new = not os.path.exists(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial.") as partial:
            yield partial
    except BaseException:
        with suppress(OSError):  # others may have written there
            if new:
                os.rmdir(folder)
        raise


def _encodings(table: pa.Table) -> dict[str, Any]:
    """How each column is stored, by what came out smallest for many entries (bench.reports).

    Numbers as differences from the one before, sentences by what they have in common with the one before,
    all other texts by dictionary. Times with their bytes apart (BYTE_STREAM_SPLIT) would be a tenth smaller
    still, but of whole numbers DuckDB reads that from 2.0 on only.
    """
    encodings, others = {}, []
    for each in table.schema:
        if str(each.type) == "int64":
            encodings[each.name] = "DELTA_BINARY_PACKED"
        elif each.name == "why":
            encodings[each.name] = "DELTA_BYTE_ARRAY"
        else:
            others.append(each.name)
    return {"use_dictionary": others, "column_encoding": encodings}


def _part(result: Analysis) -> str:
    """Where a job lies in a data set: by its day, its start and who took part."""
    begin = datetime.fromtimestamp((result.start_ns or 0) // 10**9, timezone.utc)
    who = " ".join([str(result.start_ns), *(end.address for end in result.endpoints)])
    short = sha256(who.encode("utf-8", "replace")).hexdigest()[:8]
    return f"day={begin:%Y-%m-%d}/job={begin:%Y%m%dT%H%M%S}-{short}"


def tables_of(result: Analysis, site: str | None = None) -> Iterable[tuple[str, pa.Table]]:
    """Every list of the result as a table, by its name."""
    whole = {
        "dpuflow.start_ns": str(result.start_ns),
        "dpuflow.end_ns": str(result.end_ns),
        "dpuflow.job": _part(result).rpartition("job=")[2],
        "dpuflow.vantages": " ".join(capture.vantage for capture in result.captures),
    }
    if site is not None:
        whole["dpuflow.site"] = site
    for name in [*_kinds(), ENTRIES]:
        yield name, table_of(getattr(result, name), whole)
    if result.messages is not None:
        yield MESSAGES, message_table(result.messages, whole)


def message_table(messages: Messages, whole: dict[str, str] | None = None) -> pa.Table:
    """All messages as a table. Raises MissingError."""
    check_installed("to_arrow")
    import pyarrow as pa

    from dpuflow.message_list import TOKENS, UNKNOWN, Message

    whole = {"dpuflow.schema": ANALYSIS_ID, "dpuflow.version": __version__, **(whole or {})}
    names, columns = [], []
    for key, hint in get_type_hints(Message).items():
        values = messages[key]
        missing = values == UNKNOWN
        column = pa.array(values, pa.int64(), mask=missing if missing.any() else None)
        if key in TOKENS:
            kept = pa.array(values.astype("int8"))
            column = pa.DictionaryArray.from_arrays(kept, pa.array(TOKENS[key])).cast(pa.string())
        names.append(pa.field(key, column.type, metadata=_meaning(MESSAGES, key, hint)))
        columns.append(column)
    meaning = " ".join((Message.__doc__ or "").split())
    return pa.table(columns, schema=pa.schema(names, metadata={**whole, "meaning": meaning}))


def table_of(rows: Rows[Any], whole: dict[str, str] | None = None) -> pa.Table:
    """One list of a result as a table. Raises MissingError."""
    check_installed("to_arrow")
    import pyarrow as pa

    whole = {"dpuflow.schema": ANALYSIS_ID, "dpuflow.version": __version__, **(whole or {})}
    kind = RankEntry if rows.name == ENTRIES else _kinds()[rows.name]
    if kind is str:
        return pa.table({rows.name: pa.array(rows, pa.string())}).replace_schema_metadata(whole)
    numbers = {"collective": [call.id for call in rows.of for _ in call.ranks]} if kind is RankEntry else {}
    return _table(rows, kind, whole, numbers)


@cache
def _kinds() -> dict[str, type]:
    """What the lists of a result hold, by name."""
    hints = hints_of(Analysis)
    return {each.name: get_args(hints[each.name])[0] for each in fields(Analysis)
            if get_origin(hints[each.name]) is list}  # fmt: skip


def _columns(kind: type) -> list[tuple[str, str, Any]]:
    """(attribute, key, type) of what a table of ``kind`` has; what has a table of its own is left out."""
    left_out = _LEFT_OUT.get(kind, set())
    return [
        (each.name, _KEYS.get(each.name, each.name.rstrip("_")), hints_of(kind)[each.name])
        for each in fields(kind)
        if each.name not in left_out and hints_of(kind)[each.name] != list[RankEntry]
    ]


def _table(rows: Rows[Any], kind: type, whole: dict[str, str], more: dict[str, list[int]]) -> pa.Table:
    import pyarrow as pa

    names, columns = [], []
    for key, numbers in more.items():
        names.append(pa.field(key, pa.int64(), metadata=_meaning(rows.name, key, int)))
        columns.append(pa.array(numbers, pa.int64()))
    for attribute, key, hint in _columns(kind):
        arrow, plain = arrow_type(hint), _plainer(hint)
        values = [getattr(row, attribute) for row in rows]
        if key == "endpoint" and any(name == "node" for name, _, _ in _columns(kind)):
            values = [None if row.node is not None else row.endpoint for row in rows]
        if plain is not None:
            values = [None if value is None else plain(value) for value in values]
        names.append(pa.field(key, arrow, metadata=_meaning(rows.name, key, hint)))
        columns.append(pa.array(values, arrow))
    meaning = " ".join((kind.__doc__ or "").split())
    return pa.table(columns, schema=pa.schema(names, metadata={**whole, "meaning": meaning}))


def _meaning(table: str, key: str, hint: Any) -> dict[str, str]:
    """Meaning of a column, and its unit and tokens as the result's own declarations have them."""
    unit = next((unit for suffix, unit in _UNITS.items() if key.endswith(suffix)), None)
    said = {} if unit is None else {"unit": unit}
    if (meaning := meaning_of(table, key)) is not None:
        said["meaning"] = meaning
    kind = plain_type(hint)
    if get_origin(kind) is Literal:
        said["tokens"] = " ".join(get_args(kind))
    return said


def arrow_type(hint: Any) -> pa.DataType:
    """The Arrow type of a Python one."""
    import pyarrow as pa

    kind = plain_type(hint)
    if is_dataclass(kind):
        return pa.struct([(key, arrow_type(inner)) for _, key, inner in _columns(kind)])  # type: ignore[arg-type]
    if get_origin(kind) in (list, tuple):
        return pa.list_(arrow_type(get_args(kind)[0]))
    if get_origin(kind) is dict:
        return pa.map_(pa.string(), arrow_type(get_args(kind)[1]))
    simple: dict[Any, pa.DataType] = {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    return simple.get(kind, pa.string())


def _plainer(hint: Any) -> Callable[[Any], Any] | None:
    """What makes of a value what Arrow takes; None where it is that already."""
    kind = plain_type(hint)
    if is_dataclass(kind):
        parts = [(attribute, key, _plainer(inner)) for attribute, key, inner in _columns(kind)]  # type: ignore[arg-type]

        def plain(row: Any) -> dict[str, Any]:
            return {key: _or_none(getattr(row, attribute), make) for attribute, key, make in parts}

        return plain
    if get_origin(kind) is dict:
        return lambda value: list(value.items())
    if get_origin(kind) is list:
        inner = _plainer(get_args(kind)[0])
        return None if inner is None else lambda values: [inner(value) for value in values]
    return None


def _or_none(value: Any, make: Callable[[Any], Any] | None) -> Any:
    return value if value is None or make is None else make(value)


def read_tables(folder: str, job: str = "") -> Analysis:
    """The result whose tables lie in ``folder``; ``job``: which one of a data set, by how its name begins.

    Raises FormatError, MissingError, OSError.
    """
    check_installed()
    import pyarrow as pa
    import pyarrow.parquet as pq

    value: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    for file in _files(Path(folder), job):
        try:
            table = pq.ParquetFile(file).read()
        except pa.ArrowInvalid as error:
            raise FormatError(str(file), f"not a Parquet file: {error}") from None
        rows = table.to_pylist(maps_as_pydicts="strict")
        said = {key.decode(): text.decode() for key, text in (table.schema.metadata or {}).items()}
        value["schema"] = said.get("dpuflow.schema")
        for key in ("start_ns", "end_ns"):
            told = said.get(f"dpuflow.{key}", "None")
            value[key] = None if told == "None" else int(told)
        if file.stem == ENTRIES:
            entries = rows
        else:
            value[file.stem] = [row[file.stem] for row in rows] if file.stem == "limits" else rows
    for call in value.get("collectives", []):
        call["ranks"] = []
    try:
        for row in entries:
            value["collectives"][row["collective"]]["ranks"].append(row)
    except (KeyError, IndexError):
        raise FormatError(folder, "entries name collectives that its tables do not have") from None
    return analysis_of(value, folder)


def _files(folder: Path, job: str) -> list[Path]:
    """The tables of one result: those in the folder itself, or of one job of a data set."""
    jobs = sorted({file.parent.name.removeprefix("job=") for file in folder.glob("*/day=*/job=*/*.parquet")})
    if not jobs:
        if job:
            raise FormatError(str(folder), f"holds one result, no jobs to choose {job!r} of")
        found = folder.glob("*.parquet")
    else:
        meant = [name for name in jobs if name.startswith(job)]
        if len(meant) != 1:
            shown = ", ".join((meant or jobs)[:MOST_JOBS]) + (
                ", ..." if len(meant or jobs) > MOST_JOBS else ""
            )
            said = (
                f"{len(meant)} jobs begin with {job!r}"
                if job
                else f"holds {len(jobs)} jobs, and none is named"
            )
            raise FormatError(str(folder), f"{said}; name one as {folder}@JOB: {shown}")
        found = folder.glob(f"*/day=*/job={meant[0]}/*.parquet")
    # Messages lie beside the result and are no part of it.
    return sorted((file for file in found if file.stem != MESSAGES), key=lambda file: file.name)
