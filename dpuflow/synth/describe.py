"""The keys of a scenario: tables for docs/synth.md (``python -m dpuflow.synth.describe`` prints them), and
plain text for ``dpuflow synth --keys``.
"""

from __future__ import annotations

import textwrap
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Any

from dpuflow.errors import OptionError
from dpuflow.synth import scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 100


def _parts() -> Iterator[tuple[str, type[Any]]]:
    """Each mapping of a scenario and its title, in the order in which they nest."""
    yield "top level", scenario.Scenario
    for name in ("cluster", "nccl", "machine"):
        yield f"`{name}`", getattr(scenario, name.capitalize())
    for kind, cls in scenario.Job.KINDS.items():
        yield f"`job`, kind `{kind}`", cls
    yield "an operation (`job.ops`)", scenario.Operation
    yield "`clients`", scenario.Clients
    for kind, cls in scenario.Fault.KINDS.items():
        yield f"`faults`, kind `{kind}`", cls
    yield "`observation`", scenario.Observation
    yield "`observation.clocks`", scenario.Clocks


def tables() -> str:
    """Markdown: one table for each mapping of a scenario, in the order in which they nest."""
    return "\n\n".join(_table(*part) for part in _parts()) + "\n"


def plain(only: str | None = None) -> str:
    """The same for a terminal; ``only``: parts whose title has that word. Raises OptionError for none."""
    chosen = [(title.replace("`", ""), cls) for title, cls in _parts()]
    if only is not None:
        words = [part for part in chosen if only in part[0].replace(",", " ").split()]
        chosen = words or [part for part in chosen if only in part[0]]
    if not chosen:
        raise OptionError(f"{only}: no part of a scenario; dpuflow synth --keys shows all")
    found = []
    for title, cls in chosen:
        lines = [f"{title}: {(cls.__doc__ or '').strip().splitlines()[0]}"]
        for f in fields(cls):
            default = _default(f)
            about = _meaning(f) + (f" [{default}]" if default else "")
            lines += textwrap.wrap(
                about, WIDTH, initial_indent=f"  {f.name:<20} ", subsequent_indent=" " * 23
            )
        found.append("\n".join(lines))
    return "\n\n".join(found)


def _table(title: str, cls: type[Any]) -> str:
    about = (cls.__doc__ or "").strip().splitlines()[0]
    rows = [f"### {title}", "", about, "", "| key | default | meaning |", "| --- | --- | --- |"]
    rows += [f"| `{f.name}` | {_default(f)} | {_meaning(f)} |" for f in fields(cls)]
    return "\n".join(rows)


def _default(f: Field[Any]) -> str:
    if f.default is MISSING:
        return "required" if f.default_factory is MISSING else ""
    if f.default is None:
        return ""
    return str(f.default).lower() if isinstance(f.default, bool) else str(f.default)


def _meaning(f: Field[Any]) -> str:
    what, choices = str(f.metadata["what"]), f.metadata["choices"]
    return f"{what}: {', '.join(map(str, choices))}" if choices else what


if __name__ == "__main__":
    print(tables(), end="")
