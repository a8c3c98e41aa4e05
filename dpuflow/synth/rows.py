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
    for i in range(width):
        rows[:, at + i] = np.asarray(value >> 8 * (width - 1 - i) & 0xFF, np.uint8)


def put_little(rows: Bytes, at: int, width: int, value: Numbers | int) -> None:
    """Little endian."""
    for i in range(width):
        rows[:, at + i] = np.asarray(value >> 8 * i & 0xFF, np.uint8)


def internet_sum(rows: Bytes) -> Numbers:
    """The sum of each row's 16-bit words (RFC 1071), not yet folded; an odd last byte is a word's first."""
    words = rows if rows.shape[1] % 2 == 0 else np.pad(rows, ((0, 0), (0, 1)))
    high = words[:, ::2].sum(axis=1, dtype=np.int64)
    return np.asarray((high << 8) + words[:, 1::2].sum(axis=1, dtype=np.int64), np.int64)
