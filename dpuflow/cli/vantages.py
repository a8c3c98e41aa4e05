"""Vantage points from the command line: file names and NAME=FILE,FILE in, ``Vantage`` out."""

from __future__ import annotations

import os
import re
from datetime import datetime, timezone
from pathlib import PurePath

import click

from dpuflow.schema.tables import Vantage

_SUFFIXES = re.compile(r"\.(pcapng|pcap|cap|gz|zst)$", re.IGNORECASE)


def vantages_from(
    captures: tuple[str, ...],
    named: tuple[str, ...],
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> list[Vantage]:
    """One vantage point for each capture and one for each NAME=FILE,FILE.

    Unnamed ones are called by their file's name without suffixes, with as much of the path as
    tells them apart. A folder is an agent's history: one vantage point for each node in it, with the files of
    that time. Raises click.UsageError, DpuflowError.
    """
    folders = [name for name in captures if os.path.isdir(name)]
    captures = tuple(name for name in captures if name not in folders)
    if not folders and (since_ns is not None or until_ns is not None):
        raise click.UsageError("--since and --until choose from a folder, an agent's history: name one.")
    vantages = [Vantage(name, (file,)) for name, file in zip(_names(captures), captures, strict=True)]
    for folder in folders:
        vantages += _history(folder, since_ns, until_ns)
    vantages += [_parse(text) for text in named]
    files = [file for vantage in vantages for file in vantage.files]
    if not files:
        raise click.UsageError("Name at least one CAPTURE, or - for standard input.")
    for what, values in (("file", files), ("vantage point", [v.name for v in vantages])):
        for value in values:
            if values.count(value) > 1:
                raise click.UsageError(f"The {what} {value!r} is given twice.")
    return vantages


def _history(folder: str, since_ns: int | None, until_ns: int | None) -> list[Vantage]:
    """The vantage points of a folder. Raises FormatError where there are none."""
    from dpuflow.errors import FormatError
    from dpuflow.store.segments import between, list_segments

    every = list_segments(folder)
    if not every:
        raise FormatError(folder, "a folder without an agent's history (files NODE-TIME-FROM-TO.dpuflow)")
    chosen = between(every, since_ns, until_ns)
    if not chosen:
        first, last = min(s.start_ns for s in every), max(s.end_ns for s in every)
        raise FormatError(folder, f"holds nothing of that time, only {_time(first)} to {_time(last)}")
    names = dict.fromkeys(segment.vantage for segment in chosen)
    return [Vantage(name, tuple(s.path for s in chosen if s.vantage == name)) for name in names]


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class Moment(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A time as 2026-11-21T16:30:00 (of this machine's zone unless it names one), in ns since the epoch."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds since the epoch."""
        text = re.sub(r"Z$", "+00:00", str(value).strip())
        try:
            return round(datetime.fromisoformat(text).timestamp() * 1e6) * 1000
        except ValueError:
            self.fail(f"{value!r} is no time: write 2026-11-21T16:30:00 or 2026-11-21T16:30:00Z.", param, ctx)


def _parse(text: str) -> Vantage:
    name, equals, rest = text.partition("=")
    files = tuple(rest.split(","))
    if not name or not equals or not all(files):
        raise click.BadParameter(f"{text!r} is not NAME=FILE or NAME=FILE,FILE.", param_hint="'--vantage'")
    return Vantage(name, files)


def _names(files: tuple[str, ...]) -> list[str]:
    paths = [PurePath("stdin" if file == "-" else _stem(file)) for file in files]
    names = [path.name for path in paths]
    depth = 1
    while len(set(names)) < len(names) and depth < max(len(path.parts) for path in paths):
        depth += 1
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def _stem(file: str) -> str:
    while (shorter := _SUFFIXES.sub("", file)) not in ("", file) and PurePath(shorter).name:
        file = shorter
    return file
