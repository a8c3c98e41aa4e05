"""Messages of NCCL cut over the queue pairs of a connection: TRANSFER rows in, each message one row out.

With NCCL_IB_SPLIT_DATA_ON_QPS=1 (the default up to 2.19) a message goes over all queue pairs at once, cut
into as many pieces of equally many bytes, rounded up to 128, the last ones shorter or empty; each ends with
the same immediate (NCCL 2.30, src/transport/net_ib/p2p.cc ncclIbMultiSend). Entries come on the first queue
pair only. So of a connection's queue pairs the first has as many entries as pieces, the others have none,
and the pieces on the i-th lie i times the first one's rounded length behind the first one. All pieces of a
message together are the bytes that its immediate tells, or that is a running number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.exchanges.stripes import AHEAD, HELD, tails_of
from dpuflow.schema.rows import NEVER, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

ALIGNED: Final = 128
"""Pieces are multiples of so many bytes (ncclIbMultiSend)."""
MOST_PAIRS: Final = 128
"""NCCL_IB_MAX_QPS (src/transport/net_ib/common.h)."""
FEW: Final = 64
"""Messages that are looked at first: most lines are not of one connection."""
_FAR = np.iinfo(np.int64).max


@dataclass
class _Line:
    """One direction of a queue pair: what its messages carry, and whether entries pay for them."""

    places: Ints  # in ``part``
    granted: bool
    va: Ints
    size: Ints
    told: NDArray[np.uint32]  # immediates

    def __len__(self) -> int:
        return len(self.places)


def cut(granted: Ints, written: Ints) -> bool:
    """Whether messages may be cut, from the entries and WRITEs of each way of each queue pair."""
    return bool(((granted == 0) & (written > 0)).any())


def whole(transfers: Rows, part: Ints) -> tuple[Rows, Ints]:
    """``transfers`` and ``part`` with the pieces of each message made one row, that of the first piece.

    ``part`` are rows of DATA and GRANT in order of time. The same objects where nothing is cut.
    """
    if not (transfers["wire"][part] == Wire.ROCE_WRITE_IMM).any():
        return transfers, part  # an immediate ends each message that is cut
    names = ["connection", "src", "dst", "role", "wire", "bytes", "va", "tag"]
    rows = transfers[names][part]
    tail = tails_of(rows)
    made: list[tuple[Ints, Ints]] = []  # places of first pieces, and for each those of all (-1: not seen)
    dropped: list[Ints] = []
    for lines in _ways(rows, tail):
        for family in _families(lines):
            heads, pieces, left = _aligned(family)
            made.append((heads, pieces))
            dropped += [left, *(line.places for line in family[1:])]
    if not made:
        return transfers, part
    transfers, kept = transfers.copy(), np.ones(len(part), bool)
    for heads, pieces in made:
        both = np.concatenate([pieces, np.where(pieces >= 0, tail[pieces], -1)], axis=1)
        transfers[part[heads]] = _joined(transfers, part, both, both.shape[1] // 2)
    for places in dropped:
        kept[places] = False
        kept[tail[places][tail[places] >= 0]] = False
    for heads, _ in made:
        kept[tail[heads][tail[heads] >= 0]] = False
    return transfers, part[kept]


def _ways(rows: Rows, tail: Ints) -> Iterator[list[_Line]]:
    """The lines from one endpoint to another, of each two where some have entries and some have none."""
    grant = rows["role"] == Role.GRANT
    sender = np.where(grant, rows["dst"], rows["src"])
    key = 2 * rows["connection"].astype(np.int64) + (sender == np.maximum(rows["src"], rows["dst"]))
    keys = int(key.max()) + 1
    granted = np.bincount(key[grant], minlength=keys) > 0
    ended = (rows["wire"] == Wire.ROCE_WRITE_IMM) | (tail >= 0)
    data = np.flatnonzero(~grant & ended & (tail != -2))
    data = data[np.argsort(key[data], kind="stable")]
    bounds = np.r_[0, np.flatnonzero(np.diff(key[data])) + 1, len(data)]
    told = np.where(tail >= 0, rows["tag"][tail], rows["tag"])
    ways: dict[tuple[int, int], list[_Line]] = {}
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = data[low:high]
        if not len(mine):
            continue
        at = int(mine[0])
        line = _Line(
            mine,
            bool(granted[key[at]]),
            rows["va"][mine].astype(np.int64),
            rows["bytes"][mine].astype(np.int64),
            told[mine],
        )
        ways.setdefault((int(rows["src"][at]), int(rows["dst"][at])), []).append(line)
    yield from (
        lines for lines in ways.values() if len(lines) > 1 and not all(line.granted for line in lines)
    )


def _families(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """Lines that carry the pieces of the same messages, in order, the one with the first pieces first."""
    bare = [line for line in lines if not line.granted]
    # Where it was not told whose entries are whose, any line may have the first pieces.
    heads = [line for line in lines if line.granted] or bare
    members: dict[int, dict[int, _Line]] = {}
    for line in bare:
        head, index = _head_of(line, heads)
        if head is not None:
            members.setdefault(id(head), {})[index] = line
    for head in heads:
        mine = members.get(id(head), {})
        family = [head, *(mine[index] for index in sorted(mine))]
        if mine and sorted(mine) == list(range(1, len(mine) + 1)) and _adds_up(family):
            yield family


def _head_of(line: _Line, heads: Sequence[_Line]) -> tuple[_Line | None, int]:
    """The line with the first pieces of the messages that ``line`` has others of, and which; None, 0."""

    def behind(head: _Line) -> tuple[bool, int]:
        distance = int(line.va.min()) - int(head.va.min())
        return distance < 0, abs(distance)

    # Most likely the buffer that begins right before.
    for head in sorted((head for head in heads if head is not line), key=behind):
        index = _index(head, line)
        if index:
            return head, index
    return None, 0


def _index(head: _Line, line: _Line) -> int:
    """Which piece of the messages whose first ones ``head`` carries ``line`` carries; 0 for none."""
    shift = _shift(head, line)
    if shift is None:
        return 0
    first, other = _beside(head, line, shift)
    return _which(head, line, first, other)


def _beside(head: _Line, line: _Line, shift: int) -> tuple[slice, slice]:
    """Messages of both that go together if the ``shift``-th of ``head`` and the first of ``line`` do; below
    0: the other way round."""
    count = min(len(head) - max(shift, 0), len(line) - max(-shift, 0))
    return slice(max(shift, 0), max(shift, 0) + count), slice(max(-shift, 0), max(-shift, 0) + count)


def _shift(head: _Line, line: _Line) -> int | None:
    """Where the messages of ``line`` begin among those of ``head``: a capture's ends may cut one off."""
    if abs(len(head) - len(line)) > AHEAD:
        return None
    for shift in sorted(range(-AHEAD, AHEAD + 1), key=abs):
        first, other = _beside(head, line, shift)
        count = min(first.stop - first.start, FEW)
        few = slice(first.start, first.start + count), slice(other.start, other.start + count)
        if count > 0 and _which(head, line, *few) and _which(head, line, first, other):
            return shift
    return None


def _which(head: _Line, line: _Line, first: slice, other: slice) -> int:
    """The piece that ``line`` carries if its messages ``other`` are pieces of those ``first``, else 0."""
    piece = -(-head.size[first] // ALIGNED) * ALIGNED
    away = line.va[other] - head.va[first]
    seen = np.flatnonzero((piece > 0) & (head.va[first] != 0) & (line.va[other] != 0))
    if not len(seen):
        return 0
    index = int(away[seen[0]] // piece[seen[0]])
    if not 0 < index < MOST_PAIRS:
        return 0
    fits = (away[seen] == index * piece[seen]) & (head.told[first] == line.told[other])[seen]
    return index if fits.mean() >= HELD else 0


def _adds_up(family: Sequence[_Line]) -> bool:
    """Whether the pieces are the bytes that the immediates tell, or these are running numbers.

    Messages that go over queue pairs in turn and fill their slots lie beside each other as pieces do.
    """
    heads, pieces, _ = _aligned(family)
    if not len(heads):
        return False
    every = np.concatenate([line.places for line in family])
    order = np.argsort(every)
    size = np.concatenate([line.size for line in family])[order]
    total = np.where(pieces >= 0, size[np.searchsorted(every[order], pieces)], 0).sum(axis=1)
    here = np.isin(family[0].places, heads)
    told = family[0].told[here]
    by_index = max((total == told).mean(), (total == told.byteswap()).mean())
    by_id = len(told) > 1 and (np.diff(told) == 1).mean() >= HELD
    return bool(by_index >= HELD or by_id)


def _aligned(family: Sequence[_Line]) -> tuple[Ints, Ints, Ints]:
    """Places of first pieces, of all pieces of the same messages, and of first pieces without the others."""
    head = family[0]
    pieces = np.full((len(head), len(family)), -1)
    pieces[:, 0] = head.places
    for number, line in enumerate(family[1:], 1):
        shift = _shift(head, line)
        assert shift is not None
        first, other = _beside(head, line, shift)
        pieces[first, number] = line.places[other]
    seen = (pieces >= 0).all(axis=1)
    return head.places[seen], pieces[seen], head.places[~seen]


def _joined(transfers: Rows, part: Ints, places: Ints, pairs: int) -> Rows:
    """One row for each of ``places``: (messages, pieces and behind them their tails), -1 for none."""
    there = places >= 0
    every = transfers[part[places]]
    out: Rows = every[:, 0].copy()
    for name in ("sent_ns", "arrived_ns"):
        times = np.where(there & (every[name] != NEVER), every[name], _FAR).min(axis=1)
        out[name] = np.where(times == _FAR, NEVER, times)
    last = there.copy()
    last[:, :pairs] &= ~there[:, pairs:]  # what has a tail ends with it
    for name in ("sent_end_ns", "arrived_end_ns", "acked_ns", "taken_ns"):
        # The end of a message is known if that of all its pieces is.
        known = ((every[name] != NEVER) | ~last).all(axis=1)
        out[name] = np.where(known, np.where(last, every[name], NEVER).max(axis=1), NEVER)
    for name in ("bytes", "packets", "retransmitted", "ecn_marked"):
        out[name] = np.where(there, every[name], 0).sum(axis=1)
    out["flags"] = np.bitwise_or.reduce(np.where(there, every["flags"], 0), axis=1)
    out["seen"] = np.bitwise_and.reduce(np.where(there, every["seen"], 0xFF), axis=1)
    out["tag"] = np.where(there[:, pairs], every["tag"][:, pairs], every["tag"][:, 0])
    out["wire"] = Wire.ROCE_WRITE_IMM
    return out
