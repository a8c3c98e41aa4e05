"""Numbers into columns of frames: packets x bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    Bytes: TypeAlias = NDArray[np.uint8]
    Numbers: TypeAlias = NDArray[np.int64]


def put(rows: Bytes, at: int, width: int, value: Numbers | int) -> None:
    """Big endian."""
    _put(rows, at, width, value, ">")


def put_little(rows: Bytes, at: int, width: int, value: Numbers | int) -> None:
    """Little endian."""
    _put(rows, at, width, value, "<")


def _put(rows: Bytes, at: int, width: int, value: Numbers | int, order: str) -> None:
    if width == 3:  # no number of NumPy's
        high, low = (at, at + 1) if order == ">" else (at + 2, at)
        rows[:, high] = np.asarray(value >> 16 & 0xFF, np.uint8)
        at, width, value = low, 2, value & 0xFFFF
    cells = rows[:, at : at + width].view(f"{order}u{width}")[:, 0]
    cells[:] = value & (1 << 8 * width) - 1 if isinstance(value, int) else value


def internet_sum(rows: Bytes) -> Numbers:
    """The sum of each row's 16-bit words (RFC 1071), not yet folded; an odd last byte is a word's first."""
    words = rows if rows.shape[1] % 2 == 0 else np.pad(rows, ((0, 0), (0, 1)))
    if len(words) < words.shape[1]:
        return np.asarray(words.view(">u2").sum(axis=1, dtype=np.int64), np.int64)
    total = np.zeros(len(words), np.int64)
    for at in range(0, words.shape[1], 2):
        total += words[:, at : at + 2].view(">u2")[:, 0]
    return total
