"""The matching kernel against a slow twin."""

from __future__ import annotations

import numpy as np
import pytest

from dpuflow.kernels import match
from dpuflow.schema.rows import NEVER

PARTIAL, HIDDEN, GAP = match.PARTIAL, match.HIDDEN, match.GAP


def naive_group(rows: list[dict[str, int]], slack: int) -> list[list[int]]:
    """Transfers as lists of sightings, by the rule in words of ``match.group``."""
    transfers: list[list[int]] = []
    for key in sorted({r["key"] for r in rows}):
        same = [i for i, r in enumerate(rows) if r["key"] == key]
        same.sort(key=lambda i: rows[i]["first"])
        open_one: list[int] = []
        for i in same:
            r, mates = rows[i], [rows[j] for j in open_one]
            acks = [m["acked"] for m in mates if m["acked"] != NEVER]
            new = not open_one
            new = new or any(m["capture"] == r["capture"] for m in mates)
            new = new or any(
                m["span"] != r["span"] and not (m["flags"] | r["flags"]) & (PARTIAL | GAP) for m in mates
            )
            new = new or (bool(acks) and r["first"] > min(acks) + slack)
            if new and open_one:
                transfers.append(open_one)
                open_one = []
            open_one.append(i)
        transfers.append(open_one)
    return transfers


def naive_choice(rows: list[dict[str, int]], members: list[int]) -> tuple[int, int, int]:
    """Sender, receiver and header sighting of a transfer, members being in order of time."""

    def cut(i: int) -> int:
        return 10 if rows[i]["flags"] & PARTIAL else 0

    sender = max(members, key=lambda i: rows[i]["near"] - cut(i))
    receiver = min(reversed(members), key=lambda i: rows[i]["near"] + cut(i))
    clear = [i for i in members if not rows[i]["flags"] & (HIDDEN | match.UNFRAMED)]
    whole = [i for i in clear if not rows[i]["flags"] & GAP]
    header = sender
    if sender not in whole and whole:
        header = whole[-1]
    elif sender not in clear and clear:
        header = clear[0]
    return sender, receiver, header


def run_group(
    rows: list[dict[str, int]], slack: int
) -> tuple[list[list[int]], np.ndarray, np.ndarray, np.ndarray]:
    column = {
        name: np.array([r[name] for r in rows], kind)
        for name, kind in (("key", "i8"), ("capture", "u2"), ("first", "i8"), ("acked", "i8"), ("span", "i8"),
                           ("near", "u1"), ("flags", "u1"))
    }  # fmt: skip
    n = len(rows)
    order = np.argsort(column["key"], kind="stable")
    owner, gives = np.full(n, -1, np.int64), np.zeros(n, np.uint8)
    sent, shared = np.zeros(n, np.int64), np.zeros(n, np.uint8)
    column["flow"], column["slack"] = np.zeros(n, np.int64), np.array([slack])
    made = match.group(order, *column.values(), owner, gives, sent, shared) if n else 0
    members: list[list[int]] = [[] for _ in range(made)]
    for i in order.tolist():
        members[owner[i]].append(i)
    return members, gives, sent, shared


@pytest.mark.parametrize("seed", range(30))
def test_group_and_its_twin(seed: int) -> None:
    random = np.random.default_rng(seed)
    times = random.permutation(2000)  # no two alike, so that order is told
    rows = [
        {
            "key": int(random.integers(0, 12)),
            "capture": int(random.integers(0, 4)),
            "first": int(times[i]),
            "acked": int(times[i]) + int(random.integers(0, 300)) if random.random() < 0.6 else NEVER,
            "span": int(random.choice([8, 8, 8, 9])),
            "near": int(random.integers(0, 3)),
            "flags": int(random.choice([0, 0, 0, 1, 2, 4, 8, 9, 12, 16, 128])),
        }
        for i in range(int(random.integers(1, 80)))
    ]
    slack = int(random.choice([0, 50]))
    members, gives, sent, shared = run_group(rows, slack)
    assert members == naive_group(rows, slack)
    for transfer, of in enumerate(members):
        sender, receiver, header = naive_choice(rows, of)
        expected = dict.fromkeys(of, 0)
        for i, bit in ((sender, match.SENDER), (receiver, match.RECEIVER), (header, match.HEADER)):
            expected[i] |= bit
        assert {i: int(gives[i]) for i in of} == expected
        assert sent[transfer] == rows[sender]["first"]
        assert shared[transfer] == np.bitwise_and.reduce([rows[i]["flags"] for i in of]) & (
            PARTIAL | HIDDEN | GAP
        )


def test_group_of_nothing_and_of_one() -> None:
    assert run_group([], 0)[0] == []
    one = {"key": 5, "capture": 0, "first": 7, "acked": NEVER, "span": 1, "near": 1, "flags": 0}
    members, gives, sent, _ = run_group([one], 0)
    assert members == [[0]]
    assert gives[0] == match.SENDER | match.RECEIVER | match.HEADER
    assert sent[0] == 7
