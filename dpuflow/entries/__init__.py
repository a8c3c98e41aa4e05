"""Collectives in; enter, leave and lateness of every rank out, with the bound and error the packets justify.

``places`` lays the algorithm's dependencies over the messages, ``acts`` finds each rank's first act and
``inputs`` what had reached it before, ``leaving`` says when it was done, ``reactions`` makes a law of how
fast hosts go on, ``blockers`` and ``queues`` list what an act may have waited for, ``dating`` runs these
stages; ``margins`` says how far entries may be off, ``relative`` turns them into lateness, ``heard``
says who else may have been the last. Nothing here knows of verdicts.
"""

from dpuflow.entries.acts import gpus_within
from dpuflow.entries.dating import build_entries, weigh
from dpuflow.entries.heard import Bounded, bound_above
from dpuflow.entries.reactions import Tail, over_sockets, stalls
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
    latest_two,
    places_of,
    previous_row,
    relate,
    short_of_ranks,
)
from dpuflow.entries.rows import AT_ONCE, BEYOND, ONE_SIDED, RULES, Entries, Rule

__all__ = [
    "AT_LEAST",
    "AT_MOST",
    "AT_ONCE",
    "BEYOND",
    "BOUNDS",
    "EXACT",
    "ONE_SIDED",
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
    "latest_two",
    "over_sockets",
    "places_of",
    "previous_row",
    "relate",
    "short_of_ranks",
    "stalls",
    "weigh",
]
