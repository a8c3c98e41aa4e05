"""The keys of a scenario as tables for docs/synth.md: ``python -m dpuflow.synth.describe`` prints them."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from dpuflow.synth import scenario


def tables() -> str:
    """Markdown: one table for each mapping of a scenario, in the order in which they nest."""
    parts = [_table("top level", scenario.Scenario)]
    for name in ("cluster", "nccl", "machine"):
        parts.append(_table(f"`{name}`", getattr(scenario, name.capitalize())))
    for kind, cls in scenario.Job.KINDS.items():
        parts.append(_table(f"`job`, kind `{kind}`", cls))
    parts.append(_table("an operation (`job.ops`)", scenario.Operation))
    parts.append(_table("`clients`", scenario.Clients))
    for kind, cls in scenario.Fault.KINDS.items():
        parts.append(_table(f"`faults`, kind `{kind}`", cls))
    parts.append(_table("`observation`", scenario.Observation))
    parts.append(_table("`observation.clocks`", scenario.Clocks))
    return "\n\n".join(parts) + "\n"


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
