"""Exchanges of RoCE messages without keys: clear-to-send entries and data in turn, against a plain twin."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dpuflow.exchanges.build import build_exchanges
from dpuflow.schema.rows import NEVER, NONE32, TRANSFER, Role, Wire


def rows_of(script: list[tuple[int, int, Role, Wire, int]]) -> np.ndarray:
    """Messages (src, dst, role, wire, bytes), one a microsecond."""
    rows = TRANSFER.zeros(len(script))
    for at, (row, (src, dst, role, wire, size)) in enumerate(zip(rows, script, strict=True)):
        row["src"], row["dst"], row["role"], row["wire"], row["bytes"] = src, dst, role, wire, size
        row["connection"] = src ^ dst
        row["sent_ns"] = row["sent_end_ns"] = 1_000 * at
        row["arrived_ns"] = row["arrived_end_ns"] = 1_000 * at + 500
        row["acked_ns"], row["packets"], row["seen"] = NEVER, 1, 3
    return rows


def twin(rows: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(src, dst, grant row, data row) in order of the first sign: the i-th grant with the i-th data."""
    grants: dict[tuple[int, int], list[int]] = {}
    data: dict[tuple[int, int], list[int]] = {}
    for at, row in enumerate(rows):
        ends = (int(row["src"]), int(row["dst"]))
        if row["role"] == Role.GRANT:
            grants.setdefault(ends[::-1], []).append(at)
        else:
            data.setdefault(ends, []).append(at)
    found = []
    for ends in grants.keys() | data.keys():
        g, d = grants.get(ends, []), data.get(ends, [])
        for i in range(max(len(g), len(d))):
            found.append((*ends, g[i] if i < len(g) else NONE32, d[i] if i < len(d) else NONE32))
    return sorted(found, key=lambda f: min(f[2:]))


@pytest.mark.parametrize("seed", range(40))
def test_random_turns_match_the_twin(seed: int) -> None:
    choice = random.Random(seed)
    script = []
    for _ in range(choice.randrange(1, 80)):
        src, dst = choice.sample((1, 2, 4), 2)
        grant = choice.random() < 0.5
        script.append((src, dst, Role.GRANT, Wire.ROCE_WRITE, 64) if grant
                      else (src, dst, Role.DATA, Wire.ROCE_WRITE_IMM, choice.randrange(1, 9000)))  # fmt: skip
    rows = rows_of(script)
    found = build_exchanges(rows)
    assert found[["src", "dst", "grant", "data"]].tolist() == twin(rows)
    for row in found:
        assert row["grant_ns"] == (NEVER if row["grant"] == NONE32 else rows["sent_ns"][row["grant"]])
        assert row["data_ns"] == (NEVER if row["data"] == NONE32 else rows["sent_ns"][row["data"]])
        assert row["bytes"] == (0 if row["data"] == NONE32 else rows["bytes"][row["data"]])


def test_a_write_and_its_empty_immediate_are_one_exchange() -> None:
    """NCCL with adaptive routing: the data, then an empty WRITE WITH IMM."""
    write, imm = Wire.ROCE_WRITE, Wire.ROCE_WRITE_IMM
    rows = rows_of([
        (2, 1, Role.GRANT, write, 64), (2, 1, Role.GRANT, write, 64),
        (1, 2, Role.DATA, write, 8192), (1, 2, Role.DATA, imm, 0),
        (1, 2, Role.DATA, write, 4096), (1, 2, Role.DATA, imm, 0),
    ])  # fmt: skip
    found = build_exchanges(rows)
    assert found[["grant", "data", "bytes"]].tolist() == [(0, 2, 8192), (1, 4, 4096)]
    assert found["arrived_end_ns"].tolist() == [3_500, 5_500]
    assert found["packets"].tolist() == [2, 2]


def test_an_empty_slice_is_an_exchange_of_its_own() -> None:
    """Without adaptive routing a second slice may be empty, and is sent all the same."""
    rows = rows_of([(1, 2, Role.DATA, Wire.ROCE_WRITE_IMM, 2048), (1, 2, Role.DATA, Wire.ROCE_WRITE_IMM, 0)])
    assert build_exchanges(rows)["bytes"].tolist() == [2048, 0]
