"""Segmentation offload: what the kernel hands over at once is one record, and no byte is counted twice."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import threading
from pathlib import Path

import pytest
from network import Pair, inside, run
from readings_live import counters_of, packets_of

from dpuflow.ingest import ingest

SENT = 8 << 20
SIOCETHTOOL = 0x8946
OFFLOADS = (0x1F, 0x24, 0x2C)  # linux/ethtool.h: ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO


def set_offload(space: str, device: str, on: bool) -> None:
    """Segmentation and reassembly by the device, as ``ethtool -K tso gso gro`` sets them."""
    with inside(space), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS:
            value = bytearray(struct.pack("=II", command, on))
            place = (ctypes.c_char * len(value)).from_buffer(value)
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", device.encode(), ctypes.addressof(place)))


def transfer(pair: Pair) -> None:
    """``SENT`` bytes from west to east over TCP."""
    pair.give_addresses()
    with inside(pair.b):
        listening = socket.create_server(("10.77.0.2", 5000))
    with inside(pair.a):
        sending = socket.create_connection(("10.77.0.2", 5000))
    taking, _ = listening.accept()

    def take() -> None:
        while taking.recv(1 << 16):
            pass

    receiver = threading.Thread(target=take)
    receiver.start()
    sending.sendall(bytes(SENT))
    sending.close()
    receiver.join()
    taking.close()
    listening.close()


@pytest.mark.parametrize("hook", ["tcx", "clsact"])
@pytest.mark.parametrize("mtu", [1500, 9000])
@pytest.mark.parametrize("offload", [False, True], ids=["segments", "offloaded"])
def test_every_byte_is_told_once(pair: Pair, tmp_path: Path, hook: str, mtu: int, offload: bool) -> None:
    for space, device in ((pair.a, "west"), (pair.b, "east")):
        run("ip", "-n", space, "link", "set", device, "mtu", str(mtu))
        set_offload(space, device, offload)
    file = tmp_path / "x.pcapng"
    options = ("--hook", hook, "--protocol", "any", "--buffer", "64Mi")
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), *options) as capture:
        transfer(pair)
    assert capture.status == 0
    (counters,) = counters_of(file)
    assert counters["ring_full"] == counters["unreadable"] == 0
    longest = max(packet.wire_len for packet in packets_of(file))
    assert longest > mtu + 14 if offload else longest <= mtu + 14
    messages = ingest([str(file)]).messages
    assert int(messages["bytes"].sum()) == SENT
