"""Kernels that cut streams of messages, against slow twins that follow their definitions word by word."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from dpuflow.kernels import hypotheses as kernels
from dpuflow.kernels import streams as tables
from dpuflow.matching.streams import HOLE, columns_of
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schedules.graph import Plan, dependencies, free_ranks, plan
from dpuflow.schema.rows import EXCHANGE, NEVER

SIGNS = ("offer_ns", "grant_ns", "data_ns", "data_end_ns", "arrived_end_ns", "grant_arrived_ns")
ELEMENT = 16


class Case(NamedTuple):
    """Streams that a plan may or may not explain, with the columns of their rows."""

    plan: Plan
    cuts: int
    rows: np.ndarray
    at: np.ndarray
    end: np.ndarray
    lanes: np.ndarray  # each edge's stream
    sizes: np.ndarray
    starts: np.ndarray
    arrivals: np.ndarray

    def row(self, edge: int, collective: int, message: int, segment: int) -> int:
        place = (collective * int(self.plan.counts[edge]) + message) * self.cuts + segment
        return int(self.rows[self.at[self.lanes[edge]] + place])

    def rows_of(self, edge: int, collective: int) -> list[int]:
        messages = range(int(self.plan.counts[edge]))
        return [self.row(edge, collective, m, s) for m in messages for s in range(self.cuts)]


def random_case(seed: int) -> tuple[Case, int]:
    """A case, and for how many collectives its streams have messages."""
    choice = random.Random(seed)
    algorithm = choice.choice(ALGORITHMS)
    ranks = choice.choice([n for n in range(2, 7) if algorithm.fits(n)])
    the_plan = plan(algorithm, ranks, choice.randrange(ranks) if algorithm.rooted else 0)
    cuts = choice.choice((1, 1, 2, 3)) if algorithm.cuts else 1
    collectives = choice.randrange(1, 5)
    lanes = np.array(choice.sample(range(len(the_plan.edges)), len(the_plan.edges)))
    parts: list[list[int]] = [[] for _ in lanes]
    sizes: list[int] = []
    offsets = np.cumsum([0, *the_plan.counts.tolist()])
    for _ in range(collectives):
        buffer = choice.choice((0, 7_000, 65_536 * ranks))
        wrong = choice.random() < 0.3
        for edge, lane in enumerate(lanes.tolist()):
            for share in the_plan.shares[offsets[edge] : offsets[edge + 1]].tolist():
                whole = round(share * buffer) + (choice.choice((-40, 3, 200)) if wrong else 0)
                each = -(-max(whole, 0) // cuts)
                for segment in range(cuts):
                    hole = choice.random() < 0.03
                    parts[lane].append(HOLE if hole else len(sizes))
                    if not hole:
                        sizes.append(min(each, max(whole, 0) - segment * each))
    for lane in range(len(parts)):  # what a stream holds before and after does not matter
        parts[lane] = [len(sizes)] * choice.randrange(3) + parts[lane]
        parts[lane] += [HOLE] * choice.randrange(2)
    ends = np.cumsum([len(part) for part in parts])
    at = ends - [len(part) - next(i for i, row in enumerate(part) if row != len(sizes)) for part in parts]
    count = len(sizes) + 2  # one that nobody picks, and the one for holes
    times = [choice.choice((NEVER, choice.randrange(400))) for _ in range(2 * count)]
    starts, arrivals = np.array(times[:count]), np.array(times[count:])
    starts[-1] = arrivals[-1] = NEVER
    case = Case(the_plan, cuts, np.concatenate([np.array(p) for p in parts]), at, ends, lanes,
                np.array([*sizes, 999, -1]), starts, arrivals)  # fmt: skip
    return case, collectives


def length_twin(case: Case, kind: int, most: int) -> int:
    room = [
        (int(case.end[lane]) - int(case.at[lane])) // (int(n) * case.cuts)
        for lane, n in zip(case.lanes, case.plan.counts, strict=True)
    ]
    offsets = np.cumsum([0, *case.plan.counts.tolist()])
    for c in range(min(*room, most)):
        messages = [
            (
                float(case.plan.shares[offsets[e] + m]),
                [int(case.sizes[case.row(e, c, m, s)]) for s in range(case.cuts)],
            )
            for e in range(len(case.plan.edges))
            for m in range(int(case.plan.counts[e]))
        ]  # fmt: skip
        seen = [size for _, parts in messages for size in parts if size >= 0]
        units = sum(share / case.cuts for share, parts in messages for size in parts if size >= 0)
        if not seen or (kind == kernels.BARRIER and sum(seen)) or (kind == kernels.SIZED and not sum(seen)):
            return c
        buffer = sum(seen) / max(units, 1e-12)
        for share, parts in messages:
            if min(parts) >= 0 and abs(sum(parts) - share * buffer) > ELEMENT * case.cuts:
                return c
            if any(part not in (max(parts), HOLE) for part in parts[:-1]):
                return c
    return min(*room, most)


@pytest.mark.parametrize("seed", range(150))
def test_how_far_counts_and_sizes_agree(seed: int) -> None:
    case, collectives = random_case(seed)
    for kind in (0, kernels.BARRIER, kernels.SIZED):
        for most in (1, collectives + 5):
            found = kernels.run_length(
                case.rows, case.at, case.end, case.lanes, case.plan.counts, case.plan.shares, case.cuts,
                case.sizes, kind, ELEMENT, most,
            )  # fmt: skip
            assert found == length_twin(case, kind, most)


def contrast_twin(case: Case, collectives: int, longer: int) -> list[int]:
    won = pairs = inner = 0
    for rank in free_ranks(case.plan.algorithm, case.plan.ranks, case.plan.root):
        first: list[int] = []
        later: list[int] = []
        before = None
        for c in range(collectives):
            sent = [int(case.starts[r]) for e, edge in enumerate(case.plan.edges) if edge[0] == rank
                    for r in case.rows_of(e, c)]  # fmt: skip
            heard = [int(case.arrivals[r]) for e, edge in enumerate(case.plan.edges) if edge[1] == rank
                     for r in case.rows_of(e, c)]  # fmt: skip
            events = sorted([(t, 0) for t in heard if t != NEVER] + [(t, 1) for t in sent if t != NEVER])
            begin = min((t for t in sent if t != NEVER), default=np.iinfo(np.int64).max)
            if c:
                first.append(0 if before is None else max(begin - before, 0))
            later += [b - a for (a, _), (b, is_send) in pairwise(events) if is_send and b > begin]
            before = events[-1][0] if events else None
        won += sum(pause < f // longer for f in first for pause in later)
        pairs += len(first) * len(later)
        inner += len(later)
    return [won, pairs, inner]


def causality_twin(case: Case, collectives: int) -> list[int]:
    asked = held = last = 0
    number = {edge: e for e, edge in enumerate(case.plan.edges)}
    for (send, m), (needed, k) in dependencies(case.plan.algorithm, case.plan.ranks, case.plan.root):
        for c in range(collectives):
            inputs = [int(case.arrivals[r]) for e, edge in enumerate(case.plan.edges) if edge[1] == send[0]
                      for r in case.rows_of(e, c)]  # fmt: skip
            for s in range(case.cuts):
                sent = int(case.starts[case.row(number[send], c, m, s)])
                got = int(case.arrivals[case.row(number[needed], c, k, s)])
                if NEVER in (sent, got):
                    continue
                asked += 1
                held += sent >= got
                last += sent >= got and not any(got < other <= sent for other in inputs)
    return [asked, held, last]


@pytest.mark.parametrize("seed", range(150))
def test_what_time_says(seed: int) -> None:
    case, collectives = random_case(seed)
    longer = 1 + seed % 2
    events = case.plan.most_events * case.cuts
    facts = np.zeros(3, np.int64)
    kernels.contrast(
        case.rows, case.at, case.lanes, case.plan.counts, case.cuts, collectives, longer, case.plan.free,
        *case.plan.sends, *case.plan.inputs, case.starts, case.arrivals, np.empty(events, np.int64),
        np.empty(collectives, np.int64), np.empty(collectives * events, np.int64), facts,
    )  # fmt: skip
    assert facts.tolist() == contrast_twin(case, collectives, longer)
    at, needs = case.plan.needs
    facts[:] = 0
    kernels.causality(
        case.rows, case.at, case.lanes, case.plan.counts, case.cuts, collectives, needs, at,
        *case.plan.inputs, case.starts, case.arrivals, np.empty(events, np.int64), facts,
    )  # fmt: skip
    assert facts.tolist() == causality_twin(case, collectives)


@pytest.mark.parametrize("seed", range(60))
def test_heads_of_streams(seed: int) -> None:
    case, _ = random_case(seed)
    parts = [case.rows[low:high].tolist() for low, high in zip(case.at, case.end, strict=True)]
    most = 1 + seed % 7
    alike, shorter = np.zeros((2, len(parts)), np.int64)
    kernels.heads(case.rows, case.at, case.end, case.sizes, most, alike, shorter)
    for stream, rows in enumerate(parts):
        seen = [(i, int(case.sizes[row])) for i, row in enumerate(rows[:most]) if row != HOLE]
        change = next(((i, size) for i, size in seen if size != seen[0][1]), None)
        assert alike[stream] == (len(rows) if change is None else change[0])
        assert shorter[stream] == (change is not None and change[1] < seen[0][1])
    largest = max(int(case.sizes[row]) for rows in parts for row in rows[:most])
    assert kernels.largest(case.rows, case.at, case.end, case.sizes, most) == largest
    heads = [next((int(case.starts[row]) for row in rows if row != HOLE), NEVER) for rows in parts]
    assert kernels.earliest(case.rows, case.at, case.end, case.starts) == heads.index(min(heads))


def test_no_stream_has_anything_left() -> None:
    none = np.zeros(3, np.int64)
    assert kernels.earliest(none, none, none, none) == -1
    assert kernels.largest(none, none, none, none, 5) == -1


def random_exchanges(seed: int) -> np.ndarray:
    choice = np.random.default_rng(seed)
    rows = EXCHANGE.zeros(40)
    for name in EXCHANGE.dtype.names:
        if name.endswith("_ns"):
            rows[name] = np.where(choice.random(40) < 0.4, NEVER, choice.integers(-500, 10_000, 40))
    rows["bytes"] = choice.integers(0, 1 << 40, 40)
    rows["src"], rows["dst"], rows["connection"] = choice.integers(0, 5, (3, 40))
    rows["order"] = np.arange(40)
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_columns_and_spans(seed: int) -> None:
    rows = random_exchanges(seed)
    columns = columns_of(rows)
    first, last = np.empty((2, len(rows)), np.int64)
    tables.spans(rows, first, last)
    for i, row in enumerate(rows):
        assert columns.sizes[i] == row["bytes"]
        assert columns.starts[i] == (row["data_ns"] if row["offer_ns"] == NEVER else row["offer_ns"])
        assert columns.arrivals[i] == row["arrived_end_ns"]
        signs = [int(row[name]) for name in SIGNS]
        assert last[i] == max(signs)
        assert first[i] == min((t for t in signs if t != NEVER), default=np.iinfo(np.int64).max)
    assert (columns.sizes[HOLE], columns.starts[HOLE], columns.arrivals[HOLE]) == (-1, NEVER, NEVER)


@pytest.mark.parametrize("rising", [True, False])
def test_rows_are_dealt_by_direction(rising: bool) -> None:
    exchanges = random_exchanges(1)
    if not rising:
        exchanges["order"] = exchanges["order"][::-1]
    rows = np.arange(3, 38)
    key = np.empty(len(rows), np.int64)
    keys = tables.directions(exchanges, rows, key) + 1
    assert key.tolist() == [2 * int(e["connection"]) + int(e["src"] > e["dst"]) for e in exchanges[rows]]
    assert keys == key.max() + 1
    counts = np.bincount(key, minlength=keys)
    dealt = np.empty_like(rows)
    at = np.cumsum(counts) - counts
    assert tables.deal(exchanges, rows, key, at, dealt, np.zeros(keys, np.uint32)) == rising
    assert dealt.tolist() == rows[np.argsort(key, kind="stable")].tolist()
    assert at.tolist() == np.cumsum(counts).tolist()
