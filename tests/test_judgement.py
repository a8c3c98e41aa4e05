"""One judgement an endpoint: scripted jobs with known lateness, from nobody late to two at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from collective_worlds import TIME_0, World, algorithm_of, analysed, no_waits, run_job

from dpuflow.entries import Entries, build_entries, relate, stalls
from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Instance
from dpuflow.results import Lateness
from dpuflow.schema.rows import Op
from dpuflow.verdicts.causes import causes_of
from dpuflow.verdicts.chance import at_least, onset_of
from dpuflow.verdicts.excess import Charges, Evidence, _often, charge, own_lateness, scatter_of
from dpuflow.verdicts.judgement import Judgement, judge
from dpuflow.verdicts.links import measure_links, slow_rows
from dpuflow.verdicts.pauses import find_work, pause_sentences, worked_ns
from dpuflow.verdicts.steps import find_steps
from dpuflow.verdicts.units import grows_later, usual_rows

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
Late = Mapping[int, int] | Callable[[int, int], int]


def noisy(seed: int, scale: float = 100_000) -> Callable[[], int]:
    """What a host needs to hand a message on: a few microseconds, and now and then much more."""
    choices = random.Random(seed)
    return lambda: round(choices.expovariate(1 / scale))


def stages(
    world: World, excused: Callable[[Entries], np.ndarray] | None = None
) -> tuple[list[Instance], Entries, Charges, list[Judgement]]:
    exchanges = build_exchanges(world.transfers())
    instances = world.instances(exchanges)
    entries = build_entries(exchanges, instances)
    groups: dict[tuple[int, ...], int] = {}
    of = np.array([groups.setdefault(tuple(sorted(i.order)), len(groups)) for i in instances])
    relative = relate(entries)
    charges = charge(entries, relative, of)
    slow = slow_rows(measure_links(exchanges, instances), entries)
    causes = causes_of(instances, entries, relative, charges, slow, no_waits(entries, instances))
    step = find_steps(instances, entries, of)[1]
    kept = np.zeros(len(step), np.int64) if excused is None else excused(entries)
    own = own_lateness(instances, entries, relative, causes, of, of, kept)
    worked_ns, stalled = (
        find_work(entries, step).ns,
        stalls(entries, exchanges, instances, of[entries.collective]),
    )
    found = judge(Evidence(instances, entries, relative, charges, causes, own, of, step, worked_ns, stalled))
    return instances, entries, charges, found


def judged(
    late: Late | None = None, *, n: int = 4, times: int = 40, seed: int = 0, style: str = "gloo"
) -> list[Judgement]:
    """A job whose ranks compute 5 ms, give or take noise of 0.1 ms, and ``late`` besides."""
    noise = random.Random(seed + 1000)
    world = World(style, react=noisy(seed, 20_000))

    def longer(rank: int, turn: int) -> int:
        own = late(rank, turn) if callable(late) else (late or {}).get(rank, 0)
        return own + round(abs(noise.gauss(0, 100_000)))

    run_job(world, RING, 4096, list(range(n)), times, late=longer)
    return stages(world)[3]


def verdicts(judgements: list[Judgement]) -> list[str]:
    return [j.verdict for j in judgements]


def others(judgements: list[Judgement], *late: int) -> set[str]:
    return {j.verdict for j in judgements if j.endpoint not in late}


def test_noise_makes_nobody_late() -> None:
    sometimes = 0
    for seed in range(50):
        found = verdicts(judged(seed=seed))
        assert "late" not in found, f"seed {seed}"
        sometimes += "intermittent" in found
    assert sometimes <= 1


@pytest.mark.parametrize("style", ["gloo", "eager"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_late_every_time(n: int, style: str) -> None:
    found = judged({n - 1: 5 * MS}, n=n, style=style)
    guilty = found[n - 1]
    assert (guilty.verdict, guilty.steadiness, guilty.cause) == ("late", "persistent", "compute")
    assert guilty.since_ns is None
    assert guilty.late_share >= 0.95
    assert guilty.median_ns == pytest.approx(5 * MS, abs=MS // 2)
    assert guilty.caused_wait_ns == pytest.approx(40 * 5 * MS * (n - 1), rel=0.1)
    assert others(found, n - 1) == {"on_time"}


@pytest.mark.parametrize("first", [8, 20, 30])
def test_late_from_a_certain_collective_on(first: int) -> None:
    noise = random.Random(1)
    world = World("gloo", react=noisy(0, 20_000))
    played = run_job(
        world, RING, 4096, [0, 1, 2, 3], 40,
        late=lambda rank, turn: 4 * MS * (rank == 1 and turn >= first) + noise.randrange(100_000),
    )  # fmt: skip
    found = stages(world)[3]
    assert (found[1].verdict, found[1].steadiness) == ("late", "persistent")
    onset = played[first].enter_ns[1] + TIME_0
    assert found[1].since_ns is not None
    assert abs(found[1].since_ns - onset) < MS
    assert others(found, 1) == {"on_time"}


@pytest.mark.parametrize("seed", range(5))
def test_late_from_a_certain_collective_on_in_noise(seed: int) -> None:
    """Most single collectives are within the noise; that the rank works longer four times of five is not."""
    draw = random.Random(seed)

    def late(rank: int, turn: int) -> int:
        return max(0, round(draw.gauss(5, 2) * MS)) + (5 * MS if rank == 2 and turn >= 15 else 0)

    world = World("eager")
    played = run_job(world, RING, 6_000, list(range(6)), 34, late=late)
    found = stages(world)[3]
    assert (found[2].verdict, found[2].steadiness) == ("late", "persistent")
    assert found[2].since_ns is not None
    step_ns = played[-1].enter_ns[2] - played[-2].enter_ns[2]
    assert abs(found[2].since_ns - TIME_0 - played[15].enter_ns[2]) < 4 * step_ns
    assert others(found, 2) <= {"on_time", "intermittent", "unknown"}


@pytest.mark.parametrize(("more_ms", "grows"), [(0, False), (0.02, False), (2.5, True)])
def test_who_works_longer_than_before_is_not_cleared(more_ms: float, grows: bool) -> None:
    """Beyond chance and by what matters, though within what single operations scatter by."""
    draw = np.random.default_rng(1)
    excess = (draw.normal(0, 2, 60) + np.repeat([0, more_ms], 30)) * MS
    rows = np.arange(60)
    own = SimpleNamespace(excess_ns=excess.astype(np.int64))
    units = SimpleNamespace(rows=rows, place=rows % 2)
    world = SimpleNamespace(span_ns=30 * 50 * MS)
    assert grows_later(cast(Any, units), cast(Any, own), cast(Any, world)) == grows


@pytest.mark.parametrize(("rate", "late"), [(0.1, False), (0.002, True)])
def test_two_of_three_at_one_of_many_places_is_chance_among_hosts_that_stall(rate: float, late: bool) -> None:
    rows = np.arange(39)
    amount = np.where(np.isin(rows, (12, 38)), 4 * MS, 0)
    own = SimpleNamespace(
        amount_ns=amount, later_ns=amount, excess_ns=amount, sigma_ns=np.full(39, MS), apart_ns=np.zeros(39),
        beside=np.full(39, -1),
    )  # fmt: skip
    units = SimpleNamespace(rows=rows, place=rows % 13)
    world = SimpleNamespace(tests=104, span_ns=900 * MS)
    found = usual_rows(cast(Any, units), cast(Any, own), cast(Any, world), False, rate)
    assert sorted(found) == ([12, 25, 38] if late else [])


def test_a_chance_is_that_of_so_many_or_more() -> None:
    assert at_least(2, 3, 0.5) == pytest.approx(0.5)
    assert at_least(0, 9, 0.2) == pytest.approx(1)
    assert at_least(3, 3, 0.1) == pytest.approx(1e-3)


def test_rotating() -> None:
    found = judged(lambda rank, turn: 6 * MS * (turn % 3 == 0 and rank == turn // 3 % 4), times=72)
    assert {(j.verdict, j.steadiness) for j in found} == {("intermittent", "rotating")}


def test_at_random() -> None:
    for seed in range(10):
        choices = random.Random(seed)
        when = {(choices.randrange(4), turn) for turn in range(60) if choices.random() < 0.5}
        found = judged(lambda rank, turn, when=when: 8 * MS * ((rank, turn) in when), times=60, seed=seed)
        assert "late" not in verdicts(found), seed
        assert verdicts(found).count("intermittent") >= 2, seed
        assert {j.steadiness for j in found if j.verdict == "intermittent"} == {"rotating"}


def test_one_rank_now_and_then() -> None:
    choices = random.Random(5)
    found = judged(lambda rank, turn: 8 * MS * (rank == 2 and choices.random() < 0.2), times=60)
    assert (found[2].verdict, found[2].steadiness) == ("intermittent", "transient")
    assert others(found, 2) == {"on_time"}


def test_one_or_two_incidents_are_no_habit() -> None:
    world = World("gloo")
    run_job(world, RING, 4096, list(range(4)), 40, late=lambda r, t: 50 * MS * (r == 2 and t in (10, 30)))
    # Nor are they none: a rank that is late in a tenth of all may show as few in 40.
    assert verdicts(stages(world)[3]) == ["on_time", "on_time", "unknown", "on_time"]


def stalled(
    *turns: int, late: int = 0, stall: int = 60_000 * MS, ranks: tuple[int, ...] = (0, 1, 2, 3)
) -> Late:
    """Rank 2 ``late`` every time, and ``ranks`` away for ``stall`` before ``turns``."""
    return lambda rank, turn: late * (rank == 2) + stall * (turn in turns and rank in ranks)


@pytest.mark.parametrize(
    "world",
    [
        stalled(20, late=2 * MS),
        stalled(7, 30, late=2 * MS),
        stalled(3, 13, 23, 33, 43, 53, late=2 * MS),  # checkpoints, every so many of many steps
        stalled(20, late=2 * MS, ranks=(0,)),
    ],
)
def test_a_stall_hides_no_lateness_that_comes_every_time(world: Late) -> None:
    """A minute of nothing in a job of a second: 2 ms every time are still 20 % of the time it works."""
    found = judged(world, times=160)
    assert (found[2].verdict, found[2].steadiness) == ("late", "persistent")
    assert others(found, 2) == {"on_time"}


@pytest.mark.parametrize(("ranks", "said"), [((0,), "unknown"), ((0, 1, 2, 3), "on_time")])
def test_stalls_alone_are_nobody_s_habit(ranks: tuple[int, ...], said: str) -> None:
    """Two stalls of one rank among 40 collectives may be the first of many; among 120 they are incidents."""
    assert verdicts(judged(stalled(20, 35, ranks=ranks))) == [said, "on_time", "on_time", "on_time"]
    assert verdicts(judged(stalled(20, 35, ranks=ranks), times=120)) == ["on_time"] * 4


def test_incidents_are_weighed_against_all_the_time() -> None:
    """Beside a minute's stall three incidents cost nothing to speak of; without it they are a habit."""
    incidents = lambda rank, turn: 8 * MS * (rank == 2 and turn in (5, 12, 30))  # noqa: E731
    assert verdicts(judged(incidents, times=40))[2] == "intermittent"
    both = lambda rank, turn: incidents(rank, turn) + stalled(20)(rank, turn)  # noqa: E731
    assert verdicts(judged(both, times=40)) == ["on_time"] * 4


def test_stalls_are_told_apart() -> None:
    for ranks, alone in (((0, 1, 2, 3), None), ((1,), 1)):
        world = World("gloo")
        late = stalled(20, ranks=ranks)
        run_job(world, RING, 4096, list(range(4)), 40, late=late)  # type: ignore[arg-type]
        _, entries, _, _ = stages(world)
        work = find_work(entries, np.full(len(entries.endpoint), -1))
        (pause,) = work.pauses
        assert abs(pause.length_ns - 60_000 * MS) < 10 * MS
        assert pause.endpoint == alone
        assert work.ns < 1000 * MS
        (sentence,) = pause_sentences(work, ["a", "b", "c", "d"], TIME_0)
        assert ("b alone" in sentence) == (alone == 1)


def test_what_pauses_often_is_the_job_s_own_time() -> None:
    """Of collectives that nothing makes steps of, a third pause: that is how the job is."""
    start = np.cumsum(np.tile([1, 1, 50], 20)) * MS
    assert worked_ns(start, int(start[-1])) == int(start[-1] - start[0])
    assert worked_ns(np.array([0, 1, 2, 3, 4, 5, 6, 7, 1000]) * MS, 1001 * MS) == 9 * MS
    assert worked_ns(np.array([0, 1, 1000]) * MS, 1001 * MS) == 1001 * MS  # too few to tell
    assert worked_ns(np.zeros(0, np.int64), 5) == 0


def test_two_collectives_show_no_habit_and_clear_nobody_who_was_late_in_them() -> None:
    assert verdicts(judged({2: 8 * MS}, times=2)) == ["on_time", "on_time", "unknown", "on_time"]
    assert verdicts(judged({2: 8 * MS}, times=12)) == ["on_time", "on_time", "late", "on_time"]


def test_processes_that_start_apart_are_no_habit() -> None:
    """One rank comes 700 ms late to the first collective, and is a little late twice more."""
    found = judged(lambda rank, turn: (700 * MS * (turn == 0) + MS * (turn in (9, 20))) * (rank == 3))
    assert verdicts(found) == ["on_time"] * 4


def test_two_late_ranks() -> None:
    found = judged({1: 5 * MS, 3: 8 * MS})
    assert [j.verdict for j in found] == ["on_time", "late", "on_time", "late"]
    assert [j.steadiness for j in found if j.verdict == "late"] == ["persistent"] * 2
    assert found[3].caused_wait_ns == pytest.approx(40 * 3 * 3 * MS, rel=0.15)  # only what it adds
    assert found[1].caused_wait_ns < found[3].caused_wait_ns / 10


@pytest.mark.parametrize(("ms", "said"), [(1, "unknown"), (3, "late")])
def test_little_lateness_beside_much_is_not_accused(ms: int, said: str) -> None:
    """When it left what was before is known to a part of what the other one kept it there."""
    found = judged({1: ms * MS, 3: 8 * MS})
    assert [j.verdict for j in found] == ["on_time", said, "on_time", "late"]


def test_late_in_every_fifth_collective_of_which_no_step_is_told() -> None:
    found = judged(lambda rank, turn: 6 * MS * (rank == 2 and turn % 5 == 4), times=60)
    assert (found[2].verdict, found[2].steadiness) == ("late", "persistent")
    assert 0.15 < found[2].late_share < 0.3
    assert others(found, 2) == {"on_time"}


def test_a_little_late_every_time() -> None:
    """0.2 ms is within the noise of one collective (0.3 ms), but it comes every time."""
    found = judged({1: 220_000}, times=80)
    assert (found[1].verdict, found[1].steadiness) == ("late", "persistent")
    assert found[1].cause == "compute"
    assert others(found, 1) == {"on_time"}


def test_a_bad_time_of_a_rank_that_is_a_little_late_anyway() -> None:
    """Eight of 24 times it is late by 60 ms, else by 0.08: what it costs is that time, not the habit."""
    found = judged(lambda rank, turn: (80_000 + 60 * MS * (8 <= turn < 16)) * (rank == 2), times=24)
    assert (found[2].verdict, found[2].steadiness) == ("intermittent", "transient")
    assert others(found, 2) == {"on_time"}


def test_point_to_point_transfers_are_no_verdict() -> None:
    world = World("eager")
    chain = algorithm_of(Op.BROADCAST, "linear")
    run_job(world, chain, 4096, [0, 1], 10)
    exchanges = build_exchanges(world.transfers())
    exchanges["op"] = Op.SEND_RECV
    instances = [Instance(np.array([row]), Op.SEND_RECV, [0, 1]) for row in range(len(exchanges))]
    entries = build_entries(exchanges, instances)
    relative = relate(entries)
    group = np.zeros(len(instances), np.int64)
    charges = charge(entries, relative, group)
    causes = causes_of(
        instances, entries, relative, charges, np.zeros(len(entries.rule), bool), no_waits(entries, instances)
    )
    step = np.full(len(entries.rule), -1)
    own = own_lateness(instances, entries, relative, causes, group, group, np.zeros(len(step), np.int64))
    assert judge(Evidence(instances, entries, relative, charges, causes, own, group, step, 0)) == []


def test_a_rank_never_seen_is_unknown() -> None:
    world = World("eager")
    run_job(world, algorithm_of(Op.BROADCAST, "linear"), 64, [0, 1, 2], 10)
    found = stages(world)[3]
    assert [(j.verdict, j.cause, j.collectives) for j in found] == [("unknown", "unknown", 0)] * 3


# -- whose fault ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept_ns", "said"),
    [(0, ("late", None)), (9 * MS, ("unknown", "excused")), (2 * MS, ("late", None))],
)
def test_what_the_network_may_have_kept_a_rank_for_neither_accuses_nor_clears_it(
    kept_ns: int, said: tuple[str, str | None]
) -> None:
    """A rank late by 5 ms each time, while its last data is still on its way over a slow link."""
    world = World("eager", react=noisy(3, 20_000))
    run_job(world, RING, 4096, [0, 1, 2, 3], 40, late=lambda rank, turn: 5 * MS * (rank == 2))
    found = stages(world, lambda entries: np.where(entries.endpoint == 2, kept_ns, 0))[3]
    assert (found[2].verdict, found[2].unjudged) == said
    assert others(found, 2) == {"on_time"}


@pytest.mark.parametrize("style", ["gloo", "eager"])
def test_a_rank_that_the_network_held_up_is_not_blamed(style: str) -> None:
    """Every fourth collective a message to rank 2 is lost: it leaves 200 ms later, and enters late."""
    world = World(style, packets=4, react=noisy(4, 20_000))
    noise = random.Random(4)
    free = dict.fromkeys(range(4), MS)
    pairwise = algorithm_of(Op.ALL_TO_ALL, "linear")
    for turn in range(40):
        if turn % 4 == 3:
            world.lose_next = {(1, 2)}
        enter = {rank: at + 5 * MS + noise.randrange(200_000) for rank, at in free.items()}
        free = world.play(pairwise, 4096, enter).leave_ns
    _, entries, charges, found = stages(world)
    assert set(entries.endpoint[charges.wait_ns > 100 * MS].tolist()) == {2}
    assert others(found) == {"on_time"}
    assert found[2].cause == "network"


def test_a_rank_that_left_late_for_its_late_peer_is_not_blamed() -> None:
    """Pairs, then the pairs' counterparts: rank 3 works longer, so 2 leaves their pair late as well."""
    world = World("gloo")
    free = dict.fromkeys(range(4), MS)
    for turn in range(30):
        for context, pair in enumerate([(0, 1), (2, 3), (0, 2), (1, 3)]):
            enter = {r: free[r] + MS + 4_000 * r + 5 * MS * (r == 3 and context == 1) for r in pair}
            free.update(world.play(RING, 4096, enter, context=context).leave_ns)
        assert turn < 30
    *_, charges, found = stages(world)
    assert verdicts(found) == ["on_time", "on_time", "on_time", "late"]
    assert found[2].late_share > 0.3  # late it was, half of the time
    assert charges.late.any()


# -- change points ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late", "onset"),
    [
        ([], None),
        ([1, 1, 1], None),
        ([0] * 20, None),
        ([1] * 20, None),
        ([0] * 10 + [1] * 10, 10),
        ([0] * 3 + [1] * 17, 3),
        ([0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], 10),
        ([1] * 10 + [0] * 10, None),  # it got better
        ([0, 1] * 20, None),
        ([0] * 19 + [1], None),  # one event is no onset
        ([0] * 5 + [1] + [0] * 32 + [1, 1], None),
    ],
)
def test_onset(late: list[int], onset: int | None) -> None:
    assert onset_of(MS * np.array(late, np.int64), 0.1 * MS) == onset


def test_an_onset_of_one_rank_in_many_takes_more_than_three_bad_units() -> None:
    """Two of a rank's three incidents among the last three units: of eight ranks one is so by chance."""
    found = np.array([1] * 8 + [6] + [1] * 10 + [46] + [1] * 3 + [1, 57, 49])
    assert onset_of(found, 1.0) is not None
    assert onset_of(found, 1.0, ranks=8) is None
    assert onset_of(np.array([1] * 12 + [50] * 6), 1.0, ranks=8) == 12


def test_what_comes_in_turn_has_no_onset() -> None:
    """Late every fourth time from unit 14 on: most units are as they were before."""
    late = np.arange(40) % 4 == 2
    late[:14] = False
    excess = MS * late.astype(np.int64)
    assert onset_of(excess, 0.1 * MS) is None


def test_no_onset_in_coin_tosses() -> None:
    choices = random.Random(2)
    tosses = [[MS * (choices.random() < 0.4) for _ in range(60)] for _ in range(200)]
    found = [onset_of(np.array(each, np.int64), 0.1 * MS) for each in tosses]
    assert sum(onset is not None for onset in found) <= 10


# -- steps and start-up -----------------------------------------------------------------------


def test_late_from_the_first_all_reduce_has_no_onset() -> None:
    """Barriers while the processes start, where nobody works; one rank is late to every all_reduce after."""
    world = World("gloo", react=noisy(3, 20_000))
    noise = random.Random(3)
    barrier = algorithm_of(Op.BARRIER, "dissemination")
    started = run_job(world, barrier, 0, [0, 1, 2, 3], 4, late=lambda rank, turn: noise.randrange(100_000))
    run_job(
        world, RING, 4096, [0, 1, 2, 3], 20, start_ns=max(started[-1].leave_ns.values()),
        late=lambda rank, turn: 5 * MS * (rank == 2) + noise.randrange(100_000),
    )  # fmt: skip
    guilty = stages(world)[3][2]
    assert (guilty.verdict, guilty.steadiness, guilty.since_ns) == ("late", "persistent", None)


def test_late_once_a_step_among_groups_that_take_turns() -> None:
    """What rank 3 costs its pair is handed to the other pairs: entries scatter far more than the work."""
    world = World("gloo", react=noisy(5, 20_000))
    noise = random.Random(5)
    free = dict.fromkeys(range(4), MS)
    for _ in range(16):
        for turn in range(4):
            for context, pair in enumerate([(0, 1), (2, 3), (0, 2), (1, 3)]):
                late = 5 * MS * (context == 1 and turn == 0)
                work = {r: 30 * MS * (context < 2 and turn == 0) + noise.randrange(100_000) for r in pair}
                enter = {r: free[r] + work[r] + late * (r == 3) for r in pair}
                free.update(world.play(RING, 4096, enter, context=context).leave_ns)
    found = stages(world)[3]
    assert (found[3].verdict, found[3].steadiness) == ("late", "persistent")
    assert others(found, 3) == {"on_time"}


def test_worse_from_a_certain_collective_on() -> None:
    """A little noise that passes for lateness now and then, and 4 ms from the fifteenth collective on."""
    noise = random.Random(7)
    world = World("gloo", react=noisy(7, 20_000))
    played = run_job(
        world, RING, 4096, [0, 1, 2, 3], 40,
        late=lambda rank, turn: (4 * MS * (turn >= 15) or 500_000 * (turn % 3 == 0)) * (rank == 1)
        + noise.randrange(100_000),
    )  # fmt: skip
    guilty = stages(world)[3][1]
    assert guilty.since_ns is not None
    assert abs(guilty.since_ns - TIME_0 - played[15].enter_ns[1]) < MS


def test_two_incidents_each_that_go_round_are_a_habit_of_the_group() -> None:
    """Every fourth collective another rank: twice each in thirty, which for one rank alone were incidents."""
    found = judged(lambda rank, turn: 9 * MS * (turn % 4 == 1 and rank == turn // 4 % 4), times=30)
    assert {(j.verdict, j.steadiness) for j in found} == {("intermittent", "rotating")}


def test_one_incident_each_is_no_habit_of_anybody() -> None:
    """Three of four ranks once each, at other times: what goes round would hit them again."""
    once = {(0, 5), (1, 17), (3, 30)}
    found = judged(lambda rank, turn: 8 * MS if (rank, turn) in once else 0)
    assert not set(verdicts(found)) & {"late", "intermittent"}


def test_what_the_verdict_counts_is_told_as_late() -> None:
    """Of three ranks one is late in the second half: the others' entries scatter about it, too."""
    rank = judged(lambda rank, turn: 3 * MS if rank == 1 and turn >= 20 else 0, n=3)[1]
    assert (rank.verdict, rank.steadiness) == ("late", "persistent")
    assert rank.since_ns is not None
    assert rank.late_share == pytest.approx(0.5, abs=0.06)


def test_an_onset_halfway_is_no_scatter() -> None:
    """Of two ranks one came 100 ms late from the middle on: that was taken for the noise of both."""
    choices = np.random.default_rng(4)
    quiet = choices.normal(0, 2e6, 200)
    late = quiet + np.where(np.arange(200) < 100, 0, 100e6)
    assert scatter_of(late) == pytest.approx(scatter_of(quiet), rel=0.3)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_goes_round_among_few_ranks_is_no_noise(ranks: int) -> None:
    """Of two ranks each is late every other time: half of all entries, which quartiles take for scatter."""
    found = judged(lambda rank, turn: 4 * MS * (turn % ranks == rank), n=ranks)
    assert [(j.verdict, j.steadiness) for j in found] == [("intermittent", "rotating")] * ranks


def test_heaps_are_told_from_scatter_by_enough_values_only() -> None:
    choices = random.Random(4)
    near = np.array([choices.gauss(0, 1.0) for _ in range(20)])
    assert scatter_of(np.r_[near, near + 50]) < 2
    assert scatter_of(np.r_[near[:5], near[:5] + 50]) > 10
    plain = [scatter_of(np.array([choices.gauss(0, 1.0) for _ in range(40)])) for _ in range(200)]
    assert 0.7 < np.median(plain) < 1.1


@pytest.mark.parametrize("late_ms", [60, 80, 115, 200])
def test_an_onset_on_a_busy_host_is_no_noise(late_ms: float) -> None:
    """Entries scatter by 18 ms; from halfway on the rank is later by three times as much, or more."""
    draw = np.random.default_rng(1)
    before, after = np.abs(draw.normal(0, 18e6, 100)), draw.normal(late_ms * 1e6, 18e6, 100)
    assert 9e6 < scatter_of(np.concatenate([before, after])) < 27e6
    mixed = draw.normal(0, 40e6, 200)  # without an onset neighbours are as far apart as any
    assert 30e6 < scatter_of(mixed) < 50e6


def job(style: str, op: Op, name: str, n: int, late: Late, times: int = 24) -> list[Lateness]:
    """A job of Open MPI's that computes 5 ms, give or take 20 us; hosts hand on within 20 us."""
    noise = random.Random(n)
    world = World(style, react=noisy(n, 5_000))

    def longer(rank: int, turn: int) -> int:
        own = late(rank, turn) if callable(late) else late.get(rank, 0)
        return own + round(abs(noise.gauss(0, 20_000)))

    run_job(world, algorithm_of(op, name), 4096, list(range(n)), times, late=longer)
    transfers = world.transfers()
    exchanges = build_exchanges(transfers)
    return analysed(transfers, exchanges, world.instances(exchanges), n).lateness


def test_who_waits_as_a_rule_is_on_time_where_it_cannot_have_been_late() -> None:
    """Of six ranks in recursive doubling two wait for another first: known only where they are late, so that
    most of their times are not told."""
    found = job("eager", Op.ALL_REDUCE, "recursive_doubling", 6, lambda r, turn: 4 * MS * (turn % 6 == r))
    # Two more send what another waits for before it acts: they were never seen to be the last.
    assert sum((j.verdict, j.steadiness) == ("intermittent", "rotating") for j in found) >= 2
    assert {j.verdict for j in found} <= {"intermittent", "on_time", "unknown"}


def test_a_late_receiver_of_a_broadcast_is_not_hidden_by_those_that_wait_for_the_root() -> None:
    """The root waits for it, and leaves late with it; the others answer late, as they wait for the root."""
    found = job("rendezvous", Op.BROADCAST, "linear", 4, {1: 4 * MS})
    assert [j.endpoint for j in found if j.verdict == "late"] == [1]
    assert (found[1].steadiness, found[1].cause) == ("persistent", "compute")


def test_work_scatters_by_itself_before_operations_of_which_each_rank_has_enough() -> None:
    ends, kind = np.tile([0, 1], 20), np.repeat([0, 1], 20)
    entries = cast(Entries, SimpleNamespace(endpoint=ends))
    known = np.ones(40, bool)
    assert not _often(entries, known, kind).any()  # ten of each
    assert _often(entries, known, np.zeros(40, np.int64)).all()
    known[ends == 1] = np.arange(20) < 3
    assert not _often(entries, known, np.zeros(40, np.int64)).any()
