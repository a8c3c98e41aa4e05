"""The result as JSON, ``dpuflow.analysis/1`` (docs/analysis.md, docs/analysis.schema.json).

In: an ``Analysis``. Out: the same bytes for the same result: keys in the order of the format, one row
of a list per line, None as null, no NaN.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dpuflow.reports.output import replacing
from dpuflow.schema.rows import ANALYSIS_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dpuflow.results import Analysis
    from dpuflow.schema.tables import CaptureInfo, Clock


def write_json(result: Analysis, target: str) -> None:
    """Write ``result`` to the file ``target``, ``-`` being standard output.

    A file appears whole or not at all. Raises OSError where it cannot be written.
    """
    with replacing(target) as file:
        file.writelines(json_lines(result))


def json_lines(result: Analysis) -> Iterator[str]:
    """The JSON text in pieces, so that a large result is never held twice."""
    encode = json.JSONEncoder(default=_plain, allow_nan=False).encode
    yield '{"schema": ' + encode(ANALYSIS_ID)
    for key in ("start_ns", "end_ns"):
        yield f',\n "{key}": {encode(getattr(result, key))}'
    for key, rows in _lists(result):
        yield f',\n "{key}": ['
        separator = "\n  "
        for row in rows:
            # Asked for at once: the encoder would come back for it at twice the cost.
            yield separator + encode(_plain(row) if is_dataclass(row) else row)
            separator = ",\n  "
        yield "]"
    yield "}\n"


def _lists(result: Analysis) -> Iterator[tuple[str, Iterable[object]]]:
    yield "captures", map(_capture, result.captures)
    yield "clocks", map(_clock, result.clocks)
    for key in ("endpoints", "flows", "groups", "collectives", "lateness"):
        yield key, getattr(result, key)
    for key in ("edges", "what_if", "steps", "accounts", "pipelines", "transfers", "requests"):
        yield key, getattr(result, key)
    for key in ("operations", "attribution", "all_reduce_what_if"):
        yield key, getattr(result, key)
    for key in ("tax", "loss_tax", "decode", "network_cost"):
        yield key, getattr(result, key)
    for key in ("findings", "judged", "limits"):
        yield key, getattr(result, key)


def _capture(info: CaptureInfo) -> dict[str, object]:
    return {
        "id": info.id,
        "file": info.files[0],
        "files": info.files,
        "vantage": info.vantage,
        "link_type": info.link_type,
        "packets": info.packets,
        "bytes": info.bytes,
        "first_ns": info.first_ns,
        "last_ns": info.last_ns,
        "lost_packets": info.lost_packets,
        "sampled_one_of": None if info.sampled is None else round(info.sampled, 2),
        "skipped": dict(sorted(info.skipped.items())),
        "complete": info.complete,
        "warnings": info.warnings,
    }


def _clock(clock: Clock) -> dict[str, object]:
    return {
        "capture": clock.capture,
        "reference": clock.reference,
        "offset_ns": clock.offset_ns,
        "drift_ppb": clock.drift_ppb,
        "error_ns": clock.error_ns,
        "method": clock.method,
        "island": clock.island,
        "why": clock.why,
    }


def _plain(value: Any) -> object:
    """A row as a dict, a NumPy number as Python's: what the encoder asks for and does not know itself."""
    if not is_dataclass(value):
        return value.item()
    kind: type = type(value)
    keys, floats, values = _layout(kind)
    row: dict[str, Any] = dict(zip(keys, values(value), strict=True))
    if row.get("node") is not None and "endpoint" in row:
        row["endpoint"] = None  # only its node is told
    for key in floats:
        if isinstance(row[key], float):
            row[key] = round(row[key], 6)
    if "dest_qp" in row:  # a flow has one of the two
        del row["ports" if row["ports"] is None else "dest_qp"]
    return row


@cache
def _layout(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Keys of a dataclass in JSON, those that may have a fraction, and what takes the values of all its
    fields from an object."""
    names = [field.name for field in fields(kind)]
    take = attrgetter(*names) if len(names) > 1 else lambda row: (getattr(row, names[0]),)
    floats = (field.name for field in fields(kind) if "float" in str(field.type))
    return tuple(name.rstrip("_") for name in names), tuple(name.rstrip("_") for name in floats), take
