"""Packets of NCCL's connections that a capture missed: messages whole again, times honest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.schema.rows import NEVER, MessageFlag, Role, Wire
from dpuflow.synth.case import write_case
from tests.blocks import Packet, Script
from tests.test_roce import QA, QB, A, B, cts

CUT = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER
VERSION = 220
LAST = 100  # bytes of each message's last packet


def connection(messages: int, captured: int = 64) -> Script:
    """Messages of four packets, every fourth of one, each paid for by an entry."""
    script, psn = Script(), 0
    for k in range(messages):
        t, data = 10_000 * k, cts(k + 1, VERSION)[:captured]
        script.add(t, B, A, QA, "RC_WRITE_ONLY", k, payload=64, va=512 * k, length=64, data=data)
        script.ack(t + 200, A, B, QB, k)
        psn = script.message(t + 1000, A, B, QB, psn, 1 if k % 4 == 3 else 4, imm=3, last=LAST)
        script.ack(t + 2000, B, A, QA, psn - 1)
    return script


def without(script: Script, *gone: tuple[int, int]) -> Script:
    """The same without packets, each given by destination QP and PSN; ACKs stay."""
    left = [p for p in script.packets if (p.qp, p.psn) not in gone or "ACK" in p.name]
    assert len(left) == len(script.packets) - len(gone)
    return Script(left)


def by_psn(messages: np.ndarray, role: Role) -> np.ndarray:
    part = messages[messages["role"] == role]
    return part[np.argsort(part["seq"], kind="stable")]


def psn_of(message: int) -> int:
    return message // 4 * 13 + message % 4 * 4


@pytest.mark.parametrize(
    "places",
    [
        (0,),  # a beginning
        (3,),  # an end
        (0, 1),
        (0, 2),
        (0, 3),  # both
        (1, 3),
        (0, 1, 3),
    ],
)
def test_a_message_keeps_its_place_and_bytes(places: tuple[int, ...]) -> None:
    whole, _ = connection(60).run()
    at = psn_of(21)
    messages, _ = without(connection(60), *((QB, at + place) for place in places)).run()
    wanted, got = by_psn(whole, Role.DATA), by_psn(messages, Role.DATA)
    for name in ("seq", "seq_end", "bytes", "wire"):
        assert got[name].tolist() == wanted[name].tolist(), name
    hurt = got[21]
    assert bool(hurt["flags"] & MessageFlag.HIDDEN) == (0 in places)
    assert hurt["flags"] & MessageFlag.GAP
    assert (got["flags"][np.arange(60) != 21] == 0).all()


def test_the_end_of_one_message_and_the_beginning_of_the_next() -> None:
    whole, _ = connection(60).run()
    at = psn_of(21)
    for gone in ((3, 4), (0, 3, 4), (0, 4)):
        messages, _ = without(connection(60), *((QB, at + place) for place in gone)).run()
        wanted, got = by_psn(whole, Role.DATA), by_psn(messages, Role.DATA)
        for name in ("seq", "seq_end", "bytes", "wire"):
            assert got[name].tolist() == wanted[name].tolist(), (gone, name)


@pytest.mark.parametrize("captured", [64, 20])
def test_messages_and_entries_of_which_nothing_was_seen(captured: int) -> None:
    """They are counted, and marked as cut: no time of theirs is known. Entries without numbers, too."""
    script = connection(60, captured)
    whole, _ = script.run()
    messages, _ = without(script, (QB, psn_of(23)), (QA, 30), (QA, 31)).run()
    for role, unseen in ((Role.DATA, [23]), (Role.GRANT, [30, 31])):
        wanted, got = by_psn(whole, role), by_psn(messages, role)
        for name in ("seq", "seq_end", "bytes", "wire", "announces"):
            assert got[name].tolist() == wanted[name].tolist(), name
        assert np.flatnonzero((got["flags"] & CUT) == CUT).tolist() == unseen
        assert (got["acked_ns"][unseen] == NEVER).all()
        assert (np.diff(got["first_ns"]) > 0).all()
    got = by_psn(messages, Role.GRANT)
    assert got["sub"].tolist() == list(range(1, 61))
    assert (got["tag"] == (3 if captured == 64 else 0)).all()


def test_sampled_packets_and_other_traffic_are_left_as_they_are() -> None:
    script = connection(200)
    kept: list[Packet] = [p for k, p in enumerate(script.packets) if k % 3 == 0]
    messages, _ = Script(kept).run()
    assert not (messages["flags"] & MessageFlag.HIDDEN).any()
    plain, psn = Script(), 0
    for k in range(40):  # WRITEs both ways, no immediates
        psn = plain.message(10_000 * k, A, B, QB, psn, 4)
        plain.ack(10_000 * k + 900, B, A, QA, psn - 1)
    messages, _ = without(plain, (QB, 40)).run()
    assert not (messages["flags"] & MessageFlag.HIDDEN).any()
    assert (messages["wire"] == Wire.ROCE_WRITE).all()


@pytest.mark.parametrize(("nodes", "loss", "op"), [
    (4, 0.01, "op: all_reduce, bytes: 4000000"),
    (6, 0.001, "op: all_reduce, bytes: 4000000"),
    (4, 0.002, "op: all_reduce, bytes: 65536, protocol: ll"),
    (4, 0.002, "op: all_reduce, bytes: 4000000, algorithm: tree"),
])  # fmt: skip
def test_collectives_are_found_although_captures_lost_packets(
    nodes: int, loss: float, op: str, tmp_path: Path
) -> None:
    """As without loss; an exact entry within a packet's time of the true one, a bound never below it."""
    found = []
    for share in (0.0, loss):
        folder = tmp_path / str(share)
        more = settings(cluster={"nodes": nodes}, observation={"loss": share})
        captures = write_case(loop(op, more, iterations=12), folder)
        result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])
        assert [(c.op, c.algorithm, c.bytes, c.protocol) for c in result.collectives] == [
            (c.op, c.algorithm, c.bytes, c.protocol) for c in (found[0] if found else result).collectives
        ]
        assert len(result.collectives) == 12
        found.append(result)
    clean, lossy = found
    assert any("cut off by the snap length or lost" in limit for limit in lossy.limits)
    assert sum(c.complete for c in lossy.collectives) > 6
    for true, seen in zip(clean.collectives, lossy.collectives, strict=True):
        for one, other in zip(true.ranks, seen.ranks, strict=True):
            if one.bound == other.bound == "exact":
                assert other.enter_ns is None or abs(other.enter_ns - (one.enter_ns or 0)) < 500
            elif one.enter_ns is not None and other.bound == "at_most" and other.enter_ns is not None:
                assert other.enter_ns >= one.enter_ns
