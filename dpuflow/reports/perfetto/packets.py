"""Perfetto's packets as bytes: the few fields that a trace of slices and counters needs, many rows at a time.

Field numbers: perfetto.dev/docs/reference/trace-packet-proto (TracePacket, TrackEvent, TrackDescriptor,
CounterDescriptor, InternedData, DebugAnnotation). The perfetto package would build the same for many
times the CPU; the tests read every trace with its decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.reports.tidy import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Column = NDArray[np.generic] | Sequence[str | None]

SLICE_BEGIN, SLICE_END, INSTANT, COUNTER = 1, 2, 3, 4
COUNTS, BYTES = 2, 3  # CounterDescriptor.Unit
NONE: Final = -(1 << 62)
"""Stands for a number that is not known."""
_SEQUENCE: Final = 1
_CLEARED, _NEEDS = 1, 2  # sequence_flags
_NAMES, _KEYS, _TEXTS = 2, 3, 29  # InternedData: event_names, debug_annotation_names, ..._string_values
_AT_ONCE: Final = 1 << 14
"""So many rows are made into bytes in one go: some 5 MB of memory."""


_SHORT: Final = [bytes([n]) if n < 128 else bytes([n & 127 | 128, n >> 7]) for n in range(1 << 14)]


def varint(value: int) -> bytes:
    """Base 128, least significant group first; negative numbers as 64 bits."""
    if 0 <= value < 1 << 14:
        return _SHORT[value]
    value &= (1 << 64) - 1
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def number(field: int, value: int) -> bytes:
    """A field of wire type 0."""
    return varint(field << 3) + varint(value)


def block(field: int, value: bytes) -> bytes:
    """A field of wire type 2: text, bytes or a message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


class Ragged(NamedTuple):
    """A piece of bytes for each row: those of ``data`` where ``kept`` is true."""

    data: NDArray[np.uint8]
    kept: NDArray[np.bool_]

    def where(self, rows: NDArray[np.bool_]) -> Ragged:
        """Nothing in the other rows."""
        return Ragged(self.data, self.kept & rows[:, None])

    def lengths(self) -> NDArray[np.int64]:
        """How many bytes each row has."""
        found: NDArray[np.int64] = self.kept.sum(axis=1, dtype=np.int64)
        return found


def constant(value: bytes, rows: int) -> Ragged:
    """The same bytes in each row."""
    data = np.broadcast_to(np.frombuffer(value, np.uint8), (rows, len(value)))
    return Ragged(data, np.ones(data.shape, np.bool_))


def varints(values: NDArray[np.int64]) -> Ragged:
    """``varint`` of each row."""
    rest = values.astype(np.uint64)
    widest = max(-(-int(rest.max(initial=0)).bit_length() // 7), 1)
    shifts = np.arange(widest, dtype=np.uint64) * np.uint64(7)
    groups = rest[:, None] >> shifts
    kept = groups != 0
    kept[:, 0] = True
    data = (groups & np.uint64(127)).astype(np.uint8)
    data[:, :-1] |= kept[:, 1:].astype(np.uint8) << 7
    return Ragged(data, kept)


def fixed(values: NDArray[np.generic]) -> Ragged:
    """Eight bytes a row."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), 8)
    return Ragged(data, np.ones(data.shape, np.bool_))


def joined(parts: Sequence[Ragged]) -> Ragged:
    """Pieces of a row one after the other."""
    return Ragged(np.hstack([part.data for part in parts]), np.hstack([part.kept for part in parts]))


def blocks(field: int, inner: Sequence[Ragged]) -> Ragged:
    """``block`` of each row."""
    whole = joined(inner)
    return joined([constant(varint(field << 3 | 2), len(whole.data)), varints(whole.lengths()), whole])


_TRAILER: Final = number(10, _SEQUENCE) + number(13, _NEEDS)


@dataclass(frozen=True, slots=True)
class Slices:
    """What went on, row by row; ``notes`` are texts, or numbers with NONE (NaN) where not known.

    ``starts``, ``ends``: numbers of the arrows that begin and end there, 0 for none.
    """

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    names: Sequence[str]
    notes: Mapping[str, Column]
    starts: NDArray[np.uint64] | None = None
    ends: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.begin_ns)

    def take(self, rows: NDArray[np.int64]) -> Slices:
        """Some rows, in that order."""

        def taken(column: Column) -> Column:
            return column[rows] if isinstance(column, np.ndarray) else [column[n] for n in rows.tolist()]

        return Slices(
            self.begin_ns[rows], self.end_ns[rows], [self.names[n] for n in rows.tolist()],
            {key: taken(column) for key, column in self.notes.items()},
            None if self.starts is None else self.starts[rows],
            None if self.ends is None else self.ends[rows],
        )  # fmt: skip


class Trace:
    """Packets written to ``file`` as they come; names and texts are written once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._write = file.write
        self._known: dict[tuple[int, str], int] = {}
        self._write(block(1, number(10, _SEQUENCE) + number(13, _CLEARED)))

    def process(self, uuid: int, pid: int, name: str) -> None:
        """A track that others belong to."""
        process = number(1, pid) + block(6, name.encode())
        self._write(block(1, block(60, number(1, uuid) + block(3, process)) + number(10, _SEQUENCE)))

    def track(self, uuid: int, parent: int, name: str, unit: int | None = None) -> None:
        """A track of slices; with a unit one of a counter."""
        described = number(1, uuid) + block(2, name.encode()) + number(5, parent)
        if unit is not None:
            described += block(8, number(3, unit))
        self._write(block(1, block(60, described) + number(10, _SEQUENCE)))

    def slices(self, tracks: NDArray[np.int64], rows: Slices) -> None:
        """Each row on its track, in the order that they have."""
        for at in range(0, len(rows), _AT_ONCE):
            part = np.arange(at, min(at + _AT_ONCE, len(rows)))
            some, track = rows.take(part), number_column(11, tracks[part])
            begin = self._packets(some.begin_ns, [constant(number(9, SLICE_BEGIN), len(some)), track,
                                                  *self._said(some)])  # fmt: skip
            end = self._packets(some.end_ns, [constant(number(9, SLICE_END), len(some)), track])
            self._put(joined([begin, end]))

    def instants(self, track: int, rows: Slices) -> None:
        """The same without length: only where each begins counts."""
        kind = constant(number(9, INSTANT) + number(11, track), len(rows))
        if len(rows):
            self._put(self._packets(rows.begin_ns, [kind, *self._said(rows)]))

    def counter(self, track: int, times_ns: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """What the counter of ``track`` is from each time on."""
        for at in range(0, len(times_ns), _AT_ONCE):
            part = slice(at, at + _AT_ONCE)
            kind = constant(number(9, COUNTER) + number(11, track), len(values[part]))
            self._put(self._packets(times_ns[part], [kind, number_column(30, values[part])]))

    def _put(self, rows: Ragged) -> None:
        self._write(rows.data[rows.kept].tobytes())

    def _packets(self, times_ns: NDArray[np.int64], event: Sequence[Ragged]) -> Ragged:
        head = [number_column(8, times_ns), constant(_TRAILER, len(times_ns))]
        return blocks(1, [*head, blocks(11, event)])

    def _said(self, rows: Slices) -> list[Ragged]:
        """Names, notes and arrows of events."""
        parts = [number_column(10, self._texts(_NAMES, rows.names))]
        for key, column in rows.notes.items():
            named = constant(number(1, int(self._texts(_KEYS, [key])[0])), len(rows))
            if not isinstance(column, np.ndarray):
                said = number_column(
                    17, self._texts(_TEXTS, ["" if each is None else each for each in column])
                )
                parts.append(blocks(4, [named, said]).where(np.array([each is not None for each in column])))
            elif column.dtype.kind == "f":
                value = joined([constant(varint(5 << 3 | 1), len(rows)), fixed(column)])
                parts.append(blocks(4, [named, value]).where(~np.isnan(column)))
            else:
                parts.append(blocks(4, [named, number_column(4, column)]).where(column != NONE))
        for field, arrows in ((47, rows.starts), (48, rows.ends)):
            if arrows is not None:
                arrow = joined([constant(varint(field << 3 | 1), len(rows)), fixed(arrows)])
                parts.append(arrow.where(arrows != 0))
        return parts

    def _texts(self, kind: int, texts: Iterable[str]) -> NDArray[np.int64]:
        """The numbers that stand for texts, which are written, fit to be shown, where they are first used."""
        known, new, found = self._known, [], []
        for text in texts:
            iid = known.get((kind, text))
            if iid is None:
                iid = known[kind, text] = len(known) + 1
                new.append(block(kind, number(1, iid) + block(2, clean(text).encode())))
            found.append(iid)
        if new:
            self._write(block(1, _TRAILER + block(12, b"".join(new))))
        return np.array(found, np.int64)


def number_column(field: int, values: NDArray[np.generic]) -> Ragged:
    """``number`` of each row."""
    return joined([constant(varint(field << 3), len(values)), varints(values.astype(np.int64))])
