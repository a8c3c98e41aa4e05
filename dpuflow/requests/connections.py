"""TCP connections in, those of clients out, with who serves.

A client's connection carries bytes that no library frames, is part of no collective and of no set-up, and has
one end that is no rank. Its ends do not speak RDMA with each other, as those of perftest do, which agree over
TCP. Who serves is the end whose address and port more connections share, else a rank, else the lower port.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.join.common import number_connections
from dpuflow.schema.rows import Transport, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows

    Ints = NDArray[np.int64]


class Connections(NamedTuple):
    """Of each client's connection its number, the flow from the client, and both ends; in order of number."""

    number: Ints
    flow: Ints  # row of FLOW: client to server
    client: Ints
    server: Ints

    @property
    def flows(self) -> frozenset[int]:
        """Numbers of these connections, for those who ask of one."""
        return frozenset(self.number.tolist())


def client_connections(joined: Joined, exchanges: Rows, instances: Sequence[Instance]) -> Connections:
    """Those that carry data."""
    flows = joined.flows
    tcp = np.flatnonzero(flows["transport"] == Transport.TCP)
    if not len(tcp):
        return Connections(*np.zeros((4, 0), np.int64))
    number = number_connections(flows).astype(np.int64)
    plain = _plain(joined, exchanges, instances)
    ranks = {end for instance in instances for end in instance.order}
    sides = Counter((int(flows["src"][f]), int(flows["sport"][f])) for f in tcp.tolist())
    rdma = flows[flows["transport"] != Transport.TCP]
    peers = {frozenset(pair) for pair in zip(rdma["src"].tolist(), rdma["dst"].tolist(), strict=True)}
    found: dict[int, tuple[int, int, int]] = {}
    for flow in tcp.tolist():
        each = int(number[flow])
        if each not in plain or each in found:
            continue
        src, dst = int(flows["src"][flow]), int(flows["dst"][flow])
        if src == dst or frozenset((src, dst)) in peers:
            continue
        here, there = (src, int(flows["sport"][flow])), (dst, int(flows["dport"][flow]))
        # Larger is more of a server: shared by more connections, a rank, the lower port.
        served = [(sides[end], end[0] in ranks, -end[1]) for end in (here, there)]
        client, server = (src, dst) if served[0] < served[1] else (dst, src)
        if client in ranks:
            continue
        peer = int(flows["peer"][flow])
        found[each] = (flow if client == src else peer if peer < len(flows) else flow, client, server)
    numbers = sorted(found)
    columns = np.array([found[each] for each in numbers], np.int64).reshape(-1, 3)
    return Connections(np.array(numbers, np.int64), columns[:, 0], columns[:, 1], columns[:, 2])


def _plain(joined: Joined, exchanges: Rows, instances: Sequence[Instance]) -> frozenset[int]:
    """Connections that carry bursts alone, none of which is part of a collective."""
    wire, of = joined.columns["wire"], joined.columns["connection"]
    bursts = distinct(of[wire == Wire.TCP_BURST])
    if not len(bursts):
        return frozenset()
    other = distinct(of[(wire != Wire.TCP_BURST) & np.isin(of, bursts)])
    rows = [instance.rows for instance in instances]
    used = distinct(exchanges["connection"][np.concatenate(rows)]) if rows else other
    return frozenset(np.setdiff1d(np.setdiff1d(bursts, other), used).tolist())
