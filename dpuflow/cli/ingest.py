"""``dpuflow ingest``: captures in, column files out."""

from __future__ import annotations

import os

import click

from dpuflow.cli import one_line

EPILOG = """\b
Examples:
  Read the captures once, analyse them as often as you like:
    dpuflow ingest captures/ -o tables
    dpuflow analyze tables
  After new captures arrived, or one failed, the same command reads only what is missing:
    dpuflow ingest captures/ -o tables

A file is written whole or not at all. Exit status: 1 where a capture could not be read; the others are."""


@click.command(epilog=EPILOG)
@click.argument("captures", metavar="CAPTURE...", nargs=-1)
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    required=True,
    type=click.Path(file_okay=False),
    help="Where the column files go.",
)
@click.option(
    "--vantage",
    "named",
    metavar="NAME=FILE,FILE",
    multiple=True,
    help="A named vantage point and its files in order (rotated, or one per interface).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Captures to read in parallel, a process each (default: one per core).",
)
@click.option("--quiet", is_flag=True, help="Warnings and errors only.")
def ingest(
    captures: tuple[str, ...], folder: str, named: tuple[str, ...], workers: int | None, quiet: bool
) -> None:
    """Reduce captures to column files: what "dpuflow analyze" needs of them, a fraction of their size.

    CAPTURE is what "dpuflow analyze" takes. Each vantage point becomes DIR/NAME.dpuflow; the analysis of DIR
    is that of the captures. Captures that have not changed since are not read again.
    """
    from dpuflow.cli.compiling import mind_compiling
    from dpuflow.cli.progress import ProgressLine
    from dpuflow.cli.targets import check_target
    from dpuflow.cli.vantages import vantages_from
    from dpuflow.errors import DpuflowError
    from dpuflow.keeping import keep_captures
    from dpuflow.schema.tables import SUFFIX

    vantages = vantages_from(captures, named)
    for vantage in vantages:
        target = os.path.join(folder, vantage.name.replace(os.sep, "-") + SUFFIX)
        check_target(target, "--output", vantage.files, makes_captures=True)
    failed, workers = 0, min(workers or os.cpu_count() or 1, len(vantages))
    with ProgressLine(enabled=not quiet) as progress:
        mind_compiling(vantages, workers, None if quiet else progress)
        for kept in keep_captures(vantages, folder, workers):
            for text in [*kept.warnings, kept.error]:
                if text:
                    click.echo(f"dpuflow: {one_line(text)}", err=True)
            failed += bool(kept.error)
            if not quiet and not kept.error:
                there = "" if kept.fresh else " (was there)"
                file = one_line(kept.file)
                click.echo(f"{file}: {kept.messages:,} messages of {kept.packets:,} packets{there}")
    if failed:
        raise DpuflowError(f"{failed} of {len(vantages)} captures could not be read")
