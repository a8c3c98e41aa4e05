"""Numbers in frames, against the same byte by byte."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from dpuflow.synth.rows import internet_sum, put, put_little


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_numbers_stand_where_they_belong(width: int) -> None:
    rng = np.random.default_rng(width)
    values = rng.integers(0, 1 << (8 * width - (width == 8)), 30)
    wanted = rng.integers(0, 256, (30, 20), np.uint8)
    for write, order in ((put, "big"), (put_little, "little")):
        for value in (values, int(values[0])):
            rows = wanted.copy()
            write(rows[:, 4:], 3, width, value)
            for row, before, number in zip(rows, wanted, np.broadcast_to(value, 30).tolist(), strict=True):
                after = bytearray(before.tobytes())
                after[7 : 7 + width] = number.to_bytes(width, order)
                assert row.tobytes() == after


@pytest.mark.parametrize("shape", [(1, 40), (1, 41), (40, 20), (40, 7)])
def test_the_sum_is_of_words(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    padded = [row.tobytes() + b"\0" * (shape[1] % 2) for row in rows]
    assert internet_sum(rows).tolist() == [sum(struct.unpack(f">{len(row) // 2}H", row)) for row in padded]
