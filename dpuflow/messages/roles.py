"""What the messages of a RoCE flow are to the library: NCCL's clear-to-send entries.

In: MESSAGE rows, FLOW rows with peers, kept payload words. Out: role, announces, tag, sub of the rows.
A connection of NCCL's net_ib carries WRITE WITH IMMEDIATE one way and small single-packet WRITEs the
other way, each of which grants one message; the traffic pattern decides, sizes alone do not.
Source: NVIDIA/nccl src/transport/net_ib, versions 2.18 to 2.30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schema.rows import NONE32, Transport

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows


class Entry(NamedTuple):
    """Layout of one clear-to-send entry: its size and where tag and index lie, little endian."""

    unit: int
    tag: int
    counter: int


# NCCL 2.18, 2.20, 2.25 and 2.30, each until the next
ENTRIES = (Entry(32, 20, 24), Entry(64, 24, 32), Entry(64, 36, 40), Entry(64, 52, 56))
STRIDES = (256, 512)  # from one entry's address to the next one's


def assign_roles(
    rows: Rows, flows: Rows, words: NDArray[np.uint32], with_imm: NDArray[np.bool_], writes: NDArray[np.int64]
) -> None:
    """Set role, announces, tag and sub of messages that are clear-to-send entries, in place.

    ``with_imm`` says which flows carry WRITE WITH IMMEDIATE, ``writes`` how many other WRITEs each has.
    """
    from dpuflow.kernels.grants import WORD_PLACES, WORD_ROW, read_entries, read_layouts, write_entries

    if not len(words):
        return
    column = {int(place): k for k, place in enumerate(WORD_PLACES)}
    # Rows are read and written once, in their own order, which memory likes; sorting is for what was read.
    flow, psn, size = np.empty((3, len(words)), np.int64)
    read_entries(rows, words, flow, psn, size)
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
            granting[k] = _steps(rows["va"][words[order[start : start + n], WORD_ROW]])
    if not granting.any():
        return
    order, sizes = order[np.repeat(granting, sizes)], sizes[granting]
    layouts = [[e.unit, e.tag, column[e.tag], e.counter, column[e.counter]] for e in ENTRIES]
    found = np.zeros((len(words), 3), np.uint32)
    read_layouts(words, order, np.r_[0, np.cumsum(sizes)], psn, size, np.array(layouts, np.int64), found)
    write_entries(rows, words, found)


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
