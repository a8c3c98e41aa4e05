"""The psample backend: samples that tc's `sample` action makes, in the card or in the kernel, cut there.

linux/psample.h: a multicast group of generic netlink tells of each sample its interface, its length on the
wire, a running number within its group and its first bytes. What is missing between running numbers was lost
on the way to here. Needs CAP_NET_ADMIN.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.errors import MissingError, OptionError
from dpuflow.kernels import packets as kernel
from dpuflow.kernels import ring
from dpuflow.live.afpacket import filter_words
from dpuflow.live.base import OUT_BYTES, find_interface
from dpuflow.live.clock import StampClock, WallClock
from dpuflow.schema.ring import COUNTER_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.live.base import Bytes, Numbers
    from dpuflow.live.options import LiveOptions

_GENERIC, _CONTROL, _GET_FAMILY = 16, 16, 3  # NETLINK_GENERIC, GENL_ID_CTRL, CTRL_CMD_GETFAMILY
_FAMILY_ID, _FAMILY_NAME, _GROUPS = 1, 2, 7  # CTRL_ATTR_*
_GROUP_NAME, _GROUP_ID = 1, 2
_NETLINK, _JOIN = 270, 1  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP
_SO_RCVBUFFORCE: Final = 33
_NESTED: Final = 0x3FFF

_IN, _LENGTH, _GROUP, _NUMBER, _DATA, _STAMP = 0, 2, 3, 4, 6, 13  # PSAMPLE_ATTR_*
_HEAD: Final = 80  # of a record in a TPACKET_V3 block, with room
_LARGEST: Final = 1 << 17
_SECOND: Final = 1_000_000_000


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and value of each netlink attribute, netlink(7)."""
    at = 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4 or at + size > len(data):
            return
        yield kind & _NESTED, data[at + 4 : at + size]
        at += size + 3 & ~3


def messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and body of each netlink message."""
    at = 0
    while at + 16 <= len(data):
        size, kind = struct.unpack_from("=IH", data, at)
        if size < 16 or at + size > len(data):
            return
        yield kind, data[at + 16 : at + size]
        at += size + 3 & ~3


def number(value: bytes) -> int:
    """An attribute's number, of whatever width."""
    return int.from_bytes(value, "little" if struct.pack("=H", 1) == b"\1\0" else "big")


def find_family(control: socket.socket) -> tuple[int, int]:
    """The family's number and that of its group of samples. Raises MissingError."""
    name = b"psample\0"
    attribute = struct.pack("=HH", 4 + len(name), _FAMILY_NAME) + name
    body = struct.pack("=BBH", _GET_FAMILY, 1, 0) + attribute
    control.send(struct.pack("=IHHII", 16 + len(body), _CONTROL, 1, 1, 0) + body)
    family = group = None
    for kind, answer in messages(control.recv(_LARGEST)):
        if kind != _CONTROL:
            break
        found = dict(attributes(answer[4:]))
        family = number(found.get(_FAMILY_ID, b""))
        for _, each in attributes(found.get(_GROUPS, b"")):
            named = dict(attributes(each))
            if named.get(_GROUP_NAME, b"").rstrip(b"\0") == b"packets":
                group = number(named[_GROUP_ID])
    if not family or group is None:
        raise MissingError("this kernel has no psample, which delivers tc's samples: modprobe psample")
    return family, group


class SampleCapture:
    """The samples of one group, of one interface or several."""

    name = "psample"

    def __init__(self, options: LiveOptions, control: socket.socket | None = None) -> None:
        """Join the group. Raises OptionError, MissingError. ``control``: a socket for tests."""
        if options.mode != "packets":
            raise OptionError("--backend psample supports packets mode only")
        self.interfaces = [find_interface(name) for name in options.interfaces]
        self._numbers = {interface.index: k for k, interface in enumerate(self.interfaces)}
        self.clock: StampClock = WallClock()
        self.tally = np.zeros(ring.D_SIZE, np.int64)
        self.tally[ring.D_LEFT] = np.iinfo(np.int64).max
        self._wanted, self._group = filter_words(options), options.group
        self._seen: Bytes = np.zeros(1 << 16, np.uint8)
        self._found: Numbers = np.zeros(2, np.int64)
        self._counts = [np.zeros(len(kernel.VERDICTS), np.int64) for _ in self.interfaces]
        self._block: Bytes = np.zeros(_LARGEST + _HEAD + kernel.BLOCK_HEADER + 64, np.uint8)
        self._last: int | None = None
        self._lost = 0
        self._open = True
        self.hooks = f"samples of psample group {options.group}"
        with contextlib.ExitStack() as stack:
            if control is None:
                control = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _GENERIC)
            self._socket = stack.enter_context(control)
            self._family, group = find_family(self._socket)
            try:
                self._socket.setsockopt(_NETLINK, _JOIN, group)
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, min(options.buffer, 1 << 30))
            except PermissionError:
                raise MissingError("reading samples needs CAP_NET_ADMIN: run as root") from None
            self._socket.setblocking(False)
            self._stack = stack.pop_all()

    def read(self, out: Bytes, at: int) -> int:
        """Move the samples that have come to ``out`` from ``at`` on, as much as fits; where it ends."""
        while self._open and len(out) - at >= OUT_BYTES and self.tally[ring.D_LEFT] > 0:
            try:
                data = self._socket.recv(_LARGEST)
            except BlockingIOError:
                break
            except OSError:
                continue  # the socket was full: the running numbers tell how much is missing
            for kind, body in messages(data):
                if kind == self._family:
                    at = self._take(dict(attributes(body[4:])), out, at)
        return at

    def _take(self, sample: dict[int, bytes], out: Bytes, at: int) -> int:
        """One sample, through the filter."""
        if number(sample.get(_GROUP, b"")) != self._group or _DATA not in sample:
            return at
        count = number(sample.get(_NUMBER, b""))
        if self._last is not None:
            self._lost += (count - self._last - 1) % (1 << 32)
        self._last = count
        iface = self._numbers.get(number(sample.get(_IN, b"")))
        if iface is None:
            return at
        now_ns, stamp_ns = time.time_ns(), number(sample.get(_STAMP, b""))
        if not 0 <= now_ns - stamp_ns < _SECOND:
            stamp_ns = now_ns
        data = sample[_DATA][: int(self._wanted[kernel.P_SNAPLEN])]
        length = max(number(sample.get(_LENGTH, b"")), len(data))
        record = struct.pack("=6IH", 0, stamp_ns // _SECOND, stamp_ns % _SECOND, len(data), length, 0, _HEAD)
        block = struct.pack("=5I", 1, 0, 1, 1, kernel.BLOCK_HEADER).ljust(kernel.BLOCK_HEADER, b"\0")
        whole = block + record.ljust(_HEAD, b"\0") + data
        self._block[: len(whole)] = np.frombuffer(whole, np.uint8)
        return int(
            kernel.drain_block(
                self._block, 0, iface, self._wanted, out, at, self.tally, self._counts[iface], self._seen,
                self._found,
            )
        )  # fmt: skip

    def wait(self, seconds: float) -> None:
        """Sleep between two looks."""
        time.sleep(seconds)

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS of each interface's samples; those lost of the group count at the first one."""
        counted = []
        for k, counts in enumerate(self._counts):
            named = dict.fromkeys(COUNTER_NAMES, 0)
            named |= dict(zip(kernel.VERDICTS, map(int, counts), strict=True))
            named["ring_full"] = 0 if k else self._lost
            counted.append(named | {"seen": sum(named.values())})
        return counted

    def ring_share(self) -> float:
        """The socket does not tell how full it is."""
        return 0.0

    def take_peak(self) -> float:
        """The socket does not tell how full it was."""
        return 0.0

    def switch(self, options: LiveOptions) -> None:
        """Filter as ``options`` say from now on. Raises OptionError."""
        if options.mode != "packets":
            raise OptionError("--backend psample supports packets mode only")
        self._wanted = filter_words(options)

    def detach(self) -> None:
        """Nothing more is asked for; what has come can be read."""

    def close(self) -> None:
        """Leave the group."""
        self._open = False
        self._stack.close()
