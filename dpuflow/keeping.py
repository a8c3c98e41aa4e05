"""Captures in, one column file each out: a folder that is analysed as the captures are, in less time.

A process a capture. A file says which captures it was made of, by their names, sizes and times of change:
what is there already, whole and of the same captures, is left as it is, so that after a failure it goes on.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.errors import CaptureError, DpuflowError, FormatError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.schema.tables import Vantage

SUFFIX: Final = ".dpuflow"


class Kept(NamedTuple):
    """What became of one vantage point: its column file, or why there is none."""

    vantage: str
    file: str
    messages: int = 0
    packets: int = 0
    fresh: bool = True
    """Whether it was read now, not found there."""
    warnings: tuple[str, ...] = ()
    error: str = ""


def keep_captures(vantages: Sequence[Vantage], folder: str, workers: int = 1) -> Iterator[Kept]:
    """Write ``folder``/NAME.dpuflow for each vantage point, in their order; one that cannot be read is told.

    Raises OptionError where two would have one name, OSError.
    """
    names = [vantage.name.replace(os.sep, "-") + SUFFIX for vantage in vantages]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"two vantage points would both be written to {name}: name them by --vantage")
    os.makedirs(folder, exist_ok=True)
    jobs = [(each, os.path.join(folder, name)) for each, name in zip(vantages, names, strict=True)]
    if min(workers, len(jobs)) <= 1:
        yield from (_keep(*job) for job in jobs)
        return
    from multiprocessing import get_context

    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn"), _die_of_interrupts) as pool:
        asked = [(pool.submit(_keep, *job), *job) for job in jobs]
        for told, vantage, file in asked:
            try:
                yield told.result()
            except BrokenProcessPool:
                yield Kept(vantage.name, file, error=f"{vantage.name}: its process was killed")


def _die_of_interrupts() -> None:
    """Ctrl-C ends a worker without a word: the command says it."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _keep(vantage: Vantage, file: str) -> Kept:
    """Read one vantage point, unless ``file`` holds it already."""
    from dpuflow import __version__
    from dpuflow.ingest import ingest
    from dpuflow.store.columns import load_tables, read_made_of, save_tables

    try:
        made_of = [__version__, vantage.name, *map(_identity, vantage.files)]
        if "-" not in vantage.files and os.path.isfile(file) and read_made_of(file) == made_of:
            try:
                tables = load_tables(file)
            except (CaptureError, FormatError):  # damaged, or of another version: it is made anew
                pass
            else:
                info = tables.info
                if not any(file in text for text in info.warnings):  # of damage
                    found = len(tables.messages), info.packets
                    return Kept(vantage.name, file, *found, False, tuple(info.warnings))
        tables = ingest(list(vantage.files), vantage.name)
        save_tables(tables, file, durable=True, made_of=made_of)
    except OSError as error:
        return Kept(vantage.name, file, error=f"{error.filename or file}: {error.strerror or error}")
    except (DpuflowError, MemoryError) as error:
        return Kept(vantage.name, file, error=str(error) or "out of memory")
    info = tables.info
    return Kept(vantage.name, file, len(tables.messages), info.packets, True, tuple(info.warnings))


def _identity(file: str) -> str:
    """A capture's name, size and time of change."""
    if file == "-":
        return file
    told = os.stat(file)
    return f"{os.path.abspath(file)} {told.st_size} {told.st_mtime_ns}"
