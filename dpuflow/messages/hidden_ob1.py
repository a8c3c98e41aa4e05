"""Stretches of ob1 streams without a readable header -> the frames that must lie in them.

In: MESSAGE rows of one flow in stream order, with runs of pieces among them. MATCH and RNDV carry a
sequence number that counts up without holes, so it is known how many of them hide between two that were
read; the others are FINs that PUTs still owe, and PUT requests. Sizes must add up to the byte
(ompi/mca/pml/ob1/pml_ob1_hdr.h).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.framing import BTL_HEADER, OB1_BYTES, OB1_FIN, OB1_MATCH, OB1_PUT, OB1_RNDV
from dpuflow.messages.stretches import Part
from dpuflow.schema.rows import Op, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

_FIN = BTL_HEADER + OB1_BYTES[OB1_FIN]
_REQUEST = BTL_HEADER + OB1_BYTES[OB1_PUT]
_RNDV = BTL_HEADER + OB1_BYTES[OB1_RNDV]
_MATCH = BTL_HEADER + OB1_BYTES[OB1_MATCH]
_SEQUENCES = 1 << 16
_REQUESTS = 3  # PUT requests at most in one stretch: as many answers as meet one delay
_AROUND = 16  # numbered frames before and after whose sizes are usual there
_LONGEST, _SHORTEST = 512, 4  # frames in a period; how many show one
_DENSE = 16  # numbers there may be for each that was read
_REGULAR = 0.98  # share of frames that are alike a period later: the rest were misread
_TRIES = 256  # ways to fill a gap that are looked at: more is no knowledge
_LOOKS = 16 * _TRIES  # and places on the way to them


class Filling(NamedTuple):
    """One way to fill a stretch: so many FINs, PUT requests, and numbered frames of these sizes."""

    fins: int
    requests: int
    frames: tuple[int, ...]
    odd: int  # frames of a size that is not usual here


class Gap(NamedTuple):
    """Stretches between two numbered frames that were read (rows, -1: none): ``missing`` hide in them."""

    before: int
    after: int
    missing: int
    runs: list[Ints]


def gaps(rows: Rows, order: Ints, runs: list[Ints]) -> Iterator[Gap]:
    """The runs of one flow (its rows in stream order) by the numbered frames around them."""
    numbered = order[np.isin(rows["wire"][order], (Wire.OB1_MATCH, Wire.OB1_RNDV))]
    place = np.full(len(rows), -1)
    place[order] = np.arange(len(order))
    at = place[numbered]
    grouped: dict[int, list[Ints]] = {}
    for run in runs:
        grouped.setdefault(int(np.searchsorted(at, place[run[0]])), []).append(run)
    for k, inside in grouped.items():
        before = int(numbered[k - 1]) if k else -1
        after = int(numbered[k]) if k < len(numbered) else -1
        missing = -1
        if before >= 0 and after >= 0 and rows["context"][before] == rows["context"][after]:
            missing = (int(rows["sub"][after]) - int(rows["sub"][before]) - 1) % _SEQUENCES
        yield Gap(before, after, missing, inside)


def fill(rows: Rows, order: Ints, gap: Gap, found: int, usage: Usage) -> list[list[Part] | None]:
    """The frames of each run of a gap, None where it is not certain; ``found``: FINs in runs before it."""
    if gap.missing < 0:
        # Without a number on both sides only what holds no numbered frame is certain.
        return _alone(rows, order, gap, found, usage)
    way = _Search(rows, order, gap, usage).certain(found) if len(gap.runs) <= _TRIES else None
    if way is None:
        return [None] * len(gap.runs)
    parts: list[list[Part] | None] = []
    number = int(rows["sub"][gap.before])
    for run, filling in zip(gap.runs, way, strict=True):
        numbers = [(number + 1 + k) % _SEQUENCES for k in range(len(filling.frames))]
        number += len(filling.frames)
        parts.append(_parts(rows, gap, run, filling, numbers, usage))
    return parts


def _alone(rows: Rows, order: Ints, gap: Gap, found: int, usage: Usage) -> list[list[Part] | None]:
    """As ``fill`` where a numbered frame was read on one side of the gap at most: at a stream's ends.

    At the end further frames may hide, of the sizes usual there.
    """
    parts: list[list[Part] | None] = []
    number = int(rows["sub"][gap.before]) if gap.before >= 0 and gap.after < 0 else None
    usual = frozenset[int]() if number is None else _usual(rows, order, gap)
    for run in gap.runs:
        size = int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]])
        fins = _fins(rows, order, run, found)
        most = size // min(usual, default=size + 1) if number is not None else 0
        ways = [
            filling
            for count in range(min(most, _TRIES) + 1)
            for filling in _options(size, fins, count, usual)
            if not filling.odd
        ]
        if len(ways) != 1:
            parts.append(None)
            number = None  # from here on the numbers are not known
            usual = frozenset()
            continue
        frames = ways[0].frames
        numbers = [((number or 0) + 1 + k) % _SEQUENCES for k in range(len(frames))]
        number = None if number is None else number + len(frames)
        parts.append(_parts(rows, gap, run, ways[0], numbers, usage))
        found += ways[0].fins
    return parts


class _Search:
    """Looks for the ways to spread a gap's numbered frames over its runs."""

    def __init__(self, rows: Rows, order: Ints, gap: Gap, usage: Usage) -> None:
        self._rows, self._order, self._gap, self._usage = rows, order, gap, usage
        self._usual = _usual(rows, order, gap)
        self._ways: list[tuple[Filling, ...]] = []
        self._left = _LOOKS

    def certain(self, found: int) -> tuple[Filling, ...] | None:
        """The one way that is likelier than all others; ``found``: FINs in runs before."""
        self._spread(self._gap.runs, self._gap.missing, found, ())
        ways = self._ways
        if not ways or len(ways) >= _TRIES or self._left < 0:
            return None
        fewest = min(sum(filling.odd for filling in way) for way in ways)
        best = {way for way in ways if sum(filling.odd for filling in way) == fewest}
        # With numbers to place, bare RNDVs are likelier than MATCHes that happen to fit.
        bare = {way for way in best if all(size == _RNDV for filling in way for size in filling.frames)}
        best = bare or best
        return best.pop() if len(best) == 1 else None

    def _spread(self, runs: list[Ints], missing: int, found: int, so_far: tuple[Filling, ...]) -> None:
        """All ways to spread ``missing`` frames over the last ``runs``, behind those ``so_far``."""
        if len(self._ways) >= _TRIES:
            return
        rows, (run, *rest) = self._rows, runs
        start = int(rows["sub"][self._gap.before]) + 1 + self._gap.missing - missing
        size = int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]])
        fins = _fins(rows, self._order, run, found)
        # No frame is smaller than a MATCH without data; a number that leapt would ask for thousands of them.
        most = min(missing, _room(rows, [run]))
        least = missing - _room(rows, rest)
        for count in range(max(least, 0), most + 1):
            self._left -= 1
            if self._left < 0:
                return
            expected = self._usage.sizes(start, count)
            for filling in _options(size, fins, count, self._usual, expected):
                way = (*so_far, filling)
                if rest:
                    self._spread(rest, missing - count, found + filling.fins, way)
                else:
                    self._ways.append(way)


def _room(rows: Rows, runs: list[Ints]) -> int:
    """Most numbered frames that runs can hold."""
    return sum((int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]])) // _MATCH for run in runs)


def _options(
    size: int, fins: int, count: int, usual: frozenset[int], expected: tuple[int, ...] = ()
) -> Iterator[Filling]:
    """The ways to fill a run of ``size`` bytes with so many FINs and numbered frames.

    ``usual``: sizes of frames around it; ``expected``: what these ones' are likely to be.
    """
    for requests in range(_REQUESTS):
        left = size - fins * _FIN - requests * _REQUEST
        if not count and not left:
            yield Filling(fins, requests, (), 0)
        if not count or left < count * _MATCH:
            continue
        if expected and sum(expected) == left:
            yield Filling(fins, requests, expected, 0)
            continue
        even = [(each,) * count for each in usual if left == count * each]
        for frames in even or _uneven(left, count, usual):
            yield Filling(fins, requests, frames, 0 if even else 1)


def _uneven(size: int, count: int, usual: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Frames of which the last is shorter than the others: so ends what is sent in segments."""
    for each in (_FIN,) if count == 1 else usual - {_RNDV}:
        last = size - (count - 1) * each
        if last >= _MATCH and (count == 1 or last < each):
            yield (*(each,) * (count - 1), last)


def _fins(rows: Rows, order: Ints, run: Ints, found: int) -> int:
    """FINs in a run: each PUT before it has its FIN before it, in it or right after it."""
    since, until = int(rows["seq"][run[0]]), int(rows["seq_end"][run[-1]])
    wires = rows["wire"][order]
    puts = order[wires == Wire.OB1_PUT]
    fins = rows["seq"][order[wires == Wire.OB1_FIN]].astype(np.int64)
    begin, end = rows["seq"][puts].astype(np.int64), rows["seq_end"][puts].astype(np.int64)
    owed = int((end <= since).sum() - (fins < since).sum()) - found
    next_put = begin[begin >= until].min(initial=np.iinfo(np.int64).max)
    return max(0, owed - int(((fins >= until) & (fins < next_put)).sum()))


def _usual(rows: Rows, order: Ints, gap: Gap) -> frozenset[int]:
    """Sizes on the wire of the numbered frames around a gap."""
    numbered = order[np.isin(rows["wire"][order], (Wire.OB1_MATCH, Wire.OB1_RNDV))]
    at = int(np.searchsorted(rows["seq"][numbered], rows["seq"][gap.runs[0][0]]))
    near = numbered[max(0, at - _AROUND) : at + _AROUND]
    sizes = rows["seq_end"][near].astype(np.int64) - rows["seq"][near].astype(np.int64)
    return frozenset({_RNDV, *sizes.tolist()})


def _parts(rows: Rows, gap: Gap, run: Ints, filling: Filling, numbers: list[int], usage: Usage) -> list[Part]:
    nothing = (int(Op.UNKNOWN), 0, 0)
    parts = [Part(_FIN, Wire.OB1_FIN, Role.DONE, nothing, 0)] * filling.fins
    parts += [Part(_REQUEST, Wire.OB1_PUT_REQUEST, Role.GRANT, nothing, 0)] * filling.requests
    mid = int(rows["first_ns"][run[0]])
    before = kind_of(rows[gap.before]) if gap.before >= 0 else None
    after = kind_of(rows[gap.after]) if gap.after >= 0 else None
    for place, (size, number) in enumerate(zip(filling.frames, numbers, strict=True)):
        last = place == len(numbers) - 1
        kind = usage.at(number)
        if kind is None or kind.size != size:
            kind = usage.between(before, after if last else None, size)
        if kind is None:
            near = kind_of(rows[_like(rows, gap, size, mid)])
            kind = near._replace(size=size, length=near.length if size == _RNDV else size - _MATCH)
        slot = (kind.op, kind.tag, number)
        if size == _RNDV:
            parts.append(Part(size, Wire.OB1_RNDV, Role.OFFER, slot, kind.length, kind.context))
        else:
            parts.append(Part(size, Wire.OB1_MATCH, Role.DATA, slot, size - _MATCH, kind.context))
        before = kind
    return parts


class Kind(NamedTuple):
    """What calls with the same arguments have in common: operation, tag, size on the wire and of the data."""

    context: int
    op: int
    tag: int
    size: int
    length: int


def kind_of(row: np.void) -> Kind:
    """The kind of a numbered frame."""
    length = row["announces"] if row["wire"] == Wire.OB1_RNDV else row["bytes"]
    size = int(row["seq_end"]) - int(row["seq"])
    return Kind(int(row["context"]), int(row["op"]), int(row["tag"]), size, int(length))


class Usage:
    """Which kinds of numbered frames follow each other on a flow: programs repeat themselves."""

    def __init__(self, rows: Rows, order: Ints) -> None:
        numbered = order[np.isin(rows["wire"][order], (Wire.OB1_MATCH, Wire.OB1_RNDV))]
        self._rows = rows[numbered]
        self._after: Counter[tuple[Kind, Kind]] = Counter()
        self._places: dict[int, Kind] = {}  # within the period
        self._period = 0
        self._of_size: dict[int, set[Kind]] = {}
        self._learned = False

    def _learn(self) -> None:
        self._learned = True
        kinds = [kind_of(row) for row in self._rows]
        numbers = self._rows["sub"].astype(np.int64)
        for k, kind in enumerate(kinds):
            self._of_size.setdefault(kind.size, set()).add(kind)
            if k and (numbers[k] - numbers[k - 1]) % _SEQUENCES == 1:
                self._after[kinds[k - 1], kind] += 1
        if (np.diff(numbers) > 0).all():  # numbers that came round again would be two of a kind
            self._period = self._find_period(numbers, kinds)
        if self._period:
            places: dict[int, Counter[Kind]] = {}
            for number, kind in zip(numbers.tolist(), kinds, strict=True):
                places.setdefault(number % self._period, Counter())[kind] += 1
            self._places = {place: found.most_common(1)[0][0] for place, found in places.items()}

    def _find_period(self, numbers: Ints, kinds: list[Kind]) -> int:
        """After how many numbers the kinds repeat; 0 where they do not."""
        if len(numbers) < 2 * _SHORTEST or int(numbers[-1] - numbers[0]) > _DENSE * len(numbers):
            return 0
        names = {kind: name for name, kind in enumerate(dict.fromkeys(kinds))}
        row = np.full(int(numbers[-1] - numbers[0]) + 1, -1)
        row[numbers - numbers[0]] = [names[kind] for kind in kinds]
        shares = [0.0]
        for period in range(1, min(_LONGEST, len(row) // 2) + 1):
            a, b = row[period:], row[:-period]
            both = (a >= 0) & (b >= 0)
            shares.append(float((a == b)[both].mean()) if both.any() else 0.0)
        best = max(shares)
        return int(np.argmax(np.array(shares) >= best)) if best >= _REGULAR else 0

    def at(self, number: int) -> Kind | None:
        """The kind that frames with this number have where kinds repeat; None where they do not."""
        if not self._learned:
            self._learn()
        if not self._period:
            return None
        return self._places.get(number % self._period)

    def sizes(self, number: int, count: int) -> tuple[int, ...]:
        """Sizes on the wire of so many frames from a number on; empty where that is not known."""
        kinds = [self.at((number + k) % _SEQUENCES) for k in range(count)]
        return tuple(kind.size for kind in kinds if kind) if all(kinds) else ()

    def between(self, before: Kind | None, after: Kind | None, size: int) -> Kind | None:
        """The kind of that size that most often stands between two others; None where none ever did."""
        if not self._learned:
            self._learn()
        often = {
            kind: (self._after[before, kind] if before else 0) + (self._after[kind, after] if after else 0)
            for kind in self._of_size.get(size, ())
        }
        best = max(often.values(), default=0)
        found = [kind for kind, times in often.items() if times == best]
        return found[0] if best and len(found) == 1 else None


def _like(rows: Rows, gap: Gap, size: int, time_ns: int) -> int:
    """Of the frames around a gap the one of the same call: the one of its size, else the nearer in time."""
    around = [row for row in (gap.before, gap.after) if row >= 0]
    same = [row for row in around if int(rows["seq_end"][row]) - int(rows["seq"][row]) == size]
    if len(around) == 1 or len(same) == 1:
        return (same or around)[0]
    before, after = around
    early = time_ns - int(rows["last_ns"][before]) <= int(rows["first_ns"][after]) - time_ns
    return before if early else after
