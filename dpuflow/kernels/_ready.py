"""Kernels compiled beforehand: a shared library that needs neither Numba nor LLVM to be loaded.

``_build`` writes the library beside the bytecode cache, one for each state of the sources and kind of
processor; wheels and Debian packages bring one for any processor (BASELINE). Without either, or with
DPUFLOW_NUMBA set, Numba compiles and loads the kernels (``_numba``).
What a kernel module takes from ``_jit`` is here, too: types of signatures to check arguments with, and
empty stand-ins for what only the compiler needs.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

_KIND: Final = (
    *(b"vendor_id", b"cpu family", b"model", b"model name", b"stepping", b"flags"),  # x86
    *(
        b"Features",
        b"CPU implementer",
        b"CPU architecture",
        b"CPU variant",
        b"CPU part",
        b"CPU revision",
    ),  # arm64
)
BASELINE: Final = {
    "x86_64": ("x86-64-v2", {"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"}),
    "aarch64": ("generic", {"asimd"}),
}
"""Of each machine LLVM's name of the processor that a library is shipped for, and what /proc/cpuinfo lists
where it runs (x86-64 psABI, micro-architecture levels). A library for the very processor is no quicker."""
_FOLDER: Final = Path(__file__).resolve().parent
_SOURCES: Final = ("kernels", "schema", "wire")


@cache
def source_stamp() -> str:
    """A digest of everything that compiled code depends on besides the compiler and the processor."""
    package = _FOLDER.parent
    digest = hashlib.sha256()
    for path in sorted(
        [*_FOLDER.glob("*.py"), *(package / "wire").glob("*.py"), *(package / "schema").glob("*.py")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _processor() -> list[bytes]:
    """The first processor's kind: lines of /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(16384).split(b"\n\n")[0]
    except OSError:
        return []
    return [line for line in first.splitlines() if line.split(b":")[0].strip() in _KIND]


def _processor_stamp() -> str:
    """A digest of the processor's kind: the code is made for it."""
    return hashlib.sha256(b"\n".join([os.uname().machine.encode(), *_processor()])).hexdigest()


def shipped_path() -> Path:
    """Where the library for these sources and any processor of this machine is, if it was shipped."""
    return _FOLDER / f"shipped-{os.uname().machine}-{source_stamp()[:20]}.so"


def suits(flags: set[str]) -> bool:
    """Whether a shipped library runs on a processor with ``flags``."""
    return BASELINE.get(os.uname().machine, ("", {"none"}))[1] <= flags


def _flags() -> set[str]:
    """What /proc/cpuinfo says that this processor can do."""
    lines = [line.decode().partition(":") for line in _processor()]
    return {
        word for name, _, words in lines if name.strip() in ("flags", "Features") for word in words.split()
    }


def library_path() -> Path:
    """Where the library for these sources and this processor is, or would be."""
    return _FOLDER / "__pycache__" / f"kernels-{_processor_stamp()[:12]}-{source_stamp()[:20]}.so"


def symbol(function: Any) -> str:
    """The name of a kernel in the library."""
    return f"{function.__module__}.{function.__qualname__}".replace(".", "_")


def _open() -> ctypes.CDLL | None:
    if os.environ.get("DPUFLOW_NUMBA") or os.environ.get("DPUFLOW_PLAIN"):
        return None
    for path in [library_path(), *([shipped_path()] if suits(_flags()) else [])]:
        with suppress(OSError):  # not built, or not for this system
            return ctypes.CDLL(str(path))
    return None


LIBRARY = _open()

PLAIN = bool(os.environ.get("DPUFLOW_PLAIN"))
"""Whether kernels run as plain Python (``_plain``): what decides does so before it imports any."""

beside: dict[str, subprocess.Popen[bytes]] = {}
"""By kernel (``symbol``), the process that compiles it while this one compiles another."""


def compile_beside(module: str, name: str) -> None:
    """Have a process of its own compile a kernel that will be needed next; Numba's cache hands it over."""
    key = f"{module}.{name}".replace(".", "_")
    if key in beside:
        return
    code = f"from {module} import {name}; {name}.dispatcher"
    with suppress(OSError):
        beside[key] = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {"DPUFLOW_NUMBA": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def cached_path() -> Path:
    """What is there once Numba's cache has all kernels, where no library can be linked."""
    return library_path().with_suffix(".cached")


def undecided() -> bool:
    """Whether nothing is compiled, and nobody has said what then (DPUFLOW_NUMBA, DPUFLOW_PLAIN)."""
    asked = PLAIN or os.environ.get("DPUFLOW_NUMBA")
    return LIBRARY is None and not asked and not cached_path().exists()


def run_plainly() -> bool:
    """Run kernels as plain Python, have them compiled by a process that outlives this one; whether it runs.

    Before any kernel is imported. Another process may be at it already; an installation that cannot be
    written to stays without.
    """
    global PLAIN
    PLAIN = True
    try:
        library_path().parent.mkdir(exist_ok=True)
        with open(library_path().with_name("compiling.lock"), "w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the new process holds it until it ends
            subprocess.Popen(
                [sys.executable, "-c", _WARM], env=os.environ | {"DPUFLOW_NUMBA": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[lock.fileno()], start_new_session=True,
            )  # fmt: skip
    except OSError:
        return False
    return True


_WARM: Final = "import os; os.nice(10); from dpuflow.kernels import warm; warm()"


def arrived() -> bool:
    """Whether the library was built since this process started; it is open then."""
    global LIBRARY
    if LIBRARY is None and library_path().exists():
        LIBRARY = _open()
    return LIBRARY is not None


class _Type:
    """A type in a signature: a number, or an array where it is indexed; called, it makes a signature."""

    def __init__(self, dtype: np.dtype[Any] | None, dimensions: int = 0) -> None:
        self.dtype, self.dimensions = dtype, dimensions

    def __getitem__(self, index: Any) -> _Type:
        return _Type(self.dtype, len(index) if isinstance(index, tuple) else 1)

    def __call__(self, *arguments: _Type) -> tuple[_Type, tuple[_Type, ...]]:
        return self, arguments


def from_dtype(dtype: np.dtype[Any]) -> _Type:
    """The type of a record."""
    return _Type(dtype)


u1, u2, u4, u8 = (_Type(np.dtype(name)) for name in ("u1", "u2", "u4", "u8"))
i4, i8, f8 = _Type(np.dtype("i4")), _Type(np.dtype("i8")), _Type(np.dtype("f8"))
void = _Type(None)


class Kernel:
    """A function of the library: its arguments go over as one row of words, arrays as their objects."""

    def __init__(self, library: ctypes.CDLL, name: str, result: _Type, arguments: tuple[_Type, ...]) -> None:
        self.name, self.count = name, len(arguments)
        self.arrays = [(k, t.dtype, t.dimensions) for k, t in enumerate(arguments) if t.dimensions]
        self.numbers = [k for k, t in enumerate(arguments) if not t.dimensions]
        self.void = result is void
        self.words = ctypes.c_int64 * len(arguments)
        self.entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
            (name, library)
        )

    def __call__(self, *arguments: Any) -> Any:
        return self._enter(self._words_of(arguments))

    def bound(self, *arguments: Any) -> Callable[[], Any]:
        """The kernel with these arguments, checked once; arrays may change in content only."""
        words = self._words_of(arguments)
        kept = arguments  # the words are addresses of these

        def call() -> Any:
            assert kept
            return self._enter(words)

        return call

    def _words_of(self, arguments: tuple[Any, ...]) -> Any:
        """The row of words, after a look at the arguments' types."""
        if len(arguments) != self.count:
            raise TypeError(f"{self.name} takes {self.count} arguments, not {len(arguments)}")
        for k, dtype, dimensions in self.arrays:
            array = arguments[k]
            fits = array.dtype is dtype or array.dtype == dtype
            if not (fits and array.ndim == dimensions and array.flags.carray):
                raise TypeError(f"{self.name}, argument {k}: not a {dimensions}-dimensional array of {dtype}")
        words = list(map(id, arguments))
        for k in self.numbers:
            words[k] = int(arguments[k])
        return self.words(*words)

    def _enter(self, words: Any) -> Any:
        result, error = ctypes.c_int64(), ctypes.c_void_p()
        status = self.entry(ctypes.byref(result), ctypes.byref(error), words)
        if status:
            raise RuntimeError(f"{self.name} failed with status {status}")
        return None if self.void else result.value


def bound(kernel: Any, *arguments: Any) -> Callable[[], Any]:
    """A kernel of either kind with its arguments, for many calls with the same arrays."""
    return kernel.bound(*arguments) if isinstance(kernel, Kernel) else partial(kernel, *arguments)


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The library's function of that name, for exactly this signature; releases the GIL."""
    assert LIBRARY is not None  # ``_jit`` looks
    library = LIBRARY
    return lambda function: Kernel(library, symbol(function), *signature)


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only kernels call: here nobody does."""
    return function


inlined = inner
le16 = le32 = le64 = be16 = be32 = be64 = inner
acquire32 = acquire64 = release64 = inner
put8 = put16 = put32 = put64 = copy32 = prefetch = prefetch_far = prefetch_row = inner
deal = which = lowest = least32 = inner
DEALT: Final = 16


def arranger(*words: tuple[int, ...]) -> Callable[..., Any]:
    """What makes ``_numba.arranger``'s copies: here nobody calls them."""
    return inner
