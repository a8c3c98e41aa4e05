"""Closed lists of words that a result uses; docs/analysis.md says what each means."""

from __future__ import annotations

from typing import Final, Literal

from dpuflow.conditions import TABLE

OpToken = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "broadcast",
    "all_to_all",
    "barrier",
    "gather",
    "scatter",
    "send_recv",
    "unknown",
]
Algorithm = Literal[
    "ring",
    "segmented_ring",
    "recursive_doubling",
    "halving_doubling",
    "rabenseifner",
    "tree",
    "binomial",
    "chain",
    "bruck",
    "pairwise",
    "linear",
    "dissemination",
    "pat",
    "hierarchical",
    "unknown",
]
Protocol = Literal["simple", "ll", "ll128"]
Bound = Literal["exact", "at_most", "at_least", "unobservable"]
Cause = Literal["compute", "receiver", "network", "host", "none", "unknown"]
Verdict = Literal["on_time", "late", "intermittent", "unknown"]
Unjudged = Literal["incidents", "excused", "hidden", "not_told", "unseen"]
Steadiness = Literal["persistent", "rotating", "transient"]
Severity = Literal["info", "warning", "critical"]
CONDITIONS: Final = tuple(TABLE)
"""What a finding may say."""
