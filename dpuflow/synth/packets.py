"""The trace of a world, seen from one vantage point: packets in order of time, as columns.

Bursts are expanded packet by packet, some hundred thousand at a time, so that memory does not grow with the
length of a capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from dpuflow.schema.simulated import ACK_CODE, EVENTS, PACKETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.synth.world import Played

    Columns = dict[str, NDArray[np.int64]]

STREAM_FIELDS: Final = (
    "other",  # TCP: bytes that its sender had received (of a reply: had sent) the other way
    "tsval",
    "tsecr",
)
"""Only of worlds with TCP."""


class Packets(NamedTuple):
    """Packets in order of time."""

    stamp_ns: NDArray[np.int64]  # true time
    rows: NDArray[np.int64]  # packets x PACKETS
    streams: NDArray[np.int64] | None  # packets x STREAM_FIELDS

    def column(self, name: str) -> NDArray[np.int64]:
        """One of PACKETS."""
        return self.rows[:, PACKETS.index(name)]

    def where(self, rows: NDArray[Any]) -> Packets:
        """Some of them."""
        return Packets(
            self.stamp_ns[rows], self.rows[rows], None if self.streams is None else self.streams[rows]
        )

    def columns(self) -> Columns:
        """All of PACKETS and STREAM_FIELDS by name."""
        found = {name: self.rows[:, i] for i, name in enumerate(PACKETS)}
        if self.streams is not None:
            found |= {name: self.streams[:, i] for i, name in enumerate(STREAM_FIELDS)}
        return found


def packets_at(played: Played, node: int | None, window: int = 200_000) -> Iterator[Packets]:
    """Blocks of packets at a node's ports (``node``) or in the switch (None), in order of true time."""
    from dpuflow.kernels import simulated as kernels

    events = _events(played, node)
    start, count = (events[:, EVENTS.index(name)] for name in ("start", "count"))
    total = np.cumsum(count)
    waiting = np.empty((0, 3), np.int64)  # stamp, event and place in it
    at = 0
    while at < len(events):
        done = int(total[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(total, done + window, "right")))
        fresh = np.empty((int(total[end - 1]) - done, 3), np.int64)
        kernels.unfold(events, at, end, fresh)
        waiting = np.concatenate([waiting, fresh])
        waiting = waiting[np.argsort(waiting[:, 0], kind="stable")]
        whole = (
            len(waiting) if end == len(events) else int(np.searchsorted(waiting[:, 0], start[end], "left"))
        )
        yield _expand(played, events, waiting[:whole])
        waiting = waiting[whole:]
        at = end


def _events(played: Played, node: int | None) -> NDArray[np.int64]:
    """What passes the vantage point, in order of its start: EVENTS, of bursts and replies."""
    bursts, replies = played.trace.bursts.read(), played.trace.replies.read()
    burst_identity, reply_identity = played.identities
    parts: list[NDArray[np.int64]] = []

    def add(rows: NDArray[np.int64], reply: bool, side: str, received: int, shift: int = 0) -> None:
        table = replies if reply else bursts
        start = table[f"{side}_ns"][rows] + shift
        told: dict[str, NDArray[Any] | int] = {
            "start": start,
            "sent": table["tx_ns"][rows],
            "step_ps": 0 if reply else table[f"{side}_step_ps"][rows],
            "end": start if reply else table[f"{side}_end_ns"][rows] + shift,
            "count": 1 if reply else table["count"][rows],
            "first": 0 if reply else table["first"][rows],
            "row": rows if reply else table["message"][rows],
            "flow": table["flow"][rows],
            "identity": (reply_identity if reply else burst_identity)[rows],
            "marked": 0 if reply else table["marked"][rows],
            "reply": int(reply),
            "received": received,
        }
        part = np.empty((len(rows), len(EVENTS)), np.int64)
        for i, name in enumerate(EVENTS):
            part[:, i] = told[name]
        parts.append(part)

    if node is None:
        # Frames as they reach the switch, half way: before queue, marks and losses.
        half = int(played.scenario.cluster.latency_us * 500)
        add(np.arange(len(bursts["flow"])), False, "tx", 2, half)
        add(np.arange(len(replies["flow"])), True, "tx", 2, half)
    else:
        sent, came, answered, heard = (
            order[slice(*np.searchsorted(nodes, [node, node + 1]))] for order, nodes in played.at_ports
        )
        add(sent, False, "tx", 0)
        add(came[bursts["rx_end_ns"][came] >= 0], False, "rx", 1)
        add(answered, True, "tx", 0)
        add(heard[replies["rx_ns"][heard] >= 0], True, "rx", 1)
    events = np.concatenate(parts)
    return events[np.argsort(events[:, EVENTS.index("start")], kind="stable")]


def at_ports(played: Played) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows of BURSTS by sending node, with these nodes; by receiving node; the same of REPLIES."""
    src = np.array([flow.src.node for flow in played.flows], np.int64)
    dst = np.array([flow.dst.node for flow in played.flows], np.int64)
    found = []
    for table, ends in ((played.trace.bursts, (src, dst)), (played.trace.replies, (dst, src))):
        flow = table.read()["flow"]
        for end in ends:
            order = np.argsort(end[flow], kind="stable")
            found.append((order, end[flow[order]]))
    return found


def _expand(played: Played, events: NDArray[np.int64], which: NDArray[np.int64]) -> Packets:
    """Packets: ``which`` has their stamps, their events and their places in these."""
    from dpuflow.kernels import simulated as kernels

    messages, replies = played.trace.messages.cells(), played.trace.replies.cells()
    mtus = np.array([flow.mtu for flow in played.flows], np.int64)
    rows = np.empty((len(which), len(PACKETS)), np.int64)
    kernels.expand(events, which, messages, replies, mtus, played.scenario.machine.ack_packets, rows)
    stamps = which[:, 0].copy()
    if not played.streams.flows:
        return Packets(stamps, rows, None)
    code, flow, acks = (rows[:, PACKETS.index(name)] for name in ("code", "flow", "syndrome"))
    tells = code == ACK_CODE
    acks = np.where(tells, acks, 0)  # rows of ACKS
    code[tells] += played.streams.blocks[acks[tells]]
    known = played.streams.columns(flow, tells, events[which[:, 1], EVENTS.index("sent")], acks)
    return Packets(stamps, rows, np.stack([known[name] for name in STREAM_FIELDS], axis=1))
