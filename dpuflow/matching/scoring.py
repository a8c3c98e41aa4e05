"""How well a hypothesis explains when messages were sent.

Where several explain the same counts and sizes, three measures decide: *contrast* (a collective begins
where ranks pause although they wait for nothing), *causality* (inside one, a send follows its input)
and *tightness* (that input is what the send really waited for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.matching.hypotheses import SAMPLE
from dpuflow.matching.model import MOST, TWICE
from dpuflow.matching.streams import HOLE
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.matching.hypotheses import Hypothesis
    from dpuflow.matching.streams import Columns, Streams

    Run = tuple[Hypothesis, int]
    """A hypothesis, and how many collectives from the front on it holds for."""

NO_CONTRAST = 0.75
"""What a hypothesis with one send a rank is worth, which has no inner places to compare: half way
between chance and certainty, so that a coarser one must show pauses to win."""
CHANCE = 0.5
"""What a hypothesis is worth without evidence for or against it."""
CLEAR = 0.95
"""A hypothesis with this contrast and causality leaves nothing to improve."""


def _explained(run: Run) -> int:
    """How many messages it explains; what no longer fitted into the sample tells nothing."""
    hypothesis, count = run
    return min(count * hypothesis.messages, SAMPLE * 3 // 4)


class Scorer:
    """Judges hypotheses on streams from their front; counts of collectives say how far each holds."""

    def __init__(self, columns: Columns) -> None:
        from dpuflow.kernels import hypotheses

        self.starts, self.arrivals = columns.starts, columns.arrivals
        self._kernels = hypotheses
        self._known: dict[tuple[str, Hypothesis, int], tuple[float, float]] = {}
        self._version = -1

    def best(
        self,
        streams: Streams,
        runs: Sequence[Run],
        usual: tuple[int, ...] | None = None,
    ) -> Run:
        """The hypothesis that explains most; among equals the one whose cuts fall where ranks pause.

        ``usual`` is the numbering of ranks known to hold: where anything fits it, nothing else is asked.
        """
        runs = self._understood(streams, runs)
        runs = [run for run in runs if run[0].order == usual] or runs
        most = max(_explained(run) for run in runs)
        equal = [run for run in runs if 2 * _explained(run) > most]
        if len(equal) == 1:
            return equal[0]

        def worth(run: Run) -> tuple[float, int]:
            # Of equal ones the finest: it assumes least about what belongs together.
            return round(self.score(streams, *run) * _explained(run) / most, 2), run[1]

        def waited(run: Run) -> tuple[float, int]:
            # Of one algorithm with other numbers of ranks the one whose inputs were waited for.
            tight = 0.0 if run[0].near is None else round(self.causality(streams, *run)[1], 1)
            return tight, -len(run[0].order)

        chosen = max(equal, key=lambda run: (*worth(run), -len(run[0].order)))
        alike = [run for run in equal if run[0].algorithm is chosen[0].algorithm]
        return max((run for run in alike if worth(run) == worth(chosen)), key=waited)

    def fitting(
        self, streams: Streams, runs: Sequence[Run], most: int
    ) -> list[tuple[Hypothesis, int, float]]:
        """What explains all messages for a time: by how many, ``most`` at most, and what time says of it."""
        return [
            (h, min(n * h.messages, most), self.score(streams, h, n))
            for h, n in self._understood(streams, runs)
        ]

    def _understood(self, streams: Streams, runs: Sequence[Run]) -> Sequence[Run]:
        """Without those that leave messages out which lie between the ones they explain, if others do not.

        Only asked of captures at some ranks: there fewer ranks than there are explain part of the edges.
        """
        if all(hypothesis.near is None for hypothesis, _ in runs):
            return runs
        near = frozenset[int]().union(*(h.near or () for h, _ in runs))
        lanes = []
        for edge, rows in streams.left():
            times = np.where(rows != HOLE, (self.starts if edge[0] in near else self.arrivals)[rows], NEVER)
            lanes.append(np.maximum.accumulate(times))
        numbers = {edge: k for k, (edge, _) in enumerate(streams.left())}
        every = np.sort(np.concatenate(lanes))
        whole = []
        for hypothesis, count in runs:
            taken = zip(hypothesis.edges, (hypothesis.plan.counts * hypothesis.cuts).tolist(), strict=True)
            end = max(int(lanes[numbers[edge]][: count * some][-1]) for edge, some in taken)
            if count * hypothesis.messages >= MOST * np.searchsorted(every, end, side="right"):
                whole.append((hypothesis, count))
        return whole or runs

    def is_clear(self, streams: Streams, hypothesis: Hypothesis, count: int) -> bool:
        """Whether cuts fall on pauses and sends follow their inputs as well as one can wish."""
        if self.contrast(streams, hypothesis, count) < CLEAR:
            return False
        return self.causality(streams, hypothesis, count)[0] >= CLEAR

    def score(self, streams: Streams, hypothesis: Hypothesis, count: int) -> float:
        """What time says of it, 0 to 1."""
        contrast = self.contrast(streams, hypothesis, count)
        held, tight = self.causality(streams, hypothesis, count)
        if hypothesis.algorithm.rooted:
            tight = contrast  # segments stream down a tree: more inputs are there than the next send needs
        if hypothesis.near is not None:
            # One rank's inputs often all wait for it: that it kept to the order counts no less than chance.
            tight = max(tight, CHANCE)
        return held * (contrast + tight) / 2

    def contrast(self, streams: Streams, hypothesis: Hypothesis, count: int) -> float:
        """Share of (first send, later send) pairs of a rank whose first paused twice as long.

        A first send's pause counts from the rank's last event in the collective before, a later one's
        from its last event in the same collective. Only ranks whose first send needs no input are
        asked: the others pause for their peers.
        """
        known = self._of(streams)
        key = ("contrast", hypothesis, count)
        if key not in known:
            plan = hypothesis.plan
            events = plan.most_events * hypothesis.cuts
            facts = np.zeros(3, np.int64)
            keys, first, later = (np.empty(size, np.int64) for size in (events, count, count * events))
            self._kernels.contrast(
                streams.rows, streams.at, streams.lanes(hypothesis.edges), plan.counts, hypothesis.cuts,
                count, TWICE, plan.free, *plan.sends, *plan.inputs, self.starts, self.arrivals,
                keys, first, later, facts,
            )  # fmt: skip
            won, pairs, inner = facts.tolist()
            known[key] = (won / pairs if pairs else CHANCE if inner else NO_CONTRAST), 0.0
        return known[key][0]

    def causality(self, streams: Streams, hypothesis: Hypothesis, count: int) -> tuple[float, float]:
        """How well inputs explain when messages were sent: two shares.

        First, of the sends that need an input, those that left after it. Second, of these, those that
        left before any other input arrived: where two hypotheses hold, the one whose inputs are what
        the sends really waited for is the tighter. Both stamps are of the sender's own node, so no
        clock error enters.
        """
        known = self._of(streams)
        key = ("causality", hypothesis, count)
        if key not in known:
            plan = hypothesis.plan
            facts = np.zeros(3, np.int64)
            at, needs = plan.needs
            self._kernels.causality(
                streams.rows, streams.at, streams.lanes(hypothesis.edges), plan.counts, hypothesis.cuts,
                count, needs, at, *plan.inputs, self.starts, self.arrivals,
                np.empty(plan.most_events * hypothesis.cuts, np.int64), facts,
            )  # fmt: skip
            asked, held, last = facts.tolist()
            known[key] = (held / asked, last / max(held, 1)) if asked else (1.0, CHANCE)
        return known[key]

    def _of(self, streams: Streams) -> dict[tuple[str, Hypothesis, int], tuple[float, float]]:
        """What was found out about the streams as they stand."""
        if self._version != streams.version:
            self._version = streams.version
            self._known.clear()
        return self._known
