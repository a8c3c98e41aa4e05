"""How well a hypothesis explains when messages were sent.

Where several explain the same counts and sizes, three measures decide: *contrast* (a collective begins
where ranks pause although they wait for nothing), *causality* (inside one, a send follows its input)
and *tightness* (that input is what the send really waited for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.collectives.hypotheses import SAMPLE
from dpuflow.collectives.schedules import dependencies, free_ranks
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.hypotheses import Hypothesis
    from dpuflow.collectives.streams import Columns, Streams

NO_CONTRAST = 0.75
"""What a hypothesis with one send a rank is worth, which has no inner places to compare: half way
between chance and certainty, so that a coarser one must show pauses to win."""
CHANCE = 0.5
"""What a hypothesis is worth that nothing speaks for or against."""
CLEAR = 0.95
"""A hypothesis with this contrast and causality leaves nothing to improve."""


class Scorer:
    """Judges hypotheses on streams from their front; counts of collectives say how far each holds."""

    def __init__(self, columns: Columns) -> None:
        self.starts, self.arrivals = columns.starts, columns.arrivals

    def best(self, streams: Streams, runs: Sequence[tuple[Hypothesis, int]]) -> tuple[Hypothesis, int]:
        """The hypothesis that explains most; among equals the one whose cuts fall where ranks pause."""

        def explained(hypothesis: Hypothesis, count: int) -> int:
            # What no longer fitted into the sample tells nothing.
            return min(count * hypothesis.messages, SAMPLE * 3 // 4)

        most = max(explained(h, n) for h, n in runs)
        equal = [(h, n) for h, n in runs if 2 * explained(h, n) > most]
        if len(equal) == 1:
            return equal[0]

        # Of equal ones the finest: it assumes least about what belongs together.
        return max(equal, key=lambda r: (round(self.score(streams, *r) * explained(*r) / most, 2), r[1]))

    def is_clear(self, streams: Streams, hypothesis: Hypothesis, count: int, contrast: float = CLEAR) -> bool:
        """Whether cuts fall on pauses and sends follow their inputs as well as one can wish."""
        if self.contrast(streams, hypothesis, count) < contrast:
            return False
        return self.causality(streams, hypothesis, count)[0] >= CLEAR

    def score(self, streams: Streams, hypothesis: Hypothesis, count: int) -> float:
        contrast, (held, tight) = (
            self.contrast(streams, hypothesis, count),
            self.causality(streams, hypothesis, count),
        )
        if hypothesis.algorithm.rooted:
            tight = contrast  # segments stream down a tree: more inputs are there than the next send needs
        return held * (contrast + tight) / 2

    def contrast(self, streams: Streams, hypothesis: Hypothesis, count: int) -> float:
        """Share of (first send, later send) pairs of a rank in which the first paused twice as long.

        A first send's pause counts from the rank's last event in the collective before, a later one's
        from its last event in the same collective. Only ranks whose first send needs no input are
        asked: the others pause for their peers.
        """
        blocks = {
            edge: streams[edge][: count * len(sizes) * hypothesis.cuts].reshape(count, -1)
            for edge, sizes in hypothesis.counts.items()
        }
        wins = total = 0.0
        alone = True
        for place in free_ranks(hypothesis.algorithm, len(hypothesis.order), hypothesis.root):
            rank = hypothesis.order[place]
            sent = np.concatenate(
                [self.starts[rows] for (src, _), rows in blocks.items() if src == rank], axis=1
            )
            inputs = [self.arrivals[rows] for (_, dst), rows in blocks.items() if dst == rank]
            heard = np.concatenate(inputs, axis=1) if inputs else sent[:, :0]
            first, later = _pauses(sent, heard)
            wins += float(np.searchsorted(np.sort(later), first // 2).sum())
            total += len(first) * len(later)
            alone &= not len(later)
        return wins / total if total else NO_CONTRAST if alone else CHANCE

    def causality(self, streams: Streams, hypothesis: Hypothesis, count: int) -> tuple[float, float]:
        """How well inputs explain when messages were sent: two shares.

        First, of the sends that need an input, those that left after it. Second, of these, those that
        left before any other input arrived: where two hypotheses hold, the one whose inputs are what
        the sends really waited for is the tighter. Both stamps are of the sender's own node, so no
        clock error enters.
        """
        held = last = asked = 0
        cuts, order = hypothesis.cuts, hypothesis.order
        blocks = {
            edge: streams[edge][: count * len(sizes) * cuts].reshape(count, -1, cuts)
            for edge, sizes in hypothesis.counts.items()
        }
        heard: dict[int, list[NDArray[np.int64]]] = {}
        for (_, dst), rows in blocks.items():
            heard.setdefault(dst, []).append(self.arrivals[rows].reshape(count, -1))
        inputs = {rank: np.concatenate(parts, axis=1) for rank, parts in heard.items()}
        for send, needed in dependencies(hypothesis.algorithm, len(order), hypothesis.root):
            sent, got = (blocks[order[src], order[dst]][:, at, :] for (src, dst), at in (send, needed))
            sent_ns, got_ns = self.starts[sent], self.arrivals[got]
            known = (sent_ns != NEVER) & (got_ns != NEVER)
            after = known & (sent_ns >= got_ns)
            asked += int(known.sum())
            held += int(after.sum())
            others = inputs[order[send[0][0]]][:, None, :]
            between = (others > got_ns[:, :, None]) & (others <= sent_ns[:, :, None])
            last += int((after & ~between.any(axis=2)).sum())
        return (held / asked, last / max(held, 1)) if asked else (1.0, CHANCE)


def _pauses(sent: NDArray[np.int64], heard: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How long one rank had been without any event before its first and its later sends, ns.

    Rows are collectives; ``sent`` and ``heard`` are when it sent and when inputs arrived, NEVER where
    not known. The first collective's first send is left out: what came before it was not seen.
    """
    times = np.concatenate([sent, heard], axis=1)
    is_send = np.concatenate([np.ones(sent.shape, bool), np.zeros(heard.shape, bool)], axis=1)
    order = np.lexsort((is_send, times), axis=1)
    times, is_send = np.take_along_axis(times, order, 1), np.take_along_axis(is_send, order, 1)
    begin = np.where(sent == NEVER, np.iinfo(np.int64).max, sent).min(axis=1)
    first = begin[1:] - times[:-1, -1]
    gaps = times[:, 1:] - times[:, :-1]
    known = is_send[:, 1:] & (times[:, :-1] != NEVER) & (times[:, 1:] > begin[:, None])
    return np.maximum(first, 0), gaps[known]
