"""Perfetto's packets as bytes: the few fields that a trace of slices needs.

Field numbers: perfetto.dev/docs/reference/trace-packet-proto (TracePacket, TrackEvent, TrackDescriptor,
InternedData, DebugAnnotation). The perfetto package would build the same for several
times the CPU; the tests read every trace with its decoder.
"""

from __future__ import annotations

from struct import pack
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SLICE_BEGIN, SLICE_END, INSTANT = 1, 2, 3
_SEQUENCE: Final = 1
_CLEARED, _NEEDS = 1, 2  # sequence_flags
_NAMES, _KEYS, _TEXTS = 2, 3, 29  # InternedData: event_names, debug_annotation_names, ..._string_values


_LAST: Final = [bytes([n]) if n < 128 else bytes([n & 127 | 128, n >> 7]) for n in range(1 << 14)]
_MORE: Final = [bytes([n & 127 | 128, n >> 7 | 128]) for n in range(1 << 14)]
"""Two groups at a time: half of what a trace takes is numbers."""


def varint(value: int) -> bytes:
    """Base 128, least significant group first; negative numbers as 64 bits."""
    if 0 <= value < 1 << 14:
        return _LAST[value]
    value &= (1 << 64) - 1
    parts = []
    while value >= 1 << 14:
        parts.append(_MORE[value & 16383])
        value >>= 14
    parts.append(_LAST[value])
    return b"".join(parts)


def number(field: int, value: int) -> bytes:
    """A field of wire type 0."""
    return _LAST[field << 3] + varint(value)


def block(field: int, value: bytes) -> bytes:
    """A field of wire type 2: text, bytes or a message."""
    return _LAST[field << 3 | 2] + varint(len(value)) + value


_INTEGER: Final = varint(4 << 3)
_END: Final = number(9, SLICE_END)
_TRAILER: Final = number(10, _SEQUENCE) + number(13, _NEEDS)


class Trace:
    """Packets written to ``file`` as they come; names and texts are written once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._write = file.write
        self._known: dict[tuple[int, str], bytes] = {}
        self._write(block(1, number(10, _SEQUENCE) + number(13, _CLEARED)))

    def process(self, uuid: int, pid: int, name: str) -> None:
        """A track that others belong to."""
        process = number(1, pid) + block(6, name.encode())
        self._write(block(1, block(60, number(1, uuid) + block(3, process)) + number(10, _SEQUENCE)))

    def track(self, uuid: int, parent: int, name: str) -> None:
        """A track of slices."""
        described = number(1, uuid) + block(2, name.encode()) + number(5, parent)
        self._write(block(1, block(60, described) + number(10, _SEQUENCE)))

    def slice(
        self, track: int, span_ns: tuple[int, int], name: str, notes: Iterable[tuple[str, object]],
        flows: tuple[int | None, int | None] = (None, None),
    ) -> None:  # fmt: skip
        """What went on from begin to end; ``flows``: the arrow that starts here, the one that ends here."""
        self._event(SLICE_BEGIN, track, span_ns[0], name, notes, flows)
        self._write(
            block(1, number(8, span_ns[1]) + _TRAILER + block(11, number(9, SLICE_END) + number(11, track)))
        )

    def instant(self, track: int, at_ns: int, name: str, notes: Iterable[tuple[str, object]]) -> None:
        """Something without length."""
        self._event(INSTANT, track, at_ns, name, notes, (None, None))

    def _event(
        self, kind: int, track: int, at_ns: int, name: str, notes: Iterable[tuple[str, object]],
        flows: tuple[int | None, int | None],
    ) -> None:  # fmt: skip
        parts = [number(9, kind), number(11, track), self._said(10, _NAMES, name)]
        for key, value in notes:
            if type(value) is int:
                parts.append(block(4, self._said(1, _KEYS, key) + _INTEGER + varint(value)))
            elif value is not None:
                parts.append(block(4, self._said(1, _KEYS, key) + self._other(value)))
        for field, flow in ((47, flows[0]), (48, flows[1])):
            if flow is not None:
                parts.append(varint(field << 3 | 1) + pack("<Q", flow))
        self._write(block(1, number(8, at_ns) + _TRAILER + block(11, b"".join(parts))))

    def _other(self, value: object) -> bytes:
        if isinstance(value, float):
            return varint(5 << 3 | 1) + pack("<d", value)
        return self._said(17, _TEXTS, str(value))

    def _said(self, field: int, kind: int, text: str) -> bytes:
        """A field with the number that stands for ``text``, which is written when it is first used."""
        known = self._known.get((kind, text))
        if known is None:
            iid = len(self._known) + 1
            known = self._known[kind, text] = number(field, iid)
            self._write(
                block(
                    1,
                    _TRAILER
                    + block(12, block(kind, number(1, iid) + block(2, text.encode("utf-8", "replace")))),
                )
            )
        return known
