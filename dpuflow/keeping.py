"""Captures in, one column file each out, a process a capture: to be analysed at once, or a folder to keep.

Such a folder is analysed as the captures are, in less time. A file says which captures it was made of, by
their names, sizes and times of change: what is there already, whole and of the same captures, is left as it
is, so that after a failure it goes on.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.errors import CaptureError, DpuflowError, FormatError, OptionError
from dpuflow.schema.tables import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import TypeVar

    from dpuflow.schema.tables import CaptureTables, Vantage

    Told = TypeVar("Told")
    Progress = Callable[[str, int, int], None]


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
    for told, (vantage, file) in zip(in_processes(_keep, jobs, workers), jobs, strict=True):
        yield told or Kept(vantage.name, file, error=f"{vantage.name}: {KILLED}")


def read_by_workers(
    vantages: Sequence[Vantage], workers: int, progress: Progress | None = None
) -> tuple[list[CaptureTables], list[str]]:
    """All vantage points, each read by one of ``workers`` processes; sentences on those that are left out.

    What passes from process to process are column files. Left out is a vantage point whose process was
    killed, and another one's as well. Standard input is read here. Raises what ``ingest`` does.
    """
    from dpuflow.ingest import ingest
    from dpuflow.store.columns import load_tables

    found: list[CaptureTables] = []
    left_out: list[str] = []
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="dpuflow-"))
        files = [os.path.join(folder, f"{number}{SUFFIX}") for number in range(len(vantages))]
        apart = [job for job in zip(vantages, files, strict=True) if "-" not in job[0].files]
        done = stack.enter_context(closing(in_processes(_reduce, apart, workers)))
        for number, (vantage, file) in enumerate(zip(vantages, files, strict=True)):
            if "-" in vantage.files:
                found.append(ingest(list(vantage.files), vantage.name, len(found)))
            elif next(done):
                found.append(load_tables(file))
                found[-1].info.id = len(found) - 1
                os.unlink(file)
            else:
                left_out.append(f"{vantage.name} ({', '.join(vantage.files)}) is left out: {KILLED}.")
            if progress is not None:
                progress("reading", number + 1, len(vantages))
    if not found:
        raise DpuflowError(left_out[0].rstrip("."))
    return found, left_out


KILLED: Final = "the process that read it was killed, and so was a second one (is there too little memory?)"


def in_processes(
    call: Callable[..., Told], jobs: Sequence[tuple[object, ...]], workers: int
) -> Generator[Told | None]:
    """What ``call`` gives for each of ``jobs``, in their order, in ``workers`` processes.

    One that is killed takes the others down, too: what was under way is done again, each by itself. None for
    those whose process is killed then. Raises what ``call`` raises.
    """
    from multiprocessing import get_context

    from dpuflow.kernels import _ready

    def pool(size: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(size, get_context("spawn"), _begin, (_ready.PLAIN,))

    if not jobs:
        return
    with pool(min(workers, len(jobs))) as several:
        asked = [several.submit(call, *job) for job in jobs]
        try:
            for told, job in zip(asked, jobs, strict=True):
                try:
                    yield told.result()
                except (BrokenProcessPool, MemoryError):
                    with pool(1) as alone:
                        try:
                            again = alone.submit(call, *job).result()
                        except (BrokenProcessPool, MemoryError):
                            again = None
                    yield again
        except BaseException:
            several.shutdown(cancel_futures=True)
            raise


def _reduce(vantage: Vantage, file: str) -> bool:
    """Read one vantage point into a column file."""
    from dpuflow.ingest import ingest
    from dpuflow.store.columns import save_tables

    save_tables(ingest(list(vantage.files), vantage.name), file)
    return True


def _begin(plain: bool) -> None:
    """Kernels run as in the process that asked. Ctrl-C ends a worker without a word: the command says it."""
    import signal

    from dpuflow.kernels import _ready

    _ready.PLAIN = plain
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
