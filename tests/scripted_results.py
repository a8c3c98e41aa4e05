"""Made-up results with known content, for tests of reports and scoring."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from dpuflow.message_list import UNKNOWN, Message, Messages
from dpuflow.results import (
    Analysis,
    Collective,
    Endpoint,
    Evidence,
    Finding,
    Flow,
    Group,
    Lateness,
    Phase,
    RankEntry,
    WhatIf,
)
from dpuflow.results.tokens import Bound
from dpuflow.schema.tables import CaptureInfo, Clock

MS = 1_000_000
T0 = 1_795_251_363_000_000_000  # 2026-11-21 08:56:03 UTC
ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]


def collective(
    number: int,
    enters_ms: list[float | None],
    *,
    start_ms: float = 0.0,
    bound: Bound = "exact",
    **changes: object,
) -> Collective:
    """An all_reduce of 256 KiB; rank i enters ``enters_ms[i]`` after ``start_ms``, None: not to be seen."""
    known = [ms for ms in enters_ms if ms is not None]
    first = min(known, default=0.0)
    start = T0 + round(start_ms * MS)
    end = start + round((max(known, default=0.0) + 5) * MS)
    row = Collective(
        id=number,
        group=0,
        op="all_reduce",
        algorithm="ring",
        alternatives=[],
        root=None,
        bytes=262144,
        wire_bytes=1572864,
        start_ns=start + round(first * MS),
        end_ns=end,
        confidence=0.99,
        complete=True,
        phases=[Phase("reduce_scatter", start, end)],
        ranks=[
            RankEntry(i, None, None, None, None, "unobservable", "unknown", "nothing of its own seen")
            if ms is None
            else RankEntry(
                i,
                start + round(ms * MS),
                end,
                round((ms - first) * MS),
                50_000,
                bound,
                "none",
                "first own message",
            )
            for i, ms in enumerate(enters_ms)
        ],
    )
    for name, value in changes.items():
        setattr(row, name, value)
    return row


def job(*, late_ms: float = 0.0, late_rank: int = 2, iterations: int = 10, ranks: int = 4) -> Analysis:
    """A job of steps of 40 ms; the ranks enter 0.1 ms after each other, ``late_rank`` by ``late_ms`` more."""
    endpoints = [
        Endpoint(i, ADDRESSES[i], [ADDRESSES[i]], f"02:00:00:00:00:0{i}", i, None) for i in range(ranks)
    ]
    collectives = []
    for k in range(iterations):
        enters = [0.1 * i for i in range(ranks)]
        enters[late_rank] += late_ms
        collectives.append(collective(k, list(enters), start_ms=40 * k))
    late = late_ms > 1
    wait_ns = round(iterations * (ranks - 1) * late_ms * MS) if late else 0
    lateness = [
        Lateness(
            endpoint=i,
            collectives=iterations,
            late_share=1.0 if late and i == late_rank else 0.0,
            last_share=1.0 if i == (late_rank if late else ranks - 1) else 0.0,
            median_ns=round(0.1 * i * MS) + (round(late_ms * MS) if i == late_rank else 0),
            p99_ns=round(0.1 * i * MS) + (round(late_ms * MS) if i == late_rank else 0),
            caused_wait_ns=wait_ns if i == late_rank else 0,
            verdict="late" if late and i == late_rank else "on_time",
            cause="compute" if late and i == late_rank else "none",
            steadiness="persistent" if late and i == late_rank else None,
            own_share=1.0 if late and i == late_rank else 0.0,
            late_ns=round(0.1 * i * MS) + round(late_ms * MS) if late and i == late_rank else None,
            late_most_ns=round(0.1 * i * MS) + round(late_ms * MS) if late and i == late_rank else None,
            late_bound="exact" if late and i == late_rank else None,
            confidence=0.97,
        )
        for i in range(ranks)
    ]
    findings = []
    if late:
        findings = [
            Finding(
                id=0,
                condition="straggler",
                runbook="EW1",
                endpoints=[late_rank],
                start_ns=T0,
                end_ns=T0 + iterations * 40 * MS,
                severity="critical",
                confidence=0.97,
                summary=f"Rank {late_rank} enters {late_ms:g} ms after the others, who wait for it.",
                advice="Look at what its host and GPU do between collectives before anything is replaced.",
                alternatives=["a larger shard or a longer input on this rank"],
                evidence=[
                    Evidence(late_rank, (120, 161), f"ip.addr == {ADDRESSES[late_rank]} && tcp.port == 5000")
                ],
            )
        ]
    return Analysis(
        captures=[
            CaptureInfo(
                i,
                f"node{i}",
                [f"node{i}.pcap.gz"],
                "ethernet",
                packets=1000 + i,
                bytes=900_000,
                first_ns=T0,
                last_ns=T0 + iterations * 40 * MS,
                lost_packets=0,
                skipped={"other_ethertype": 3} if i == 0 else {},
            )
            for i in range(ranks)
        ],
        clocks=[
            Clock(i, i == 0, "reference" if i == 0 else "trusted", 0, 0, 0 if i == 0 else 20_000)
            for i in range(ranks)
        ],
        endpoints=endpoints,
        flows=[
            Flow(
                i,
                i,
                (i + 1) % ranks,
                "tcp",
                None,
                (40000 + i, 5000),
                500,
                400_000,
                60,
                2 * (i == 1),
                0,
                0,
                0,
                0,
            )
            for i in range(ranks)
        ],
        groups=[Group(0, list(range(ranks)))],
        collectives=collectives,
        lateness=lateness,
        what_if=[WhatIf(late_rank, 40 * MS, round((40 - late_ms) * MS))] if late else [],
        findings=findings,
        limits=["No switch was captured: where a packet waited between two nodes cannot be told."],
        start_ns=T0,
        end_ns=T0 + iterations * 40 * MS,
    )


def messages(spans: list[tuple[int, int]]) -> Messages:
    """From rank 0 to rank 1 over flow 0; each begins and ends as a span says and arrives 10 ns later."""
    count = len(spans)
    begin, end = (np.array([span[n] for span in spans], np.int64) for n in (0, 1))
    columns = {each.name: np.zeros(count, np.int64) for each in fields(Message)}
    columns |= {"id": np.arange(count), "dst": np.ones(count, np.int64), "sent_ns": begin, "sent_end_ns": end}
    columns |= {"arrived_ns": begin + 10, "arrived_end_ns": end + 10, "acked_ns": end + 20}
    columns |= {"bytes": np.full(count, 100), "granted_ns": begin - 5, "packets": np.ones(count, np.int64)}
    columns |= {"collective": np.full(count, UNKNOWN), "ecn_marked": np.arange(count) % 2}
    return Messages(columns)
