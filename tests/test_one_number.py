"""One number from one place: report, table, finding, log, webhook and metrics of a result say the same."""

from __future__ import annotations

import html
import io
import json
import re
from pathlib import Path
from statistics import median

import pytest

import dpuflow
from dpuflow.agent import models
from dpuflow.agent.board import Window
from dpuflow.agent.log import Log
from dpuflow.agent.tally import Tally
from dpuflow.agent.told import tell
from dpuflow.agent.tracker import Tracker
from dpuflow.quantities import duration, late_by, late_in, name_of, percent, rank_seconds
from dpuflow.reports.html import write_html
from dpuflow.reports.json import json_lines
from dpuflow.reports.lua import lua_lines
from dpuflow.reports.markdown import escaped, markdown_lines
from dpuflow.results import Analysis

TRACE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
S = 1_000_000_000


def everywhere() -> Analysis:
    return dpuflow.analyze(sorted(TRACE.glob("node*.pcap.gz")))


def one_node() -> Analysis:
    """From a node that is not late: of the others' entries it has bounds."""
    return dpuflow.analyze([TRACE / "node0.pcap.gz"])


def late_neighbour() -> Analysis:
    """The neighbour of the late rank, alone: what it is late by is a lower bound."""
    return dpuflow.analyze([TRACE / "node3.pcap.gz"])


@pytest.mark.parametrize("world", [everywhere, one_node, late_neighbour])
def test_all_renderings_agree(world: object) -> None:
    result: Analysis = world()  # type: ignore[operator]
    text = io.StringIO()
    dpuflow.write_text(result, text, columns=200)
    lines = text.getvalue().splitlines()
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("endpoint ")) :]
    value = json.loads("".join(json_lines(result)))
    tally = Tally(64, 64)
    tally.add(Window(0, 0, S, result))
    states = Tracker(0.0, 10.0, 60.0, "https://wiki/report.md").step(result, S)
    for row in result.lateness:
        name = name_of(result.endpoints[row.endpoint])
        (line,) = [line for line in table if line.startswith(f"{name} ")]
        by, wait = late_by(row), duration(row.caused_wait_ns)
        amounts = re.findall(r" %, (>=)?([0-9.,]+ \w+)", line)
        assert [f"{bound}{amount}" for bound, amount in amounts] == (
            [] if row.late_ns is None else [by.replace("at least ", ">=")]
        )
        assert line.endswith(wait)
        assert value["lateness"][row.endpoint]["late_ns"] == row.late_ns
        shown = tally.judged[row.address or ""]
        assert (shown.late_ns, shown.late_bound) == (row.late_ns, row.late_bound)
        if row.verdict != "late":
            continue
        said = [line.strip() for line in lines]
        assert any(each.startswith(f"late in {late_in(row)} collectives") for each in said)
        assert any(each.startswith(f"when late, by {by} (median)") for each in said)
        waited = rank_seconds(row.caused_wait_ns or 0)
        assert any(waited in each for each in said if each.startswith("cost:"))
        for state in states:
            if state.condition != "straggler" or state.addresses != (row.address,):
                continue
            notice = json.loads(models.to_json(models.notice("finding_opened", S, state, "node0")))
            for summary in (state.finding.summary, notice["finding"]["summary"], logged(state)):
                assert f"{name} entered {late_in(row)} collectives late, by {by} (median)" in summary
                assert waited in summary
            assert notice["finding"]["runbook"] == "https://wiki/report.md#straggler"


def logged(state: object) -> str:
    """The line that the agent logs of a finding."""
    stream = io.StringIO()
    tell(Log(stream=stream), state)  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_bound_is_told_as_one() -> None:
    """Wherever less than the whole is known of it."""
    for result in (one_node(), late_neighbour()):
        for row in result.lateness:
            exact = {e.bound for c in result.collectives for e in c.ranks if e.endpoint == row.endpoint}
            if "exact" not in exact and row.late_ns:
                assert row.late_bound == "at_least"
                assert late_by(row).startswith("at least ")


@pytest.mark.parametrize("node", range(4))
def test_nothing_claims_more_than_the_entries_of_one_node(node: int, tmp_path: Path) -> None:
    """Row, table, finding, page, Markdown, Lua and metrics beside the entries that they rest on."""
    result = dpuflow.analyze([TRACE / f"node{node}.pcap.gz"])
    write_html(result, str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    lua, summary = "".join(lua_lines(result, [])), "\n".join(markdown_lines(result))
    tally = Tally(64, 64)
    tally.add(Window(0, 0, S, result))
    for place, row in enumerate(result.lateness):
        assert tally.judged[row.address or ""].late_ns == row.late_ns
        if row.late_ns is None:
            continue
        shown = [e for c in result.collectives if c.complete for e in c.ranks if e.endpoint == row.endpoint]
        claims = sorted(e.lateness_ns or 0 for e in shown if e.bound in ("exact", "at_least"))
        late = round((row.late_share or 0) * row.collectives)
        assert row.late_ns <= median(claims[-late:])
        assert row.late_most_ns == claims[-1]
        by = late_by(row).replace("at least ", ">=")
        assert f" %, {escaped(by)} |" in summary
        at = f'data-at="lateness/{place}/late_ns" title="{row.late_ns:,} ns"'
        assert f"{at}>{html.escape(by)}</data>" in page
        if row.verdict == "late":
            last = re.findall(rf"last: {re.escape(row.address or '')} by at least ([0-9.]+ \w+)", lua)
            assert duration(claims[-1]) in last
            found = [each.summary for each in result.findings if each.condition == "straggler"]
            assert all(f"by {late_by(row)} (median)" in summary for summary in found)


@pytest.mark.parametrize("trace", ["gloo-allreduce-n4", "mpi-allreduce-n4", "gloo-groups-n6"])
def test_cost_and_step_are_one_number_each(trace: str) -> None:
    """The share that severity follows from, the unit of the condition, and the median step."""
    result = dpuflow.analyze(sorted((TRACE.parent / trace).glob("node*.pcap.gz")))
    (found,) = (each for each in result.findings if each.condition == "straggler")
    text = io.StringIO()
    dpuflow.write_text(result, text, columns=200)
    said = " ".join(text.getvalue().split())
    assert f"cost: {percent(found.cost_share)} of the job's time; the others waited" in said
    steps = re.findall(r"typical step ([0-9.]+ ms)|([0-9.]+ ms) each in the median", said)
    assert len(steps) > 1
    assert len({told for pair in steps for told in pair if told}) == 1
    for account in result.accounts:
        parts = account.parts
        named = parts.library + parts.transfer + parts.network + parts.credit + parts.unexplained
        assert named + sum(parts.work.values()) + sum(parts.in_node.values()) == account.step_ns
    summary = "\n".join(markdown_lines(result))
    assert f"sure, {rank_seconds(found.cost_ns or 0)} waited)" in summary
