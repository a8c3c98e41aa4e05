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
from dpuflow.quantities import whole_number
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
    """Raise FormatError where a row names what is not listed (ids are positions), or is not whole."""
    for name in ("captures", "endpoints", "flows", "groups", "collectives", "findings"):
        if any(each.id != place for place, each in enumerate(getattr(result, name))):
            raise FormatError(file, f"the ids of {name} are not their positions")
    for what, listed, named in (
        ("an endpoint", result.endpoints, _endpoints_named(result)),
        ("a capture", result.captures, _captures_named(result)),
        ("a group", result.groups, _groups_named(result)),
        ("a flow", result.flows, (each.flow for each in result.requests)),
    ):
        if any(not 0 <= each < len(listed) for each in named):
            raise FormatError(file, f"{what} is named that is not listed")
    if not (
        all(each.files for each in result.captures)
        and all(each.addresses for each in result.endpoints)
        and all(each.endpoints for each in result.steps)
    ):
        raise FormatError(file, "a capture has no files, an endpoint no addresses, or steps no endpoints")
    for line in result.pipelines:
        for of_stages in (line.forward_ns, line.backward_ns, line.idle_share):
            if len(of_stages) != len(line.stages):
                raise FormatError(file, "a pipeline names stages that are not its own")


def _captures_named(result: results.Analysis) -> Iterator[int]:
    """The captures that rows name, each as often."""
    yield from (each.capture for each in result.clocks)
    for finding in result.findings:
        for evidence in (finding.evidence, *(part.evidence for part in finding.consists_of)):
            yield from (each.capture for each in evidence)


def _groups_named(result: results.Analysis) -> Iterator[int]:
    """The groups that rows name, each as often."""
    for rows in (
        result.collectives, result.accounts, result.operations, result.attribution,
        result.all_reduce_what_if, result.tax,
    ):  # fmt: skip
        yield from (row.group for row in rows)


def _endpoints_named(result: results.Analysis) -> Iterator[int]:
    """The endpoints that rows name, each as often."""
    for ends in (result.flows, result.transfers, result.network_cost):
        for row in ends:
            yield from (row.src, row.dst)
    for several in (result.groups, result.findings, result.steps, result.loss_tax, result.decode):
        for each in several:
            yield from each.endpoints
    for finding in result.findings:
        for part in finding.consists_of:
            yield from part.endpoints
    for unit in result.lateness:
        yield from (unit.endpoint, unit.node or 0, *(unit.relative_to or ()), *unit.together)
    yield from (end.node for end in result.endpoints if end.node is not None)
    for call in result.collectives:
        yield call.root or 0
        for rank in call.ranks:
            yield rank.endpoint
            if rank.node is not None:
                yield rank.node
    for edge in result.edges:
        yield from (edge.from_, edge.to)
    yield from (each.endpoint for each in result.what_if)
    for account in result.accounts:
        for named in (account.waited, account.parts.work, account.parts.in_node):
            yield from map(_place, named)
    for line in result.pipelines:
        yield from (*line.stages, *line.late)
    for asked in result.requests:
        yield from (asked.client, asked.server)


def _place(text: str) -> int:
    """An endpoint that is named as text; -1 for what is no number."""
    number = whole_number(text)
    return -1 if number is None else number


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
        make = _maker(hint)
        if each.name == "confidence" or each.name.endswith("share"):
            make = _share(make)
        steps.append((each.name, key, make, needed, optional))

    def build(row: Any) -> Any:
        if not isinstance(row, dict):
            _refuse(row, "a row")
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
        makers = [_maker(each) for each in get_args(kind)]
        return lambda items: tuple(
            make(item) for make, item in zip(makers, _checked((list, tuple))(items), strict=True)
        )
    if get_origin(kind) is list:
        (each,) = get_args(kind)
        inner, optional = _maker(each), plain_type(each) is not each
        return lambda items: [
            None if optional and item is None else inner(item) for item in _checked(list)(items)
        ]
    if get_origin(kind) is dict:
        of = _maker(get_args(kind)[1])
        return lambda items: {key: of(item) for key, item in _checked(dict)(items).items()}
    if get_origin(kind) is Literal:
        known = frozenset(get_args(kind))
        return lambda item: item if item in known else _refuse(item, "a known token")
    if kind is float:
        return _checked((float, int))
    return _checked(kind)


def _checked(kind: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def check(item: Any) -> Any:
        if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
            _refuse(item, "of the type that is expected there")
        if isinstance(item, (int, float)) and not -(1 << 63) <= item < 1 << 63:
            _refuse(item, "a number of 64 bits")
        return item

    return check


def _share(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same of parts of a whole, or of lists of them."""

    def check(item: Any) -> Any:
        made = make(item)
        for each in made if isinstance(made, list) else (made,):
            if each is not None and not 0 <= each <= 1:
                _refuse(each, "a share of a whole")
        return made

    return check


def _refuse(item: object, what: str) -> Any:
    raise ValueError(f"{item!r:.40} is not {what}")
