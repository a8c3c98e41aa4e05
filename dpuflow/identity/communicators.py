"""What NCCL's bootstrap told of the job, for all captures together: communicators, and who has which rank.

In: MEMBER rows of the captures and the common endpoints. Out: ``Communicator``s. What they say is observed,
not inferred: how many ranks there are although some have no capture, and which address has which rank. Where
several ranks share the address of their host's sockets, it does not tell which NIC is whose, and only their
number is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct
from dpuflow.schema.rows import Role, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.schema.tables import CaptureTables, Joined

Address = tuple[int, int]


class Communicator(NamedTuple):
    """``places``: the endpoint of each rank whose address is one of an endpoint; ``alone``: all ranks'
    addresses are known, each a rank's own, so that an endpoint is a rank."""

    ranks: int
    places: dict[int, int]
    alone: bool

    @property
    def seen(self) -> frozenset[int]:
        """Endpoints that are ranks of it."""
        return frozenset(self.places.values())


def communicators(captures: Sequence[CaptureTables], joined: Joined) -> list[Communicator]:
    """Those that captures told of and of which no two tell differently, the largest first."""
    rows = {(int(each["addr_hi"]), int(each["addr_lo"])): end for end, each in enumerate(joined.endpoints)}
    for end, others in enumerate(joined.addresses):
        for other in others:
            each = joined.endpoints[other]
            rows[int(each["addr_hi"]), int(each["addr_lo"])] = end
    told: dict[int, dict[int, set[Address]]] = {}
    sizes: dict[int, set[int]] = {}
    for tables in captures:
        for row in tables.members:
            magic, rank, address = (
                int(row["magic"]),
                int(row["rank"]),
                (int(row["addr_hi"]), int(row["addr_lo"])),
            )
            sizes.setdefault(magic, set()).add(int(row["ranks"]))
            told.setdefault(magic, {}).setdefault(rank, set()).update({address} if any(address) else set())
    found = []
    for magic, ranks in told.items():
        if len(sizes[magic]) > 1 or any(len(addresses) > 1 for addresses in ranks.values()):
            continue
        count = sizes[magic].pop()
        of = {rank: next(iter(addresses)) for rank, addresses in ranks.items() if addresses}
        alone = len(of) == len(set(of.values())) == count
        found.append(Communicator(count, {r: rows[a] for r, a in of.items() if a in rows}, alone))
    return sorted(found, key=lambda each: -each.ranks)


def told_ranks(joined: Joined, told: Sequence[Communicator]) -> Mapping[int, int]:
    """Endpoint -> NCCL's rank: of the largest communicator by its bootstrap, else by clear-to-send entries.

    Smaller ones number anew. An entry names the rank of the data's sender, in the communicator that others
    were split from; where an endpoint has several (shared NICs, PXN, several jobs) or two the same, none is
    named by them.
    """
    if told:
        first = told[0]
        if first.alone and all(each.seen <= first.seen for each in told):
            return {end: rank for rank, end in first.places.items()}
    named: dict[int, set[int]] = {}
    columns = joined.columns
    entries = np.flatnonzero((columns["role"] == Role.GRANT) & (columns["wire"] == Wire.ROCE_WRITE))
    rows = Picked(joined.transfers, entries)
    for pair in distinct(rows["dst"].astype(np.int64) << 32 | rows["tag"]).tolist():
        named.setdefault(pair >> 32, set()).add(pair & 0xFFFFFFFF)
    ranks = [rank for each in named.values() for rank in each]
    if len(named) < 2 or len(ranks) > len(named) or len(set(ranks)) < len(ranks):
        return {}
    return {end: next(iter(each)) for end, each in named.items()}


def unseen(told: Sequence[Communicator]) -> int | None:
    """How many ranks of all communicators have no endpoint; None where an endpoint may be several ranks."""
    if not told or not all(each.alone for each in told):
        return None
    # Smaller communicators are part of the largest, or tell of ranks that it does not have.
    return max(each.ranks - len(each.places) for each in told)
