"""What the messages of a RoCE flow are to the library: NCCL's clear-to-send entries.

In: MESSAGE rows, FLOW rows with peers, kept payload words. Out: role, announces, tag, sub of the rows.
A connection of NCCL's net_ib carries WRITE WITH IMMEDIATE one way and small single-packet WRITEs the
other way, each of which grants one message; the traffic pattern decides, sizes alone do not.
Source: NVIDIA/nccl src/transport/net_ib, versions 2.18 to 2.30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schema import NONE32, Transport
from dpuflow.wire import PSN_MASK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.tables import Rows


class Entry(NamedTuple):
    """Layout of one clear-to-send entry: its size and where tag and index lie, little endian."""

    unit: int
    tag: int
    counter: int


# NCCL 2.18, 2.20, 2.25 and 2.30, each until the next
ENTRIES = (Entry(32, 20, 24), Entry(64, 24, 32), Entry(64, 36, 40), Entry(64, 52, 56))
CAPACITY = 8  # where the receive capacity lies in all of them
STRIDES = (256, 512)  # from one entry's address to the next one's


def assign_roles(
    rows: Rows, flows: Rows, words: NDArray[np.uint32], with_imm: NDArray[np.bool_], writes: NDArray[np.int64]
) -> None:
    """Set role, announces, tag and sub of messages that are clear-to-send entries, in place.

    ``with_imm`` says which flows carry WRITE WITH IMMEDIATE, ``writes`` how many other WRITEs each has.
    """
    from dpuflow.kernels.grants import WORD_LENGTH, WORD_PLACES, WORD_ROW, read_entries, write_entries

    if not len(words):
        return
    column = {int(place): k for k, place in enumerate(WORD_PLACES)}
    row_of = np.ascontiguousarray(words[:, WORD_ROW])
    # Rows are read and written once, in their own order, which memory likes; sorting is for what was read.
    flow, psn, size = np.empty((3, len(words)), np.int64)
    read_entries(rows, row_of, flow, psn, size)
    order, flow_of, starts = _by_flow(flow, psn)
    sizes = np.diff(np.append(starts, len(order)))
    granting = np.zeros(len(starts), bool)
    written = flows[(flows["transport"] == Transport.ROCE) & with_imm[: len(flows)]]
    ways = set(zip(written["src"].tolist(), written["dst"].tolist(), strict=True))
    for k, (each, start, n) in enumerate(zip(flow_of.tolist(), starts.tolist(), sizes.tolist(), strict=True)):
        if with_imm[each]:
            continue
        peer = int(flows["peer"][each])
        if peer != NONE32:
            granting[k] = with_imm[peer]
        elif n == writes[each] and (int(flows["dst"][each]), int(flows["src"][each])) in ways:
            granting[k] = _steps(rows["va"][row_of[order[start : start + n]]])
    if not granting.any():
        return
    order, sizes = order[np.repeat(granting, sizes)], sizes[granting]
    starts = np.cumsum(sizes) - sizes

    def word(k: int) -> NDArray[np.int64]:
        values: NDArray[np.int64] = np.ascontiguousarray(words[:, k])[order].astype(np.int64)
        return values

    psn, size, length = psn[order] & PSN_MASK, size[order], word(WORD_LENGTH)
    count = np.arange(1, len(order) + 1) - np.repeat(starts, sizes)
    tag = np.zeros(len(order), np.int64)
    shortest = np.minimum.reduceat(length, starts)
    left = np.ones(len(starts), bool)
    for entry in ENTRIES:
        seen = shortest - entry.counter
        bits = np.where(seen >= 4, 32, np.where(seen >= 2, 16, 0))
        fits = left & (bits > 0)
        if not fits.any():
            continue
        index = word(column[entry.counter])
        fits &= np.logical_and.reduceat(size % entry.unit == 0, starts)
        fits &= _counts_up(index, psn, bits, starts, sizes)
        left &= ~fits
        # Only the low bits may be captured: the PSN, which counts the same, has the others.
        whole = np.where(np.repeat(bits == 32, sizes), index, psn + 1 + _signed16(index - psn - 1))
        count = np.where(np.repeat(fits, sizes), whole, count)
        tagged = np.repeat(fits & (shortest >= entry.tag + 4), sizes)
        tag = np.where(tagged, word(column[entry.tag]), tag)
    capacity = np.where(length >= CAPACITY + 4, word(column[CAPACITY]), 0)
    number = np.full(len(words), -1)
    number[order] = np.arange(len(order))
    write_entries(rows, row_of, number, capacity, count, tag)


def _by_flow(
    flow: NDArray[np.int64], psn: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """What sorts by flow and extended PSN; then the flows, and where each one's run starts."""
    # A flow's messages end in order of PSN, but for late packets; 16 bits are sorted by counting.
    order = np.argsort(flow.astype(np.uint16) if flow.max() < 1 << 16 else flow, kind="stable")
    flow_of, psn_of = flow[order], psn[order]
    if ((psn_of[1:] < psn_of[:-1]) & (flow_of[1:] == flow_of[:-1])).any():
        order = np.lexsort((psn, flow))
        flow_of = flow[order]
    starts = np.flatnonzero(np.concatenate([[True], flow_of[1:] != flow_of[:-1]]))
    return order, flow_of[starts], starts


def _steps(addresses: NDArray[np.uint64]) -> bool:
    """Whether small writes step through a table.

    So do clear-to-send entries of a flow whose opposite is not known, if it has nothing but these, and some
    flow the other way carries immediates.
    """
    steps = np.diff(addresses.astype(np.int64))
    return len(steps) > 0 and bool(2 * np.isin(steps, STRIDES).sum() > len(steps))


def _signed16(difference: NDArray[np.int64]) -> NDArray[np.int64]:
    return ((difference + (1 << 15)) & 0xFFFF) - (1 << 15)


def _counts_up(
    index: NDArray[np.int64],
    psn: NDArray[np.int64],
    bits: NDArray[np.int64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """For each flow whether an index grows as the PSNs do, by one a message; a lone one must be PSN + 1."""
    mask = (np.int64(1) << bits) - 1
    same = np.zeros(len(index), bool)
    same[1:] = (np.diff(index) - np.diff(psn)) & np.repeat(mask, sizes)[1:] & PSN_MASK == 0
    same[starts] = False
    steps = np.add.reduceat(same.astype(np.int64), starts)
    counting = (2 * steps > sizes - 1) & np.logical_or.reduceat(index != 0, starts)
    alone: NDArray[np.bool_] = (index[starts] - psn[starts] - 1) & mask == 0
    return np.where(sizes == 1, alone, counting)
