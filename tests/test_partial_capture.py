"""Ranks seen from beside: never blamed, for a link may have kept them; nobody is cleared unseen."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from collective_worlds import algorithm_of

import dpuflow
from dpuflow.matching import Instance
from dpuflow.matching.model import InstanceView, Placement
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis
from dpuflow.schema.rows import Op
from dpuflow.schema.tables import Vantage
from dpuflow.scoring.score import score_case
from dpuflow.scoring.truth import read_case
from dpuflow.verdicts.judgement import Judgement, doubt
from dpuflow.verdicts.waits import busy_elsewhere

RING = algorithm_of(Op.ALL_REDUCE, "ring")


def instance(ends: list[int], ranks: int) -> Instance:
    return Instance(
        np.zeros(0, np.int64),
        Op.ALL_REDUCE,
        ends,
        RING,
        view=InstanceView(frozenset({0})),
        placement=Placement(ranks),
    )


def test_peers_of_another_group_are_busy_elsewhere() -> None:
    """Tensor and data parallel groups of two: both peers of rank 0 have another partner each."""
    assert busy_elsewhere([instance([0, 1], 0), instance([0, 2], 0)]) == {1, 2}
    # One communicator of which two algorithms show different peers.
    assert busy_elsewhere([instance([0, 1, 3], 4), instance([0, 1, 2], 4)]) == frozenset()


@cache
def analysed(shared: Path, case: str, node: int) -> Analysis:
    folder = next(p for p in (shared / "captures").glob(f"*/{case}"))
    return dpuflow.analyze([Vantage("x", (str(folder / f"node{node}.pcap.gz"),))])


def blamed(result: Analysis) -> dict[str, str]:
    return {
        result.endpoints[r.endpoint].address: r.cause
        for r in result.lateness
        if r.verdict in ("late", "intermittent")
    }


@pytest.mark.parametrize("node", range(4))
@pytest.mark.parametrize(
    "case", ["net_slowlink_gloo_allreduce_256k_n4_node2", "net_loss_gloo_allreduce_256k_n4_node1"]
)
def test_one_node_never_blames_a_gpu_for_the_network(shared: Path, case: str, node: int) -> None:
    result = analysed(shared, case, node)
    assert not {"compute", "host"} & set(blamed(result).values())
    assert "straggler" not in {f.condition for f in result.findings}
    assert next(text_lines(result)).startswith(("MESSAGES OF", "NOBODY SEEN LATE"))


@pytest.mark.parametrize("node", range(4))
def test_one_node_names_its_neighbour_but_not_whose_doing_it_was(shared: Path, node: int) -> None:
    result = analysed(shared, "gloo_allreduce_256k_n4_late2", node)
    if node == 0:  # rank 2 is across the ring: not an all-clear
        assert blamed(result) == {}
        assert next(text_lines(result)).startswith("NOBODY SEEN LATE")
    else:
        assert blamed(result) == {"10.77.0.3": "compute" if node == 2 else "unknown"}


@pytest.mark.parametrize("node", range(4))
def test_who_only_waited_for_another_group_is_not_named(shared: Path, node: int) -> None:
    """TP x DP: rank 3 is late; rank 2, which waits for it, comes late to rank 0."""
    assert set(blamed(analysed(shared, "gloo_hybrid_tp2dp2_n4_late3", node))) <= {"10.77.0.4"}


def test_ranks_that_declare_all_at_once_are_dated_from_beside(shared: Path) -> None:
    """Gloo's all_to_all asks everyone at once, as the captured rank shows: no order has to be known."""
    result = analysed(shared, "gloo_alltoall_256k_n4_late1", 0)
    exact = Counter(rank.endpoint for c in result.collectives for rank in c.ranks if rank.bound == "exact")
    assert len(exact) == 4
    assert min(exact.values()) > len(result.collectives) // 2


def test_a_leaf_of_a_tree_does_not_name_the_rank_above(shared: Path) -> None:
    for node in (2, 3):
        assert blamed(analysed(shared, "gloo_broadcast_256k_n4_late0", node)) == {}


@pytest.mark.parametrize("node", range(4))
def test_stages_that_waited_for_a_pipeline_are_not_named(shared: Path, node: int) -> None:
    """Stage 2 is slow; the first stage enters the all_reduce last, for its backward pass comes last."""
    assert set(blamed(analysed(shared, "gloo_pp_gpipe_n4_slow2", node))) <= {"10.77.0.3"}


@pytest.mark.parametrize("node", range(4))
def test_the_way_is_taken_off_the_bounds_of_ranks_beside(shared: Path, node: int) -> None:
    """Over Soft-RoCE messages take up to 20 ms: what arrived late need not have been sent late."""
    folder = shared / "captures" / "roce" / "ar-recdbl-n4-8k-random"
    result = analysed(shared, "ar-recdbl-n4-8k-random", node)
    parsed = json.loads("".join(json_lines(result)))
    score = score_case(parsed, read_case(str(folder), parsed))
    assert score.found >= 0.95 * score.true
    assert score.bounds > 100
    assert score.bounds_violated == 0


@pytest.mark.parametrize("node", [0, 2])
def test_a_ring_seen_at_one_rank_is_no_pipeline(shared: Path, node: int) -> None:
    result = analysed(shared, "nccl-ar-n4-256k-late2-10ms", node)
    told = [(each.op, each.algorithm) for each in result.collectives if each.complete]
    assert told.count(("all_reduce", "ring")) >= 25
    assert not result.pipelines


@pytest.mark.parametrize("case", ["nccl-net-loss-n4-128k", "net-loss-fabric-n3-96k"])
def test_losses_between_others_are_no_single_incidents_of_a_gpu(shared: Path, case: str) -> None:
    """Node 0 sees no loss: a message between two others was lost now and then, and these came late."""
    result = analysed(shared, case, 0)
    assert not [finding for finding in result.findings if finding.condition == "straggler"]


def test_a_rank_without_a_capture_is_not_late_by_its_own_doing() -> None:
    """Alone it is told as late, by whose doing is not; beside a captured one it may wait for that."""

    def judgement(endpoint: int, verdict: str) -> Judgement:
        return Judgement(endpoint, 20, 0.2, 0.2, 0, 9, 9, verdict, "compute", "transient", None)

    def said(given: list[Judgement], far: set[int]) -> list[tuple[str, str]]:
        return [(each.verdict, each.cause) for each in doubt(given, frozenset(), frozenset(far))]

    alone = [judgement(0, "on_time"), judgement(1, "intermittent"), judgement(2, "late")]
    assert said(alone, {1, 2})[1:] == [("intermittent", "unknown"), ("late", "unknown")]
    among = [judgement(0, "late"), judgement(1, "intermittent"), judgement(2, "late")]
    assert said(among, {1, 2}) == [("late", "compute"), ("unknown", "unknown"), ("unknown", "unknown")]


def test_what_a_rank_beside_received_was_not_seen(shared: Path) -> None:
    """From one rank of a ring the one before seems to send only: it waits for no slot all the same."""
    result = analysed(shared, "nccl-ar-n4-256k-late2-10ms", 0)
    before = [
        rank for each in result.collectives for rank in each.ranks if "soon after its credit" in rank.why
    ]
    assert len(before) < len(result.collectives) / 4


def test_what_one_node_tells_leaves_no_room_for_the_hosts_of_others(shared: Path) -> None:
    """``at_least`` leaves room for threads that slept. With it the late rank's neighbour told nothing."""
    result = analysed(shared, "nccl-ar-n4-256k-late2-10ms", 2)
    (late,) = (end.id for end in result.endpoints if end.address == "192.168.50.10")
    mine = [rank for each in result.collectives for rank in each.ranks if rank.endpoint == late]
    told = [rank.lateness_ns for rank in mine if rank.bound in ("exact", "at_least")]
    assert sum((ns or 0) > 5_000_000 for ns in told) >= 5


@pytest.mark.parametrize("node", range(4))
def test_a_ring_that_one_node_sees_is_not_taken_for_one_of_its_neighbours_alone(node: int) -> None:
    """Three of the four ranks exchange messages there: by these alone it could be a whole ring of three."""
    trace = Path(__file__).parents[1] / "traces" / "gloo-allreduce-n4" / f"node{node}.pcap.gz"
    found = [c for c in dpuflow.analyze([str(trace)]).collectives if c.op == "all_reduce"]
    assert found
    assert "exact" not in {rank.bound for collective in found for rank in collective.ranks}
