"""How well a hypothesis explains when messages were sent.

Where several explain the same counts and sizes, three measures decide: *contrast* (a collective begins
where ranks pause although they wait for nothing), *causality* (inside one, a send follows its input)
and *tightness* (that input is what the send really waited for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.collectives.hypotheses import SAMPLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.collectives.hypotheses import Hypothesis
    from dpuflow.collectives.streams import Columns, Edge, Streams

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
        from dpuflow.kernels import hypotheses

        self.starts, self.arrivals = columns.starts, columns.arrivals
        self._kernels = hypotheses
        self._known: dict[tuple[str, Hypothesis, int], tuple[float, float]] = {}
        self._version = -1

    def best(self, streams: Streams, runs: Sequence[tuple[Hypothesis, int]]) -> tuple[Hypothesis, int]:
        """The hypothesis that explains most; among equals the one whose cuts fall where ranks pause."""

        def explained(hypothesis: Hypothesis, count: int) -> int:
            # What no longer fitted into the sample tells nothing.
            return min(count * hypothesis.messages, SAMPLE * 3 // 4)

        most = max(explained(h, n) for h, n in runs)
        equal = [(h, n) for h, n in runs if 2 * explained(h, n) > most]
        # Who leaves whole edges over that another one explains as well has not understood them.
        furthest: dict[frozenset[Edge], int] = {}
        for hypothesis, count in equal:
            edges = frozenset(hypothesis.edges)
            furthest[edges] = max(count, furthest.get(edges, 0))
        beyond = {
            edges: max((n for other, n in furthest.items() if edges < other), default=0) for edges in furthest
        }
        equal = [(h, n) for h, n in equal if n > beyond[frozenset(h.edges)]]
        bare = {run for run in equal if not len(run[0].plan.needs[1])}
        if bare and any(run not in bare and self.is_clear(streams, *run) for run in equal):
            # No input can contradict what asks for none: where time bears out another, it must do so here.
            equal = [run for run in equal if run not in bare or self.is_clear(streams, *run)]
        if len(equal) == 1:
            return equal[0]

        def worth(run: tuple[Hypothesis, int]) -> tuple[float, int, int]:
            # Of equal ones the finest: it assumes least about what belongs together; then the fewest ranks.
            score = round(self.score(streams, *run) * explained(*run) / most, 2)
            return score, run[1], -len(run[0].order)

        return max(equal, key=worth)

    def is_clear(self, streams: Streams, hypothesis: Hypothesis, count: int, contrast: float = CLEAR) -> bool:
        """Whether cuts fall on pauses and sends follow their inputs as well as one can wish."""
        if self.contrast(streams, hypothesis, count) < contrast:
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
        """Share of (first send, later send) pairs of a rank in which the first paused twice as long.

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
                count, plan.free, *plan.sends, *plan.inputs, self.starts, self.arrivals,
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
