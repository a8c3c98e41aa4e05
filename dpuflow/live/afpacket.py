"""The AF_PACKET backend, where eBPF is not to be had: TPACKET_V3 rings, filtered in user space.

packet(7), Documentation/networking/packet_mmap.rst. Needs CAP_NET_RAW alone. The kernel stamps, with
CLOCK_REALTIME.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.kernels import packets as kernel
from dpuflow.kernels import ring
from dpuflow.live.base import OUT_BYTES, find_interface
from dpuflow.live.clock import StampClock, WallClock
from dpuflow.live.nic import take_all
from dpuflow.live.options import address_words
from dpuflow.schema.ring import COUNTER_NAMES

if TYPE_CHECKING:
    from dpuflow.live.base import Bytes, Interface, Numbers
    from dpuflow.live.options import LiveOptions

_PACKET: Final = 263  # SOL_PACKET
_RX_RING, _STATISTICS, _VERSION, _RESERVE = 5, 6, 10, 12
_TPACKET_V3: Final = 2
_ALL: Final = 0x0300  # ETH_P_ALL in network order
_ATTACH_FILTER: Final = 26
_IGNORE_OUTGOING: Final = 23  # Linux 4.20

BLOCK: Final = OUT_BYTES // 2  # bytes of a ring's block: what is handed over at once
_FRAME: Final = 2048
_HAND_OVER_MS: Final = 10  # a block that is not full is handed over after that long
_USER: Final = 1  # TP_STATUS_USER: the block is ours


class PacketCapture:
    """One socket with a mapped ring for each interface."""

    name = "afpacket"
    hooks = "packet sockets"

    def __init__(self, options: LiveOptions) -> None:
        """Open the sockets. Raises OptionError, MissingError, DpuflowError."""
        self.interfaces = [find_interface(name) for name in options.interfaces]
        self.clock: StampClock = WallClock()
        self.tally = np.zeros(ring.D_SIZE, np.int64)
        self.tally[ring.D_LEFT] = np.iinfo(np.int64).max
        self._wanted = filter_words(options)
        self._peak = 0.0
        self._seen: Bytes = np.zeros(1 << 16, np.uint8)
        blocks = max(options.buffer // BLOCK // len(self.interfaces), 4)
        with contextlib.ExitStack() as stack:
            self._sockets = []
            for number, interface in enumerate(self.interfaces):
                if options.promiscuous:
                    stack.enter_context(take_all(interface.index, interface.name))
                opened = _Socket(interface, number, blocks, int(self._wanted[kernel.P_SNAPLEN]))
                stack.callback(opened.close)
                self._sockets.append(opened)
            for opened in self._sockets:
                opened.start()
            self._stack = stack.pop_all()

    def read(self, out: Bytes, at: int) -> int:
        """Move the packets of ready blocks to ``out`` from ``at`` on, as much as fits; where it ends."""
        self._peak = max(self._peak, self.ring_share())
        for opened in self._sockets:
            while len(out) - at > BLOCK and opened.ready() and self.tally[ring.D_LEFT] > 0:
                at = opened.drain(self._wanted, out, at, self.tally, self._seen)
        return at

    def ring_share(self) -> float:
        """How many of the blocks are full and not read yet, of the fullest ring, 0 to 1."""
        return max(opened.share() for opened in self._sockets)

    def take_peak(self) -> float:
        """The same at the fullest look since the last call."""
        peak, self._peak = self._peak, 0.0
        return max(peak, self.ring_share())

    def switch(self, options: LiveOptions) -> None:
        """Filter and keep what ``options`` say from now on."""
        wanted = filter_words(options)
        for opened in self._sockets:
            opened.keep(int(wanted[kernel.P_SNAPLEN]))
        self._wanted = wanted

    def wait(self, seconds: float) -> None:
        """Sleep between two looks."""
        time.sleep(seconds)

    def counters(self) -> list[dict[str, int]]:
        """The COUNTERS of each interface."""
        return [opened.counters() for opened in self._sockets]

    def detach(self) -> None:
        """Let no more packets into the rings, and wait until the last blocks have been handed over."""
        for opened in self._sockets:
            opened.stop()
        time.sleep(3 * _HAND_OVER_MS / 1000)

    def close(self) -> None:
        """Give everything back."""
        self._stack.close()


class _Socket:
    """A packet socket and its ring."""

    def __init__(self, interface: Interface, number: int, blocks: int, snaplen: int) -> None:
        self._interface, self._number, self._blocks = interface, number, blocks
        self._next = 0
        self._dropped = 0
        self._counts: Numbers = np.zeros(len(kernel.VERDICTS), np.int64)
        self._found: Numbers = np.zeros(2, np.int64)
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        except PermissionError:
            raise MissingError("packet sockets are not allowed: run as root or with CAP_NET_RAW") from None
        try:
            self._socket.setsockopt(_PACKET, _VERSION, _TPACKET_V3)
            if interface.loopback:
                self._socket.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
            self.keep(snaplen)
            frames = blocks * BLOCK // _FRAME
            request = struct.pack("7I", BLOCK, blocks, _FRAME, frames, _HAND_OVER_MS, 0, 0)
            self._socket.setsockopt(_PACKET, _RX_RING, request)
            self._area = mmap.mmap(self._socket.fileno(), blocks * BLOCK)
        except OSError as error:
            self._socket.close()
            if error.errno == errno.ENOMEM:
                raise DpuflowError("no memory for the ring: use a smaller --buffer") from None
            raise DpuflowError(f"{interface.name}: no packet ring ({error.strerror})") from None
        self._bytes: Bytes = np.frombuffer(self._area, np.uint8)

    def keep(self, snaplen: int) -> None:
        """A classic filter that keeps ``snaplen`` bytes of everything; 0 keeps nothing."""
        program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, snaplen), 8)
        self._socket.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
        )

    def start(self) -> None:
        """Take packets from now on."""
        try:
            self._socket.bind((self._interface.name, socket.ntohs(_ALL)))
        except OSError as error:
            raise DpuflowError(f"{self._interface.name}: {error.strerror}") from None

    def stop(self) -> None:
        """Take no more packets."""
        self.keep(0)

    def ready(self) -> bool:
        """Whether the next block has been handed over."""
        at = self._next * BLOCK + kernel.STATUS
        return bool(self._bytes[at] & _USER)

    def share(self) -> float:
        """How many of the blocks have been handed over and not been read, 0 to 1."""
        return float(np.count_nonzero(self._bytes[kernel.STATUS :: BLOCK] & _USER)) / self._blocks

    def drain(self, wanted: Numbers, out: Bytes, at: int, tally: Numbers, seen: Bytes) -> int:
        """Move the next block's packets to ``out`` and give the block back."""
        block = self._next * BLOCK
        at = int(
            kernel.drain_block(
                self._bytes, block, self._number, wanted, out, at, tally, self._counts, seen, self._found
            )
        )
        self._bytes[block + kernel.STATUS : block + kernel.STATUS + 4] = 0
        self._next = (self._next + 1) % self._blocks
        return at

    def counters(self) -> dict[str, int]:
        """What became of the packets so far; those in blocks not yet read are in none."""
        _, dropped, _ = struct.unpack("3I", self._socket.getsockopt(_PACKET, _STATISTICS, 12))  # and set to 0
        self._dropped += dropped
        named = dict.fromkeys(COUNTER_NAMES, 0)
        named |= dict(zip(kernel.VERDICTS, map(int, self._counts), strict=True))
        named["ring_full"] = self._dropped
        return named | {"seen": sum(named.values())}

    def close(self) -> None:
        del self._bytes
        self._area.close()
        self._socket.close()


def filter_words(options: LiveOptions) -> Numbers:
    """The options' filter as ``kernels/packets`` takes it."""
    settings = options.settings(0, 0)[0]
    words = np.zeros(kernel.P_SIZE, np.int64)
    words[kernel.P_PROTOCOLS], words[kernel.P_SNAPLEN] = settings["protocols"], settings["snaplen"]
    words[kernel.P_SAMPLE] = settings["sample"]
    for at, values in (
        (kernel.P_QPS, options.qps),
        (kernel.P_PORTS, options.ports),
        (kernel.P_VLANS, options.vlans),
    ):
        words[at] = len(values)
    words[kernel.P_HOSTS] = len(options.hosts)
    hosts = [word for host in options.hosts for word in address_words(host)]
    words[kernel.P_HOST : kernel.P_HOST + len(hosts)] = np.array(hosts, np.uint64).view(np.int64)
    words[kernel.P_QP : kernel.P_QP + len(options.qps)] = options.qps
    words[kernel.P_PORT : kernel.P_PORT + len(options.ports)] = options.ports
    words[kernel.P_VLAN : kernel.P_VLAN + len(options.vlans)] = options.vlans
    return words
