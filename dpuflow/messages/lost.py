"""Packets that a capture missed although the network delivered them: NCCL's messages, whole again.

In: MESSAGE rows of one capture with their roles, what was seen of each one's ends, FLOW rows. Out: the rows
with what PSNs prove about the packets between them (InfiniBand volume 1, 9.7.2: one a packet, none left out).

A hole before a message without a FIRST holds its beginning, one between two whole messages a message of its
own. Every packet but a message's last one is as long as the MTU, so its bytes are certain once its LAST was
seen. Clear-to-send entries (one packet each) are numbered; so are those that lie in holes. Times cannot be
restored: a message that lacks its beginning is HIDDEN and has a GAP; one of which nothing was seen counts as
cut at both ends as well, so that what it is part of is not complete, unless another capture saw it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Role, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

_HAS_FIRST, _HAS_LAST, _SIZED = 1, 2, 4  # kernels.lanes
_CUT: Final = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER
_UNSEEN: Final = np.uint8(_CUT | MessageFlag.GAP | MessageFlag.HIDDEN)
MTUS: Final = (256, 512, 1024, 2048, 4096)
"""Path MTUs of InfiniBand (volume 1, 9.7.2)."""
MOST_LOST: Final = 0.1
"""With more of a flow's packets missing (a sampled capture) a hole's neighbours are often missing, too."""


def restore(
    rows: Rows, status: NDArray[np.uint8], flows: Rows, with_imm: NDArray[np.bool_]
) -> tuple[Rows, bool]:
    """The rows, mended in place, with those that lie in holes; and whether anything was changed.

    ``status`` says of each row which ends were seen (``kernels.lanes``), ``with_imm`` of each flow whether it
    carries WRITE WITH IMMEDIATE. Only these and the clear-to-send entries that pay for them are looked at.
    """
    lossy = flows["missing"] > 0
    lossy[rows["flow"][(rows["flags"] & MessageFlag.GAP) != 0]] = True
    data = np.flatnonzero(with_imm[: len(flows)] & (flows["peer"] != NONE32))
    peers = flows["peer"][data].astype(np.int64)
    concerned = lossy[data] | lossy[peers]
    data, peers = data[concerned], peers[concerned]
    if not len(data):
        return rows, False
    wanted = np.zeros(len(flows), bool)
    wanted[data] = wanted[peers] = True
    at = np.flatnonzero(wanted[rows["flow"]])
    at = at[np.lexsort((rows["seq"][at], rows["flow"][at]))]
    starts = np.searchsorted(rows["flow"][at], np.arange(len(flows) + 1))
    made: list[Rows] = []
    for flow, peer in zip(data.tolist(), peers.tolist(), strict=True):
        written, granted = (at[starts[each] : starts[each + 1]] for each in (flow, peer))
        if with_imm[peer] or _too_lossy(rows, written) or _too_lossy(rows, granted):
            continue
        paid = len(granted) > 0 and bool((rows["role"][granted] == Role.GRANT).all())
        _mend(rows, written, status, paid)
        if not paid:
            continue
        added = _unseen_data(rows, written)
        if added is not None:
            made += [added, _unseen_entries(rows, granted)]
    if any(map(len, made)):
        return np.concatenate([rows, *made]), True
    return rows, True


def _too_lossy(rows: Rows, mine: NDArray[np.int64]) -> bool:
    """Whether more than MOST_LOST of the packets that ``mine`` (in order of PSN) span is missing."""
    if not len(mine):
        return False
    extent = int(rows["seq_end"][mine].max()) - int(rows["seq"][mine[0]])
    return int(rows["packets"][mine].sum()) < (1 - MOST_LOST) * extent


def _mtu(rows: Rows, whole: NDArray[np.int64]) -> int | None:
    """The MTU that turns the bytes of all ``whole`` messages into their packets, if there is just one."""
    several = whole[rows["packets"][whole] > 1]
    size, packets = rows["bytes"][several].astype(np.int64), rows["packets"][several].astype(np.int64)
    fits = [mtu for mtu in MTUS if len(several) and (-(-size // mtu) == packets).all()]
    return fits[0] if len(fits) == 1 else None


def _mend(rows: Rows, mine: NDArray[np.int64], status: NDArray[np.uint8], split: bool) -> None:
    """Give messages of one flow, in order of PSN, the beginnings, ends and bytes that lie in holes.

    ``split``: of two that were taken for one the second will be put into the hole that is left.
    """
    flags, wire, ends = rows["flags"][mine], rows["wire"][mine], status[mine]
    gap = (flags & MessageFlag.GAP) != 0
    cut = (flags & _CUT) != 0
    whole = mine[~gap & ~cut]
    # NCCL's data is either all WITH IMMEDIATE, or a WRITE and an empty one with it behind.
    if not (wire[~gap & ~cut] == Wire.ROCE_WRITE).any():
        rows["wire"][mine[gap & (ends & _HAS_LAST == 0) & (wire == Wire.ROCE_WRITE)]] = Wire.ROCE_WRITE_IMM
    mtu = _mtu(rows, whole)
    if mtu is None:
        return
    spans, times = np.unique((rows["seq_end"] - rows["seq"])[whole].astype(np.int64), return_counts=True)
    usual = spans[np.argsort(-times, kind="stable")]
    lacking = gap & ~cut & (ends & (_HAS_FIRST | _SIZED) == 0) & (ends & _HAS_LAST != 0)
    for k in np.flatnonzero(lacking).tolist():
        row, before = int(mine[k]), int(mine[k - 1]) if k else -1
        hole = int(rows["seq"][row]) - int(rows["seq_end"][before]) if k else 0
        if hole < 1:
            continue
        span = int(rows["seq_end"][row]) - int(rows["seq"][row])
        fits = usual[(usual > span) & (usual <= span + hole)]
        lead = hole if hole == 1 or not len(fits) else int(fits[0]) - span
        rows["seq"][row] -= np.uint64(lead)
        rows["bytes"][row] += np.uint64((span + lead - int(rows["packets"][row])) * mtu)
        rows["flags"][row] |= MessageFlag.HIDDEN
        if split and span + lead == 2 * usual[0] and span + lead > spans.max():
            # The end of one and the beginning of the next lie in one hole: the second is left to this hole.
            rows["seq_end"][row] = rows["seq"][row] + np.uint64(usual[0])
            rows["bytes"][row] = _usual_bytes(rows, whole, int(usual[0]))
            rows["packets"][row] = min(int(rows["packets"][row]), int(usual[0]))
            rows["last_ns"][row], rows["last_frame"][row] = rows["first_ns"][row], rows["first_frame"][row]
            rows["flags"][row] |= _UNSEEN
    _mend_ends(rows, mine, whole, gap & ~cut & (ends & (_HAS_LAST | _SIZED) == 0), ends)


def _mend_ends(
    rows: Rows,
    mine: NDArray[np.int64],
    whole: NDArray[np.int64],
    lacking: NDArray[np.bool_],
    ends: NDArray[np.uint8],
) -> None:
    """Messages without end and length fill the room between their neighbours, if others have that size."""
    for k in np.flatnonzero(lacking[:-1]).tolist():
        row, begun = int(mine[k]), bool(ends[k] & _HAS_FIRST)
        if not begun and k == 0:
            continue
        low = rows["seq"][row] if begun else rows["seq_end"][mine[k - 1]]
        high = rows["seq"][mine[k + 1]]
        size = _usual_bytes(rows, whole, int(high) - int(low))
        if size is None:
            continue
        rows["seq"][row], rows["seq_end"][row], rows["bytes"][row] = low, high, size
        rows["flags"][row] |= MessageFlag.GAP if begun else MessageFlag.HIDDEN


def _usual_bytes(rows: Rows, whole: NDArray[np.int64], packets: int) -> int | None:
    """What a ``whole`` message of so many packets mostly carries; None where there is none."""
    like = whole[rows["packets"][whole] == packets]
    if not len(like):
        return None
    carried, times = np.unique(rows["bytes"][like], return_counts=True)
    return int(carried[times.argmax()])


def _holes(rows: Rows, mine: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of ``mine`` (in order of PSN) have a hole behind them, and how many PSNs it has."""
    size = rows["seq"][mine[1:]].astype(np.int64) - rows["seq_end"][mine[:-1]].astype(np.int64)
    at = np.flatnonzero(size > 0)
    return at, size[at]


def _unseen_data(rows: Rows, mine: NDArray[np.int64]) -> Rows | None:
    """Rows for the messages in the holes of a flow with data; None where holes may hold several.

    What a message of so many packets usually carries on this flow stands for its bytes.
    """
    at, sizes = _holes(rows, mine)
    whole = mine[(rows["flags"][mine] & (_CUT | MessageFlag.GAP)) == 0]
    found = np.zeros(len(at), rows.dtype)
    for made, k, size in zip(found, at.tolist(), sizes.tolist(), strict=True):
        carried = _usual_bytes(rows, whole, size)
        if carried is None:
            return None
        _blank(made, rows, mine[k], mine[k + 1], int(rows["seq_end"][mine[k]]), size)
        made["bytes"], made["wire"], made["role"] = carried, Wire.ROCE_WRITE_IMM, Role.DATA
    return found


def _unseen_entries(rows: Rows, mine: NDArray[np.int64]) -> Rows:
    """Rows for the clear-to-send entries in the holes of a flow of nothing else."""
    at, sizes = _holes(rows, mine)
    found = np.zeros(int(sizes.sum()), rows.dtype)
    # Entries whose numbers were not captured have been counted, those in holes left out.
    counted = rows["sub"][mine].astype(np.int64)
    step = rows["seq"][mine].astype(np.int64) - int(rows["seq"][mine[0]]) if len(mine) else counted
    if len(at) and np.array_equal(counted, counted[0] + np.arange(len(counted))):
        rows["sub"][mine] = (counted[0] + step).astype(np.uint32)
    number = 0
    for k, size in zip(at.tolist(), sizes.tolist(), strict=True):
        before, seq = mine[k], int(rows["seq_end"][mine[k]])
        for more in range(size):
            made = found[number]
            _blank(made, rows, before, mine[k + 1], seq + more, 1)
            made["bytes"], made["wire"], made["role"] = (
                rows["bytes"][before],
                rows["wire"][before],
                Role.GRANT,
            )
            made["announces"], made["tag"] = rows["announces"][before], rows["tag"][before]
            made["sub"] = rows["sub"][before] + np.uint32(seq + more - int(rows["seq"][before]))
            number += 1
    return found


def _blank(made: np.void, rows: Rows, before: np.int64, after: np.int64, seq: int, span: int) -> None:
    """Fill in what is known of a message that nobody saw, between the rows ``before`` and ``after``."""
    skipped = seq - int(rows["seq_end"][before])
    when = min(int(rows["last_ns"][before]) + 1 + skipped, int(rows["first_ns"][after]))
    made["first_ns"] = made["last_ns"] = max(when, int(rows["last_ns"][before]))
    made["first_frame"] = made["last_frame"] = rows["last_frame"][before]
    made["acked_ns"], made["flow"], made["flags"] = NEVER, rows["flow"][before], _UNSEEN
    made["seq"], made["seq_end"] = seq, seq + span
