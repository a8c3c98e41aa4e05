"""Slow links: told by how long messages take from first to last packet, against their like."""

from __future__ import annotations

import random

import numpy as np
import pytest
from collective_worlds import World, algorithm_of, run_job

from dpuflow.arrays.ordering import lower_medians
from dpuflow.entries import build_entries
from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Instance
from dpuflow.schema.rows import Op
from dpuflow.verdicts.links import FEWEST, Links, _classes, measure_links, slow_rows

RING = algorithm_of(Op.ALL_REDUCE, "ring")
PAIRWISE = algorithm_of(Op.ALL_TO_ALL, "pairwise")


def links_of(world: World) -> Links:
    exchanges = build_exchanges(world.transfers())
    return measure_links(exchanges, world.instances(exchanges))


def slow(links: Links) -> set[tuple[int, int]]:
    return {(int(links.src[i]), int(links.dst[i])) for i in np.flatnonzero(links.slow)}


def test_one_slow_link_among_many() -> None:
    world = World("gloo", packets=20, slow={(1, 2): 6.0})
    run_job(world, PAIRWISE, 400_000, [0, 1, 2, 3], 10)
    links = links_of(world)
    assert slow(links) == {(1, 2)}
    assert len(links.src) == 12
    at = links.slow
    assert links.stretch[at] == pytest.approx([6.0], rel=0.2)
    assert links.pace_ns[at] == pytest.approx([6 * 19_000 / 100_000])
    assert links.lost_ns[at] == pytest.approx([10 * 5 * 19_000])
    assert links.lost_ns[~at].tolist() == [0.0] * 11
    assert links.messages.tolist() == [10] * 12


def test_all_links_of_one_node() -> None:
    """Its uplink is slow, which every peer feels."""
    world = World("gloo", packets=20, slow={(r, 2): 5.0 for r in range(4)} | {(2, r): 5.0 for r in range(4)})
    run_job(world, PAIRWISE, 400_000, [0, 1, 2, 3], 10)
    assert slow(links_of(world)) == {(2, 0), (2, 1), (2, 3), (0, 2), (1, 2), (3, 2)}


def test_a_slow_node_of_three() -> None:
    """Two of a ring's three links are its own: they were what the others were compared with."""
    world = World("gloo", packets=20, slow={(0, 1): 5.0, (1, 2): 5.0})
    run_job(world, RING, 64_000, [0, 1, 2], 10)
    assert slow(links_of(world)) == {(0, 1), (1, 2)}


@pytest.mark.parametrize(("factor", "found"), [(2.5, set()), (4.0, {(0, 1)})])
def test_two_ranks(factor: float, found: set[tuple[int, int]]) -> None:
    world = World("gloo", packets=20, slow={(0, 1): factor})
    run_job(world, RING, 64_000, [0, 1], 10)
    assert slow(links_of(world)) == found


def test_kinds_of_messages_that_differ_in_pace() -> None:
    """Large messages move at a tenth of the pace: another kind, no slow link."""
    world = World("eager", packets=10)
    ranks = [0, 1, 2, 3]
    free = dict.fromkeys(ranks, 0)
    for turn in range(40):
        world.packets = 10 if turn % 4 else 200
        size = 64_000 if turn % 4 else 128_000
        free = world.play(RING, size, {r: t + 1_000_000 for r, t in free.items()}).leave_ns
    # A pair of ranks on a link that carries nothing but such messages.
    for turn in range(10):
        world.packets = 200
        enter = {r: max(free.values()) + turn * 10_000_000 for r in (0, 3)}
        world.play(RING, 128_000, enter)
    assert slow(links_of(world)) == set()


def test_too_few_messages_to_tell() -> None:
    for times, found in ((FEWEST - 1, set()), (FEWEST, {(1, 2)})):
        world = World("gloo", packets=20, slow={(1, 2): 6.0})
        run_job(world, PAIRWISE, 400_000, [0, 1, 2, 3], times)
        assert slow(links_of(world)) == found


def test_single_packets_and_lone_losses_are_no_pace() -> None:
    world = World("gloo", packets=1, slow={(1, 2): 6.0})
    run_job(world, PAIRWISE, 4_000, [0, 1, 2, 3], 10)
    assert len(links_of(world).src) == 0
    world = World("gloo", packets=20)
    for turn in range(3):
        world.lose_next = {(1, 2)} if turn == 1 else set()
        run_job(world, PAIRWISE, 400_000, [0, 1, 2, 3], 5, start_ns=turn * 10**9)
    links = links_of(world)
    assert slow(links) == set()
    assert links.lost_ns.max() == 0  # what was sent again is a loss, not a pace


def test_stamps_too_coarse_to_measure_make_no_slow_link() -> None:
    """With microsecond stamps and large segments most messages take no time at all."""
    world = World("eager", packets=4)
    run_job(world, PAIRWISE, 400_000, [0, 1, 2, 3], 20)
    choices = random.Random(1)
    exchanges = build_exchanges(world.transfers())
    for row in exchanges:
        often = 1.0 if (row["src"], row["dst"]) == (0, 1) else 0.1
        took = 1_000 * choices.randrange(1, 4) * (choices.random() < often)
        row["data_end_ns"], row["arrived_end_ns"] = row["data_ns"] + took, row["arrived_ns"] + took
    assert slow(measure_links(exchanges, world.instances(exchanges))) == set()


def test_who_touches_a_slow_link() -> None:
    world = World("gloo", packets=20, slow={(1, 2): 6.0})
    run_job(world, PAIRWISE, 400_000, [0, 1, 2, 3], 10)
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    touched = slow_rows(measure_links(exchanges, instances), entries)
    assert set(entries.endpoint[touched].tolist()) == {1, 2}


def test_nothing_to_measure() -> None:
    links = measure_links(build_exchanges(World().transfers()), [])
    assert len(links.src) == len(links.slow) == 0


@pytest.mark.parametrize("seed", range(30))
def test_medians_by_class_match_a_twin(seed: int) -> None:
    choice = np.random.default_rng(seed)
    n = int(choice.integers(1, 400))
    first, second = (
        choice.integers(-3, 3, n),
        choice.integers(0, 1 << 60, n) % (1 << int(choice.integers(1, 60))),
    )
    values = choice.integers(0, 1 << int(choice.integers(1, 50)), n)
    of = _classes(first, second)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    assert of.tolist() == [list(dict.fromkeys(pairs)).index(pair) for pair in pairs]
    for k, median in enumerate(lower_medians(values, of).tolist()):
        mine = sorted(values[of == k].tolist())
        assert median == mine[(len(mine) - 1) // 2]


# -- shapers and losses -----------------------------------------------------------------------


def ring_of_gloo(turns: int = 20) -> tuple[np.ndarray, list[Instance]]:
    world = World("gloo", packets=20)
    run_job(world, RING, 400_000, [0, 1, 2, 3], turns)
    exchanges = build_exchanges(world.transfers())
    return exchanges, world.instances(exchanges)


def test_a_shaper_between_a_host_and_its_tap() -> None:
    """A token bucket lets each message of 100 kB pass at once, when it has the tokens for it: 4 ms later."""
    exchanges, instances = ring_of_gloo()
    mine = (exchanges["src"] == 1) & (exchanges["dst"] == 2)
    for name in ("data_ns", "data_end_ns", "arrived_ns", "arrived_end_ns"):
        exchanges[name][mine] += 4_000_000
    links = measure_links(exchanges, instances)
    assert slow(links) == {(1, 2)}


def test_the_rate_of_a_token_bucket_is_what_it_gives_without_a_burst() -> None:
    exchanges, instances = ring_of_gloo()
    mine = np.flatnonzero((exchanges["src"] == 1) & (exchanges["dst"] == 2))
    took = np.where(np.arange(len(mine)) % 3 == 0, 200_000, 4_000_000)  # one in three by the burst
    exchanges["arrived_end_ns"][mine] = exchanges["arrived_ns"][mine] + took
    links = measure_links(exchanges, instances)
    assert slow(links) == {(1, 2)}
    assert links.pace_ns[links.slow] == pytest.approx([40.0])


@pytest.mark.parametrize(("stretch", "found"), [(4, set()), (40, {(1, 2)})])
def test_what_losses_explain_is_no_slow_link(stretch: int, found: set[tuple[int, int]]) -> None:
    """One packet in 100 is lost, and round trips take 40 us: TCP then moves 5 kB in 3.3 round trips or so."""
    exchanges, instances = ring_of_gloo()
    mine = np.flatnonzero((exchanges["src"] == 1) & (exchanges["dst"] == 2))
    took = stretch * (exchanges["arrived_end_ns"] - exchanges["arrived_ns"])[mine]
    exchanges["arrived_end_ns"][mine] = exchanges["arrived_ns"][mine] + took
    exchanges["data_end_ns"][mine] = exchanges["data_ns"][mine] + took
    exchanges["retransmitted"][mine[::5]] = 1
    assert slow(measure_links(exchanges, instances)) == found


def test_a_median_at_the_limit_by_chance_is_no_slow_link() -> None:
    exchanges, instances = ring_of_gloo(2)
    mine = np.flatnonzero((exchanges["src"] == 1) & (exchanges["dst"] == 2))
    usual = (exchanges["arrived_end_ns"] - exchanges["arrived_ns"])[mine]
    factor = np.where(np.arange(len(mine)) < len(mine) // 2 - 1, 1.5, 3.5)
    exchanges["arrived_end_ns"][mine] = exchanges["arrived_ns"][mine] + (usual * factor).astype(np.int64)
    assert slow(measure_links(exchanges, instances)) == set()
