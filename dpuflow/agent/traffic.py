"""Counters of flows at two moments in; what each pair of endpoints sent meanwhile out (``board.Traffic``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.agent.board import Pause, Traffic
from dpuflow.agent.stream import COUNTERS
from dpuflow.agent.windows import grown
from dpuflow.identity.endpoints import address_text, mac_text
from dpuflow.schema.rows import Transport

if TYPE_CHECKING:
    from dpuflow.agent.stream import Counts
    from dpuflow.schema.tables import CaptureTables, Rows


def traffic_between(before: Counts | None, now: Counts, tables: CaptureTables) -> tuple[Traffic, ...]:
    """Increments by source, destination and transport, in that order; pairs that were silent are left out."""
    values = now.values if before is None else grown(before, now)
    flows, busy = tables.flows, np.flatnonzero(values.any(axis=1))
    key = np.stack([flows[name][busy].astype(np.int64) for name in ("src", "dst", "transport")], axis=1)
    pairs, of = np.unique(key, axis=0, return_inverse=True)
    sums = np.zeros((len(pairs), len(COUNTERS)), np.uint64)
    np.add.at(sums, of.reshape(-1), values[busy])
    address: dict[int, str] = {}
    for end in np.unique(pairs[:, :2]).tolist():
        address[end] = address_text(tables.endpoints[end])
    return tuple(
        Traffic(
            src=address[src],
            dst=address[dst],
            transport="roce" if transport == Transport.ROCE else "tcp",
            **dict(zip(COUNTERS, row, strict=True)),
        )
        for (src, dst, transport), row in zip(pairs.tolist(), sums.tolist(), strict=True)
    )


def pauses_of(rows: Rows) -> tuple[Pause, ...]:
    """PAUSE rows by sender and priority."""
    found: dict[tuple[int, int | None], tuple[int, int]] = {}
    for row in rows:
        mac, classes = int(row["src_mac"]), int(row["classes"])
        plain = int(row["opcode"]) == 1
        for priority in [None] if plain else [k for k in range(8) if classes >> k & 1]:
            frames, quanta = found.get((mac, priority), (0, 0))
            found[mac, priority] = frames + 1, quanta + int(row["quanta"][priority or 0])
    return tuple(
        Pause(mac_text(mac) or "", priority, frames, quanta)
        for (mac, priority), (frames, quanta) in sorted(
            found.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1])
        )
    )
