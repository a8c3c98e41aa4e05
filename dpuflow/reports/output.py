"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replacing(target: str) -> Iterator[IO[str]]:
    """A text file that takes the name ``target`` when the block ends well, and is gone when it does not.

    ``-`` is standard output; devices and pipes are written as they are.
    """
    if target == "-":
        with naming("standard output"):
            _check_open()
            yield sys.stdout
            sys.stdout.flush()
        return
    with naming(target):
        yield from _written(target, "w")


@contextmanager
def replacing_bytes(target: str) -> Iterator[IO[bytes]]:
    """``replacing`` for bytes."""
    if target == "-":
        with naming("standard output"):
            _check_open()
            yield sys.stdout.buffer
            sys.stdout.flush()
        return
    with naming(target):
        yield from _written(target, "wb")


def _check_open() -> None:
    """Raise OSError where the caller has closed standard output, which then stands for nothing."""
    if getattr(sys.stdout, "name", None) == os.devnull:
        raise OSError(None, "is closed")  # ours, not what the system says of the number


@contextmanager
def naming(target: str) -> Iterator[None]:
    """Let errors of writing name ``target``: what a full disk says names no file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:  # a library may have said more in the place of the reason
            said = error.strerror if error.errno is None else os.strerror(error.errno)
            raise OSError(error.errno, said, target) from None
        raise


def _written(target: str, how: str) -> Iterator[IO[Any]]:
    encoding = None if "b" in how else "utf-8"
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with open(target, how, encoding=encoding) as file:
            yield file
        return
    path = os.path.realpath(target)  # a link stays one
    try:
        number, partial = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None
    try:
        with os.fdopen(number, how, encoding=encoding) as file:
            yield file
        os.chmod(partial, _permissions(mode))
        os.replace(partial, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def _permissions(mode: int | None) -> int:
    """Those of the file that is replaced, or what a new file gets."""
    if mode is not None:
        return stat.S_IMODE(mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
