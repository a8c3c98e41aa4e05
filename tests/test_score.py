"""Scoring, on made-up analyses whose figures can be worked out by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_results import ADDRESSES, MS, T0, collective, job

from dpuflow.errors import TruthError
from dpuflow.reports.json import json_lines
from dpuflow.reports.scores import score_lines
from dpuflow.results import Analysis, RankEntry
from dpuflow.schema.tables import Clock
from dpuflow.scoring.figures import percentile
from dpuflow.scoring.score import Score, add_scores, score_case, score_files
from dpuflow.scoring.truth import place_case

ROUNDS = 10


def as_json(result: Analysis) -> dict[str, Any]:
    value: dict[str, Any] = json.loads("".join(json_lines(result)))
    return value


def meta_of(**changes: Any) -> dict[str, Any]:
    """Four ranks; rank 2 was made late in every iteration."""
    meta: dict[str, Any] = {
        "case": "made_up",
        "software": "pytorch-gloo",
        "algorithm": "ring",
        "nodes": [
            {"rank": i, "ip": address, "capture": f"node{i}.pcap.gz"} for i, address in enumerate(ADDRESSES)
        ],
        "fault": {"compute": {"kind": "persistent", "rank": 2, "ms": 10}, "network": None},
    }
    return meta | changes


def truth_of(result: Analysis) -> dict[str, Any]:
    """The truth of which ``result`` tells nothing but what happened."""
    rows = []
    for k, row in enumerate(result.collectives):
        rows.append(
            {
                "seq": k,
                "iter": k,
                "op": row.op,
                "bytes": row.bytes,
                "enter_ns": [entry.enter_ns for entry in row.ranks],
                "leave_ns": [entry.leave_ns for entry in row.ranks],
                "injected_ns": [0, 0, 10 * MS, 0],
            }
        )
    return {"collectives": rows}


def figures(result: Analysis, truth: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    analysis = as_json(result)
    case = place_case(truth or truth_of(job(late_ms=10)), meta_of(**meta), analysis, "made_up")
    return score_case(analysis, case).figures()


def test_a_perfect_analysis() -> None:
    assert figures(job(late_ms=10)) == {
        "cases": ["made_up"],
        "true": ROUNDS,
        "found": ROUNDS,
        "found_share": 1,
        "invented": 0,
        "invented_outside": 0,
        "invented_share": 0,
        "uncounted": 0,
        "op_right": 1,
        "algorithm_right": 1,
        "algorithm_by_alternative": 0,
        "bytes_right": 1,
        "enter_error_median_ns": 0,
        "enter_error_p90_ns": 0,
        "lateness_error_median_ns": 0,
        "lateness_error_p90_ns": 0,
        "exact_share": 1,
        "intervals": 4 * ROUNDS,
        "intervals_held": 1,
        "bounds": 0,
        "bounds_violated": 0,
        "last_asked": ROUNDS,
        "last_right": 1,
        "last_untold": 0,
        "late_precision": 1,
        "late_recall": 1,
        "verdicts": 1,
        "verdicts_right": 1,
        "verdict_notes": [],
        "clock_error_max_ns": 0,
    }


def test_one_missed() -> None:
    result = job(late_ms=10)
    del result.collectives[4]
    found = figures(result)
    assert (found["true"], found["found"], found["found_share"], found["invented"]) == (10, 9, 0.9, 0)
    assert (found["last_asked"], found["last_right"], found["last_untold"]) == (10, 0.9, 1)
    assert (found["late_precision"], found["late_recall"]) == (1, 0.9)


def test_one_invented_between_two() -> None:
    result = job(late_ms=10)
    result.collectives.append(collective(10, [0, 0, 0, 0], start_ms=25))
    found = figures(result)
    assert (found["found"], found["invented"], found["invented_share"]) == (10, 1, round(1 / 11, 6))
    assert found["invented_outside"] == 0
    result.collectives[-1] = collective(10, [0, 0, 0, 0], start_ms=-30)
    assert figures(result)["invented_outside"] == 1


def test_one_split_in_two_is_one_found_and_one_invented() -> None:
    result = job(late_ms=10)
    whole = result.collectives[3]
    half = copy.deepcopy(whole)
    whole.end_ns, half.start_ns = whole.start_ns + 4 * MS, whole.start_ns + 4 * MS
    result.collectives.append(half)
    found = figures(result)
    assert (found["found"], found["invented"]) == (10, 1)


def test_one_with_other_endpoints_is_not_it() -> None:
    result = job(late_ms=10)
    result.collectives[0].ranks = result.collectives[0].ranks[:1]
    found = figures(result)
    assert (found["found"], found["invented"]) == (9, 1)


def test_half_of_the_endpoints_are_enough() -> None:
    result = job(late_ms=10)
    result.collectives[0].ranks = result.collectives[0].ranks[1:3]
    found = figures(result)
    assert (found["found"], found["exact_share"]) == (10, round(38 / 40, 6))


def test_concurrent_groups_are_not_mixed_up() -> None:
    """Two pairs do the same at the same time; the guesses come in the other order."""
    truth = {"collectives": []}
    result = job(late_ms=10, iterations=0)
    for k, (a, b) in enumerate(((0, 1), (2, 3))):
        times: list[int | None] = [None] * 4
        times[a], times[b] = T0, T0 + 5 * MS
        leaves = [None if t is None else T0 + 9 * MS for t in times]
        truth["collectives"].append(
            {"seq": k, "iter": 0, "op": "all_reduce", "bytes": 262144, "enter_ns": times, "leave_ns": leaves}
        )
        guess = collective(1 - k, [0, 5])
        guess.ranks[0].endpoint, guess.ranks[1].endpoint = a, b
        result.collectives.insert(0, guess)
    result.end_ns = T0 + 20 * MS
    found = figures(result, truth)
    assert (found["found"], found["last_asked"], found["last_right"], found["exact_share"]) == (2, 2, 1, 1)


def test_a_host_that_comes_back_late_from_one_call_does_not_swap_it_with_the_next() -> None:
    """Rank 0 sleeps in the first of two calls: the first one's span is that of the second one's packets."""
    calls = [
        ("broadcast", [0, 2, 0, 0], [17, 9, 6, 1]),
        ("all_to_all", [17, 9, 6, 1], [17.2, 20.5, 17.1, 17.3]),
    ]
    truth = {"collectives": []}
    for k, (op, enters, leaves) in enumerate(calls):
        times = [[T0 + round(ms * MS) for ms in part] for part in (enters, leaves)]
        truth["collectives"].append(
            {"seq": k, "iter": 0, "op": op, "bytes": 65536, "enter_ns": times[0], "leave_ns": times[1]}
        )
    result = job(late_ms=10, iterations=0)
    # What the packets show: the data of the first was there early; the host's next message comes late.
    for k, (op, enters, leaves) in enumerate(
        [("broadcast", [0.1, 2.1, 0.1, 0.1], [6.1, 8.9, 5.9, 0.8]), ("all_to_all", calls[1][1], [17.2] * 4)]
    ):
        guess = collective(k, enters, op=op, bytes=65536)
        for rank, leave in zip(guess.ranks, leaves, strict=True):
            rank.leave_ns = T0 + round(leave * MS)
        guess.end_ns = T0 + round(max(leaves) * MS)
        result.collectives.append(guess)
    result.end_ns = T0 + 40 * MS
    found = figures(result, truth)
    assert (found["found"], found["op_right"], found["last_right"]) == (2, 1, 1)


def test_wrong_last_rank_and_wrong_op() -> None:
    result = job(late_ms=10)
    row = result.collectives[0]
    row.ranks[1].lateness_ns = 20 * MS
    row.op, row.algorithm, row.bytes = "all_gather", "tree", None
    result.collectives[1].algorithm, result.collectives[1].alternatives = "tree", ["ring"]
    found = figures(result)
    assert (found["last_right"], found["op_right"], found["bytes_right"]) == (0.9, 0.9, 0.9)
    assert (found["algorithm_right"], found["algorithm_by_alternative"]) == (0.9, 1)
    assert found["late_precision"] == round(10 / 11, 6)
    assert found["lateness_error_median_ns"] == 0


def test_reduce_scatter_of_gloo_looks_like_all_reduce() -> None:
    truth = truth_of(job(late_ms=10))
    for row in truth["collectives"]:
        row["op"] = "reduce_scatter"
    assert figures(job(late_ms=10), truth)["op_right"] == 1
    assert figures(job(late_ms=10), truth, software="openmpi")["op_right"] == 0


def test_errors_and_bounds() -> None:
    """Of one collective: one 0.3 ms early, one bound kept, one bound violated by 0.6 ms, one not seen."""
    truth = truth_of(job(late_ms=10, iterations=1))
    result = job(late_ms=10, iterations=1)
    entries = result.collectives[0].ranks
    entries[0] = RankEntry(0, None, None, None, None, "unobservable", "unknown", "")
    entries[1].bound, entries[1].lateness_ns = "at_most", round(0.2 * MS)  # truth: 0.1 ms
    entries[2].enter_ns -= round(0.3 * MS)  # type: ignore[operator]
    entries[2].lateness_ns -= round(0.3 * MS)  # type: ignore[operator]
    entries[3].bound, entries[3].lateness_ns = "at_least", round(0.9 * MS)  # truth: 0.3 ms
    found = figures(result, truth)
    assert found["exact_share"] == 0.25
    assert found["lateness_error_median_ns"] == found["enter_error_p90_ns"] == 300_000
    assert (found["bounds"], found["bounds_violated"]) == (2, 1)
    assert found["last_right"] == 1


def test_an_upper_bound_claims_nobody_late() -> None:
    result = job(late_ms=10)
    for row in result.collectives:
        row.ranks[2].bound = "at_most"
    found = figures(result)
    assert (found["late_recall"], found["late_precision"], found["last_right"]) == (0, None, 0)
    assert found["bounds_violated"] == 0


def test_ranks_near_the_threshold_are_left_out() -> None:
    truth = truth_of(job(late_ms=10, iterations=1))
    truth["collectives"][0]["enter_ns"][2] = T0 + round(2.5 * MS)
    found = figures(job(late_ms=0, iterations=1), truth)
    assert (found["late_recall"], found["late_precision"]) == (None, None)
    truth["collectives"][0]["enter_ns"][2] = T0 + round(2.7 * MS)
    assert figures(job(late_ms=0, iterations=1), truth)["late_recall"] == 0


def test_last_is_asked_only_beyond_the_margin() -> None:
    truth = truth_of(job(late_ms=0))
    assert figures(job(late_ms=0), truth)["last_asked"] == 0


def test_warm_up_counts_neither_way() -> None:
    truth = truth_of(job(late_ms=10))
    truth["collectives"][0]["iter"] = -1
    found = figures(job(late_ms=10), truth)
    assert (found["true"], found["found"], found["invented"], found["uncounted"]) == (9, 9, 0, 1)
    result = job(late_ms=10)
    del result.collectives[0]
    found = figures(result, truth)
    assert (found["true"], found["found"], found["uncounted"]) == (9, 9, 0)


def test_a_partial_one_counts_neither_way() -> None:
    """The captures begin in the middle of the first collective."""
    truth = truth_of(job(late_ms=10))
    result = job(late_ms=10)
    result.start_ns = T0 + 5 * MS
    first = result.collectives[0]
    first.complete, first.start_ns = False, T0 + 5 * MS
    for entry in first.ranks:
        entry.lateness_ns = None
    found = figures(result, truth)
    assert (found["true"], found["found"], found["invented"], found["uncounted"]) == (9, 9, 0, 1)
    del result.collectives[0]
    assert figures(result, truth)["found_share"] == 1
    first.complete = True  # found whole all the same: counts
    result.collectives.insert(0, first)
    assert figures(result, truth)["true"] == 10


def test_a_missed_one_within_the_capture_is_no_partial_one() -> None:
    result = job(late_ms=10)
    result.collectives[5].complete = False
    found = figures(result)
    assert (found["true"], found["found"]) == (10, 10)


def test_transfers_are_invented_only_where_the_truth_lists_some() -> None:
    result = job(late_ms=10)
    result.collectives.append(collective(10, [0, 0], start_ms=30, op="send_recv"))
    found = figures(result)
    assert (found["invented"], found["uncounted"]) == (0, 1)
    truth = truth_of(job(late_ms=10))
    truth["collectives"][0]["op"] = "send_recv"
    assert figures(result, truth)["invented"] == 1


def test_ranks_that_share_an_endpoint_are_the_latest_of_them() -> None:
    meta = meta_of()
    meta["nodes"][2]["ip"] = meta["nodes"][3]["ip"]
    result = job(late_ms=10)
    result.endpoints[2].addresses = ["10.9.9.9"]
    result.endpoints[2].address = "10.9.9.9"
    case = place_case(truth_of(job(late_ms=10)), meta, as_json(result), "made_up")
    lateness = case.collectives[0].lateness_ns
    assert lateness == {0: 0, 1: round(0.1 * MS), 3: round(10.2 * MS)}


def test_nodes_may_have_several_addresses_in_any_form() -> None:
    meta = meta_of()
    del meta["nodes"][0]["ip"]
    meta["nodes"][0]["ips"] = ["fe80::1", "::ffff:10.0.0.1"]
    case = place_case(truth_of(job(late_ms=10)), meta, as_json(job(late_ms=10)), "made_up")
    assert case.endpoint_of_rank == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_rank_that_nobody_saw_is_missing_not_fatal() -> None:
    found = figures(job(late_ms=10), nodes=[*meta_of()["nodes"][:3], {"rank": 3, "ip": "10.8.8.8"}])
    assert (found["found"], found["exact_share"]) == (10, 0.75)


def test_the_root_of_an_open_mpi_broadcast_is_not_asked_for() -> None:
    truth = truth_of(job(late_ms=10))
    for row in truth["collectives"]:
        row["op"], row["root"] = "broadcast", 2
    assert figures(job(late_ms=10), truth)["last_asked"] == ROUNDS
    found = figures(job(late_ms=10), truth, software="openmpi")
    assert (found["last_asked"], found["late_recall"]) == (0, None)


def shifted_clocks(offsets_ms: list[float]) -> list[dict[str, Any]]:
    return [
        {"capture": f"node{i}.pcap.gz", "offset_ns": round(ms * MS), "drift_ppb": 0.0, "at_node0_ns": T0}
        for i, ms in enumerate(offsets_ms)
    ]


def test_clock_errors_are_the_larger_of_both_ends() -> None:
    clocks = shifted_clocks([0, 500, -20, 3])
    clocks[1]["drift_ppb"] = 1000.0
    result = job(late_ms=10)
    span_ns = 10 * 40 * MS
    result.clocks[1] = Clock(1, False, "estimated", 500 * MS + 30, 0, 100)
    result.clocks[2] = Clock(2, False, "estimated", -20 * MS - 7, 0, 100)
    result.clocks[3] = Clock(3, False, "none")
    found = figures(result, clocks=clocks)
    assert found["clock_error_max_ns"] == span_ns // 1_000_000 - 30
    assert found["lateness_error_p90_ns"] == 0


def test_truth_is_moved_to_the_reference_clock() -> None:
    """Node 1 is the reference, half a second ahead of node 0, on whose clock the truth is told."""
    truth = truth_of(job(late_ms=10))
    for row in truth["collectives"]:
        for key in ("enter_ns", "leave_ns"):
            row[key] = [time - 500 * MS for time in row[key]]
    result = job(late_ms=10)
    result.clocks = [Clock(i, i == 1, "reference" if i == 1 else "estimated", 0, 0, 0) for i in range(4)]
    result.clocks[0].offset_ns = -500 * MS
    found = figures(result, truth, clocks=shifted_clocks([0, 500, 500, 500]))
    assert (found["found"], found["enter_error_p90_ns"], found["clock_error_max_ns"]) == (10, 0, 0)


def test_clocks_may_name_captures_without_suffix_and_hold_at_the_references_first_packet() -> None:
    """Node 1 is the reference of the analysis, the truth is on node 0's clock, each first packet is at T0."""
    result = job(late_ms=10)
    truth = truth_of(result)
    for row in truth["collectives"]:
        for key in ("enter_ns", "leave_ns"):
            row[key] = [time - 500 * MS for time in row[key]]
    result.clocks = [Clock(i, i == 1, "reference" if i == 1 else "estimated", 0, 0, 0) for i in range(4)]
    result.clocks[0].offset_ns = -500 * MS
    for capture in result.captures:
        capture.first_ns = T0 - 500 * MS if capture.id == 0 else T0
    clocks = [
        {"capture": f"node{i}", "offset_ns": 500 * MS if i else 0, "drift_ppb": 10_000 if i == 2 else 0}
        for i in range(4)
    ]
    found = figures(result, truth, clocks=clocks, reference="node0")
    assert (found["found"], found["enter_error_p90_ns"]) == (10, 0)
    span_ns = result.captures[1].last_ns - T0
    assert found["clock_error_max_ns"] == pytest.approx(span_ns * 1e-5, abs=1)
    without = figures(result, truth, clocks=clocks[1:], reference="node0")
    assert (without["found"], without["enter_error_p90_ns"]) == (10, 0)


def test_a_switch_as_reference_uses_the_times_on_its_clock() -> None:
    truth = truth_of(job(late_ms=10))
    truth["calls"] = [
        {
            "ranks": [
                {"rank": r, "enter_lab_ns": row["enter_ns"][r], "leave_lab_ns": row["leave_ns"][r]}
                for r in range(4)
            ]
        }
        for row in truth["collectives"]
    ]
    for row in truth["collectives"]:
        row["enter_ns"] = [time + 7_000_000 * MS for time in row["enter_ns"]]
    result = job(late_ms=10)
    result.captures[0].files = ["central.pcap.gz"]
    meta = {"clocks": shifted_clocks([0, 1, 2, 3])[1:]}
    found = figures(result, truth, **meta)
    assert (found["found"], found["enter_error_p90_ns"], found["clock_error_max_ns"]) == (10, 0, None)
    del truth["calls"]
    with pytest.raises(TruthError, match="no clock for the reference"):
        figures(result, truth, **meta)


@pytest.mark.parametrize(
    ("fault", "verdicts", "right"),
    [
        (None, {}, True),
        (None, {2: ("late", "persistent")}, False),
        (None, {2: ("intermittent", "transient")}, True),
        ({"kind": "persistent", "rank": 2}, {2: ("late", "persistent")}, True),
        ({"kind": "persistent", "rank": 2}, {2: ("late", "transient")}, False),
        ({"kind": "persistent", "rank": 2}, {1: ("late", "persistent")}, False),
        ({"kind": "persistent", "rank": 2}, {}, False),
        ({"kind": "persistent"}, {2: ("late", "persistent")}, True),
        ({"kind": "random"}, {0: ("intermittent", "transient"), 1: ("intermittent", None)}, True),
        ({"kind": "random"}, {0: ("late", "persistent")}, False),
        ({"kind": "random"}, {}, False),
        ({"kind": "rotating"}, dict.fromkeys(range(4), ("intermittent", "rotating")), True),
        ({"kind": "rotating"}, dict.fromkeys(range(4), ("late", "persistent")), False),
        ({"kind": "transient", "rank": 2}, {2: ("intermittent", "transient")}, True),
        ({"kind": "transient", "rank": 2}, {2: ("late", "transient")}, True),
        ({"kind": "transient", "rank": 2}, {2: ("late", "persistent")}, False),
        ({"kind": "transient", "rank": 2}, {2: ("late", "transient"), 1: ("late", "persistent")}, False),
        ({"kind": "transient", "rank": 2}, {}, False),
        ({"kind": "two", "ms_by_rank": {"1": 5, "3": 8}}, {1: ("late", None), 3: ("late", None)}, True),
        ({"kind": "two", "ms_by_rank": {"1": 5, "3": 8}}, {3: ("late", "persistent")}, False),
    ],
)
def test_verdicts(fault: dict[str, Any] | None, verdicts: dict[int, Any], right: bool) -> None:
    result = job(late_ms=10)
    for row in result.lateness:
        row.verdict, row.steadiness = verdicts.get(row.endpoint, ("on_time", None))
    found = figures(result, fault={"compute": fault, "network": None})
    assert found["verdicts_right"] == right
    assert len(found["verdict_notes"]) == (not right)


@pytest.mark.parametrize(("since_iter", "right"), [(5, True), (4, True), (0, False), (None, False)])
def test_the_onset_must_be_near(since_iter: int | None, right: bool) -> None:
    result = job(late_ms=10)
    result.lateness[2].since_ns = None if since_iter is None else T0 + since_iter * 40 * MS
    fault = {"compute": {"kind": "persistent", "rank": 2, "from_iter": 5}, "network": None}
    assert figures(result, fault=fault)["verdicts_right"] == right


@pytest.mark.parametrize(("cause", "right"), [("network", True), ("compute", False), ("host", False)])
def test_a_network_fault_must_not_be_blamed_on_compute(cause: Any, right: bool) -> None:
    result = job(late_ms=10)
    result.lateness[2].cause = cause
    fault = {"compute": None, "network": [{"kind": "loss"}]}
    assert figures(result, fault=fault)["verdicts_right"] == right


def test_scores_add_up() -> None:
    missed = job(late_ms=10)
    del missed.collectives[:5]
    case = place_case(truth_of(job(late_ms=10)), meta_of(), as_json(missed), "made_up")
    scores = [score_case(as_json(result), case) for result in (job(late_ms=10), missed)]
    total = add_scores(scores).figures()
    assert (total["true"], total["found"], total["last_right"], total["verdicts"]) == (20, 15, 0.75, 2)
    lines = score_lines(scores)
    assert [line.split()[0] for line in lines] == ["case", "made_up", "made_up", "all", "error_ns:"]
    assert lines[4] == "error_ns: 100 % of 60 exact entries lie within what was stated"
    assert lines[1].split()[:4] == ["made_up", "10", "100", "0"]
    assert lines[3].split()[:4] == ["all", "2", "20", "75.0"]


def test_nothing_asked_is_nothing_told() -> None:
    assert add_scores([]).figures()["found_share"] is None
    assert Score().figures()["last_right"] is None


@pytest.mark.parametrize(
    ("values", "share", "answer"),
    [([], 0.5, None), ([3], 0.9, 3), ([1, 2], 0.5, 1), ([1, 2, 3], 0.5, 2), (list(range(10)), 0.9, 8)],
)
def test_percentiles(values: list[int], share: float, answer: int | None) -> None:
    assert percentile(values, share) == answer


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("truth.json", "{", "truth.json: not JSON"),
        ("truth.json", "[]", "truth.json: not a JSON object"),
        ("truth.json", "{}", "lacks 'collectives'"),
        ("truth.json", '{"collectives": [{"op": "barrier"}]}', "lacks 'enter_ns'"),
        ("truth.json", '{"collectives": 3}', "not in the known form"),
        ("meta.json", '{"nodes": [{"rank": 0}]}', "lacks 'ip'"),
        ("meta.json", '{"nodes": [{"rank": 0, "ip": "nonsense"}]}', "not in the known form"),
        ("a.json", '{"schema": "other/1"}', "a.json: not a result of dpuflow analyze: schema is 'other/1'"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, file: str, text: str, message: str) -> None:
    (tmp_path / "truth.json").write_text(json.dumps(truth_of(job(late_ms=10))))
    (tmp_path / "meta.json").write_text(json.dumps(meta_of()))
    (tmp_path / "a.json").write_text(json.dumps(as_json(job(late_ms=10))))
    assert score_files([(str(tmp_path / "a.json"), str(tmp_path))], MS, MS)[0].found == ROUNDS
    (tmp_path / file).write_text(text)
    with pytest.raises(TruthError, match=message):
        score_files([(str(tmp_path / "a.json"), str(tmp_path))], MS, MS)


def test_every_shared_case_can_be_read_and_its_own_truth_is_perfect(shared: Path) -> None:
    """An analysis made of the truth itself must be scored as perfect, for every case with collectives."""
    cases = sorted(path.parent for path in shared.glob("captures/*/*/truth.json"))
    assert cases
    for folder in cases:
        truth = json.loads((folder / "truth.json").read_text())
        meta = json.loads((folder / "meta.json").read_text())
        analysis = told_outright(truth, meta)
        score = score_case(analysis, place_case(truth, meta, analysis, folder.name))
        assert score.found == score.true == sum(row["iter"] >= 0 for row in truth.get("collectives", [])), (
            folder.name
        )
        assert (score.invented, score.late_false, score.late_missed) == (0, 0, 0)
        assert (score.last_right, score.exact) == (score.last_asked, score.ranks)
        assert (score.op_right, score.bytes_right) == (score.found, score.bytes_asked)
        assert max(score.lateness_errors_ns, default=0) == 0
        # Clocks are told to the nanosecond at the first packet and without drift rounded to whole ppb.
        assert max(score.clock_errors_ns, default=0) <= 1000, folder.name


def told_outright(truth: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
    """An analysis in which every row says what the truth says, on the clock that the truth is on."""
    clocks = {clock["capture"].partition(".")[0]: clock for clock in meta.get("clocks") or []}
    nodes = sorted(meta["nodes"], key=lambda node: node["rank"])
    addresses = list(dict.fromkeys(tuple(node.get("ips") or [node["ip"]]) for node in nodes))
    endpoint_of = [addresses.index(tuple(node.get("ips") or [node["ip"]])) for node in nodes]
    collectives = []
    for k, row in enumerate(truth.get("collectives", [])):
        entered: dict[int, int] = {}
        for rank, time in enumerate(row["enter_ns"]):
            if time is not None:
                entered[endpoint_of[rank]] = max(time, entered.get(endpoint_of[rank], time))
        first = min(entered.values())
        collectives.append(
            {
                "id": k,
                "op": row["op"],
                "bytes": row["bytes"],
                "algorithm": row.get("algorithm") or meta.get("algorithm") or "ring",
                "alternatives": [],
                "start_ns": first,
                "end_ns": max(t for t in row["leave_ns"] if t is not None),
                "complete": True,
                "ranks": [
                    {"endpoint": end, "enter_ns": t, "lateness_ns": t - first, "bound": "exact"}
                    for end, t in entered.items()
                ],
            }
        )
    span = (
        min((c["start_ns"] for c in collectives), default=0),
        max((c["end_ns"] for c in collectives), default=0),
    )
    files = list(dict.fromkeys(node["capture"] for node in nodes))
    captures = [
        {"id": i, "file": file, "first_ns": span[0], "last_ns": span[1]} for i, file in enumerate(files)
    ]
    named = meta.get("reference", "node0")
    rows = []
    for i, file in enumerate(files):
        clock = clocks.get(file.partition(".")[0], {"offset_ns": 0, "drift_ppb": 0})
        at_ns = clock.get("at_node0_ns", span[0])
        reference = file.partition(".")[0] == named
        rows.append(
            {
                "capture": i,
                "reference": reference,
                "offset_ns": 0
                if reference
                else round(clock["offset_ns"] + clock["drift_ppb"] * 1e-9 * (span[0] - at_ns)),
                "drift_ppb": 0 if reference else clock["drift_ppb"],
            }
        )
    move = clocks[named]["offset_ns"] if clocks else 0
    for c in collectives:
        c["start_ns"], c["end_ns"] = c["start_ns"] + move, c["end_ns"] + move
        for entry in c["ranks"]:
            entry["enter_ns"] += move
    return {
        "start_ns": span[0] + move,
        "end_ns": span[1] + move,
        "captures": captures,
        "clocks": rows,
        "endpoints": [
            {"id": i, "address": each[0], "addresses": list(each)} for i, each in enumerate(addresses)
        ],
        "collectives": collectives,
        "lateness": [],
    }
