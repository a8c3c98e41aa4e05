"""The ``dpuflow`` command's front door: arguments in, exit status out; errors become one sentence here.

Nothing heavy is imported: ``dpuflow --help`` prints a committed text (``help.txt``, which a test
compares with what click would print), and everything else goes on to ``commands``.
Exit status: 0 fine, 1 the input or the environment is at fault, 2 wrong usage, 3 ``--fail-on`` was met,
130 interrupted, 141 the reader of standard output went away (as the shell reports SIGPIPE).
"""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, whose import is a third of what --help may cost
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130
PIPE_CLOSED = 141
COMPLETE = "_DPUFLOW_COMPLETE"
COLLECT_AFTER = 100_000


def main() -> NoReturn:
    """Run with ``sys.argv`` and end the process."""
    # NumPy's linear algebra is not used, yet its threads would spin at every start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Modules and results live on: looking for cycles among them every 700 objects is time lost.
    gc.set_threshold(COLLECT_AFTER, 10, 10)
    _fill_closed()
    try:
        status = run(sys.argv[1:])
        # All is done or said: a Ctrl-C from here on must not make it look as if it were not.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        status = _fail("interrupted", INTERRUPTED)
    # Interrupted, reader threads may be in the middle of a block; nothing they hold needs saving. Nor does
    # an analysis that has written its result: taking modules and tables apart is a tenth of a short one.
    if status == INTERRUPTED or (status == 0 and sys.argv[1:2] == ["analyze"]):
        try:
            sys.stderr.flush()
        finally:
            os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status. Prints, never raises."""
    try:
        status = _help() if arguments in (["--help"], ["-h"]) else _command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        _discard_output()
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}", 1)
    except MemoryError:
        return _fail("out of memory", 1)
    return status


def _fill_closed() -> None:
    """Let streams that the caller has closed be empty, lest a capture take their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _help() -> int:
    path = os.path.join(os.path.dirname(__file__), "help.txt")
    with open(path, encoding="utf-8") as file:
        sys.stdout.write(file.read())
    return 0


def _command(arguments: list[str]) -> int:
    import click

    from dpuflow.cli.commands import dpuflow
    from dpuflow.errors import DpuflowError

    try:
        status = dpuflow.main(arguments, prog_name="dpuflow", standalone_mode=False)
        if isinstance(status, int):  # as click tells of an Exit here
            return status
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.exceptions.Abort:  # click's own word for Ctrl-C
        return _fail("interrupted", INTERRUPTED)
    except SystemExit as end:
        if COMPLETE in os.environ:  # a shell asked what may follow, and was told
            return int(end.code or 0)
        raise BrokenPipeError from None  # as click ends where the reader of the output went away
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except DpuflowError as error:
        return _fail(str(error), error.exit_status)
    return 0


def _fail(sentence: str, status: int) -> int:
    print(f"dpuflow: {one_line(sentence)}", file=sys.stderr, flush=True)
    return status


def one_line(text: str) -> str:
    """``text`` fit for a terminal: names of files, which it may quote, can hold anything."""
    return "".join(each if each.isprintable() else "\ufffd" for each in " ".join(text.split()))


def _discard_output() -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not fail again."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # not a file of the process: a test's buffer
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
