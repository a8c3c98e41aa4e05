"""The NIC's own clock (PHC): which one stamps an interface's packets, and how it stands to the kernel's.

In: an interface's name. Out: readings of both clocks, and from them the mapping that the programs apply to
each packet's stamp. linux/ethtool.h (ETHTOOL_GET_TS_INFO), linux/net_tstamp.h (SIOCGHWTSTAMP),
clock_gettime(2) on /dev/ptpN.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import struct
import time
from typing import Final

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.live import libbpf
from dpuflow.schema import ring as schema_ring

_ETHTOOL, _GET_TS_INFO = 0x8946, 0x41
_GET_STAMPING: Final = 0x89B1  # SIOCGHWTSTAMP
_FILTER_NONE: Final = 0
_TRIES: Final = 10
_KEPT: Final = 16  # readings that the rate is taken from, one a second: their error is spread over as many
STEP_NS: Final = 1_000_000  # far above the error of a reading, far below what stepping a clock is done for


def clock_of(name: str) -> int | None:
    """The number N of the interface's clock /dev/ptpN; None where it has none."""
    answer = bytearray(struct.pack("=11I", _GET_TS_INFO, *([0] * 10)))
    area = (ctypes.c_char * len(answer)).from_buffer(answer)
    request = struct.pack("16sP16x", name.encode(), ctypes.addressof(area))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _ETHTOOL, request)
    except OSError:
        return None
    number = struct.unpack_from("=i", answer, 8)[0]
    return int(number) if number >= 0 else None


def stamps_what_comes(name: str) -> bool:
    """Whether the NIC has been told to stamp received packets (which is left as it is)."""
    answer = (ctypes.c_int * 3)()
    request = struct.pack("16sP16x", name.encode(), ctypes.addressof(answer))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _GET_STAMPING, request)
    except OSError:
        return False
    return answer[2] != _FILTER_NONE


class NicClock:
    """The clock of one interface, and the map by which the programs know it; ``close`` gives both back."""

    def __init__(self, name: str, device: str, clock: int, close: int | None = None) -> None:
        """``clock``: its number for clock_gettime(2). Raises DpuflowError."""
        self.name, self.device = name, device
        self._clock, self._file = clock, close
        self._readings: list[tuple[int, int]] = []
        self._told = (0, 0, 0)
        self.steps = 0
        self.error_ns = 0
        with contextlib.ExitStack() as stack:
            if close is not None:
                stack.callback(os.close, close)
            self.fd = libbpf.create_cells(1, schema_ring.PHC.dtype.itemsize)
            stack.callback(os.close, self.fd)
            self._area = mmap.mmap(self.fd, mmap.PAGESIZE)
            stack.callback(self._area.close)
            self.sample()
            self._stack = stack.pop_all()

    @classmethod
    def of(cls, name: str) -> NicClock:
        """The clock of an interface whose NIC stamps. Raises MissingError, DpuflowError."""
        number = clock_of(name)
        if number is None:
            raise MissingError(f"{name}: the NIC has no PTP hardware clock: use --timestamps kernel")
        if not stamps_what_comes(name):
            raise MissingError(
                f"{name}: the NIC does not timestamp received packets: run hwstamp_ctl -i {name} -r 1"
                ", or use --timestamps kernel"
            )
        device = f"/dev/ptp{number}"
        try:
            file = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DpuflowError(
                f"{device}: {error.strerror}; {name} gets no timestamps from its NIC"
            ) from None
        return cls(name, device, ~file << 3 | 3, file)

    def sample(self) -> None:
        """Read both clocks, and tell the programs. A clock that was set since begins anew.

        One that cannot be read any more, as its NIC is gone, is taken to go on as it did.
        """
        try:
            nic_ns, kernel_ns, self.error_ns = self._read()
        except OSError as error:
            if self._readings:
                return
            raise DpuflowError(
                f"{self.device}: {error.strerror}; {self.name} gets no timestamps from it"
            ) from None
        if self._readings:
            expected = self._map(nic_ns)
            if abs(expected - kernel_ns) > STEP_NS:
                self._readings.clear()
                self.steps += 1
        self._readings = [*self._readings[1 - _KEPT :], (nic_ns, kernel_ns)]
        row = schema_ring.PHC.zeros(1)
        which = 1 - int.from_bytes(self._area[:8], "little")
        row["which"] = which  # the half that is not in use is written, and used from then on
        for half, at in ((which, (nic_ns, kernel_ns, self._rate())), (1 - which, self._told)):
            for field, value in zip(("nic", "time", "rate"), at, strict=True):
                row[f"{field}_{half}"] = value & (1 << 64) - 1
        self._told = (nic_ns, kernel_ns, self._rate())
        data = row.tobytes()
        self._area[8 : len(data)] = data[8:]
        self._area[:8] = data[:8]

    def _read(self) -> tuple[int, int, int]:
        """NIC's time, the monotonic clock's, and half of what the reading took: the quickest of some."""
        best: tuple[int, int, int] | None = None
        for _ in range(_TRIES):
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            nic = time.clock_gettime_ns(self._clock)
            after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            if best is None or (after - before + 1) // 2 < best[2]:
                best = nic, (before + after) // 2, (after - before + 1) // 2
        assert best is not None
        return best

    def _rate(self) -> int:
        """How much faster the kernel's clock runs, in 2^-32."""
        (first_nic, first), (last_nic, last) = self._readings[0], self._readings[-1]
        if last_nic <= first_nic:
            return 0
        return ((last - first) - (last_nic - first_nic) << 32) // (last_nic - first_nic)

    def _map(self, nic_ns: int) -> int:
        """What the programs make of a stamp: nanoseconds of the monotonic clock."""
        at, kernel_ns = self._readings[-1]
        return kernel_ns + (nic_ns - at) + ((nic_ns - at) * self._rate() >> 32)

    def text(self) -> str:
        """For the file: whose stamps these are."""
        nic, kernel = self._readings[-1]
        ahead = nic - kernel - (time.time_ns() - time.monotonic_ns())
        return (
            f"received packets are stamped by the NIC's clock {self.device}, which was {ahead} ns ahead of"
            f" CLOCK_REALTIME at the start within {self.error_ns} ns, and is read every second; stamps are"
            " given in wall time"
        )

    def close(self) -> None:
        """Give clock and map back."""
        self._stack.close()
