"""Captures in, those that hold only a sample of the packets set aside: their messages are in pieces.

Switches and collectors pass on one of so many packets (sFlow, psample). Numbers on the wire tell: a PSN is
one packet (InfiniBand volume 1, 9.7.2), a TCP sequence number one byte (RFC 9293, 3.4). Of a sample the
packets captured span many times as many numbers, all flows alike, with a hole nearly everywhere. Packets lost
in the capture leave few holes, however wide; a queue pair used again leaves one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import Transport, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import CaptureTables, Rows

    Floats = NDArray[np.float64]

LEAST: Final = 1.5
"""Numbers for each packet captured: with a third of the packets missing a message is whole by chance only."""
FEWEST: Final = 100
"""Packets with numbers: fewer tell nothing."""
TWICE: Final = 2.0
"""Times what chance makes flows differ in how many of their packets are in it: beyond, no even sample."""


@dataclass(frozen=True)
class Sample:
    """A capture that holds about one of ``one_of`` packets; ``even``: of all flows alike."""

    one_of: float
    even: bool


def set_aside_samples(captures: Sequence[CaptureTables]) -> tuple[list[CaptureTables], list[str]]:
    """The captures, sampled ones marked and without their messages; a sentence for each of these."""
    found = [find_sample(tables) for tables in captures]
    kept = [
        tables
        if sample is None
        else replace(tables, info=replace(tables.info, sampled=sample.one_of), messages=tables.messages[:0])
        for tables, sample in zip(captures, found, strict=True)
    ]
    names = [tables.info.vantage for tables in captures]
    return kept, list(_sentences(names, found))


def left_out(captures: Sequence[CaptureTables]) -> list[str]:
    """What captures say themselves of packets that they left out: a sentence for each."""
    return [
        f"{tables.info.vantage}: an agent short of CPU or memory followed a part of all pairs of hosts:"
        f" {count:,} packets of the others were left out. Nothing can be said of those pairs."
        for tables in captures
        if (count := tables.info.skipped.get("sampled_out", 0))
    ]


def _sentences(names: Sequence[str], found: Sequence[Sample | None]) -> Iterator[str]:
    """What such captures are, and what they can show."""
    for even in (True, False):
        mine = [
            (name, each.one_of) for name, each in zip(names, found, strict=True) if each and each.even == even
        ]
        if not mine:
            continue
        numbers = [one_of for _, one_of in mine]
        many = f"{min(numbers):.3g}" + (
            f" to {max(numbers):.3g}" if max(numbers) > 1.1 * min(numbers) else ""
        )
        who = ", ".join(name for name, _ in mine)
        what = (
            f"sampled at about 1 of {many} packets: the sequence numbers of all flows have holes nearly"
            " everywhere."
            if even
            else f"about 1 of {many} packets was captured, of some flows more than of others: a sample,"
            " some of the paths, or a capture that lost the rest."
        )
        yield (
            f"{who}: {what} That is too few to follow messages, so neither collectives nor lateness can"
            " be inferred; rates and ECN marks can, with the error of a sample. To see who is late, capture"
            " every packet at the nodes (128 bytes of each are enough)."
        )


def find_sample(tables: CaptureTables) -> Sample | None:
    """What the capture is a sample of; None for a whole one, and for one that tells too little."""
    spans, seen, sparse = _roce(tables.messages, tables.flows)
    for each, more in zip((spans, seen, sparse), _tcp(tables.messages, tables.flows), strict=True):
        each += more
    counted = seen >= 2
    if seen[counted].sum() < FEWEST:
        return None
    # One more packet than spaces between them.
    ratio, weight = (spans[counted] - 1) / (seen[counted] - 1), seen[counted]
    order = np.argsort(ratio)
    middle = order[np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)]
    one_of = float(ratio[middle])
    # Of a sample all but one of so many packets has a hole behind it; half of that leaves room.
    if one_of < LEAST or 2 * sparse[counted].sum() < (1 - 1 / one_of) * weight.sum():
        return None
    alike = ratio < 2 * one_of  # what was used again in between counts for nothing here
    one_of = float((spans[counted][alike] - 1).sum() / (weight[alike] - 1).sum())
    expected = spans[counted] / one_of
    off = (weight - expected) ** 2 / np.maximum(expected * (1 - 1 / one_of), 1.0)
    return Sample(one_of, even=float(off.mean()) < TWICE**2)


def _roce(rows: Rows, flows: Rows) -> tuple[Floats, Floats, Floats]:
    """Of each flow the PSNs that it spans, the packets captured, and those of them with a hole around."""
    spans, seen, sparse = np.zeros((3, len(flows)))
    wire = rows["wire"]
    sends = (wire >= Wire.ROCE_SEND) & (wire <= Wire.ROCE_SEND_IMM) & (wire != Wire.ROCE_READ)
    flow = rows["flow"].astype(np.int64)
    # Requests to READ take PSNs that the other side's packets have.
    asks = np.bincount(flow[wire == Wire.ROCE_READ], minlength=len(flows)) > 0
    mine = np.flatnonzero(sends & ~asks[flow]) if len(rows) else np.zeros(0, np.int64)
    if not len(mine):
        return spans, seen, sparse
    flow, begin = flow[mine], rows["seq"][mine].astype(np.int64)
    packets: Floats = rows["packets"][mine].astype(np.float64)
    low, high = np.full(len(flows), np.iinfo(np.int64).max), np.full(len(flows), -1)
    np.minimum.at(low, flow, begin)
    np.maximum.at(high, flow, rows["seq_end"][mine].astype(np.int64))
    seen[:] = np.bincount(flow, packets, len(flows))
    spans[:] = np.where(high >= 0, high - low, 0)
    if spans.sum() < LEAST * seen.sum():
        return spans, seen, sparse
    order = np.lexsort((begin, flow))
    following = np.append(begin[order][1:], 0)
    last = np.append(np.diff(flow[order]) != 0, True)
    until = np.where(last, rows["seq_end"][mine][order].astype(np.int64), following)
    wide = until - begin[order] >= LEAST * packets[order]
    sparse[:] = np.bincount(flow[order], packets[order] * wide, len(flows))
    return spans, seen, sparse


def _tcp(rows: Rows, flows: Rows) -> tuple[Floats, Floats, Floats]:
    """The same of TCP: bytes as segments of the size that the flow's have on average."""
    spans, seen, sparse = np.zeros((3, len(flows)))
    streams = np.flatnonzero((flows["transport"] == Transport.TCP) & (flows["bytes"] > 0))
    if not len(streams):
        return spans, seen, sparse
    stream = np.zeros(len(flows), bool)
    stream[streams] = True
    mine = np.flatnonzero(stream[rows["flow"]])
    low, high = np.full(len(flows), np.iinfo(np.int64).max), np.full(len(flows), -1)
    np.minimum.at(low, rows["flow"][mine], rows["seq"][mine].astype(np.int64))
    np.maximum.at(high, rows["flow"][mine], rows["seq_end"][mine].astype(np.int64))
    share = np.where(high >= 0, high - low, 0) / np.maximum(flows["bytes"], 1).astype(np.float64)
    seen = np.where(stream, flows["packets"], 0).astype(np.float64)
    spans = share * seen
    return spans, seen, np.where(2 * flows["missing"] >= seen / 2, seen, 0.0)
