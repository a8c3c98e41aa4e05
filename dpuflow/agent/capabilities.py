"""What the agent may do: started by hand as root, it becomes an ordinary user with a few capabilities.

Under systemd and in a container it starts so (``AmbientCapabilities``, ``runAsUser``): nothing is done here.
Capabilities belong to threads (capabilities(7)): those that serve HTTP or post notices give up all of them.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from typing import TYPE_CHECKING, Final

from dpuflow.errors import DpuflowError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NET_ADMIN, _NET_RAW, _PERFMON, _BPF = 12, 13, 38, 39
NEEDED: Final = frozenset({_NET_ADMIN, _NET_RAW, _PERFMON, _BPF})
"""As the unit has them: to load and attach programs, now and when an interface comes back."""
USERS: Final = ("dpuflow", "nobody")
_VERSION: Final = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
_SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _CAPBSET_DROP, _AMBIENT, _AMBIENT_CLEAR = 8, 38, 24, 47, 4
_LAST: Final = 63


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("kept", ctypes.c_uint32))


def next_account(user: str | None = None) -> pwd.struct_passwd | None:
    """Whom ``become`` makes of this process: ``user``, or (None) the first of USERS that there is.

    None where it stays who it is: it is not root, or root lacks what it takes. Raises OptionError for a user
    that there is not.
    """
    entry = account_of(user)
    if os.geteuid() != 0 or entry is None or entry.pw_uid == 0:
        return None
    # CAP_SETGID, CAP_SETUID: a container that gives neither
    return entry if {6, 7} <= _held(ctypes.CDLL(None, use_errno=True)) else None


def become(user: str | None = None, folders: Sequence[str] = ()) -> str | None:
    """From root to ``next_account`` with ``NEEDED`` alone; whom it became, None where nothing is done.

    The account gets ``folders``, which are made, and the histories in them. To be called before threads
    begin. Raises OptionError for a user that there is not and a folder that is not for a history,
    DpuflowError where it fails half-way.
    """
    from dpuflow.agent.folder import hand_over  # late: it takes NumPy along, which the API needs not

    entry = next_account(user)
    if entry is None:
        return None
    c = ctypes.CDLL(None, use_errno=True)
    held = _held(c)
    for folder in folders:
        hand_over(folder, entry)
    for number in range(_LAST + 1):
        if number not in NEEDED and 8 in held:  # CAP_SETPCAP
            c.prctl(_CAPBSET_DROP, number, 0, 0, 0)  # unknown ones are refused, which is as well
    c.prctl(_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
    os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    _set(c, NEEDED & held)
    c.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return entry.pw_name


def drop_all() -> None:
    """This thread, and those that it begins, give up every capability; without one nothing happens."""
    c = ctypes.CDLL(None, use_errno=True)
    c.prctl(_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    if os.geteuid() != 0:  # root alone keeps the files it was given
        _set(c, frozenset())


def renounce() -> None:
    """This process, begun for a part that needs none, gives up every capability for good, as root, too."""
    c = ctypes.CDLL(None, use_errno=True)
    c.prctl(_AMBIENT, _AMBIENT_CLEAR, 0, 0, 0)
    _set(c, frozenset())
    c.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def account_of(user: str | None) -> pwd.struct_passwd | None:
    """The account of ``user``, or (None) of the first of USERS that there is. Raises OptionError."""
    for name in USERS if user is None else (user,):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    if user is not None:
        raise OptionError(f"--user: no such user: {user}")
    return None


def _held(c: ctypes.CDLL) -> frozenset[int]:
    """What this thread may do now."""
    sets = (_Sets * 2)()
    if c.capget(ctypes.byref(_Header(_VERSION, 0)), sets):
        return frozenset()
    bits = sets[0].permitted | sets[1].permitted << 32
    return frozenset(number for number in range(64) if bits >> number & 1)


def _set(c: ctypes.CDLL, numbers: frozenset[int]) -> None:
    bits = sum(1 << number for number in numbers)
    sets = (_Sets * 2)()
    for half, place in enumerate((bits & 0xFFFFFFFF, bits >> 32)):
        sets[half].effective = sets[half].permitted = place
    if c.capset(ctypes.byref(_Header(_VERSION, 0)), sets):
        raise DpuflowError(f"cannot drop capabilities ({os.strerror(ctypes.get_errno())})")
