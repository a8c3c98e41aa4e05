"""The accuracy benchmark: the same scenarios each time, and figures that say what the analysis got wrong."""

from __future__ import annotations

import pytest

from bench.accuracy.draw import FAULTS, KINDS, draw
from bench.accuracy.measure import Measured, measure
from bench.accuracy.onesided import KINDS as ONE_SIDED_KINDS
from bench.accuracy.onesided import many
from dpuflow.reports.scores import transfer_lines


def test_a_number_is_a_scenario_and_they_cover_all_kinds() -> None:
    assert draw(17) == draw(17)
    names = [draw(number).name for number in range(200)]
    assert len(set(names)) == 200
    for op, algorithm, protocol in KINDS:
        assert any(f"-{op}-{algorithm}-{protocol}-" in name for name in names)
    for fault in FAULTS:
        assert any(f"-{fault}-" in name for name in names)


def test_one_sided_scenarios_cover_all_kinds_and_are_scored() -> None:
    names = [draw(number).name for number in many(300)]
    assert len(names) == 60
    for kind in ONE_SIDED_KINDS:
        assert any("-".join(kind) in name for name in names)
    measured = measure(draw(1001, "fabric"))
    moved = measured.score.moved
    assert moved.found == moved.true == moved.inferred == moved.bytes_right == moved.pages_right > 0
    assert moved.waits_told == moved.waits > 0
    (line,) = transfer_lines(measured.score)
    assert line.startswith(f"transfers: {moved.true} of {moved.true} found, 0 invented; bytes right 100 %")


def test_a_simple_ring_is_measured_right() -> None:
    """Scenario 0 is a clean ring: what is found and asked for adds up."""
    scenario = draw(0)
    measured = measure(scenario)
    figures = measured.score.figures()
    assert measured.score.true == len(scenario.job.ops) * scenario.job.iterations
    assert measured.packets > 0
    assert figures["op_right"] in (None, 1.0)
    assert measured.op_alike <= measured.score.found
    total = Measured("all")
    total.add(measured)
    total.add(measured)
    assert total.score.true == 2 * measured.score.true
    assert len(total.errors_ns) == 2 * len(measured.errors_ns)


@pytest.mark.parametrize(
    "number",
    [
        215,  # its first message takes turns with the last packets of the collective before
        249,  # a packet takes longer to leave than the host takes to act on a credit
    ],
)
def test_bounds_on_a_slow_link_hold(number: int) -> None:
    measured = measure(draw(number, "fabric"))
    assert measured.bounds > 50
    assert measured.violated == 0
    assert measured.causes_right == measured.causes == 1


def test_smallest_lateness() -> None:
    from bench.accuracy.smallest import smallest_ns

    late = [(ns, ns + 400) for ns in range(0, 60_000, 10)]
    assert smallest_ns(late) == 1_000
    noisy: list[tuple[int, int | None]] = [
        (ns, ns + 4_000 * (ns % 200 // 100)) for ns in range(0, 60_000, 100)
    ]
    found = smallest_ns(noisy)
    assert found is not None
    assert 5_000 <= found <= 20_000
    assert smallest_ns([(ns, None) for ns, _ in late]) is None
