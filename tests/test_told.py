"""What the bootstrap tells of a job is used: NCCL's ranks, and how many there are beyond those seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, settings

import dpuflow
from dpuflow.identity.communicators import communicators, told_ranks, unseen
from dpuflow.identity.endpoints import all_but_one, endpoint_ranks, seen_whole
from dpuflow.ingest import ingest
from dpuflow.join import join
from dpuflow.schema.rows import MEMBER
from dpuflow.schema.tables import CaptureTables, Joined, Vantage
from dpuflow.synth.case import write_case


def captured(
    folder: Path, nodes: list[int], setup: bool, **parts: object
) -> tuple[list[CaptureTables], Joined]:
    nccl = {"setup": setup, "channels": 1}
    observation = {"only": nodes, "compress": False}
    text = settings(nccl=nccl, observation=observation, **parts)
    write_case(loop("op: all_reduce, bytes: 64k, algorithm: tree", text, 6), str(folder))
    tables = [ingest([str(folder / f"node{node}.pcap")], f"n{node}", i) for i, node in enumerate(nodes)]
    return tables, join(tables, clock="trust")


def test_a_leaf_that_hears_of_one_peer_knows_of_the_others(tmp_path: Path) -> None:
    """A tree's leaf alone: its parent looks like the other one of two."""
    tables, joined = captured(tmp_path / "told", [1], True, cluster={"nodes": 3})
    told = communicators(tables, joined)
    assert [(each.ranks, sorted(each.places), each.alone) for each in told] == [(3, [0, 1, 2], True)]
    assert endpoint_ranks(joined, None, told) == {told[0].places[rank]: rank for rank in range(3)}
    silent, nothing = captured(tmp_path / "silent", [1], False, cluster={"nodes": 3})
    assert communicators(silent, nothing) == []
    assert seen_whole(nothing) is None
    own = seen_whole(joined, told)
    assert own is not None
    assert own == {told[0].places[1]}
    assert all_but_one(joined, told) is None


@pytest.mark.parametrize("gpus", [1, 2])
def test_all_are_known_where_all_but_one_are_captured(tmp_path: Path, gpus: int) -> None:
    tables, joined = captured(tmp_path, [0, 1], True, cluster={"nodes": 3, "gpus_per_node": gpus})
    told = communicators(tables, joined)
    assert told[0].ranks == 3 * gpus
    if gpus == 1:
        assert unseen(told) == 0
        assert seen_whole(joined, told) is None
        # Nobody is behind the one without a capture.
        assert all_but_one(joined, told) is None
    else:
        # An address of a host with two GPUs is no rank's.
        assert not told[0].alone
        assert unseen(told) is None
        assert told_ranks(joined, told) != dict.fromkeys(range(len(joined.endpoints)), 0)


def test_the_result_names_ranks_and_finds_the_collectives(tmp_path: Path) -> None:
    captured(tmp_path, [1], True, cluster={"nodes": 4})
    result = dpuflow.analyze([Vantage("n1", (str(tmp_path / "node1.pcap"),))])
    ranks = {endpoint.address: endpoint.rank for endpoint in result.endpoints}
    assert {f"10.0.0.{rank + 1}": rank for rank in range(4)}.items() >= ranks.items()
    assert len([each for each in result.collectives if each.op == "all_reduce"]) == 6


def test_what_contradicts_itself_is_left_out(tmp_path: Path) -> None:
    tables, joined = captured(tmp_path, [0, 1, 2], True, cluster={"nodes": 3})
    (sound,) = communicators(tables, joined)
    assert sound.alone
    more = MEMBER.zeros(1)
    more[0] = tables[0].members[0]
    more["addr_lo"] += 1
    tables[1].members = np.concatenate([tables[1].members, more])
    assert communicators(tables, joined) == []
    tables[1].members = tables[1].members[:-1].copy()
    tables[1].members["ranks"][0] = 4
    assert communicators(tables, joined) == []


def test_entries_name_ranks_where_nothing_was_told(tmp_path: Path) -> None:
    """An entry's tag is the rank that it asks; a rank that nobody asks has none."""
    _, joined = captured(tmp_path, [0, 1, 2], False, cluster={"nodes": 3})
    assert sorted(told_ranks(joined, []).values()) == [0, 1, 2]


def test_set_up_sockets_hide_no_node_of_several_adapters(tmp_path: Path) -> None:
    """They go by one interface of each node, and tie what each of its adapters talks to into one star
    without a middle: none of the node's own was known then, and 293 collectives were told for 16."""
    keys = settings(
        cluster={"nodes": 3, "gpus_per_node": 4},
        nccl={"channels": 4, "setup": True},
        observation={"only": [0, 1]},
    )
    captures = write_case(loop("op: all_reduce, bytes: 400KiB", keys, iterations=8), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert [(str(c.op), c.bytes) for c in result.collectives] == [("all_reduce", 400 << 10)] * 8
