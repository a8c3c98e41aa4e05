"""One flow each way is paired as several are."""

from __future__ import annotations

import numpy as np
import pytest

from dpuflow.kernels import acks
from dpuflow.messages.pairing import Pairs, Sides, udp_port
from dpuflow.schema.rows import FLOW, Transport


@pytest.mark.parametrize("seed", range(300))
def test_as_among_several(seed: int) -> None:
    """Any counts of ACKs, contradictions and echoes; ports that fit or do not; at the end and before."""
    choice = np.random.default_rng(seed)
    flows, peers = FLOW.zeros(2), np.zeros(2, acks.PEER)
    flows["transport"], flows["src"], flows["dst"] = Transport.ROCE, (0, 1), (1, 0)
    if seed % 5 == 0:
        flows["src"] = flows["dst"] = 0
    flows["dest_qp"] = choice.integers(2, 1 << 24, 2)
    flows["sport"] = udp_port(*flows["dest_qp"].tolist()) if seed % 2 else 0xC000
    peers["peer"] = -1
    pairs = Pairs()
    pairs.add_flows(flows, peers, 0)
    most = int(choice.integers(1, 60))
    peers["acks"] = choice.integers(0, most, 2)
    pairs.conflicts[:] = choice.integers(0, 1 + most // int(choice.integers(1, 9)), len(pairs.conflicts))
    pairs.echoes[:] = choice.integers(0, most, len(pairs.echoes))
    ours, theirs = ([0], [0]) if seed % 5 == 0 else ([0], [1])
    asked = Sides(0, int(seed % 5 != 0), ours, theirs), flows, peers, seed % 3 == 0
    assert pairs._only(*asked) == pairs._between(*asked)


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
