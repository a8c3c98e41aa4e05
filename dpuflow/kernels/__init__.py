"""Compiled loops over plain arrays. Importing this package compiles and imports nothing."""

from __future__ import annotations


def warm() -> list[str]:
    """Compile, or load from the cache, every kernel module, and build their library; returns their names."""
    from importlib import import_module
    from pkgutil import iter_modules

    names = sorted(m.name for m in iter_modules(__path__) if not m.name.startswith("_"))
    for name in names:
        import_module(f"{__name__}.{name}")
    from dpuflow.kernels import _ready

    if _ready.LIBRARY is None:
        from dpuflow.kernels._build import build

        build()
    return names
