"""Headers of UCX and libfabric beyond the snap length -> messages, by what stands in their place elsewhere.

In: MESSAGE and LINK rows, each flow's in stream order (see ``hidden``). A stretch without a readable header
begins where the message before it ended, so its messages fill it to the byte. Programs repeat themselves: if
wherever else on the flow the same two messages have so many bytes between them there are the same messages,
these are the stretch's. What they name of their own (requests, addresses) stays unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.messages.stretches import Part, stretches
from dpuflow.schema.rows import Framing, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.messages.stretches import Solved
    from dpuflow.schema.tables import Rows

_MOST = 64  # messages in a stretch that are looked for: pipelined operations send many small ones
_SIGNATURE = ("wire", "role", "bytes", "announces")

Kind = tuple[int, ...]
"""Length, wire, role, bytes, announces, what is known, tag: what repeats of a message."""


def resolve_tagged(
    rows: Rows, links: Rows, flows: Rows, orders: dict[int, np.ndarray], solved: Solved
) -> None:
    """As ``hidden_gloo.resolve_gloo``, for flows of UCX and libfabric."""
    for f, order in orders.items():
        runs = stretches(links, order) if flows["framing"][f] in (Framing.UCX, Framing.OFI) else []
        if not runs:
            continue
        solved.counts.stretches += len(runs)
        kinds = _kinds(rows, links, order)
        place = {int(row): k for k, row in enumerate(order)}
        for run in runs:
            first, last = place[int(run[0])], place[int(run[-1])]
            size = int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]])
            before = kinds[first - 1] if first else None
            after = kinds[last + 1] if last + 1 < len(kinds) else None
            fill = _found(kinds, size, before, after)
            if fill is None or not solved.has_room(len(fill)):
                continue
            link = solved.put(run, [_part(kind) for kind in fill])
            link["known"] = [kind[5] for kind in fill]
            link["request"] = [kind[6] for kind in fill]


def _part(kind: Kind) -> Part:
    size, wire, role, carried, announced = kind[:5]
    return Part(size, Wire(wire), Role(role), (0, 0, 0), carried if role == Role.DATA else announced)


def _kinds(rows: Rows, links: Rows, order: np.ndarray) -> list[Kind | None]:
    """What each message of a flow is, in stream order; None for pieces."""
    length = rows["seq_end"][order].astype(np.int64) - rows["seq"][order].astype(np.int64)
    # Grants keep the receiver's request where others keep their tag.
    tag = np.where(links["known"][order] & 2 != 0, links["request"][order], 0)
    columns = [
        length,
        *(rows[name][order].astype(np.int64) for name in _SIGNATURE),
        links["known"][order],
        tag,
    ]
    every = zip(*(column.tolist() for column in columns), strict=True)
    return [
        None if piece else kind for kind, piece in zip(every, links["piece"][order].tolist(), strict=True)
    ]


def _found(
    kinds: list[Kind | None], size: int, before: Kind | None, after: Kind | None
) -> tuple[Kind, ...] | None:
    """The messages of ``size`` bytes together that stand between such neighbours, if only one choice does.

    Where none stands between both, between one of them; where none does, anywhere.
    """
    choices = list(dict.fromkeys(_filling(kinds, size)))
    for left, right in ((True, True), (True, False), (False, True), (False, False)):
        found = {
            middle
            for prev, middle, following in choices
            if (not left or prev == before) and (not right or following == after)
        }
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def _filling(
    kinds: list[Kind | None], size: int
) -> Iterator[tuple[Kind | None, tuple[Kind, ...], Kind | None]]:
    """Every run of messages with ``size`` bytes together, with what stands before and after it."""
    for start in range(len(kinds)):
        total = 0
        middle: list[Kind] = []
        for kind in kinds[start : start + _MOST]:
            if kind is None or total >= size:
                break
            middle.append(kind)
            total += kind[0]
        if total == size and middle:
            end = start + len(middle)
            yield (
                (kinds[start - 1] if start else None),
                tuple(middle),
                kinds[end] if end < len(kinds) else None,
            )
