"""What the messages of a RoCE flow are to the library: NCCL's clear-to-send entries.

In: MESSAGE rows, FLOW rows with peers, kept payload words. Out: role, announces, tag, sub of the rows.
A connection of NCCL's net_ib carries WRITE WITH IMMEDIATE one way and small single-packet WRITEs the
other way, each of which grants one message; the traffic pattern decides, sizes alone do not.
Source: NVIDIA/nccl src/transport/net_ib, versions 2.18 to 2.30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schema import NONE32, Role, Transport, Wire
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


def assign_roles(rows: Rows, flows: Rows, words: NDArray[np.uint32]) -> None:
    """Set role, announces, tag and sub of messages that are clear-to-send entries, in place."""
    from dpuflow.kernels.roce import WORD_LENGTH, WORD_PLACES, WORD_ROW

    if not len(words):
        return
    column = {int(place): k for k, place in enumerate(WORD_PLACES)}
    kinds = np.bincount(rows["flow"].astype(np.int64) << 5 | rows["wire"] & 31, minlength=len(flows) << 5)
    with_imm = kinds[Wire.ROCE_WRITE_IMM :: 32] > 0
    writes = kinds[Wire.ROCE_WRITE :: 32]
    flow_of = rows["flow"][words[:, WORD_ROW]]
    order = np.lexsort((rows["seq"][words[:, WORD_ROW]], flow_of))
    bounds = np.searchsorted(flow_of[order], np.arange(len(flows) + 1))
    for flow in np.unique(flow_of):
        small = words[order[bounds[flow] : bounds[flow + 1]]]
        at = small[:, WORD_ROW]
        if with_imm[flow] or not _granted(flow, flows, with_imm, len(at) == writes[flow], rows, at):
            continue
        length = small[:, WORD_LENGTH].astype(np.int64)
        rows["role"][at] = Role.GRANT
        rows["announces"][at] = np.where(length >= CAPACITY + 4, small[:, column[CAPACITY]], 0)
        rows["sub"][at] = np.arange(1, len(at) + 1)
        psn = rows["seq"][at].astype(np.int64) & PSN_MASK
        for entry in ENTRIES:
            index = small[:, column[entry.counter]].astype(np.int64)
            seen = int(length.min()) - entry.counter
            bits = 32 if seen >= 4 else 16 if seen >= 2 else 0
            fits = bits > 0 and bool((rows["bytes"][at] % entry.unit == 0).all())
            if not fits or not _counts_up(index, psn, bits):
                continue
            # Only the low bits may be captured: the PSN, which counts the same, has the others.
            rows["sub"][at] = index if bits == 32 else psn + 1 + _signed16(index - psn - 1)
            if (length >= entry.tag + 4).all():
                rows["tag"][at] = small[:, column[entry.tag]]
            break


def _granted(
    flow: int, flows: Rows, with_imm: NDArray[np.bool_], only: bool, rows: Rows, at: NDArray[np.uint32]
) -> bool:
    """Whether the small writes of ``flow`` grant messages of the opposite flow.

    Where the opposite flow is not known: whether the flow has nothing but small writes (``only``) that step
    through a table, and some flow the other way carries immediates.
    """
    peer = int(flows["peer"][flow])
    if peer != NONE32:
        return bool(with_imm[peer])
    back = (flows["src"] == flows["dst"][flow]) & (flows["dst"] == flows["src"][flow])
    back &= (flows["transport"] == Transport.ROCE) & with_imm[: len(flows)]
    steps = np.diff(rows["va"][at].astype(np.int64))
    even = len(steps) > 0 and bool(2 * np.isin(steps, STRIDES).sum() > len(steps))
    return only and even and bool(back.any())


def _signed16(difference: NDArray[np.int64]) -> NDArray[np.int64]:
    return ((difference + (1 << 15)) & 0xFFFF) - (1 << 15)


def _counts_up(index: NDArray[np.int64], psn: NDArray[np.int64], bits: int) -> bool:
    """Whether an index grows as the PSNs do, which is by one a message; a lone one must equal PSN + 1."""
    mask = (1 << bits) - 1
    if len(index) == 1:
        return bool((index[0] - psn[0] - 1) & mask == 0)
    same = (np.diff(index) - np.diff(psn)) & mask & PSN_MASK == 0
    return bool(2 * same.sum() > len(same)) and bool((index != 0).any())
