"""Orders within classes against NumPy's own sorting."""

from __future__ import annotations

import numpy as np
import pytest

from dpuflow.arrays.ordering import (
    Latest,
    Picked,
    Places,
    classes,
    cut_at,
    distinct,
    is_in,
    lower_medians,
    median_of,
    numbered,
    order_within,
    packed,
    percentile,
    percentiles,
    quantiles,
    spans,
)
from dpuflow.arrays.quantiles import middle, middle_of_others
from dpuflow.entries.reactions import FEWEST, PAIRED, apart_ns
from dpuflow.kernels import ordering as kernels
from dpuflow.schema.rows import EXCHANGE, NEVER, MessageFlag, Role


@pytest.mark.parametrize("seed", range(60))
def test_the_order_is_that_of_lexsort(seed: int) -> None:
    """Runs, ties, negative keys, classes without elements."""
    choice = np.random.default_rng(seed)
    n = int(choice.integers(1, 700))
    keys = choice.integers(-(1 << int(choice.integers(1, 62))), 1 << int(choice.integers(1, 62)), n)
    if seed % 3 == 0:
        keys = np.concatenate([np.sort(keys[: n // 2]), np.sort(keys[n // 2 :])])
    if seed % 3 == 1:
        keys //= 1 + (int(np.abs(keys).max()) >> 3)
    of = choice.integers(0, 1 + int(choice.integers(1, 9)), n) * 2
    assert order_within(keys, of).tolist() == np.lexsort((keys, of)).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_classes_are_rows_with_the_same_numbers(seed: int) -> None:
    """One column or two; few numbers, and numbers far beyond the rows."""
    choice = np.random.default_rng(seed)
    n = int(choice.integers(1, 120))
    columns = [choice.integers(0, 1 + 10 ** int(choice.integers(0, 9)), n) for _ in range(1 + seed % 2)]
    wanted: dict[tuple[int, ...], list[int]] = {}
    for row, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        wanted.setdefault(numbers, []).append(row)
    assert [places.tolist() for places in classes(*columns)] == [wanted[key] for key in sorted(wanted)]
    assert classes(*(column[:0] for column in columns)) == []


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_classes_are_in_their_order(seed: int) -> None:
    choice = np.random.default_rng(seed)
    n = int(choice.integers(0, 60))
    columns = [choice.integers(0, 1 + 10 ** int(choice.integers(0, 9)), n) for _ in range(1 + seed % 3)]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    of = numbered(*columns).tolist()
    assert sorted(range(n), key=of.__getitem__) == sorted(range(n), key=rows.__getitem__)
    assert len(set(of)) == len(set(rows))


@pytest.mark.parametrize("seed", range(20))
def test_spans_are_their_places_one_after_the_other(seed: int) -> None:
    choice = np.random.default_rng(seed)
    start, count = choice.integers(0, 40, (2, seed))
    wanted = [at for a, n in zip(start.tolist(), count.tolist(), strict=True) for at in range(a, a + n)]
    assert spans(start, count).tolist() == wanted


@pytest.mark.parametrize("most", [1, 7, 200, 1 << 17])
def test_places_of_a_class_are_those_that_a_pass_over_all_finds(most: int) -> None:
    for count in (0, 1, 300):
        of = np.random.default_rng(most).integers(0, most, count)
        places = Places(of)
        for number in (*of.tolist(), most, most + 5):
            assert places[number].tolist() == np.flatnonzero(of == number).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_percentiles_are_those_of_numpy(seed: int) -> None:
    """To the last bit: whole numbers of any size, epochs among them, and floating-point ones."""
    choice = np.random.default_rng(seed)
    n = int(choice.integers(1, 80))
    whole = choice.integers(-(10 ** int(choice.integers(1, 19))), 10 ** int(choice.integers(1, 19)), n)
    values = whole if seed % 2 else choice.normal(size=n) * 10.0 ** int(choice.integers(0, 12))
    levels = [0.0, 100.0, 5, 25, 50, 95, float(choice.uniform(0, 100))]
    assert percentiles(values, levels) == np.percentile(values, levels).tolist()
    assert percentile(values, 20.000000000000004) == np.percentile(values, 20.000000000000004)


@pytest.mark.parametrize("seed", range(40))
def test_quantiles_of_a_sorted_sample_and_of_its_upper_part_are_those_of_numpy(seed: int) -> None:
    choice = np.random.default_rng(seed)
    values = np.sort(choice.normal(size=int(choice.integers(2, 3000))))
    levels = (np.arange(PAIRED) + 0.5) / PAIRED
    assert quantiles(values, levels).tolist() == np.quantile(values, levels).tolist()
    lower = len(values) // 2
    assert percentiles(values[lower:], (95,), lower) == [np.percentile(values, 95)]


@pytest.mark.parametrize("seed", range(60))
def test_how_far_two_values_differ_is_told_from_all_pairs(seed: int) -> None:
    choice = np.random.default_rng(seed)
    values = choice.lognormal(8, choice.uniform(0.1, 3), FEWEST + seed * (1 + 30 * (seed % 2))).astype(
        np.int64
    )
    values %= 5 if seed % 7 == 0 else 1 << 40
    some = values.astype(float)
    if len(some) > PAIRED:
        some = np.quantile(some, (np.arange(PAIRED) + 0.5) / PAIRED)
    one, other = np.triu_indices(len(some), 1)
    assert apart_ns(values) == np.percentile(np.abs(some[one] - some[other]), 95)


@pytest.mark.parametrize("seed", range(5))
def test_parts_between_places_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 9, seed * 7)
    at = np.unique(rng.integers(0, len(values) + 1, seed))
    assert [part.tolist() for part in cut_at(values, at)] == [p.tolist() for p in np.split(values, at)]


@pytest.mark.parametrize("seed", range(8))
def test_the_median_of_all_but_one_is_that_of_numpy(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 6, 2 + seed).tolist()
    for number, own in enumerate(values):
        others = values[:number] + values[number + 1 :]
        assert middle_of_others(sorted(values), own) == np.median(others)
    assert middle(sorted(values)) == np.median(values)
    assert middle_of_others([3.0], 3.0) == np.inf  # nobody else to compare with


def test_nothing_is_in_order() -> None:
    none = np.zeros(0, np.int64)
    assert order_within(none, none).tolist() == []


@pytest.mark.parametrize("seed", range(20))
def test_earliest_times(seed: int) -> None:
    choice = np.random.default_rng(seed)
    times = np.where(choice.random(80) < 0.3, NEVER, choice.integers(-20, 20, 80))
    of = choice.integers(0, 12, 80)
    best, where = np.full(13, np.iinfo(np.int64).max), np.full(13, -1)
    kernels.earliest(times, of, best, where)
    for k in range(13):
        mine = [(int(times[i]), i) for i in range(80) if of[i] == k and times[i] != NEVER]
        assert (best[k], where[k]) == min(mine, default=(np.iinfo(np.int64).max, -1))


def test_packed_columns_sort_as_the_columns_do() -> None:
    choice = np.random.default_rng(1)
    columns = [
        choice.integers(0, limit, 500).astype(kind) for limit, kind in ((3, "u1"), (70, "u4"), (9, "i8"))
    ]
    key = packed(*columns)
    assert key is not None
    assert np.argsort(key, kind="stable").tolist() == np.lexsort(columns[::-1]).tolist()
    wide = np.array([1 << 40])
    assert packed(wide, wide) is None


def test_medians_of_classes() -> None:
    out = np.full(4, NEVER)
    lower_medians(np.array([5, 1, 9, 4, 7]), np.array([0, 0, 0, 2, 2]), out)
    assert out.tolist() == [5, NEVER, 4, NEVER]
    lower_medians(np.zeros(0, np.int64), np.zeros(0, np.int64), out)
    assert out.tolist() == [5, NEVER, 4, NEVER]


def test_picked_columns() -> None:
    table = EXCHANGE.zeros(5)
    table["bytes"] = np.arange(5) * 10
    picked = Picked(table, np.array([3, 1]))
    assert len(picked) == 2
    assert picked["bytes"].tolist() == [30, 10]
    assert picked["bytes"] is picked["bytes"]
    assert picked["bytes"].flags.c_contiguous


@pytest.mark.parametrize("seed", range(30))
def test_the_latest_event_of_a_class(seed: int) -> None:
    """Ties, events and questions at NEVER, times centuries apart, classes without events, no events."""
    choice = np.random.default_rng(seed)
    scale = 10 ** int(choice.integers(0, 18))
    of, asked = (choice.integers(0, 6, int(choice.integers(low, 40))) for low in (0, 1))
    times, until = (choice.integers(-4, 5, len(each)) * scale for each in (of, asked))
    times[choice.random(len(times)) < 0.2] = NEVER
    until[choice.random(len(until)) < 0.2] = NEVER
    expected = []
    for wanted, limit in zip(asked, until, strict=True):
        mine = [n for n in range(len(of)) if of[n] == wanted and NEVER < times[n] <= limit]
        expected.append(max(mine, key=lambda n: (times[n], n), default=-1))
    assert Latest(of, times).by(asked, until).tolist() == expected


def test_few_numbers_are_taken_as_numpy_takes_them() -> None:
    """``distinct``, ``is_in`` and ``median_of`` are np.unique, np.isin and np.median, to the last bit."""
    rng = np.random.default_rng(1)
    for length in (0, 1, 2, 3, 7, 40):
        for values in (
            rng.integers(-5, 5, length),
            rng.integers(0, 1 << 62, length),
            rng.integers(0, 9, length).astype(np.uint8),
            rng.normal(size=length),
        ):
            np.testing.assert_array_equal(distinct(values), np.unique(values))
            for some in (values[::2], values[:0], np.array([3])):
                np.testing.assert_array_equal(is_in(values, some), np.isin(values, some))
            if length:
                assert median_of(values) == np.median(values)
    assert distinct([[3, 1], [1, 2]]).tolist() == [1, 2, 3]
    assert np.isnan([median_of([]), median_of([1.0, np.nan, 0.0])]).all()


def test_a_column_is_compared_with_what_its_numbers_stand_for_as_with_the_number() -> None:
    """Of its own type: a column of bytes does not become one of int64 first; and sums are as ever."""
    column = np.array([0, 3, 4, 255], np.uint8)
    assert (column == Role.GRANT).tolist() == (column == int(Role.GRANT)).tolist()
    assert (column > Role.GRANT).tolist() == [False, True, True, True]
    assert (column & MessageFlag.GAP).tolist() == [0, 0, 4, 4]
    assert (column & MessageFlag.GAP).dtype == np.uint8
    assert (column + Role.GRANT).dtype == np.int64
