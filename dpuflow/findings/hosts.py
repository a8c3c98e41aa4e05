"""Operations, requests and READs in, findings about what a node's own bus and host do out: seen indirectly.

What changes is told against the same thing before, what differs against the other nodes at the same time.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.findings.case import SMALL_SHARE, Cost, NotJudgedError, make_finding
from dpuflow.findings.clients import FEWEST, SURELY, TWICE, idle_stretches
from dpuflow.findings.evidence import message_evidence
from dpuflow.quantities import duration, name_of, percent
from dpuflow.schema.rows import NEVER, NONE32, Seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

RARE = 1000
"""99.9 % confidence."""
TIMES = 3
"""So many times as late as the other nodes: as of links (``verdicts.links``)."""


def since_larger(values: NDArray[np.generic]) -> int | None:
    """From which one on all are more than twice any before, three at least on either side; None if never.

    Of values in any order the smallest come first as often as there are ways to choose them: once in ``RARE``
    times at the most. Where there were none before (0) none got longer.
    """
    each = values.astype(np.float64)
    if len(each) < TWICE * FEWEST or not each.all():
        return None
    before = np.maximum.accumulate(each)[FEWEST - 1 : -FEWEST]
    after = np.minimum.accumulate(each[::-1])[::-1][FEWEST : len(each) - FEWEST + 1]
    rise = np.flatnonzero(after > TWICE * before) + FEWEST
    return next((at for at in rise.tolist() if comb(len(each), at) >= RARE), None)


def find_starved_inputs(case: Case) -> Iterator[Finding]:
    """One finding where the first operation after a prompt, for which the ranks stood ready, comes later than
    it used to, for good."""
    asked = np.sort(case.requests.asked_ns[case.requests.asked_ns != NEVER])
    idle = idle_stretches(case)
    first = np.searchsorted(asked, idle[:, 0])
    waited = np.flatnonzero(first < np.searchsorted(asked, idle[:, 1]))
    if len(waited) < TWICE * FEWEST:
        raise NotJudgedError("too few prompts came while the ranks stood still")
    delay = idle[waited, 1] - asked[first[waited]]
    since = since_larger(delay)
    if since is None:
        return
    usual = int(median_of(delay[:since]))
    lost = int((delay[since:] - usual).sum())
    share = lost / case.span_ns()
    if share < SMALL_SHARE:
        return
    ranks = sorted({end for group in case.inferred.groups for end in group})
    servers = distinct(case.requests.connections.server).tolist()
    yield make_finding(
        "input_starvation",
        [*servers, *(end for end in ranks if end not in servers)],
        (int(idle[waited[since], 0]), case.joined.end_ns),
        Cost(lost * len(ranks), share),
        0.6,
        f"Idle ranks begin {duration(int(median_of(delay[since:])))} after a prompt, where they used to begin"
        f" after {duration(usual)}: {percent(share)} of the time.",
    )


def find_late_launches(case: Case) -> Iterator[Finding]:
    """One finding for each job in whose steps all ranks pause together longer than they used to, for good."""
    if len(case.requests):
        raise NotJudgedError("ranks of a service also pause when there are no prompts")
    idle = idle_stretches(case)
    passed = np.r_[0, np.cumsum(np.diff(idle, axis=1))]
    for steps in case.inferred.steps:
        ends = np.sort(case.inferred.entries.leave_ns[steps.ends])
        ends = ends[ends != NEVER]
        # Idle time up to a moment: that of all stretches before, and of the one that it is in.
        at = np.searchsorted(idle[:, 0], ends, side="right")
        inside = np.where(at > 0, np.maximum(idle[np.maximum(at - 1, 0), 1] - ends, 0), 0) if len(idle) else 0
        pauses = np.diff(passed[at] - inside)
        since = since_larger(pauses)
        if since is None:
            continue
        usual = int(median_of(pauses[:since]))
        lost = int((pauses[since:] - usual).sum())
        share = lost / max(int(ends[-1] - ends[0]), 1)
        if share < SMALL_SHARE:
            continue
        yield make_finding(
            "launch_latency",
            list(steps.endpoints),
            (int(ends[since]), int(ends[-1])),
            Cost(lost * len(steps.endpoints), share),
            0.5,
            f"Since step {since + 1} all {len(steps.endpoints)} ranks pause together for"
            f" {duration(int(median_of(pauses[since:])))} a step, up from {duration(usual)}: {percent(share)}"
            " of the time.",
        )


def find_slow_reads(case: Case) -> Iterator[Finding]:
    """One finding for each node that answers READs later than the other nodes do.

    An answer that may have queued behind what else the node was sending tells nothing of its bus.
    """
    of: dict[int, list[tuple[int, int]]] = {}
    for each in case.inferred.bulk:
        rows = case.exchanges[each.rows]
        known = (rows["grant_arrived_ns"] != NEVER) & (rows["data_ns"] != NEVER)
        known &= (rows["seen"] & Seen.AT_SENDER) != 0
        if each.read and not each.retransmitted and known.any():
            first = rows[known][rows["grant_arrived_ns"][known].argmin()]
            if _sends(case, each.src, int(first["grant_arrived_ns"]), int(first["data_ns"])):
                continue
            of.setdefault(each.src, []).append(
                (int(first["data_ns"] - first["grant_arrived_ns"]), int(first["data"]))
            )
    told = {end: np.array(each) for end, each in of.items() if len(each) >= FEWEST}
    if len(told) < TWICE:
        raise NotJudgedError("READs to fewer than two nodes that are captured themselves")
    for end, mine in told.items():
        others = np.concatenate([each[:, 0] for other, each in told.items() if other != end])
        usual, late = float(median_of(others)), mine[:, 0].astype(np.float64)
        error = float(np.hypot(late.std() / np.sqrt(len(late)), others.std() / np.sqrt(len(others))))
        lost = float(np.maximum(late - usual, 0).sum())
        share = lost / max(sum(each.busy_ns for each in case.inferred.bulk if each.src == end), 1)
        if float(median_of(late)) <= TIMES * usual or late.mean() - usual <= SURELY * error:
            continue
        shown = mine[np.argsort(-late)[:FEWEST], 1]
        yield make_finding(
            "pcie_saturation",
            [end],
            (case.joined.start_ns, case.joined.end_ns),
            Cost(round(lost), min(share, 1.0)),
            0.6,
            f"{name_of(case.result.endpoints[end])} answers the first READ of a transfer after"
            f" {duration(round(float(median_of(late))))}, the other nodes after {duration(round(usual))}.",
            evidence=message_evidence(case.captures, case.joined, shown[shown != NONE32].tolist()),
        )


def _sends(case: Case, endpoint: int, since_ns: int, until_ns: int) -> bool:
    """Whether messages that the endpoint had begun before ``until_ns`` were leaving after ``since_ns``."""
    part = case.joined.transfers[case.sent[endpoint]]
    begun = (part["sent_ns"] != NEVER) & (part["sent_ns"] < until_ns)
    return bool((begun & (part["sent_end_ns"] > since_ns)).any())
