"""Accounts, steps and tokens in, what a job's steps pay for communication and its tokens for prompts out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import median_of, percentile
from dpuflow.arrays.stretches import covered_ns
from dpuflow.results.figures import Decode, Tax
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.steps import lengths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.results import Analysis
    from dpuflow.verdicts.parallelism import Tokens
    from dpuflow.verdicts.steps import Steps


def list_tax(result: Analysis) -> Iterator[Tax]:
    """One row a job that has an account: communication that steps wait for, and that work hides."""
    for account in result.accounts:
        members = set(result.groups[account.group].endpoints)
        groups = {group.id for group in result.groups if not members.isdisjoint(group.endpoints)}
        ran = (
            np.array(
                [
                    (each.start_ns, each.end_ns)
                    for each in result.collectives
                    if each.complete and each.group in groups
                ],
                np.int64,
            )
            .reshape(-1, 2)
            .T
        )
        took = ran[1].max() - ran[0].min() if ran.size else 0
        under_way = covered_ns(ran) / max(took / max(account.step_ns, 1), 1.0)
        waited = sum(account.waited.values())
        exposed = min(account.exposed_ns, account.step_ns)
        left = account.step_ns - exposed
        yield Tax(
            group=account.group,
            steps=account.steps,
            step_ns=account.step_ns,
            exposed_ns=exposed,
            overlapped_ns=round(max(min(under_way, account.step_ns) - exposed - waited, 0)),
            waiting_ns=waited,
            network_ns=account.parts.network + account.parts.credit,
            unexplained_ns=account.parts.unexplained,
            gain_at_most=account.step_ns / left if left > 0 else None,
        )


def list_decode(
    steps: Sequence[Steps],
    tokens: Sequence[Tokens | None],
    instances: Sequence[Instance],
    entries: Entries,
) -> Iterator[Decode]:
    """One row a job whose steps are tokens."""
    for each, told in zip(steps, tokens, strict=True):
        if told is None:
            continue
        numbers, took = lengths(each, entries)
        decode, prefill = (np.isin(numbers, chosen) for chosen in (told.decode, told.prefill))
        if not decode.any():
            continue
        ends = entries.leave_ns[each.ends[told.decode]]
        known = ends != NEVER
        gaps = np.diff(ends)[known[1:] & known[:-1]]
        sizes = {instances[n].size for n in entries.collective[each.ends[told.decode]].tolist()}
        yield Decode(
            endpoints=each.endpoints,
            tokens=len(told.decode),
            prefills=len(told.prefill),
            layers=each.period // 2,
            hidden_bytes=sizes.pop() if len(sizes) == 1 else None,
            step_ns=round(float(median_of(took[decode]))),
            gap_ns=round(float(median_of(gaps))) if len(gaps) else None,
            gap_p99_ns=round(percentile(gaps, 99)) if len(gaps) else None,
            tokens_per_s=round(1e9 / float(median_of(gaps)), 3) if len(gaps) and median_of(gaps) else None,
            prefill_ns_per_token=round(float(took[prefill].sum()) / len(told.decode)),
        )
