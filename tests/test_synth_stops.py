"""Jobs that stand still: who is missing sends nothing, others wait, captures go on, and the truth says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synth_worlds import loop, records, settings

from dpuflow.analysis import analyze
from dpuflow.errors import OptionError
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.world import play

REDUCE = "op: all_reduce, bytes: 1MiB"
LLDP = b"\x88\xcc"


def stopped(**fault: Any) -> dict[str, Any]:
    faults = [{"rank": 2, "iteration": 3, **fault}]
    return {"cluster": {"nodes": 4}, "faults": faults, "observation": {"compress": False}}


def test_who_hangs_sends_nothing_more_and_the_others_wait(tmp_path: Path) -> None:
    scenario = loop(REDUCE, settings(**stopped(kind="hang", us=50_000)), iterations=6)
    write_case(scenario, str(tmp_path))
    truth = json.loads((tmp_path / "truth.json").read_text())
    begun = min(filter(None, truth["collectives"][-1]["leave_ns"]))
    (row,) = truth["conditions"]
    assert (row["condition"], row["ranks"], row["to_ns"]) == ("hang", [2], None)
    assert row["from_ns"] > begun  # its peers enter the next operation
    assert [row["iter"] for row in truth["collectives"]] == [0, 1, 2]
    assert truth["unfinished"] == [
        {"op": "all_reduce", "bytes": 1 << 20, "ranks": [0, 1, 2, 3], "entered": [0, 1, 3]}
    ]
    left = max(truth["collectives"][-1]["leave_ns"])
    for node in range(4):
        *job, (last_ns, last) = list(records(tmp_path / f"node{node}.pcap"))
        assert bytes(last[12:14]) == LLDP
        mine = bytes((10, 0, 0, node + 1))
        # What acknowledges what came is the NIC's own doing.
        sent = [ns for ns, frame in job if bytes(frame[26:30]) == mine and frame[42] != 0x11]
        assert (sent[-1] > left) == (node != 2)
        assert last_ns - job[-1][0] >= 49_000_000


def test_who_passes_another_size_is_alone_with_it(tmp_path: Path) -> None:
    scenario = loop(REDUCE, settings(**stopped(kind="desync", bytes=4 << 20)), iterations=6)
    write_case(scenario, str(tmp_path))
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert [(row["condition"], row["ranks"]) for row in truth["conditions"]] == [("desync", [2])]
    assert [row["iter"] for row in truth["collectives"]] == [0, 1, 2]
    entered = {row["bytes"]: row["entered"] for row in truth["unfinished"]}
    assert entered[4 << 20] == [2]
    assert entered[1 << 20] == [0, 1, 3]


@pytest.mark.parametrize("kind", ["decode", "training", "experts"])
def test_other_jobs_stand_still_too(kind: str) -> None:
    job = {"kind": kind, "steps": 4} if kind != "decode" else {"kind": kind, "tokens": 4, "layers": 1}
    text = json.dumps({"name": "x", "job": job, **stopped(kind="hang")})
    world = play(parse_scenario(text, "x"))
    waiting = [work for work in world.works if work.enter_ns and not work.finished]
    assert waiting
    assert all(2 not in work.leave_ns for work in waiting)


@pytest.mark.parametrize(
    ("job", "fault", "says"),
    [
        ("prefill_decode", {"kind": "hang"}, "caches and requests go on"),
        ("experts", {"kind": "desync", "bytes": 4096}, "no one size"),
    ],
)
def test_what_cannot_stand_still_is_said(job: str, fault: dict[str, Any], says: str) -> None:
    text = json.dumps({"name": "x", "job": {"kind": job}, **stopped(**fault)})
    with pytest.raises(OptionError, match=says):
        parse_scenario(text, "x")


def found(folder: Path, nodes: str = "*") -> list[tuple[str, list[str]]]:
    """The findings of jobs that stand still, with their addresses, of the captures of ``nodes``."""
    result = analyze([str(file) for file in sorted(folder.glob(f"node{nodes}.pcap"))])
    told = [each for each in result.findings if each.condition in ("hang", "desync")]
    return [(each.condition, [result.endpoints[end].address for end in each.endpoints]) for each in told]


@pytest.mark.parametrize("nodes", ["*", "[01]", "3"])
def test_who_is_missing_over_roce_is_named(tmp_path: Path, nodes: str) -> None:
    write_case(loop(REDUCE, settings(**stopped(kind="hang")), iterations=6), str(tmp_path))
    assert found(tmp_path, nodes) == [("hang", ["10.0.0.3"])]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_passes_on_what_nobody_saw_it_get_is_not_taken_for_the_missing_root(
    tmp_path: Path, rank: int
) -> None:
    """One node of a chain sees the one before it send first, and not whether that one has to wait."""
    scenario = loop("op: broadcast, bytes: 1MiB", settings(**stopped(kind="hang", rank=rank)), iterations=6)
    write_case(scenario, str(tmp_path))
    result = analyze([str(tmp_path / "node2.pcap")])
    (hang,) = (each for each in result.findings if each.condition == "hang")
    assert "for whom is not known" in hang.summary
    assert hang.confidence == 0.5


def test_who_is_missing_among_experts_is_named(tmp_path: Path) -> None:
    """No two operations have the same sizes: what was begun is known by its connections."""
    text = json.dumps(
        {"name": "x", "job": {"kind": "experts", "steps": 8}, **stopped(kind="hang", iteration=6)}
    )
    write_case(parse_scenario(text, "x"), str(tmp_path))
    assert found(tmp_path) == [("hang", ["10.0.0.3"])]


def test_captures_that_end_in_mid_operation_over_roce_show_no_hang(tmp_path: Path) -> None:
    write_case(loop(REDUCE, settings(**stopped(kind="hang")), iterations=6), str(tmp_path))
    for file in tmp_path.glob("node*.pcap"):
        *_, (_, last) = records(file)
        file.write_bytes(file.read_bytes()[: -len(last) - 16])
    assert not found(tmp_path)


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ("*", ("desync", ["10.0.0.3"])),
        ("[12]", ("desync", ["10.0.0.3"])),
        ("2", ("desync", ["10.0.0.2", "10.0.0.3"])),  # two that differ are seen, and no third
        ("[01]", ("hang", ["10.0.0.3"])),  # what it sends goes elsewhere: only that it does not take part
    ],
)
def test_who_is_out_of_step_over_roce_is_named(
    tmp_path: Path, nodes: str, told: tuple[str, list[str]]
) -> None:
    write_case(loop(REDUCE, settings(**stopped(kind="desync", bytes=4 << 20)), iterations=6), str(tmp_path))
    assert found(tmp_path, nodes) == [told]


@pytest.mark.parametrize("nodes", [6, 8])
def test_who_is_out_of_step_is_named_though_all_finish_that_operation(tmp_path: Path, nodes: int) -> None:
    """As many messages, but larger ones: all go on, and what is left is more than one operation."""
    fault = stopped(kind="desync", bytes=3 << 18, iteration=4) | {"cluster": {"nodes": nodes}}
    write_case(loop("op: all_reduce, bytes: 256KiB", settings(**fault), iterations=9), str(tmp_path))
    assert found(tmp_path) == [("desync", ["10.0.0.3"])]


def test_what_is_left_of_an_operation_out_of_step_is_no_other_one(tmp_path: Path) -> None:
    """On one of the channels seven messages in a row of it look like a broadcast."""
    host = {"nodes": 8, "link_gbps": 1, "latency_us": 30, "mtu": 1024}
    job = {
        "kind": "training", "steps": 6, "layers": 2, "buckets": 2, "bucket_bytes": 1 << 18, "tp_bytes": 0,
        "forward_us": 20_000,
    }  # fmt: skip
    fault = stopped(kind="desync", bytes=3 << 18, rank=4, iteration=5, us=1_000_000)
    scenario = {
        "name": "x",
        "seed": 7329,
        "machine": {"profile": "host"},
        "job": job,
        **fault,
        "cluster": host,
    }
    write_case(parse_scenario(json.dumps(scenario), "x"), str(tmp_path))
    assert found(tmp_path) == [("desync", ["10.0.0.5"])]


def test_of_two_ranks_out_of_step_both_are_named(tmp_path: Path) -> None:
    fault = stopped(kind="desync", bytes=4 << 20, rank=1) | {"cluster": {"nodes": 2}}
    write_case(loop(REDUCE, settings(**fault), iterations=6), str(tmp_path))
    assert found(tmp_path) == [("desync", ["10.0.0.1", "10.0.0.2"])]


def test_two_ranks_may_seem_to_finish_what_they_run_with_unlike_sizes(tmp_path: Path) -> None:
    """Rank 1 takes three all_to_alls of 1 MiB for the half of one of 6 MiB, and asks for more."""
    fault = stopped(kind="desync", bytes=6 << 20, rank=0, iteration=4) | {"cluster": {"nodes": 2}}
    write_case(loop("op: all_to_all, bytes: 1MiB", settings(**fault), iterations=9), str(tmp_path))
    assert found(tmp_path) == [("desync", ["10.0.0.1", "10.0.0.2"])]


@pytest.mark.parametrize("op", ["all_reduce", "all_to_all"])
def test_an_operation_that_was_never_finished_costs_none_before_it(tmp_path: Path, op: str) -> None:
    """It is a seventh of all messages: too many to be left over, had it not been the last."""
    faults = stopped(kind="desync" if op == "all_reduce" else "hang", iteration=6)
    if op == "all_reduce":
        faults["faults"][0]["bytes"] = 4 << 20
    write_case(loop(f"op: {op}, bytes: 1MiB", settings(**faults), iterations=7), str(tmp_path))
    result = analyze([str(file) for file in sorted(tmp_path.glob("node*.pcap"))])
    whole = [c for c in result.collectives if c.complete and len(c.ranks) == 4]
    assert [(c.op, c.bytes) for c in whole] == [(op, 1 << 20)] * 6


@pytest.mark.parametrize(
    ("kind", "more"),
    [("slow_link", {"node": 1, "gbps": 5}), ("loss", {"src": 1, "share": 0.02})],
)
def test_what_begins_in_the_middle_leaves_what_is_before_as_it_was(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    truths = []
    for from_us in (0.0, 1000.0):
        fault = {"kind": kind, "from_us": from_us, **more}
        folder = tmp_path / str(from_us)
        write_case(loop(REDUCE, settings(cluster={"nodes": 4}, faults=[fault]), iterations=6), str(folder))
        truths.append(json.loads((folder / "truth.json").read_text()))
    write_case(loop(REDUCE, settings(cluster={"nodes": 4}), iterations=6), str(tmp_path / "sound"))
    sound = json.loads((tmp_path / "sound" / "truth.json").read_text())["collectives"]
    always, later = truths
    assert always["conditions"][0]["from_ns"] is None
    begin_ns = later["conditions"][0]["from_ns"]
    before = [row["leave_ns"] for row in later["collectives"] if max(row["leave_ns"]) < begin_ns]
    assert 0 < len(before) < 6
    assert before == [row["leave_ns"] for row in sound[: len(before)]]
    ends = [max(truth["collectives"][-1]["leave_ns"]) for truth in (always, later)]
    assert ends[0] > max(sound[-1]["leave_ns"])
    assert ends[1] > max(sound[-1]["leave_ns"])
