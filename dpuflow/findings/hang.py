"""A job that hangs: the last operation of a group, that some ranks entered and others never did; or one whose
ranks are out of step, where these run another operation, or the same one with other sizes.

In: collectives, entries, and how long the captures of their ranks go on. Out: a finding a group. Captures
that end in mid-operation show the same, so those of its ranks must go on for longer than the group ever took
from one operation to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import is_in
from dpuflow.entries import Rule
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import message_evidence
from dpuflow.findings.out_of_step import other_operation, other_sizes
from dpuflow.findings.unfinished import evidence_rows, find_stopped
from dpuflow.quantities import listed, name_of
from dpuflow.schema.rows import NEVER, NONE32, Op, Transport
from dpuflow.verdicts.pauses import TWICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.findings.case import Case
    from dpuflow.findings.out_of_step import Apart
    from dpuflow.findings.unfinished import Rest, Stopped
    from dpuflow.results import Analysis, Finding
    from dpuflow.schema.tables import Joined


EXIT_NS: Final = 10_000_000_000
"""Processes that are done take a second or two to exit; after so long a silence the job had stopped."""


def find_hangs(case: Case) -> Iterator[Finding]:
    """One finding for each group whose last operation some captured rank never entered, with who waits, or
    whose ranks are out of step."""
    until = captured_until(case.joined)
    found = list(_not_whole(case, until))
    if not found:
        stopped = list(find_stopped(case, until))
        found = [_desync(case, *each, until) for each in _out_of_step(case, stopped)]
        stopped = [
            each for each in stopped if not _is_over(case, [rest.group for rest in each.part], each.ended_ns)
        ]
        told = [each for each in stopped if each.missing]  # the others may well wait for these
        found = found or [_stopped(case, each, until) for each in told or stopped[:1]]
    yield from found


def _is_over(case: Case, groups: Sequence[int], ended_ns: int) -> bool:
    """Whether each member ended most of its TCP streams to others soon after ``ended_ns``, as far as is seen:
    a library's, its bootstrap's or its launcher's. Who hangs keeps them, until a watchdog ends the job."""
    flows, ends = case.joined.flows, [end for group in groups for end in case.inferred.groups[group]]
    later = (flows["transport"] == Transport.TCP) & (flows["last_ns"] >= ended_ns)
    later &= is_in(flows["src"], ends) & is_in(flows["dst"], ends)
    src = flows["src"][later].astype(np.int64)
    soon = (flows["closed"] > 0) & (flows["last_ns"] <= ended_ns + EXIT_NS)
    count, ended = (np.bincount(src, of, max(ends) + 1)[ends] for of in (None, soon[later]))
    return bool((2 * ended > count).all())


def _not_whole(case: Case, until: dict[int, int]) -> Iterator[Finding]:
    """Of groups whose last operation was recognised though it was never finished."""
    instances = case.instances
    for group, members in enumerate(case.inferred.groups):
        last = _last_of(case, group)
        if last is None:
            continue
        if last.missing:
            op = instances[last.number].op
            apart = other_operation(case.inferred, instances, last.missing, last.left_ns, op, members)
        else:
            before, rows = (case.exchanges[np.sort(instances[n].rows)] for n in (last.before, last.number))
            apart = other_sizes(before, rows, members)
        stood = all(until.get(end, NEVER) >= last.ended_ns + last.quiet_ns for end in members)
        stood = stood and (apart is not None or not _is_over(case, [group], last.ended_ns))
        if (stood and last.missing) or (apart is not None and not last.missing):
            waiting = [end for end in members if end not in last.missing]
            if apart is not None or waiting:
                yield _finding(case, last, apart, waiting, until)


def _out_of_step(case: Case, stopped: Sequence[Stopped]) -> Iterator[tuple[Stopped, Apart, str]]:
    """Parts of the job in which ranks of one group came with other sizes; and to what.

    Two ranks may both go on for as long as either has what the other asks for: then their last operation,
    which looks whole, is the one in which they differ.
    """
    for each in stopped:
        for rest in each.part:
            earlier, last = (
                case.exchanges[np.sort(case.instances[number].rows)] for number in (rest.before, rest.last)
            )
            members = case.inferred.groups[rest.group]
            where = _last_whole(case, rest)
            alike = case.instances[rest.before].op == case.instances[rest.last].op
            apart = other_sizes(last, case.exchanges[rest.rows], members)
            if apart is not None:
                where = f"what follows {where}"
            elif alike:
                apart = other_sizes(earlier, last, members)
            if apart is not None:
                yield each._replace(rest=rest), apart, where
                break


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
    mine = np.flatnonzero(case.inferred.group_of == group)
    first, last = case.spans_ns[:, mine]
    order = np.lexsort((mine, last, first))
    order = order[first[order] != NEVER]
    if len(order) < TWICE + 1:
        return None
    before, number = mine[order[-2:]].tolist()
    (_, left), (began, ended) = case.spans_ns[:, mine[order[-2:]]].T.tolist()
    rows = np.arange(*entries.offsets[number : number + 2])
    if entries.whole[rows[0]] or case.instances[number].op == Op.SEND_RECV:
        return None
    gone = entries.rule[rows] == Rule.UNSEEN
    acts = entries.act[rows[~gone]]
    return _Last(
        number,
        before,
        len(order) - 1,
        began,
        ended,
        left,
        TWICE * int(np.diff(first[order]).max()),
        entries.endpoint[rows[gone]].tolist(),
        acts[acts != NONE32].tolist(),
    )


def _finding(
    case: Case, last: _Last, apart: Apart | None, waiting: list[int], until: dict[int, int]
) -> Finding:
    """``apart``: ranks that run something else; ``until``: as of ``captured_until``."""
    result, joined, missing = case.result, case.joined, last.missing
    members = case.inferred.groups[case.inferred.group_of[last.number]]
    op = case.instances[last.number].op.token
    text = f"{op} number {last.finished + 1} of {len(members)} ranks"
    if apart is not None:
        summary = _runs(result, apart, op if not missing else "", text)
    else:
        have = "has" if len(missing) == 1 else "have"
        quiet_s = (until[missing[0]] - last.ended_ns) / 1e9
        summary = (
            f"{_names(result, missing)} {have} not entered {text}, for"
            f" {quiet_s:.3g} s; {_names(result, waiting)} wait in it"
        )
    return make_finding(
        "hang" if apart is None else "desync",
        apart.endpoints if apart is not None else missing,
        (last.began_ns, joined.end_ns),
        Cost((joined.end_ns - last.began_ns) * len(waiting), 1.0),  # of the time since then
        0.95 if apart is None else 0.9,
        f"{summary}; the {last.finished} before it they all finished.",
        evidence=message_evidence(case.captures, joined, last.acts[:3]),
    )


def _runs(result: Analysis, apart: Apart, op: str, text: str) -> str:
    """Who runs what, and the others ``text``; ``op``: what both run, with messages of other sizes."""
    runs = "runs" if len(apart.endpoints) == 1 else "run"
    summary = f"{_names(result, apart.endpoints)} {runs} {f'{op} with ' if op else ''}{apart.what}, "
    return summary + (f"{_names(result, apart.others)} {text}" if apart.others else f"in {text}")


def _desync(case: Case, stopped: Stopped, apart: Apart, where: str, until: dict[int, int]) -> Finding:
    """Of what was begun with unlike sizes, ``where``; ``until``: as of ``captured_until``."""
    return _of_stopped(
        case, stopped, "desync", apart.endpoints, 0.9,
        f"{_runs(case.result, apart, 'an operation', where)}; nothing follows {_quiet(case, stopped, until)}",
    )  # fmt: skip


def _stopped(case: Case, stopped: Stopped, until: dict[int, int]) -> Finding:
    """Of what was begun and is too little to be recognised; ``until``: as of ``captured_until``."""
    result, missing = case.result, stopped.missing
    before, quiet = _last_whole(case, stopped.rest), _quiet(case, stopped, until)
    waiting = f"{_names(result, stopped.waiting)} {'waits' if len(stopped.waiting) == 1 else 'wait'}"
    if missing:
        have = "has" if len(missing) == 1 else "have"
        summary = (
            f"{_names(result, missing)} {have} not entered what follows {before}, {quiet}; {waiting} in it"
        )
    else:
        after_s = (stopped.ended_ns - case.joined.start_ns) / 1e9
        summary = (
            f"the job stopped in mid-operation {after_s:.3g} s into the capture, after {before}, and did"
            f" nothing {quiet}; {waiting}, and for whom is not known"
        )
    # Nobody is named: whoever is waited for is one of those that were not seen to act, or of all.
    named = missing or stopped.others or stopped.waiting
    return _of_stopped(case, stopped, "hang", named, 0.9 if missing else 0.5, summary)


def _of_stopped(
    case: Case, stopped: Stopped, condition: str, named: list[int], sure: float, summary: str
) -> Finding:
    joined = case.joined
    return make_finding(
        condition,
        named,
        (stopped.began_ns, joined.end_ns),
        Cost((joined.end_ns - stopped.began_ns) * len(stopped.waiting), 1.0),  # of the time since then
        sure,
        f"{summary}.",
        evidence=message_evidence(case.captures, joined, evidence_rows(case.exchanges[stopped.rows[:3]])),
    )


def _last_whole(case: Case, rest: Rest) -> str:
    """The last operation that the group finished."""
    members = case.inferred.groups[rest.group]
    return f"{case.instances[rest.last].op.token} number {rest.finished:,} of {len(members)} ranks"


def _quiet(case: Case, stopped: Stopped, until: dict[int, int]) -> str:
    """For how long nothing has come, as far as the captures go of those who should have sent."""
    goes_on = min(until.get(end, case.joined.end_ns) for end in stopped.missing or stopped.waiting)
    return f"for {(goes_on - stopped.ended_ns) / 1e9:.3g} s"


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
