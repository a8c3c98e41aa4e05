"""Stamps that cannot be: a few packets of another year, day or minute change nothing but a warning."""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dpuflow import Vantage, analyze
from dpuflow.ingest import ingest
from dpuflow.messages.stamps import restamp
from dpuflow.packets.order import FileOrder, astray
from dpuflow.results import Analysis
from dpuflow.schema.rows import FLOW, MESSAGE, NEVER

CASE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
S = 1_000_000_000
DAY = 86_400
Stamp = Callable[[int, int], int]
"""Of a packet's number and its seconds: what is written for these."""


def restamped(source: Path, target: Path, stamp: Stamp) -> None:
    """A copy of a classic pcap with other seconds in its stamps."""
    data = bytearray(gzip.decompress(source.read_bytes()))
    at, number = 24, 0
    while at < len(data):
        seconds, _, length = struct.unpack_from("<III", data, at)
        struct.pack_into("<I", data, at, stamp(number, seconds))
        at += 16 + length
        number += 1
    target.write_bytes(data)


def judged(tmp_path: Path, stamp: Stamp) -> Analysis:
    """The job, one node's packets stamped otherwise."""
    files = sorted(CASE.glob("node*.pcap.gz"))
    restamped(files[1], tmp_path / "node1.pcap", stamp)
    changed = [files[0], tmp_path / "node1.pcap", *files[2:]]
    return analyze([Vantage(f"node{k}", (str(f),)) for k, f in enumerate(changed)])


def some(share: float, seed: int, other: Callable[[int, Random], int]) -> Stamp:
    """A share of the packets has other seconds."""
    random = Random(seed)
    return lambda _, seconds: other(seconds, random) if random.random() < share else seconds


def is_as_ever(result: Analysis, wrong: range) -> None:
    """node2 was late, and nothing else is found; so many of node1's packets are named."""
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [2]
    assert [each.condition for each in result.findings] == ["straggler"]
    capture = result.captures[1]
    assert capture.last_ns - capture.first_ns < 10 * S
    (said,) = capture.warnings
    found = re.search(r"node1\.pcap: ([\d,]+) of its packets are stamped out of the file's order", said)
    assert found
    assert int(found[1].replace(",", "")) in wrong


@pytest.mark.parametrize("seconds", [[0], [0xFFFFFFFF], [0, 1, 0x7FFFFFFF, 0xFFFFFFFF]])
def test_a_few_absurd_stamps(tmp_path: Path, seconds: list[int]) -> None:
    is_as_ever(judged(tmp_path, some(0.001, 1, lambda _, random: random.choice(seconds))), range(5, 40))


@pytest.mark.parametrize("off_s", [-60, -3600, -DAY, 60, 3600, 364 * DAY])
def test_a_few_stamps_of_another_minute_hour_or_day(tmp_path: Path, off_s: int) -> None:
    is_as_ever(judged(tmp_path, some(0.001, 7, lambda seconds, _: seconds + off_s)), range(18, 19))


def test_one_in_a_hundred_stamps(tmp_path: Path) -> None:
    is_as_ever(judged(tmp_path, some(0.01, 1, lambda seconds, _: seconds - DAY)), range(100, 250))


@pytest.mark.parametrize("off_s", [-3600, 364 * DAY])
def test_every_second_stamp(tmp_path: Path, off_s: int) -> None:
    """One of two clocks is right: which one is the join's to tell."""
    result = judged(tmp_path, lambda number, seconds: seconds + off_s * (number % 2))
    is_as_ever(result, range(7990, 8010))


@pytest.mark.parametrize("back_s", [1, 3600])
def test_a_clock_that_was_set_is_no_wrong_stamp(tmp_path: Path, back_s: int) -> None:
    result = judged(tmp_path, lambda number, seconds: seconds - back_s * (number > 8000))
    assert result.captures[1].warnings == []
    assert any("was set back in mid-capture" in limit for limit in result.limits)
    assert [row.endpoint for row in result.lateness if row.verdict == "late"] == [2]


def times(*runs: tuple[int, int]) -> np.ndarray:
    """Stamps, 1 us apart: (seconds, how many)."""
    return np.concatenate([seconds * S + 1000 * np.arange(count) for seconds, count in runs])


@pytest.mark.parametrize(
    "runs",
    [
        [(0, 5000), (60, 5000)],  # a pause
        [(0, 2), (60, 3), (120, 1)],
        [(100, 5000), (40, 5000)],  # a clock that was set back, and one that was set twice
        [(100, 5000), (4000, 5000), (101, 5000)],
        [(9, 5), (3, 5)],  # two short captures, one after the other
        [(60, 2), (50, 3), (40, 2), (30, 2)],  # a capture written backwards
    ],
)
def test_pauses_and_clocks_that_are_set_stay(runs: list[tuple[int, int]]) -> None:
    assert not astray(times(*runs)).any()


@pytest.mark.parametrize(
    ("runs", "wrong"),
    [
        ([(100, 500), (40, 1), (101, 500)], [500]),
        ([(100, 500), (4000, 2), (101, 500)], [500, 501]),
        ([(4000, 1), (100, 500)], [0]),
        ([(100, 500), (40, 1)], [500]),
        ([(10, 6), (60, 4), (3, 1), (90, 5)], [10]),  # a few packets with long pauses
        ([(100, 50), (40, 1), (100, 50), (30, 50), (90, 1), (31, 50)], [50, 151]),  # and a clock set back
    ],
)
def test_what_comes_back_is_wrong(runs: list[tuple[int, int]], wrong: list[int]) -> None:
    assert np.flatnonzero(astray(times(*runs))).tolist() == wrong


def test_noise_below_a_second_stays() -> None:
    late = times((100, 1000))
    late[::7] -= 900_000_000
    assert not astray(late).any()


def test_blocks_are_mended_as_one_file() -> None:
    """Wherever a block ends: what leapt ahead at its end is told once the next one has come."""
    whole = times((100, 100), (4000, 1), (101, 100), (40, 1), (102, 100))
    for cut in range(1, len(whole)):
        order, parts = FileOrder(), [whole[:cut].copy(), whole[cut:].copy()]
        for number, part in enumerate(parts):
            disordered = bool((np.diff(np.r_[whole[:cut][-1:], part] if number else part) < 0).any())
            order.mend(part, number * cut, disordered)
        assert order.wrong == 2, cut
        assert order.late == ([(100, int(whole[100]), int(whole[99]))] if cut == 101 else [])


def test_what_a_wrong_stamp_began_and_ended_gets_the_right_time() -> None:
    messages, flows = MESSAGE.zeros(2), FLOW.zeros(1)
    messages["first_frame"], messages["last_frame"] = [3, 7], [7, 7]
    messages["first_ns"], messages["last_ns"], messages["acked_ns"] = [30, 900], [900, 900], [900, NEVER]
    flows["first_ns"], flows["last_ns"] = 30, 900
    restamp(messages, flows, [(7, 900, 40)])
    assert messages["first_ns"].tolist() == [30, 40]
    assert messages["last_ns"].tolist() == [40, 40]
    assert messages["acked_ns"].tolist() == [40, NEVER]
    assert flows["last_ns"].tolist() == [40]


def test_a_pause_before_the_last_packets_counts(tmp_path: Path) -> None:
    restamped(CASE / "node1.pcap.gz", tmp_path / "a.pcap", lambda number, s: s + 60 * (number > 15_990))
    info = ingest([str(tmp_path / "a.pcap")]).info
    assert info.last_ns - info.first_ns > 60 * S
    assert info.warnings == []


@pytest.mark.parametrize("seed", range(4))
def test_absurd_stamps_alone(tmp_path: Path, seed: int) -> None:
    """Nothing is left to say; nothing breaks, and NumPy says nothing (a warning is an error here)."""
    vantages = []
    choices = [seed, 1 << 30, 1 << 31, 0xFFFFFFFF]
    for k, file in enumerate(sorted(CASE.glob("node*.pcap.gz"))):
        restamped(file, tmp_path / f"{k}.pcap", some(0.6, seed, lambda _, random: random.choice(choices)))
        vantages.append(Vantage(f"node{k}", (str(tmp_path / f"{k}.pcap"),)))
    analyze(vantages)
