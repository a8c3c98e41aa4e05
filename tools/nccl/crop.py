"""Crop recorded captures to headers and compress them: node*.pcap of OUT's cases become node*.pcap.gz.

    python tools/nccl/crop.py OUT

Of RoCE packets that go on with or end a WRITE (their data tells nothing) 58 bytes are kept, of other RoCE
packets 100, of all others 128. Packets of up to 160 bytes on the wire stay as captured.
"""

from __future__ import annotations

import gzip
import struct
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

WHOLE = 160
HEADERS = 128
ROCE_HEADERS = 100
ROCE_DATA = 58
ROCE = b"\x12\xb7"
DATA = (7, 8, 9)
"""WRITE MIDDLE, LAST and LAST with immediate: their data is of no interest."""


def crop_length(packet: bytes, length: int) -> int:
    """How much of a packet of ``length`` bytes on the wire is kept."""
    if length <= WHOLE:
        return len(packet)
    if len(packet) > 54 and packet[12:14] == b"\x08\x00" and packet[23] == 17 and packet[36:38] == ROCE:
        return min(len(packet), ROCE_DATA if packet[42] in DATA else ROCE_HEADERS)
    return min(len(packet), HEADERS)


def crop(path: Path) -> None:
    """Replace a capture (a pcap file of this machine's byte order, as capture.c writes it)."""
    raw = path.read_bytes()
    kept, at = bytearray(raw[:24]), 24
    while at + 16 <= len(raw):
        seconds, part, captured, length = struct.unpack_from("<IIII", raw, at)
        packet = raw[at + 16 : at + 16 + captured]
        size = crop_length(packet, length)
        kept += struct.pack("<IIII", seconds, part, size, length)
        kept += packet[:size]
        at += 16 + captured
    with gzip.open(f"{path}.gz", "wb", 7) as file:
        file.write(kept)
    path.unlink()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with ProcessPoolExecutor() as pool:
        list(pool.map(crop, sorted(Path(sys.argv[1]).rglob("*.pcap"))))


if __name__ == "__main__":
    main()
