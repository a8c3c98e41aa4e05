"""Simulated BlueField cards (``doca_bindings/simulator``): built for a release, sent packets, looked at."""

from __future__ import annotations

import functools
import gzip
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
BINDINGS = PROJECT / "doca_bindings"
TRACES = PROJECT / "traces"
RELEASES = ("2.5", "2.7", "2.9", "3.1", "3.2", "3.3")
MIRRORS = ("2.5", "2.7", "2.9", "3.1")
FLOODS = ("3.1", "3.2", "3.3")
UPLINK, HOST = 0, 1


@functools.cache
def built(release: str, sanitized: bool = False) -> Path:
    """The folder with adapter, simulator, ``forward`` and ``drive`` of a release."""
    for tool in ("make", "cc"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}: the DOCA adapter cannot be compiled")
    made = subprocess.run(
        [
            "make",
            "-s",
            "-j2",
            "-C",
            str(BINDINGS),
            "simulated",
            f"RELEASE={release}",
            *(["SANITIZE=1"] * sanitized),
        ],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    return BINDINGS / "build" / (release + "-sanitized" * sanitized)


def rewrite(path: Path, frames: list[tuple[int, bytes]]) -> list[bytes]:
    """A classic pcap file of (from which port, frame); the frames as written.

    The card takes those with an odd last byte of the source address as the host's.
    """
    written = []
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262144, 1))
        for number, (port, frame) in enumerate(frames):
            frame = frame[:11] + bytes([frame[11] & 0xFE | port]) + frame[12:]
            file.write(struct.pack("<IIII", 1_700_000_000, number, len(frame), len(frame)) + frame)
            written.append(frame)
    return written


def read_pcap(path: Path) -> list[bytes]:
    """The frames of a classic pcap file at their length on the wire."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    order = "<" if data[0] in (0xD4, 0x4D) else ">"
    at, found = 24, []
    while at + 16 <= len(data):
        _, _, captured, length = struct.unpack_from(order + "4I", data, at)
        found.append(data[at + 16 : at + 16 + captured].ljust(min(length, 9600), b"\0"))
        at += 16 + captured
    return found


def address(frame: bytes) -> bytes:
    """The source's address, of whatever protocol."""
    return frame[26:30] if frame[12:14] == b"\x08\x00" else frame[6:12]


def mixed(limit: int = 3000) -> list[tuple[int, bytes]]:
    """RoCE of NCCL, TCP of Gloo, RoCE over IPv6, ARP, other UDP; with the port each comes from."""
    frames = []
    for name in ("nccl-allreduce-n2", "gloo-allreduce-n4"):
        found = read_pcap(TRACES / name / "node0.pcap.gz")
        first = address(found[0])
        begin = next((k for k, frame in enumerate(found) if frame[23] == 17), 0)  # behind the bootstrap
        frames += [(int(address(frame) == first), frame) for frame in found[begin:][:limit]]
    roce = frames[0][1]
    six = (
        roce[:12]
        + b"\x86\xdd\x60\0\0\0"
        + struct.pack(">HBB", len(roce) - 34, 17, 64)
        + bytes(32)
        + roce[34:]
    )
    arp = bytes(12) + b"\x08\x06" + bytes(46)
    dns = roce[:36] + b"\x00\x35" + roce[38:]
    tagged = roce[:12] + b"\x81\x00\x00\x64" + roce[12:]
    for k, odd in enumerate((six, arp, dns, tagged, roce[:60])):
        frames[100 * k : 100 * k] = [(k % 2, odd), (1 - k % 2, odd)]
    return frames


class Card:
    """A card in a folder, of a release."""

    def __init__(self, folder: Path, release: str) -> None:
        self.release, self.folder, self.built = release, folder, built(release)
        self.path = folder / "card"
        self.environment = os.environ | {
            "DPUFLOW_SIM_CARD": str(self.path),
            "DPUFLOW_DOCA": str(self.built / "libdpuflow_doca.so"),
            "PYTHONPATH": str(PROJECT),
        }
        self.tell("make")

    def tell(self, *words: str) -> str:
        done = subprocess.run(
            [self.built / "forward", self.path, *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            self.tell("set", name, str(value))

    def state(self) -> dict[str, str]:
        return dict(line.split(" ", 1) for line in self.tell("show").splitlines())

    def send(self, frames: list[tuple[int, bytes]], rate: int = 0) -> None:
        """Through the card; production must come out at the other port, each frame once and as it was."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            source, out = Path(folder, "in.pcap"), Path(folder, "out")
            written = rewrite(source, frames)
            self.tell("run", str(source), str(out), str(rate))
            for port, name in ((HOST, "uplink"), (UPLINK, "host")):
                came = read_pcap(Path(f"{out}.{name}.pcap"))
                expected = [
                    frame for (origin, _), frame in zip(frames, written, strict=True) if origin == port
                ]
                assert came == expected, f"production is not what it was at the {name}"
            self.at_sf = read_pcap(Path(f"{out}.sf.pcap"))

    def check(self) -> None:
        """Nobody has the card, nothing is left, and production was never disturbed."""
        state = self.state()
        assert state["dark"] == "0", state["darkness"]
        assert (state["owned"], state["root"], state["pipes"]) == ("0", "0", "0"), state
        assert state["objects"] == "0", state
