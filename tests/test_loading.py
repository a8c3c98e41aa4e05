"""A saved result read again: the same bytes, and one sentence for whatever is no result."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from scripted_results import job
from test_reports import WORLDS

import dpuflow
from dpuflow.cli import run
from dpuflow.errors import FormatError
from dpuflow.loading import analysis_of
from dpuflow.reports.html.page import write_html
from dpuflow.reports.json import json_lines
from dpuflow.reports.markdown import MOST_LINES, markdown_lines
from dpuflow.reports.perfetto.trace import write_perfetto
from dpuflow.reports.text import text_lines
from dpuflow.results import Account, Analysis, Endpoint, Finding, Parts, Pipeline, Steps, Transfer


def rich_job() -> Analysis:
    """A job with a row in every list of the result."""
    result = job(late_ms=10)
    result.collectives[1].ranks[0].node = 0
    result.lateness[0].node = 0
    result.lateness[0].address = "10.0.0.1"
    result.lateness[1].relative_to = [0, 1]
    result.collectives[2].bytes, result.collectives[2].bytes_between = None, (1000, 2000)
    result.accounts = [Account(0, 9, 40, Parts({"2": 30}, 1, 2, 3, 4, {"0": 5}, 6), {"2": 10}, 0.01, 7)]
    result.steps = [Steps([0, 1], 9, 1, 40, 50, 0, 400, "decode", 2, 25.0)]
    result.pipelines = [Pipeline([0, 1], "1f1b", 4, [5, None], [None, 7], [0.25, None], [1])]
    result.transfers = [
        Transfer(0, 0, 1, "write", 1, 9, 8, 2, 4, 8, 8e9, 0, 0, "slow", "kv_cache", 10, 5, True, "two pages")
    ]
    result.flows[0].dest_qp, result.flows[0].ports = 17, None
    result.captures[0].sampled = 4.5
    return result


RESULTS = {**WORLDS, "rich": rich_job, "empty": Analysis}


def text_of(result: Analysis) -> str:
    return "".join(json_lines(result))


@pytest.mark.parametrize("name", RESULTS)
def test_a_loaded_result_has_the_same_json(name: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    text = text_of(RESULTS[name]())
    file.write_text(text)
    assert text_of(dpuflow.load(str(file))) == text


def test_keys_of_a_later_version_are_left_out() -> None:
    value = json.loads(text_of(rich_job()))
    value["weather"] = [1]
    for row in (value["captures"][0], value["collectives"][0]["ranks"][0], value["lateness"][0]["told"]):
        row["colour"] = {"deep": [1]}
    assert text_of(analysis_of(value, "x")) == text_of(rich_job())


def test_a_result_of_an_earlier_version_lacks_lists_that_came_later() -> None:
    value = json.loads(text_of(rich_job()))
    for key in ("transfers", "pipelines", "accounts"):
        del value[key]
    assert analysis_of(value, "x").transfers == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("captures.0.sampled_one_of", 1e308), ("lateness.0.last_share", 1e308), ("captures.0.files", []),
        ("captures.0.skipped.other_ethertype", "x"), ("accounts.0.parts.in_node.0", None),
        ("accounts.0.parts.work.2", []), ("accounts.0.waited", {"99": 1}), ("steps.0.endpoints", []),
        ("collectives.2.bytes_between", [1]), ("findings.0.evidence.0.packets", ["x", 1]),
        ("pipelines.0.idle_share", []), ("transfers.0.src", 99), ("endpoints.0.addresses", []),
        ("flows.0.packets", True), ("what_if", [7]),
    ],
)  # fmt: skip
def test_what_no_result_holds_is_refused_wherever_it_stands(path: str, value: Any) -> None:
    whole = json.loads(text_of(rich_job()))
    *above, key = path.split(".")
    place = whole
    for each in above:
        place = place[int(each)] if isinstance(place, list) else place[each]
    place[key] = value
    with pytest.raises(FormatError, match=r"^x: "):
        analysis_of(whole, "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON, or cut short"),
        (text_of(rich_job())[:-200], "not JSON, or cut short"),
        ("[1]", "not a result of dpuflow analyze --json"),
        (text_of(rich_job()).replace("0.25", "1e999", 1), "1e999 is no number"),
        (text_of(rich_job()).replace("0.25", "NaN", 1), "NaN is no number"),
        ('{"schema": "dpuflow.analysis/2"}', "'dpuflow.analysis/2'; this version reads dpuflow.a"),
        (text_of(rich_job()).replace('"op": "all_reduce"', '"op": "all_regret"', 1), "'all_regret' is not"),
        (text_of(rich_job()).replace('"endpoint": 3', '"endpoint": 99'), "not listed"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_one_sentence(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text(text)
    target = tmp_path / "summary.md"
    assert run(["report", str(file), "--markdown", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"dpuflow: {file}: ")
    assert said in error
    assert error.count("\n") == 1
    assert not target.exists()


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_damaged_results_are_refused_or_read(seed: int, tmp_path: Path) -> None:
    """Whatever stands in a result's place, no other error than FormatError."""
    chance = random.Random(seed)
    whole = json.loads(text_of(rich_job()))
    for _ in range(100):
        value: Any = copy.deepcopy(whole)
        node, key = _somewhere(value, chance)
        any_type = [None, "x", -7, 1.5, [], {}, [None], {"a": 1}, True, 10**30, 1e308, (1 << 63) - 1, [0], 99]
        same = [each for each in any_type if type(each) is type(node[key])]
        node[key] = chance.choice(same if same and chance.random() < 0.8 else any_type)
        with contextlib.suppress(FormatError):
            result = analysis_of(value, "x")
            assert "".join([*json_lines(result), *text_lines(result), *markdown_lines(result)])
            write_perfetto(result, str(tmp_path / "trace"))
            write_html(result, str(tmp_path / "page"))


def _somewhere(value: Any, chance: random.Random) -> tuple[Any, Any]:
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(keys)
        below = value[key]
        if not isinstance(below, (dict, list)) or not below or chance.random() < 0.15:
            return value, key
        value = below


def test_report_prints_what_analyze_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    dpuflow.write_json(rich_job(), str(file))
    dpuflow.write_text(rich_job())
    printed = capsys.readouterr().out
    assert run(["report", str(file)]) == 0
    assert capsys.readouterr().out == printed


def test_a_report_does_not_replace_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    dpuflow.write_json(rich_job(), str(file))
    assert run(["report", str(file), "--markdown", str(file)]) == 2
    assert "is an input and would be" in capsys.readouterr().err


def test_a_folder_in_the_way_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    dpuflow.write_json(rich_job(), str(file))
    assert run(["report", str(file), "--markdown", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"dpuflow: {tmp_path}: Is a directory\n"


def test_a_full_disk_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    dpuflow.write_json(rich_job(), str(file))
    assert run(["report", str(file), "--markdown", "/dev/full"]) == 1
    assert capsys.readouterr().err == "dpuflow: /dev/full: No space left on device\n"


@pytest.mark.parametrize("name", RESULTS)
def test_markdown_is_short_and_begins_with_the_verdict(name: str) -> None:
    lines = markdown_lines(RESULTS[name]())
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith("**")
    assert all("\n" not in line for line in lines)


def test_markdown_of_a_large_job_is_short() -> None:
    result = job(late_ms=10)
    for number in range(4, 400):
        result.endpoints.append(Endpoint(number, f"10.0.1.{number}", [f"10.0.1.{number}"]))
        row = copy.copy(result.lateness[2])
        row.endpoint = number
        result.lateness.append(row)
        finding = copy.copy(result.findings[0])
        finding.id = number - 3
        result.findings.append(finding)
        result.limits.append("a limit")
    assert len(markdown_lines(result)) <= MOST_LINES


EVIL = "<script>alert(1)</script> | `x` [a](http://b) @all \x1b[31m\n\u202egnp"


def test_names_are_no_markup() -> None:
    result = job(late_ms=10)
    result.endpoints[2].label = EVIL
    result.findings = [Finding(0, "straggler", "", [2], None, None, "warning", 0.5, EVIL, EVIL)]
    text = "\n".join(markdown_lines(result))
    assert "\x1b" not in text
    assert "\u202e" not in text
    for markup in ("<script", "[a]", "@all", " | `x`"):
        assert markup not in text.replace(f"\\{markup[0]}", "")


def test_a_terminal_is_not_steered_by_names(capsys: pytest.CaptureFixture[str]) -> None:
    result = job(late_ms=10)
    result.endpoints[2].label = EVIL + "x" * 10_000
    dpuflow.write_text(result)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) <= 150
