"""What dating entries hands on: a row for each rank of a collective, and what is kept beside them.

Times are integer nanoseconds on the clock of the reference; ``NEVER``: nothing tells it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Places, is_in
from dpuflow.schema.rows import NEVER, NONE32, Code, Wire

if TYPE_CHECKING:
    from dpuflow.arrays import Bools, Ints


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
INTERVAL_IN_SIGMAS: Final = 1.96
"""Half of the interval that holds 95 % of a normal distribution, in standard deviations."""
SIXTH_IN_SIGMAS: Final = 0.4307
"""Half of the third around a normal distribution's middle, in standard deviations."""
QUARTER_IN_SIGMAS: Final = 0.6745
"""Median to quartile of a normal distribution, in standard deviations."""


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

Times = tuple["Ints", "Ints"]
"""Rows of Entries, and ns."""


@dataclass
class Margins:
    """How far each entry may be off. Spans are 0 where nothing tells, unless something else is said."""

    clock: Ints  # number of the capture that stamped the act
    clock_ns: Ints  # how far its clock may be off the reference
    lag_ns: Ints  # it may have entered so much before its first act, having found its input there
    held_ns: Ints  # how long receiving may have held up the first act
    way_ns: Ints  # how long the act may have been on its way to where it was stamped
    usual_way_ns: Ints  # how long it usually is
    room_ns: Ints  # so much before its first act it may have entered at the worst (tails)
    tail_ns: Ints  # what a hand-over takes at the worst (tails)
    spread_ns: Ints  # how far hand-overs of the group differ, 95 %; NEVER where not known, as the next ones
    wide_ns: Ints  # the same with stalls that only reactions show
    slow_ns: Ints  # its hosts' slow reactions, 95 %
    lead_ns: Ints  # at least so much later than a peer, by calls before (queues)


@dataclass
class Heard:
    """What captured ranks heard of the others: who may have been the last."""

    likely_ns: Ints  # when it, or one that it waits for, is likely to have entered
    by_ns: Ints  # nothing dates it, but it had entered by then
    by_act: Ints  # TRANSFER row of the message that shows by_ns


class Reactions(NamedTuple):
    """How long hosts took in mid-operation, one element each time: rows of Entries and ns, or ns alone."""

    waited: Times  # from an input to the send that had waited for it
    granted_data_ns: Ints  # from a grant to the data that had waited for it
    taken: Times  # from an input to granting its slot again (NCCL)
    between: Times  # ... from an operation's last input, at the most (``reactions.consumed``)


@dataclass
class Entries:
    """When each rank entered and left each collective, and what that rests on, in order of collectives; with
    what the stages that date entries need besides. Rows are those of TRANSFER, NONE32 for none."""

    collective: Ints  # its number
    endpoint: Ints  # the rank's
    enter_ns: Ints  # first act, which dates the entry; NEVER where nobody saw one
    leave_ns: Ints  # all it needed was there; without input: all was sent (NCCL: can have been)
    idle_ns: Ints  # besides, its last data had left (sent again: was acknowledged); NEVER: some never came
    gone_ns: Ints  # the same of its own last data alone; NEVER where it sent none
    acked_ns: Ints  # all its data had been acknowledged, as far as that was seen
    since_ns: Ints  # it entered no earlier than this
    credit_ns: Ints  # from the credit of its first message to that message
    granted_ns: Ints  # its first credit for data that is not offered
    reaction_ns: Ints  # median time from an input to the send that had waited for it
    stalled_ns: Ints  # in mid-operation: the longest it sat on an input, far beyond what is usual; else 0
    rule: Ints  # Rule: what the entry rests on
    act: Ints  # row of the act
    after: Ints  # row of what the act may have waited for
    since_act: Ints  # row that shows since_ns
    last: Ints  # row that brought its last data
    retransmitted: Ints  # packets sent again on exchanges to or from the rank
    whole: Bools  # the captures hold the collective from its beginning to its end
    fed: Bools  # the rank received data
    buffered: Bools  # it sent and got nothing: it may have left at once
    unmoved_ns: Ints  # from the last thing that reached the rank to its first act
    free_ns: Ints  # its first send, where the algorithm needs no input for it
    grant: Ints  # row of the credit of credit_ns
    lag_ns: Ints  # of several GPUs the last may have entered so much before or after its first act
    offsets: Ints  # offsets[i]:offsets[i + 1] are the rows of collective i
    early_ns: Ints  # by collective: a tenth of its sends came so much before what they should need
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


_ROWS: Final = ("act", "after", "since_act", "last", "grant", "by_act")
_SPANS: Final = (
    "stalled_ns", "clock_ns", "lag_ns", "held_ns", "way_ns", "usual_way_ns", "room_ns", "tail_ns",
)  # fmt: skip


def _blank(table: type[Entries | Margins | Heard], rows: int) -> dict[str, Any]:
    """Its columns with nothing known."""
    columns = {}
    for name, kind in ((each.name, each.type) for each in fields(table)):
        unknown = NONE32 if name in _ROWS else NEVER if name.endswith("_ns") and name not in _SPANS else 0
        if kind in ("Ints", "Bools"):
            columns[name] = np.full(rows, unknown, np.int64 if kind == "Ints" else bool)
    return columns


def blank(collective: Ints, endpoint: Ints, offsets: Ints) -> Entries:
    """Rows of which nothing is known yet."""
    rows, none = len(collective), np.zeros(0, np.int64)
    columns = _blank(Entries, rows)
    columns |= {"collective": collective, "endpoint": endpoint, "offsets": offsets}
    columns["early_ns"] = np.zeros(len(offsets) - 1, np.int64)
    times = (none, none)
    return Entries(
        **columns,
        margins=Margins(**_blank(Margins, rows)),
        heard=Heard(**_blank(Heard, rows)),
        reactions=Reactions(times, none, times, times),
    )
