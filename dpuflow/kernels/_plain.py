"""Kernels as the Python functions that they are: no compiler, a hundred times slower, the same results.

A first small analysis on a machine without compiled kernels is answered by these, in less time than
compiling takes. Kernels use numbers, arrays and records alone, so what differs from compiled code is
little: arrays become memory views (whose elements are Python's numbers), records become objects
with their fields, NumPy's number types become Python's. Indices and stored numbers are checked:
an error is raised where compiled code would go wrong in silence.
"""

from __future__ import annotations

import struct
import sys
from functools import cache
from threading import RLock
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.kernels import _ready

if TYPE_CHECKING:
    from collections.abc import Callable

from_dtype, void = _ready.from_dtype, _ready.void
u1, u2, u4, u8 = _ready.u1, _ready.u2, _ready.u4, _ready.u8
i4, i8, f8 = _ready.i4, _ready.i8, _ready.f8

_BITS: Final = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: 0xFFFFFFFFFFFFFFFF}
_SIGN: Final = 1 << 63


class _Numbers:
    """What kernels use of NumPy."""

    float64 = float

    @staticmethod
    def int64(value: Any) -> int:
        number = int(value)
        return number if -_SIGN <= number < _SIGN else ((number + _SIGN) & _BITS[8]) - _SIGN

    @staticmethod
    def uint64(value: Any) -> int:
        return int(value) & 0xFFFFFFFFFFFFFFFF

    @staticmethod
    def uint32(value: Any) -> int:
        return int(value) & 0xFFFFFFFF

    @staticmethod
    def uint16(value: Any) -> int:
        return int(value) & 0xFFFF

    @staticmethod
    def uint8(value: Any) -> int:
        return int(value) & 0xFF


class Rows:
    """An array of records: ``rows[i].field``."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape = array, array.shape
        self.row, self.columns = _row_of(array.dtype), [view(array[name]) for name in array.dtype.names]

    def __len__(self) -> int:
        return self.shape[0]  # type: ignore[no-any-return]

    def __getitem__(self, i: int) -> Any:
        if not -self.shape[0] <= i < self.shape[0]:
            raise IndexError(i)
        return self.row(self.columns, i)

    def __setitem__(self, i: int, row: Any) -> None:
        for column, other in zip(self.columns, row.columns, strict=True):
            column[i] = other[row.i]


class _Row:
    """A record of an array, not a copy of it."""

    __slots__ = ("columns", "i")

    def __init__(self, columns: list[Any], i: int) -> None:
        self.columns, self.i = columns, i


def _field(k: int, dtype: np.dtype[Any]) -> property:
    low = -(1 << (8 * dtype.itemsize - 1)) if dtype.kind == "i" else 0
    mask = (1 << 8 * dtype.itemsize) - 1

    def get(row: _Row) -> Any:
        return row.columns[k][row.i]

    def put(row: _Row, value: Any) -> None:
        try:
            row.columns[k][row.i] = value
        except ValueError:  # as machines do: the low bits of what is too large
            row.columns[k][row.i] = ((value - low) & mask) + low

    return property(get, put)


@cache
def _row_of(dtype: np.dtype[Any]) -> type[_Row]:
    """The class of a record: a property for each field."""
    fields = {name: _field(k, dtype[name]) for k, name in enumerate(dtype.names or ())}
    return type("Row", (_Row,), {"__slots__": (), **fields})


def view(array: Any) -> Any:
    """What a kernel is given for an array."""
    return Rows(array) if array.dtype.names else memoryview(array)


class Plain:
    """A kernel, run by Python until a library of compiled ones is there."""

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:
        self.function, self.signature = function, signature
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self.compiled is None and _ready.arrived():
            self.compiled = _ready.kernel(self.signature)(self.function)
        if self.compiled is not None:
            return self.compiled(*arguments)
        return _here(self.function)(*map(_argument, arguments))


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return view(value)
    return value.item() if isinstance(value, np.generic) else value


_INNER: Final[set[Any]] = set()
"""Functions that only kernels call."""


@cache
def _copy_of(name: str) -> ModuleType:
    """A kernel module for plain Python; ``_module`` fills it."""
    return ModuleType(name)


_FILLING: Final = RLock()
"""Captures are read by threads: none may run a module's kernels while another one fills it."""


def _module(name: str) -> ModuleType:
    """A kernel module with its names as plain Python has them."""
    with _FILLING:
        copied = _copy_of(name)
        if "__builtins__" not in vars(
            copied
        ):  # nor is it filled again by a module that it uses and that uses it
            own = vars(sys.modules[name])
            vars(copied)["__builtins__"] = own["__builtins__"]
            vars(copied).update(
                [(each, _translated(value)) for each, value in own.items() if each[:2] != "__"]
            )
        return copied


@cache
def _here(function: Any) -> Any:
    """A kernel's function, or one that it calls, among its module's names as plain Python has them."""
    names = vars(_module(function.__module__))
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _translated(value: Any) -> Any:
    if value is np:
        return _Numbers
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return view(value)
    if isinstance(value, ModuleType) and value.__name__.startswith(__package__):
        return _module(value.__name__)
    return _here(value) if isinstance(value, FunctionType) and value in _INNER else value


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Plain]:
    """A function that Python calls."""
    return lambda function: Plain(function, signature)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only kernels call."""
    _INNER.add(function)
    return function


inlined = inner


def _loader(form: str) -> Callable[[Any, int], Any]:
    unpack = struct.Struct(form).unpack_from

    def load(data: Any, at: int) -> Any:
        return unpack(data, at)[0]

    return load


le16, le32, le64 = _loader("<H"), _loader("<I"), _loader("<q")
be16, be32, be64 = _loader(">H"), _loader(">I"), _loader(">q")


def _storer(form: str, size: int) -> Callable[[Any, int, int], None]:
    pack, mask = struct.Struct(form).pack_into, _BITS[size]

    def store(data: Any, at: int, value: int) -> None:
        pack(data, at, value & mask)

    return store


put8, put16, put32, put64 = _storer("=B", 1), _storer("=H", 2), _storer("=I", 4), _storer("=Q", 8)


def prefetch(data: Any, at: int) -> None:
    """Nothing: what this does for a cache, plain Python has no use for."""


prefetch_far = prefetch_row = prefetch


def _absent(*arguments: Any) -> Any:
    raise AssertionError("only compiled kernels do this")


acquire32 = acquire64 = release64 = _absent
copy32 = deal = which = lowest = least32 = _absent
DEALT: Final = _ready.DEALT


def arranger(*words: tuple[int, ...]) -> Callable[..., Any]:
    """What makes ``_numba.arranger``'s copies: only compiled kernels have runs of usual packets."""
    return _absent
