"""RoCE messages of many pairs of hosts, for a time: flood.py DEVICE PAIRS RATE SECONDS.

Each pair has one queue pair, whose messages are WRITEs of four packets with consecutive PSNs. RATE is packets
a second in all, 0 for as fast as it goes. Prints how many messages each pair sent, as JSON.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

PACKETS = (6, 7, 7, 8)  # RDMA WRITE first, middle, last (RC)
PAYLOAD = 256


def packet(pair: int, opcode: int) -> bytearray:
    """A packet from host ``pair`` to 10.98.0.1; the PSN is at -(4 + PAYLOAD + its own place)."""
    reth = struct.pack(">QII", 0x1000, 1, PAYLOAD * len(PACKETS)) if opcode == 6 else b""
    bth = struct.pack(">BBHII", opcode, 0x40, 0xFFFF, 0x100 + pair, 0) + reth + bytes(PAYLOAD + 4)
    udp = struct.pack(">HHHH", 49152 + pair % 1024, 4791, 8 + len(bth), 0) + bth
    src, dst = bytes([10, 99, pair >> 8, pair & 255]), bytes([10, 98, 0, 1])
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 2, 20 + len(udp), 0, 0x4000, 64, 17, 0, src, dst)
    return bytearray(b"\x02\0\0\0\0\2\x02\0\0\0\0\1\x08\0" + ip + udp)


def main() -> None:
    device, pairs, rate, duration = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    made = [[packet(pair, opcode) for opcode in PACKETS] for pair in range(pairs)]
    psn_at = 14 + 20 + 8 + 9
    sent = rounds = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        out.bind((device, 0))
        start = time.monotonic()
        while time.monotonic() < start + duration:
            for of_pair in made:
                for place, data in enumerate(of_pair):
                    data[psn_at : psn_at + 3] = (4 * rounds + place & 0xFFFFFF).to_bytes(3, "big")
                    out.send(data)
                sent += 4
                if rate and sent % 64 == 0:
                    time.sleep(max(start + sent / rate - time.monotonic(), 0))
            rounds += 1
    print(json.dumps({"rounds": rounds, "packets": sent}))


if __name__ == "__main__":
    main()
