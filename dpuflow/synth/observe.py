"""What captures hold: each vantage point's own clock, its stamps' jitter, what it missed; pcap files out."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.synth.conversations import seen_at
from dpuflow.synth.packets import packets_at
from dpuflow.synth.scenario import EarlyStop, Stop
from dpuflow.synth.seeds import columns, stream
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from gzip import GzipFile
else:
    try:  # the same at twice zlib's pace
        from zlib_ng.gzip_ng import GzipNGFile as GzipFile
    except ImportError:
        from gzip import GzipFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from dpuflow.synth.scenario import Scenario
    from dpuflow.synth.world import Played

EPOCH_NS: Final = 1_800_000_000 * 10**9
"""Within a day from here worlds begin on node 0's clock."""
DAY_NS: Final = 86_400 * 10**9
MAGIC_NS: Final = 0xA1B23C4D
WHOLE: Final = 262_144  # the snap length a file states where all bytes are kept


@dataclass(frozen=True)
class Clock:
    """A vantage point's clock minus node 0's: ``offset_ns`` at the world's start, ``epoch_ns``; drift."""

    epoch_ns: int
    offset_ns: int
    drift_ppb: float

    def local(self, true_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Stamps for times since the start of the world."""
        drift = np.rint(true_ns * (self.drift_ppb * 1e-9)).astype(np.int64)
        return np.asarray(self.epoch_ns + self.offset_ns + true_ns + drift, np.int64)


@dataclass(frozen=True)
class Capture:
    """One written file."""

    name: str
    node: int | None  # None: the switch
    clock: Clock
    packets: int
    missed: int
    passed: int  # not among the sample


def epoch_ns(scenario: Scenario) -> int:
    """When the world begins on node 0's clock."""
    return EPOCH_NS + stream(scenario.seed, "epoch").randrange(DAY_NS)


def clock_of(scenario: Scenario, node: int | None) -> Clock:
    """Drawn from the scenario's ranges; node 0's is the reference."""
    begin_ns = epoch_ns(scenario)
    if node == 0:
        return Clock(begin_ns, 0, 0.0)
    clocks, draw = scenario.observation.clocks, stream(scenario.seed, "clock", node)
    offset_ns = round(draw.uniform(-1.0, 1.0) * clocks.offset_us * 1e3)
    return Clock(begin_ns, offset_ns, round(draw.uniform(-1.0, 1.0) * clocks.drift_ppm * 1e3, 3))


def vantages(scenario: Scenario) -> list[int | None]:
    """Nodes with a capture; None stands for the switch."""
    observed = scenario.observation
    nodes: list[int | None] = list(range(scenario.cluster.nodes) if observed.only is None else observed.only)
    if observed.vantages == "switch":
        return [None]
    return nodes if observed.vantages == "nodes" else [*nodes, None]


def capture(played: Played, node: int | None, folder: Path) -> Capture:
    """Write what the vantage point saw."""
    scenario = played.scenario
    observed = scenario.observation
    clock = clock_of(scenario, node)
    noise = columns(scenario.seed, "stamps", node)
    missing, taken = (columns(scenario.seed, what, node) for what in ("missed", "sample"))
    name = ("central" if node is None else f"node{node}") + (".pcap.gz" if observed.compress else ".pcap")
    before = np.iinfo(np.int64).min
    jitter_ns = observed.clocks.jitter_ns
    written = missed = passed = 0
    window = 200_000 if observed.snaplen and observed.snaplen <= 256 else 20_000
    with _file(folder / name, observed.compress) as file:
        snaplen = observed.snaplen or WHOLE
        file.write(struct.pack("<IHHiIII", MAGIC_NS, 2, 4, 0, 0, snaplen, wire.LINKTYPE_ETHERNET))
        half_ns = int(scenario.cluster.latency_us * 500)
        for true_ns, frame in seen_at(played.prelude, node, half_ns):
            stamp = int(clock.local(np.array([true_ns]))[0]) + round(noise.standard_normal() * jitter_ns)
            before = max(before, stamp)
            if observed.sample > 1 and taken.random() * observed.sample >= 1:
                passed += 1
            elif observed.loss and missing.random() < observed.loss:
                missed += 1
            else:
                written += 1
                file.write(_record(before, frame, observed.snaplen, observed.truncate))
        for packets in packets_at(played, node, window):
            stamps = clock.local(packets.stamp_ns)
            stamps += np.rint(noise.standard_normal(len(stamps)) * observed.clocks.jitter_ns).astype(np.int64)
            stamps = np.maximum(np.maximum.accumulate(stamps), before) if len(stamps) else stamps
            before = int(stamps[-1]) if len(stamps) else before
            kept = np.ones(len(stamps), bool)
            if observed.sample > 1:
                kept &= taken.random(len(stamps)) * observed.sample < 1
                passed += int(len(kept) - kept.sum())
            if observed.loss:
                lost = kept & (missing.random(len(stamps)) < observed.loss)
                missed += int(lost.sum())
                kept &= ~lost
            if not kept.all():
                packets, stamps = packets.where(kept), stamps[kept]
            written += len(stamps)
            file.write(played.framer.records(packets, stamps, observed.truncate))
        for true_ns, frame in _afterwards(played, node):
            before = max(before, int(clock.local(np.array([true_ns]))[0]))
            written += 1
            file.write(_record(before, frame, observed.snaplen, observed.truncate))
    return Capture(name, node, clock, written, missed, passed)


def _afterwards(played: Played, node: int | None) -> Iterator[tuple[int, bytes]]:
    """Time and bytes of what NICs go on sending while a job stands still, or some ranks do: LLDP (IEEE
    802.1AB)."""
    for fault in played.scenario.faults:
        if isinstance(fault, (EarlyStop, Stop)):
            for port in (port for port in played.network.nics if node in (None, port.node)):
                mac = played.network.addresses[port.number].mac
                told = b"\x02\x07\x04" + mac + b"\x04\x07\x03" + mac + b"\x06\x02\x00\x78\x00\x00"
                frame = b"\x01\x80\xc2\x00\x00\x0e" + mac + b"\x88\xcc" + told
                yield round(played.end_ns + getattr(fault, "us", 0.0) * 1e3), frame.ljust(60, b"\0")


def _record(stamp_ns: int, frame: bytes, snaplen: int, truncate: int) -> bytes:
    """One pcap record of a whole frame."""
    if truncate:
        frame = frame[:truncate]
    kept = frame[:snaplen] if snaplen else frame
    return struct.pack("<IIII", stamp_ns // 10**9, stamp_ns % 10**9, len(kept), len(frame)) + kept


@contextmanager
def _file(path: Path, compress: bool) -> Iterator[Any]:
    """A file to write into; the same content gives the same bytes."""
    with open(path, "wb") as plain:
        if compress:
            with GzipFile("", "wb", compresslevel=1, fileobj=plain, mtime=0) as packed:
                yield packed
        else:
            yield plain
