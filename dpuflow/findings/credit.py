"""Flows and messages in, findings about receivers that do not take what is sent to them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.arrays.stretches import covered_ns
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import SHOWN, message_evidence, most
from dpuflow.findings.losses import FEWEST, held_up
from dpuflow.findings.onset import lasting
from dpuflow.quantities import duration, listed, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.findings.case import Case
    from dpuflow.results import Evidence, Finding


def find_starvation(case: Case) -> Iterator[Finding]:
    """One finding for each receiver that answered RoCE messages by receiver-not-ready NAKs."""
    from dpuflow.kernels.links import AGAIN, FROM, SENDER

    flows = case.joined.flows
    for receiver in distinct(flows["src"][flows["rnr"] > 0]).tolist():
        numbers = np.flatnonzero((flows["src"] == receiver) & (flows["rnr"] > 0))
        senders = sorted({int(dst) for dst in flows["dst"][numbers]})
        columns = case.received.columns(receiver)
        theirs = np.isin(columns[SENDER], senders)
        held = held_up(columns[:, theirs])
        held_ns = covered_ns(held)
        refused = int(flows["rnr"][numbers].sum())
        names = [name_of(case.result.endpoints[sender]) for sender in senders]
        yield starved(
            case,
            [receiver, *senders],
            f"{name_of(case.result.endpoints[receiver])} refused messages from {listed(names, len(names))}"
            f" {refused} times (receiver not ready): it had posted no receive for them.",
            # What was refused came again.
            message_evidence(
                case.captures, case.joined, most(case.received[receiver][theirs], columns[AGAIN][theirs])
            ),
            0.9 if refused >= FEWEST else 0.6,
            Cost(held_ns, held_ns / case.span_ns([receiver])),
            lasting(held, columns[FROM, theirs], (case.joined.start_ns, case.joined.end_ns)),
        )


def find_slow_receivers(case: Case) -> Iterator[Finding]:
    """One finding for each receiver whose GPU takes what it receives more slowly than the others'."""
    for each in case.inferred.receivers:
        name = name_of(case.result.endpoints[each.endpoint])
        yield starved(
            case,
            [each.endpoint],
            f"{name} is slow to receive: its inputs wait {duration(each.taking_ns)} before it takes them"
            f" (median of {each.operations} operations), those of the other receivers"
            f" {duration(each.others_ns)}. Ranks that wait for its credits, or for what it does next, lose"
            f" {duration(each.cost_ns)}.",
            message_evidence(case.captures, case.joined, case.received[each.endpoint][:SHOWN].tolist()),
            0.9,
            Cost(each.cost_ns, each.cost_ns / case.span_ns([each.endpoint])),
        )


def starved(
    case: Case,
    endpoints: list[int],
    summary: str,
    evidence: list[Evidence],
    confidence: float,
    cost: Cost,
    times: tuple[int, int] | None = None,
) -> Finding:
    """A receiver, first of ``endpoints``, that did not take what the others had for it; ``times``: from when
    to when, all of what was captured without it."""
    return make_finding(
        "credit_starvation",
        endpoints,
        times or (case.joined.start_ns, case.joined.end_ns),
        cost,
        confidence,
        summary,
        evidence=evidence,
    )
