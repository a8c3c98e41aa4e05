"""Dataclasses and named tuples as the standard library makes them, in a third of the time.

That one compiles a comparison, a text and more for each class, and each annotation of a named tuple, at each
start anew: for two hundred classes as long as a short analysis takes. Here all dataclasses share these, and
``frozen`` is the type checker's to keep.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from typing import NamedTuple as NamedTuple
else:
    import dataclasses
    from collections import namedtuple
    from functools import cache
    from operator import attrgetter

    def dataclass(cls=None, /, *, eq=True, repr=True, frozen=False, **options):
        """``dataclasses.dataclass``."""

        def made(cls):
            shared = {}
            if repr:
                shared["__repr__"] = _text
            if eq:
                shared |= {"__eq__": _is_like, "__hash__": _hash if frozen else None}
            for name, method in shared.items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            cls.__doc__ = (
                cls.__doc__ or cls.__name__
            )  # else it became the signature, which takes long to write
            return dataclasses.dataclass(eq=False, repr=False, **options)(cls)

        return made if cls is None else made(cls)

    @cache
    def _compared_of(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
        return (
            attrgetter(*names) if len(names) > 1 else lambda row: tuple(getattr(row, name) for name in names)
        )

    def _compared(row):
        return _compared_of(type(row))(row)

    def _is_like(row, other):
        return _compared(row) == _compared(other) if other.__class__ is row.__class__ else NotImplemented

    def _hash(row):
        return hash(_compared(row))

    def _text(row):
        shown = (field.name for field in dataclasses.fields(row) if field.repr)
        return f"{type(row).__qualname__}({', '.join(f'{name}={getattr(row, name)!r}' for name in shown)})"

    class _Named(type):
        def __new__(cls, name, bases, members):
            fields = members.get("__annotations__", {})
            defaults = [members[field] for field in fields if field in members]
            made = namedtuple(name, fields, defaults=defaults, module=members["__module__"])
            made.__annotations__ = fields
            for each, value in members.items():
                if each not in fields and each not in ("__module__", "__annotations__"):
                    setattr(made, each, value)
            return made

    NamedTuple = type.__new__(_Named, "NamedTuple", (), {})
