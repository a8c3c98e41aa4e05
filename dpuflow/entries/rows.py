"""What dating entries hands on: the rows of ENTRY, a rank of a collective each, and what is kept beside them.

Declared field by field, as in ``schema``. Times are integer nanoseconds on the clock of the reference;
``NEVER``: nothing tells it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Places, is_in
from dpuflow.schema.rows import NEVER, NONE32, Code, Wire, make_record

if TYPE_CHECKING:
    from dpuflow.arrays import Bools, Ints
    from dpuflow.schema.rows import Record


BY_GPUS: Final = (Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM, Wire.NCCL_DATA)
"""What GPUs send."""
FEWEST: Final = 8
"""Of fewer times nothing is known to be usual."""
AT_ONCE: Final = 0.1
"""Of the time since it could have left: what leaves so soon after its credit may have waited for that."""
FAR_BEYOND: Final = 3.0
"""Times a slow reaction (SLOW) that no reaction takes: of an exponential tail one in 8,000."""
SLOW: Final = 95
"""Percentile of times that are slow still: half of the interval that errors state."""
QUICK: Final = 5.0
"""Percentile of times that are as quick as they can be: as often as that at least a rank waits for its input,
its slot or its credit, or nothing is said of it."""
BEYOND: Final = 0.001
"""Share of hand-overs that may take longer than a bound allows for."""
ONE_SIDED: Final = 1.645
"""One end of an interval that 95 % of a normal distribution keep to, in standard deviations."""
EXPLAINED: Final = 0.9
"""A schedule that a tenth of the messages contradict is not what ran."""


class Rule(Code):
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
    CALLED = 22  # exact: its first credit, which its host posts when it calls (``calling``)
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
    Rule.CALLED: ("exact", "its first credit, which its host posts when it calls"),
    Rule.WITHIN: ("exact", "first message that another GPU of its node had a part in"),
}
"""Rule -> (bound, why)."""

EXACT_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "exact")
UNTOLD_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "unobservable")

FAR: Final = int(np.iinfo(np.int64).max)
"""After all times."""
Times = tuple["Ints", "Ints"]
"""Rows of Entries, and ns."""

ENTRY: Final = make_record(
    "entry",
    "When one rank entered and left one collective, and what that rests on.",
    ("collective", "i8", "row", "number of the collective"),
    ("endpoint", "i8", "row", "the rank's endpoint"),
    ("enter_ns", "i8", "ns", "first act, which dates the entry; NEVER where nobody saw one"),
    ("leave_ns", "i8", "ns", "all it needed was there; without input: all was sent (NCCL: can have been)"),
    (
        "idle_ns",
        "i8",
        "ns",
        "besides, its last data had left (sent again: was acknowledged); NEVER: not all it was to get came",
    ),
    ("gone_ns", "i8", "ns", "the same of its own last data alone; NEVER where it sent none"),
    ("acked_ns", "i8", "ns", "all its data had been acknowledged, as far as that was seen"),
    ("since_ns", "i8", "ns", "it entered no earlier than this"),
    ("credit_ns", "i8", "ns", "from the credit of its first message to that message"),
    ("granted_ns", "i8", "ns", "its first credit for data that is not offered"),
    ("reaction_ns", "i8", "ns", "median time from an input to the send that had waited for it"),
    ("stalled_ns", "i8", "ns", "in mid-operation: the longest it sat on an input, far beyond what is usual"),
    ("rule", "i8", "", "Rule: what the entry rests on"),
    ("act", "i8", "row", "TRANSFER row of the act, NONE32 for none"),
    ("after", "i8", "row", "TRANSFER row of what the act may have waited for"),
    ("since_act", "i8", "row", "TRANSFER row that shows since_ns"),
    ("last", "i8", "row", "TRANSFER row that brought its last data"),
    ("retransmitted", "i8", "packets", "packets sent again on exchanges to or from the rank"),
    ("whole", "?", "", "the captures hold the collective from its beginning to its end"),
    ("fed", "?", "", "the rank received data"),
    ("buffered", "?", "", "it sent and got nothing: it may have left at once"),
    ("unmoved_ns", "i8", "ns", "from the last thing that reached the rank to its first act"),
    ("free_ns", "i8", "ns", "its first send, where the algorithm needs no input for it"),
    ("grant", "i8", "row", "TRANSFER row of the credit of credit_ns"),
    (
        "lag_ns",
        "i8",
        "ns",
        "of several GPUs the last may have entered so much before or after its first act",
    ),
)

MARGIN: Final = make_record(
    "margin",
    "How far an entry may be off.",
    ("clock", "i8", "", "number of the capture that stamped the act"),
    ("clock_ns", "i8", "ns", "how far its clock may be off the reference"),
    ("lag_ns", "i8", "ns", "it may have entered so much before its first act, having found its input there"),
    ("held_ns", "i8", "ns", "how long receiving may have held up the first act"),
    ("way_ns", "i8", "ns", "how long the act may have been on its way to where it was stamped"),
    ("usual_way_ns", "i8", "ns", "how long it usually is"),
    ("room_ns", "i8", "ns", "so much before its first act it may have entered at the worst (tails)"),
    ("tail_ns", "i8", "ns", "what a hand-over takes at the worst (tails)"),
    ("spread_ns", "i8", "ns", "how far hand-overs of the group differ, 95 %"),
    ("wide_ns", "i8", "ns", "the same with stalls that only reactions show"),
    ("slow_ns", "i8", "ns", "its hosts' slow reactions, 95 %"),
    ("lead_ns", "i8", "ns", "at least so much later than a peer, by calls before (queues)"),
)

HEARD: Final = make_record(
    "heard",
    "What captured ranks heard of the others: who may have been the last.",
    ("likely_ns", "i8", "ns", "when it, or one that it waits for, is likely to have entered"),
    ("by_ns", "i8", "ns", "nothing dates it, but it had entered by then"),
    ("by_act", "i8", "row", "TRANSFER row of the message that shows by_ns"),
)


@dataclass
class Margins:
    """The columns of MARGIN. Spans are 0 where nothing tells."""

    clock: Ints
    clock_ns: Ints
    lag_ns: Ints
    held_ns: Ints
    way_ns: Ints
    usual_way_ns: Ints
    room_ns: Ints
    tail_ns: Ints
    spread_ns: Ints
    wide_ns: Ints
    slow_ns: Ints
    lead_ns: Ints


@dataclass
class Heard:
    """The columns of HEARD."""

    likely_ns: Ints
    by_ns: Ints
    by_act: Ints


class Reactions(NamedTuple):
    """How long hosts took in mid-operation, one element each time: rows of Entries and ns, or ns alone."""

    waited: Times  # from an input to the send that had waited for it
    granted_data_ns: Ints  # from a grant to the data that had waited for it
    taken: Times  # from an input to granting its slot again (NCCL)
    between: Times  # ... from an operation's last input, at the most (``handover.consumed``)


@dataclass
class Entries:
    """The columns of ENTRY, in order of collectives, with what the stages that date entries need besides.

    ``offsets[i]:offsets[i + 1]`` are the rows of collective i. ``early_ns``: by collective, a tenth of its
    sends came so much before what they should need.
    """

    collective: Ints
    endpoint: Ints
    enter_ns: Ints
    leave_ns: Ints
    idle_ns: Ints
    gone_ns: Ints
    acked_ns: Ints
    since_ns: Ints
    credit_ns: Ints
    granted_ns: Ints
    reaction_ns: Ints
    stalled_ns: Ints
    rule: Ints
    act: Ints
    after: Ints
    since_act: Ints
    last: Ints
    retransmitted: Ints
    whole: Bools
    fed: Bools
    buffered: Bools
    unmoved_ns: Ints
    free_ns: Ints
    grant: Ints
    lag_ns: Ints
    offsets: Ints
    early_ns: Ints
    margins: Margins
    heard: Heard
    reactions: Reactions

    @cached_property
    def of(self) -> Places:
        """The rows of an endpoint, in order of collectives."""
        return Places(self.endpoint)

    @property
    def exact(self) -> Bools:
        """Rows whose entry is exact."""
        return is_in(self.rule, EXACT_RULES)

    @property
    def told(self) -> Bools:
        """Rows whose entry is exact or a bound."""
        return np.isin(self.rule, UNTOLD_RULES, invert=True)


_UNKNOWN: Final = {"ns": NEVER, "row": NONE32}
_SPANS: Final = (
    "stalled_ns",
    "clock_ns",
    "lag_ns",
    "held_ns",
    "way_ns",
    "usual_way_ns",
    "room_ns",
    "tail_ns",
)


def _blank(record: Record, rows: int) -> dict[str, Any]:
    """Its columns with nothing known."""
    columns = record.columns(rows)
    for field in record.fields:
        if field.unit in _UNKNOWN and field.name not in _SPANS:
            columns[field.name].fill(_UNKNOWN[field.unit])
    return columns


def blank(collective: Ints, endpoint: Ints, offsets: Ints) -> Entries:
    """Rows of which nothing is known yet."""
    rows, none = len(collective), np.zeros(0, np.int64)
    columns = {**_blank(ENTRY, rows), "collective": collective, "endpoint": endpoint, "offsets": offsets}
    times = (none, none)
    return Entries(
        **columns,
        early_ns=np.zeros(len(offsets) - 1, np.int64),
        margins=Margins(**_blank(MARGIN, rows)),
        heard=Heard(**_blank(HEARD, rows)),
        reactions=Reactions(times, none, times, times),
    )
