"""Capture files as a live capture would hand them over: whole records, some milliseconds at a time."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.capture.pcapfile import open_file

if TYPE_CHECKING:
    from dpuflow.capture.base import Bytes, Format


def pieces(path: Path, step_ns: int) -> Iterator[tuple[int, Format, Bytes]]:
    """(end of the step, format, records) of a classic little-endian pcap file with ns or us stamps."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = np.frombuffer(raw, np.uint8).copy()
    unit = {b"\x4d\x3c\xb2\xa1": 1, b"\xd4\xc3\xb2\xa1": 1000}[raw[:4]]
    starts, times, at = [], [], 24
    while at + 16 <= len(raw):
        words = np.frombuffer(raw, "<u4", 4, at)
        starts.append(at)
        times.append(int(words[0]) * 10**9 + int(words[1]) * unit)
        at += 16 + int(words[2])
    form = open_file(str(path)).format
    # A live capture hands packets over as they come: what was stamped a little earlier may come behind.
    latest = np.maximum.accumulate(np.array(times, np.int64))
    bounds = np.append(starts, at)
    now, first = int(latest[0]) // step_ns * step_ns + step_ns, 0
    while first < len(starts):
        last = int(np.searchsorted(latest, now, "right"))
        yield now, form, data[bounds[first] : bounds[last]]
        first, now = last, now + step_ns
