"""The account of a step's time: parts of its critical path that add up to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dpuflow.analysis import Worked, analyze_tables, read_captures
from dpuflow.entries.relative import previous_row
from dpuflow.results import Account, Analysis
from dpuflow.schema.rows import NEVER
from dpuflow.schema.tables import Vantage
from dpuflow.verdicts.accounts import without
from dpuflow.verdicts.paths import Paths, What

MS = 1_000_000
TRACES = Path(__file__).resolve().parents[1] / "traces"


@pytest.mark.parametrize("name", ["gloo-allreduce-n4", "mpi-allreduce-n4", "nccl-allreduce-n2"])
@pytest.mark.parametrize("unseen", [0.0, 0.1])
def test_segments_of_a_walk_add_up_to_the_step(name: str, unseen: float) -> None:
    """Whatever is known of the entries: what a path has no segment for is told as nothing."""
    worked = work_on(name)
    entries = replace(worked.inferred.entries, enter_ns=worked.inferred.entries.enter_ns.copy())
    entries.enter_ns[np.random.default_rng(1).random(len(entries.enter_ns)) < unseen] = NEVER
    before, beside = previous_row(entries), np.zeros(len(entries.endpoint), bool)
    paths = Paths(
        worked.exchanges, worked.instances, entries, before, [], beside, np.ones(len(worked.instances), bool)
    )
    for first, last in pairwise(worked.inferred.steps[0].ends.tolist()):
        walk = paths.walk(first, last)
        assert sum(each.length_ns for each in walk) == entries.leave_ns[last] - entries.leave_ns[first]
        assert all(each.length_ns > 0 for each in walk)
        assert unseen or all(each.what != What.NOTHING for each in walk)


def work_on(name: str) -> Worked:
    files = sorted((TRACES / name).glob("node*.pcap.gz"))
    vantages = [Vantage(file.name.partition(".")[0], (str(file),)) for file in files]
    return analyze_tables(read_captures(vantages, 1, None))


def trace(name: str) -> Analysis:
    return work_on(name).analysis


def total(account: Account) -> int:
    parts = account.parts
    named = parts.library + parts.transfer + parts.network + parts.credit + parts.unexplained
    return named + sum(parts.work.values()) + sum(parts.in_node.values())


def test_a_late_rank_carries_what_its_peers_waited() -> None:
    """Rank 2 of the bundled Gloo job works 10 ms longer than the others in steps of 39 ms."""
    (account,) = trace("gloo-allreduce-n4").accounts
    assert total(account) == account.step_ns
    assert account.step_ns == pytest.approx(39.1 * MS, rel=0.02)
    ((endpoint, waited),) = account.waited.items()
    assert account.parts.work[endpoint] > 30 * MS
    assert waited == pytest.approx(10 * MS, rel=0.1)
    assert account.parts.unexplained < 0.02 * account.step_ns


def test_what_messages_scatter_by_is_no_hidden_cause(shared: Path) -> None:
    """Hosts that share a processor send a message in any time: two ranks of UCX, nobody hides anything."""
    files = sorted((shared / "captures" / "roce" / "ar-ring-n2-256k-ucx-random").glob("node*.pcap*"))
    vantages = [Vantage(file.name.partition(".")[0], (str(file),)) for file in files]
    (account,) = analyze_tables(read_captures(vantages, 1, None)).analysis.accounts
    assert total(account) == account.step_ns
    assert account.unexplained_share < 0.05


@pytest.mark.parametrize(("every", "told"), [(1, (160, 100)), (2, (130, 100)), (4, (115, 100))])
def test_what_lateness_in_some_of_the_steps_costs_is_told_by_their_mean(
    every: int, told: tuple[int, int]
) -> None:
    """The median step shows nothing of what comes each second time."""
    saved = np.where(np.arange(20) % every == 0, 60, 0)
    account = SimpleNamespace(ends_ns=np.cumsum(100 + saved), lengths_ns=100 + saved, saved_ns={3: saved})
    assert without(account, 3, None, True) == told  # type: ignore[arg-type]
