"""Vantage points from names: rotated files are one, nodes of one name are told apart, a file is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import UsageError

import dpuflow
from dpuflow.cli.vantages import vantages_from
from dpuflow.errors import FormatError
from dpuflow.schema import rows as schema
from dpuflow.schema.tables import CaptureInfo, CaptureTables, Vantage
from dpuflow.store.columns import machine_of, save_tables
from dpuflow.store.segments import segment_name
from dpuflow.vantages import vantages_of

TRACE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
S = 1_000_000_000


def found(folder: Path) -> dict[str, list[str]]:
    return {v.name: [Path(file).name for file in v.files] for v in vantages_of([folder])}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["node0.pcap", "node1.pcap.gz"], {"node0": ["node0.pcap"], "node1": ["node1.pcap.gz"]}),
        (["a.pcap", "a.pcap1", "a.pcap2", "a.pcap10"], {"a": ["a.pcap", "a.pcap1", "a.pcap2", "a.pcap10"]}),
        (["n-00001.pcapng.zst", "n-00002.pcapng.zst"], {"n": ["n-00001.pcapng.zst", "n-00002.pcapng.zst"]}),
        (
            ["t_00001_20261122214637.pcapng", "t_00002_20261122214737.pcapng"],
            {"t": ["t_00001_20261122214637.pcapng", "t_00002_20261122214737.pcapng"]},
        ),
        (
            ["x-20261122T214637.pcap", "x-20261122T214737.pcap"],
            {"x": ["x-20261122T214637.pcap", "x-20261122T214737.pcap"]},
        ),
        (["gpu-1.pcap", "gpu-2.pcap", "a.txt"], {"gpu-1": ["gpu-1.pcap"], "gpu-2": ["gpu-2.pcap"]}),
    ],
)  # fmt: skip
def test_captures_of_a_folder(names: list[str], expected: dict[str, list[str]], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert found(tmp_path) == expected


def test_a_folder_without_captures_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="neither captures"):
        vantages_of([tmp_path])


def segment(folder: Path, node: str, machine: str, at: int) -> Path:
    """A segment of a history with nothing in it."""
    info = CaptureInfo(0, node, ["live"], first_ns=at * S, last_ns=(at + 1) * S, machine=machine)
    names = ("ENDPOINT", "FLOW", "MESSAGE", "PAUSE", "SETUP", "MEMBER")
    folder.mkdir(exist_ok=True)
    path = folder / segment_name(node, at * S, (at + 1) * S)
    save_tables(CaptureTables(info, *(getattr(schema, name).zeros(0) for name in names)), str(path))
    return path


def test_histories_of_one_node_are_one_vantage_point(tmp_path: Path) -> None:
    one = segment(tmp_path / "a", "dpu", "m1", 10)
    other = segment(tmp_path / "b", "dpu", "m1", 20)
    assert machine_of(str(one)) == "m1"
    assert vantages_of([tmp_path / "a", tmp_path / "b"]) == [Vantage("dpu", (str(one), str(other)))]


@pytest.mark.parametrize("machines", [("m1", "m2"), ("", "")])
def test_nodes_of_one_hostname_are_told_apart(machines: tuple[str, str], tmp_path: Path) -> None:
    one = segment(tmp_path / "a", "localhost", machines[0], 10)
    other = segment(tmp_path / "b", "localhost", machines[1], 20)
    assert vantages_of([tmp_path / "a", tmp_path / "b"]) == [
        Vantage("a/localhost", (str(one),)),
        Vantage("b/localhost", (str(other),)),
    ]


def test_nodes_of_one_hostname_in_one_folder(tmp_path: Path) -> None:
    for at, machine in ((10, "m1"), (20, "m2"), (30, "m1")):
        segment(tmp_path, "localhost", machine, at)
    assert {v.name: len(v.files) for v in vantages_of([tmp_path])} == {"localhost@m1": 2, "localhost@m2": 1}


def test_a_file_is_enough() -> None:
    assert Vantage("n", "file") == Vantage("n", ("file",)) == Vantage("n", [Path("file")])
    result = dpuflow.analyze(sorted(TRACE.glob("node*.pcap.gz")))
    assert [capture.vantage for capture in result.captures] == ["node0", "node1", "node2", "node3"]
    (late,) = [row for row in result.lateness if row.verdict == "late"]
    assert late.address == "10.77.0.3"
    assert repr(result) == "<Analysis: 27 collectives of 4 endpoints; late: 10.77.0.3 (node2)>"
    assert "LATE: 10.77.0.3 (node2)" in result._repr_html_()


def test_a_vantage_point_that_the_user_named_names_its_node() -> None:
    """Alone, too: a file's name may be anything, a name that was given is meant."""
    file = str(TRACE / "node2.pcap.gz")
    for capture, label in (
        (file, None),
        (Vantage("gpu-17", file), "gpu-17"),
        (Vantage("node2", file), "node2"),
    ):
        result = dpuflow.analyze([capture])
        assert next(end.label for end in result.endpoints if end.address == "10.77.0.3") == label


def test_captures_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "node0.pcap").touch()
    names = [each.name for each in vantages_of([tmp_path / "monday", tmp_path / "tuesday"])]
    assert names == ["monday/node0", "tuesday/node0"]


def test_a_name_given_twice_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"'a' is given twice. Call them apart: --vantage NAME=FILE"):
        vantages_from((), ("a=x.pcap", "a=y.pcap"))
