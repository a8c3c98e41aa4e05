"""Replay captures onto an interface: send.py DEVICE RATE FILE... Packets that were cut are filled up.

RATE is in packets a second, 0 for as fast as it goes. Prints how many packets were sent.
SIGTERM ends it after the packet in hand.
"""

from __future__ import annotations

import gzip
import random
import signal
import socket
import struct
import sys
import time
from itertools import chain
from pathlib import Path


def frames(path: Path) -> list[bytes]:
    """The packets of a classic pcap file at their length on the wire."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    order = "<" if data[0] in (0xD4, 0x4D) else ">"
    at, found = 24, []
    while at + 16 <= len(data):
        _, _, captured, length = struct.unpack_from(order + "4I", data, at)
        found.append(data[at + 16 : at + 16 + captured].ljust(length, b"\0"))
        at += 16 + captured
    return found


def renamed(path: Path, draw: random.Random) -> bytes:
    """The capture with another peer and other queue pairs, by chance."""
    data = bytearray(gzip.decompress(path.read_bytes()))
    peer = bytes([10, draw.randrange(128, 256), draw.randrange(256), draw.randrange(1, 255)])
    shift, at = draw.randrange(1 << 16), 24
    while at + 16 <= len(data):
        captured = struct.unpack_from("<I", data, at + 8)[0]
        frame = at + 16
        if data[frame + 12 : frame + 14] == b"\x08\x00":
            for end in (frame + 26, frame + 30):
                if data[end : end + 4] == bytes([192, 168, 50, 11]):
                    data[end : end + 4] = peer
            if captured >= 54 and data[frame + 36 : frame + 38] == b"\x12\xb7":  # UDP port 4791
                qp = int.from_bytes(data[frame + 47 : frame + 50], "big")
                if qp > 1:
                    data[frame + 47 : frame + 50] = ((qp + shift) & 0xFFFFFF).to_bytes(3, "big")
        at = frame + captured
    return bytes(data)


def main() -> None:
    device, rate, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    sent, ended = 0, []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 20)
        out.bind((device, 0))
        start = time.monotonic()
        for frame in chain.from_iterable(frames(Path(file)) for file in files):
            if ended:
                break
            if rate and sent % 64 == 0:
                time.sleep(max(start + sent / rate - time.monotonic(), 0))
            out.send(frame)
            sent += 1
    print(sent)


if __name__ == "__main__":
    main()
