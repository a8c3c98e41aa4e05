"""Enter and leave of every rank of every collective, as columns, and the rules that date entries.

``acts``, ``leaving`` and ``entering`` fill them from exchanges; ``doubts`` and the stages that it calls
weigh what else an act may have waited for, and fill the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.schema.rows import NEVER, NONE32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.entries.passing import Times

    Ints = NDArray[np.int64]
    When = NDArray[np.int64]
    Row = NDArray[np.int64]
    Span = NDArray[np.int64]
    List = NDArray[np.int64]
    Flag = NDArray[np.bool_]


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
    BEHIND = 13  # exact but for the way: a peer's message had waited for this rank alone
    GIVEN_BACK = 16  # exact: a slot given back long after it was filled (``slots``)
    GIVEN_LATE = 17  # at most: the same, of the last of several slots
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
    Rule.GIVEN_BACK: ("exact", "first slot given back, long after the data in it had arrived"),
    Rule.GIVEN_LATE: ("at_most", "slots given back, long after the data in them had arrived"),
    Rule.WITHIN: ("exact", "first message that another GPU of its node had a part in"),
    Rule.BEHIND: ("exact", "first message that shows it had entered; it had waited for this rank alone"),
}
"""Rule -> (bound, why)."""

EXACT_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "exact")
UNTOLD_RULES = tuple(rule for rule, (bound, _) in RULES.items() if bound == "unobservable")


BLANK: Final = {"When": NEVER, "Row": NONE32, "Span": 0, "Flag": False}
"""By the type of a column what stands in it as long as nothing is known."""


@dataclass
class Entries:
    """One row per (collective, rank), as parallel arrays in order of collectives.

    ``enter_ns`` NEVER where unobservable; ``act`` is the TRANSFER row of the message that fixed it and
    ``after`` that of what it may have waited for, NONE32 for none.
    ``offsets[i]:offsets[i + 1]`` are the rows of collective i.
    """

    collective: Ints
    endpoint: Ints
    enter_ns: When
    leave_ns: When  # all it needed was there; without input: all was sent (NCCL: can have been)
    idle_ns: When  # besides, its last data had left the node (if sent again: was acknowledged),
    # of NCCL's its last slot was free to be filled; where GPUs share a node, the last of them was done
    gone_ns: When  # the same of its own last data alone; NEVER where it sent none
    rule: Span
    act: Row
    after: Row
    retransmitted: Span  # packets sent again on exchanges to or from the rank
    reaction_ns: When  # median time from an input to the send that had waited for it
    unmoved_ns: When  # from the last thing that reached the rank to its first act
    resumed_ns: When  # data had stopped coming and went on before its first act; NEVER if not
    moved_ns: When  # unmoved_ns at the most, where it is not known which of several it was
    free_ns: When  # its first send, where the algorithm needs no input for it; else NEVER
    credit_ns: When  # from the credit of its first message to that message; NEVER without one
    whole: Flag  # the captures hold the collective from its beginning to its end
    offsets: Ints
    sent: Flag  # the rank sent or offered data
    buffered: Flag  # ... and what it sent needed nothing of its peers: it may have left at once
    fed: Flag  # the rank received data: leave_ns is when it had all of it ...
    last: Row  # ... and this TRANSFER row brought the last of it; NONE32 for none
    grant: Row  # TRANSFER row of the credit of credit_ns, NONE32 for none
    granted_ns: When  # the rank's first credit for data that is not offered; NEVER without one
    posted_ns: When  # ... and its last one before its first act
    waited: List  # one element a send that had waited for its input: its rank's row here ...
    waited_ns: List  # ... and how long after that input it came
    granted_data_ns: List  # not by rows: from grants to the data that had waited for them ...
    next_send_ns: List  # ... and from send to send (``handled_ns``)
    taken: Times  # the same of inputs whose slot it granted again (NCCL)
    between: Times  # ... and of an operation's last input, at the most (``passing.consumed``) ...
    ended: Times  # ... and of the last one of its rank
    since_ns: When  # it entered no earlier than this; NEVER where nothing says so ...
    since_act: Row  # ... and the TRANSFER row that shows it; NONE32 where none does
    lead_ns: When  # at least so much later than a peer, by calls before (``queues``); else NEVER
    clock: Span  # number of the capture that stamped the act ...
    clock_ns: Span  # ... and how far its clock may be off the reference
    spread_ns: When  # how far hand-overs of the group differ, 95 %; NEVER where not known
    wide_ns: When  # the same with stalls that only reactions show (``handover.wide_spreads``)
    slow_ns: When  # its hosts' slow reactions, 95 %; NEVER where none was seen
    tail_ns: Span  # what a hand-over takes at the worst (``tails``); 0 where nothing tells
    room_ns: Span  # so much before its first act it may have entered (``tails.room``)
    stalled_ns: Span  # in mid-operation: the longest it sat on an input, far beyond what is usual
    held_ns: Span  # how long receiving may have held up the first act
    lag_ns: Span  # it may have entered so much before its first act (it found its input there)
    way_ns: Span  # how long the act may have been on its way to where it was stamped
    acked_ns: When  # all its data had been acknowledged, as far as that was seen; NEVER without
    usual_way_ns: Span  # ... and how long it usually is
    by_ns: When  # nothing dates it, but it had entered by then; NEVER where nothing shows it ...
    by_act: Row  # ... TRANSFER row of the message that does ...
    likely_ns: When  # ... and when it, or one that it waits for, is likely to have entered
    early_ns: Span  # a tenth of the collective's sends came more than this before their input

    @property
    def exact(self) -> NDArray[np.bool_]:
        """Rows whose entry is exact."""
        return np.isin(self.rule, EXACT_RULES)

    @property
    def told(self) -> NDArray[np.bool_]:
        """Rows whose entry is exact or a bound."""
        return np.isin(self.rule, UNTOLD_RULES, invert=True)

    def marked(self, rows: NDArray[np.bool_], rule: Rule, after: NDArray[np.int64]) -> Entries:
        """With another rule for exact entries among ``rows``, and what they may have waited for."""
        rows = rows & self.exact
        return replace(
            self, rule=np.where(rows, int(rule), self.rule), after=np.where(rows, after, self.after)
        )


def blank(collective: Ints, endpoint: Ints, offsets: Ints) -> Entries:
    """Rows of which nothing is known yet."""
    none = np.zeros(0, np.int64)
    more: dict[str, Any] = {}
    for each in fields(Entries):
        kind, value = str(each.type), BLANK.get(str(each.type))
        if value is not None:
            more[each.name] = np.full(len(collective), value, bool if value is False else np.int64)
        elif kind in ("List", "Times"):
            more[each.name] = none if kind == "List" else (none, none)
    return Entries(collective=collective, endpoint=endpoint, offsets=offsets, **more)
