"""Steps, pipelines and what-if as the result format lists them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpuflow import results
from dpuflow.arrays.ordering import median_of, percentile
from dpuflow.verdicts.accounts import without
from dpuflow.verdicts.pipelines import BACKWARD, FORWARD
from dpuflow.verdicts.stages import idle_shares, typical_ns
from dpuflow.verdicts.steps import lengths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.results import WhatIf
    from dpuflow.verdicts import Inferred
    from dpuflow.verdicts.bulk import Bulk
    from dpuflow.verdicts.parallelism import Tokens
    from dpuflow.verdicts.pipelines import Pipeline
    from dpuflow.verdicts.stages import Stage
    from dpuflow.verdicts.steps import Steps


def list_steps(
    steps: Sequence[Steps], tokens: Sequence[Tokens | None], entries: Entries
) -> Iterator[results.Steps]:
    """One row for each job's steps; where they are tokens one for decode and one for prefill."""
    for each, told in zip(steps, tokens, strict=True):
        numbers, took_ns = lengths(each, entries)
        end_ns = entries.leave_ns[each.ends]
        kinds: tuple[tuple[Literal["prefill", "decode"] | None, NDArray[np.int64]], ...] = ((None, numbers),)
        if told is not None:
            kinds = (("prefill", told.prefill), ("decode", told.decode))
        for kind, wanted in kinds:
            chosen = np.isin(numbers, wanted)
            if not chosen.any():
                continue
            row = _steps(each, took_ns[chosen], end_ns[numbers[chosen] - 1], end_ns[numbers[chosen]])
            row.kind = kind
            if kind == "decode":
                row.layers = each.period // 2
                row.tokens_per_s = round(1e9 / row.step_ns, 3) if row.step_ns else None
            yield row


def _steps(
    each: Steps, took_ns: NDArray[np.int64], begin_ns: NDArray[np.int64], end_ns: NDArray[np.int64]
) -> results.Steps:
    return results.Steps(
        endpoints=each.endpoints,
        count=len(took_ns),
        collectives=each.period,
        step_ns=round(float(median_of(took_ns))),
        p99_ns=round(percentile(took_ns, 99)),
        start_ns=int(begin_ns.min()),
        end_ns=int(end_ns.max()),
    )


def list_pipelines(
    pipelines: Sequence[Pipeline], stages: Sequence[Stage], entries: Entries
) -> Iterator[results.Pipeline]:
    """One row a pipeline."""
    for each in pipelines:
        yield results.Pipeline(
            stages=each.stages,
            schedule=each.schedule,
            microbatches=each.microbatches,
            forward_ns=[typical_ns(row[FORWARD]) for row in each.work],
            backward_ns=[typical_ns(row[BACKWARD]) for row in each.work],
            idle_share=idle_shares(each, entries),
            late=[s.endpoint for s in stages if s.verdict == "late" and s.endpoint in each.stages],
            steps=max((len(s.incidents_ns) for s in stages if s.endpoint in each.stages), default=0),
            late_steps=[int(np.count_nonzero(ns)) for ns in _incidents(each, stages)],
            late_step_ns=[
                round(float(median_of(ns[ns > 0]))) if ns.any() else None for ns in _incidents(each, stages)
            ],
        )


def _incidents(pipeline: Pipeline, stages: Sequence[Stage]) -> list[NDArray[np.int64]]:
    """Of each of its stages by how much it worked longer in each step, beyond chance."""
    found = {stage.endpoint: stage.incidents_ns for stage in stages}
    return [found.get(endpoint, np.zeros(0, np.int64)) for endpoint in pipeline.stages]


def list_what_if(inferred: Inferred, instances: Sequence[Instance]) -> Iterator[WhatIf]:
    """For each endpoint that is late what a step of its job would take without that.

    Of ranks that no capture saw nobody knows how late they would still be: there nothing is said.
    """
    unseen = {end for instance in instances if instance.placement.seats for end in instance.order}
    for judgement in inferred.judgements:
        if not judgement.late or judgement.endpoint in unseen:
            continue
        for account in inferred.accounts:
            if judgement.endpoint in account.endpoints:
                steady = judgement.verdict == "late"
                told = without(account, judgement.endpoint, judgement.since_ns, steady)
                if told is not None:
                    yield results.WhatIf(judgement.endpoint, *told)


def list_transfers(bulk: Sequence[Bulk], entries: Entries) -> Iterator[results.Transfer]:
    """Bulk one-sided transfers, in order of their start."""
    for number, each in enumerate(bulk):
        first = int(entries.enter_ns[each.row]) if each.row >= 0 else None
        yield results.Transfer(
            id=number,
            src=each.src,
            dst=each.dst,
            verb="read" if each.read else "write",
            start_ns=each.start_ns,
            end_ns=each.end_ns,
            bytes=each.bytes,
            pages=len(each.rows),
            page_bytes=each.page_bytes,
            busy_ns=each.busy_ns,
            bits_per_s=8e9 * each.bytes / each.busy_ns if each.busy_ns > 0 else None,
            retransmitted=each.retransmitted,
            ecn_marked=each.ecn_marked,
            path=each.path,
            likely="kv_cache" if each.cache else None,
            first_token_ns=first,
            wait_before_first_token_ns=first - each.idle_ns if each.waited and first is not None else None,
            complete=each.complete,
            why=_why(len(each.rows), each.page_bytes, each.waited, each.cache, each.row >= 0),
        )


@lru_cache(maxsize=1 << 12)
def _why(count: int, page_bytes: int | None, waited: bool, cache: bool, followed: bool) -> str:
    pages = f"{count} pages" + (f", most of {page_bytes} bytes" if page_bytes else "")
    parts = [f"{pages}, one way, without clear-to-send entries or immediates"]
    if waited:
        parts.append("the receiver paused for it and entered its next collective when it was there")
    elif cache:
        parts.append("the receiver was at work; it has waited for other transfers of this way")
    elif not followed:
        parts.append("the receiver enters no collective after it")
    else:
        parts.append("the receiver was at work, or paused no longer than it usually does")
    return "; ".join(parts)
