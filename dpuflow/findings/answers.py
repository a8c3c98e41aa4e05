"""Requests in, findings about how answers leave out: backlog, jitter, batches that drain, ports that are"
" full."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.findings.case import SMALL_SHARE, Cost, NotJudgedError, make_finding
from dpuflow.findings.clients import FEWEST, SURELY
from dpuflow.quantities import duration, listed, name_of, percent
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.requests import Requests
    from dpuflow.results import Finding

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

BY_CHANCE: Final = 1e-3
"""Tokens that follow steps are told from others by Rayleigh's test, at this level."""
ALIKE: Final = 0.1
"""Paces that differ by no more are one."""
MOST: Final = 0.5
"""Of the acknowledgments of a queue: a link's own pace, but for what segments of two answers share."""
QUICK: Final = 5
"""Per cent of tokens that nothing delayed, at the least: what they take is the way out."""
FEWEST_OF_A_STEP: Final = 2
"""Operations: a layer has two."""
APART: Final = 4
"""A prefill's operations are so many times as large as those of any batch that decodes."""


class Answer(NamedTuple):
    """One answer whose tokens follow decode steps: how long after its step each left, the steps' lengths, and
    the gaps between its tokens, ns."""

    server: int
    lag_ns: Floats
    step_ns: Floats
    gap_ns: Floats


def answers_of(case: Case) -> list[Answer]:
    """Answers with enough tokens, one a step, of which none was lost on its way: that delays those behind it,
    too. Raises NotJudgedError where tokens do not follow steps."""
    ends = _decode_ends(case)
    requests = case.requests
    usual = float(median_of(np.diff(ends))) if len(ends) > FEWEST else 0.0
    gap = float(np.nanmedian(requests.gap_ns)) if np.isfinite(requests.gap_ns).any() else 0.0
    if not usual or not _tied(case, ends, usual):
        raise NotJudgedError("the tokens on the wire do not follow the decode steps that were captured")
    if gap < usual / 2:
        raise NotJudgedError("more tokens leave than decode steps end: they are not one a step")
    found = []
    sound = requests.whole & (requests.again_down == 0)
    for number in np.flatnonzero(sound & (requests.tokens > FEWEST + 1)).tolist():
        # The first one comes from the prefill.
        times = requests.token_ns[requests.offsets[number] + 1 : requests.offsets[number + 1]]
        first = steps_of(times, ends, usual)
        own = ends[first : first + len(times)]
        if first < 0 or len(own) < len(times):
            continue
        lag, step = (times - own).astype(float), np.diff(own).astype(float)
        found.append(Answer(int(requests.server[number]), lag, step, np.diff(times)))
    if len(found) < FEWEST:
        raise NotJudgedError("too few answers came without losses within the decode steps that were captured")
    return found


def steps_of(times: Ints, ends: Ints, usual: float) -> int:
    """Which of the steps that end at ``ends`` brings the first of an answer's tokens; -1 for none.

    The last one with which no token leaves before its own step ends: half a ``usual`` step before that, as
    other ranks end it a little later.
    """
    first = int(np.searchsorted(ends, times[0], side="right")) - 1
    while first >= 0:
        own = ends[first : first + len(times)]
        if (times[: len(own)] >= own - usual / 2).all():
            break
        first -= 1
    return first


def _decode_ends(case: Case) -> Ints:
    """When the decode steps of the largest group ended.

    With continuous batching no two steps need have the same sizes; but all operations of one step have. So
    runs of one size are as long as a step, or several; sizes far above the others' are prefills'.
    """
    inferred = case.inferred
    alone = [n for n, each in enumerate(case.instances) if each.size and each.op == Op.ALL_REDUCE]
    if not alone:
        return np.zeros(0, np.int64)
    group = inferred.group_of[alone]
    alone = np.array(alone)[group == np.bincount(group).argmax()]
    sizes = np.array([case.instances[n].size for n in alone.tolist()])
    ends = np.maximum.reduceat(inferred.entries.leave_ns, inferred.entries.offsets[:-1])[alone]
    order = np.argsort(ends, kind="stable")
    sizes, ends = sizes[order], ends[order]
    starts = np.flatnonzero(np.r_[True, sizes[1:] != sizes[:-1]])
    runs = np.diff(np.r_[starts, len(sizes)])
    period = int(np.gcd.reduce(runs[1:-1])) if len(runs) > 2 + FEWEST else 0
    if period < FEWEST_OF_A_STEP:
        return np.zeros(0, np.int64)
    place = np.arange(len(sizes)) - np.repeat(starts, runs)
    # The first run may have begun before the capture: it is whole at its end.
    place += np.where(np.arange(len(sizes)) < runs[0], -runs[0] % period, 0)
    last = place % period == period - 1
    return np.asarray(ends[last & (sizes <= _largest_decode(distinct(sizes)))], np.int64)


def _largest_decode(sizes: Ints) -> int:
    """The size below the widest step between sizes, where that is wide; else the largest."""
    wider = sizes[1:] / sizes[:-1]
    at = int(wider.argmax()) if len(wider) else 0
    return int(sizes[at] if len(wider) and wider[at] >= APART else sizes[-1])


def _tied(case: Case, ends: Ints, usual: float) -> bool:
    """Whether tokens come at the same time after a step, where few answers are under way at once."""
    requests = case.requests
    times = np.sort(requests.token_ns)
    first, last = np.sort(requests.first_ns), np.sort(requests.last_ns)
    opened = np.searchsorted(first, times, side="right") - np.searchsorted(last, times, side="right")
    times = times[opened <= np.percentile(opened, 25)] if len(times) else times
    place = np.searchsorted(ends, times, side="right") - 1
    kept = (place >= 0) & (place < len(ends) - 1)
    phase = 2j * np.pi * (times[kept] - ends[place[kept]]) / usual
    if len(phase) < 4 * FEWEST:
        return False
    return bool(abs(np.exp(phase).sum()) ** 2 / len(phase) > -np.log(BY_CHANCE))


def find_slow_answers(case: Case) -> Iterator[Finding]:
    """One finding a front end whose tokens fall behind the steps, or come unevenly."""
    every = answers_of(case)
    for server in sorted({each.server for each in every}):
        mine = [each for each in every if each.server == server]
        lasted = max(sum(float(each.gap_ns.sum()) for each in mine), 1.0)
        name = name_of(case.result.endpoints[server])
        times = (int(case.requests.first_ns.min()), int(case.requests.last_ns.max()))
        uneven = sum(float(np.maximum(np.diff(each.lag_ns), 0).sum()) for each in mine) / 2
        share = min(uneven / lasted, 1.0)
        if share < SMALL_SHARE:
            continue
        lags = np.concatenate([each.lag_ns for each in mine])
        behind = [np.maximum(each.lag_ns - np.percentile(lags, QUICK), 0) for each in mine]
        if _lasting(mine):
            longest = max(float(each.max()) for each in behind)
            cost = _delayed(case, server, float(np.mean([each[-1] for each in behind])))
            yield make_finding(
                "egress_backlog",
                [server],
                times,
                cost,
                0.85,
                f"Answers of {name} fall behind the decode steps that produce them, for many tokens in a row:"
                f" by up to {duration(round(longest))} ({percent(cost.share)} of their time).",
            )
            continue
        # One that waited for something else shifts none.
        cost = _delayed(case, server, float(median_of([each.mean() for each in behind])))
        spread = np.concatenate([np.abs(each.lag_ns - median_of(each.lag_ns)) for each in mine])
        tail = float(np.percentile(spread, 90))
        yield make_finding(
            "egress_jitter",
            [server],
            times,
            cost,
            0.8,
            f"Tokens of {name} leave at uneven delays after their decode steps: 10 % are off by more than"
            f" {duration(round(tail))}, and the gaps between tokens vary by {percent(share)}.",
        )


def _delayed(case: Case, server: int, delay_ns: float) -> Cost:
    """What it takes that each answer of a front end is done so much later."""
    requests = case.requests
    lost = delay_ns * int((requests.whole & (requests.server == server)).sum())
    return Cost(round(lost), min(lost / max(requests.open_ns, 1), 1.0))


def _lasting(answers: list[Answer]) -> bool:
    """Whether tokens behind one that is late are late, too, beyond chance: a queue, and no jitter."""
    mine = [each.lag_ns - each.lag_ns.mean() for each in answers]
    both = sum(float((each[1:] * each[:-1]).sum()) for each in mine)
    count = sum(len(each) for each in mine)
    return both > SURELY / float(np.sqrt(count)) * sum(float((each * each).sum()) for each in mine)


def find_drained_batches(case: Case) -> Iterator[Finding]:
    """One finding for each front end that fills a batch again only when all of its answers are done."""
    requests = case.requests
    for server in distinct(requests.connections.server).tolist():
        chosen = np.flatnonzero(requests.whole & (requests.server == server))
        chosen = chosen[np.argsort(requests.first_ns[chosen], kind="stable")]
        first, last = requests.first_ns[chosen], requests.last_ns[chosen]
        asked = requests.asked_ns[chosen]
        batches = _batches(first, last)
        if len(batches) <= FEWEST or np.mean([len(each) for each in batches]) < 2:
            continue
        empty, places, together = 0, 0, True
        for each in batches:
            end = int(last[each].max())
            together &= int(first[each].max()) < int(last[each].min())
            waits = asked[(asked < end) & (first >= end)]
            # The step that is under way when a prompt comes has its batch already.
            step = median_of(np.nan_to_num(requests.gap_p99_ns[chosen[each]]))
            since = int(waits.min() + step) if len(waits) else end
            empty += int(np.maximum(end - np.maximum(last[each], since), 0).sum())
            places += len(each) * (end - int(first[each].min()))
        share = empty / max(places, 1)
        if together and share >= SMALL_SHARE:
            yield make_finding(
                "early_completion",
                [server],
                (int(first.min()), int(last.max())),
                Cost(empty, share),
                0.85,
                f"{name_of(case.result.endpoints[server])} takes no new prompt until the last answer of a"
                f" batch is done, in {len(batches)} batches whose answers end at different times:"
                f" {percent(share)} of the batch slots stood empty while prompts waited.",
            )


def _batches(first: Ints, last: Ints) -> list[Ints]:
    """Answers that overlap, in order of their first token: rows."""
    if not len(first):
        return []
    fresh = np.r_[True, first[1:] >= np.maximum.accumulate(last)[:-1]]
    return np.split(np.arange(len(first)), np.flatnonzero(fresh)[1:])


def find_saturation(case: Case) -> Iterator[Finding]:
    """One finding for each front end whose answers queue for a link to its clients that carries no more.

    What queues for a link of one rate comes out at that rate, whatever its size: so acknowledgments of what
    left before the one ahead of it can have arrived follow each other at one pace, and at no other cause's.
    All clients together may share the link, or each may have its own.
    """
    requests = case.requests
    of = np.repeat(np.arange(len(requests)), requests.tokens)
    sound = (requests.late_ns != NEVER) & (requests.again_down == 0)[of]
    server, client = requests.server[of], requests.client[of]
    for front in distinct(requests.connections.server).tolist():
        mine = np.flatnonzero(sound & (server == front))
        queues = {end: _queue(requests, mine[client[mine] == end]) for end in distinct(client[mine]).tolist()}
        full = {end: queue for end, queue in queues.items() if queue is not None}
        shared = _queue(requests, mine) if len(queues) > 1 else None
        if shared is not None:
            full = dict.fromkeys(queues, shared)
        if not full:
            continue
        beyond = np.zeros(len(sound), np.int64)
        for end, queue in full.items():
            own = mine[client[mine] == end]
            beyond[own] = np.maximum(requests.late_ns[own] - queue.least_ns, 0)
        # An answer is done as much later as its last token.
        last = requests.offsets[1:][requests.tokens > 0] - 1
        lost = int(beyond[last].sum())
        share = lost / max(requests.open_ns, 1)
        held = beyond > 0
        if share < SMALL_SHARE:
            continue
        names = [name_of(case.result.endpoints[end]) for end in full]
        rates = [8 / queue.pace_ns for queue in full.values()]
        yield make_finding(
            "saturation",
            [front, *full],
            (int(requests.token_ns[held].min()), int((requests.token_ns + requests.late_ns)[held].max())),
            Cost(lost, min(share, 1.0)),
            0.85,
            f"Answers of {name_of(case.result.endpoints[front])} to {listed(names, 4)} queue for a link that"
            f" carries {float(median_of(rates)):.3g} Gbit/s and no more: tokens are acknowledged up to"
            f" {duration(int(beyond.max()))} later than when nothing is ahead of them.",
        )


class _Queue(NamedTuple):
    """A link at its ceiling: ns a byte, and what an acknowledgment takes with nothing ahead."""

    pace_ns: float
    least_ns: int


def _queue(requests: Requests, tokens: Ints) -> _Queue | None:
    """Whether these tokens queue for one link: None where they do not."""
    if len(tokens) < 2 * FEWEST:
        return None
    late = requests.late_ns[tokens]
    acked = requests.token_ns[tokens] + late
    order = np.argsort(acked, kind="stable")
    acked, late, size = acked[order], late[order], requests.token_bytes[tokens][order]
    least = int(np.percentile(late, QUICK))
    # What one acknowledgment covers came as one.
    begin = np.flatnonzero(np.r_[True, np.diff(acked) > 0])
    size, left, acked = np.add.reduceat(size, begin), (acked - late)[begin], acked[begin]
    queued = left[1:] + least < acked[:-1]
    pace, sent = ((np.diff(times) / np.maximum(size[1:], 1))[queued] for times in (acked, left))
    if len(pace) < 4 * FEWEST:
        return None
    usual = float(median_of(pace))
    # Where tokens leave at that pace, too, none waits for another one: all take longer.
    came, went = (float((np.abs(each - usual) <= ALIKE * usual).mean()) for each in (pace, sent))
    if not came > MOST > went:
        return None
    # What a link of that pace would have taken: acknowledgments that were lost come later than that.
    order = np.argsort(left, kind="stable")
    ready, behind = left[order] + least, usual * np.cumsum(size[order])
    queue = behind + np.maximum.accumulate(ready - behind) - ready
    return _Queue(usual, least) if queue.sum() > MOST * (acked[order] - ready).sum() else None
