"""The history's folder: which files in it are a history's, whose it is, and one agent a vantage point.

In: a folder's name, the account that the agent goes on as. Out: the folder, that account's, or one sentence
on why it cannot be. A folder that holds anything but a history is nobody's to take over: it stays as it is,
and is refused unless the account may write there already.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.store.segments import is_segment_name, place_name

if TYPE_CHECKING:
    import pwd
    from collections.abc import Iterator

DAMAGED: Final = ".damaged"
FINDINGS: Final = "findings.jsonl"
FINDINGS_BEFORE: Final = FINDINGS + ".1"
UNFINISHED: Final = ".new"
_LOCK: Final = re.compile(r"\.[\w.-]+\.lock")
_ALSO: Final = "lost+found"
"""At the top of a file system of its own; it is no one's history, and stays root's."""


def written_here(name: str) -> bool:
    """Whether a history itself writes files of that name."""
    if name in (FINDINGS, FINDINGS_BEFORE) or _LOCK.fullmatch(name):
        return True
    return any(is_segment_name(name.removesuffix(end)) for end in ("", UNFINISHED, DAMAGED))


def claim(folder: str, vantage: str) -> int | None:
    """Make the folder and hold this vantage point's history in it: a descriptor, whose end lets go.

    None where the folder cannot be used now. Raises DpuflowError where another agent holds it: two would
    merge and remove each other's files.
    """
    try:
        os.makedirs(folder, mode=0o750, exist_ok=True)
        held = os.open(_lock(folder, vantage), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        if error.errno != errno.EWOULDBLOCK:
            return None
        raise DpuflowError(
            f"history.directory: {folder}: another agent already writes the history of {vantage}"
            " there: stop it, or set another folder"
        ) from None
    return held


def release(held: int | None) -> None:
    """Let go of what ``claim`` gave."""
    if held is not None:
        os.close(held)


def is_claimed(folder: str, vantage: str) -> bool:
    """Whether an agent writes this vantage point's history there now; nothing is made."""
    try:
        held = os.open(_lock(folder, vantage), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(held)
    return False


def _lock(folder: str, vantage: str) -> str:
    return os.path.join(folder, f".{place_name(vantage)}.lock")


def hand_over(folder: str, account: pwd.struct_passwd) -> None:
    """As root: make the folder the account's, and root's files of a history in it. Raises OptionError.

    What cannot be made is told where the history begins, as for any other user.
    """
    with suppress(OSError):
        os.makedirs(folder, mode=0o750, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if _others(folder, held, account):
                return
            for name in filter(written_here, os.listdir(held)):
                about = os.stat(name, dir_fd=held, follow_symlinks=False)
                if stat.S_ISREG(about.st_mode) and about.st_uid == 0 and about.st_nlink == 1:
                    os.chown(name, account.pw_uid, account.pw_gid, dir_fd=held, follow_symlinks=False)
            os.fchown(held, account.pw_uid, account.pw_gid)
        finally:
            os.close(held)


def _others(folder: str, held: int, account: pwd.struct_passwd) -> bool:
    """Whether it holds others' files and is to stay as it is. OptionError where the account may not write."""
    names = sorted(name for name in os.listdir(held) if not written_here(name) and name != _ALSO)
    if not names or os.fstat(held).st_uid == account.pw_uid:
        return False
    try:
        with acting_as(account):
            _write_in(folder)
    except OSError:
        raise OptionError(
            f"history.directory: {folder}: holds {names[0]}, which is not a history's, and is not handed"
            f" over to {account.pw_name}: set a folder of its own, or let {account.pw_name} write there"
        ) from None
    return True


def check_folder(folder: str, account: pwd.struct_passwd | None) -> str | None:
    """What is to be said of a folder for the history before the agent runs. Raises OptionError.

    ``account``: whom the agent becomes (None: it stays who this is). All is tried, and nothing stays changed.
    """
    made: list[str] = []
    try:
        _make(folder, made)
        if account is not None:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if made:
                    os.fchown(held, account.pw_uid, account.pw_gid)
                kept = _others(folder, held, account)
            finally:
                os.close(held)
            with acting_as(account):
                reached = folder if made or kept else os.path.dirname(os.path.abspath(folder))
                os.stat(os.path.join(reached, "."))
        _write_in(folder)
    except OSError as error:
        who = "" if account is None else f" as {account.pw_name}"
        raise OptionError(f"history.directory: {folder}: cannot be used{who}: {_reason(error)}") from None
    finally:
        for path in reversed(made):
            with suppress(OSError):
                os.rmdir(path)
    return f"history.directory: {folder} does not exist; the agent will create it" if made else None


def _make(folder: str, made: list[str]) -> None:
    """Make the folder, and note what had to be made, the outermost first. Raises OSError."""
    missing, above = [], os.path.abspath(folder)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), above)
    for path in reversed(missing):
        os.mkdir(path, 0o750 if path == missing[0] else 0o777)
        made.append(path)


def _reason(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)


def _write_in(folder: str) -> None:
    """Make a file there and remove it. Raises OSError."""
    path = os.path.join(folder, f".try-{os.getpid()}.lock")
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.unlink(path)


@contextmanager
def acting_as(account: pwd.struct_passwd) -> Iterator[None]:
    """As root: what is opened within the block is opened by that account. Raises OSError."""
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
