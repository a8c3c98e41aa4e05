"""Rank maps: what is read, and errors that name the line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dpuflow
from dpuflow.errors import OptionError
from dpuflow.identity.rankmap import Place, canonical_address, doubts_about, place_of, read_rank_map


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "ranks.yaml"
    file.write_text(text)
    return str(file)


def test_the_short_and_the_long_form(tmp_path: Path) -> None:
    places = read_rank_map(
        write(
            tmp_path,
            "# two nodes\n"
            "10.0.0.1: 0\n"
            "10.0.0.2: {rank: 1, gpu: 3, host: node1}\n"
            "FE80:0::1:\n  host: node1\n"
            "'::ffff:10.0.0.9': {gpu: 7}\n",
        )
    )
    assert places == {
        "10.0.0.1": Place(0),
        "10.0.0.2": Place(1, "3", "node1"),
        "fe80::1": Place(None, None, "node1"),
        "10.0.0.9": Place(None, "7", None),
    }
    assert [place.label for place in places.values()] == [None, "node1 GPU 3", "node1", "GPU 7"]
    assert place_of(["10.1.1.1", "fe80::1"], places) == Place(host="node1")
    assert place_of(["10.1.1.1"], places) == Place()


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("10.0.0.1: 0\nnode7: 1\n", 2, "'node7' is not an IP address"),
        ("10.0.0.1: 0\n\n10.0.0.1: 1\n", 3, "10.0.0.1 is listed twice"),
        ("10.0.0.1: 0\n'::ffff:10.0.0.1': 1\n", 2, "10.0.0.1 is listed twice"),
        ("10.0.0.1: one\n", 1, "the rank must be a number from 0, not 'one'"),
        ("10.0.0.1: -1\n", 1, "the rank must be a number from 0, not '-1'"),
        ("10.0.0.1: 99999999999999999999\n", 1, "no job has a rank 99999999999999999999"),
        ("10.0.0.1:\n  rank: 1\n  gup: 2\n", 3, "'gup' is not one of rank, gpu, host"),
        ("10.0.0.1:\n  rank: 1\n  rank: 2\n", 3, "rank is given twice"),
        ("10.0.0.1:\n  host: [a]\n", 2, "host must be one value"),
        ("10.0.0.1: {}\n", 1, "give at least one of rank, gpu, host"),
        ("10.0.0.1: [1]\n", 1, "an address must be a mapping, key: value"),
        ("- 10.0.0.1\n", 1, "the rank map must be a mapping, key: value"),
        ("? [a]\n: 1\n", 1, "a key must be plain text"),
        ("10.0.0.1: {rank: 1\n10.0.0.2: 2\n", 2, "not YAML"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        read_rank_map(file)
    assert str(caught.value).startswith(f"{file}:{line}: {reason}")


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b"\xff\xfe\xff", "not YAML"), (b"\x00", "not YAML")]
)
def test_files_that_are_no_maps(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "ranks.yaml"
    file.write_bytes(content)
    with pytest.raises(OptionError, match=reason):
        read_rank_map(str(file))


def test_addresses_have_one_form() -> None:
    assert canonical_address("::ffff:1.2.3.4") == "1.2.3.4"
    assert canonical_address("2001:DB8::0:1") == "2001:db8::1"
    with pytest.raises(ValueError, match="nonsense"):
        canonical_address("nonsense")


def test_one_rank_at_two_places_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "ranks.yaml"
    file.write_text("10.0.0.1: {rank: 1, host: a}\n10.0.0.2: {rank: 1, host: b}\n")
    with pytest.raises(OptionError, match=r":2: rank 1 is at another place than on 10\.0\.0\.1"):
        read_rank_map(str(file))


def test_two_addresses_of_one_rank_are_none(tmp_path: Path) -> None:
    file = tmp_path / "ranks.yaml"
    file.write_text("10.0.0.1: {rank: 1, host: a}\nfe80::1: {rank: 1, host: a}\n")
    assert len(read_rank_map(str(file))) == 2


@pytest.mark.parametrize(
    ("places", "doubts"),
    [
        ({"10.0.0.1": 0, "10.0.0.2": 1}, []),
        ({"10.0.0.1": 0}, []),
        ({"10.0.0.9": 0}, ["None of the rank map's 1 addresses is in these captures."]),
        ({"10.0.0.1": 0, "10.0.0.9": 1}, ["The rank map lists addresses that are in no capture: 10.0.0.9."]),
        ({"10.0.0.1": 3, "10.0.0.2": 3}, ["The rank map gives rank 3 to 2 endpoints: 10.0.0.1, 10.0.0.2."]),
        ({"10.0.0.1": 3, "fe80::1": 3}, []),
    ],
)
def test_what_does_not_fit_the_captures_is_said(places: dict[str, int], doubts: list[str]) -> None:
    endpoints = [["10.0.0.1", "fe80::1"], ["10.0.0.2"]]
    assert doubts_about({address: Place(rank) for address, rank in places.items()}, endpoints) == doubts


def test_a_map_of_one_endpoint_names_it_and_changes_no_figure() -> None:
    trace = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4" / "node2.pcap.gz"
    plain, named = (dpuflow.analyze([trace], ranks=ranks) for ranks in (None, {"10.77.0.3": Place(2)}))
    assert [replace(end, rank=None) for end in named.endpoints] == plain.endpoints
    assert named.endpoints[2].rank == 2
    assert named.lateness == plain.lateness
