"""Vantage points from the command line: file names and NAME=FILE,FILE in, ``Vantage`` out."""

from __future__ import annotations

import re
from pathlib import PurePath

import click

from dpuflow.tables import Vantage

_SUFFIXES = re.compile(r"\.(pcapng|pcap|cap|gz|zst)$", re.IGNORECASE)


def vantages_from(captures: tuple[str, ...], named: tuple[str, ...]) -> list[Vantage]:
    """One vantage point for each capture and one for each NAME=FILE,FILE.

    Unnamed ones are called by their file's name without suffixes, with as much of the path as
    tells them apart. Raises click.UsageError.
    """
    vantages = [Vantage(name, (file,)) for name, file in zip(_names(captures), captures, strict=True)]
    vantages += [_parse(text) for text in named]
    files = [file for vantage in vantages for file in vantage.files]
    if not files:
        raise click.UsageError("Name at least one CAPTURE, or - for standard input.")
    for what, values in (("file", files), ("vantage point", [v.name for v in vantages])):
        for value in values:
            if values.count(value) > 1:
                raise click.UsageError(f"The {what} {value!r} is given twice.")
    return vantages


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
