"""Named conditions: each appears with the right endpoints and evidence, and none for another's fault."""

from __future__ import annotations

import io
import json
import random
import re
import typing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from collective_worlds import TIME_0, World, algorithm_of, captured, concluded, run_job

from dpuflow.conditions import TABLE
from dpuflow.conditions.describe import MARK, runbook
from dpuflow.errors import OptionError
from dpuflow.exchanges.build import build_exchanges
from dpuflow.export import finding_of
from dpuflow.findings.build import DETECTORS
from dpuflow.findings.case import Case, Cost
from dpuflow.findings.needs import NEEDS
from dpuflow.findings.ranks import _began, _share
from dpuflow.findings.standstills import find_late_credits
from dpuflow.quantities import duration, percent
from dpuflow.reports.html import write_html
from dpuflow.reports.json import json_lines
from dpuflow.reports.markdown import markdown_lines
from dpuflow.reports.text import write_text
from dpuflow.results import Analysis, Finding, Lateness
from dpuflow.schema.rows import EXCHANGE, Op, Transport, Wire
from dpuflow.schema.tables import CaptureTables, Clock, Joined
from dpuflow.verdicts import Inferred

MS = 1_000_000
RING = algorithm_of(Op.ALL_REDUCE, "ring")
LINEAR = algorithm_of(Op.ALL_TO_ALL, "linear")


def noise(seed: int = 1) -> random.Random:
    return random.Random(seed)


def analysed(world: World, ranks: int, change=None) -> tuple[Analysis, list[CaptureTables], Joined]:  # type: ignore[no-untyped-def]
    """The result of a played world; ``change`` may touch what was captured before."""
    transfers = world.transfers()
    exchanges = build_exchanges(transfers)
    instances = world.instances(exchanges)
    captures, joined = captured(transfers, ranks)
    if change is not None:
        change(captures, joined)
    return concluded(captures, joined, exchanges, instances), captures, joined


def job(late: dict[int, int] | None = None, **options: object) -> World:
    """Four ranks, forty all_to_alls of several packets a message, noise of 0.1 ms."""
    uneven = noise()
    world = World("gloo", **({"packets": 8} | options))  # type: ignore[arg-type]
    run_job(
        world, LINEAR, 64_000, [0, 1, 2, 3], 40,
        late=lambda rank, turn: (late or {}).get(rank, 0) + uneven.randrange(100_000),
    )  # fmt: skip
    return world


def conditions(result: Analysis) -> list[str]:
    return [f.condition for f in result.findings]


def only(result: Analysis, condition: str) -> Finding:
    (found,) = [f for f in result.findings if f.condition == condition]
    return found


def test_a_sound_job_has_no_findings() -> None:
    assert analysed(job(), 4)[0].findings == []


def test_straggler_and_its_evidence() -> None:
    world = job({2: 5 * MS})
    result, captures, joined = analysed(world, 4)
    assert conditions(result) == ["straggler"]
    found = result.findings[0]
    assert found.endpoints == [2]
    assert "10.0.0.3 entered" in found.summary
    assert found.severity == "critical"  # a third of all time
    assert "move the rank to another GPU" in found.advice
    assert found.alternatives
    assert len(found.evidence) == 39
    for evidence in found.evidence:
        # The frames are those of a message by which rank 2 entered one of the late collectives.
        first, last = evidence.packets
        message = np.flatnonzero(captures[0].messages["first_frame"] + 1 == first)
        assert len(message) == 1
        transfer = joined.transfers[message[0]]
        assert last == captures[0].messages["last_frame"][message[0]] + 1
        assert transfer["src"] == 2
        entered = [played.enter_ns[2] + TIME_0 for played in world.played]
        assert 0 <= min(int(transfer["sent_ns"]) - at for at in entered if at <= transfer["sent_ns"]) < MS
        dst = f"10.0.0.{transfer['dst'] + 1}"
        flow = joined.flows[captures[0].messages["flow"][message[0]]]
        ports = f"tcp.srcport == {flow['sport']} && tcp.dstport == {flow['dport']}"
        assert evidence.filter == f"ip.src == 10.0.0.3 && ip.dst == {dst} && {ports}"


def test_filter_of_roce_and_of_ipv6() -> None:
    def as_roce(captures: list[CaptureTables], joined: Joined) -> None:
        captures[0].flows["transport"] = Transport.ROCE
        captures[0].flows["dest_qp"] = 0x1F
        captures[0].endpoints["addr_hi"] = 0xFE80 << 48

    found = only(analysed(job({2: 5 * MS}), 4, as_roce)[0], "straggler")
    assert found.evidence[0].filter.startswith("ipv6.src == fe80::ffff:a00:3 && ipv6.dst == fe80::ffff:a00:")
    assert found.evidence[0].filter.endswith(" && infiniband.bth.destqp == 0x00001f")


def test_a_verdict_below_the_noise_of_one_collective_has_a_finding_too() -> None:
    """0.2 ms every time: none of the collectives is called late, the rank is."""
    uneven = noise(3)
    world = World("gloo", react=lambda: 300_000)
    run_job(
        world, RING, 4096, [0, 1, 2, 3], 80, compute_ns=2 * MS,
        late=lambda rank, turn: 140_000 * (rank == 1) + uneven.randrange(20_000),
    )  # fmt: skip
    result = analysed(world, 4)[0]
    (late,) = [row for row in result.lateness if row.verdict == "late"]
    assert (late.endpoint, late.cause, late.late_share) == (1, "compute", 0.0)
    assert only(result, "straggler").endpoints == [1]


def test_onset_dates_the_finding() -> None:
    uneven = noise()
    world = World("gloo")
    played = run_job(
        world, RING, 4096, [0, 1, 2, 3], 40,
        late=lambda rank, turn: 5 * MS * (rank == 1 and turn >= 15) + uneven.randrange(100_000),
    )  # fmt: skip
    result = analysed(world, 4)[0]
    found = only(result, "straggler")
    assert abs(found.start_ns - TIME_0 - played[15].enter_ns[1]) < MS
    assert found.end_ns > played[-1].enter_ns[1] + TIME_0


def test_slow_link_is_no_straggler() -> None:
    result = analysed(job(slow={(1, 2): 900.0}), 4)[0]
    assert conditions(result) == ["slow_link"]
    found = result.findings[0]
    assert found.endpoints == [1, 2]
    assert len(found.evidence) == 3
    assert {e.filter[:38] for e in found.evidence} == {"ip.src == 10.0.0.2 && ip.dst == 10.0.0"}
    assert "10.0.0.2 to 10.0.0.3" in found.summary
    pace = 7_000 * 900 / 16_000
    assert f"{8 / pace:.2f} Gbit/s" in found.summary
    assert f"{8 * 16_000 / 7_000:.2f} Gbit/s" in found.summary


def test_a_slow_link_seen_at_one_end_is_information() -> None:
    """What the captured node sends leaves in a burst: a message that arrives took longer anyway."""

    def one_node(_: list[CaptureTables], joined: Joined) -> None:
        joined.local[:] = [[2]]

    found = only(analysed(job(slow={(1, 2): 900.0}), 4, one_node)[0], "slow_link")
    assert (found.severity, found.confidence) == ("info", 0.5)
    assert "may be slow" in found.summary


def test_slow_links_of_one_node_are_one_finding() -> None:
    slow = {edge: 300.0 for r in (0, 1, 2) for edge in ((r, 3), (3, r))}
    result = analysed(job(slow=slow), 4)[0]
    found = only(result, "slow_link")
    assert found.endpoints[0] == 3
    assert sorted(found.endpoints) == [0, 1, 2, 3]
    assert found.summary.count("from ") == 6
    assert " and from " in found.summary
    assert "straggler" not in conditions(result)


def test_loss_is_no_straggler() -> None:
    world = World("gloo", packets=8)
    uneven = noise()
    free = dict.fromkeys(range(4), MS)
    for turn in range(40):
        world.lose_next = {(1, 2)} if turn % 3 == 2 else set()
        enter = {rank: at + 5 * MS + uneven.randrange(100_000) for rank, at in free.items()}
        free = world.play(LINEAR, 64_000, enter).leave_ns
    result, captures, joined = analysed(world, 4)
    assert conditions(result) == ["packet_loss"]
    found = result.findings[0]
    assert found.endpoints == [1, 2]
    assert found.summary.startswith("13 of 400 packets from 10.0.0.2 to 10.0.0.3 were retransmitted (3.25 %)")
    assert found.severity == "critical"
    assert {row.verdict for row in result.lateness} == {"on_time"}
    # The frames shown are those of messages that came again.
    for evidence in found.evidence:
        message = np.flatnonzero(captures[0].messages["first_frame"] + 1 == evidence.packets[0])
        assert joined.transfers["retransmitted"][message[0]] == 1
        assert evidence.filter.startswith("ip.src == 10.0.0.2 && ip.dst == 10.0.0.3")
    assert len(found.evidence) == 3


@pytest.mark.parametrize(("lost", "held_ms", "severity"), [(1, 1, "info"), (4, 3, "info"), (1, 150, "info")])
def test_loss_is_as_severe_as_what_it_cost(lost: int, held_ms: int, severity: str) -> None:
    """No step was longer for it, and none of them lay on a step's path (what others cost: test_ports)."""

    def change(captures: list[CaptureTables], joined: Joined) -> None:
        flow = joined.flows[0]
        joined.flows["retransmitted"][0], joined.flows["packets"][0] = 50, 1000
        transfers = joined.transfers
        mine = np.flatnonzero((transfers["src"] == flow["src"]) & (transfers["bytes"] > 0))
        hit = mine[:: len(mine) // lost][:lost]
        transfers["retransmitted"][hit] = 1
        transfers["arrived_end_ns"][hit] += held_ms * MS

    found = only(analysed(job(), 4, change)[0], "packet_loss")
    assert found.severity == severity, found.summary
    assert f"Messages were delayed for {lost * held_ms}" in found.summary


def hold(joined: Joined, src: int, dst: int, held_ns: int = MS) -> None:
    """One message on the way was sent again, and took longer for it."""
    transfers = joined.transfers
    one = np.flatnonzero((transfers["src"] == src) & (transfers["dst"] == dst) & (transfers["bytes"] > 0))[3]
    transfers["retransmitted"][one] = 1
    transfers["arrived_end_ns"][one] += held_ns


@pytest.mark.parametrize(("spurious", "held_ns"), [(50, MS), (49, MS), (0, 0)])
def test_repeats_that_nobody_needed_or_that_held_up_nothing_are_no_loss(spurious: int, held_ns: int) -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        flow = joined.flows[0]
        joined.flows["retransmitted"][0], joined.flows["packets"][0] = 50, 1000
        joined.flows["spurious"][0] = spurious
        if held_ns:
            hold(joined, int(flow["src"]), int(flow["dst"]), held_ns)

    assert "packet_loss" not in conditions(analysed(job(), 4, change)[0])


def test_a_long_start_up_makes_a_straggler_no_less_severe() -> None:
    """Ten collectives without anybody late, ten with 1 ms of waiting in every 10 ms: a tenth since then."""
    at = np.arange(20) * 10 * MS
    entries = SimpleNamespace(
        enter_ns=np.repeat(at, 2),
        leave_ns=np.repeat(at + 10 * MS, 2),
        offsets=np.arange(0, 41, 2),
        collective=np.repeat(np.arange(20), 2),
    )
    wait = np.where(np.repeat(at, 2) >= 100 * MS, MS, 0) * (np.arange(40) % 2)
    known = typing.cast(Inferred, SimpleNamespace(entries=entries, charges=SimpleNamespace(cost_ns=wait)))
    rows = np.flatnonzero(wait)
    late = typing.cast(Lateness, SimpleNamespace(steadiness="persistent", since_ns=None))
    begin = _began(known, rows, late)
    assert (begin, _share(known, rows, (0, 200 * MS))) == (100 * MS, pytest.approx(0.05))
    assert _share(known, rows, (0, 200 * MS), begin) == pytest.approx(0.1)
    late.steadiness = "transient"
    assert _began(known, rows, late) is None


def test_losses_around_one_node_are_one_finding() -> None:
    """It repeats what it sends, the others what they send to it; a way between two others is another."""

    def change(captures: list[CaptureTables], joined: Joined) -> None:
        flows = joined.flows
        near = (flows["src"] == 2) | (flows["dst"] == 2)
        flows["retransmitted"][near], flows["packets"][near] = 50, 1000
        hold(joined, 2, 3)

    result, _, _ = analysed(job(), 4, change)
    found = only(result, "packet_loss")
    assert found.endpoints == [2, 0, 1, 3]
    assert found.summary.startswith("300 of 6,000 packets from and to 10.0.0.3 were retransmitted")

    def more(captures: list[CaptureTables], joined: Joined) -> None:
        change(captures, joined)
        other = (joined.flows["src"] == 0) & (joined.flows["dst"] == 1)
        joined.flows["retransmitted"][other], joined.flows["packets"][other] = 60, 1000
        hold(joined, 0, 1)

    result = analysed(job(), 4, more)[0]
    assert [f.endpoints for f in result.findings if f.condition == "packet_loss"] == [[2, 0, 1, 3], [0, 1]]


@pytest.mark.parametrize(
    ("again", "packets", "expected"), [(1, 100, 0), (2, 100, 1), (9, 100_000, 0), (11, 100_000, 1)]
)
def test_everyday_retransmissions_are_no_finding(again: int, packets: int, expected: int) -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["retransmitted"][0], joined.flows["packets"][0] = again, packets
        hold(joined, int(joined.flows["src"][0]), int(joined.flows["dst"][0]))

    assert conditions(analysed(job(), 4, change)[0]).count("packet_loss") == expected


def test_congestion() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["ecn_marked"][3] = 17

    result, _, joined = analysed(job(), 4, change)
    found = only(result, "congestion")
    assert found.endpoints == [int(joined.flows["src"][3]), int(joined.flows["dst"][3])]
    assert found.summary.startswith(f"17 of {joined.flows['packets'][3]:,} packets from ")
    assert " are ECN-marked; 0 CNPs were seen. " in found.summary


@pytest.mark.parametrize(("lost", "severity"), [(0, None), (None, None), (1, "info"), (500, "warning")])
def test_capture_loss(lost: int | None, severity: str | None) -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.captures[0].lost_packets = lost
        joined.captures[0].packets = 20_000

    result = analysed(job(), 4, change)[0]
    assert [f.severity for f in result.findings] == ([severity] if severity else [])
    assert any(str(lost) in limit for limit in result.limits) == bool(lost)


@pytest.mark.parametrize("messages", [True, False])
def test_a_clock_tied_to_no_other(messages: bool) -> None:
    """Of a capture that holds no messages nothing is left out."""

    def change(captures: list[CaptureTables], joined: Joined) -> None:
        own = replace(captures[0].info, id=len(captures), vantage="node9")
        rows = np.zeros(int(messages), captures[0].messages.dtype)
        joined.captures.append(own)
        joined.clocks.append(Clock(len(captures), False, "none"))
        joined.local.append([])
        captures.append(replace(captures[0], info=own, messages=rows))

    found = [each for each in analysed(job(), 4, change)[0].findings if each.condition == "clock_untied"]
    assert ["node9" in each.summary for each in found] == [True] * messages


def test_ids_are_positions() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["ecn_marked"][:3] = 1
        joined.captures[0].lost_packets = 1

    findings = analysed(job({2: 5 * MS}), 4, change)[0].findings
    assert len(findings) == 5
    assert [f.id for f in findings] == [0, 1, 2, 3, 4]


def test_marks_towards_one_receiver_are_one_finding() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        towards = joined.flows["dst"] == 2
        joined.flows["ecn_marked"][towards] = 5
        joined.transfers["ecn_marked"][joined.transfers["dst"] == 2] = 1

    result = analysed(job(), 4, change)[0]
    found = only(result, "congestion")
    assert found.endpoints == [0, 1, 3, 2]
    assert found.summary.startswith("15 of ")
    assert len(found.evidence) == 3
    assert all("ip.dst == 10.0.0.3" in each.filter for each in found.evidence)


def test_receivers_that_refuse_starve_their_senders() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        back = np.flatnonzero((joined.flows["src"] == 3) & (joined.flows["dst"] == 0))
        joined.flows["rnr"][back] = 7
        joined.transfers["retransmitted"][np.flatnonzero(joined.transfers["dst"] == 3)[5]] = 1

    found = only(analysed(job(), 4, change)[0], "credit_starvation")
    assert found.endpoints == [3, 0]
    assert "10.0.0.4 refused messages from 10.0.0.1 7 times" in found.summary
    assert "receiver" in found.advice
    assert found.evidence


@pytest.mark.parametrize(
    ("wire", "found"), [(Wire.ROCE_WRITE_IMM, 1), (Wire.GLOO_DATA, 0), (Wire.OB1_RNDV, 0)]
)
def test_credits_given_in_the_call_show_a_late_rank_and_no_slow_receiver(wire: Wire, found: int) -> None:
    rows = EXCHANGE.zeros(80)
    rows["dst"], rows["wire"] = np.arange(80) % 4, wire
    rows["grant_ns"], rows["grant_arrived_ns"] = np.arange(80) * MS, np.arange(80) * MS + 1000
    # All that is sent to rank 2 leaves at once, to others after a while.
    rows["data_ns"] = rows["grant_arrived_ns"] + np.where(rows["dst"] == 2, 500, MS // 2)
    result, captures, joined = analysed(job(), 4)
    case: Any = SimpleNamespace(
        inferred=SimpleNamespace(accounts=[SimpleNamespace(step_ns=MS, credit=MS // 4)], receivers=[]),
        exchanges=rows,
        lost_ns=0,
        span_ns=lambda *ends: 80 * MS,
        cost=lambda share, ends: Cost(0, share),
        result=result,
        captures=captures,
        joined=joined,
    )
    assert len(list(find_late_credits(case))) == found


def test_a_slow_link_whose_receiver_closed_its_window_is_no_slow_link() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        back = (joined.flows["src"] == 2) & (joined.flows["dst"] == 1)
        joined.flows["zero_window"][back] = 12

    result = analysed(job(slow={(1, 2): 900.0}), 4, change)[0]
    assert conditions(result) == ["credit_starvation"]
    assert "advertised a zero window 12 times" in result.findings[0].summary


def test_gaps_that_were_acknowledged_are_lost_by_the_capture() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        captures[0].flows["missing"][0], captures[0].info.packets = 3, 1000

    found = only(analysed(job(), 4, change)[0], "capture_loss")
    assert (
        found.summary == "3 gaps in streams were acknowledged although node0 never captured what fills them."
    )
    assert found.evidence[0].capture == 0


def test_ranks_late_in_turn_share_one_finding() -> None:
    uneven, world = noise(), World("gloo")
    run_job(
        world, RING, 4096, [0, 1, 2, 3], 72,
        late=lambda rank, turn: 6 * MS * (turn % 3 == 0 and rank == turn // 3 % 4) + uneven.randrange(99_000),
    )  # fmt: skip
    found = only(analysed(world, 4)[0], "straggler")
    assert sorted(found.endpoints) == [0, 1, 2, 3]
    assert "in turn" in found.summary
    assert "garbage collection" in found.alternatives


def test_no_advice_asks_for_new_hardware() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["ecn_marked"][3] = joined.flows["rnr"][1] = 9
        joined.flows["retransmitted"][2] = 50
        hold(joined, int(joined.flows["src"][2]), int(joined.flows["dst"][2]))
        joined.captures[0].lost_packets, joined.captures[0].packets = 5, 1000

    found = analysed(job({2: 5 * MS}, slow={(0, 1): 900.0}), 4, change)[0].findings
    assert {f.condition for f in found} >= {
        "straggler",
        "slow_link",
        "packet_loss",
        "congestion",
        "capture_loss",
    }
    for finding in found:
        assert "replace" not in finding.advice.lower()
        assert finding.advice
        assert finding.evidence


def test_every_runbook_is_there() -> None:
    root = Path(__file__).resolve().parents[1]
    for row in TABLE.values():
        path, anchor = row.runbook.split("#")
        headings = re.findall(r"^#+ (.+)$", (root / path).read_text(), re.MULTILINE)
        assert anchor in headings, row.runbook


def test_the_runbook_is_that_of_the_table() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "runbook.md").read_text()
    assert page.split(MARK)[1].lstrip("\n") == runbook(), "make docs"


def test_the_table_is_that_of_the_detectors() -> None:
    """Each condition has a detector, or another one's tells it; what it explains and needs is there."""
    told = {name for _, names in DETECTORS for name in names}
    assert told == {row.name for row in TABLE.values() if not row.told_as}
    for row in TABLE.values():
        assert set(row.explains) <= set(TABLE)
        assert set(row.needs) <= set(NEEDS)
        assert row.observability == "direct" or row.why
        assert not row.told_as or (row.told_as in told and row.name in TABLE[row.told_as].explains)
        assert "replace" not in row.advice.lower()
    assert len(TABLE) == 28 + len(("slow_link", "hang", "desync", "capture_loss", "clock_untied"))


def test_a_detector_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(case: Case) -> typing.Iterator[Finding]:
        raise ZeroDivisionError("of a test")

    others = tuple(row for row in DETECTORS if "congestion" not in row[1])
    monkeypatch.setattr("dpuflow.findings.build.DETECTORS", ((broken, ("congestion",)), *others))
    result = analysed(job({2: 5 * MS}), 4)[0]
    assert conditions(result) == ["straggler"]
    (said,) = [limit for limit in result.limits if "ZeroDivisionError" in limit]
    assert "congestion" in said
    (state,) = [row for row in result.judged if row.condition == "congestion"]
    assert (state.state, state.reason) == ("not_judged", "its detector failed (see limits)")


def test_silence_and_blindness_do_not_look_alike() -> None:
    result = analysed(job(), 4)[0]
    states = {row.condition: row for row in result.judged}
    assert list(states) == list(TABLE)
    assert states["straggler"].state == "not_found"
    assert states["admission_backlog"].state == "not_judged"
    assert "client" in (states["admission_backlog"].reason or "")
    assert all(row.reason for row in result.judged if row.state == "not_judged")


def test_a_slow_port_explains_the_marks_towards_it() -> None:
    slow = {edge: 300.0 for r in (0, 1, 2) for edge in ((r, 3), (3, r))}

    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["ecn_marked"][joined.flows["dst"] == 3] = 5
        joined.flows["ecn_marked"][(joined.flows["dst"] == 1) & (joined.flows["src"] == 0)] = 5

    found = analysed(job(slow=slow), 4, change)[0].findings
    assert [f.condition for f in found] == ["slow_link", "congestion"]
    assert [(part.condition, part.endpoints) for part in found[0].consists_of] == [
        ("congestion", [0, 1, 2, 3])
    ]
    assert found[1].endpoints == [0, 1]


def test_a_mark_that_cost_nothing_is_information() -> None:
    def change(captures: list[CaptureTables], joined: Joined) -> None:
        one = np.flatnonzero((joined.transfers["dst"] == 2) & (joined.transfers["bytes"] > 0))[7]
        joined.flows["ecn_marked"][(joined.flows["dst"] == 2) & (joined.flows["src"] == 0)] = 1
        joined.transfers["ecn_marked"][one] = 1

    assert only(analysed(job(), 4, change)[0], "congestion").severity == "info"


def test_marks_that_nobody_waited_for_are_information() -> None:
    """What the marked messages took longer is told; the ranks work for longer than that (what marks cost that
    steps wait for: test_ports)."""

    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["ecn_marked"][(joined.flows["dst"] == 2) & (joined.flows["src"] == 0)] = 9
        mine = np.flatnonzero((joined.transfers["dst"] == 2) & (joined.transfers["src"] == 0))
        hit = mine[(joined.transfers["bytes"][mine] > 0)][::4]
        joined.transfers["ecn_marked"][hit] = 1
        joined.transfers["arrived_end_ns"][hit] += MS
        hit_ns.append(MS * len(hit))

    hit_ns: list[int] = []
    result = analysed(job(), 4, change)[0]
    found = only(result, "congestion")
    assert found.severity == "info", found.cost_share
    assert f"Marked messages took {duration(hit_ns[0])[:2]}" in found.summary


def test_what_another_finding_explains_is_told_with_it(tmp_path: Path) -> None:
    """Loss that may be why a link is slow: in every rendering, with its packets, and to be exported."""

    def change(captures: list[CaptureTables], joined: Joined) -> None:
        joined.flows["ecn_marked"][joined.flows["dst"] == 3] = 5

    slow = {edge: 300.0 for r in (0, 1, 2) for edge in ((r, 3), (3, r))}
    result = analysed(job(slow=slow), 4, change)[0]
    (part,) = result.findings[0].consists_of
    assert part.condition == "congestion"
    assert part.evidence
    text, page = io.StringIO(), tmp_path / "page.html"
    write_text(result, text, columns=200)
    write_html(result, str(page))
    for told in (text.getvalue(), "\n".join(markdown_lines(result)).replace("\\", ""), page.read_text()):
        assert f"congestion ({percent(part.confidence)} sure)" in told
        assert part.summary[:40] in " ".join(told.split())
    value = json.loads("".join(json_lines(result)))
    named = finding_of(value, "congestion")
    assert (named["id"], named["evidence"]) == (0, value["findings"][0]["consists_of"][0]["evidence"])
    with pytest.raises(OptionError, match=r"it has: 0 \(slow_link\), congestion"):
        finding_of(value, "straggler")
