"""Messages in, findings about NICs and receivers that stand still out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct, median_of
from dpuflow.findings.case import SMALL_SHARE, make_finding
from dpuflow.findings.clients import FEWEST, SURELY, TWICE
from dpuflow.findings.credit import starved
from dpuflow.findings.evidence import message_evidence
from dpuflow.quantities import duration, listed, name_of, percent
from dpuflow.schema.rows import NEVER, NONE32, Seen, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding

    Ints = NDArray[np.int64]

TIMES = 3
"""So many times what all that is under way would take: a NIC that stands still."""


def find_standstills(case: Case) -> Iterator[Finding]:
    """One finding for each NIC from which messages to several receivers stand still at the same time."""
    all_of = case.joined.columns
    several = (all_of["wire"] >= Wire.ROCE_SEND) & (all_of["wire"] <= Wire.ROCE_SEND_IMM)
    several &= (all_of["packets"] > 1) & (all_of["retransmitted"] == 0)
    several &= (all_of["seen"] & Seen.AT_SENDER) != 0
    for sender in distinct(case.joined.flows["src"]).tolist():
        rows = case.sent[sender]
        rows = rows[several[rows]]
        if len(rows) < FEWEST:
            continue
        part = case.joined.transfers[rows]
        stalls = standstills(part["sent_ns"], part["sent_end_ns"], part["bytes"].astype(float))
        kept, ends = [], set()
        for begin, end in stalls.tolist():
            under_way = part["dst"][(part["sent_ns"] <= begin) & (part["sent_end_ns"] >= end)]
            if len(set(under_way.tolist())) > 1:
                kept.append((begin, end))
                ends |= set(under_way.tolist())
        lost = sum(end - begin for begin, end in kept)
        share = case.taken_share(np.array(kept, np.int64).reshape(-1, 2).T, [sender])
        if len(kept) < FEWEST or share < SMALL_SHARE:
            continue
        names = [name_of(case.result.endpoints[end]) for end in sorted(ends)]
        during = rows[(part["sent_ns"] <= kept[0][0]) & (part["sent_end_ns"] >= kept[0][1])]
        yield make_finding(
            "head_of_line",
            [sender, *sorted(ends)],
            (kept[0][0], kept[-1][1]),
            case.cost(share, [sender]),
            0.8,
            f"Messages from {name_of(case.result.endpoints[sender])} to {listed(names, 4)} stalled midway"
            f" at the same time, {len(kept)} times, {duration(lost)} in all ({percent(share)} of the time):"
            " what stops one receiver's traffic stops the others'.",
            evidence=message_evidence(case.captures, case.joined, during[:FEWEST].tolist()),
        )


def standstills(begin_ns: Ints, end_ns: Ints, size: NDArray[np.float64]) -> Ints:
    """From when to when nothing begins or ends at a sender for longer than all under way would take; two
    columns. Its pace is that of the quickest tenth of its messages."""
    pace = float(np.percentile((end_ns - begin_ns) / np.maximum(size, 1), 10))
    times = np.concatenate([begin_ns, end_ns])
    order = np.argsort(times, kind="stable")
    times = times[order]
    under_way = np.cumsum(np.concatenate([np.ones(len(begin_ns)), -np.ones(len(end_ns))])[order])
    left = np.cumsum(np.concatenate([size, -size])[order])
    gap = np.diff(times)
    # What came last may be one of the packets of a message: no shorter than the usual one's time.
    still = (under_way[:-1] > 1) & (gap > TIMES * pace * left[:-1])
    at = np.flatnonzero(still)
    return np.stack([times[at], times[at + 1]], axis=1)


def find_late_credits(case: Case) -> Iterator[Finding]:
    """One finding for the receiver whose credits come late, where operations waited for credits.

    What waits for its credit leaves as soon as that is there; which receiver's senders do so more often than
    the others' tells whose credits are late. NCCL's hosts give credits ahead of their ranks; where a library
    gives them in the rank's own call (Gloo, MPI; NCCL into registered buffers), a late one shows a late rank:
    of the waiting only what lies beyond the others' costs.
    """
    steps = sum(account.step_ns for account in case.inferred.accounts)
    share = sum(account.credit for account in case.inferred.accounts) / max(steps, 1)
    # What waits while messages are sent again waits for those, whoever's credit comes late for it.
    share = min(share, 1 - case.lost_ns / case.span_ns())
    if share < SMALL_SHARE:
        return
    every = case.exchanges
    known = (every["grant"] != NONE32) & (every["grant_arrived_ns"] != NEVER) & (every["data_ns"] != NEVER)
    known &= every["wire"] == Wire.ROCE_WRITE_IMM
    # A credit that was held on its way was not granted late.
    way = every["grant_arrived_ns"] - every["grant_ns"]
    known &= (every["grant_ns"] != NEVER) & (way <= TWICE * median_of(way[known]) if known.any() else known)
    rows = Picked(every, np.flatnonzero(known))
    soon = _at_once(rows)
    receivers = distinct(rows["dst"])
    share_of = (np.bincount(rows["dst"], soon) / np.maximum(np.bincount(rows["dst"]), 1))[receivers]
    if len(receivers) < 2:
        return
    most = int(share_of.argmax())
    mine, others = rows["dst"] == receivers[most], rows["dst"] != receivers[most]
    both = float(soon.mean())
    error = float(np.sqrt(both * (1 - both) * (1 / mine.sum() + 1 / others.sum())))
    if not share_of[most] - soon[others].mean() > (SURELY + np.sqrt(2 * np.log(len(receivers)))) * error:
        return
    beyond = float((share_of[most] - soon[others].mean()) * mine.sum() / soon.sum())
    receiver, share = int(receivers[most]), share * beyond
    if receiver in {each.endpoint for each in case.inferred.receivers}:
        return  # told already, with how long its inputs lay there
    senders = sorted(set(rows["src"][mine & soon].tolist()))
    names = [name_of(case.result.endpoints[end]) for end in senders]
    yield starved(
        case,
        [receiver, *senders],
        f"{percent(float(share_of[most]))} of what {listed(names, 4)} sent to"
        f" {name_of(case.result.endpoints[receiver])} left as soon as its credit arrived (to the other"
        f" receivers {percent(float(soon[others].mean()))}): its credits come late. Steps wait for that"
        f" {percent(share)} of their time.",
        message_evidence(case.captures, case.joined, rows["grant"][mine & soon][:FEWEST].tolist()),
        0.75,
        case.cost(share, [receiver]),
    )


def _at_once(rows: Picked) -> NDArray[np.bool_]:
    """Data that left as soon after its credit as the quickest tenth of all, twice that at the most."""
    after = (rows["data_ns"] - rows["grant_arrived_ns"]).astype(float)
    soon = after[after > 0]
    if not len(soon):
        return np.zeros(len(rows), bool)
    return np.asarray((after > 0) & (after <= 2 * np.percentile(soon, 10)))
