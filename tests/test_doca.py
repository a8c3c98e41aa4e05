"""The DOCA backend on simulated cards of six releases: what is captured, and production never disturbed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doca_card import FLOODS, MIRRORS, PROJECT, RELEASES, Card, mixed

sys.path.insert(0, str(Path(__file__).parent / "root"))
from readings_live import counters_of, packets_of

WAYS = [(release, "mirror") for release in MIRRORS] + [(release, "flood") for release in FLOODS]


class Capturing:
    """``dpuflow capture --backend doca`` while a block runs."""

    def __init__(self, card: Card, *options: str) -> None:
        self.card, self.options = card, options
        self.said = ""

    def __enter__(self) -> Capturing:
        command = [sys.executable, "-m", "dpuflow", "capture", "-i", "03:00.0", "--backend", "doca"]
        self.process = subprocess.Popen(
            [*command, *self.options], env=self.card.environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.said = self.process.stderr.readline()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.2)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.said += self.process.communicate(timeout=60)[1]
        self.status = self.process.returncode


def is_wanted(frame: bytes) -> bool:
    """RoCEv2 or TCP, as the card's parser sees it."""
    at, kind = 14, frame[12:14]
    if kind == b"\x81\x00":
        at, kind = 18, frame[16:18]
    if kind == b"\x08\x00":
        protocol, after = frame[at + 9], at + 4 * (frame[at] & 15)
    elif kind == b"\x86\xdd":
        protocol, after = frame[at + 6], at + 40
    else:
        return False
    return protocol == 6 or (protocol == 17 and frame[after + 2 : after + 4] == b"\x12\xb7")


def wanted(frames: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """(pcapng's direction, frame) of RoCE and TCP, with the source address as the card got it."""
    return [
        (2 if port else 1, frame[:11] + bytes([frame[11] & 0xFE | port]) + frame[12:])
        for port, frame in frames
        if is_wanted(frame)
    ]


@pytest.mark.parametrize(("release", "method"), WAYS)
def test_copies_are_the_packets_and_production_goes_on(tmp_path: Path, release: str, method: str) -> None:
    card, frames = Card(tmp_path, release), mixed()
    file = tmp_path / "x.pcapng"
    card.send(frames)
    with Capturing(card, "-w", str(file), "--copy-by", method, "--snaplen", "96") as capturing:
        card.send(frames)
    card.send(frames)
    assert capturing.status == 0, capturing.said
    card.check()
    expected = wanted(frames)
    found = packets_of(file)
    for direction in (1, 2):  # one queue for each: in order by themselves
        mine = [frame for way, frame in expected if way == direction]
        theirs = [packet for packet in found if packet.direction == direction]
        assert [packet.data for packet in theirs] == [frame[:96] for frame in mine]
        assert [packet.wire_len for packet in theirs] == [len(frame) for frame in mine]
    counters = counters_of(file)[0]
    assert counters["captured"] == counters["seen"] == len(expected)
    assert counters["ring_full"] == counters["unreadable"] == 0
    assert ("shared mirror" if method == "mirror" else "flooding") in capturing.said


def test_every_release_is_simulated() -> None:
    assert {release for release, _ in WAYS} == set(RELEASES)
    assert (PROJECT / "doca_bindings").is_dir()
