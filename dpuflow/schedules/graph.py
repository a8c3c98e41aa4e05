"""What an algorithm asks of a number of ranks: its messages, their sizes, and which need no input.

In: an ``Algorithm``, the ranks and a root. Out: its schedule for a buffer of one byte, so that sizes are to
be multiplied, and what follows from it, kept between calls as collectives repeat (``kept`` bounds the bytes).
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING

from dpuflow.schedules.kept import kept

if TYPE_CHECKING:
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schedules.sending import Send


@kept(lambda sends: 112 * len(sends))
def schedule(algorithm: Algorithm, n: int, root: int = 0) -> tuple[Send, ...]:
    """The schedule for a buffer of one byte, in order of steps: sizes are to be multiplied."""
    return tuple(sorted(algorithm.sends(n, 1.0, root), key=itemgetter(0)))


@kept(lambda edges: sum(250 + 32 * len(sizes) for sizes in edges.values()))
def edge_sizes(algorithm: Algorithm, n: int, root: int = 0) -> dict[tuple[int, int], tuple[float, ...]]:
    """For each (src, dst) the sizes of its messages in order, for a buffer of one byte."""
    edges: dict[tuple[int, int], list[float]] = {}
    for send in schedule(algorithm, n, root):
        edges.setdefault((send.src, send.dst), []).append(send.size)
    return {edge: tuple(sizes) for edge, sizes in edges.items()}


Place = tuple[tuple[int, int], int]
"""A message of a schedule: its (src, dst) and how many that edge has sent before it."""


@kept(lambda pairs: 300 * len(pairs))
def dependencies(
    algorithm: Algorithm, n: int, root: int = 0, of: frozenset[int] | None = None
) -> tuple[tuple[Place, Place], ...]:
    """Pairs (send, input): the send needs the input, the latest one that its rank gets in earlier steps.

    Only sends of the ranks ``of``, None for all.
    """
    seen: dict[tuple[int, int], int] = {}
    inputs: dict[int, list[tuple[int, Place]]] = {}
    sends: list[tuple[Send, Place]] = []
    for send in schedule(algorithm, n, root):
        edge = (send.src, send.dst)
        place = (edge, seen.get(edge, 0))
        seen[edge] = place[1] + 1
        if of is None or send.src in of:
            sends.append((send, place))
        if of is None or send.dst in of:
            inputs.setdefault(send.dst, []).append((send.step, place))
    pairs: list[tuple[Place, Place]] = []
    for send, place in sends:
        before = inputs.get(send.src, [])
        end = bisect_left(before, send.step, key=itemgetter(0))  # a schedule is in order of steps
        if end:
            begin = bisect_left(before, before[end - 1][0], key=itemgetter(0))
            pairs.extend((place, what) for _, what in before[begin:end])
    return tuple(pairs)


@kept(lambda ranks: 32 * len(ranks))
def free_ranks(algorithm: Algorithm, n: int, root: int = 0) -> frozenset[int]:
    """Ranks whose first message needs no input: nothing is sent to them in an earlier step."""
    if algorithm.starters is not None:
        return algorithm.starters(n, root)
    first_send: dict[int, int] = {}
    first_input: dict[int, int] = {}
    for send in schedule(algorithm, n, root):
        first_send.setdefault(send.src, send.step)
        first_input.setdefault(send.dst, send.step)
    return frozenset(r for r, step in first_send.items() if step <= first_input.get(r, step))


@kept(lambda acts: 400 * (len(acts[0]) + len(acts[1])))
def first_acts(algorithm: Algorithm, n: int, root: int) -> tuple[dict[int, int], dict[int, frozenset[int]]]:
    """What a rank does first: to whom it sends before all else, and from whom it receives in its first step.

    Ranks that receive before they send are not among the former, those that send before they receive not
    among the latter.
    """
    first: dict[int, int] = {}
    sends: dict[int, int] = {}
    inputs: dict[int, set[int]] = {}
    for send in schedule(algorithm, n, root):
        first.setdefault(send.dst, send.step)
        if first.setdefault(send.src, send.step) == send.step:
            sends.setdefault(send.src, send.dst)
        if first[send.dst] == send.step:
            inputs.setdefault(send.dst, set()).add(send.src)
    return sends, {rank: frozenset(peers) for rank, peers in inputs.items()}


@lru_cache(maxsize=4096)
def free_sends(algorithm: Algorithm, n: int, root: int, rank: int) -> dict[int, int]:
    """Whom a rank sends how many messages that need no input: those of steps before its first input."""
    sends: dict[int, int] = {}
    mine = schedule(algorithm, n, root)
    first = min((s.step for s in mine if s.dst == rank), default=None)
    for send in mine:
        if send.src == rank and (first is None or send.step <= first):
            sends[send.dst] = sends.get(send.dst, 0) + 1
    return sends
