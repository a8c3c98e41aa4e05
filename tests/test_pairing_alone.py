"""Flows are paired as the naive way pairs them, and laid out alike however they come."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from dpuflow.kernels import acks
from dpuflow.messages.pairing import Pairs
from dpuflow.schema.rows import FLOW, NONE32, Transport
from tests import naive_pairing
from tests.naive_pairing import udp_port


@pytest.mark.parametrize("seed", range(300))
def test_pairs_are_those_of_the_naive_way(seed: int) -> None:
    """Any counts of ACKs, contradictions and echoes; ports that fit or do not; at the end and before."""
    choice = np.random.default_rng(seed)
    n, loop, last = int(choice.integers(2, 12)), seed % 5 == 0, seed % 3 == 0
    if seed % 4 == 0:
        n = 2
    flows, peers = FLOW.zeros(n), np.zeros(n, acks.PEER)
    flows["transport"], flows["peer"], peers["peer"] = Transport.ROCE, NONE32, -1
    peers["datagram_row"] = -1
    flows["src"] = 0 if loop else choice.permutation(np.arange(n) % 2 if seed % 7 else np.arange(n) % 3 % 2)
    flows["dst"] = 0 if loop else 1 - flows["src"]
    flows["dest_qp"], flows["sport"] = choice.integers(2, 1 << 24, n), choice.integers(0xC000, 0xC002, n)
    for a, b in choice.permutation(n)[: n // 2 * 2].reshape(-1, 2) if seed % 2 else ():
        flows["sport"][[a, b]] = udp_port(*flows["dest_qp"][[a, b]].tolist())
    pairs = Pairs()
    pairs.add_flows(flows, peers, 0)
    most = int(choice.integers(1, 60))
    peers["acks"] = choice.integers(0, most, n)
    pairs.conflicts[:] = choice.integers(0, 1 + most // int(choice.integers(1, 9)), len(pairs.conflicts))
    pairs.conflicts[choice.random(len(pairs.conflicts)) < choice.random()] = 0
    pairs.echoes[:] = choice.integers(0, most, len(pairs.echoes))
    conflicts, echoes = np.zeros((2, n, n), np.int64)
    for flow in range(n):
        row = peers[flow]
        candidates = pairs.members[row["candidates"] : row["candidates_end"]]
        at = slice(int(row["scores"]), int(row["scores"]) + len(candidates))
        conflicts[flow, candidates], echoes[flow, candidates] = pairs.conflicts[at], pairs.echoes[at]
    ours = np.flatnonzero(flows["src"] == 0).tolist()
    theirs = ours if loop else np.flatnonzero(flows["src"] == 1).tolist()
    told = []
    if ours and theirs:
        told = naive_pairing.decide(flows, peers["acks"].astype(int), conflicts, echoes, ours, theirs, last)
    ripe = None if last else 0
    found = pairs.decide(flows, peers, np.zeros(0), ripe, last).tolist()
    assert sorted(map(sorted, found)) == sorted(sorted(each[:2]) for each in told)
    how = dict.fromkeys(range(n), (NONE32, 0))
    for a, b, by in told:
        how[a], how[b] = (b, by), (a, by)
    assert list(zip(flows["peer"].tolist(), flows["pairing"].tolist(), strict=True)) == [
        how[flow] for flow in range(n)
    ]
    assert peers["peer"].tolist() == flows["peer"].astype(np.int32).tolist()


def test_what_is_laid_out_bit_by_bit_is_what_is_laid_out_at_once() -> None:
    """Flows come in pieces, some of them scored and some paired meanwhile."""
    choice = np.random.default_rng(1)
    n = 400
    flows, peers = FLOW.zeros(n), np.zeros(n, acks.PEER)
    flows["transport"] = np.where(choice.random(n) < 0.9, Transport.ROCE, Transport.TCP)
    flows["src"], flows["dst"], flows["dest_qp"] = choice.integers(0, 8, (3, n))
    peers["peer"] = -1
    bitwise, known = Pairs(), 0
    while known < n:
        upto = min(n, known + int(choice.integers(1, 60)))
        bitwise.add_flows(flows[:upto], peers[:upto], known)
        known = upto
        for flow in choice.integers(0, known, 9):
            at = int(peers["scores"][flow])
            width = int(peers["candidates_end"][flow] - peers["candidates"][flow])
            bitwise.conflicts[at : at + width] += 1
            peers["acks"][flow] += 1
    once, told = Pairs(), peers.copy()
    once.add_flows(flows, told, 0)
    for flow in range(n):
        (mine, my_conflicts), (whole, _) = (
            (p.members[each["candidates"] : each["candidates_end"]], p.conflicts[each["scores"] :])
            for p, each in ((bitwise, peers[flow]), (once, told[flow]))
        )
        assert mine.tolist() == whole.tolist()
        # A candidate that came later had sent nothing when the ACKs before it came.
        assert (my_conflicts[: len(mine)] == peers["acks"][flow]).all()


@pytest.mark.parametrize("seed", range(12))
def test_directions_are_numbered_as_flows_come_and_know_their_opposite(seed: int) -> None:
    """Over blocks of any size, beyond the slots there are at first; and a copy goes its own way."""
    choice = np.random.default_rng(seed)
    n, ends = int(choice.integers(1, 400)), int(choice.integers(1, 40))
    flows, peers = FLOW.zeros(n), np.zeros(n, acks.PEER)
    flows["transport"], flows["dest_qp"], peers["peer"] = Transport.ROCE, 2 + np.arange(n), -1
    flows["src"], flows["dst"] = choice.integers(0, ends, (2, n))
    keys = list(zip(flows["src"].tolist(), flows["dst"].tolist(), strict=True))
    wanted = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    pairs = Pairs()
    bounds = sorted({0, n, *choice.integers(0, n, 5).tolist()})
    for known, end in pairwise(bounds):
        before = pairs.copy()
        pairs.add_flows(flows[:end], peers[:end], known)
        before.add_flows(flows[:end][::-1].copy(), np.zeros(end, acks.PEER), known)
    for (src, dst), number in wanted.items():
        assert pairs._way(src, dst) == number
    for flow, (src, dst) in enumerate(keys):
        candidates = pairs.members[peers["candidates"][flow] : peers["candidates_end"][flow]].tolist()
        assert candidates == [other for other in range(n) if keys[other] == (dst, src)]
    assert pairs._way(ends, 0) == -1
