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
    from collections.abc import Callable, Iterator, Sequence

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
_LOOKS = 16 * _TRIES  # and places on the way to them,
_SPARE = 64  # which a flow has once, and beyond it so many for each of its gaps


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
    numbered = _numbered(rows, order)
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


def fill(
    rows: Rows, gap: Gap, found: int, usage: Usage, has_room: Callable[[int], bool]
) -> Iterator[list[Part] | None]:
    """The frames of each run of a gap, one after the other, None where it is not certain.

    ``found``: FINs in runs before it; ``has_room``: whether there is room for so many frames.
    """
    fillings: Sequence[Filling | None] | None = None
    if gap.missing < 0:
        # Without a number on both sides only what holds no numbered frame is certain.
        fillings = _alone(rows, gap, found, usage)
    elif len(gap.runs) <= _TRIES:
        fillings = _Search(rows, gap, usage).certain(found)
    number: int | None = int(rows["sub"][gap.before]) if gap.before >= 0 else None
    for run, filling in zip(gap.runs, fillings or [None] * len(gap.runs), strict=True):
        if filling is None:
            number = None  # from here on the numbers are not known
            yield None
            continue
        count = len(filling.frames)
        numbers = [((number or 0) + 1 + k) % _SEQUENCES for k in range(count)]
        number = None if number is None else number + count
        fits = has_room(filling.fins + filling.requests + count)
        yield _parts(rows, gap, run, filling, numbers, usage) if fits else None


def _alone(rows: Rows, gap: Gap, found: int, usage: Usage) -> list[Filling | None]:
    """As ``fill`` where a numbered frame was read on one side of the gap at most: at a stream's ends.

    At the end further frames may hide, of the sizes usual there.
    """
    fillings: list[Filling | None] = []
    usual = usage.around(gap) if gap.before >= 0 and gap.after < 0 else frozenset[int]()
    for run in gap.runs:
        size = int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]])
        fins = usage.fins(run, found)
        most = size // min(usual, default=size + 1)
        ways = [
            filling
            for count in range(min(most, _TRIES) + 1)
            for filling in _options(size, fins, count, usual)
            if not filling.odd
        ]
        fillings.append(ways[0] if len(ways) == 1 else None)
        if len(ways) != 1:
            usual = frozenset()
        else:
            found += ways[0].fins
    return fillings


class _Search:
    """Looks for the ways to spread a gap's numbered frames over its runs."""

    def __init__(self, rows: Rows, gap: Gap, usage: Usage) -> None:
        self._gap, self._usage = gap, usage
        self._usual = usage.around(gap)
        self._number = int(rows["sub"][gap.before]) + 1
        self._sizes = [int(rows["seq_end"][run[-1]]) - int(rows["seq"][run[0]]) for run in gap.runs]
        # No frame is smaller than a MATCH without data; a number that leapt would ask for thousands of them.
        rooms = [size // _MATCH for size in self._sizes]
        self._rooms = [sum(rooms[k:]) for k in range(len(rooms) + 1)]  # most frames in the runs from each on
        self._ways: list[tuple[Filling, ...]] = []
        self._left = min(_LOOKS, usage.looks)

    def certain(self, found: int) -> tuple[Filling, ...] | None:
        """The one way that is likelier than all others; ``found``: FINs in runs before."""
        before = self._left
        self._spread(0, self._gap.missing, found, ())
        self._usage.looks -= before - max(self._left, 0)
        ways = self._ways
        if not ways or len(ways) >= _TRIES or self._left < 0:
            return None
        fewest = min(sum(filling.odd for filling in way) for way in ways)
        best = {way for way in ways if sum(filling.odd for filling in way) == fewest}
        # With numbers to place, bare RNDVs are likelier than MATCHes that happen to fit.
        bare = {way for way in best if all(size == _RNDV for filling in way for size in filling.frames)}
        best = bare or best
        return best.pop() if len(best) == 1 else None

    def _spread(self, at: int, missing: int, found: int, so_far: tuple[Filling, ...]) -> None:
        """All ways to spread ``missing`` frames over the runs from ``at`` on, behind those ``so_far``."""
        if len(self._ways) >= _TRIES:
            return
        start = self._number + self._gap.missing - missing
        rest, size = self._rooms[at + 1], self._sizes[at]
        fins = self._usage.fins(self._gap.runs[at], found)
        for count in range(max(missing - rest, 0), min(missing, size // _MATCH) + 1):
            self._left -= 1
            if self._left < 0:
                return
            for filling in _options(size, fins, count, self._usual, self._usage, start):
                way = (*so_far, filling)
                if at + 1 < len(self._sizes):
                    self._spread(at + 1, missing - count, found + filling.fins, way)
                else:
                    self._ways.append(way)


def _options(
    size: int, fins: int, count: int, usual: frozenset[int], usage: Usage | None = None, start: int = 0
) -> Iterator[Filling]:
    """The ways to fill a run of ``size`` bytes with so many FINs and numbered frames.

    ``usual``: sizes of frames around it; ``usage`` tells what those numbered from ``start`` on are likely
    to be.
    """
    expected = usage.total(start, count) if usage else 0
    for requests in range(_REQUESTS):
        left = size - fins * _FIN - requests * _REQUEST
        if not count and not left:
            yield Filling(fins, requests, (), 0)
        if not count or left < count * _MATCH:
            continue
        if usage and expected == left:
            yield Filling(fins, requests, usage.sizes(start, count), 0)
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


def _numbered(rows: Rows, order: Ints) -> Ints:
    """Of a flow's rows those of frames that have a number."""
    numbered: Ints = order[np.isin(rows["wire"][order], (Wire.OB1_MATCH, Wire.OB1_RNDV))]
    return numbered


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

    def __init__(self, rows: Rows, order: Ints, gaps: int) -> None:
        """``order``: the flow's rows in stream order; ``gaps``: how many stretches of it are to be filled."""
        self.looks = _LOOKS + _SPARE * gaps  # that are left: filling takes time in proportion to the flow
        numbered = _numbered(rows, order)
        self._rows = rows[numbered]
        self._all, self._seq = rows, self._rows["seq"].astype(np.int64)
        self._size = self._rows["seq_end"].astype(np.int64) - self._seq
        puts, fins = (order[rows["wire"][order] == wire] for wire in (Wire.OB1_PUT, Wire.OB1_FIN))
        self._put_begins, self._put_ends = (
            np.sort(rows[name][puts].astype(np.int64)) for name in ("seq", "seq_end")
        )
        self._fin_begins = np.sort(rows["seq"][fins].astype(np.int64))
        self._after: Counter[tuple[Kind, Kind]] = Counter()
        self._places: dict[int, Kind] = {}  # within the period
        self._period = 0
        self._of_size: dict[int, set[Kind]] = {}
        self._between: dict[tuple[Kind | None, Kind | None, int], Kind | None] = {}
        self._totals = np.zeros(1, np.int64)  # bytes of the period's first frames
        self._unknown = np.zeros(1, np.int64)  # and how many of them nobody saw
        self._learned = False

    def around(self, gap: Gap) -> frozenset[int]:
        """Sizes on the wire of the numbered frames around a gap."""
        at = int(np.searchsorted(self._seq, int(self._all["seq"][gap.runs[0][0]])))
        return frozenset({_RNDV, *self._size[max(0, at - _AROUND) : at + _AROUND].tolist()})

    def fins(self, run: Ints, found: int) -> int:
        """FINs in a run: each PUT before it has its FIN before it, in it or right after it.

        ``found``: FINs in runs before it.
        """
        since, until = int(self._all["seq"][run[0]]), int(self._all["seq_end"][run[-1]])
        begins, ends, fins = self._put_begins, self._put_ends, self._fin_begins
        owed = int(np.searchsorted(ends, since, "right")) - int(np.searchsorted(fins, since)) - found
        following = int(np.searchsorted(begins, until))
        there = len(fins) if following == len(begins) else int(np.searchsorted(fins, begins[following]))
        return max(0, owed - (there - int(np.searchsorted(fins, until))))

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
            sizes = [self._places[at].size if at in self._places else 0 for at in range(self._period)]
            self._totals = np.cumsum([0, *sizes])
            self._unknown = np.cumsum([0, *(at not in self._places for at in range(self._period))])

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

    def total(self, number: int, count: int) -> int:
        """Bytes on the wire of so many frames from a number on; 0 where that is not known."""
        if not self._learned:
            self._learn()
        if not self._period or not count:
            return 0
        first = number % _SEQUENCES
        last = first + count
        parts = [(first, min(last, _SEQUENCES)), (0, max(last - _SEQUENCES, 0))]  # numbers begin anew
        unknown, total = (
            sum(self._until(sums, end) - self._until(sums, begin) for begin, end in parts)
            for sums in (self._unknown, self._totals)
        )
        return 0 if unknown else total

    def _until(self, sums: Ints, number: int) -> int:
        """The sum over the numbers before ``number``, by sums over the period."""
        rounds, rest = divmod(number, self._period)
        return rounds * int(sums[-1]) + int(sums[rest])

    def sizes(self, number: int, count: int) -> tuple[int, ...]:
        """Sizes on the wire of so many frames from a number on, where ``total`` knows them."""
        kinds = [self.at((number + k) % _SEQUENCES) for k in range(count)]
        return tuple(kind.size for kind in kinds if kind)

    def between(self, before: Kind | None, after: Kind | None, size: int) -> Kind | None:
        """The kind of that size that most often stands between two others; None where none ever did."""
        if not self._learned:
            self._learn()
        asked = before, after, size
        if asked not in self._between:
            often = {
                kind: (self._after[before, kind] if before else 0)
                + (self._after[kind, after] if after else 0)
                for kind in self._of_size.get(size, ())
            }
            best = max(often.values(), default=0)
            found = [kind for kind, times in often.items() if times == best]
            self._between[asked] = found[0] if best and len(found) == 1 else None
        return self._between[asked]


def _like(rows: Rows, gap: Gap, size: int, time_ns: int) -> int:
    """Of the frames around a gap the one of the same call: the one of its size, else the nearer in time."""
    around = [row for row in (gap.before, gap.after) if row >= 0]
    same = [row for row in around if int(rows["seq_end"][row]) - int(rows["seq"][row]) == size]
    if len(around) == 1 or len(same) == 1:
        return (same or around)[0]
    before, after = around
    early = time_ns - int(rows["last_ns"][before]) <= int(rows["first_ns"][after]) - time_ns
    return before if early else after
