"""NCCL over TCP: messages of its sockets in, collectives out, and what is left over.

A message's size stands before it (``framing``); the sizes are those of NCCL's chunks and slices as over
RoCE, so ``layouts`` tells what an operation's messages make together. There are no clear-to-send entries, so
where operations begin is told by pauses (``spoken``). Where only some nodes were captured, what the pauses of
the others were is not known: there the messages of every connection repeat, and of the numbers of repetitions
whose parts make up operations the one counts in which ranks paused twice as long before their first message
of an operation as before the later ones. NCCL 2.30, src/transport/net_socket.cc.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.matching.credited import EXPLAINED, joined
from dpuflow.matching.model import placed
from dpuflow.matching.pipes import Lockstep, Pipe, connections_of
from dpuflow.matching.protocols import HELD, LINES, LL, RING_SLOT, STEP_SLOT
from dpuflow.matching.reading import Reading
from dpuflow.matching.scoring import NO_CONTRAST
from dpuflow.matching.spoken import spoken
from dpuflow.matching.streams import columns_of
from dpuflow.schema.rows import NEVER
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance
    from dpuflow.matching.streams import Columns
    from dpuflow.schema.tables import Rows

AHEAD: Final = NCCL_STEPS
"""Messages by which connections in lockstep may be apart where the capture ends: their slots."""
TWICE: Final = 2
"""What happened once does not repeat. Times that a pause before an operation is longer than one within."""


LONGEST: Final = 4096
"""Messages of an operation on one connection at most, that are tried: 2 GiB of a tree's."""
SAMPLE: Final = 64
"""Operations that show whether they make sense, and where ranks pause."""
RARE: Final = 0.01
"""Share of messages whose arrival a capture may date late: packets that came twice or out of order."""
_Set = tuple[list[Pipe], "NDArray[np.int64]"]


def socket_instances(
    exchanges: Rows,
    rows: NDArray[np.int64],
    position: NDArray[np.int64],
    near: frozenset[int] | None,
    nodes: NDArray[np.int64],
) -> tuple[list[Instance], NDArray[np.int64]]:
    """The collectives among ``rows``, messages of NCCL's sockets, and the rows that are part of none.

    ``position``, ``near`` and ``nodes``: see ``structured_instances``.
    """
    if not len(rows):
        return [], rows
    columns = columns_of(exchanges)
    dealt, at, end = connections_of(exchanges, rows)
    pipes = []
    for number, (low, high) in enumerate(zip(at.tolist(), end.tolist(), strict=True)):
        mine, first = dealt[low:high], exchanges[dealt[low]]
        none = np.zeros(0, np.int64)
        pipes.append((number, Pipe(int(first["src"]), int(first["dst"]), mine, 1, none.astype(bool), none)))
    found: list[Instance] = []
    left = []
    connected = [[pipe for _, pipe in members] for members in joined(pipes, nodes)]
    seen = _Seen(columns, position, nodes, near)
    for own in _apart(connected) if near is not None else connected:
        instances = spoken(columns, own, position, nodes) if near is None else []
        instances = instances or _repeated(seen, own)
        if instances:
            found += [placed(instance, near) for instance in instances]
        else:
            left += [pipe.rows for pipe in own]
    return found, np.sort(np.concatenate(left)) if left else rows[:0]


class _Seen(NamedTuple):
    """What goes with all connections; see ``structured_instances``."""

    columns: Columns
    position: NDArray[np.int64]
    nodes: NDArray[np.int64]
    near: frozenset[int] | None


def _apart(connected: list[list[Pipe]]) -> list[list[Pipe]]:
    """``connected`` pipes of some nodes; those with as many messages are one communicator's: what lies
    between parts of a ring was not seen."""
    groups: list[list[Pipe]] = []
    for own in sorted(connected, key=lambda own: min(len(pipe.rows) for pipe in own)):
        most, least = (max(len(pipe.rows) for pipe in each) for each in (own, groups[-1] if groups else own))
        if groups and most - least <= min(AHEAD, least // 2):
            groups[-1] += own
        else:
            groups.append(list(own))
    return groups


def _repeated(seen: _Seen, pipes: Sequence[Pipe]) -> list[Instance]:
    """The operations of connected pipes, if they repeat one; of several ways those that pauses bear out."""
    columns = seen.columns
    sets = _alike_long(pipes)
    sizes = [columns.sizes[rows] for _, rows in sets]
    total = sum(len(pipe.rows) for pipe in pipes)
    least = min(rows.shape[1] for _, rows in sets)
    best: tuple[float, int] = (-1.0, 0)
    chosen: tuple[list[int], list[int]] = [], []
    for count in dict.fromkeys(least // m for m in range(1, min(least // TWICE, LONGEST) + 1)):
        lengths = [rows.shape[1] // count for _, rows in sets]
        if any(rows.shape[1] - count * m >= m for (_, rows), m in zip(sets, lengths, strict=True)):
            continue
        if not all(_repeats(size, m) for size, m in zip(sizes, lengths, strict=True)):
            continue
        slots = [slot for slot in (RING_SLOT, STEP_SLOT, LL) if slot != LL or _in_lines(sizes)]
        few = min(count, SAMPLE)
        some = [(mine, rows[:, : few * m]) for (mine, rows), m in zip(sets, lengths, strict=True)]
        slots = [slot for slot in slots if _read(seen, some, lengths, slot)]
        if slots:
            worth = round(_contrast(seen, lengths, some), 2), count
            if worth > best:
                best, chosen = worth, (lengths, slots)
    lengths, slots = chosen
    fits = {slot: _read(seen, sets, lengths, slot) for slot in slots}
    fits = {
        slot: found for slot, found in fits.items() if sum(len(i.rows) for i in found) >= EXPLAINED * total
    }
    return _of_protocol(columns, fits, lengths, sets) if fits else []


def _in_lines(sizes: Sequence[NDArray[np.int64]]) -> bool:
    """Whether messages are whole lines of LL."""
    return not any((size % LINES[LL]).any() for size in sizes)


def _read(seen: _Seen, sets: Sequence[_Set], lengths: Sequence[int], slot: int) -> list[Instance]:
    """The operations, if each has so many messages (``lengths``, by set) in slots of that size; else none."""
    cut = []
    for (mine, rows), m in zip(sets, lengths, strict=True):
        count = rows.shape[1] // m
        cut.append(Lockstep(mine, rows, np.arange(count + 1) * m, np.full(count, slot)))
    reading = Reading(seen.columns, cut, seen.position, seen.nodes, seen.near, longest=1)
    instances = reading.instances()
    told, total = sum(len(i.rows) for i in instances), sum(rows.size for _, rows in sets)
    return instances if told >= EXPLAINED * total else []


def _alike_long(pipes: Sequence[Pipe]) -> list[_Set]:
    """Pipes with as many messages, but for what the capture's end cut off, with their rows as one array."""
    groups: list[list[Pipe]] = []
    for pipe in sorted(pipes, key=lambda pipe: len(pipe.rows)):
        least = len(groups[-1][0].rows) if groups else 0
        if groups and len(pipe.rows) - least <= min(AHEAD, least // 2):
            groups[-1].append(pipe)
        else:
            groups.append([pipe])
    return [(mine, np.stack([pipe.rows[: len(mine[0].rows)] for pipe in mine])) for mine in groups]


def _repeats(sizes: NDArray[np.int64], length: int) -> bool:
    """Whether each line of ``sizes`` repeats after ``length`` messages."""
    if (sizes[:, length : 2 * length] != sizes[:, :length]).any():
        return False
    return bool((sizes[:, length:] == sizes[:, :-length]).all()) if length < sizes.shape[1] else True


def _contrast(seen: _Seen, lengths: Sequence[int], sets: Sequence[_Set]) -> float:
    """Share of (first message of an operation, later one) of a rank whose first one paused twice as long."""
    won, pairs = 0.0, 0
    for first, later in _pauses(seen, lengths, sets):
        if len(first) and len(later):
            won += float(np.searchsorted(np.sort(TWICE * later), first).mean() / len(later)) * len(first)
            pairs += len(first)
    return won / pairs if pairs else NO_CONTRAST


def _pauses(
    seen: _Seen, lengths: Sequence[int], sets: Sequence[_Set]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each endpoint how long it had been idle before its first message of each operation, and others.

    A first message's pause counts from the last event of the operation before, others' from the last one of
    the same: what reaches a rank before it begins tells nothing of it. Ranks without a capture are left out.
    """
    columns = seen.columns
    every: dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]] = {}
    for length, (mine, rows) in zip(lengths, sets, strict=True):
        turn = np.arange(rows.shape[1]) // length
        for pipe, row in zip(mine, rows, strict=True):
            for end, when, own in (
                (pipe.src, columns.starts[row], True),
                (pipe.dst, columns.arrivals[row], False),
            ):
                some = when != NEVER
                if seen.near is None or end in seen.near:
                    every.setdefault(end, []).append((when[some], turn[some], np.full(int(some.sum()), own)))
    for parts in every.values():
        times, turn = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
        order = np.lexsort((times, turn))
        times, turn, sent = times[order], turn[order], np.concatenate([part[2] for part in parts])[order]
        at = np.flatnonzero(sent)
        begins = np.r_[True, turn[at[1:]] != turn[at[:-1]]] if len(at) else np.zeros(0, bool)
        first, later = at[begins], at[~begins]
        ends = np.searchsorted(turn, turn[first]) - 1  # the last event of the turn before
        known = ends >= 0
        yield (times[first] - times[np.maximum(ends, 0)])[known], times[later] - times[later - 1]


def _of_protocol(
    columns: Columns, fits: dict[int, list[Instance]], lengths: Sequence[int], sets: Sequence[_Set]
) -> list[Instance]:
    """The operations with their protocol and bytes, from how they read with each slot that fits.

    With LL each message of a ring waits for the one before; with Simple two slices go together. A small
    operation of one message a rank tells nothing of its protocol, so its bytes are one or the other number.
    """
    simple = next((fits[slot] for slot in (RING_SLOT, STEP_SLOT) if slot in fits), None)
    lines = [
        replace(i, size=None if i.size is None else i.size // LINES[LL] * HELD[LL]) for i in fits.get(LL, [])
    ]
    if simple is None:
        return [replace(i, protocol="ll") for i in lines]
    if LL not in fits:
        return [replace(i, protocol="simple") for i in simple]
    name = lines[0].algorithm and lines[0].algorithm.name
    if name == "ring":
        if _one_by_one(columns, lengths, sets):
            return [replace(i, protocol="ll") for i in lines]
        return [replace(i, protocol="simple") for i in simple]
    return [
        replace(a, size=None, between=(b.size, a.size) if a.size and b.size else None)
        for a, b in zip(simple, lines, strict=True)
    ]


def _one_by_one(columns: Columns, lengths: Sequence[int], sets: Sequence[_Set]) -> bool:
    """Whether every message but the first of a ring's operation left after the one before had come in."""
    for length, (mine, rows) in zip(lengths, sets, strict=True):
        into = {pipe.dst: row for pipe, row in zip(mine, rows, strict=True)}
        for pipe, row in zip(mine, rows, strict=True):
            later = np.flatnonzero(np.arange(len(row)) % length)
            came = columns.arrivals[into[pipe.src][later - 1]] if pipe.src in into else row[:0]
            if len(came) == len(later):
                early = (columns.starts[row[later]] <= came) & (came != NEVER)
                if early.sum() > RARE * len(later):
                    return False
    return True
