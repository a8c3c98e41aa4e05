"""What an entry may rest on and what bound follows; and the levels by which all rules are weighed."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from dpuflow.schema.rows import Wire

BY_GPUS: Final = (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM, Wire.NCCL_DATA)
"""What GPUs send."""
FEWEST: Final = 8
"""Of fewer times nothing is known to be usual."""
FAR_BEYOND: Final = 3.0
"""Times a slow reaction (SLOW) that no reaction takes: of an exponential tail one in 8,000."""
SLOW: Final = 95
"""Percentile of times that are slow still: half of the interval that errors state."""
QUICK: Final = 5.0
"""Percentile of times that are as quick as they can be: as often as that at least a rank waits for its input,
its slot or its credit, or nothing is said of it."""
BEYOND: Final = 0.001
"""Share of hand-overs that may take longer than a bound allows for."""
EXPLAINED: Final = 0.9
"""A schedule that a tenth of the messages contradict is not what ran."""


class Rule(IntEnum):
    """What an entry rests on; RULES has the sentences."""

    UNSEEN = 0
    READY = 1  # exact: declared itself ready to receive, unasked
    NOTHING_BEFORE = 2  # exact: sent before anything had arrived
    FREE_STEP = 3  # exact: the algorithm's first step of this rank needs no input
    AFTER_INPUT = 4  # at most: its first message may have waited for an input
    ANSWER = 5  # at most: it only answered an offer
    LONG_AFTER = 6  # exact: its first message came so long after any input that it had not waited for one
    CREDIT = 7  # at most: its first message left soon after its credit had come
    QUEUED = 8  # at most: it may have queued behind another collective of the same group
    CONNECTING = 9  # at most: its first message opened a connection
    REPEATED = 10  # at most: the first time it was sent may not have been seen
    PARTLY = 11  # at most: not all messages of this rank can have been seen
    CONTRADICTED = 12  # unobservable: what was put together cannot be one collective
    MISSING = 19  # unobservable: packets are missing from what its rank sent and received
    OVERLAPS = 20  # unobservable: its rank had not left the operation before it
    WITHIN = 21  # exact: a message that had waited for another GPU of its node (``within``)
    WAITED = 15  # at most: a message shows that it had entered; it may have waited for others nobody saw


RULES: dict[Rule, tuple[str, str]] = {
    Rule.UNSEEN: ("unobservable", "sent nothing in this collective that was seen"),
    Rule.READY: ("exact", "first ready-to-receive message, sent unasked"),
    Rule.NOTHING_BEFORE: ("exact", "first message, sent before any input had arrived"),
    Rule.FREE_STEP: ("exact", "first message of a step that needs no input"),
    Rule.AFTER_INPUT: ("at_most", "first message, which may have waited for its input"),
    Rule.ANSWER: ("at_most", "first answer to a peer's offer"),
    Rule.LONG_AFTER: ("exact", "first message, long after its input had arrived"),
    Rule.CREDIT: ("at_most", "first message, sent soon after its credit had come"),
    Rule.QUEUED: ("at_most", "first message, which may have queued behind the collective before"),
    Rule.CONNECTING: ("at_most", "first message, which may have waited for its connection"),
    Rule.REPEATED: ("at_most", "first message, of which only a repetition or its later packets were seen"),
    Rule.PARTLY: ("at_most", "first message that was seen; others may have come before"),
    Rule.CONTRADICTED: ("unobservable", "messages of this collective came before what they need"),
    Rule.MISSING: (
        "unobservable",
        "first message that was seen; packets before it were not captured",
    ),
    Rule.OVERLAPS: ("unobservable", "first message, sent before its rank had left the operation before"),
    Rule.WAITED: (
        "at_most",
        "first message that shows it had entered; it, or one that it waited for, held it back",
    ),
    Rule.WITHIN: ("exact", "first message that another GPU of its node had a part in"),
}
"""Rule -> (bound, why)."""

EXACT_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "exact")
UNTOLD_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "unobservable")
