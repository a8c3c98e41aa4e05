"""A saved result back as objects: what ``analyze --json`` wrote, as the ``Analysis`` it was written from.

In: JSON, ``dpuflow.analysis/1``. Out: an ``Analysis`` whose JSON is the same bytes. Keys of a later version
are left out, as the format allows (docs/analysis.md); another format, or a damaged file, is a FormatError.
"""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dpuflow import results
from dpuflow.errors import FormatError
from dpuflow.schema import tables
from dpuflow.schema.rows import ANALYSIS_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_RENAMED: Final[dict[type, dict[str, str]]] = {tables.CaptureInfo: {"sampled": "sampled_one_of"}}
"""Attributes whose keys in JSON are others than their names."""


def load(file: str) -> results.Analysis:
    """The result in ``file``, as ``dpuflow analyze --json`` wrote it. Raises FormatError, OSError."""
    with open(file, encoding="utf-8") as stream:
        try:
            value = json.load(stream, parse_float=_number, parse_constant=_number)
        except UnicodeDecodeError:
            raise FormatError(
                file, "not a result of dpuflow (no text at all): captures are read by `dpuflow analyze`"
            ) from None
        except (ValueError, RecursionError) as error:
            raise FormatError(file, f"not JSON, or cut short: {error}") from None
    return analysis_of(value, file)


def _number(text: str) -> float:
    """What no result holds, and JSON does not know, is refused: reports would fail on it later."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no number")
    return value


def analysis_of(value: object, file: str) -> results.Analysis:
    """The ``Analysis`` that JSON's ``value`` stands for; ``file`` is named in errors. Raises FormatError."""
    told = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(value, dict) or told != ANALYSIS_ID:
        said = f"a result of the format {told!r:.60}" if told else "not a result of dpuflow analyze --json"
        raise FormatError(file, f"{said}; this version reads {ANALYSIS_ID}")
    try:
        result: results.Analysis = _builder(results.Analysis)(value)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        said = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise FormatError(file, f"not a whole result of {ANALYSIS_ID}: {said}") from None
    _check(result, file)
    return result


def rows_of(kind: type[T], value: object, file: str) -> list[T]:
    """Rows of one list as JSON has them, alone: an answer of the agent's API. Raises FormatError."""
    build = _builder(kind)  # type: ignore[arg-type]
    try:
        return [build(row) for row in _checked(list)(value)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(file, f"not a list of {kind.__name__}: {error}") from None


def _check(result: results.Analysis, file: str) -> None:
    """Raise FormatError where a row names what is not listed: ids are positions."""
    for name in ("captures", "endpoints", "flows", "groups", "collectives", "findings"):
        if any(each.id != place for place, each in enumerate(getattr(result, name))):
            raise FormatError(file, f"the ids of {name} are not their positions")
    captures = [clock.capture for clock in result.clocks]
    for finding in result.findings:
        parts = [finding.evidence, *(part.evidence for part in finding.consists_of)]
        captures += [each.capture for evidence in parts for each in evidence]
    for what, listed, named in (
        ("an endpoint", result.endpoints, _endpoints_named(result)),
        ("a capture", result.captures, captures),
        ("a group", result.groups, [each.group for each in result.collectives]),
    ):
        if any(not 0 <= each < len(listed) for each in named):
            raise FormatError(file, f"{what} is named that is not listed")


def _endpoints_named(result: results.Analysis) -> Iterator[int]:
    """The endpoints that rows name, each as often."""
    for flow in result.flows:
        yield from (flow.src, flow.dst)
    for group in result.groups:
        yield from group.endpoints
    for finding in result.findings:
        yield from finding.endpoints
    for unit in result.lateness:
        yield unit.endpoint
    for each in result.collectives:
        for rank in each.ranks:
            yield rank.endpoint


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass' fields, by name."""
    return get_type_hints(kind, {**vars(results), **vars(tables)})


def plain_type(hint: Any) -> Any:
    """``hint`` without None: ``int | None`` is an int that may be missing."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [each for each in get_args(hint) if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else str
    return hint


@cache
def _builder(kind: type) -> Callable[[dict[str, Any]], Any]:
    """What makes one ``kind`` of a row as JSON has it."""
    renamed = _RENAMED.get(kind, {})
    steps = []
    for each in fields(kind):
        if not each.metadata.get("saved", True):
            continue
        hint = hints_of(kind)[each.name]
        optional = plain_type(hint) is not hint
        needed = each.default is MISSING and each.default_factory is MISSING and not optional
        key = renamed.get(each.name, each.name.rstrip("_"))
        steps.append((each.name, key, _maker(hint), needed, optional))

    def build(row: dict[str, Any]) -> Any:
        if "node" in row and row.get("endpoint", 0) is None:
            row["endpoint"] = row["node"]  # only its node is told
        values = dict.fromkeys(unsaid)
        for name, key, make, needed, optional in steps:
            if key not in row:
                if needed:
                    raise KeyError(key)
                continue
            item = row[key]
            if item is None and not optional:
                _refuse(item, f"a value of {key!r}")
            values[name] = None if item is None else make(item)
        return kind(**values)

    unsaid = [e.name for e in fields(kind) if e.default is MISSING and e.default_factory is MISSING]
    return build


def _maker(hint: Any) -> Callable[[Any], Any]:
    """What makes a value of type ``hint`` of JSON's, or refuses it."""
    kind = plain_type(hint)
    if is_dataclass(kind):
        return _builder(kind)  # type: ignore[arg-type]
    if get_origin(kind) is tuple:
        return tuple
    if get_origin(kind) is list:
        (each,) = get_args(kind)
        inner, optional = _maker(each), plain_type(each) is not each
        return lambda items: [
            None if optional and item is None else inner(item) for item in _checked(list)(items)
        ]
    if get_origin(kind) is dict or kind is dict:
        return _checked(dict)
    if get_origin(kind) is Literal:
        known = frozenset(get_args(kind))
        return lambda item: item if item in known else _refuse(item, "a known token")
    if kind is float:
        return _checked((float, int))
    return _checked(kind)


def _checked(kind: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def check(item: Any) -> Any:
        if not isinstance(item, kind):
            _refuse(item, "of the type that is expected there")
        if isinstance(item, int) and not -(1 << 63) <= item < 1 << 63:
            _refuse(item, "a number of 64 bits")
        return item

    return check


def _refuse(item: object, what: str) -> Any:
    raise ValueError(f"{item!r:.40} is not {what}")
