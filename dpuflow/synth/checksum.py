"""The invariant CRC of many RoCE packets at once (IBA volume 1 7.8.1, annex A17.3.3).

CRC-32 is linear: the state after a payload is the state before it, moved over as many zero bytes, combined
with the payload's own. So payloads of a few lengths are summed once, and only headers are walked packet by
packet.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ONES: Final = 0xFFFFFFFF


def _table() -> NDArray[np.uint32]:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0xEDB88320), values >> 1).astype(np.uint32)
    return values


TABLE: Final = _table()
AFTER_LRH: Final = zlib.crc32(b"\xff" * 8) ^ ONES
"""State after the eight ones that stand for the local route header."""


def walk(state: NDArray[np.uint32], rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The states after the bytes of ``rows`` (packets x bytes)."""
    for column in range(rows.shape[1]):
        state = TABLE[(state ^ rows[:, column]) & 0xFF] ^ (state >> 8)
    return state


@lru_cache(maxsize=256)
def _over(payload: bytes) -> tuple[NDArray[np.uint32], int]:
    """Tables that move a state over ``len(payload)`` bytes, and the payload's own state from zero."""
    zeros = bytes(len(payload))
    bits = np.array([zlib.crc32(zeros, (1 << i) ^ ONES) ^ ONES for i in range(32)], np.uint32)
    tables = np.zeros((4, 256), np.uint32)
    for part in range(4):
        for bit in range(8):
            has = (np.arange(256) >> bit & 1).astype(bool)
            tables[part, has] ^= bits[8 * part + bit]
    return tables, zlib.crc32(payload, ONES) ^ ONES


def skip(state: NDArray[np.uint32], payload: bytes) -> NDArray[np.uint32]:
    """The states after ``payload``, the same in all packets."""
    if not payload:
        return state
    tables, own = _over(payload)
    moved = np.full(len(state), own, np.uint32)
    for part in range(4):
        moved ^= tables[part, (state >> (8 * part)) & 0xFF]
    return moved
