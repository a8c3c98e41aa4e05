"""Vantage points from the command line: file names and NAME=FILE,FILE in, ``Vantage`` out."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime

import click

from dpuflow.schema.tables import Vantage
from dpuflow.vantages import vantages_of


def vantages_from(
    captures: tuple[str, ...],
    named: tuple[str, ...],
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> list[Vantage]:
    """The vantage points of captures (``vantages_of``), and one for each NAME=FILE,FILE.

    Raises click.UsageError, DpuflowError.
    """
    folders = any(os.path.isdir(name) for name in captures)
    if not folders and (since_ns is not None or until_ns is not None):
        raise click.UsageError("--since and --until need an agent's history: name its folder.")
    vantages = vantages_of([*captures, *map(_parse, named)], since_ns, until_ns)
    files = [file for vantage in vantages for file in vantage.files]
    if not files:
        raise click.UsageError("Name at least one CAPTURE, or - for standard input.")
    hint = " Call them apart: --vantage NAME=FILE."
    for what, values, do in (("file", files, ""), ("vantage point", [v.name for v in vantages], hint)):
        for value in values:
            if values.count(value) > 1:
                raise click.UsageError(f"The {what} {value!r} is given twice.{do}")
    return vantages


class Moment(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A time in ns since the epoch: 2026-11-21T16:30:00 (of this machine's zone unless it names one), or
    -5m, five minutes ago."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Nanoseconds since the epoch."""
        from dpuflow.settings import read_duration

        text = re.sub(r"Z$", "+00:00", str(value).strip())
        try:
            if text.startswith("-"):
                return time.time_ns() - round(read_duration(text[1:]) * 1e9)
            return round(datetime.fromisoformat(text).timestamp() * 1e6) * 1000
        except ValueError:
            self.fail(
                f"{value!r} is not a time: write 2026-11-21T16:30:00, 2026-11-21T16:30:00Z or -5m.",
                param,
                ctx,
            )


def _parse(text: str) -> Vantage:
    name, equals, rest = text.partition("=")
    files = tuple(rest.split(","))
    if not name or not equals or not all(files):
        raise click.BadParameter(f"{text!r} is not NAME=FILE or NAME=FILE,FILE.", param_hint="'--vantage'")
    return Vantage(name, files)
