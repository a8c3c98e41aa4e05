"""Congestion marks in, findings with what they cost out: marked messages against unmarked ones of their"
" like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct
from dpuflow.arrays.stretches import covered_ns
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import message_evidence, worst
from dpuflow.findings.onset import lasting
from dpuflow.findings.ports import Why, carried_ns, held_on_the_way
from dpuflow.findings.slow import among
from dpuflow.quantities import duration, listed, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.findings.ports import Held
    from dpuflow.results import Finding

    Ints = NDArray[np.int64]

FEWEST: Final = 3
"""Unmarked messages that it takes to say what is usual of their like."""
SURELY: Final = 1.645
"""Standard errors: with 95 % confidence, one side."""


INCAST: Final = " Several senders sent at the same time: incast."


class _Lost(NamedTuple):
    """Time that marked messages lost: of all together; the stretches, from and to; whether that is sure."""

    ns: float
    held: NDArray[np.int64]
    known: bool


def find_congestion(case: Case) -> Iterator[Finding]:
    """One finding for each receiver towards which packets were marked, senders were told to slow down, or
    messages were held on their way: a port that is full, paused or slow."""
    flows = case.joined.flows
    marked = (flows["ecn_marked"] > 0) | (flows["cnp"] > 0)
    held_at = held_on_the_way(case)
    for receiver in sorted({*flows["dst"][marked].tolist(), *held_at}):
        held = held_at.get(receiver)
        numbers = np.flatnonzero((flows["dst"] == receiver) & (marked if held is None else True))
        senders = sorted({int(src) for src in flows["src"][numbers]})
        rows = case.received[receiver]
        rows = rows[among(case.joined.columns["src"][rows], senders)]
        marks = case.joined.columns["ecn_marked"][rows]
        lost = _lost(case, rows, marks > 0)
        cause, why = _cause(case, rows, marks > 0)
        condition = "congestion" if held is None else _CONDITIONS[held.why]
        names = [name_of(case.result.endpoints[sender]) for sender in senders]
        path = f"from {listed(names, len(names))} to {name_of(case.result.endpoints[receiver])}"
        packets = int(flows["packets"][numbers].sum())
        said = f"None of {packets:,} packets {path} is ECN-marked."
        if marked[numbers].any():
            said = (
                f"{int(flows['ecn_marked'][numbers].sum()):,} of {packets:,} packets {path} are ECN-marked;"
                f" {int(flows['cnp'][numbers].sum()):,} CNPs were seen. {_took(lost)}"
            )
        told = {
            "alternatives": [*cause, "a marking threshold set too low"] if marked[numbers].any() else cause
        }
        yield make_finding(
            condition,
            [*senders, receiver] if condition == "congestion" else [receiver, *senders],
            lasting(
                _when(case, rows[marks > 0], lost, held),
                case.joined.columns["arrived_end_ns"][rows],
                (int(flows["first_ns"][numbers].min()), int(flows["last_ns"][numbers].max())),
            ),
            _cost(case, receiver, rows, lost, held, why),
            0.9,
            f"{said}{why if held is None else _stood(held)}",
            evidence=message_evidence(case.captures, case.joined, _shown(rows, marks, held)),
            **(told if condition == "congestion" else {}),
        )


def _when(case: Case, marked: Ints, lost: _Lost, held: Held | None) -> Ints:
    """When messages were held, from and to; where none cost anything, when ``marked`` ones were under way."""
    stretches = lost.held if held is None else np.concatenate([lost.held, held.stretches], axis=1)
    if stretches.size:
        return stretches
    return np.stack([case.joined.columns[name][marked] for name in ("sent_ns", "arrived_end_ns")])


_CONDITIONS: Final = {Why.FULL: "congestion", Why.PAUSED: "head_of_line", Why.SLOW: "slow_link"}


def _cost(case: Case, receiver: int, rows: Ints, lost: _Lost, held: Held | None, why: str) -> Cost:
    """What steps took longer because messages to a receiver took longer."""
    if not lost.known and held is None:
        return Cost(None, 0.0)
    share = case.taken_share(lost.held, [receiver])
    if why == INCAST and share:
        covered = covered_ns(lost.held)
        share *= max(
            covered - carried_ns(Picked(case.joined.columns, rows), case.joined.start_ns, lost.held), 0
        ) / max(covered, 1)
    if held is not None:
        # What senders that come together fill a port with is wanted there anyway.
        own = held.why == Why.FULL and why in (INCAST, "")
        beyond = held.ns / max(covered_ns(held.stretches), 1) if own else 1.0
        share = max(share, beyond * case.taken_share(held.stretches, [receiver]))
    return case.cost(share, [receiver])


def _shown(rows: Ints, marks: NDArray[np.integer], held: Held | None) -> list[int]:
    if (marks > 0).any() or held is None:
        return worst(rows[marks > 0], marks[marks > 0]) or worst(rows, marks)
    return worst(held.rows, held.late_ns)


def _stood(held: Held) -> str:
    how = {
        Why.FULL: "others' were not: its port is full of other traffic, or was paused (PFC).",
        Why.PAUSED: "and nothing came through meanwhile, then all at once: its port stood still, as one that"
        " is paused (PFC) does.",
        Why.SLOW: "and whenever messages queue for it they come through at a third of the other ports' pace,"
        " or of its own before, or more slowly: its port is slow.",
    }[held.why]
    return (
        f" Messages to it were held on the way for up to {duration(int(held.late_ns.max()))},"
        f" {duration(held.ns)} in all, {how}"
    )


def _took(lost: _Lost) -> str:
    if not lost.known:
        return "Its cost is not known: no message of that size went unmarked."
    if not lost.ns:
        return "Marked messages took no longer than unmarked ones of their size."
    took = duration(round(lost.ns))
    return f"Marked messages took {took} longer in total than unmarked ones of their size."


def _lost(case: Case, rows: Ints, marked: NDArray[np.bool_]) -> _Lost:
    """What marked messages took longer than unmarked ones of the same sender and size."""
    none = _Lost(0.0, np.zeros((2, 0), np.int64), not len(rows) or not marked.any())
    if none.known or marked.all():
        return none
    columns = case.joined.columns
    end = columns["arrived_end_ns"][rows]
    took = (end - columns["sent_ns"][rows]).astype(np.float64)
    # Sender and size in one number.
    kind = columns["src"][rows].astype(np.int64) << 40
    kind |= np.minimum(columns["bytes"][rows].astype(np.int64), (1 << 40) - 1)
    total, variance, compared = 0.0, 0.0, 0
    held = [none.held]
    for each in distinct(kind[marked]).tolist():
        alike = kind == each
        with_marks, without = took[marked & alike], took[~marked & alike]
        if len(without) < FEWEST:
            continue
        compared += len(with_marks)
        count = len(with_marks)
        longer = with_marks - without.mean()
        total += longer.sum()
        variance += count**2 * without.var() / len(without) + count * with_marks.var()
        until = end[marked & alike]
        held.append(np.stack([until - np.maximum(longer, 0).astype(np.int64), until]))
    if not compared:
        return none
    sure = total > SURELY * np.sqrt(variance)
    return _Lost(total if sure else 0.0, np.concatenate(held, axis=1) if sure else none.held, True)


def _cause(case: Case, rows: Ints, marked: NDArray[np.bool_]) -> tuple[Sequence[str], str]:
    """What may have filled the queue, and a sentence on what did where that shows."""
    # Credits that come back from a neighbour fill no queue.
    size = case.joined.columns["bytes"][rows].astype(np.int64)
    filling = size * 2 * len(rows) > size.sum()
    rows, marked = rows[filling], marked[filling]
    if not marked.any():
        return ("incast", "other traffic on that port"), ""
    if 2 * int((_at_once(case, rows) & marked).sum()) > int(marked.sum()):
        return ("other traffic on that port",), INCAST
    return (
        ("incast", "a slow port"),
        " No two of these senders sent at the same time: other traffic or a slow port probably fills the"
        " queue.",
    )


def _at_once(case: Case, rows: Ints) -> NDArray[np.bool_]:
    """Messages to one receiver during which another sender's was under way."""
    src, begin, end = (case.joined.columns[name][rows] for name in ("src", "sent_ns", "arrived_end_ns"))
    others = _under_way(begin, end)
    for sender in distinct(src).tolist():
        own = src == sender
        others[own] -= _under_way(begin[own], end[own])
    return np.asarray(others > 0)


def _under_way(begin: Ints, end: Ints) -> Ints:
    """How many of these messages are under way at some time of each."""
    begun = np.searchsorted(np.sort(begin), end, side="left")
    return np.asarray(begun - np.searchsorted(np.sort(end), begin, side="right"), np.int64)
