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


def transfer(pair: Pair, address: str = "10.77.0.2") -> None:
    """``SENT`` bytes from west to east over TCP."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with inside(pair.b):
        listening = socket.create_server((address, 5000), family=family)
    with inside(pair.a):
        sending = socket.create_connection((address, 5000))
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
    pair.give_addresses()
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


BIG = 185_000


def test_packets_beyond_64_kib_are_told_as_long_as_they_are(pair: Pair, tmp_path: Path) -> None:
    """BIG TCP: their length does not fit into the IP header, which says 0."""
    for space, device, address in ((pair.a, "west", "fd77::1"), (pair.b, "east", "fd77::2")):
        big = ("gso_max_size", str(BIG), "gro_max_size", str(BIG))
        if pair.call(space, "ip", "link", "set", device, *big).returncode:
            pytest.skip("this kernel, or this ip command, knows nothing of BIG TCP")
        set_offload(space, device, True)
        run("ip", "netns", "exec", space, "sh", "-c", "echo 0 >/proc/sys/net/ipv6/conf/all/disable_ipv6")
        run("ip", "-n", space, "addr", "add", f"{address}/64", "dev", device, "nodad")
    file = tmp_path / "x.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--protocol", "any") as capture:
        transfer(pair, "fd77::2")
    assert capture.status == 0
    packets = packets_of(file)
    assert 1 << 16 < max(packet.wire_len for packet in packets) <= BIG + 14
    tables = ingest([str(file)])
    assert int(tables.messages["bytes"].sum()) == SENT
    assert tables.info.skipped.get("malformed_ip", 0) == 0
    assert tables.info.lost_packets == 0
