"""YAML into dataclasses, checked: every error names file, line and key.

A field says in its metadata (``setting``) what it may hold; its type says the rest. ``X | None`` fields may
be ``null``. Integers may be written with a size's suffix (``4MiB``, ``64k``).
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, field, fields
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from dpuflow.errors import OptionError

T = TypeVar("T")

_SIZE: Final = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(B?)")
_POWER: Final = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def setting(
    default: Any,
    what: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """A dataclass field with its meaning and the values it may take. Lists and settings are made afresh."""
    metadata = {"what": what, "low": low, "high": high, "choices": choices}
    if default is MISSING:
        return field(metadata=metadata)
    if isinstance(default, (list, dict)) or hasattr(default, "__dataclass_fields__"):
        made = type(default)
        return field(default_factory=lambda: made(default) if made is list else made(), metadata=metadata)
    return field(default=default, metadata=metadata)


class Reader:
    """Reads one YAML text; ``name`` is what errors call it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def root(self, text: str) -> yaml.Node:
        """The parsed text. Raises OptionError with the line where it is no YAML."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise OptionError(f"{self.name}:{line}: not YAML: {error.problem}") from None
        except yaml.YAMLError as error:
            raise OptionError(f"{self.name}: not YAML: {str(error).splitlines()[0]}") from None
        if node is None:
            raise OptionError(f"{self.name}: the scenario is empty")
        return node

    def fail(self, node: yaml.Node, key: str, reason: str) -> OptionError:
        """An error at ``node``."""
        return OptionError(f"{self.name}:{node.start_mark.line + 1}: {key}: {reason}")

    def build(self, cls: type[T], node: yaml.Node, key: str) -> T:
        """An instance of the dataclass ``cls`` from a mapping; ``key`` is its own name in errors."""
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, key or "the scenario", "must be a mapping, key: value")
        kinds: dict[str, type[Any]] | None = getattr(cls, "KINDS", None)
        skip: tuple[str, ...] = ()
        if kinds:
            cls, skip = self._kind(kinds, node, key), ("kind",)
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for name_node, value in node.value:
            name = str(name_node.value)
            path = f"{key}.{name}" if key else name
            if name in skip:
                continue
            if name not in known:
                raise self.fail(name_node, path, f"not one of {', '.join([*skip, *known])}")
            if name in values:
                raise self.fail(name_node, path, "given twice")
            values[name] = self._value(hints[name], known[name], value, path)
        for name, f in known.items():
            if name not in values and f.default is MISSING and f.default_factory is MISSING:
                raise self.fail(node, f"{key}.{name}" if key else name, "is missing")
        return cls(**values)

    def _kind(self, kinds: dict[str, type[Any]], node: yaml.MappingNode, key: str) -> type[Any]:
        for name, value in node.value:
            if name.value == "kind":
                if value.value not in kinds:
                    raise self.fail(value, f"{key}.kind", f"{value.value!r} is not one of {', '.join(kinds)}")
                return kinds[value.value]
        raise self.fail(node, f"{key}.kind", f"is missing; one of {', '.join(kinds)}")

    def _value(self, hint: Any, f: Field[Any], node: yaml.Node, key: str) -> Any:
        if get_origin(hint) in (Union, UnionType):
            if node.tag.endswith(":null"):
                return None
            hint = next(arg for arg in get_args(hint) if arg is not NoneType)
        if get_origin(hint) is list:
            if not isinstance(node, yaml.SequenceNode):
                raise self.fail(node, key, "must be a list")
            (inner,) = get_args(hint)
            return [self._value(inner, f, item, f"{key}[{i}]") for i, item in enumerate(node.value)]
        if hasattr(hint, "__dataclass_fields__"):
            return self.build(hint, node, key)
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(node, key, "must be one value")
        value = self._scalar(hint, node, key)
        choices, low, high = (f.metadata.get(name) for name in ("choices", "low", "high"))
        if choices and value not in choices:
            raise self.fail(node, key, f"{value!r} is not one of {', '.join(map(str, choices))}")
        if low is not None and value < low:
            raise self.fail(node, key, f"{value} is below {low}")
        if high is not None and value > high:
            raise self.fail(node, key, f"{value} is above {high}")
        return value

    def _scalar(self, hint: Any, node: yaml.ScalarNode, key: str) -> Any:
        text = str(node.value)
        if hint is str:
            return text
        if hint is bool:
            if text.lower() not in ("true", "false", "yes", "no"):
                raise self.fail(node, key, f"{text!r} is neither true nor false")
            return text.lower() in ("true", "yes")
        try:
            value: int | float
            if hint is int:
                value = read_size(text)
            else:
                value = float(text)
                if value != value or abs(value) == float("inf"):
                    raise ValueError
        except ValueError:
            wanted = "a whole number" if hint is int else "a number"
            raise self.fail(node, key, f"{text!r} is not {wanted}") from None
        return value


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
