"""A job that hangs: the last operation of a group, that some ranks entered and others never did.

In: collectives, entries, and how long the captures of their ranks go on. Out: a finding a group. Captures
that end in mid-operation show the same, so those of its ranks must go on for longer than the group ever took
from one operation to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.entries import Rule
from dpuflow.findings.network import message_evidence
from dpuflow.quantities import listed, name_of
from dpuflow.results import Finding
from dpuflow.schema.rows import NEVER, NONE32, Op
from dpuflow.verdicts.pauses import TWICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.matching import Instance
    from dpuflow.results import Analysis
    from dpuflow.schema.tables import CaptureTables, Joined
    from dpuflow.verdicts import Inferred


def find_hangs(
    captures: Sequence[CaptureTables],
    joined: Joined,
    instances: Sequence[Instance],
    inferred: Inferred,
    result: Analysis,
) -> Iterator[Finding]:
    """One finding for each group whose last operation some captured rank never entered, with who waits."""
    entries, until = inferred.entries, _captured_until(joined)
    for group, members in enumerate(inferred.groups):
        numbers = np.flatnonzero(inferred.group_of == group)
        spans = [_span(inferred, int(number)) for number in numbers]
        seen = [(span, int(number)) for span, number in zip(spans, numbers, strict=True) if span is not None]
        if len(seen) < TWICE + 1:
            continue
        seen.sort()
        ((began, ended), number), starts = seen[-1], np.array([span[0] for span, _ in seen])
        rows = np.arange(*entries.offsets[number : number + 2])
        gone = entries.rule[rows] == Rule.UNSEEN
        quiet_ns = TWICE * int(np.diff(starts).max())
        missing = entries.endpoint[rows[gone]].tolist()
        if entries.whole[rows[0]] or instances[number].op == Op.SEND_RECV:
            continue
        if not 0 < len(missing) < len(members):
            continue
        if any(until.get(end, NEVER) < ended + quiet_ns for end in members):
            continue
        waiting = entries.endpoint[rows[~gone]].tolist()
        op = instances[number].op.token
        done = f"the {len(seen) - 1} before it they all finished"
        acts = entries.act[rows[~gone]]
        yield Finding(
            id=0,
            condition="hang",
            runbook="docs/report.md#hang",
            endpoints=missing,
            start_ns=began,
            end_ns=joined.end_ns,
            severity="critical",
            confidence=0.95,
            summary=(
                f"{_names(result, missing)} {'has' if len(missing) == 1 else 'have'} not entered {op} number"
                f" {len(seen)} of {len(members)} ranks, for {(until[missing[0]] - ended) / 1e9:.3g} s;"
                f" {_names(result, waiting)} wait in it; {done}."
            ),
            advice=(
                "Take stacks of the processes named first: they are stopped, wait for something else, or run"
                " another operation than their peers."
            ),
            alternatives=["ranks that disagree on which operation comes next"],
            evidence=message_evidence(captures, joined, acts[acts != NONE32][:3].tolist()),
        )


def _span(inferred: Inferred, number: int) -> tuple[int, int] | None:
    """From the first to the last sign of a collective's ranks; None where nothing dates any."""
    rows = slice(*inferred.entries.offsets[number : number + 2].tolist())
    times = np.concatenate([inferred.entries.enter_ns[rows], inferred.entries.leave_ns[rows]])
    times = times[times != NEVER]
    return (int(times.min()), int(times.max())) if len(times) else None


def _captured_until(joined: Joined) -> dict[int, int]:
    """Until when each endpoint's own capture goes on, on the reference clock."""
    found: dict[int, int] = {}
    for capture, clock, ends in zip(joined.captures, joined.clocks, joined.local, strict=True):
        if capture.last_ns is None or (clock.offset_ns is None and not clock.reference):
            continue
        drift = (clock.drift_ppb or 0) * 1e-9 * ((capture.last_ns or 0) - (capture.first_ns or 0))
        last = capture.last_ns - (clock.offset_ns or 0) - round(drift)
        found.update({end: max(last, found.get(end, last)) for end in ends})
    return found


def _names(result: Analysis, ends: Sequence[int]) -> str:
    return listed([name_of(result.endpoints[end]) for end in ends], len(ends))
