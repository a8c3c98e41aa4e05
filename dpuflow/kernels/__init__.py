"""Compiled loops over plain arrays. Importing this package compiles and imports nothing."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing.TYPE_CHECKING: every command imports this
if TYPE_CHECKING:
    from collections.abc import Callable

when_compiling: list[Callable[[int, float], None]] = []
"""What to call, again and again, while Numba compiles kernels and somebody waits for it: with the number of
kernels so far and the seconds that the present one has taken."""


def load_all() -> list[str]:
    """Import every kernel module; returns their names. Compiles nothing."""
    from importlib import import_module
    from pkgutil import iter_modules

    # A shipped library of compiled kernels (``_build``) is no module.
    names = sorted(m.name for m in iter_modules(__path__) if m.name.isidentifier() and m.name[0] != "_")
    for name in names:
        import_module(f"{__name__}.{name}")
    return names


def warm() -> list[str]:
    """Compile, or load from the cache, every kernel, and build their library; returns the modules' names."""
    names = load_all()
    from dpuflow.kernels import _ready

    if _ready.LIBRARY is None:
        from dpuflow.kernels import _build

        if _build.build() is None:  # no linker: Numba's cache has to do
            _build.compile_all()
            _ready.cached_path().touch()
    return names
