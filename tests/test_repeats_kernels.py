"""Kernels that look for what repeats, against slow twins that follow their definitions word by word."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from dpuflow.kernels import repeats as kernels


@pytest.mark.parametrize("seed", range(40))
def test_chains_go_from_place_to_place_while_these_come_later(seed: int) -> None:
    choice = random.Random(seed)
    count = choice.randrange(1, 40)
    following = np.full(count, -1)
    preceded = np.zeros(count, np.uint8)
    ends = choice.sample(range(count), choice.randrange(count + 1))
    for place, after in zip(choice.sample(range(count), len(ends)), ends, strict=True):
        following[place] = after
        preceded[after] = 1
    places, bounds = np.empty(count, np.int64), np.empty(count + 1, np.int64)
    found = kernels.chains(following, preceded, places, bounds)
    expected = []
    for start in range(count):
        chain = [start]
        while following[chain[-1]] > chain[-1]:
            chain.append(int(following[chain[-1]]))
        if not preceded[start] and len(chain) > 1:
            expected.append(chain)
    assert [places[a:b].tolist() for a, b in pairwise(bounds[: found + 1].tolist())] == expected


def test_chains_stop_where_there_is_no_room() -> None:
    following = np.array([2, 2, 3, 4, -1])  # two begin, one tail
    places, bounds = np.empty(5, np.int64), np.empty(6, np.int64)
    assert kernels.chains(following, np.array([0, 0, 1, 1, 1], np.uint8), places, bounds) == 1
    assert places[: bounds[1]].tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("seed", range(60))
def test_blocks_are_counted_by_their_definition(seed: int) -> None:
    choice = random.Random(seed)
    ranks, bursts = choice.randrange(2, 5), choice.randrange(4, 60)
    src = [choice.randrange(ranks) for _ in range(bursts)]
    dst = [choice.choice([r for r in range(ranks) if r != s]) for s in src]
    sent = sorted(choice.randrange(400) for _ in range(bursts))
    over = [t + choice.randrange(4) for t in sent]
    there = [t + choice.randrange(30) for t in over]
    pause = [choice.randrange(40) for _ in range(bursts)]
    slow = choice.randrange(40)
    room = range(bursts + 1)
    chains = [sorted(choice.sample(room, choice.randrange(2, 5))) for _ in range(choice.randrange(1, 4))]
    marked = [choice.random() < 0.5 for _ in room]

    facts, times = [], [0] * ranks
    for chain in chains:
        known = silent = acts = unasked = 0
        for a, b in pairwise(chain):
            for rank in range(ranks):
                mine = [i for i in range(a, b) if src[i] == rank]
                if not mine:
                    continue
                acts += 1
                first = mine[0]
                if (
                    all(sent[first] <= there[i] for i in range(a, b) if dst[i] == rank)
                    and pause[first] > slow
                ):
                    unasked += 1
                    times[rank] += marked[a]
                events = [over[i] for i in range(chain[0], a) if src[i] == rank]
                events += [there[i] for i in range(chain[0], a) if dst[i] == rank]
                if events and mine[1:]:
                    known += 1
                    silent += sent[first] - max(events) > 2 * max(pause[i] for i in mine[1:])
        facts.append([known, silent, acts, unasked])

    got, counted = np.empty((len(chains), 4), np.int64), np.zeros(ranks, np.int64)
    bounds = np.cumsum([0, *map(len, chains)])
    kernels.blocks(
        np.concatenate(chains), bounds, *map(np.array, (src, dst, sent, over, there, pause)), slow,
        np.array(marked, np.uint8), np.empty((6, ranks), np.int64), np.empty(ranks, np.int64), got, counted,
    )  # fmt: skip
    assert got.tolist() == facts
    assert counted.tolist() == times
