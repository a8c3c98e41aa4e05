"""YAML into dataclasses, checked: every error names file, line and key.

A field says in its metadata (``setting``) what it may hold; its type says the rest. ``X | None`` fields may
be ``null``. Integers may be written with a size's suffix (``4MiB``, ``64k``), durations with theirs
(``500ms``, ``2h``), shares as ``50%``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import MISSING, Field, field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from dpuflow.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_SIZE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)")
_POWER: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_DURATION: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*(us|ms|s|min|m|h|d|)")
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1, "": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

DURATION, SHARE, SIZE = "duration", "share", "size"
"""Units of settings: a float in seconds, a float of which 1 is all, a whole number of bytes."""
_WANTED: Final = {
    DURATION: "a duration, such as 500ms, 10s or 2h",
    SHARE: "a share, such as 50% or 0.5",
    SIZE: "a size, such as 64MiB or 1GB",
}


def setting(
    default: Any,
    what: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    unit: str | None = None,
    check: Callable[[Any], str | None] | None = None,
) -> Any:
    """A dataclass field with its meaning and the values it may take. Lists and settings are made afresh.

    ``check`` gets a value and says what is wrong with it; None if nothing is.
    """
    metadata = {"what": what, "low": low, "high": high, "choices": choices, "unit": unit, "check": check}
    if default is MISSING:
        return field(metadata=metadata)
    if isinstance(default, (list, dict)) or hasattr(default, "__dataclass_fields__"):
        made = type(default)
        return field(default_factory=lambda: made(default) if made is list else made(), metadata=metadata)
    return field(default=default, metadata=metadata)


class Reader:
    """Reads one YAML text; ``name`` is what errors call it, ``what`` the whole of it.

    With ``optional`` an empty text, or section, is one with nothing but defaults.
    """

    def __init__(self, name: str, what: str = "the scenario", optional: bool = False) -> None:
        self.name, self.what, self.optional = name, what, optional

    def root(self, text: str) -> yaml.Node:
        """The parsed text. Raises OptionError with the line where it is no YAML."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise OptionError(f"{self.name}:{line}: not YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise OptionError(f"{self.name}: not YAML: {str(error).splitlines()[0]}") from None
        except RecursionError:
            raise OptionError(f"{self.name}: not YAML: nested too deeply") from None
        if node is None and self.optional:
            return yaml.MappingNode("tag:yaml.org,2002:map", [])
        if node is None:
            raise OptionError(f"{self.name}: {self.what} is empty")
        return node

    def fail(self, node: yaml.Node, key: str, reason: str) -> OptionError:
        """An error at ``node``, in one line whatever the key is."""
        said = " ".join(f"{key}: {reason}".split())
        return OptionError(f"{self.name}:{node.start_mark.line + 1}: {said}")

    def build(self, cls: type[T], node: yaml.Node, key: str) -> T:
        """An instance of the dataclass ``cls`` from a mapping; ``key`` is its own name in errors."""
        if self.optional and _is_null(node):
            node = yaml.MappingNode("tag:yaml.org,2002:map", [], node.start_mark)
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, key or self.what, "must be a mapping, key: value")
        kinds: dict[str, type[Any]] | None = getattr(cls, "KINDS", None)
        skip: tuple[str, ...] = ()
        if kinds:
            cls, skip = self._kind(kinds, node, key), ("kind",)
        values = self._values(cls, node, key, skip)
        for f in fields(cls):  # type: ignore[arg-type]
            if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
                raise self.fail(node, _path(key, f.name), "is missing")
        return cls(**values)

    def _values(
        self, cls: type[Any], node: yaml.MappingNode, key: str, skip: tuple[str, ...]
    ) -> dict[str, Any]:
        """What a mapping says of the fields of ``cls``, ``skip`` left out."""
        known = {f.name: f for f in fields(cls)}
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for name_node, value in node.value:
            name = str(name_node.value)
            if name in skip:
                continue
            if name not in known:
                raise self.fail(name_node, _path(key, name), _unknown(name, [*skip, *known]))
            if name in values:
                raise self.fail(name_node, _path(key, name), "given twice")
            values[name] = self._value(hints[name], known[name], value, _path(key, name))
        return values

    def _kind(self, kinds: dict[str, type[Any]], node: yaml.MappingNode, key: str) -> type[Any]:
        for name, value in node.value:
            if name.value == "kind":
                if value.value not in kinds:
                    raise self.fail(value, f"{key}.kind", f"{value.value!r} is not one of {', '.join(kinds)}")
                return kinds[value.value]
        raise self.fail(node, f"{key}.kind", f"is missing; one of {', '.join(kinds)}")

    def _value(self, hint: Any, f: Field[Any], node: yaml.Node, key: str) -> Any:
        if get_origin(hint) in (Union, UnionType):
            if _is_null(node):
                return None
            words = [word for arg in get_args(hint) if get_origin(arg) is Literal for word in get_args(arg)]
            if isinstance(node, yaml.ScalarNode) and node.value in words:
                return str(node.value)
            hint = next(arg for arg in get_args(hint) if arg is not NoneType)
        if get_origin(hint) is list:
            return self._list(get_args(hint)[0], f, node, key)
        if hasattr(hint, "__dataclass_fields__"):
            return self.build(hint, node, key)
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(node, key, "must be one value")
        value = self._scalar(hint, node, key, f.metadata.get("unit"))
        wrong = _refused(f, value, node.value)
        if wrong is not None:
            raise self.fail(node, key, wrong)
        return value

    def _list(self, hint: Any, f: Field[Any], node: yaml.Node, key: str) -> list[Any]:
        if self.optional and isinstance(node, yaml.ScalarNode):  # one value is a list of one
            return [] if _is_null(node) else [self._value(hint, f, node, key)]
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(node, key, "must be a list")
        return [self._value(hint, f, item, f"{key}[{i}]") for i, item in enumerate(node.value)]

    def _scalar(self, hint: Any, node: yaml.ScalarNode, key: str, unit: str | None) -> Any:
        text = str(node.value)
        if hint is str:
            return text
        if hint is bool:
            if text.lower() not in ("true", "false", "yes", "no"):
                raise self.fail(node, key, f"{text!r} is neither true nor false")
            return text.lower() in ("true", "yes")
        try:
            value: int | float
            if unit == DURATION:
                value = read_duration(text)
            elif unit == SHARE:
                value = read_share(text)
            elif hint is int:
                value = read_size(text)
            else:
                value = float(text)
                if value != value or abs(value) == float("inf"):
                    raise ValueError
        except (ValueError, OverflowError):
            wanted = _WANTED.get(unit or "", "a whole number" if hint is int else "a number")
            raise self.fail(node, key, f"{text!r} is not {wanted}") from None
        return value


def _path(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _refused(f: Field[Any], value: Any, text: str) -> str | None:
    """Why the field cannot have the value that stands as ``text``; None where it can."""
    choices, low, high, unit, check = (
        f.metadata.get(name) for name in ("choices", "low", "high", "unit", "check")
    )
    if choices and value not in choices:
        return f"{value!r} is not one of {', '.join(map(str, choices))}"
    if low is not None and value < low:
        return f"{text} is below {_written(low, unit)}"
    if high is not None and value > high:
        return f"{text} is above {_written(high, unit)}"
    return None if check is None else check(value)


def _written(value: float, unit: str | None) -> Any:
    return value if unit is None else written(value, unit)


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag.endswith(":null"))


def _unknown(name: str, known: list[str]) -> str:
    """What is wrong with a key that is none, with the one that was likely meant."""
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"not one of {', '.join(known)}{meant}"


def read_size(text: str) -> int:
    """Bytes of ``4MiB`` (1024s), ``4MB`` (1000s) or a plain number. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, prefix, binary, _ = match.groups()
    value = float(number) * (1024 if binary else 1000) ** _POWER[prefix]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def read_duration(text: str) -> float:
    """Seconds of ``500ms``, ``10s``, ``5min``, ``2h``, ``7d`` or a plain number. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    value = float(match[1]) * _SECONDS[match[2]]
    if value == float("inf"):
        raise ValueError(text)
    return value


def read_share(text: str) -> float:
    """A share of one: ``50%`` or ``0.5``. Raises ValueError."""
    text = text.strip()
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if value != value or abs(value) == float("inf"):
        raise ValueError(text)
    return value


def written(value: float, unit: str) -> Any:
    """A value as people write it: 64MiB, 500ms, 50%."""
    if unit == SIZE:
        for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
            if value and value % 1024**power == 0:
                return f"{int(value) // 1024**power}{name}"
        return int(value)
    if unit == SHARE:
        return f"{value * 100:g}%"
    for seconds, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if value and value % seconds == 0:
            return f"{int(value // seconds)}{name}"
    return f"{value * 1000:g}ms"
