"""A rule switched off: its function gives what it would give if it had nothing to say.

A rule is named ``module:function`` below ``dpuflow``. Wherever a module of dpuflow holds the function, its
stand-in takes its place, so names that were imported count as well. Remembered results are forgotten.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.schedules.remembered import STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOMS: Final = ("matching", "entries", "verdicts")


@dataclass(frozen=True)
class Rule:
    """``neutral``: from what the function gave, and its positional arguments, to what it gives with nothing
    to say. ``changes_arguments``: it must not be called, and gave None."""

    name: str
    neutral: Callable[[Any, tuple[Any, ...]], Any]
    changes_arguments: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function. Raises ImportError, AttributeError where there is none of this name."""
        module, _, name = self.name.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(f"dpuflow.{module}"), name)
        return found


@contextmanager
def switched_off(rule: Rule) -> Iterator[None]:
    """Within, ``rule`` has nothing to say."""
    original = rule.function

    def stand_in(*args: Any, **more: Any) -> Any:
        result = None if rule.changes_arguments else original(*args, **more)
        return rule.neutral(result, args)

    with _replaced(original, stand_in):
        yield


@contextmanager
def watched(rules: Sequence[Rule]) -> Iterator[set[str]]:
    """Within, the names of ``rules`` that had something to say are added to the set."""
    spoke: set[str] = set()
    undo: list[Any] = []
    for rule in rules:
        original = rule.function

        def stand_in(*args: Any, _rule: Rule = rule, _own: Any = original, **more: Any) -> Any:
            result = _own(*args, **more)
            if _rule.name not in spoke and (
                _rule.changes_arguments or not alike(result, _rule.neutral(result, args))
            ):
                spoke.add(_rule.name)
            return result

        context = _replaced(original, stand_in)
        context.__enter__()
        undo.append(context)
    try:
        yield spoke
    finally:
        for context in reversed(undo):
            context.__exit__(None, None, None)


@contextmanager
def _replaced(original: Callable[..., Any], stand_in: Callable[..., Any]) -> Iterator[None]:
    places = [
        (module, name) for module in _modules() for name, value in vars(module).items() if value is original
    ]
    own = wraps(original)(stand_in)
    for module, name in places:
        setattr(module, name, own)
    _forget()
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, original)
        _forget()


@lru_cache(maxsize=1)
def _modules() -> list[Any]:
    for room in ROOMS:
        package = importlib.import_module(f"dpuflow.{room}")
        for found in pkgutil.iter_modules(package.__path__, f"dpuflow.{room}."):
            importlib.import_module(found.name)
    importlib.import_module("dpuflow.analysis")
    return [module for name, module in sys.modules.items() if name.startswith("dpuflow.")]


def _forget() -> None:
    for module in _modules():
        if module.__name__.split(".")[1] in ROOMS:
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear") and getattr(value, "__module__", "") == module.__name__:
                    value.cache_clear()
    STORE.clear()


def alike(one: Any, other: Any) -> bool:
    """Whether two results say the same, array by array."""
    if one is other:
        return True
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        return bool(one.shape == other.shape and np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if is_dataclass(one):
        return all(alike(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return bool(one == other)


def lines_of(rule: Rule) -> int:
    """Lines of its function, and of those of its module that nothing but it calls."""
    module, _, name = rule.name.partition(":")
    lines, used = _functions(module)
    own = {name}
    while more := {
        callee
        for callee in lines.keys() - own
        if callee.startswith("_")
        and (callers := {caller for caller in lines if callee in used[caller] and caller != callee})
        and callers <= own
    }:
        own |= more
    return sum(lines[each] for each in own)


@cache
def _functions(module: str) -> tuple[dict[str, int], dict[str, set[str]]]:
    """Of each function of a module its lines, and which others of the module it names."""
    found = importlib.import_module(f"dpuflow.{module}")
    assert found.__file__ is not None
    tree = ast.parse(Path(found.__file__).read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    lines = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions.items()}
    used = {
        caller: {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & functions.keys()
        for caller, node in functions.items()
    }
    return lines, used
