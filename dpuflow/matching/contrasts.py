"""Whether ranks paused before operations that were cut out, as they do between two, and less within.

In: parts that are operations, pipes with the times of their messages. Out: how often a rank's first message
in an operation paused longer than its later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.meanings import Meanings, Part
    from dpuflow.matching.pipes import Pipe
    from dpuflow.matching.quiet import Times

    Ints = NDArray[np.int64]

TWICE: Final = 2
"""Times that a pause before an operation is longer than one within."""
_FAR = np.iinfo(np.int64).max


def contrast_of(
    parts: Sequence[Part],
    pipes: Sequence[Pipe],
    times: Sequence[Times],
    pauses: Sequence[Ints],
    meanings: Meanings,
) -> float | None:
    """Share of (first message of an operation, later one) of a rank whose first one paused twice as long;
    of ranks that need no input in it. None where these send but once.

    A first message's pause counts from the last event before its cut: what reaches a rank before it begins
    tells nothing of it. ``pauses``: of each pipe's messages, ns, as ``reactions`` has them.
    """
    cuts = meanings.cuts
    won, pairs = 0.0, 0
    free = {kind: meanings.free(kind) for kind in {part.kind for part in parts}}
    for place, rank in enumerate(cuts.ranks):
        mine = [part for part in parts if rank in free[part.kind]]
        if not mine:
            continue
        begins = cuts.at[[part.begin for part in mine]]
        ends = cuts.at[[part.end for part in mine]]
        first = cuts.pauses[[part.begin for part in mine], place]
        first = first[first != _FAR]
        sent = _sent(rank, begins, ends, pipes, times, pauses)
        turn, start, pause = (np.concatenate([each[k] for each in sent]) for k in range(3))
        order = np.lexsort((start, turn))
        turn, pause = turn[order], np.minimum(pause[order], _FAR // TWICE)
        inside = np.r_[False, turn[1:] == turn[:-1]] & (turn >= 0)
        # Who begins a chain waits for nobody within, but copies: that may take as long as it likes.
        least = np.array([1 if meanings.is_chain(part.kind) else TWICE for part in mine])
        later = np.sort((least[turn] * pause)[inside])
        if len(first) and len(later):
            won += float(np.searchsorted(later, first).mean() / len(later)) * len(first)
            pairs += len(first)
    return won / pairs if pairs else None


def _sent(
    rank: int,
    begins: Ints,
    ends: Ints,
    pipes: Sequence[Pipe],
    times: Sequence[Times],
    pauses: Sequence[Ints],
) -> list[tuple[Ints, Ints, Ints]]:
    """Of each pipe out of ``rank``: the part of its messages, -1 without, when they left, after what
    pause."""
    found = [(np.zeros(0, np.int64),) * 3]
    for number, pipe in enumerate(pipes):
        if pipe.src == rank:
            at = np.arange(len(pipe.rows))
            part = np.searchsorted(begins[:, number], at, "right") - 1
            within = (part >= 0) & (at < ends[part, number])
            starts = times[number].starts
            found.append((np.where(within, part, -1), starts, pauses[number]))
    return found
