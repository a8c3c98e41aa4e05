"""Pipelines played stage by stage: schedule, work for each microbatch, the slow stage, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from collective_worlds import TIME_0, World, algorithm_of, captured, concluded

import dpuflow
from dpuflow.exchanges.build import build_exchanges
from dpuflow.matching import Instance
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.schema.rows import Op
from dpuflow.verdicts import pipelines, stages

MS = 1_000_000
BARRIER = algorithm_of(Op.BARRIER, "dissemination")
PAIR = algorithm_of(Op.BROADCAST, "linear")
Work = Callable[[int, str, int], int]


def order_of(schedule: str, stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """What a stage does in a step: ("f" or "b", microbatch)."""
    forward, backward = [("f", k) for k in range(batches)], [("b", k) for k in range(batches)]
    if schedule == "forward":
        return forward
    if schedule == "gpipe":
        return forward + backward
    if schedule == "interleaved":  # two parts of the model a stage: all goes round twice
        return [(way, k) for way in "fb" for k in range(2 * batches)]
    ahead = min(stages - 1 - stage, batches)
    mixed = [each for k in range(batches - ahead) for each in (forward[ahead + k], backward[k])]
    return forward[:ahead] + mixed + backward[batches - ahead :]


def play(
    schedule: str, stages: int, batches: int, steps: int, work: Work, *, sync: bool = True, seed: int = 0
) -> World:
    """Every stage works its list off in order, each as soon as its input is there; then all meet."""
    world, noise = World("gloo"), random.Random(seed)
    free = dict.fromkeys(range(stages), MS)
    transfers: list[tuple[int, int, int, int]] = []  # offered, src, dst, when the receiver asked
    for step in range(steps):
        lists = {s: order_of(schedule, s, stages, batches) for s in range(stages)}
        offered: dict[tuple[int, str, int], int] = {}
        while any(lists.values()):
            for stage in range(stages):
                while lists[stage]:
                    way, batch = lists[stage][0]
                    source, target = (stage - 1, stage + 1) if way == "f" else (stage + 1, stage - 1)
                    made = batch
                    if schedule == "interleaved" and batch >= batches and not 0 <= source < stages:
                        source, made = source % stages, batch - batches
                    if schedule == "interleaved" and batch < batches:
                        target %= stages
                    if 0 <= source < stages:
                        if (source, way, made) not in offered:
                            break
                        asked, offer = free[stage], offered[source, way, made]
                        transfers.append((offer, source, stage, asked))
                        free[stage] = max(asked, offer) + 100_000
                    free[stage] += work(stage, way, step) + noise.randrange(100_000)
                    if 0 <= target < stages:
                        offered[stage, way, batch] = free[stage]
                    lists[stage].pop(0)
        if sync:
            free = world.play(BARRIER, 0, dict(free)).leave_ns
    for offer, src, dst, asked in sorted(transfers):
        world.play(PAIR, 65536, {src: offer, dst: asked}, context=src + 10 * dst + 100)
    return world


def analysed(world: World, stages: int, near: frozenset[int] | None = None) -> Analysis:
    """``near``: the stages that were captured; None: all."""
    transfers = world.transfers()
    exchanges = build_exchanges(transfers)
    instances = [
        Instance(i.rows, Op.SEND_RECV, i.order, None, size=65536) if i.algorithm is PAIR else i
        for i in world.instances(exchanges)
    ]
    instances.sort(key=lambda instance: int(instance.rows[0]))
    for instance in instances:
        instance.view = replace(instance.view, near=near)
    captures, joined = captured(transfers, stages)
    return concluded(captures, joined, exchanges, instances)


def even(stage: int, way: str, step: int) -> int:
    return 3 * MS if way == "f" else 5 * MS


def slow(guilty: int, ways: str = "fb", more: int = 2 * MS, first: int = 0) -> Work:
    return lambda stage, way, step: (
        even(stage, way, step) + more * (stage == guilty and way in ways and step >= first)
    )


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    ("schedule", "stages", "batches"),
    [("gpipe", 4, 8), ("1f1b", 4, 8), ("1f1b", 6, 12), ("1f1b", 4, 4), ("gpipe", 4, 4)],
)
def test_even_stages(schedule: str, stages: int, batches: int, sync: bool) -> None:
    result = analysed(play(schedule, stages, batches, 6, even, sync=sync), stages)
    (found,) = result.pipelines
    assert (found.stages, found.schedule, found.microbatches) == (list(range(stages)), schedule, batches)
    assert not {row.verdict for row in result.lateness} & {"late", "intermittent"}
    assert found.forward_ns[1] == pytest.approx(3 * MS, abs=MS // 5)
    assert found.backward_ns[1] == pytest.approx(5 * MS, abs=MS // 5)
    assert (found.forward_ns[-1], found.backward_ns[0]) == (None, None)
    assert {g.kind for g in result.groups if len(g.endpoints) == 2} == {"pp"}
    # The classic bubble: of a step of (batches + stages - 1) turns a stage works batches.
    assert found.idle_share[1] == pytest.approx(1 - batches / (batches + stages - 1), abs=0.08)
    assert found.idle_share[0] is None


def test_data_that_goes_round_twice() -> None:
    """Interleaved: the stages between the ends are compared; ends have inputs of two kinds."""
    result = analysed(play("interleaved", 4, 6, 8, slow(2)), 4)
    (found,) = result.pipelines
    assert (found.stages, found.schedule, found.microbatches) == ([0, 1, 2, 3], "interleaved", None)
    assert {row.endpoint for row in result.lateness if row.verdict == "late"} == {2}
    said = {row.endpoint: row.verdict for row in analysed(play("interleaved", 4, 6, 8, even), 4).lateness}
    assert not {*said.values()} & {"late", "intermittent"}
    assert "OR ONE THAT IT WAITS FOR" not in next(text_lines(result))


@pytest.mark.parametrize(
    ("sends", "chain"),
    [
        ({(0, 1): 16, (1, 2): 16, (2, 0): 8, (1, 0): 16, (2, 1): 16, (0, 2): 8}, [0, 1, 2]),
        ({(0, 1): 16, (1, 2): 16, (2, 0): 12, (1, 0): 16, (2, 1): 16, (0, 2): 12}, [0, 1, 2]),
        ({(0, 1): 16, (1, 2): 16, (2, 0): 16, (1, 0): 16, (2, 1): 16, (0, 2): 16}, []),  # halos on a ring
        # ... of a real job, five of which were not read each way.
        ({(0, 1): 24, (1, 2): 24, (2, 0): 19, (1, 0): 24, (2, 1): 24, (0, 2): 19}, []),
        ({(0, 1): 16, (1, 2): 16, (2, 0): 16}, []),  # ring attention
        ({(0, 1): 16, (1, 2): 8, (2, 0): 8, (1, 0): 16, (2, 1): 8, (0, 2): 8}, []),
    ],
)
def test_rings_that_are_pipelines(sends: dict[tuple[int, int], int], chain: list[int]) -> None:
    assert sorted((pipelines._opened(sends), pipelines._opened(sends)[::-1]))[0] == chain


def test_what_is_sent_once_beside_hides_no_step() -> None:
    """PyTorch's stages tell each other shapes at first: the pipeline is never as empty again."""
    steps = 1000 * np.arange(8)[:, None]
    sent, back = (steps + np.arange(0, 40, 10)).ravel(), (steps + np.arange(25, 65, 10)).ravel()
    arrived = np.r_[-100, back]
    forward = SimpleNamespace(sent_ns=np.r_[-90, -80, -70, sent])
    backward = SimpleNamespace(arrived_ns=arrived, rows=arrived)
    assert pipelines._flushes(forward, backward).tolist() == back[3::4].tolist()


def test_two_inputs_before_the_first_answer_are_one_forward_one_backward() -> None:
    """Of four microbatches: the stage before the last one runs one ahead; GPipe's last stage has all four."""

    def edge(arrived: list[int], sent: list[int]) -> SimpleNamespace:
        unit = np.repeat(np.arange(3), 4)
        times = [
            np.concatenate([100 * step + np.array(each) for step in range(3)]) for each in (arrived, sent)
        ]
        return SimpleNamespace(
            arrived_ns=times[0], sent_ns=times[1], unit=unit, unit_of_arrival=unit, in_steps=True
        )

    back = edge([20, 30, 40, 50], [10, 20, 30, 40])
    assert pipelines._schedule(edge([1, 9, 15, 25], [0, 8, 14, 24]), back) == "1f1b"
    assert pipelines._schedule(edge([1, 9, 10, 10], [0, 8, 9, 9]), back) == "gpipe"


def test_an_end_without_a_capture_may_go_on_and_is_not_judged() -> None:
    """What it gets from others is not seen, so nothing tells what it works."""
    result = analysed(play("1f1b", 4, 8, 6, even, sync=False), 4, frozenset({0, 1, 2}))
    said = {row.endpoint: row.verdict for row in result.lateness}
    assert (said[1], said[2], said.get(3, "unknown")) == ("on_time", "on_time", "unknown")


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "guilty"), [(3, 1), (4, 2), (5, 1)])
def test_a_slow_stage_in_the_middle(schedule: str, stages: int, guilty: int, sync: bool) -> None:
    result = analysed(play(schedule, stages, 8, 6, slow(guilty), sync=sync), stages)
    late = [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    assert [row.endpoint for row in late] == [guilty]
    assert (late[0].verdict, late[0].cause, late[0].steadiness) == ("late", "compute", "persistent")
    assert late[0].since_ns is None
    (finding,) = [f for f in result.findings if f.condition == "straggler"]
    assert finding.endpoints == [guilty]
    assert any("stage" in each for each in finding.alternatives)


@pytest.mark.parametrize(("schedule", "guilty", "ways"), [
    ("gpipe", 0, "f"), ("gpipe", 3, "b"), ("1f1b", 0, "fb"), ("1f1b", 3, "fb"), ("1f1b", 3, "f"),
])  # fmt: skip
def test_a_slow_end(schedule: str, guilty: int, ways: str) -> None:
    result = analysed(play(schedule, 4, 10, 6, slow(guilty, ways)), 4)
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [guilty]


def test_what_the_last_stage_computes_forward_shows_in_no_packet_of_gpipe() -> None:
    result = analysed(play("gpipe", 4, 8, 6, slow(3, "f")), 4)
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == []


def test_two_stages_of_gpipe_cannot_be_compared() -> None:
    result = analysed(play("gpipe", 2, 8, 6, slow(1, "b")), 2)
    assert "late" not in {row.verdict for row in result.lateness}
    assert any("2 of 2 pipeline stages cannot be compared" in limit for limit in result.limits)


def test_forward_only() -> None:
    result = analysed(play("forward", 5, 16, 6, slow(2, "f", MS)), 5)
    assert result.pipelines[0].schedule == "forward"
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [2]


def test_onset() -> None:
    result = analysed(play("1f1b", 4, 8, 16, slow(2, first=7)), 4)
    (late,) = [row for row in result.lateness if row.verdict == "late"]
    assert late.endpoint == 2
    ends = [c.end_ns for c in result.collectives if c.op == "barrier"]
    assert late.since_ns is not None
    assert ends[6] <= late.since_ns <= ends[7]


@pytest.mark.parametrize(("schedule", "guilty"), [("gpipe", 2), ("1f1b", 1), ("1f1b", 2)])
def test_what_a_step_would_take(schedule: str, guilty: int) -> None:
    """The replay against the same job played again without the fault."""
    (found,) = analysed(play(schedule, 4, 8, 8, slow(guilty)), 4).what_if
    without = analysed(play(schedule, 4, 8, 8, even), 4).steps[0].step_ns
    assert found.endpoint == guilty
    assert found.step_ns > 1.1 * without
    assert found.step_without_ns == pytest.approx(without, rel=0.05)


def test_rings_and_stars_are_no_pipelines() -> None:
    for pairs in ([(0, 1), (1, 2), (2, 0)], [(0, 1), (0, 2), (0, 3)]):
        world = World("gloo")
        for turn in range(8):
            for src, dst in pairs:
                at = MS * (turn + 1)
                world.play(PAIR, 4096, {src: at, dst: at}, context=src + 10 * dst + 100)
        result = analysed(world, 4)
        assert result.pipelines == []
        assert any("to no pipeline: listed" in limit for limit in result.limits)


def test_reversed_numbering_finds_the_same_first_stage() -> None:
    world = play("1f1b", 4, 8, 6, slow(1))
    for row in world.rows:
        row["src"], row["dst"] = 3 - row["src"], 3 - row["dst"]
    for played in world.played:
        played.ranks = [3 - rank for rank in played.ranks]
    result = analysed(world, 4)
    assert result.pipelines[0].stages == [3, 2, 1, 0]
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [2]


def test_times_are_on_the_reference_clock() -> None:
    (steps,) = analysed(play("gpipe", 4, 8, 6, even), 4).steps
    assert steps.start_ns > TIME_0
    assert steps.count >= 4
    assert np.isclose(steps.step_ns, (8 + 3) * 8.1 * MS, rtol=0.1)


def test_a_stage_late_now_and_then_says_in_how_many_steps(shared: Path) -> None:
    """Of a stage that takes part in no collective the report has its steps, not "0 of 0 collectives"."""
    case = shared / "captures/nccl/pp-infer-registered-n6-random"
    result = dpuflow.analyze(sorted(map(str, case.glob("*.pcap.gz"))))
    (pipeline,) = result.pipelines
    now_and_then = [row.endpoint for row in result.lateness if row.verdict == "intermittent"]
    assert now_and_then
    for endpoint in now_and_then:
        place = pipeline.stages.index(endpoint)
        assert 0 < pipeline.late_steps[place] < pipeline.steps / 2
        assert 1_000_000 <= (pipeline.late_step_ns[place] or 0) <= 7_000_000  # as injected
    text = " ".join(" ".join(text_lines(result)).split())
    assert "0 of 0" not in text
    assert f"worked longer in {pipeline.late_steps[pipeline.stages.index(now_and_then[0])]} of" in text


def test_every_stage_has_a_row(shared: Path) -> None:
    """One that no other can be compared with is unknown, not left out."""
    case = shared / "captures/nccl/pp-infer-registered-n6-random"
    result = dpuflow.analyze(sorted(map(str, case.glob("*.pcap.gz"))))
    (pipeline,) = result.pipelines
    verdicts = {row.endpoint: row.verdict for row in result.lateness}
    assert verdicts.keys() == set(pipeline.stages)
    assert verdicts[pipeline.stages[-1]] == "unknown"


def test_a_stage_at_the_edge_of_what_a_design_explains_is_held_to_itself() -> None:
    """Peers differ by 0.2 ms, a design may explain 0.6: who takes 0.5 longer as a rule, 0.65 now and then,
    is not late by all of that."""
    beyond = np.tile([450_000.0, 500_000.0, 550_000.0, 650_000.0], 8)
    acts = SimpleNamespace(rows=np.arange(32), share=np.ones(32))
    for usually, late in ((0, 0), (200_000, 32)):
        own = 2_000_000 + beyond + usually
        told = stages._Beside(np.ones(32, bool), own, beyond + usually, [2_000_000.0, 1_800_000.0])
        assert np.count_nonzero(stages._late(acts, told, 80_000, False).amount_ns) == late  # type: ignore[arg-type]


def test_a_stage_that_works_unevenly_is_late_beyond_its_own_scatter() -> None:
    """Its only peer works evenly, so that the scatter of all is half of its own."""
    beyond = 200_000 + np.random.default_rng(2).normal(0, 130_000, 48)
    acts = SimpleNamespace(rows=np.arange(48), share=np.ones(48))
    for more, late in ((0, 0), (2_000_000, 5)):
        longer = beyond + more * (np.arange(48) % 10 == 4)
        told = stages._Beside(np.ones(48, bool), 900_000 + longer, longer, [900_000.0])
        assert np.count_nonzero(stages._late(acts, told, 60_000, True).amount_ns) == late  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [(), (20, 21, 22, 23), (20, 21)])
def test_inputs_that_nobody_saw_cost_their_step(lost: tuple[int, ...]) -> None:
    """Steps of four, 100 ms apart; each input comes 10 ms before what follows; one step lacks some."""
    steps = np.repeat(np.arange(12), 4)
    sent = steps * 100 * MS + np.tile([20, 30, 40, 50], 12) * MS
    kept = ~np.isin(np.arange(48), lost)
    source = SimpleNamespace(arrived_ns=(sent - 10 * MS)[kept], unit_of_arrival=steps[kept], emptied=True)
    book = SimpleNamespace(sent_ns=sent, unit=steps, emptied=True)
    arrived, of = pipelines._inputs(source, book, np.full(48, -1))  # type: ignore[arg-type]
    told = kept & ~np.isin(steps, steps[list(lost)])
    assert (sent - arrived)[told].tolist() == [10 * MS] * int(told.sum())
    assert (of[~told] == -1).all()


def test_what_its_peers_may_have_waited_clears_no_stage() -> None:
    """Its only peer seems to work as long, but for what it may have waited for its own data to leave."""
    acts = SimpleNamespace(rows=np.arange(32), share=np.ones(32))
    own = np.full(32, 2_000_000.0)
    free, blocked = (
        stages._Beside(np.ones(32, bool), own, own * 0, [2_000_000.0, 1_900_000.0], ns)
        for ns in (0.0, 900_000.0)
    )
    design = [stages._late(acts, told, 10_000, False).design_ns for told in (free, blocked)]  # type: ignore[arg-type]
    assert (design[1] - design[0] == 900_000).all()
