"""Whether messages of an operation wait for what they need, and which of NCCL's protocols that shows.

In: what the messages between two cuts may be, by their sizes (``layouts``), and their times. Out: whether
nothing leaves before what it needs has come; the protocol, with the bytes of the data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.matching.protocols import HELD, LINES, LL, RING_SLOT, STEP_SLOT
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.matching.lanes import Lane, Layout

SAMPLE: Final = 16
"""Operations that show whether they make sense."""
RARE: Final = 0.1
"""Share of messages that may seem to leave before what they need has come: packets that came twice, late or
out of order."""
_FAR = np.iinfo(np.int64).max


def is_causal(layout: Layout, lanes: Sequence[Lane]) -> bool:
    """Whether what the operation's messages need had come before they left."""
    name = layout.algorithm.name
    if name == "chain":
        return _pass_on(lanes, 0)
    if name == "tree":
        return not _in_turns(lanes)
    if name != "ring" or layout.ranks:
        return True
    return _pass_on(lanes, 2 if lanes[0].slot == RING_SLOT else 1)


def _in_turns(lanes: Sequence[Lane]) -> bool:
    """Whether all ranks wait somewhere for all that comes before they send more: as if it were several
    operations. A tree's ranks go on with the next chunk while the one before is on its way."""
    (count, *others) = {len(lane.sizes) for lane in lanes}
    if others:
        return False
    ends = {end for lane in lanes for end in lane[:2]}
    waited = np.ones(count - 1, bool)
    for end in ends:
        came = np.max([lane.arrivals[0] for lane in lanes if lane.dst == end], axis=0)
        goes = [np.where(lane.starts[0] == NEVER, _FAR, lane.starts[0]) for lane in lanes if lane.src == end]
        waited &= np.min(goes, axis=0)[1:] > came[:-1]
    return bool(waited.any())


def _pass_on(lanes: Sequence[Lane], behind: int) -> bool:
    """Whether every rank sends message i + ``behind`` after message i has come.

    Which of several channels with as many bytes goes on as which is not known, so the first of them that
    leaves is held against the first that came, and so on.
    """
    into: dict[tuple[int, tuple[int, int]], list[Lane]] = {}
    for lane in lanes:
        into.setdefault((lane.dst, lane.kind), []).append(lane)
    out: dict[tuple[int, tuple[int, int]], list[Lane]] = {}
    for lane in lanes:
        out.setdefault((lane.src, lane.kind), []).append(lane)
    early = seen = 0
    for key, came in into.items():
        goes = out.get(key, [])
        if len(goes) != len(came):
            continue  # of a chain
        count = came[0].arrivals.shape[1] - behind
        before = np.sort([lane.arrivals[:SAMPLE, :count] for lane in came], axis=0)
        then = np.sort([lane.starts[:SAMPLE, behind:] for lane in goes], axis=0)
        known = (before[0] != NEVER) & (then[0] != NEVER)
        seen += len(came) * int(known.sum())
        early += int(((then < before) & known).sum())
    return early <= RARE * seen


def of_protocol(
    fits: dict[int, Layout], lanes: Sequence[Lane]
) -> tuple[Layout, str | None, tuple[int, int] | None]:
    """The operation with its protocol and bytes, from how it reads with each slot that fits.

    With LL each message of a ring waits for the one before; with Simple two slices go together. A small
    operation of one message a rank tells nothing of its protocol, so its bytes are one or the other number.
    """
    simple = next((fits[slot] for slot in (RING_SLOT, STEP_SLOT) if slot in fits), None)
    lines = fits.get(LL)
    if lines is not None:
        size = None if lines.size is None else lines.size // LINES[LL] * HELD[LL]
        lines = lines._replace(size=size)
    if lines is None:
        assert simple is not None
        return simple, "simple", None
    if simple is None:
        return lines, "ll", None
    if lines.algorithm.name == "ring":
        return (lines, "ll", None) if _pass_on(lanes, 1) else (simple, "simple", None)
    between = (lines.size, simple.size) if simple.size and lines.size else None
    return simple._replace(size=None), None, between
