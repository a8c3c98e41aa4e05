"""Reports of scripted results: the JSON against its schema, the text against golden files."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import typing
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_results import MS, T0, collective, job

from dpuflow import results
from dpuflow.quantities import duration, listed, often, percent, size
from dpuflow.reports.json import json_lines, write_json
from dpuflow.reports.layout import Paint, lines_of, table
from dpuflow.reports.text import MOST_ROWS, by_severity, text_lines, write_text
from dpuflow.results import Analysis, Edge, Endpoint, Finding, Flow, Lateness, Pipeline, Told
from dpuflow.schema.tables import CaptureInfo, Clock

GOLDEN = Path(__file__).with_name("golden")
SCHEMA = Path(__file__).resolve().parents[1] / "docs" / "analysis.schema.json"


def one_late() -> Analysis:
    return job(late_ms=10)


def nobody_late() -> Analysis:
    return job()


def nothing_found() -> Analysis:
    return Analysis(
        captures=[
            CaptureInfo(0, "stdin", ["-"], "ethernet", packets=12, bytes=900, first_ns=T0, last_ns=T0 + MS)
        ],
        clocks=[Clock(0, True, "reference", 0, 0, 0)],
        limits=["No message of a collective library was recognised."],
        start_ns=T0,
        end_ns=T0 + MS,
    )


def late_now_and_then() -> Analysis:
    """Two endpoints without ranks, one late from the middle on, one seen by nobody; loss everywhere."""
    result = job(late_ms=4, iterations=4)
    for endpoint in result.endpoints:
        endpoint.rank = None
    result.endpoints[1].label = "node1 GPU 0"
    result.endpoints[3].address = "2001:db8:1234:5678:9abc:def0:1234:5678"
    first, late, second, unseen = (
        result.lateness[0],
        result.lateness[2],
        result.lateness[1],
        result.lateness[3],
    )
    late.steadiness, late.since_ns, late.late_share = "persistent", T0 + 80 * MS, 0.5
    late.relative_to = [0, 1]
    second.verdict, second.steadiness, second.cause, second.late_share = (
        "intermittent",
        "transient",
        "receiver",
        0.25,
    )
    second.caused_wait_ns = 3 * MS
    unseen.verdict, unseen.cause, unseen.collectives = "unknown", "unknown", 0
    late.own_share, second.own_share, unseen.own_share = 0.5, 0.25, None
    second.late_ns, second.late_most_ns, second.late_bound = 200_000, 200_000, "at_least"
    unseen.late_share = unseen.last_share = unseen.median_ns = unseen.p99_ns = unseen.caused_wait_ns = None
    first.median_ns = 0
    result.collectives = [collective(k, [0, 0.2, 4, None], start_ms=40 * k) for k in range(4)]
    result.collectives[0] = collective(0, [None] * 4, complete=False)
    result.captures[1].lost_packets = 17
    result.captures[2].lost_packets = None
    result.captures[3].complete = False
    result.clocks[1] = Clock(1, False, "estimated", 12_000_345, -2_500, 4_000)
    result.clocks[3] = Clock(3, False, "none", why="no traffic ties it")
    result.flows.append(Flow(4, 0, 1, "roce", 0x11, None, 100, 80_000, 9, 0, 7, 3, 1, 2))
    result.findings.append(
        Finding(
            1,
            "capture_loss",
            "",
            [1],
            None,
            None,
            "warning",
            1.0,
            "17 packets are missing from node1.",
            "",
            [],
            [],
        )
    )
    result.findings.append(
        Finding(
            2,
            "slow_link",
            "",
            [1],
            T0,
            None,
            "warning",
            0.8,
            "The link to node1 is slow.",
            "Check the port.",
            [],
            [],
        )
    )
    return result


def in_turn() -> Analysis:
    result = job(late_ms=5, ranks=3)
    result.findings = []
    for row in result.lateness:
        row.verdict, row.steadiness, row.late_share, row.last_share = "intermittent", "rotating", 1 / 3, 1 / 3
        row.caused_wait_ns, row.cause, row.own_share = 30 * MS, "compute", 1 / 3
        row.late_ns, row.late_bound = 5 * MS, "exact"
    (straggler,) = job(late_ms=5).findings
    straggler.endpoints, straggler.start_ns, straggler.end_ns = [0, 1, 2], T0 + 80 * MS, T0 + 380 * MS
    straggler.summary = "Three ranks enter late in turn."
    result.findings = [straggler]
    return result


def hung() -> Analysis:
    """Rank 2 was late before it came no more."""
    result = job(late_ms=5)
    straggler = result.findings[0]
    hang = replace(straggler, id=0, condition="hang", start_ns=T0 + 400 * MS, end_ns=T0 + 900 * MS)
    hang.cost_ns, hang.confidence, hang.summary = 1_500 * MS, 0.95, "rank 2 has not entered all_reduce."
    result.findings = [hang, replace(straggler, id=1)]
    return result


WORLDS = {f.__name__: f for f in (one_late, nobody_late, nothing_found, late_now_and_then, in_turn, hung)}


@pytest.mark.parametrize("name", WORLDS)
def test_text_is_as_agreed(name: str) -> None:
    """Golden files; REGOLD=1 writes them again, to be read before they are committed."""
    text = "\n".join(text_lines(WORLDS[name]())) + "\n"
    path = GOLDEN / f"verdict_{name}.txt"
    if os.environ.get("REGOLD"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    filters = {f"      {each.filter}" for finding in WORLDS[name]().findings for each in finding.evidence}
    assert max(len(line) for line in text.splitlines() if line not in filters) <= 100
    assert text.isascii()


@pytest.mark.parametrize(
    ("world", "headline"),
    [
        (one_late, "LATE: rank 2 (10.0.0.3)."),
        (nobody_late, "NOBODY WAS LATE BY ITS OWN DOING."),
        (nothing_found, "NO VERDICT: no collectives were found"),
        (in_turn, "LATE IN TURN: rank 0, rank 1 and rank 2."),
        (hung, "HANG: rank 2 has not entered all_reduce."),
    ],
)
def test_first_line_answers(world: typing.Callable[[], Analysis], headline: str) -> None:
    assert next(text_lines(world())).startswith(headline)


def test_nobody_seen_late_is_not_nobody_late() -> None:
    result = nobody_late()
    result.lateness[1].verdict = "unknown"
    first = next(text_lines(result))
    assert first.startswith("NOBODY SEEN LATE by its own doing, but rank 1 could not be judged: none of")
    for row in result.lateness:
        row.verdict = "unknown"
        row.told = Told(exact=3, bounded=2, untold=20)
    first = next(text_lines(result))
    assert first == "COULD NOT BE JUDGED: most of their data was not matched to a collective."
    collectives = len(result.collectives)
    for row in result.lateness:
        row.told = Told(bounded=1, untold=collectives - 1)
    first = next(text_lines(result))
    total = collectives * len(result.lateness)
    assert (
        first == f"COULD NOT BE JUDGED: only {len(result.lateness)} of their {total} entry times are known."
    )
    for row in result.lateness:
        row.told, row.detectable_ns = Told(exact=25), 6 * MS
    assert next(text_lines(result)).startswith("COULD NOT BE JUDGED: lateness below 6 ms a step would go")


@pytest.mark.parametrize(("blind", "own"), [([2], "its"), ([1, 2], "their")])
def test_who_entered_late_but_is_not_judged(blind: list[int], own: str) -> None:
    result = nobody_late()
    for number in blind:
        row = result.lateness[number]
        row.verdict, row.unjudged, row.last_share = "unknown", "hidden", 0.1
    text = " ".join(line.strip() for line in text_lines(result))
    assert f"came last at times, but too rarely, or not provably by {own} own doing." in text


def test_all_clear_says_how_far_it_goes() -> None:
    result = nobody_late()
    for row, detectable in zip(result.lateness, (40_000, 30_000, 38_000, 12_000), strict=True):
        row.detectable_ns = detectable
    assert (
        next(text_lines(result))
        == "NOBODY WAS LATE BY ITS OWN DOING (lateness over 40 us a step would show)."
    )


def test_all_clear_tells_single_incidents() -> None:
    result = nobody_late()
    for row in result.lateness:
        row.detectable_ns = 400_000
    for number, endpoint, late_ms in ((3, 2, 9), (5, 0, 3), (7, 0, 4), (8, 1, 0.3)):
        entry = next(e for e in result.collectives[number].ranks if e.endpoint == endpoint)
        entry.lateness_ns, entry.cause = round(late_ms * MS), "compute"
    text = " ".join(line.strip() for line in text_lines(result))
    assert text.startswith(
        "NOBODY WAS LATE BY ITS OWN DOING (lateness over 400 us a step would show), except for"
        " isolated incidents: rank 2 once (9 ms) and rank 0 twice (up to 4 ms). "
    )
    # Seen too shortly to tell incidents from a habit (``judgement``).
    result.lateness[2].verdict = "unknown"
    text = " ".join(line.strip() for line in text_lines(result))
    assert text.startswith(
        "NOBODY SEEN LATE by its own doing (lateness over 400 us a step would show), but rank 2"
        " could not be judged: it was late once (9 ms); too little was captured to tell whether that recurs."
    )


def test_where_most_are_not_judged_that_comes_first() -> None:
    result = nobody_late()
    for row in result.lateness[:-1]:
        row.verdict = "unknown"
    text = " ".join(line.strip() for line in text_lines(result))
    assert text.startswith("MOST COULD NOT BE JUDGED (rank 0, rank 1 and rank 2): none of their")
    assert " None of the others was seen late by its own doing." in text


def test_who_may_have_been_kept_by_the_network_is_not_called_late() -> None:
    result = one_late()
    for row in result.lateness:
        row.cause = "unknown"
    first = next(text_lines(result))
    assert first.startswith(
        "MESSAGES OF rank 2 CAME LATE. Whether it or the network delayed them cannot be known"
    )


def test_time_before_and_after_the_job_costs_nothing() -> None:
    result = one_late()
    usual = [line for line in text_lines(result) if "cost:" in line]
    assert result.start_ns is not None
    result.start_ns -= 10_000 * MS
    assert [line for line in text_lines(result) if "cost:" in line] == usual


def test_transfers_alone_give_no_verdict() -> None:
    result = nobody_late()
    for row in result.collectives:
        row.op = "send_recv"
    assert next(text_lines(result)).startswith("NO VERDICT: transfers")


def test_every_headline_that_accuses_says_since_when_at_what_cost_why_and_how_sure() -> None:
    for world in (one_late, late_now_and_then, in_turn, hung):
        told = " ".join(line.strip() for line in itertools.takewhile(bool, text_lines(world())))
        since = r"from the start|since 2026-|between \d+ ms and \d+ ms after"
        for said in (since, "cost: the others (have )?waited", "likely cause: ", r"confidence: \d+ %"):
            assert re.search(said, told), (world.__name__, said)


def test_collectives_without_lateness_are_no_all_clear() -> None:
    result = nobody_late()
    result.lateness = []
    assert next(text_lines(result)).startswith("NO VERDICT")


def test_the_costliest_finding_is_the_worst() -> None:
    one, two, three = (replace(job(late_ms=5).findings[0], id=number) for number in range(3))
    one.cost_share, one.confidence = 0.1, 0.9
    two.cost_share, two.confidence = 0.6, 0.7
    three.cost_share, three.condition = None, "hang"
    assert [each.id for each in by_severity([one, two, three])] == [2, 1, 0]


def test_ranks_that_only_send_to_each_other_belong_to_no_collective() -> None:
    result = nobody_late()
    for row in result.lateness:
        row.verdict = "unknown"
    result.pipelines = [Pipeline([0, 1, 2, 3], None, 4, [5, 5, 5, 5], [None] * 4, [None] * 4, [])]
    for each in result.collectives:
        each.op = "send_recv"
    assert next(text_lines(result)) == (
        "COULD NOT BE JUDGED: their messages are sends and receives, which do not show who was late."
    )


def test_stages_that_are_compared_with_too_few_are_told_so() -> None:
    result = nobody_late()
    for row in result.lateness:
        row.verdict, row.unjudged = "unknown", "not_told"
    result.pipelines = [Pipeline([0, 1, 2, 3], None, 4, [5, 5, 5, 5], [None] * 4, [None] * 4, [])]
    assert next(text_lines(result)).startswith(
        "COULD NOT BE JUDGED: stages of a pipeline may differ by design"
    )


def test_who_is_always_last_by_what_it_was_handed_is_told_where_another_is_not_judged() -> None:
    """A leader whose node's other rank nobody sees: all wait for the two, neither is to blame for sure."""
    result = nobody_late()
    last, unseen = result.lateness[1], result.lateness[2]
    last.last_share, last.late_share, last.own_share, last.caused_wait_ns = 1.0, 1.0, 0.0, 90_000 * MS
    assert next(text_lines(result)).startswith("NOBODY WAS LATE")  # all others are cleared
    unseen.verdict = "unknown"
    assert next(text_lines(result)).startswith("rank 1, OR ONE THAT IT WAITS FOR, CAME LATE.")
    last.last_share = 0.5
    assert next(text_lines(result)).startswith("NOBODY SEEN LATE")
    last.last_share, last.caused_wait_ns = 1.0, 10
    assert next(text_lines(result)).startswith("NOBODY SEEN LATE")


def test_incidents_are_why_nobody_is_judged() -> None:
    """They would show, and do: nothing is hidden. What may explain them, and the worst of them."""
    result = nobody_late()
    for row in result.lateness:
        row.verdict, row.unjudged, row.detectable_ns = "unknown", "incidents", 50_000
    for each in result.collectives[:4]:
        late = each.ranks[1]
        late.bound, late.cause, late.lateness_ns = "exact", "compute", 2_000_000
    first = next(text_lines(result))
    assert first.startswith("COULD NOT BE JUDGED: late at times, which host stalls may explain: rank 1 ")
    assert "rank 1 four times (up to" in first


def test_ranks_with_incidents_are_named_once() -> None:
    """Who could not be judged for incidents was said again to have come last, but too rarely."""
    result = nobody_late()
    for row in result.lateness:
        row.detectable_ns = 50_000
    for row in (result.lateness[1], result.lateness[3]):
        row.verdict, row.unjudged, row.last_share = "unknown", "incidents", 0.2
    for each in result.collectives[:4]:
        late = each.ranks[1]
        late.bound, late.cause, late.lateness_ns = "exact", "compute", 2_000_000
    told = " ".join("\n".join(text_lines(result)).split())
    assert "rank 1 and rank 3 could not be judged: late at times" in told
    assert "entered late" not in told


def test_a_network_fault_is_in_the_first_lines() -> None:
    result = nobody_late()
    result.findings = late_now_and_then().findings[-1:]
    assert list(text_lines(result))[1].startswith("  but: slow link (rank ")
    assert next(text_lines(result, Paint(True))).startswith("\033[1;33m")  # no green with a fault below it
    assert next(text_lines(nobody_late(), Paint(True))).startswith("\033[1;32m")


def test_the_table_is_bounded() -> None:
    result = nobody_late()
    for i in range(4, 40):
        result.endpoints.append(Endpoint(i, f"10.0.1.{i}", [f"10.0.1.{i}"]))
        result.lateness.append(Lateness(i, 10, 0.0, 0.0, 0, 0, 0, "on_time", "none"))
    lines = list(text_lines(result))
    assert f"and {40 - MOST_ROWS} more: {40 - MOST_ROWS} on time" in lines


def test_the_table_tells_own_lateness_from_what_was_handed_on() -> None:
    result = one_late()
    result.lateness[0].late_share, result.lateness[0].own_share = 0.97, 0.02
    (line,) = [line for line in text_lines(result) if line.startswith("rank 0 ")]
    assert line.split()[2:9] == ["(10.0.0.1)", "on", "time", "2", "%", "95", "%"]


def test_a_lower_bound_is_never_printed_as_a_measurement() -> None:
    result = one_late()
    result.lateness[2].late_bound = "at_least"
    text = "\n".join(text_lines(result))
    assert "when late, by at least 10.2 ms (median)" in text
    assert " >=10.2 ms " in text
    assert "at most" not in text


def test_groups_are_named_where_their_kind_is_known() -> None:
    result = one_late()
    result.groups[0].kind = "tp"
    assert any("in 1 group (1 tp):" in line for line in text_lines(result))


def test_colour_only_when_asked() -> None:
    stream = io.StringIO()
    write_text(one_late(), stream)
    assert "\033" not in stream.getvalue()
    write_text(one_late(), stream, color=True)
    assert "\033[1;31mLATE: rank 2 (10.0.0.3).\033[0m" in stream.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Paint.suits(Terminal()).enabled
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Paint.suits(Terminal()).enabled


def test_names_that_a_terminal_cannot_show_are_escaped() -> None:
    result = nobody_late()
    result.endpoints[0].label = "k\u00f6ln"
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    write_text(result, stream)
    stream.flush()
    assert b"k\\xf6ln" in stream.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WORLDS)
def test_json_fits_its_schema(name: str) -> None:
    jsonschema = pytest.importorskip(
        "jsonschema", reason="jsonschema checks the JSON: make setup installs it"
    )
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads("".join(json_lines(WORLDS[name]()))))


@pytest.mark.parametrize(
    ("row", "dataclass"),
    [
        ("endpoint", results.Endpoint),
        ("flow", results.Flow),
        ("group", results.Group),
        ("collective", results.Collective),
        ("rank", results.RankEntry),
        ("lateness", results.Lateness),
        ("edge", results.Edge),
        ("what_if", results.WhatIf),
        ("finding", results.Finding),
    ],
)
def test_schema_has_the_keys_of_the_dataclasses_in_order(row: str, dataclass: type) -> None:
    known = list(json.loads(SCHEMA.read_text())["$defs"][row]["properties"])
    assert known == [name.rstrip("_") for name in dataclass.__slots__]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("place", "tokens"),
    [
        (("algorithm", "enum"), results.Algorithm),
        (("cause", "enum"), results.Cause),
        (("collective", "properties", "op", "enum"), results.OpToken),
        (("rank", "properties", "bound", "enum"), results.Bound),
        (("lateness", "properties", "verdict", "enum"), results.Verdict),
        (("finding", "properties", "severity", "enum"), results.Severity),
    ],
)
def test_schema_has_the_tokens_of_the_dataclasses(place: tuple[str, ...], tokens: object) -> None:
    node = json.loads(SCHEMA.read_text())["$defs"]
    for key in place:
        node = node[key]
    assert tuple(node) == typing.get_args(tokens)


def test_json_keys_are_in_the_order_of_the_format() -> None:
    value = json.loads("".join(json_lines(one_late())))
    assert list(value) == list(json.loads(SCHEMA.read_text())["properties"])
    assert list(value["captures"][0])[:4] == ["id", "file", "files", "vantage"]
    assert list(value["flows"][0])[3:6] == ["transport", "ports", "packets"]
    assert value["collectives"][0]["ranks"][2]["lateness_ns"] == round(10.2 * MS)


def test_json_is_the_same_bytes_every_time() -> None:
    assert "".join(json_lines(late_now_and_then())) == "".join(json_lines(late_now_and_then()))


def test_json_writes_numpy_numbers_and_keywords() -> None:
    numpy = pytest.importorskip("numpy")
    result = Analysis(edges=[Edge(0, 1, numpy.int64(7), numpy.int64(-5), None)], start_ns=numpy.int64(3))
    value = json.loads("".join(json_lines(result)))
    assert value["edges"] == [{"from": 0, "to": 1, "collectives": 7, "median_ns": -5, "error_ns": None}]
    assert value["start_ns"] == 3


def test_json_never_holds_nan() -> None:
    result = one_late()
    result.collectives[0].confidence = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        "".join(json_lines(result))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.write_text("old")
    result = one_late()
    result.findings[0].confidence = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(result, str(target))
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_written_file_keeps_permissions_and_links(tmp_path: Path) -> None:
    target, link = tmp_path / "result.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_json(one_late(), str(link))
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert json.loads(target.read_text())["schema"] == "dpuflow.analysis/1"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_json(one_late(), str(tmp_path / "nowhere" / "result.json"))
    assert caught.value.filename == str(tmp_path / "nowhere" / "result.json")


@pytest.mark.parametrize(
    ("value_ns", "text"),
    [
        (None, "-"),
        (0, "0 ns"),
        (7, "7 ns"),
        (999, "999 ns"),
        (999.7, "1.00 us"),
        (1_000, "1 us"),
        (9_820_000, "9.82 ms"),
        (99_960_000, "100 ms"),
        (999_600_000, "1.00 s"),
        (1_234_000_000_000, "1,234 s"),
        (-1_500, "-1.50 us"),
    ],
)
def test_durations(value_ns: float | None, text: str) -> None:
    assert duration(value_ns) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "-"), (0, "0 %"), (0.001, "<1 %"), (0.5, "50 %"), (0.999, ">99 %"), (1.0, "100 %")],
)
def test_percents_do_not_round_to_nothing_or_all(share: float | None, text: str) -> None:
    assert percent(share) == text


def test_sizes_lists_and_tables() -> None:
    assert [size(n) for n in (None, 0, 1023, 1024, 262144, 1_500_000)] == [
        "-", "0 B", "1023 B", "1 KiB", "256 KiB", "1.4 MiB",
    ]  # fmt: skip
    assert listed([]) == "none"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh"), most=3) == "a, b and 6 more"
    assert table(["x", "long"], [["aaa", "1"]]) == ["x    long", "aaa     1"]


def test_how_often_is_told_in_words_beside_a_rank() -> None:
    """``rank 3 3 times`` was read as a number of two digits."""
    assert [often(times) for times in (1, 2, 3, 9, 10, 1200)] == [
        "once", "twice", "three times", "nine times", "10 times", "1,200 times",
    ]  # fmt: skip


def test_why_packets_were_skipped_is_told_once_and_in_the_field_s_words() -> None:
    def observed(**skipped: int) -> str:
        result = job()
        for capture in result.captures:
            capture.skipped = {}
        result.captures[0].skipped = skipped
        return " ".join("\n".join(text_lines(result)).split())

    assert "; 3 packets skipped (other EtherType)." in observed(other_ethertype=3)
    assert "; 7 packets skipped (4 other IP protocol and 3 cut IP)." in observed(
        other_ip_protocol=4, cut_ip=3
    )


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
@pytest.mark.parametrize("late_ms", [0, 5])
def test_no_line_of_the_verdict_is_wider_than_the_terminal(columns: int, late_ms: int) -> None:
    with lines_of(columns):
        lines = "\n".join(text_lines(job(late_ms=late_ms))).split("\n")
    assert max(len(line) for line in lines if "==" not in line) <= columns
    whole = " ".join(" ".join(lines).split())
    assert "10.0.0.3" in whole  # no line ends within an address


def test_where_nobody_is_late_a_critical_fault_is_the_headline() -> None:
    result = job(late_ms=5)
    fault = replace(result.findings[0], condition="credit_starvation", summary="Rank 1 is slow to receive.")
    result.findings = [fault]
    for row in result.lateness:
        row.verdict, row.cause, row.steadiness = "unknown", "unknown", None
    lines = list(text_lines(result))
    assert lines[0] == "CREDIT STARVATION: Rank 1 is slow to receive."
    assert lines[1].startswith("  COULD NOT BE JUDGED: ")
    assert not any(line.startswith("  but:") for line in lines)
    for row in result.lateness:
        row.verdict = "on_time"
    lines = list(text_lines(result))
    assert lines[0] == "CREDIT STARVATION: Rank 1 is slow to receive."
    assert lines[1].startswith("  NOBODY ")
    fault.confidence = 0.5  # as good as a guess
    assert next(text_lines(result)).startswith("NOBODY ")
    fault.confidence, fault.severity = 0.9, "warning"
    assert next(text_lines(result)).startswith("NOBODY ")


def test_headlines_name_nodes_as_the_table_does() -> None:
    """Where there is no rank: the address says little to who runs the nodes."""
    result = in_turn()
    for end in result.endpoints:
        end.rank, end.label = None, f"node{end.id}"
    lines = list(text_lines(result))
    assert lines[0].startswith("LATE IN TURN: 10.0.0.1 (node0), 10.0.0.2 (node1)")
    assert lines[1].startswith("  10.0.0.1 (node0): late in ")


def test_inherited_lateness_stands_apart_from_its_own() -> None:
    """Who was kept for longer than the late rank worked longer is on time; at 60 columns, too."""
    result = one_late()
    late, kept = result.lateness[2], result.lateness[3]
    late.own_share, late.late_share, late.late_ns = 0.9, 0.9, 5 * MS
    kept.own_share, kept.late_share, kept.late_ns, kept.late_bound = 0.0, 0.3, 10 * MS, "at_least"
    with lines_of(60):
        lines = [line for line in text_lines(result) if "%, " in line and line.startswith("rank ")]
    assert all(len(line) <= 60 for line in lines)
    assert [re.split(r" {2,}", line)[1:] for line in lines] == [
        ["late", "90 %, 5 ms", "0 %"], ["on time", "0 %", "30 %, >=10 ms"]
    ]  # fmt: skip
