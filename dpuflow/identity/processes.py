"""Who is at the two ends of a connection, where several processes of a job share an address.

In: FLOW rows and messages on one time line. Out: for each end of each connection the rank that a library's
hello names there (Open MPI's TCP BTL: both ends; Gloo's pairs: the end that connected, by its rank in the
process group) and its port. A process listens at one port, so ends of one address and listening port are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.join.common import number_connections
from dpuflow.schema.rows import Role, Transport, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Joined, Rows

UNNAMED = -1


class Ends(NamedTuple):
    """By connection and end: 0 is the endpoint of the lower number, 1 the other."""

    rank: NDArray[np.int64]  # that a hello names; UNNAMED without
    port: NDArray[np.int64]

    def of(self, exchanges: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ranks at the sender and at the receiver of each exchange; UNNAMED where not known."""
        side = (exchanges["src"] > exchanges["dst"]).astype(np.int64)
        line = exchanges["connection"]
        return self.rank[line, side], self.rank[line, 1 - side]


def connection_ends(joined: Joined) -> Ends:
    """The ends of all connections."""
    line = number_connections(joined.flows).astype(np.int64)
    size = int(line.max(initial=-1)) + 1
    rank, port = np.full((2, size, 2), UNNAMED, np.int64)
    tcp = np.flatnonzero(joined.flows["transport"] == Transport.TCP)
    side = (joined.flows["src"][tcp] > joined.flows["dst"][tcp]).astype(np.int64)
    port[line[tcp], side] = joined.flows["sport"][tcp]
    port[line[tcp], 1 - side] = joined.flows["dport"][tcp]
    hello = np.flatnonzero(np.isin(joined.columns["wire"], (Wire.OB1_HELLO, Wire.GLOO_HELLO)))
    told = joined.transfers[hello]
    told = told[told["role"] == Role.CONTROL]
    rank[told["connection"], (told["src"] > told["dst"]).astype(np.int64)] = told["sub"]
    return Ends(rank, port)
