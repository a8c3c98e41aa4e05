"""What a command line calls a result: a saved one, a job of a Parquet data set, captures or a span."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dpuflow.results import Analysis


def result_of(text: str) -> Analysis:
    """The result that ``text`` names: RESULT.json; FOLDER of tables or FOLDER@JOB of a data set; a folder of
    captures or of an agent's history, or FOLDER@SINCE..UNTIL of it. Raises click.UsageError, DpuflowError,
    OSError."""
    import dpuflow

    folder, _, part = (text, "", "") if os.path.exists(text) else text.rpartition("@")
    if not folder or not os.path.isdir(folder):
        return dpuflow.load(text)
    if ".." in part or not _holds_tables(folder):
        return _analysed(folder, part)
    from dpuflow.reports.parquet import read_tables

    return read_tables(folder, part)


def _holds_tables(folder: str) -> bool:
    return any(next(Path(folder).glob(f"{way}*.parquet"), None) for way in ("", "collectives/day=*/job=*/"))


def _analysed(folder: str, part: str) -> Analysis:
    """Captures read anew, as ``dpuflow analyze`` does without options."""
    import dpuflow
    from dpuflow.cli.vantages import Moment, vantages_from

    since, dots, until = part.partition("..")
    if part and not dots:
        raise click.UsageError(f"{folder} holds no tables: after @ comes SINCE..UNTIL, not {part!r}.")
    begin, end = (Moment().convert(each, None, None) if each else None for each in (since, until))
    return dpuflow.analyze(vantages_from((folder,), (), begin, end))
