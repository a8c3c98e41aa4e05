"""Cuts of what nothing announces: none parts what a rank still waited for, and what is complete is found."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from lane_views import view

from dpuflow.matching.boundaries import Times, chained_cuts, counted_cuts, cuts_of
from dpuflow.matching.buffers import STEP_SLOT
from dpuflow.matching.credited import Pipe
from dpuflow.matching.lanes import Lane
from dpuflow.matching.layouts import trees

NONE = np.zeros(0, np.int64)


def world(seed: int) -> tuple[list[Pipe], list[Times]]:
    """Messages of a few ranks at random times, in order on each pipe."""
    random = Random(seed)
    ranks = random.randrange(2, 5)
    ends = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and random.random() < 0.7]
    pipes, times = [], []
    for src, dst in ends or [(0, 1)]:
        count = random.randrange(1, 4 if ranks > 3 else 6)
        starts = np.sort(np.array(random.sample(range(400), count), np.int64)) * 8 + len(pipes)
        arrivals = np.maximum.accumulate(starts + np.array([random.randrange(1, 900) for _ in range(count)]))
        pipes.append(Pipe(src, dst, np.arange(count), 1, NONE.astype(bool), NONE))
        times.append(Times(starts, arrivals, starts))
    return pipes, times


def sound(at: tuple[int, ...], pipes: list[Pipe], times: list[Times]) -> bool:
    """Whether every rank sent what lies behind after all it sent and got before."""
    for rank in {end for pipe in pipes for end in pipe[:2]}:
        before = [t.starts[:k] for p, t, k in zip(pipes, times, at, strict=True) if p.src == rank]
        before += [t.arrivals[:k] for p, t, k in zip(pipes, times, at, strict=True) if p.dst == rank]
        behind = [t.starts[k:] for p, t, k in zip(pipes, times, at, strict=True) if p.src == rank]
        had, goes = np.concatenate(before), np.concatenate([*behind, NONE])
        if len(had) and len(goes) and goes.min() < had.max():
            return False
    return True


@pytest.mark.parametrize("seed", range(60))
def test_cuts_are_the_most_that_was_complete_by_a_time(seed: int) -> None:
    pipes, times = world(seed)
    found = {tuple(row) for row in cuts_of(pipes, times).at.tolist()}
    every = [()]
    for each in times:
        every = [(*cut, k) for cut in every for k in range(len(each.starts) + 1)]
        if len(every) > 60_000:
            pytest.skip("too many to try all")
    allowed = [cut for cut in every if sound(cut, pipes, times)]
    wanted = set()
    for when in {int(t) for each in times for t in each.starts} | {-1}:
        most = [np.searchsorted(each.starts, when, "right") for each in times]
        inside = [cut for cut in allowed if all(k <= m for k, m in zip(cut, most, strict=True))]
        wanted.add(max(inside, key=sum))
    assert found == wanted


def test_counted_cuts_leave_out_what_the_end_cut_off() -> None:
    pipes = [
        Pipe(0, 1, np.arange(40), 1, NONE.astype(bool), NONE),
        Pipe(1, 0, np.arange(21), 1, NONE.astype(bool), NONE),
    ]
    times = [
        Times(np.arange(40) * 10, np.arange(40) * 10 + 1, np.arange(40) * 10),
        Times(np.arange(21) * 20, np.arange(21) * 20 + 1, np.arange(21) * 20),
    ]
    at = counted_cuts(pipes, times, [np.zeros(len(each.starts), np.int64) for each in times]).at
    assert at[0].tolist() == [0, 0]
    assert at[-1].tolist() == [40, 21]


def test_operations_without_a_pause_between_them_are_cut_by_the_sizes_of_one_that_stands_apart() -> None:
    pipes = [Pipe(a, 1 - a, np.arange(9), 1, NONE.astype(bool), NONE) for a in (0, 1)]
    times = [Times(at + k, at + k + 5, at + k) for at in [np.arange(9) * 10] for k in (0, 1)]
    own, other = [64, 128, 64], [64, 64, 128]
    begins, ends = np.array([[6, 6]]), np.array([[9, 9]])

    def cut(*sizes: list[int]) -> list[list[int]]:
        return chained_cuts(pipes, times, [np.array(each) for each in sizes], begins, ends).at.tolist()

    assert cut([*own, *own, *own], [*own, *own, *own]) == [[0, 0], [3, 3], [6, 6], [9, 9]]
    # Something else between two of them has the cuts of its neighbours.
    assert cut([*own, *other, *own], [*own, *own, *own]) == [[0, 0], [3, 3], [6, 6], [9, 9]]
    # What has other sizes on one pipe is not the same operation, so that nothing parts these two.
    assert cut([*other, *other, *own], [*own, *own, *own]) == [[0, 0], [6, 6], [9, 9]]


def test_channels_of_both_trees_are_told_apart_in_a_single_operation() -> None:
    """Two ranks next to each other in both trees: what goes up in one comes down in the other."""

    def lane(src: int, dst: int, start: int) -> Lane:
        times = np.array([[start]])
        return Lane(src, dst, STEP_SLOT, np.array([4096]), times, times + 5, np.zeros((1, 1), np.uint32))

    # The first tree's answer (at 20) may be taken for what the second tree's message (at 26) waited for.
    forth = [lane(0, 1, 0), lane(0, 1, 40), lane(0, 1, 1), lane(0, 1, 26)]
    back = [lane(1, 0, 20), lane(1, 0, 2), lane(1, 0, 33), lane(1, 0, 3)]
    found = trees(view([*forth, *back]))
    assert found is not None
    assert found.tails == 4
