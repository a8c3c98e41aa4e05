"""Scenarios: read with defaults, refused with file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpuflow.cli import run
from dpuflow.errors import OptionError
from dpuflow.settings import read_size
from dpuflow.synth.describe import tables
from dpuflow.synth.scenario import GpuLate, Loop, parse_scenario, read_scenario, ready

JOB = "job: {kind: loop, ops: [{op: all_reduce, bytes: 1MiB}]}\n"


def test_defaults_stand_where_nothing_is_said() -> None:
    scenario = parse_scenario(JOB, "a.yaml")
    assert isinstance(scenario.job, Loop)
    assert scenario.job.ops[0].bytes == 1 << 20
    assert (scenario.cluster.nodes, scenario.ranks, scenario.faults) == (4, 4, [])


def test_faults_are_of_their_kind() -> None:
    scenario = parse_scenario(JOB + "faults: [{kind: gpu_late, rank: 1, us: 5}]\n", "a.yaml")
    assert scenario.faults == [GpuLate(rank=1, us=5.0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a.yaml: the scenario is empty"),
        ("job: [\n", "a.yaml:2: not YAML"),
        ("- job\n", "a.yaml:1: the scenario: must be a mapping"),
        (JOB + "faults: [{kind: loss, share: 0.5}]\n", "a.yaml:2: faults[0].share: 0.5 is above 0.2"),
        ("seed: 1\n", "a.yaml:1: job: is missing"),
        (JOB + "sed: 1\n", "a.yaml:2: sed: not one of"),
        (JOB + "seed: one\n", "a.yaml:2: seed: 'one' is not a whole number"),
        (JOB + "seed: 1\nseed: 2\n", "a.yaml:3: seed: given twice"),
        (JOB + "cluster:\n  nodes: 1\n", "a.yaml:3: cluster.nodes: 1 is below 2"),
        (JOB + "cluster:\n  nodes: 3\n  mtu: 1500\n", "a.yaml:4: cluster.mtu: 1500 is not one of 256"),
        (JOB + "cluster: 4\n", "a.yaml:2: cluster: must be a mapping"),
        (JOB + "cluster: {latency_us: .nan}\n", "a.yaml:2: cluster.latency_us: '.nan' is not a number"),
        (JOB + "nccl: {ecn: maybe}\n", "a.yaml:2: nccl.ecn: 'maybe' is neither true nor false"),
        (JOB + "faults: {}\n", "a.yaml:2: faults: must be a list"),
        (JOB + "faults:\n  - {us: 3}\n", "a.yaml:3: faults[0].kind: is missing; one of gpu_late"),
        (JOB + "faults:\n  - {kind: fire}\n", "a.yaml:3: faults[0].kind: 'fire' is not one of gpu_late"),
        (JOB + "faults:\n  - {kind: gpu_late}\n", "a.yaml:3: faults[0].us: is missing"),
        (
            JOB + "faults:\n  - kind: gpu_late\n    us: 3\n    rank: 4\n",
            "a.yaml:5: faults[0].rank: 4 is not one",
        ),
        (JOB + "faults:\n  - {kind: gpu_late, us: 3}\n", "a.yaml:3: faults[0].mode: persistent needs a rank"),
        (JOB + "faults: [{kind: loss, share: 0.1, src: 9}]\n", "a.yaml:2: faults[0].src: 9 is not one"),
        (
            JOB + "faults: [{kind: slow_link, gbps: 1, node: clint}]\n",
            "a.yaml:2: faults[0].node: 'clint' is no",
        ),
        (JOB + "faults: [{kind: slow_link, gbps: 1, node: client}]\n", "a.yaml:2: faults[0].node: no client"),
        (
            JOB + "faults: [{kind: early_stop, rank: 1, iteration: 2}]\n",
            "a.yaml:2: faults[0].kind: only replicas that decode",
        ),
        (JOB + "observation: {only: [0, 7]}\n", "a.yaml:2: observation.only[1]: 7 is not one"),
        (
            "job:\n  kind: loop\n  ops:\n    - {op: broadcast, bytes: 1, algorithm: tree}\n",
            "a.yaml:4: job.ops[0].algorithm: NCCL has no tree for broadcast",
        ),
    ],
)
def test_errors_name_file_line_and_key(text: str, says: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_scenario(text, "a.yaml")
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("4KiB", 4096), ("4k", 4000), ("2MB", 2_000_000), ("1.5MiB", 3 << 19), ("1GiB", 1 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1.5", "4 Mio", "1e6"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        read_size(text)


@pytest.mark.parametrize("name", sorted(ready()))
def test_every_ready_scenario_reads_and_says_what_it_is(name: str) -> None:
    scenario = read_scenario(name)
    assert scenario.name == name
    assert scenario.about == ready()[name]


def test_the_command_lists_them_and_refuses_without_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["synth", "--list"]) == 0
    assert "straggler" in capsys.readouterr().out
    assert run(["synth", "straggler"]) == 2
    assert "-o DIR" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["synth", str(tmp_path / "none.yaml"), "-o", str(tmp_path / "case")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_the_documented_keys_are_the_ones_there_are() -> None:
    """``python -m dpuflow.synth.describe`` writes them."""
    docs = (Path(__file__).resolve().parents[1] / "docs" / "synth.md").read_text()
    assert docs.split("<!-- keys: python -m dpuflow.synth.describe -->\n")[1] == tables()


def test_the_command_shows_a_scenario_to_begin_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["synth", "--show", "decode"]) == 0
    text = capsys.readouterr().out
    assert parse_scenario(text, "my.yaml") == read_scenario("decode")
    assert run(["synth", "--show", "decod"]) == 1
    assert "decod: no built-in scenario of that name; decode?" in capsys.readouterr().err


def test_the_command_tells_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["synth", "--keys"]) == 0
    text = capsys.readouterr().out
    for line in tables().splitlines():
        if line.startswith("| `"):
            assert f"  {line.split('`')[1]} " in text
    assert run(["synth", "--keys", "faults"]) == 0
    assert "faults, kind pause" in capsys.readouterr().out
    assert run(["synth", "--keys", "fruits"]) == 1
    assert "fruits: no part of a scenario" in capsys.readouterr().err
