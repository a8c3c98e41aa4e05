"""A job that hangs: the last operation of a group, that some ranks entered and others never did; or one whose
ranks are out of step, where these run another operation, or the same one with other sizes.

In: collectives, entries, and how long the captures of their ranks go on. Out: a finding a group. Captures
that end in mid-operation show the same, so those of its ranks must go on for longer than the group ever took
from one operation to the next.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.entries import Rule
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import message_evidence
from dpuflow.quantities import listed, name_of
from dpuflow.schema.rows import NEVER, NONE32, Op
from dpuflow.verdicts.pauses import TWICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.findings.case import Case
    from dpuflow.matching import Instance
    from dpuflow.results import Analysis, Finding
    from dpuflow.schema.tables import Joined, Rows
    from dpuflow.verdicts import Inferred


def find_hangs(case: Case) -> Iterator[Finding]:
    """One finding for each group whose last operation some captured rank never entered, with who waits, or to
    which ranks came with other sizes."""
    joined, inferred, instances, result = case.joined, case.inferred, case.instances, case.result
    entries, until = inferred.entries, captured_until(joined)
    for group, members in enumerate(inferred.groups):
        numbers = np.flatnonzero(inferred.group_of == group)
        spans = [span_of(inferred, int(number)) for number in numbers]
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
        (_, left), before = seen[-2]
        if missing:
            other = _other_operation(inferred, instances, number, left, missing)
        else:
            other = _other_size(case.exchanges, instances[before], instances[number])
        quiet = all(until.get(end, NEVER) >= ended + quiet_ns for end in members)
        if not (quiet and missing) and (missing or other is None):
            continue
        op, apart = instances[number].op.token, other[0] if other else []
        waiting = [end for end in members if end not in (apart or missing)]
        if not waiting:
            continue
        acts = entries.act[rows[~gone]]
        text = f"{op} number {len(seen)} of {len(members)} ranks"
        if other is not None:
            runs = "runs" if len(apart) == 1 else "run"
            summary = f"{_names(result, apart)} {runs} {other[1]}, {_names(result, waiting)} {text}"
        else:
            summary = (
                f"{_names(result, missing)} {'has' if len(missing) == 1 else 'have'} not entered {text}, for"
                f" {(until[missing[0]] - ended) / 1e9:.3g} s; {_names(result, waiting)} wait in it"
            )
        stopped_ns = joined.end_ns - began
        yield make_finding(
            "hang" if other is None else "desync",
            apart or missing,
            (began, joined.end_ns),
            Cost(stopped_ns * len(waiting), 1.0),  # of the time since then
            0.95 if other is None else 0.9,
            f"{summary}; the {len(seen) - 1} before it they all finished.",
            evidence=message_evidence(case.captures, joined, acts[acts != NONE32][:3].tolist()),
        )


def _other_operation(
    inferred: Inferred, instances: Sequence[Instance], number: int, since_ns: int, missing: Sequence[int]
) -> tuple[list[int], str] | None:
    """Of the ranks that are missing those that began another operation and never finished it, and which."""
    entries = inferred.entries
    for other, instance in enumerate(instances):
        rows = np.arange(*entries.offsets[other : other + 2])
        acted = rows[(entries.rule[rows] != Rule.UNSEEN) & (entries.enter_ns[rows] > since_ns)]
        apart = [end for end in entries.endpoint[acted].tolist() if end in missing]
        alone = other != number and instance.op != Op.SEND_RECV and not entries.whole[rows[0]]
        if apart and alone and instance.op != instances[number].op:
            return apart, instance.op.token
    return None


def _other_size(exchanges: Rows, before: Instance, last: Instance) -> tuple[list[int], str] | None:
    """Ranks whose first data of an operation is of another size than most others', though that of the
    operation before it was alike."""
    sizes = _first_bytes(exchanges, last)
    common = Counter(sizes.values()).most_common(2)
    alike = len(set(_first_bytes(exchanges, before).values())) == 1
    if not alike or len(common) < 2 or common[0][1] == common[1][1]:
        return None
    apart = sorted(end for end, nbytes in sizes.items() if nbytes != common[0][0])
    what = f"{last.op.token} with messages of {sizes[apart[0]]:,} bytes instead of {common[0][0]:,}"
    return apart, what


def _first_bytes(exchanges: Rows, instance: Instance) -> dict[int, int]:
    """Bytes of the first data that each rank sent in a collective."""
    rows = exchanges[np.sort(instance.rows)]
    rows = rows[(rows["data_ns"] != NEVER) & (rows["bytes"] > 0)]
    rows = rows[np.argsort(rows["data_ns"], kind="stable")[::-1]]
    return dict(zip(rows["src"].tolist(), rows["bytes"].tolist(), strict=True))


def span_of(inferred: Inferred, number: int) -> tuple[int, int] | None:
    """From the first to the last sign of a collective's ranks; None where nothing dates any."""
    rows = slice(*inferred.entries.offsets[number : number + 2].tolist())
    times = np.concatenate([inferred.entries.enter_ns[rows], inferred.entries.leave_ns[rows]])
    times = times[times != NEVER]
    return (int(times.min()), int(times.max())) if len(times) else None


def captured_until(joined: Joined) -> dict[int, int]:
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
