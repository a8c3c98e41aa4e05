"""A job that hangs: the last operation of a group, that some ranks entered and others never did; or one whose
ranks are out of step, where these run another operation, or the same one with other sizes.

In: collectives, entries, and how long the captures of their ranks go on. Out: a finding a group. Captures
that end in mid-operation show the same, so those of its ranks must go on for longer than the group ever took
from one operation to the next.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.entries import Rule
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import message_evidence
from dpuflow.findings.unfinished import evidence_rows, find_stopped
from dpuflow.quantities import listed, name_of
from dpuflow.schema.rows import NEVER, NONE32, Op
from dpuflow.verdicts.pauses import TWICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.findings.case import Case
    from dpuflow.findings.unfinished import Stopped
    from dpuflow.matching import Instance
    from dpuflow.results import Analysis, Finding
    from dpuflow.schema.tables import Joined, Rows
    from dpuflow.verdicts import Inferred


def find_hangs(case: Case) -> Iterator[Finding]:
    """One finding for each group whose last operation some captured rank never entered, with who waits, or to
    which ranks came with other sizes."""
    until = captured_until(case.joined)
    found = list(_not_whole(case, until))
    stopped = [] if found else list(find_stopped(case, until))
    told = [each for each in stopped if each.missing]  # the others may well wait for these
    yield from found or [_stopped(case, each, until) for each in told or stopped[:1]]


def _not_whole(case: Case, until: dict[int, int]) -> Iterator[Finding]:
    """Of groups whose last operation was recognised though it was never finished."""
    for group, members in enumerate(case.inferred.groups):
        last = _last_of(case, group)
        if last is None:
            continue
        stood = all(until.get(end, NEVER) >= last.ended_ns + last.quiet_ns for end in members)
        if last.missing:
            other = _other_operation(case.inferred, case.instances, last)
        else:
            other = _other_size(case.exchanges, case.instances[last.before], case.instances[last.number])
        if (stood and last.missing) or (other is not None and not last.missing):
            apart = other[0] if other is not None else last.missing
            waiting = [end for end in members if end not in apart]
            if waiting:
                yield _finding(case, last, other, waiting, until)


class _Last(NamedTuple):
    """The last operation of a group, which not all have finished."""

    number: int
    before: int  # the one before it
    finished: int  # how many there are before it
    began_ns: int
    ended_ns: int
    left_ns: int  # when the one before it had ended
    quiet_ns: int  # for so long nothing may follow, were it to go on
    missing: list[int]  # endpoints that never entered it
    acts: list[int]  # messages of those that did


def _last_of(case: Case, group: int) -> _Last | None:
    """A group's last operation; None where it was finished, or where too few came before it."""
    entries = case.inferred.entries
    spans = [(span_of(case.inferred, n), n) for n in np.flatnonzero(case.inferred.group_of == group).tolist()]
    seen = sorted((span, number) for span, number in spans if span is not None)
    if len(seen) < TWICE + 1:
        return None
    ((_, left), before), ((began, ended), number) = seen[-2:]
    rows = np.arange(*entries.offsets[number : number + 2])
    if entries.whole[rows[0]] or case.instances[number].op == Op.SEND_RECV:
        return None
    gone = entries.rule[rows] == Rule.UNSEEN
    acts = entries.act[rows[~gone]]
    return _Last(
        number,
        before,
        len(seen) - 1,
        began,
        ended,
        left,
        TWICE * int(np.diff([span[0] for span, _ in seen]).max()),
        entries.endpoint[rows[gone]].tolist(),
        acts[acts != NONE32].tolist(),
    )


def _finding(
    case: Case, last: _Last, other: tuple[list[int], str] | None, waiting: list[int], until: dict[int, int]
) -> Finding:
    """``other``: ranks that run another operation, and which; ``until``: as of ``captured_until``."""
    result, joined, missing = case.result, case.joined, last.missing
    members = case.inferred.groups[case.inferred.group_of[last.number]]
    text = f"{case.instances[last.number].op.token} number {last.finished + 1} of {len(members)} ranks"
    if other is not None:
        runs = "runs" if len(other[0]) == 1 else "run"
        summary = f"{_names(result, other[0])} {runs} {other[1]}, {_names(result, waiting)} {text}"
    else:
        have = "has" if len(missing) == 1 else "have"
        quiet_s = (until[missing[0]] - last.ended_ns) / 1e9
        summary = (
            f"{_names(result, missing)} {have} not entered {text}, for"
            f" {quiet_s:.3g} s; {_names(result, waiting)} wait in it"
        )
    return make_finding(
        "hang" if other is None else "desync",
        other[0] if other is not None else missing,
        (last.began_ns, joined.end_ns),
        Cost((joined.end_ns - last.began_ns) * len(waiting), 1.0),  # of the time since then
        0.95 if other is None else 0.9,
        f"{summary}; the {last.finished} before it they all finished.",
        evidence=message_evidence(case.captures, joined, last.acts[:3]),
    )


def _stopped(case: Case, stopped: Stopped, until: dict[int, int]) -> Finding:
    """Of what was begun and is too little to be recognised; ``until``: as of ``captured_until``."""
    result, joined, rest, missing = case.result, case.joined, stopped.rest, stopped.missing
    before = f"{case.instances[rest.last].op.token} number {rest.finished:,}"
    before += f" of {len(case.inferred.groups[rest.group])} ranks"
    goes_on = min(until.get(end, joined.end_ns) for end in missing or stopped.waiting)
    quiet = f"for {(goes_on - stopped.ended_ns) / 1e9:.3g} s"
    waiting = f"{_names(result, stopped.waiting)} {'waits' if len(stopped.waiting) == 1 else 'wait'}"
    if missing:
        have = "has" if len(missing) == 1 else "have"
        summary = (
            f"{_names(result, missing)} {have} not entered what follows {before}, {quiet}; {waiting} in it"
        )
    else:
        after_s = (stopped.ended_ns - joined.start_ns) / 1e9
        summary = (
            f"the job stopped in mid-operation {after_s:.3g} s into the capture, after {before}, and did"
            f" nothing {quiet}; {waiting}, and for whom cannot be told"
        )
    return make_finding(
        "hang",
        missing or sorted({end for ends in case.inferred.groups for end in ends}),
        (stopped.began_ns, joined.end_ns),
        Cost((joined.end_ns - stopped.began_ns) * len(stopped.waiting), 1.0),  # of the time since then
        0.9 if missing else 0.5,
        f"{summary}.",
        evidence=message_evidence(case.captures, joined, evidence_rows(case.exchanges[stopped.rows[:3]])),
    )


def _other_operation(
    inferred: Inferred, instances: Sequence[Instance], last: _Last
) -> tuple[list[int], str] | None:
    """Of the ranks that are missing those that began another operation and never finished it, and which."""
    entries = inferred.entries
    for other, instance in enumerate(instances):
        rows = np.arange(*entries.offsets[other : other + 2])
        acted = rows[(entries.rule[rows] != Rule.UNSEEN) & (entries.enter_ns[rows] > last.left_ns)]
        apart = [end for end in entries.endpoint[acted].tolist() if end in last.missing]
        alone = instance.op != Op.SEND_RECV and not entries.whole[rows[0]]
        if apart and alone and instance.op != instances[last.number].op:
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
