"""Collectives in; enter, leave and lateness of every rank out, with the bound and error the packets justify.

``needs`` lays the algorithm's dependencies over the messages, ``acts`` dates each rank's entry by its first
act, ``leaving`` says when it was done, ``handover`` measures how fast hosts react, ``dating`` weighs what an
act may have waited for, ``relative`` turns entries into lateness, ``upper`` says who else may have been the
last, ``tails`` how long hand-overs take at the worst.
"""

from dpuflow.entries.acts import gpus_within
from dpuflow.entries.dating import build_entries, weigh
from dpuflow.entries.heard import Bounded, bound_above
from dpuflow.entries.reactions import Tail, stalls
from dpuflow.entries.relative import (
    AT_LEAST,
    AT_MOST,
    BOUNDS,
    EXACT,
    UNOBSERVABLE,
    Relative,
    against_others,
    among_dated,
    claim,
    medians,
    places_of,
    previous_leave,
    previous_row,
    relate,
    short_of_ranks,
)
from dpuflow.entries.rows import BEYOND, RULES, Entries, Rule

__all__ = [
    "AT_LEAST",
    "AT_MOST",
    "BEYOND",
    "BOUNDS",
    "EXACT",
    "RULES",
    "UNOBSERVABLE",
    "Bounded",
    "Entries",
    "Relative",
    "Rule",
    "Tail",
    "against_others",
    "among_dated",
    "bound_above",
    "build_entries",
    "claim",
    "gpus_within",
    "medians",
    "places_of",
    "previous_leave",
    "previous_row",
    "relate",
    "short_of_ranks",
    "stalls",
    "weigh",
]
