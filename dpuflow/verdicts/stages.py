"""Pipelines in, how much longer each stage worked for what it sent than its like out: rows of Entries.

Like is compared with like. Where replicas of a model (data parallel) have pipelines side by side, the same
stage of each does the same work, for each transfer and before each collective that ties them together. Else
the stages of one pipeline are compared, those that send forward and those that send back; in 1F1B an end
stage's messages follow from both, so there the sum is compared. These stages may differ by design: what that
explains is no lateness, nor is what was sent again. What is left is judged as that of any other rank
(``judgement``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import classes, distinct, median_of, numbered
from dpuflow.entries import AT_ONCE
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.chance import SIGMAS, scatter_of_steps
from dpuflow.verdicts.pipelines import BACKWARD, FORWARD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.verdicts.pipelines import Pipeline, Work


UNEQUAL = 0.1
"""How much longer than its peers a stage may work by design, in shares of their work."""


@dataclass
class Stage:
    """One stage of a pipeline, compared with ``peers`` (none: it is like no other).

    ``excess_ns``: how much longer it works than its peers in a step (without steps: for a message), in the
    median; ``incidents_ns``: of each step that tells, by how much it was late; ``replicated``: by replicas.
    """

    endpoint: int
    verdict: str = "unknown"
    excess_ns: int = 0
    peers: list[int] = field(default_factory=list)
    replicated: bool = False
    incidents_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))


class Compared(NamedTuple):
    """Acts of stages; arrays are parallel."""

    rows: Ints  # of Entries
    excess_ns: Ints  # how much longer the stage worked for it than its peers; NEVER where not known
    amount_ns: Ints  # the same, 0 within the noise, and within what a design explains
    sigma_ns: Floats  # one standard deviation of the excess
    design_ns: Floats  # so much longer it may work unnoticed: by design, not beside replicas; or as its peers
    # may have waited
    like: Ints  # number of what it is compared with beside replicas; -1: none


class _Acts(NamedTuple):
    """Acts of one stage that are compared; arrays are parallel."""

    rows: Ints  # of Entries
    own_ns: Ints  # how long it worked for each, by several reckonings; NEVER where not known
    like: Ints  # number of what it is compared with: acts of peers that have the same; -1: with none
    unit: Ints  # the step, or the running number of a message
    place: Ints  # ... and the act's number in it; 0 where acts of a unit are compared in one
    share: Floats  # of each act in that time, where it is that of several
    blocked_ns: Ints  # for so much of that it may have waited for what it had sent


class _Beside(NamedTuple):
    """One stage beside its peers."""

    known: Bools  # which of its acts tell; of these:
    own_ns: Floats  # how long it worked
    beyond_ns: Floats  # how much longer than its peers for the like
    peers: list[float]  # how long each of these usually works
    blocked_ns: float = 0.0  # ... of which it may usually have waited so long for what it had sent


def compare_stages(
    pipelines: Sequence[Pipeline], instances: Sequence[Instance], entries: Entries
) -> tuple[Compared, list[Stage]]:
    """What each act of a stage took longer than those of its peers; and the stages, in order."""
    stages = {end: Stage(end) for each in pipelines for end in each.stages}
    families = list(_families(pipelines, instances, entries))
    unjudged = {each.stages[place] for each in pipelines for place in each.ends}
    for family, replicated in families:
        for end in family:
            stages[end].peers = sorted({*stages[end].peers, *family} - {end})
            stages[end].replicated |= replicated
    parts, of = [], []
    for number, (family, replicated) in enumerate(families):
        beside = [
            _beside(acts, [each for each in family.values() if each is not acts]) for acts in family.values()
        ]
        sigma = float(median_of([scatter_of_steps(each.beyond_ns) for each in beside]))
        for (end, acts), told in zip(family.items(), beside, strict=True):
            if end in unjudged:
                continue
            alone = len(stages[end].peers) < 2
            part = _late(acts, told, sigma, None if replicated else alone)
            _describe(stages[end], acts, part)
            parts.append(part._replace(like=acts.like if replicated else part.like))
            of.append(np.full(len(acts.rows), number))
    none = np.zeros(0, np.int64)
    columns = zip(*parts, strict=True) if parts else [(none,)] * len(Compared._fields)
    found = Compared(*(np.concatenate(column) for column in columns))
    like = numbered(np.concatenate([none, *of]), found.like + 1) if parts else none
    return found._replace(like=np.where(found.like >= 0, like, -1)), list(stages.values())


def _families(
    pipelines: Sequence[Pipeline], instances: Sequence[Instance], entries: Entries
) -> Iterator[tuple[dict[int, _Acts], bool]]:
    """Stages that do the same work, with their acts; and whether they are replicas."""
    replicated: set[int] = set()
    single = np.array([i.op == Op.SEND_RECV for i in instances], bool)
    # What follows from one input among several that lay there: by order, as ``pipelines`` has it.
    follows = np.full(len(entries.endpoint), NEVER)
    for work in (work for each in pipelines for row in each.work for work in row if work is not None):
        told = work.own_ns != NEVER
        follows[work.rows[told]] = entries.enter_ns[work.rows[told]] - work.own_ns[told]
    for ends in replicas_of(pipelines, instances):
        replicated |= set(ends)
        ties = np.array([set(ends) <= set(i.order) for i in instances], bool) & ~single
        yield {end: _acts_of(end, ties, single, entries, follows) for end in ends}, True
    for each in pipelines:
        works = [
            [_held(row[way], [typical_ns(other[way]) for other in each.work]) for way in (FORWARD, BACKWARD)]
            for row in each.work
        ]
        for ways in [(FORWARD, BACKWARD)] if each.schedule == "1f1b" else [(FORWARD,), (BACKWARD,)]:
            found = {
                end: acts
                for end, row in zip(each.stages, works, strict=True)
                if end not in replicated
                and (acts := _together([row[way] for way in ways], entries)) is not None
            }
            if len(found) > 1:
                yield found, False


def _held(work: Work | None, typical: Sequence[int | None]) -> Work | None:
    """What is not told of a send that its receiver held up is no more than until then: it tells where that is
    no longer than usual, for the stage itself, else for the quickest of all (``typical``)."""
    if work is None:
        return None
    own, told = typical_ns(work), [each for each in typical if each is not None]
    usual = own if own is not None else min(told, default=0)
    short = (work.most_ns != NEVER) & (work.most_ns <= (1 + AT_ONCE) * usual)
    return work._replace(own_ns=np.where(short, np.minimum(work.most_ns, usual), work.own_ns))


def replicas_of(pipelines: Sequence[Pipeline], instances: Sequence[Instance]) -> list[list[int]]:
    """For each stage of pipelines side by side the endpoints that are that stage: a collective ties them."""
    tied = {frozenset(i.order) for i in instances if i.op != Op.SEND_RECV}
    found: dict[tuple[int, int, frozenset[int]], list[int]] = {}
    for each in pipelines:
        for place, stage in enumerate(each.stages):
            for ends in tied:
                # Not a collective that ties stages of one pipeline together.
                if stage in ends and len(ends.intersection(each.stages)) == 1:
                    found.setdefault((len(each.stages), place, ends), []).append(stage)
    return [sorted(peers) for peers in found.values() if len(peers) > 1]


def _acts_of(end: int, ties: Bools, single: Bools, entries: Entries, follows: Ints) -> _Acts:
    """What a stage does of its own accord: transfers it sends, and entering the collectives that ``ties``
    marks; like are those that are as many transfers, or collectives, after as many of these.

    It works since what the act follows from (``follows``, NEVER where that is not told), else since the last
    input, or its last act. By other reckonings since it was free to act: its own last data had left and its
    peer had allowed more; or since the first of several inputs that had come since its last act.
    """
    enter, leave = entries.enter_ns, entries.leave_ns
    mine = entries.of[end]
    number = entries.collective[mine]
    sending, entering = single[number] & (entries.offsets[number] == mine), ties[number]
    inputs = np.sort(leave[mine[~sending]])
    rows = mine[(sending | entering) & (enter[mine] != NEVER)]
    rows = rows[np.lexsort((rows, enter[rows]))]
    when, tying = enter[rows], ties[entries.collective[rows]]

    def before(times: Ints) -> Ints:
        """The last of ``times`` up to each act; NEVER without."""
        last: Ints = np.r_[NEVER, times][np.searchsorted(times, when, "right")]
        return last

    acted, begun = _last_acts(when, tying, before(inputs))
    since = np.where(follows[rows] != NEVER, follows[rows], np.maximum(before(inputs), acted))
    credit = entries.credit_ns[rows]
    kept = np.maximum(since, before(np.sort(entries.idle_ns[mine[sending]])))
    kept = np.maximum(kept, np.where(credit != NEVER, when - credit, NEVER))
    first, came = (np.searchsorted(inputs, times, "right") for times in (acted, when))
    several = (follows[rows] == NEVER) & (came > first)
    oldest = np.where(several, np.r_[inputs, 0][first], since)
    known = (since != NEVER) & (entries.retransmitted[rows] == 0)
    own = np.where(known, np.maximum(when - np.stack([since, kept, oldest]), 0), NEVER)
    unit, place = np.searchsorted(when[tying], begun), np.empty(len(rows), np.int64)
    for kind, each in enumerate((~tying, tying)):
        mine = unit[each]
        place[each] = 2 * (np.arange(len(mine)) - np.searchsorted(mine, mine)) + kind
    none = np.zeros(len(rows), np.int64)
    return _Acts(rows, own, unit << 32 | place, unit, place, np.ones(len(rows)), none)


def _last_acts(when: Ints, tying: Bools, came: Ints) -> tuple[Ints, Ints]:
    """For each act at ``when`` that of the last one before it (NEVER: none), and the time by which what it
    may follow from had been done. ``tying``: it enters a collective; ``came``: when the last input had.

    The last data of a step leaves beside the collective that ends it, sooner or later than that is entered:
    what comes half a message's work after the other need not come after it.
    """
    sent = when[~tying]
    gaps = (sent - np.maximum(came[~tying], np.r_[NEVER, sent][: len(sent)]))[1:]
    begun = when - (int(median_of(gaps)) // 2 if len(gaps) else 0)
    acted = np.empty(len(when), np.int64)
    for own in (tying, ~tying):
        times, others = when[own], when[~own]
        beside = np.r_[NEVER, others][np.searchsorted(others, begun[own], "right")]
        acted[own] = np.maximum(np.r_[NEVER, times][: len(times)], beside)
    return acted, begun


def _together(works: Sequence[Work | None], entries: Entries) -> _Acts | None:
    """What a stage works for its messages: that for each, with what those the other way need in the mean of
    the same unit. Like are those of the same unit."""
    told = [work for work in works if work is not None]
    if not told:
        return None
    rows, unit, own, blocked = (
        np.concatenate([getattr(work, name) for work in told])
        for name in ("rows", "unit", "own_ns", "blocked_ns")
    )
    own = np.where((unit >= 0) & (entries.retransmitted[rows] == 0), own, NEVER)
    whole, way = own.astype(np.float64), np.repeat(np.arange(len(told)), [len(work.rows) for work in told])
    for number in range(len(told) if len(told) > 1 else 0):
        mean = _means(own[way == number], unit[way == number])
        more = np.array([mean.get(each, np.nan) for each in unit.tolist()])
        whole += np.where(way != number, more, 0)
    known = (own != NEVER) & np.isfinite(whole)
    share = np.where(known, own / np.where(known & (whole > 0), whole, 1), 1)
    both: Ints = np.where(known, whole, NEVER).astype(np.int64)
    return _Acts(rows, both[None], unit, unit, np.zeros(len(rows), np.int64), share, blocked)


def _means(values: Ints, of: Ints) -> dict[int, float]:
    """The mean of what is told of each class."""
    known = (values != NEVER) & (of >= 0)
    keys, at = np.unique(of[known], return_inverse=True)
    means = np.bincount(at.reshape(-1), values[known]) / np.maximum(np.bincount(at.reshape(-1)), 1)
    return dict(zip(keys.tolist(), means.tolist(), strict=True))


def _usual(values: Ints, of: Ints) -> dict[int, float]:
    """The median of what is told of each class."""
    known = values != NEVER
    return {int(of[known][at[0]]): float(median_of(values[known][at])) for at in classes(of[known])}


def _beside(acts: _Acts, others: Sequence[_Acts]) -> _Beside:
    """What a stage worked for each act that tells, beside what its peers do for the like, in the median, or
    usually do at that place, if that is more: whose inputs come late has done some of the work before. By
    the reckoning that is kindest to it."""
    known = (acts.own_ns[0] != NEVER) & (acts.like >= 0)
    like, at = np.unique(acts.like[known], return_inverse=True)
    peers = [
        float(median_of(told)) for each in others if len(told := each.own_ns[0][each.own_ns[0] != NEVER])
    ]
    otherwise = float(median_of(peers)) if peers else np.nan
    beyond = []
    for own, *by in zip(acts.own_ns, *(each.own_ns for each in others), strict=True):
        means = [_means(values, each.like) for values, each in zip(by, others, strict=True)]
        told = [[mean[key] for mean in means if key in mean] or [otherwise] for key in like.tolist()]
        usual = np.array([float(median_of(each)) for each in told])[at.reshape(-1)]
        rule = [_usual(values, each.place) for values, each in zip(by, others, strict=True)]
        for place in distinct(acts.place[known]).tolist() if len(usual) else ():
            here = acts.place[known] == place
            if any(place in each for each in rule):
                least = float(median_of([each[place] for each in rule if place in each]))
                usual[here] = np.maximum(usual[here], least)
        beyond.append(own[known] - usual)
    blocked = [
        float(np.median(each.blocked_ns[told])) for each in others if (told := each.own_ns[0] != NEVER).any()
    ]
    kept = float(np.median(blocked)) if blocked else 0.0
    return _Beside(known, acts.own_ns[0][known].astype(np.float64), np.min(beyond, axis=0), peers, kept)


def _late(acts: _Acts, told: _Beside, sigma: float, alone: bool | None) -> Compared:
    """By how much the stage worked longer for each act.

    Where stages may differ by design only a stage that as a rule takes longer than that explains is late, or
    what is longer than it works as a rule, both by itself and beside its peers: of a single peer nobody knows
    how far apart they may be (``alone``; None: beside replicas). What its peers may have waited accuses
    nobody, and hides as much.
    """
    own, beyond, noise, design = told.own_ns, told.beyond_ns, SIGMAS * sigma, 0.0
    amount = np.where(beyond > noise, beyond, 0)
    if alone is not None and len(own) and told.peers:
        unequal = UNEQUAL * float(median_of(own - beyond))
        design = np.inf if alone else max(SIGMAS * float(np.ptp(told.peers)), unequal)
        past = np.minimum(own - median_of(own), beyond - median_of(beyond))
        again = np.where(past > max(noise, SIGMAS * scatter_of_steps(beyond), unequal), past, 0)
        amount = amount if median_of(beyond) > design else again
    count, share = len(acts.rows), acts.share[told.known]
    excess, amounts = np.full(count, NEVER), np.zeros(count, np.int64)
    if told.peers:
        excess[told.known], amounts[told.known] = share * beyond, share * amount
    design_ns = (design + told.blocked_ns) * acts.share
    return Compared(acts.rows, excess, amounts, sigma * acts.share, design_ns, np.full(count, -1))


def _describe(stage: Stage, acts: _Acts, part: Compared) -> None:
    """Add by how much the stage worked longer, step by step."""
    known = part.excess_ns != NEVER
    if known.any():
        unit = np.unique(acts.unit[known], return_inverse=True)[1].reshape(-1)
        stage.excess_ns += round(float(median_of(np.bincount(unit, part.excess_ns[known]))))
        incidents = np.bincount(unit, part.amount_ns[known]).astype(np.int64)
        count = max(len(incidents), len(stage.incidents_ns))
        stage.incidents_ns = sum(
            (np.pad(each, (0, count - len(each))) for each in (stage.incidents_ns, incidents)),
            np.zeros(count, np.int64),
        )


def typical_ns(work: Work | None) -> int | None:
    """What a stage works for one message, in the median; None where nothing tells."""
    told = work.own_ns[work.own_ns != NEVER] if work is not None else np.zeros(0, np.int64)
    return int(median_of(told)) if len(told) else None


def idle_shares(pipeline: Pipeline, entries: Entries) -> list[float | None]:
    """The bubble: per stage the share of a step in which it works for no message, in the median.

    None for the ends, some of whose work no packet shows, and where the steps are not told.
    """
    works = [work for row in pipeline.work for work in row if work is not None]
    units = distinct(np.concatenate([np.zeros(0, np.int64), *(work.unit[work.unit >= 0] for work in works)]))
    begins = np.full(len(units), FAR)
    for work in works:
        inside = work.unit >= 0
        np.minimum.at(begins, np.searchsorted(units, work.unit[inside]), entries.enter_ns[work.rows[inside]])
    length = np.diff(begins).astype(np.float64)
    shares: list[float | None] = []
    for row in pipeline.work:
        if None in row or not len(length) or pipeline.microbatches is None:
            shares.append(None)
            continue
        busy = np.zeros(len(units))
        for work in (work for work in row if work is not None):
            known = (work.own_ns != NEVER) & (work.unit >= 0)
            busy += np.bincount(np.searchsorted(units, work.unit[known]), work.own_ns[known], len(units))
        idle = float(median_of(1 - busy[:-1] / np.maximum(length, 1)))
        shares.append(round(min(max(idle, 0.0), 1.0), 6))
    return shares
