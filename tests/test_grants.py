"""What clear-to-send entries say, flow by flow, against a plain twin."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dpuflow.kernels.grants import N_WORDS, WORD_LENGTH, WORD_PLACES, WORD_ROW, read_layouts
from dpuflow.messages.roles import ENTRIES

COLUMN = {int(place): k for k, place in enumerate(WORD_PLACES)}
LAYOUTS = np.array([[e.unit, e.tag, COLUMN[e.tag], e.counter, COLUMN[e.counter]] for e in ENTRIES], np.int64)


def twin(words: np.ndarray, flow: list[int], psn: np.ndarray, size: np.ndarray) -> list[tuple[int, int]]:
    """(index, tag) of one flow's entries."""
    shortest = min(int(words[i, WORD_LENGTH]) for i in flow)
    for entry in ENTRIES:
        bits = 32 if shortest >= entry.counter + 4 else 16
        if shortest < entry.counter + 2 or any(size[i] % entry.unit for i in flow):
            continue
        index = [int(words[i, COLUMN[entry.counter]]) for i in flow]
        expected = [int(psn[i]) % (1 << 24) + 1 for i in flow]
        low = 1 << min(bits, 24)  # PSNs have 24 bits
        both = list(pairwise(zip(index, expected, strict=True)))
        steps = [(b - a - (y - x)) % low == 0 for (a, x), (b, y) in both]
        if len(flow) == 1:
            if (index[0] - expected[0]) % (1 << bits):
                continue
        elif not any(index) or 2 * sum(steps) <= len(steps):
            continue
        if bits == 16:
            index = [
                e + (i - e + (1 << 15)) % (1 << 16) - (1 << 15) for i, e in zip(index, expected, strict=True)
            ]
        tagged = shortest >= entry.tag + 4
        return [
            (i % (1 << 32), int(words[k, COLUMN[entry.tag]]) if tagged else 0)
            for i, k in zip(index, flow, strict=True)
        ]
    return [(int(psn[i]) % (1 << 24) + 1, 0) for i in flow]


@pytest.mark.parametrize("seed", range(40))
def test_index_and_tag_match_the_twin(seed: int) -> None:
    choice = np.random.default_rng(seed)
    n = 60
    bounds = np.r_[0, np.sort(choice.choice(np.arange(1, n), 5, replace=False)), n]
    order = choice.permutation(n)
    words = choice.integers(0, 1 << 32, (n, N_WORDS)).astype(np.uint32)
    words[:, WORD_ROW] = np.arange(n)
    psn, size = np.zeros((2, n), np.int64)
    flows = [order[a:b].tolist() for a, b in pairwise(bounds)]
    for number, flow in enumerate(flows):
        entry = ENTRIES[choice.integers(len(ENTRIES))]
        first = (1 << 24) + int(choice.choice([5, (1 << 24) - 4]))  # some run over the end of the PSNs
        psn[flow] = first + np.arange(len(flow))
        size[flow] = 64 if number % 2 else entry.unit
        words[flow, WORD_LENGTH] = entry.counter + choice.choice([1, 2, 3, 4, 20])
        if choice.random() < 0.8:
            words[flow, COLUMN[entry.counter]] = psn[flow] % (1 << 24) + 1 + choice.integers(0, 2) * (1 << 24)
        if choice.random() < 0.3:
            words[flow[0], COLUMN[entry.counter]] += 7
    found = np.zeros((n, 3), np.uint32)
    read_layouts(words, order, bounds, psn, size, LAYOUTS, found)
    assert found[:, 0].all()
    for flow in flows:
        assert [(int(found[i, 1]), int(found[i, 2])) for i in flow] == twin(words, flow, psn, size)
