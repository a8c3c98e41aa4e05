"""The board: what is published is there for readers, in bounds, and nobody waits for a slow one."""

from __future__ import annotations

from dataclasses import fields

from dpuflow.agent.board import FRESH, Board, FindingState, Health, Traffic, Window
from dpuflow.agent.stream import COUNTERS
from dpuflow.results import Analysis, Collective, Endpoint, Finding, Group, Judged, Lateness, RankEntry

MS = 1_000_000


def window(number: int, late_ms: float = 5.0, collectives: int = 2) -> Window:
    """A window of all_reduces between a and b, in which b enters late."""
    made = []
    for k in range(collectives):
        start = number * 1000 * MS + k * 100 * MS
        late = round(late_ms * MS)
        ranks = [
            RankEntry(0, start, start + 20 * MS, 0, 1, "exact", "none", ""),
            RankEntry(1, start + late, start + 20 * MS, late, 1, "exact", "compute", ""),
        ]
        made.append(
            Collective(
                k, 0, "all_reduce", "ring", [], None, 64, 128, start, start + 20 * MS, 1.0, True, [], ranks
            )
        )
    analysis = Analysis(
        endpoints=[
            Endpoint(0, "10.0.0.1", ["10.0.0.1"], rank=0),
            Endpoint(1, "10.0.0.2", ["10.0.0.2"], rank=1),
        ],
        groups=[Group(0, [0, 1], "dp")],
        collectives=made,
        lateness=[Lateness(1, collectives, 1.0, 1.0, 5, 5, 5, "late", "compute", "persistent")],
    )
    late_rows = frozenset((k, 1) for k in range(collectives))
    return Window(number, number * 1000 * MS, (number + 1) * 1000 * MS, analysis, late_rows)


def finding(active: bool = True, last_ns: int = 1) -> FindingState:
    inner = Finding("0", "straggler", "", [1], None, None, "warning", 0.9, "late", "look")
    return FindingState("straggler-1", "straggler", ("10.0.0.2",), "warning", 0, 1, last_ns, active, inner)


def test_figures_cover_the_windows_held_and_no_more() -> None:
    board = Board(windows=3)
    for number in range(10):
        board.publish(window(number, late_ms=number))
    assert [each.number for each in board.windows()] == [7, 8, 9]
    assert [each.number for each in board.windows(2)] == [8, 9]
    assert board.windows(0) == []
    first, other = board.lateness()
    assert (first.address, first.collectives, first.verdict, first.cause) == (
        "10.0.0.2",
        6,
        "late",
        "compute",
    )
    assert first.median_ns == 8 * MS
    assert first.caused_wait_ns == 2 * (7 + 8 + 9) * MS
    assert first.late_share == first.last_share == 1.0
    assert (other.address, other.median_ns, other.late_share) == ("10.0.0.1", 0, 0.0)
    (group,) = board.groups()
    assert group.addresses == ("10.0.0.1", "10.0.0.2")
    assert group.operations == (("all_reduce", "ring", 6),)
    assert group.median_ns == 20 * MS


def test_fewer_windows_may_be_held() -> None:
    board = Board()
    for number in range(FRESH + 5):
        board.publish(window(number))
    board.keep(1)
    assert [each.number for each in board.windows()] == [FRESH + 4]
    assert [state.collectives for state in board.groups()] == [2]
    board.publish(window(99))
    assert [each.number for each in board.windows()] == [99]


def test_who_is_gone_from_all_windows_is_forgotten() -> None:
    board = Board(windows=2)
    board.publish(window(0))
    for number in (1, 2):
        board.publish(Window(number, 0, 1, Analysis()))
    assert board.lateness() == []
    assert board.groups() == []


def test_findings_open_change_and_close_once_each() -> None:
    board = Board()
    events = board.subscribe()
    for number, state in enumerate([finding(), finding(last_ns=2), finding(active=False, last_ns=2)]):
        board.publish(window(number), (state,))
    kinds = [event.kind for event in (events.get(0) for _ in range(6)) if event and event.kind != "window"]
    assert kinds == ["finding_opened", "finding_changed", "finding_closed"]
    assert board.findings() == []
    assert [state.id for state in board.findings(active_only=False)] == ["straggler-1"]


def test_a_slow_reader_loses_the_oldest_and_is_told() -> None:
    board = Board()
    slow = board.subscribe(size=2)
    for number in range(5):
        board.publish(window(number))
    assert slow.missed == 3
    first = slow.get(0)
    assert first is not None
    assert first.window is not None
    assert first.window.number == 3


def test_closing_ends_waiting_readers() -> None:
    board = Board()
    subscription = board.subscribe()
    board.close()
    assert list(subscription) == []
    board.publish(window(0))
    assert subscription.get(0) is None


def test_errors_of_parts_show_in_the_health() -> None:
    board = Board()
    board.report(Health(errors={"history": 1}))
    board.count_error("webhook")
    board.count_error("webhook")
    assert board.health().errors == {"history": 1, "webhook": 2}


def test_traffic_has_every_counter_of_a_flow() -> None:
    """One that it lacked cost the agent all its windows."""
    assert set(COUNTERS) <= {field.name for field in fields(Traffic)}


def test_of_windows_that_are_fresh_no_more_nothing_is_lost() -> None:
    """What each says of the whole span was kept of 600, the same rows over and over: 21 MiB."""
    board, made = Board(windows=100), []
    for number in range(120):
        made.append(window(number))
        made[-1].analysis.judged = [Judged(f"c{k}", "not_judged", f"why {number}") for k in range(33)]
        made[-1].analysis.limits = [f"limit {number}"]
        board.publish(made[-1])
    held = board.windows()
    assert [each.number for each in held] == list(range(20, 120))
    assert [bool(each.analysis.judged) for each in held] == [False] * (100 - FRESH) + [True] * FRESH
    for number in (20, 50, 119):
        assert board.analysis(number) == made[number].analysis
    assert board.analysis() == made[-1].analysis
    assert board.analysis(19) is None
    assert Board().analysis() is None
    assert len(board._packed) == 100 - FRESH


def test_what_windows_name_alike_is_kept_once() -> None:
    """Six hundred windows of thousands of endpoints each took 50 MiB."""
    board = Board()
    for number in range(3):
        made = window(number)
        if number == 2:
            made.analysis.endpoints[1].rank = 7
            made.analysis.endpoints.append(Endpoint(2, "10.0.0.3", ["10.0.0.3"]))
        board.publish(made)
    first, second, third = (each.analysis for each in board.windows())
    assert first.endpoints == second.endpoints
    assert [ours is theirs for ours, theirs in zip(first.endpoints, second.endpoints, strict=True)] == [
        True,
        True,
    ]
    assert [endpoint.rank for endpoint in third.endpoints] == [0, 7, None]
    assert third.endpoints[0] is first.endpoints[0]
    assert first.groups[0] is third.groups[0]
