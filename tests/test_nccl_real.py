"""NCCL itself, recorded: 2.28.9 with a GPU, over RoCE and over its sockets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dpuflow
from dpuflow.entries.channels import _goes_on
from dpuflow.schema.rows import NEVER

TRACES = Path(__file__).parents[1] / "traces"


@pytest.mark.parametrize(
    ("name", "told", "late"),
    [
        # The barrier before ran on one of the two channels: their connections count operations otherwise.
        ("nccl-tree-n4", {("all_reduce", "tree", 262_144): 16, ("all_reduce", "tree", 8): 1}, "10.88.0.2"),
        # Up to 2.28 entries of sends announce a chunk, as many bytes as a slot of LL, which it is not.
        (
            "nccl-alltoall-n4",
            {("all_to_all", "linear", 524_288): 14, ("all_reduce", "tree", 8): 1},
            "10.88.0.1",
        ),
        # What comes over one of two connections goes on over another: how soon, only that tells.
        (
            "nccl-ddp-n3",
            {
                ("all_reduce", "ring", 144_576): 40,
                ("all_reduce", "ring", 48_192): 20,
                ("all_reduce", "tree", 8): 1,
            },
            "10.88.0.1",
        ),
        # Sends among neighbours are rounds: each rank waits for what its neighbours sent in the one before.
        ("nccl-halo-n8", {("unknown", "unknown", None): 22, ("all_reduce", "tree", 8): 7}, "10.88.0.3"),
        # Hosts launch when their GPUs are done: messages wait for credits, and credits tell who came late.
        (
            "nccl-host-n2",
            {("all_gather", "ring", 253_568): 22, ("all_reduce", "ring", 8): 1},
            "10.88.0.1",
        ),
        # Nothing announces what goes over sockets; parts are told by each other, and replicas by each other.
        ("nccl-sockets-moe-n5", {("all_to_all", "linear", None): 36}, "10.88.0.5"),
        (
            "nccl-sockets-tpdp-n4",
            {("all_reduce", "ring", 262_144): 64, ("all_reduce", "ring", 2_097_152): 64},
            "10.88.0.2",
        ),
        # A tree's connections have other numbers of messages than those by which its ranks send round a ring.
        (
            "nccl-sockets-ring-n5",
            {("unknown", "unknown", None): 48, ("all_reduce", "tree", None): 13},
            "10.88.0.2",
        ),
    ],
)
def test_operations_and_who_is_late(
    name: str, told: dict[tuple[str, str, int | None], int], late: str
) -> None:
    files = sorted((TRACES / name).glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == told
    named = [row.endpoint for row in result.lateness if row.verdict == "late"]
    assert [str(end.address) for end in result.endpoints if end.id in named] == [late]


def test_pat_among_six_leaves_gaps_for_two_that_there_are_not() -> None:
    """Messages of 4, 2 and 1 blocks where ranks pass on 3, 1 and 1."""
    files = sorted((TRACES / "nccl-pat-n6").glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    assert Counter((str(c.op), str(c.algorithm), c.bytes) for c in result.collectives) == {
        ("reduce_scatter", "pat", 118_656): 22,
        ("all_reduce", "tree", 8): 1,  # a barrier before, on connections that PAT uses, too
    }


def test_before_a_credit_that_comes_with_the_call_its_host_works() -> None:
    """Who waits for it has called, too: what was before is the job's work, not waiting for credit."""
    files = sorted((TRACES / "nccl-host-n2").glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    (account,) = result.accounts
    assert account.parts.credit < 0.05 * account.step_ns
    assert sum(account.parts.work.values()) > 0.7 * account.step_ns
    assert "credit_starvation" not in {str(finding.condition) for finding in result.findings}
    assert (
        Counter(rank.why.split(" (")[0] for c in result.collectives for rank in c.ranks)
        .most_common(1)[0][0]
        .startswith("its first credit")
    )


def test_what_a_connection_goes_on_with_takes_always_as_long() -> None:
    """Of two channels the second comes and goes a little later, so that either out may follow either in."""
    random = np.random.default_rng(0)
    came = np.cumsum(random.integers(100, 1000, (20, 2, 6)), axis=2)
    left = came[:, ::-1] + 40 + random.integers(0, 5, came.shape)
    left[3] = NEVER
    any_size = np.ones((2, 2), bool)
    found = _goes_on(came, left, any_size)
    assert found is not None
    assert found.tolist() == [1, 0]
    # Nothing leaves before it has come: that tells more than how evenly it follows, and sizes tell all.
    left[:, 0] += random.integers(0, 3000, (20, 6))
    left[3] = NEVER
    found = _goes_on(came, left, any_size)
    assert found is not None
    assert found.tolist() == [1, 0]
    found = _goes_on(came, np.maximum(left, came.max() + 1), np.eye(2, dtype=bool))
    assert found is not None
    assert found.tolist() == [0, 1]


def test_steps_of_a_pipeline_whose_stages_first_tell_each_other_shapes() -> None:
    """PyTorch's set-up messages go one way more often: the pipeline is never as empty again."""
    files = sorted((TRACES / "nccl-pipeline-n3").glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    (pipeline,) = result.pipelines
    assert (pipeline.stages, pipeline.schedule, pipeline.microbatches) == ([0, 1, 2], "1f1b", 6)
    assert pipeline.forward_ns[1] == pytest.approx(1.6e6, rel=0.1)
    assert not {row.verdict for row in result.lateness} & {"late", "intermittent"}  # ends have no peers


def test_behind_its_own_sends_no_entry_is_exact() -> None:
    """A stage enters the all_reduce while its last send lies in the staging buffer: that may keep it."""
    files = sorted((TRACES / "nccl-pipeline-n2").glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    reduced = [c for c in result.collectives if c.bytes == 216_064]
    assert len(reduced) == 12
    for collective in reduced:
        bound = {str(result.endpoints[rank.endpoint].address): rank for rank in collective.ranks}
        assert bound["10.88.0.2"].bound != "exact"
        assert "queued behind" in bound["10.88.0.2"].why
        # By truth 2.27 to 2.31 ms.
        assert bound["10.88.0.1"].bound == "at_least"
        assert bound["10.88.0.1"].lateness_ns <= 2_310_000
