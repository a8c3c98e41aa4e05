"""NCCL over TCP: messages of its sockets in, collectives out, and what is left over.

A message's size stands before it (``framing``); the sizes are those of NCCL's chunks and slices as over
RoCE, so ``layouts`` tells what an operation's messages make together. There are no clear-to-send entries, so
where operations begin is told by pauses (``spoken``). Where only some nodes were captured, what the pauses of
the others were is not known: there the messages of every connection repeat, and of the numbers of repetitions
whose parts make up operations (``meanings``) the one counts in which ranks paused longest before their first
message of an operation, against the later ones (``quiet``). NCCL 2.30, src/transport/net_socket.cc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.matching.credited import EXPLAINED, joined
from dpuflow.matching.meanings import Meanings, Part
from dpuflow.matching.model import placed
from dpuflow.matching.pipes import Pipe, connections_of
from dpuflow.matching.quiet import contrast_of, cuts_at, reactions, times_of
from dpuflow.matching.scoring import NO_CONTRAST
from dpuflow.matching.spoken import spoken
from dpuflow.matching.streams import columns_of
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance
    from dpuflow.matching.streams import Columns
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

AHEAD: Final = NCCL_STEPS
"""Messages by which connections in lockstep may be apart where the capture ends: their slots."""
TWICE: Final = 2
"""What happened once does not repeat."""
LONGEST: Final = 4096
"""Messages of an operation on one connection at most, that are tried: 2 GiB of a tree's."""
SAMPLE: Final = 64
"""Operations that show where ranks pause."""


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
    times = times_of(seen.columns, pipes)
    pauses = reactions(pipes, times)
    whole = _alike_long(pipes)
    sizes = [seen.columns.sizes[pipe.rows[:n]] for pipe, n in zip(pipes, whole.tolist(), strict=True)]
    least = int(whole.min())
    best: tuple[float, int] = (-1.0, 0)
    chosen: tuple[Meanings, list[Part]] | None = None
    for count in dict.fromkeys(least // m for m in range(1, min(least // TWICE, LONGEST) + 1)):
        lengths = whole // count
        if (whole - count * lengths >= lengths).any():
            continue
        if not all(_repeats(size, m) for size, m in zip(sizes, lengths.tolist(), strict=True)):
            continue
        cuts = cuts_at(np.arange(count + 1)[:, None] * lengths, pipes, times, seen.near)
        meanings = Meanings(seen.columns, pipes, seen.position, seen.nodes, cuts, seen.near)
        parts = [Part(number, number + 1, 0) for number in range(count)]
        if not meanings.reads(0, 0, 1):
            continue
        contrast = contrast_of(parts[:SAMPLE], pipes, times, pauses, meanings)
        worth = NO_CONTRAST if contrast is None else round(contrast, 2), count
        if worth > best:
            best, chosen = worth, (meanings, parts)
    found = chosen[0].made(chosen[1]) if chosen else []
    enough = sum(len(i.rows) for i in found) >= EXPLAINED * sum(len(pipe.rows) for pipe in pipes)
    return found if enough else []


def _alike_long(pipes: Sequence[Pipe]) -> Ints:
    """How many messages of each pipe count: alike where they differ by what the capture's end cut off."""
    counts = [len(pipe.rows) for pipe in pipes]
    least: list[int] = []
    for count in sorted(counts):
        if not least or count - least[-1] > min(AHEAD, least[-1] // 2):
            least.append(count)
    return np.array([max(n for n in least if n <= count) for count in counts])


def _repeats(sizes: Ints, length: int) -> bool:
    """Whether ``sizes`` repeat after ``length`` messages."""
    return bool((sizes[length:] == sizes[: max(len(sizes) - length, 0)]).all())
