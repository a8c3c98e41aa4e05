"""What groups, steps and phases are for, as far as their structure shows it: tp, dp, pp, ep; decode, prefill.

Parallel training nests groups over the same endpoints (Shoeybi et al., "Megatron-LM", 2019): tensor
parallel ranks reduce several times a layer, data parallel ones once a step; expert parallel ranks
dispatch and combine tokens by all_to_all; pipeline stages hand on to a neighbour. Where two
arrangements look alike the kind is None.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.results import Phase
from dpuflow.schema.rows import Op
from dpuflow.verdicts.stages import replicas_of
from dpuflow.verdicts.steps import REPEATS, jobs, own_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts.pipelines import Pipeline
    from dpuflow.verdicts.steps import Steps

    Kind = Literal["tp", "dp", "pp", "ep"]

OFTEN = 2
"""How many times as often as data parallel groups tensor parallel ones reduce: per layer, not per step."""
FEWEST_REDUCTIONS = 8
"""All_reduces that a token takes at the least: two a layer, and no model in use has fewer than four."""

FEWEST_GROWN = 4
"""Times that a batch grew by a request, each behind a prompt: no accident any more."""
MOST_SIZES = 512
"""Sizes that are tried for the largest batch, from the largest on."""


def group_kinds(
    groups: Sequence[Sequence[int]],
    group_of: Ints,
    instances: Sequence[Instance],
    steps: Sequence[Steps],
    pipelines: Sequence[Pipeline],
    decoding: Sequence[Steps],
) -> list[Kind | None]:
    """For each group its kind. ``groups`` lists the endpoints, ``decoding`` the steps that are tokens."""
    use: list[Counter[Op]] = [Counter() for _ in groups]
    for number, instance in zip(group_of.tolist(), instances, strict=True):
        use[number][instance.op] += 1
    links = {frozenset(pair) for pipeline in pipelines for pair in pairwise(pipeline.stages)}
    kinds: dict[int, Kind] = {
        number: "pp"
        for number, members in enumerate(groups)
        if set(use[number]) == {Op.SEND_RECV} and frozenset(members) in links
    }
    for job in map(set, jobs(instances)):
        mine = [n for n, members in enumerate(groups) if n not in kinds and members[0] in job]
        kinds.update(_nested(groups, use, mine))
    replicas = replicas_of(pipelines, instances)
    for number, members in enumerate(groups):
        if sorted(members) in replicas and _reduces_once(number, members[0], group_of, instances):
            kinds.setdefault(number, "dp")
    tokens = [each.endpoints for each in decoding]
    # What else goes on: a benchmark of all_to_all has none.
    rest = sum(sum(u.values()) - u[Op.ALL_TO_ALL] - u[Op.BARRIER] for u in use)
    for number, members in enumerate(groups):
        exchanged = use[number][Op.ALL_TO_ALL] if rest >= REPEATS else 0
        if number not in kinds and any(_of_experts(exchanged, members, each) for each in steps):
            kinds[number] = "ep"
        elif number not in kinds and sorted(members) in tokens:
            kinds[number] = "tp"
    return [kinds.get(number) for number in range(len(groups))]


def _of_experts(exchanged: int, members: Sequence[int], steps: Steps) -> bool:
    """Whether a group dispatches and combines in each step: it ``exchanged`` so many times."""
    twice = exchanged >= REPEATS and exchanged >= 2 * (len(steps.ends) - 1)
    return twice and steps.period > 1 and set(members) <= set(steps.endpoints)


def _nested(
    groups: Sequence[Sequence[int]], use: Sequence[Counter[Op]], mine: Sequence[int]
) -> dict[int, Kind]:
    """Two ways to divide the same endpoints, each group of one meeting each of the other in at most one."""
    reducing = {n: use[n][Op.ALL_REDUCE] + use[n][Op.REDUCE_SCATTER] for n in mine}
    busy = [n for n in mine if reducing[n] >= REPEATS]
    families: list[list[int]] = []
    ends: list[set[int]] = []  # of each family
    for number in busy:
        for family, taken in zip(families, ends, strict=True):
            if len(groups[number]) == len(groups[family[0]]) and taken.isdisjoint(groups[number]):
                family.append(number)
                taken.update(groups[number])
                break
        else:
            families.append([number])
            ends.append(set(groups[number]))
    found: dict[int, Kind] = {}
    for one, other in permutations(families, 2):
        often = median_of([reducing[n] for n in one]) >= OFTEN * median_of([reducing[n] for n in other])
        if len(one) > 1 and often and _crossing([groups[n] for n in one], [groups[n] for n in other]):
            found.update(dict.fromkeys(one, "tp"))
            found.update(dict.fromkeys(other, "dp"))
    return found


def _crossing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> bool:
    """Whether both divide the same endpoints, each group of one meeting each of the other in one at most."""
    same = set().union(*one) == set().union(*other)
    return same and all(len(set(a) & set(b)) <= 1 for a in one for b in other)


def _reduces_once(number: int, member: int, group_of: Ints, instances: Sequence[Instance]) -> bool:
    """Whether a group reduces once all microbatches of a step have gone by at its ``member``.

    Tensor parallel ranks of a stage reduce between its transfers, too; replicas in one go a step.
    """
    reduces = [
        group == number
        for group, instance in zip(group_of.tolist(), instances, strict=True)
        if group == number or (instance.op == Op.SEND_RECV and member in instance.order)
    ]
    runs = sum(now and not before for before, now in pairwise([False, *reduces]))
    return bool(runs >= REPEATS and 2 * runs <= len(reduces) - sum(reduces))


class Tokens(NamedTuple):
    """Steps that generate tokens: which of the steps, and those that read a prompt."""

    steps: Steps
    decode: Ints  # numbers of steps
    prefill: Ints


def find_tokens(
    steps: Steps,
    step: Ints,
    instances: Sequence[Instance],
    entries: Entries,
    fed: Sequence[int] = (),
) -> Tokens | None:
    """Steps that are tokens: all of their collectives all_reduces of one group and size, an even number.

    A step whose all_reduces are at least twice as large as those of any other, but for the next larger batch,
    reads a prompt: as many tokens at once.
    Steps that pause half of their time or more before they begin are no tokens (a training step with
    equal buckets looks alike, and works forward first); nor are those that begin when a cache has come, with
    a collective of ``fed``: these are requests, and nothing parts the tokens of one.
    """
    if not steps.by_pause or steps.period % 2 or steps.period < FEWEST_REDUCTIONS:
        return None
    rows = own_rows(entries, steps.reference)
    rows = rows[step[rows] >= 0]
    which = entries.collective[rows]
    first = instances[int(which[0])]
    if any(instances[n].op != Op.ALL_REDUCE or instances[n].order != first.order for n in which.tolist()):
        return None
    sizes = np.array([instances[n].size or 0 for n in which.tolist()], np.int64).reshape(-1, steps.period)
    if (sizes != sizes[:, :1]).any():
        return None
    leave, enter = entries.leave_ns[rows], entries.enter_ns[rows]
    starts = np.arange(steps.period, len(rows), steps.period)
    paused = (enter[starts] - leave[starts - 1]) / np.maximum(leave[starts] - leave[starts - steps.period], 1)
    if median_of(paused) >= 0.5:
        return None
    if np.mean(np.isin(which[:: steps.period], fed)) >= 0.5:
        return None
    long = sizes[:, 0] > _largest_batch(sizes[:, 0])
    return Tokens(steps, np.flatnonzero(~long), np.flatnonzero(long))


def _largest_batch(sizes: Ints) -> int:
    """Of sizes of steps, in order of time, the largest that tokens have: batches grow by a request at a time,
    and a prompt is many tokens at once. What most steps have is a batch.

    Where prompts are read by the same ranks a batch grows by no more requests than were read since its last
    step. Else a prompt is twice as large as any batch at the least.
    """
    each = distinct(sizes)
    one = int(np.gcd.reduce(each))
    for largest in each[-2 : -2 - MOST_SIZES : -1].tolist():
        batch = np.flatnonzero(sizes <= largest)
        if 2 * len(batch) <= len(sizes):
            break
        grown, read = np.diff(sizes[batch]) // one, np.diff(batch) - 1
        if (grown <= read).all() and (grown > 0).sum() >= FEWEST_GROWN:
            return int(largest)
    prompts = (each[1:] >= 2 * each[:-1]) & (np.diff(each) > one) & (each[1:] > median_of(sizes))
    return int(each[np.flatnonzero(prompts)[0]] if prompts.any() else each[-1])


_IN_TWO: Final = ("ring", "segmented_ring", "rabenseifner")


def ring_phases(exchanges: Rows, instances: Sequence[Instance]) -> list[list[Phase]]:
    """Each collective's phases: of all_reduces along a ring the halves of every connection's bytes.

    Empty where the algorithm has no such phases or the collective was seen only in part.
    """
    from dpuflow.kernels.phases import FAR, halves

    asked = [
        i.op == Op.ALL_REDUCE and i.algorithm is not None and i.complete and i.algorithm.name in _IN_TWO
        for i in instances
    ]
    if not any(asked):
        return [[] for _ in instances]
    rows = np.concatenate([i.rows for i in instances])
    offsets = np.cumsum([0, *(len(i.rows) for i in instances)])
    whole, done = np.zeros((2, 2 * int(exchanges["connection"].max()) + 2), np.int64)
    out = np.empty((len(instances), 4), np.int64)
    halves(exchanges, rows, offsets, np.array(asked, np.uint8), whole, done, out)
    found = []
    for scatter, scattered, gather, gathered in out.tolist():
        halves_seen = (("reduce_scatter", scatter, scattered), ("all_gather", gather, gathered))
        found.append([Phase(name, start, end) for name, start, end in halves_seen if start != FAR])
    return found
