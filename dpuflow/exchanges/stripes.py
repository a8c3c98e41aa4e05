"""Queue pairs that carry one connection of NCCL together: TRANSFER rows in, the same as one connection out.

With NCCL_IB_QPS_PER_CONNECTION above 1 messages go over a connection's queue pairs in turn, while its
clear-to-send entries use the first one only (NCCL 2.30, src/transport/net_ib/common.h
ncclIbCommBaseGetQpForRequest, p2p.h ncclIbRecvCommGetQpForCts). So data without entries belongs to the
entries that announce where it goes. Where no address was captured, or processes that share an adapter have
buffers at the same ones, to those that allowed as many messages, each before it was sent. Queue pairs of one
connection write to the same staging buffer in turn: where they begin is at most a slot apart. With
adaptive routing a message is a WRITE and an empty WRITE with immediate behind it; both go where the first
one goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.schema.rows import Role, Wire
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

AHEAD = NCCL_STEPS
"""Entries that may be out before their data, at a capture's end too."""
HELD = 0.99
"""Share of messages that must follow their entries: clocks of two nodes may be a little off."""


@dataclass
class _Line:
    """One direction of a queue pair: its messages and the entries that allow them, as places in ``part``."""

    number: int  # of its connection
    data: NDArray[np.int64]
    entries: NDArray[np.int64]
    lowest: int  # address that data was written to
    slot: int  # bytes that an entry announces
    targets: NDArray[np.uint64]  # addresses that entries announce, as far as they were captured, in order


def striped(granted: NDArray[np.int64], written: NDArray[np.int64]) -> bool:
    """Whether queue pairs may share connections, from the entries and WRITEs of each way of each: some have
    none of the entries, and some more than they carry."""
    return bool(((granted == 0) & (written > 0)).any() and (granted > written).any())


def bundled(transfers: Rows, part: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
    """``transfers`` and ``part`` with the queue pairs of each connection of NCCL made one.

    ``part`` are rows of DATA and GRANT in order of time; messages of joined queue pairs then stand in turn.
    """
    names = ["connection", "src", "dst", "role", "wire", "bytes", "va", "announces", "sent_ns"]
    rows = transfers[names][part]
    tail = tails_of(rows)
    joined = [
        (credit, group)
        for lines in _ways(rows, tail)
        for credit, group in _by_address(rows, lines) or _matched(rows, lines)
        if any(line is not credit for line in group)
    ]
    if not joined:
        return transfers, part
    transfers, out = transfers.copy(), part.copy()
    for credit, group in joined:
        place = _with_tails(_in_order(rows, credit, group), tail)
        order = part[place]
        out[np.sort(place)] = order
        transfers["connection"][order] = credit.number
    return transfers, out


def tails_of(rows: Rows) -> NDArray[np.int64]:
    """For each WRITE the place of the empty one with immediate that ends it, -1 for none; -2 for these."""
    tail = np.full(len(rows), -1)
    data = np.flatnonzero(
        (rows["role"] != Role.GRANT) & np.isin(rows["wire"], (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM))
    )
    plain = rows["wire"][data] == Wire.ROCE_WRITE
    if not plain.any():
        return tail
    way = 2 * rows["connection"][data].astype(np.int64) + (rows["src"][data] > rows["dst"][data])
    order = np.argsort(way, kind="stable")
    data, plain, way = data[order], plain[order], way[order]
    empty = ~plain & (rows["bytes"][data] == 0)
    pair = np.flatnonzero(plain[:-1] & empty[1:] & (way[1:] == way[:-1]))
    tail[data[pair]], tail[data[pair + 1]] = data[pair + 1], -2
    return tail


def _with_tails(places: NDArray[np.int64], tail: NDArray[np.int64]) -> NDArray[np.int64]:
    """``places`` of messages, each followed by that of its tail."""
    both = np.stack([places, tail[places]], axis=1).ravel()
    return both[both >= 0]


def _ways(rows: Rows, tail: NDArray[np.int64]) -> Iterator[list[_Line]]:
    """The lines from one endpoint to another, for each two where some lack entries and some have too many."""
    grant = rows["role"] == Role.GRANT
    entry = grant & (rows["announces"] > 0)
    data = ~grant & np.isin(rows["wire"], (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM)) & (tail != -2)
    if not entry.any() or not data.any():
        return
    sender = np.where(grant, rows["dst"], rows["src"])
    key = 2 * rows["connection"].astype(np.int64) + (sender == np.maximum(rows["src"], rows["dst"]))
    keys = int(key.max()) + 1
    granted, written = np.bincount(key[entry], minlength=keys), np.bincount(key[data], minlength=keys)
    bare, rich = (granted == 0) & (written > 0), granted > written
    if not bare.any() or not rich.any():
        return
    ways: dict[tuple[int, int], list[_Line]] = {}
    picked = np.flatnonzero(bare | rich)
    of_these = np.flatnonzero((bare | rich)[key] & (data | entry))
    of_these = of_these[np.argsort(key[of_these], kind="stable")]
    bounds = np.searchsorted(key[of_these], np.append(picked, keys))
    for number, each in enumerate(picked.tolist()):
        mine = of_these[bounds[number] : bounds[number + 1]]
        some, allowed = mine[data[mine]], mine[entry[mine]]
        at = int((some if len(some) else allowed)[0])
        ends = int(rows["src"][at]), int(rows["dst"][at])
        lowest = int(rows["va"][some].min()) if len(some) else -1
        slot = int(rows["announces"][allowed].max(initial=0))
        told = rows["va"][allowed]
        line = _Line(each // 2, some, allowed, lowest, slot, distinct(told[told > 0]))
        ways.setdefault(ends if len(some) else ends[::-1], []).append(line)
    yield from ways.values()


def _by_address(rows: Rows, lines: Sequence[_Line]) -> list[tuple[_Line, list[_Line]]]:
    """Lines with entries, each with the lines whose data goes where these announce; none if that is open.

    At a capture's beginning data may go where no entry announced it within the capture.
    """
    credits_ = [line for line in lines if len(line.targets)]
    groups: list[list[_Line]] = [[] for _ in credits_]
    for line in lines:
        if not len(line.data):
            continue
        va = rows["va"][line.data]
        fits = [number for number, credit in enumerate(credits_) if 2 * _goes_to(va, credit) > len(va)]
        if len(fits) != 1:
            return []
        groups[fits[0]].append(line)
    return [(credit, group) for credit, group in zip(credits_, groups, strict=True) if group]


def _goes_to(va: NDArray[np.uint64], credit: _Line) -> int:
    """How many of the addresses ``va`` lie in what the entries of ``credit`` announce."""
    at = np.searchsorted(credit.targets, va, "right") - 1
    return int(np.count_nonzero((at >= 0) & (va - credit.targets[at] < max(credit.slot, 1))))


def _matched(rows: Rows, lines: Sequence[_Line]) -> Iterator[tuple[_Line, list[_Line]]]:
    """Lines with entries to spare, each with the lines whose data these allow."""
    lines = _uneven(lines)
    credits_ = sorted((line for line in lines if len(line.entries)), key=lambda line: int(line.entries[0]))
    if not credits_:
        return
    for group in _side_by_side(lines, max(line.slot for line in credits_)):
        own = [line for line in group if len(line.entries)]
        tried = own or [line for line in credits_ if not len(line.data)]
        fits = [each for each in tried if _fits(rows, each, group)]
        # Several channels that do the same work look alike: which entries allow whose data stays open then.
        if len(own) < 2 and len(fits) == 1:
            credits_.remove(fits[0])
            yield fits[0], group


def _uneven(lines: Sequence[_Line]) -> list[_Line]:
    """Lines with more entries than may be out at a capture's end, or none.

    Or with a few more, where one without any carries as many messages, or one less: queue pairs take turns.
    """
    turns = {len(line.data) + more for line in lines if not len(line.entries) for more in (0, 1)}
    return [
        line
        for line in lines
        if not len(line.entries)
        or len(line.entries) > len(line.data) + AHEAD
        or (len(line.data) in turns and 0 < len(line.data) < len(line.entries))
    ]


def _side_by_side(lines: Sequence[_Line], slot: int) -> list[list[_Line]]:
    """Lines with data into the same buffer's slots, those that began first first."""
    groups: list[list[_Line]] = []
    # The queue pair of the entries carries the first message, to the buffer's start: the next one with
    # entries begins another connection's buffer, be it right behind.
    carrying = [line for line in lines if len(line.data)]
    for line in sorted(carrying, key=lambda e: (e.lowest, not len(e.entries))):
        begins = len(line.entries) > 0 and bool(groups) and any(len(e.entries) for e in groups[-1])
        if groups and line.lowest - groups[-1][-1].lowest <= slot and not begins:
            groups[-1].append(line)
        else:
            groups.append([line])
    return sorted(groups, key=lambda group: min(int(line.data[0]) for line in group))


def _fits(rows: Rows, credit: _Line, group: Sequence[_Line]) -> bool:
    """Whether the entries may be those that allow the group's data."""
    return _even(credit, group) and _follows(rows, credit, group)


def _even(credit: _Line, group: Sequence[_Line]) -> bool:
    """Whether the queue pairs took turns; or the entries are more than may be out without messages."""
    counts = [len(line.data) for line in group]
    left = len(credit.entries) - len(credit.data)
    return left > AHEAD or (len(group) > 1 and max(counts) - min(counts) <= 1)


def _follows(rows: Rows, credit: _Line, group: Sequence[_Line]) -> bool:
    """Whether each message came after its entry, and there are as many."""
    data = _in_turn(sorted((line.data for line in group), key=lambda lane: int(lane[0])))
    if abs(len(data) - len(credit.entries)) > AHEAD:
        return False
    count = min(len(data), len(credit.entries))
    sent, allowed = rows["sent_ns"][data[:count]], rows["sent_ns"][credit.entries[:count]]
    return bool((sent >= allowed).mean() >= HELD)


def _in_order(rows: Rows, credit: _Line, group: Sequence[_Line]) -> NDArray[np.int64]:
    """Places of the messages of a connection's queue pairs, in turn.

    Which queue pair's turn was first is told by the addresses, which follow one another as in the entries: of
    what was under way when a capture began, the first packet seen need not be the earliest that left. Then
    the order of the queue pairs shows in the middle.
    """
    lanes = [line.data for line in group]
    middle = min(map(len, lanes)) // 2
    orders = [sorted(lanes, key=lambda lane: int(lane[turn])) for turn in (0, middle)]
    if len(lanes) == 1 or not len(credit.targets):
        return _in_turn(orders[0])
    steps = _steps(rows["va"][credit.entries])
    tries = [_in_turn(order[k:] + order[:k]) for order in orders for k in range(len(lanes))]
    return max(tries, key=lambda places: int(np.isin(_steps(rows["va"][places]), steps).sum()))


def _steps(va: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number for each two addresses that follow one another."""
    numbers: NDArray[np.uint64] = va[:-1] * np.uint64(0x9E3779B97F4A7C15) ^ va[1:]
    return numbers


def _in_turn(lanes: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Places of messages that go over ``lanes`` in turn, from the first on; by time where one lost some."""
    every = np.concatenate(lanes)
    if max(map(len, lanes)) - min(map(len, lanes)) > 1:
        return np.sort(every)
    turns = np.concatenate([np.arange(len(lane)) for lane in lanes])
    begin = np.repeat(np.arange(len(lanes)), [len(lane) for lane in lanes])
    return every[np.lexsort((begin, turns))]
