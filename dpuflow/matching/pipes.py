"""Connections of NCCL's net_ib: which carry the same operations, and where one operation may end.

In: EXCHANGE rows of writes that clear-to-send entries paid for. Out: one ``Pipe`` a connection and direction,
and sets of pipes in lockstep: each operation has as many messages on all of them; with the places where
operations begin.

A connection takes up an operation when the one before it is done there. So the entry for an operation's
first message comes after the last message before it has arrived; within an operation entries run ahead by
the slots of the buffer (NCCL 2.30, src/proxy.cc ProxyAppend, src/transport/net.cc recvProxyProgress). A
receiver that is slow may use up its slots and look the same, but not at the same message of every connection
that carries the operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Job
    from dpuflow.schema.tables import Rows

LIKE: Final = 0.5
"""Of the places where operations may begin on one of two pipes in lockstep, the share that the other must
have as well. Chance gives pipes of other counts at most one in two."""

_FAR: Final = np.iinfo(np.int64).max
SIGMAS: Final = 3
"""Standard deviations beyond chance that show two pipes of equally many messages to be in lockstep."""


class Pipe(NamedTuple):
    """One direction of one connection."""

    src: int
    dst: int
    rows: NDArray[np.int64]  # of EXCHANGE, in order
    first: int  # number of its first clear-to-send entry; they are counted from 1
    begins: NDArray[np.bool_]  # an operation may begin with this message
    slots: NDArray[np.int64]  # bytes that each message's entry announced
    arrived: NDArray[np.int64] | None = None  # when each message had; None: not known
    until: int = _FAR  # when the captures of its ends stop

    @property
    def stop(self) -> int:
        """Number of the entry behind the last."""
        return self.first + len(self.rows)


@dataclass
class Lockstep:
    """Pipes that carry the same operations: j has the messages ``bounds[j]:bounds[j + 1]`` of each."""

    pipes: list[Pipe]
    rows: NDArray[np.int64]  # (pipes, messages) of EXCHANGE
    bounds: NDArray[np.int64]
    slots: NDArray[np.int64]  # of each operation: what its entries announced

    def __len__(self) -> int:
        return len(self.bounds) - 1


def connections_of(
    exchanges: Rows, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """``rows`` by connection and direction, each in order; where each begins and ends, by first use."""
    from dpuflow.kernels import streams as kernels

    key = np.empty(len(rows), np.int64)
    keys = kernels.directions(exchanges, rows, key) + 1
    count = np.bincount(key, minlength=keys)
    end = np.cumsum(count)
    dealt, at = np.empty_like(rows), end - count
    if not kernels.deal(exchanges, rows, key, at.copy(), dealt, np.zeros(keys, np.uint32)):
        dealt = rows[np.lexsort((exchanges["order"][rows], key))]
    used = np.flatnonzero(count)
    used = used[np.argsort(dealt[at[used]])]
    return dealt, at[used], end[used]


def pipes_of(
    job: Job,
    connections: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    announced: NDArray[np.int64],
) -> list[Pipe | None]:
    """A pipe for each of ``connections`` (``credited_instances``); None where entries are missing.

    Those missing at the beginning came before the capture did; a pipe begins behind them. ``announced`` as
    in ``Job``.
    """
    exchanges, until, (dealt, at, end) = job.exchanges, job.until, connections
    index, slots = exchanges["sub"][dealt].astype(np.int64), announced[dealt]
    granted, arrived = exchanges["grant_ns"][dealt], exchanges["arrived_end_ns"][dealt]
    known = (granted[1:] != NEVER) & (arrived[:-1] != NEVER)
    waited = (granted[1:] > arrived[:-1]) | ~known
    begins = np.r_[True, waited | (slots[1:] != slots[:-1])]
    unseen = (slots == 0) | (index < 1)
    holes = np.r_[0, np.cumsum(np.r_[True, index[1:] != index[:-1] + 1] | unseen)]
    ends = np.stack([exchanges["src"][dealt[at]], exchanges["dst"][dealt[at]]], axis=1).tolist()
    found: list[Pipe | None] = []
    seen = np.flatnonzero(~unseen)
    begun = np.r_[seen, len(dealt)][np.searchsorted(seen, at)]
    for (src, dst), start, low, high in zip(
        ends, at.tolist(), np.minimum(begun, end).tolist(), end.tolist(), strict=True
    ):
        # Entries for the first messages came before the capture began; there are none missing behind them.
        if low == high or holes[high] > holes[low + 1]:
            found.append(None)
            continue
        begins[low] = index[low] == 1 or (low > start and bool(known[low - 1] and waited[low - 1]))
        part = slice(low, high)
        last = _FAR if until is None else int(max(until[src], until[dst]))
        found.append(
            Pipe(src, dst, dealt[part], int(index[low]), begins[part], slots[part], arrived[part], last)
        )
    return found


def in_lockstep(pipes: Sequence[Pipe], strict: bool = False) -> list[Lockstep]:
    """``pipes`` by what they carry, those with the fewest messages first.

    ``strict``: operations begin at all places that those before have in common, and at hardly any others: not
    those of as many messages in more operations, whose places include those of fewer.
    """
    sets: list[tuple[list[Pipe], NDArray[np.bool_]]] = []
    # Where receivers were slow many places look like beginnings: first those pipes with the fewest of these.
    for pipe in sorted(pipes, key=lambda pipe: (pipe.stop, int(np.count_nonzero(pipe.begins)))):
        for number, (members, common) in enumerate(sets):
            both = _in_both(members[0], common, pipe, strict)
            if both is not None:
                members.append(pipe)
                sets[number] = members, both
                break
        else:
            sets.append(([pipe], pipe.begins))
    if not strict:
        sets = _put_together(sets)
    return [each for members, _ in sets if (each := together(members)) is not None]


def _put_together(
    sets: Sequence[tuple[list[Pipe], NDArray[np.bool_]]],
) -> list[tuple[list[Pipe], NDArray[np.bool_]]]:
    """``sets`` of pipes, with what all of a set's have in common, those in lockstep as one.

    Where receivers were slow two pipes share hardly more places than chance gives them. What many pipes have
    in common is nothing but beginnings, and shows which others have all of these, too.
    """
    kept: list[tuple[list[Pipe], NDArray[np.bool_]]] = []
    for members, common in sorted(sets, key=lambda each: (each[0][0].stop, -len(each[0]))):
        for number, (others, theirs) in enumerate(kept):
            if others[0].stop != members[0].stop:
                continue
            both = _in_both(others[0], theirs, members[0]._replace(begins=common), surely=True)
            if both is not None:
                kept[number] = [*others, *members], both
                break
        else:
            kept.append((members, common))
    return kept


def in_turn(each: Lockstep, starts: NDArray[np.int64]) -> list[Lockstep]:
    """``each`` cut where every rank begins each operation on as many of its pipes before on the others.

    Two operations that take turns on pipes of their own (PAT's all_gather and reduce_scatter, whose
    connections lead opposite ways) have as many messages there. ``starts``: of each row of EXCHANGE.
    """
    begins = starts[each.rows[:, each.bounds[:-1]]]
    ranks: dict[int, list[int]] = {}
    for number in np.argsort(begins.sum(axis=1, dtype=np.float64), kind="stable").tolist():
        ranks.setdefault(each.pipes[number].src, []).append(number)
    (most, *others) = {len(mine) for mine in ranks.values()}
    if others:
        return [each]
    order = np.array(list(ranks.values()))  # (ranks, pipes of each)
    when = begins[order]
    known = (when != NEVER).all()
    cuts = [
        cut
        for cut in range(1, most)
        if known and (when[:, :cut].max(axis=1) <= when[:, cut:].min(axis=1)).all()
    ]
    parts = [together([each.pipes[n] for n in part.ravel()]) for part in np.split(order, cuts, axis=1)]
    return [each] if None in parts else [part for part in parts if part is not None]


def _in_both(
    one: Pipe, common: NDArray[np.bool_], other: Pipe, strict: bool = False, surely: bool = False
) -> NDArray[np.bool_] | None:
    """With which messages of ``one`` operations may begin on both pipes; None if they are not in lockstep.

    ``common``: with which of them they may begin on all pipes that are known to be like it. ``surely``: more
    than chance gives, whatever else speaks for it.
    """
    first = max(one.first, other.first)
    stop = max(min(one.stop, other.stop), first)
    mine = slice(first - one.first, stop - one.first)
    left, right = common[mine], other.begins[first - other.first : stop - other.first]
    begin = left & right
    lefts, rights, shared = (int(np.count_nonzero(each)) for each in (left, right, begin))
    # Of many places that only look like beginnings chance gives both pipes as many as this.
    chance = lefts * rights / max(stop - first, 1)
    beyond = one.stop == other.stop and shared > chance + SIGMAS * chance**0.5
    if not beyond and (surely or shared < max(1, LIKE * min(lefts, rights))):
        return None
    if strict and (shared < lefts or shared <= LIKE * max(lefts, rights)):
        return None
    if one.stop != other.stop:
        # The capture's end may have cut an operation off; more than one it cannot.
        # The numbers of a capture that begins in mid-job agree by no chance.
        surely = min(one.first, other.first) > 1 and shared > chance + SIGMAS * chance**0.5
        if 2 * shared < max(lefts, rights) and not surely:
            return None
        longest = max(_longest(left), _longest(right))
        if abs(one.stop - other.stop) > longest and not _stopped(one, other, longest):
            return None
    both = np.zeros_like(common)
    both[mine] = begin
    return both


def _longest(begins: NDArray[np.bool_]) -> int:
    """The most messages from one beginning to the next, or to the end."""
    places = np.flatnonzero(begins)
    return max(int(np.diff(places).max(initial=0)), len(begins) - int(places[-1]))


def _stopped(one: Pipe, other: Pipe, longest: int) -> bool:
    """Whether of two pipes the captures at the ends of the one with fewer messages stopped before the other
    was through with the operation behind those. ``longest``: messages of the longest operation."""
    short, long = sorted((one, other), key=lambda pipe: pipe.stop)
    return long.arrived is not None and bool(long.arrived[short.stop + longest - long.first] >= short.until)


def together(pipes: Sequence[Pipe]) -> Lockstep | None:
    """Pipes in lockstep, from the first number that all of them have to the last."""
    first, stop = max(pipe.first for pipe in pipes), min(pipe.stop for pipe in pipes)
    if stop <= first:
        return None
    rows = np.stack([pipe.rows[first - pipe.first : stop - pipe.first] for pipe in pipes])
    begins = np.ones(stop - first, bool)
    for pipe in pipes:
        begins &= pipe.begins[first - pipe.first : stop - pipe.first]
    bounds = np.flatnonzero(begins)
    if all(pipe.stop == stop or pipe.begins[stop - pipe.first] for pipe in pipes):
        bounds = np.r_[bounds, stop - first]
    if len(bounds) < 2:
        return None
    slots = pipes[0].slots[bounds[:-1] + (first - pipes[0].first)]
    return Lockstep(list(pipes), rows, bounds, slots)
