"""Which endpoints and flows several captures have in common, and which endpoints each sits at.

In: the CaptureTables of all vantage points. Out: one ENDPOINT and one FLOW row for each over all of
them, with the row numbers that translate, and for each capture the endpoints local to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import least_connected
from dpuflow.arrays.ordering import cut_at, distinct, numbered
from dpuflow.schema.rows import ENDPOINT, FLOW, NEVER, NONE32, Pairing, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.schema.tables import CaptureTables, Rows

    Ints = np.typing.NDArray[np.int64]

NEARLY_ALL: Final = 0.99  # of a node's packets are its own; the rest a switch flooded to it
IPV4_MAPPED: Final = 0xFFFF  # upper 32 of the lower 64 bits of ::ffff:a.b.c.d
LINK_LOCAL: Final = 0xFE80 << 48
FEWEST: Final = 8  # values that lie close together by no chance

_MOST: Final = (
    "retransmitted", "out_of_order", "missing", "ecn_marked", "cnp", "nak", "rnr", "zero_window", "spurious",
    "closed",
)  # fmt: skip


@dataclass
class Common:
    """Endpoints and flows over all captures.

    ``endpoint_rows[c][r]`` and ``flow_rows[c][r]`` are the common rows of row ``r`` of capture ``c``;
    ``canonical[e]`` is the row that stands for address ``e`` once the addresses of a port are joined.
    ``near[c, f]`` is 2 where capture ``c`` sits at the sender of flow ``f``, 0 at its receiver, else 1.
    """

    endpoints: Rows
    flows: Rows
    endpoint_rows: list[Ints]
    flow_rows: list[Ints]
    canonical: Ints
    addresses: list[list[int]]
    local: list[list[int]]
    undecided: dict[int, list[list[int]]] = field(default_factory=dict)  # capture -> sets, one of them local

    def near(self) -> np.typing.NDArray[np.int8]:
        """Captures x flows: 2 at the sender, 0 at the receiver, 1 between them or not known."""
        is_local = np.zeros((len(self.local), len(self.endpoints)), np.int8)
        for capture, rows in enumerate(self.local):
            is_local[capture, rows] = 1
        src, dst = self.flows["src"].astype(np.int64), self.flows["dst"].astype(np.int64)
        return (1 + is_local[:, src] - is_local[:, dst]).astype(np.int8)


def find_common(captures: Sequence[CaptureTables]) -> Common:
    """Join endpoints by address and flows by their key; tell local endpoints from the traffic alone.

    Flow counters that need the sending order of packets are filled in by ``total_flows``.
    """
    endpoints, endpoint_rows = _join_endpoints(captures)
    flows, flow_rows = _join_flows(captures, endpoint_rows)
    common = Common(
        endpoints,
        flows,
        endpoint_rows,
        flow_rows,
        np.arange(len(endpoints)),
        [[] for _ in endpoints],
        [[] for _ in captures],
    )
    for capture, tables in enumerate(captures):
        candidates = _candidates(tables)
        rows = sorted(sorted(int(endpoint_rows[capture][r]) for r in c) for c in candidates)
        if len(rows) == 1:
            common.local[capture] = rows[0]
        elif rows:
            common.undecided[capture] = rows
    return common


def _join_endpoints(captures: Sequence[CaptureTables]) -> tuple[Rows, list[Ints]]:
    """One row an address, in order of address."""
    rows = np.concatenate([t.endpoints for t in captures])
    key = np.stack([rows["addr_hi"], rows["addr_lo"]], axis=1)
    unique, inverse = np.unique(key, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1).astype(np.int64)
    endpoints = ENDPOINT.zeros(len(unique))
    endpoints["addr_hi"], endpoints["addr_lo"] = unique[:, 0], unique[:, 1]
    for name in ("packets_out", "packets_in"):
        np.maximum.at(endpoints[name], inverse, rows[name])
    # Beyond a router an address shows the router's MAC: keep one only where all captures agree.
    low, high = np.full(len(unique), np.iinfo(np.uint64).max), np.zeros(len(unique), np.uint64)
    seen = rows["mac"] != 0
    np.minimum.at(low, inverse[seen], rows["mac"][seen])
    np.maximum.at(high, inverse, rows["mac"])
    endpoints["mac"] = np.where(low == high, high, 0)
    return endpoints, np.split(inverse, np.cumsum([len(t.endpoints) for t in captures])[:-1])


def _join_flows(captures: Sequence[CaptureTables], endpoint_rows: list[Ints]) -> tuple[Rows, list[Ints]]:
    """One row a flow: RoCE by (source, destination, destination QP), TCP by the 4-tuple."""
    keys = []
    for tables, rows in zip(captures, endpoint_rows, strict=True):
        flows = tables.flows
        ports = (flows["sport"].astype(np.int64) << 16) | flows["dport"]
        detail = np.where(flows["transport"] == Transport.TCP, ports, flows["dest_qp"])
        src = rows[flows["src"]] if len(flows) else np.zeros(0, np.int64)
        dst = rows[flows["dst"]] if len(flows) else np.zeros(0, np.int64)
        keys.append(np.stack([flows["transport"].astype(np.int64), src, dst, detail]))
    every = np.concatenate(keys, axis=1)
    _, first, inverse = np.unique(numbered(*every), return_index=True, return_inverse=True)
    flows = FLOW.zeros(len(first))
    if len(first):
        every_flow = np.concatenate([t.flows for t in captures])
        for name in ("dest_qp", "sport", "dport", "transport"):
            flows[name] = every_flow[name][first]
        flows["src"], flows["dst"] = every[1:3, first]
        for name in _MOST:
            np.maximum.at(flows[name], inverse, every_flow[name])
        framed = np.where(
            every_flow["framing"] == 3, 0, every_flow["framing"]
        )  # a framing beats "none found"
        np.maximum.at(flows["framing"], inverse, framed)
        flows["framing"][flows["framing"] == 0] = every_flow["framing"][first][flows["framing"] == 0]
    flow_rows = np.split(inverse, np.cumsum([len(t.flows) for t in captures])[:-1])
    flows["peer"] = NONE32
    flows["rtt_min_ns"] = NEVER
    _join_peers(captures, flows, flow_rows)
    return flows, flow_rows


_EVIDENCE: Final = (Pairing.ONLY, Pairing.UDP_PORT, Pairing.ACKS, Pairing.HANDSHAKE, Pairing.PORTS)
"""What tells a flow's opposite, better evidence last."""


def _join_peers(captures: Sequence[CaptureTables], flows: Rows, flow_rows: list[Ints]) -> None:
    """Take each flow's peer from the capture that had the best evidence for it."""
    for wanted in _EVIDENCE:
        for tables, rows in zip(captures, flow_rows, strict=True):
            at = np.flatnonzero((tables.flows["pairing"] == wanted) & (tables.flows["peer"] != NONE32))
            mine, theirs = rows[at], rows[tables.flows["peer"][at]]
            flows["peer"][mine], flows["pairing"][mine] = theirs, wanted


def number_connections(flows: Rows) -> np.typing.NDArray[np.uint32]:
    """A connection number for each flow: the same for a flow and its peer, else its own."""
    own = np.arange(len(flows), dtype=np.int64)
    peer = np.where(flows["peer"] == NONE32, own, flows["peer"].astype(np.int64))
    return np.unique(np.minimum(own, peer), return_inverse=True)[1].reshape(-1).astype(np.uint32)


def _ports(tables: CaptureTables) -> list[list[int]]:
    """Endpoint rows that may be one port: those with one source MAC, or alone without any."""
    ports: dict[tuple[int, int], list[int]] = {}
    for row, mac in enumerate(tables.endpoints["mac"].tolist()):
        ports.setdefault((mac, 0) if mac else (0, row + 1), []).append(row)
    return list(ports.values())


def _candidates(tables: CaptureTables) -> list[list[int]]:
    """The sets of endpoint rows that may be local: one set: told; several: one of them; none: a switch.

    An address that takes part in nearly all packets is local; failing that a port (the addresses of
    one MAC); failing that the middles of several stars, one for each interface of the node. All that lies
    beyond a router shows its MAC, too, and is no port: addresses then make the stars.
    """
    flows = tables.flows
    src, dst = flows["src"].astype(np.int64), flows["dst"].astype(np.int64)
    packets = np.maximum(flows["packets"], 1).astype(np.float64)
    ends = tables.endpoints["packets_out"] + tables.endpoints["packets_in"].astype(np.float64)
    total = float(tables.endpoints["packets_out"].sum())
    if not total:  # a window that only settles earlier messages counts no packets: each flow is as good
        ends, total = np.bincount(np.r_[src, dst], minlength=len(ends)).astype(np.float64), float(len(src))
    single = [[row] for row in range(len(tables.endpoints))]
    for sets in (single, _ports(tables)):
        port = np.zeros(len(tables.endpoints), np.int64)
        for number, rows in enumerate(sets):
            port[rows] = number
        covering = [sets[n] for n in np.flatnonzero(np.bincount(port, ends, len(sets)) >= NEARLY_ALL * total)]
        if covering and total:
            beyond = any(len(rows) > 1 for rows in covering)
            middles = _stars(tables, single, src, dst, packets) if beyond else []
            return covering + [rows for rows in middles if sorted(rows) not in map(sorted, covering)]
    roce = flows["transport"] == Transport.ROCE
    # Sockets of a job go by one interface of a node, to those of the others: they tie its adapters' stars.
    for kept in (np.ones(len(flows), bool), roce):
        a, b, weight = src[kept], dst[kept], packets[kept]
        for parts, number_of in ((sets, port), (single, np.arange(len(single)))):
            stars = _stars(tables, parts, number_of[a], number_of[b], weight)
            if stars:
                return stars
    return []


def _stars(
    tables: CaptureTables,
    sets: list[list[int]],
    src: Ints,
    dst: Ints,
    packets: np.typing.NDArray[np.float64],
) -> list[list[int]]:
    """The middles of the stars that the traffic between ports falls apart into, in one set.

    Of two ports that only talk to each other it is the one that answers at once, as seen here.
    """
    part = least_connected(src, dst, len(sets))[src]
    order = np.argsort(part, kind="stable")
    middles: list[int] = []
    answers: Answers | None = None
    for within in cut_at(order, np.flatnonzero(np.diff(part[order])) + 1):
        ends = np.concatenate([src[within], dst[within]])
        parts, which = np.unique(ends, return_inverse=True)
        share = np.bincount(which, np.tile(packets[within], 2))
        covering = parts[share >= NEARLY_ALL * packets[within].sum()]
        if len(covering) == 2:
            pair = [sets[number] for number in covering.tolist()]
            answers = answers or Answers(tables, np.arange(len(tables.endpoints)))
            near = nearer_end(answers.times(pair))
            covering = covering[[] if near is None else [near]]
        if len(covering) != 1:
            return []
        middles.append(int(covering[0]))
    return [[row for middle in middles for row in sets[middle]]] if len(middles) > 1 else []


class Answers:
    """From data to its ACK, as one capture saw it: at a receiver's own node next to nothing passes until the
    ACK; at the sender's the whole way there and back."""

    def __init__(self, tables: CaptureTables, rows: Ints) -> None:
        """``rows`` are the common rows of the capture's endpoints."""
        messages = tables.messages
        once = np.flatnonzero((messages["acked_ns"] != NEVER) & (messages["retransmitted"] == 0))
        took = messages["acked_ns"][once] - messages["last_ns"][once]
        dst = rows[tables.flows["dst"]][messages["flow"][once]]
        self._late = bool((took < 0).any())  # stamps are: no answer comes before what it answers
        order = np.argsort(dst, kind="stable")
        self._dst, self._took = dst[order], took[order]

    def times(self, sets: list[list[int]]) -> list[int] | None:
        """Least time for data to each of ``sets`` of endpoints, ns; None if not seen. Where stamps are late
        it is the time that most lie close to."""
        times = []
        for ends in sets:
            begin, end = (np.searchsorted(self._dst, ends, side) for side in ("left", "right"))
            mine = np.concatenate([self._took[a:b] for a, b in zip(begin, end, strict=True)])
            if not len(mine):
                return None
            some = mine[mine > 0]
            times.append(densest(some)[0] if self._late and len(some) else int(mine.min()))
        return times


def densest(values: Ints) -> tuple[int, int]:
    """Where values lie closest together, whatever else is among them: the shortest interval that holds a
    twentieth of them, or FEWEST."""
    values = np.sort(values)
    count = min(max(len(values) // 20, FEWEST), len(values))
    at = int(np.argmin(values[count - 1 :] - values[: len(values) - count + 1]))
    return int(values[at]), int(values[at + count - 1])


def nearer_end(times: list[int] | None) -> int | None:
    """Which of two ends answers in less than half the other's time: the capture is nearest to it."""
    if times is None or len(times) != 2:
        return None
    return 0 if 2 * times[0] < times[1] else 1 if 2 * times[1] < times[0] else None


def widen_local(captures: Sequence[CaptureTables], common: Common) -> None:
    """Count as local the other addresses that a capture shows with the source MAC of a local one."""
    for capture, (tables, rows) in enumerate(zip(captures, common.endpoint_rows, strict=True)):
        mac = tables.endpoints["mac"]
        ports = distinct(mac[np.isin(rows, common.local[capture])])
        same = rows[np.isin(mac, ports[ports != 0])]
        common.local[capture] = sorted({*common.local[capture], *same.tolist()})


def join_addresses(captures: Sequence[CaptureTables], common: Common) -> None:
    """Let several addresses of one port be one endpoint, where that is certain.

    Certain are (1) the addresses that a capture at their own node shows with one source MAC, and (2) one
    IPv6 link-local address, which no router forwards (RFC 4291, 2.5.6), and exactly one other address
    with the same MAC. Many addresses with one MAC elsewhere may be hosts behind a router, and stay apart.
    """
    for first, second in sorted(_of_one_port(captures, common)):
        a, b = common.canonical[first], common.canonical[second]
        weight = common.endpoints["packets_out"]
        keep, drop = (a, b) if weight[a] >= weight[b] else (b, a)
        common.canonical[common.canonical == drop] = keep
    for row, keep in enumerate(common.canonical.tolist()):
        if row != keep:
            common.addresses[keep].append(row)
    common.flows["src"] = common.canonical[common.flows["src"]]
    common.flows["dst"] = common.canonical[common.flows["dst"]]
    common.local = [sorted({int(common.canonical[r]) for r in rows}) for rows in common.local]


def _of_one_port(captures: Sequence[CaptureTables], common: Common) -> set[tuple[int, int]]:
    """Pairs of endpoint rows that are certainly addresses of one port."""
    pairs: set[tuple[int, int]] = set()
    for capture, tables in enumerate(captures):
        local = set(common.local[capture])
        for port in _ports(tables):
            rows = [int(common.endpoint_rows[capture][r]) for r in port]
            scope = [bool(common.endpoints["addr_hi"][r] == LINK_LOCAL) for r in rows]
            if len(rows) > 1 and (local.issuperset(rows) or (len(rows) == 2 and sum(scope) == 1)):
                pairs.update((rows[0], other) for other in rows[1:])
    return pairs


def total_flows(
    captures: Sequence[CaptureTables], common: Common, to_reference: list[tuple[bool, Ints, Ints]]
) -> None:
    """Fill packets, bytes, messages and times of each flow from the capture nearest its sender.

    ``to_reference`` holds for each capture whether it is tied to the reference clock, and the first and
    last time of its flows on that clock. Untied captures count, but give no times.
    """
    near, flows = common.near(), common.flows
    best = np.full((len(flows), 3), -1, np.int64)  # tied, nearness, packets of the sighting chosen
    flows["first_ns"] = flows["last_ns"] = NEVER
    for capture, (tables, rows) in enumerate(zip(captures, common.flow_rows, strict=True)):
        tied, first_ns, last_ns = to_reference[capture]
        rank = np.stack(
            [np.full(len(rows), int(tied)), near[capture, rows], tables.flows["packets"].astype(np.int64)],
            axis=1,
        )
        old = best[rows]
        differs = rank != old
        column = np.argmax(differs, axis=1)
        line = np.arange(len(rows))
        better = differs.any(axis=1) & (rank[line, column] > old[line, column])
        mine, theirs = line[better], rows[better]
        best[theirs] = rank[better]
        for name in ("packets", "bytes", "messages", "rtt_min_ns"):
            flows[name][theirs] = tables.flows[name][mine]
        if tied:
            flows["first_ns"][theirs], flows["last_ns"][theirs] = first_ns[mine], last_ns[mine]
    for name in (
        "retransmitted",
        "ecn_marked",
    ):  # counted where most were seen: of packets that came further on
        flows[name] = np.minimum(flows[name], flows["packets"])
