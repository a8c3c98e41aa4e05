"""Flows and messages in, findings about lost packets out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.arrays.stretches import covered_ns
from dpuflow.findings.case import SMALL_SHARE, make_finding
from dpuflow.findings.evidence import message_evidence, most
from dpuflow.findings.onset import lasting
from dpuflow.quantities import duration, listed, name_of, percent
from dpuflow.schema.rows import NEVER, Seen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding
    from dpuflow.schema.tables import Rows

LOSS_SHARE = 1e-4
"""Retransmissions below one packet in ten thousand are everyday noise."""
FEWEST = 3
"""Fewer packets sent again, or not granted, are told as information."""


def too_often(case: Case) -> NDArray[np.bool_]:
    """Flows that lose more packets than is usual."""
    packets = case.joined.flows["packets"].astype(np.float64)
    return np.asarray(case.repeats.lost > np.maximum(1, LOSS_SHARE * packets))


def _costly(case: Case) -> NDArray[np.bool_]:
    """Flows of senders whose losses held messages up for a hundredth of the time, however few they were: a
    timeout of RoCE takes seconds."""
    flows = case.joined.flows
    lossy = (case.repeats.lost > 0) & ~case.of_clients
    long = [
        sender
        for sender in distinct(flows["src"][lossy]).tolist()
        if covered_ns(held_by_losses(case, sender)) >= SMALL_SHARE * case.span_ns([sender])
    ]
    return np.asarray(lossy & np.isin(flows["src"], long))


def find_losses(case: Case) -> Iterator[Finding]:
    """One finding for each place where packets are lost, as severe as the time that it cost.

    The place is the endpoint that most of what came again was from or to. Clients' connections are another
    matter (``clients``).
    """
    from dpuflow.kernels.links import AGAIN

    flows, sent, repeats = case.joined.flows, case.sent, case.repeats
    chosen = (too_often(case) | _costly(case)) & ~case.of_clients
    for place, numbers in _lossy_places(flows, repeats.lost, chosen):
        senders = sorted({int(flows["src"][n]) for n in numbers}, key=lambda end: end != place)
        lost, again, packets = (
            int(column[numbers].sum()) for column in (repeats.lost, flows["retransmitted"], flows["packets"])
        )
        held, shown = [], []
        for sender in senders:
            held.append(held_by_losses(case, sender))
            shown.append((sent[sender], _sent_again(case, sender)[AGAIN].copy()))
        stretches = np.concatenate(held, axis=1)
        held_ns = covered_ns(stretches)
        if not held_ns:
            continue
        others = {int(flows[name][n]) for n in numbers for name in ("src", "dst")} - {place}
        # Messages that nobody waited for cost the job nothing.
        share = case.taken_share(stretches, [place])
        held_share = covered_ns(stretches, *case.job_ns([place])) / case.span_ns([place])
        ends = case.result.endpoints
        one_way = senders == [place]
        ways = "from" if one_way else "from and to" if place in senders else "to"
        lost_time = (
            f"it cost the job {percent(share)} of its time" if share > 0 else "no step took longer for it"
        )
        to = f" to {listed([name_of(ends[end]) for end in sorted(others)], 3)}" if one_way and others else ""
        yield make_finding(
            "packet_loss",
            [place, *sorted(others)],
            lasting(
                stretches,
                np.concatenate([case.joined.columns["sent_ns"][sent[sender]] for sender in senders]),
                (int(flows["first_ns"][numbers].min()), int(flows["last_ns"][numbers].max())),
            ),
            case.cost(share, [place]),
            0.5 if lost < FEWEST else 0.9,
            f"{lost:,} of {packets:,} packets {ways} {name_of(ends[place])}{to} were retransmitted"
            f" ({100 * lost / max(packets, 1):.2f} %): they or their acknowledgments were lost"
            f" or late{_besides(again - lost)}. Messages were delayed for {duration(held_ns)}"
            f" ({percent(held_share)} of the time); {lost_time}.",
            alternatives=[
                "a switch port or cable that corrupts frames",
                "a queue that overflows",
                "reordering",
                "a receiver's host that was too slow to acknowledge",
            ],
            evidence=message_evidence(
                case.captures, case.joined, most(*map(np.concatenate, zip(*shown, strict=True)))
            ),
        )


def _sent_again(case: Case, sender: int) -> NDArray[np.int64]:
    """As from ``ByEnd``, of what was sent again that of which something was lost."""
    from dpuflow.kernels.links import AGAIN

    columns = case.sent.columns(sender)
    columns[AGAIN] = case.repeats.without(case.sent[sender], columns[AGAIN])
    return columns


def _of_losses(case: Case, sender: int) -> NDArray[np.int64]:
    """The same, under way until it was there."""
    from dpuflow.kernels.links import AGAIN, UNDER_WAY

    columns = _sent_again(case, sender)
    again = np.flatnonzero(columns[AGAIN])
    part = case.joined.transfers[case.sent[sender][again]]
    # What came only after a timeout left in time: it was under way until it was there, or acknowledged.
    acked, sent = part["acked_ns"], part["sent_ns"]
    there = np.where((part["seen"] & Seen.AT_RECEIVER) != 0, part["arrived_end_ns"], acked)
    there = np.where(there == NEVER, sent, there)  # nobody saw it arrive
    # Where the acknowledgment was lost the sender knows nothing until it has repeated it all.
    late = (acked != NEVER) & (acked - there > case.repeats.answered_ns)
    there = np.where(late, acked, there)
    columns[UNDER_WAY, again] = np.maximum(columns[UNDER_WAY, again], there - sent)
    return columns


def held_by_losses(case: Case, sender: int) -> NDArray[np.int64]:
    """From when to when a sender's messages were held up by losses; two rows."""
    if sender not in case.held_of:
        case.held_of[sender] = held_up(_of_losses(case, sender))
    return case.held_of[sender]


def _besides(needless: int) -> str:
    """Of what the receiver had already."""
    if not needless:
        return ""
    return f"; {needless} more {'was' if needless == 1 else 'were'} retransmitted spuriously"


def _lossy_places(
    flows: Rows, lost: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> Iterator[tuple[int, list[int]]]:
    """(endpoint, its flows that repeat too much), worst first: each flow once.

    What loses packets near an endpoint loses those that it sends, those sent to it, and their ACKs: several
    senders repeat packets for one fault.
    """
    left = np.flatnonzero(chosen).tolist()
    while left:
        again = {n: int(lost[n]) for n in left}
        passed: dict[int, int] = {}
        sends: dict[int, int] = {}
        for n in left:
            src, dst = int(flows["src"][n]), int(flows["dst"][n])
            for end in (src, dst):
                passed[end] = passed.get(end, 0) + again[n]
            sends[src] = sends.get(src, 0) + again[n]
        # Of two ends of the same flows the one that sends what is repeated.
        place = max(passed, key=lambda end: (passed[end], sends.get(end, 0), -end))
        mine = [n for n in left if place in (int(flows["src"][n]), int(flows["dst"][n]))]
        yield place, mine
        left = [n for n in left if n not in mine]


def held_up(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """From when to when messages sent again, of a sender's, were under way longer than the others; two rows.

    ``columns`` as from ``ByEnd``. A message is held to the usual time of the same sender's others of its
    size; where it has none, to the usual pace of those that took any time, else to the quickest.
    """
    from dpuflow.kernels.links import AGAIN, CARRIED, FROM, UNDER_WAY

    start, took, carried = columns[FROM], columns[UNDER_WAY], columns[CARRIED]
    again = columns[AGAIN] > 0
    if not again.any():
        return np.zeros((2, 0), np.int64)
    pace = took / np.maximum(carried, 1)
    sound = ~again & (took > 0)
    usual = (float(median_of(pace[sound])) if sound.any() else float(pace.min())) * carried[again]
    sizes, of = np.unique(carried[again], return_inverse=True)
    for number, size in enumerate(sizes.tolist()):
        like = ~again & (carried == size)
        if like.any():
            usual[of == number] = float(median_of(took[like]))
    took = took[again]
    end = start[again] + took
    return np.stack([end - np.maximum(took - usual, 0).astype(np.int64), end])
