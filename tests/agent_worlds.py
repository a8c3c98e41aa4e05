"""A scripted board: windows of a small job, findings and health, for tests of what the agent tells."""

from __future__ import annotations

from dpuflow.agent.board import Board, FindingState, Health, Pause, Traffic, Window
from dpuflow.results import (
    Analysis,
    Collective,
    Edge,
    Endpoint,
    Evidence,
    Finding,
    Group,
    Lateness,
    Phase,
    Pipeline,
    RankEntry,
    Steps,
    Transfer,
    WhatIf,
)

MS = 1_000_000
S = 1_000_000_000
ADDRESSES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


def analysis(
    number: int, count: int = 4, late_ms: float = 5.0, peers: tuple[str, ...] = ADDRESSES
) -> Analysis:
    """``count`` all_reduces of 20 ms: the second rank is late, of the third only a bound is known."""
    collectives = []
    for at in range(count):
        start = number * S + at * 100 * MS
        late = round(late_ms * MS)
        ranks = [RankEntry(0, start, start + 20 * MS, 0, 1000, "exact", "none", "sent first")]
        ranks.append(RankEntry(1, start + late, start + 20 * MS, late, 1000, "exact", "compute", "sent late"))
        ranks += [
            RankEntry(each, start + MS, start + 20 * MS, MS, 1000, "at_most", "unknown", "waited")
            for each in range(2, len(peers))
        ]
        collectives.append(
            Collective(
                *(at, 0, "all_reduce", "ring", ["recursive_doubling"], None, 1 << 20, 4 << 20),
                *(
                    start,
                    start + 20 * MS,
                    0.9,
                    True,
                    [Phase("reduce_scatter", start, start + 10 * MS)],
                    ranks,
                ),
            )
        )
    return Analysis(
        endpoints=[
            Endpoint(each, address, [address], "02:00:00:00:00:01", each, f"node{each} gpu0")
            for each, address in enumerate(peers)
        ],
        groups=[Group(0, list(range(len(peers))), "dp")],
        collectives=collectives,
        lateness=[
            Lateness(0, count, 0.0, 0.0, 0, 0, 0, "on_time", "none"),
            Lateness(
                *(1, count, 1.0, 1.0, 5 * MS, 5 * MS, 8 * count * MS, "late", "compute", "persistent"),
                own_share=1.0,
                late_ns=5 * MS,
                late_most_ns=5 * MS,
                late_bound="exact",
                address=peers[1],
            ),
        ],
        edges=[Edge(0, 1, count, round(late_ms * MS), 2000)],
        what_if=[WhatIf(1, 25 * MS, 20 * MS)],
        steps=[
            Steps(
                list(range(len(peers))),
                40,
                2,
                25 * MS,
                30 * MS,
                number * S,
                (number + 1) * S,
                "decode",
                32,
                40.0,
            )
        ],
        transfers=[
            Transfer(
                *(0, 0, len(peers) - 1, "write", number * S + 500 * MS, number * S + 510 * MS),
                *(1 << 20, 16, 1 << 16),
                *(8 * MS, 1.05e9, 0, 0, None, "kv_cache", number * S + 511 * MS, 9 * MS, True, "a pause"),
            )
        ],
        pipelines=[Pipeline([len(peers) - 1, 0], "1f1b", 4, [MS, None], [2 * MS, None], [0.1, None], [0])],
        start_ns=number * S,
        end_ns=(number + 1) * S,
    )


def window(number: int, count: int = 4, late_ms: float = 5.0, peers: tuple[str, ...] = ADDRESSES) -> Window:
    """A second of that job, with RoCE traffic round the ring, some TCP, and a pause."""
    pairs = list(zip(peers, peers[1:] + peers[:1], strict=True))
    traffic = [Traffic(src, dst, "roce", 1000, 4_000_000, 8, 3, 0, 1, 50, 2, 4, 5) for src, dst in pairs]
    traffic.append(Traffic(peers[0], peers[1], "tcp", packets=10, bytes=6000, messages=2, zero_window=1))
    return Window(
        number,
        number * S,
        (number + 1) * S,
        analysis(number, count, late_ms, peers),
        frozenset((at, 1) for at in range(count)),
        tuple(traffic),
        (Pause("02:00:00:00:00:aa", 3, 7, 700),),
        {"ring_full": 2},
    )


def finding(
    key: str = "straggler-1", active: bool = True, severity: str = "warning", condition: str = "straggler"
) -> FindingState:
    """A straggler: the second rank."""
    inner = Finding(
        *(0, condition, "dpuflow/straggler", [1], S, 2 * S, severity, 0.95),  # type: ignore[arg-type]
        *("10.0.0.2 is late in 100 % of 40 collectives", "look at the GPU of node1", ["a slow link"]),
        [Evidence(0, (17, 42), "ip.src == 10.0.0.2")],
    )
    return FindingState(
        key,
        condition,
        ("10.0.0.2",),
        severity,
        S,
        2 * S,
        3 * S,
        active,
        inner,
        ("node1 gpu0",),
        (1,),  # type: ignore[arg-type]
    )


def health(**changed: object) -> Health:
    """An agent that fares well."""
    values: dict[str, object] = {
        "time_ns": 5 * S,
        "uptime_s": 5.0,
        "cpu_share": 0.25,
        "cpu_limit": 0.5,
        "rss_bytes": 200 << 20,
        "memory_limit": 512 << 20,
        "lag_s": 2.0,
        "ring_used_share": 0.125,
        "losses": {"seen": 1000, "captured": 990, "ring_full": 10, "rx_missed_errors": 4},
        "interfaces": {"p0": True, "p1": False},
        "history_bytes": 1 << 20,
        "history_oldest_ns": S,
        "errors": {"analysis": 1},
    }
    return Health(**{**values, **changed})  # type: ignore[arg-type]


def board(windows: int = 5) -> Board:
    """A board with some windows, one finding that holds, and health."""
    made = Board()
    for number in range(windows):
        made.publish(window(number), (finding(),) if number == windows - 1 else ())
    made.report(health())
    return made
