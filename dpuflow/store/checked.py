"""Whether what a column file says can be: checked once, as it is loaded, so that no stage fails on it later.

In: the header's JSON and the tables. Out: the info, and nothing of the tables, or a ValueError that says what
cannot be. A checksum finds damage; this is for files that were made so. Times are ``messages.stamps``'.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from dpuflow.schema.rows import NONE32, Framing, MessageFlag, Op, Pairing, Role, Transport, Wire
from dpuflow.schema.tables import CaptureInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from enum import IntEnum

    from dpuflow.schema.tables import Rows

_MOST: Final = 1 << 62
"""No count, size or place in a stream comes near: two of them can be added."""
_MOST_BYTES: Final = 1 << 48
"""No message is longer: libraries' headers are believed up to 2**40 bytes (``kernels.framing``)."""
_ENUMS: Final[dict[str, dict[str, type[IntEnum]]]] = {
    "flows": {"transport": Transport, "framing": Framing, "pairing": Pairing},
    "messages": {"wire": Wire, "role": Role, "op": Op},
}
_LIMITS: Final = {
    "endpoints": {"packets_out": _MOST, "packets_in": _MOST},
    "flows": {"packets": _MOST, "bytes": _MOST, "rtt_min_ns": _MOST},
    "messages": {
        "bytes": _MOST_BYTES, "announces": _MOST_BYTES, "seq": _MOST, "seq_end": _MOST,
        "flags": 2 * max(MessageFlag),
    },
}  # fmt: skip
_PLACES: Final = (("flows", "src", "endpoints"), ("flows", "dst", "endpoints"), ("messages", "flow", "flows"))


def info_of(values: Any) -> CaptureInfo:
    """The info that a header tells; keys of a later version are left out. Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError("info is no object")
    told = {each.name: values[each.name] for each in fields(CaptureInfo) if each.name in values}
    for each in fields(CaptureInfo):
        if each.name in told and not _FITS[str(each.type)](told[each.name]):
            raise ValueError(f"info.{each.name} cannot be {told[each.name]!r:.40}")
        if each.name in told and each.type == "int" and told[each.name] < 0:
            raise ValueError(f"info.{each.name} is negative")
    info = CaptureInfo(**told)
    if (info.first_ns is None) != (info.last_ns is None):
        raise ValueError("info has only one of first_ns and last_ns")
    if any(count < 0 for count in (info.lost_packets or 0, *info.skipped.values())):
        raise ValueError("info counts less than no packets")
    if info.sampled is not None and info.sampled < 1:
        raise ValueError("info.sampled is below 1")
    return info


def check_tables(tables: Mapping[str, Rows]) -> None:
    """Raise ValueError where rows hold what none can, or name rows that are not."""
    for name, kinds in _ENUMS.items():
        for column, kind in kinds.items():
            other = set(_distinct(tables[name], column)) - set(map(int, kind))
            if other:
                raise ValueError(f"{name} have the {column} {min(other)}, which is none")
    for name, limits in _LIMITS.items():
        rows = tables[name]
        for column, limit in limits.items():
            if len(rows) and int(rows[column].max()) >= limit:
                raise ValueError(f"{name} have {column} of {int(rows[column].max())}")
            if len(rows) and float(rows[column].sum(dtype=float)) >= 2 * _MOST:
                raise ValueError(f"{name} have {column} that add up to more than can be")
    for name, column, of in _PLACES:
        rows = tables[name]
        if len(rows) and int(rows[column].max()) >= len(tables[of]):
            raise ValueError(f"{name} name rows of {of} that are not")
    flows = tables["flows"]
    paired = flows[flows["peer"] != NONE32]
    if len(paired) and int(paired["peer"].max()) >= len(flows):
        raise ValueError("flows name rows of flows that are not")
    opposite = flows[paired["peer"]]
    other = paired["transport"] != opposite["transport"]
    for one, its in (("src", "dst"), ("dst", "src")):
        other |= paired[one] != opposite[its]
    for one, its in (("sport", "dport"), ("dport", "sport")):  # of RoCE they are no keys
        other |= (paired["transport"] == Transport.TCP) & (paired[one] != opposite[its])
    if other.any():
        raise ValueError("flows name as their opposites what runs elsewhere")


def _distinct(rows: Rows, column: str) -> list[int]:
    """The values in a column of bytes."""
    import numpy as np

    return np.flatnonzero(np.bincount(rows[column], minlength=1)).tolist() if len(rows) else []


def _integer(value: Any) -> bool:
    return type(value) is int and -_MOST < value < _MOST


def _text(value: Any) -> bool:
    return type(value) is str


def _texts(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


_FITS: Final[dict[str, Callable[[Any], bool]]] = {
    "int": _integer,
    "int | None": lambda value: value is None or _integer(value),
    "float | None": lambda value: value is None or _integer(value) or _finite(value),
    "bool": lambda value: type(value) is bool,
    "str": _text,
    "list[str]": _texts,
    "dict[str, int]": lambda value: type(value) is dict and all(map(_integer, value.values())),
}
"""Whether JSON's value is of a type, as ``CaptureInfo`` writes it."""


def _finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and abs(value) < _MOST
