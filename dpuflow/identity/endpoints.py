"""Who an endpoint is: its address in text, its rank where a library or a rank map names it."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.identity.communicators import told_ranks, unseen
from dpuflow.schema.rows import NEVER, Role, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.identity.communicators import Communicator
    from dpuflow.identity.rankmap import Place
    from dpuflow.schema.tables import Joined, Rows

_IPV4 = 0xFFFF << 32


def address_text(endpoint: np.void) -> str:
    """An ENDPOINT's address as people write it; IPv4-mapped ones as IPv4."""
    return _text(int(endpoint["addr_hi"]), int(endpoint["addr_lo"]))


@lru_cache(maxsize=1 << 16)
def _text(high: int, low: int) -> str:
    if high == 0 and low >> 32 == 0xFFFF:
        return str(ipaddress.IPv4Address(low & 0xFFFFFFFF))
    return str(ipaddress.IPv6Address(high << 64 | low))


def mac_text(mac: int) -> str | None:
    """An Ethernet address as people write it, None for 0."""
    return ":".join(f"{mac >> shift & 0xFF:02x}" for shift in range(40, -8, -8)) if mac else None


def endpoint_ranks(
    joined: Joined, places: Mapping[str, Place] | None, told: Sequence[Communicator] = ()
) -> dict[int, int]:
    """Endpoint -> rank, from the rank map, else from the hello that Open MPI's processes exchange, or NCCL's.

    Gloo's hello names a rank within one process group only, so it is not used. An endpoint whose
    processes claim several ranks has none.
    """
    found: dict[int, int] = {}
    hello = joined.transfers[np.flatnonzero(joined.columns["wire"] == Wire.OB1_HELLO)]
    hello = hello[hello["role"] == Role.CONTROL]
    for endpoint in distinct(hello["src"]).tolist():
        claimed = distinct(hello["sub"][hello["src"] == endpoint]).tolist()
        if len(claimed) == 1:
            found[endpoint] = claimed[0]
    if len(set(found.values())) < len(found):
        found = {}  # several jobs, or ranks that mean something else
    if not found:
        found = dict(told_ranks(joined, told))
    if places:
        for endpoint, rows in enumerate(_addresses(joined)):
            for address in rows:
                place = places.get(address)
                if place is not None and place.rank is not None:
                    found[endpoint] = place.rank
    return found


def _addresses(joined: Joined) -> list[list[str]]:
    return [addresses_of(joined, endpoint) for endpoint in range(len(joined.endpoints))]


def addresses_of(joined: Joined, endpoint: int) -> list[str]:
    """All addresses of an endpoint, its own first."""
    rows = [endpoint, *(joined.addresses[endpoint] if endpoint < len(joined.addresses) else [])]
    return [address_text(joined.endpoints[row]) for row in dict.fromkeys(rows)]


def rank_order(joined: Joined, ranks: Mapping[int, int]) -> NDArray[np.int64]:
    """For each endpoint its place in the default numbering: by rank; those without one take the ranks that
    are left, by address."""
    endpoints: Rows = joined.endpoints
    by_address = np.lexsort((endpoints["addr_lo"], endpoints["addr_hi"])).tolist()
    taken = set(ranks.values())
    left = (rank for rank in count() if rank not in taken)
    told = {end: ranks[end] if end in ranks else next(left) for end in by_address}
    order = np.array(sorted(by_address, key=told.__getitem__), np.int64)
    place = np.empty(len(endpoints), np.int64)
    place[order] = np.arange(len(endpoints))
    return place


def endpoint_nodes(joined: Joined, places: Mapping[str, Place] | None) -> NDArray[np.int64]:
    """For each endpoint a number of its node: that of the first endpoint of the same host.

    By the rank map's hosts; else endpoints that are local to one capture are of one node, and to captures
    that are named as NICs of one host (``hosts_by_name``).
    """
    node = np.arange(len(joined.endpoints))
    for local in joined.local:
        node[local] = min(local, default=0)
    named = hosts_by_name([capture.vantage for capture in joined.captures])
    for captures in named.values():
        ends = [end for capture in captures for end in joined.local[capture]]
        if not _talk(joined, ends):
            node[np.isin(node, node[ends])] = min(node[ends], default=0)
    hosts: dict[str, int] = {}
    for endpoint, rows in enumerate(_addresses(joined) if places else []):
        host = next((p.host for a in rows if (p := (places or {}).get(a)) is not None and p.host), None)
        if host is not None:
            node[endpoint] = hosts.setdefault(host, endpoint)
    return node


def captured_at(joined: Joined) -> dict[int, str]:
    """What endpoints are called by the captures made at their own nodes, where each is of one of several.

    Standard input, and what a file that stands alone is called, name no node, unless the user named it so;
    nor does a copy of a capture.
    """
    names: dict[int, set[str]] = {}
    known: set[tuple[int, int, int | None]] = set()
    for capture, ends in zip(joined.captures, joined.local, strict=True):
        what = capture.packets, capture.bytes, capture.first_ns
        if what in known:
            continue
        known.add(what)
        for end in ends:
            names.setdefault(end, set()).add(capture.vantage)
    alone = len(joined.captures) == 1 and not joined.captures[0].named
    alone &= joined.captures[0].files != ["live"] if joined.captures else True
    return {
        end: own
        for end, (own, *others) in ((end, sorted(each)) for end, each in names.items())
        if not others and not alone and own not in ("stdin", address_text(joined.endpoints[end]))
    }


NIC: Final = re.compile(
    r"(?P<host>.*?[^-_.:/@])[-_.:/@]+(?:rail|nic|mlx[0-9]*|hca|bf|roce|rdma|ib|eth|ens?|enp|hsn|port)[-_.:/@]?[0-9].*",
    re.IGNORECASE,
)
"""A vantage point's name that ends in the name of an interface, or of a rail: ``node3_rail0``,
``gpu-17.mlx5_2``, ``a01/eth2``."""


def hosts_by_name(vantages: Sequence[str]) -> dict[str, list[int]]:
    """Captures by the host that their names have in common, where several are named as NICs of it."""
    hosts: dict[str, list[int]] = {}
    for capture, name in enumerate(vantages):
        found = NIC.fullmatch(name)
        if found is not None:
            hosts.setdefault(found["host"], []).append(capture)
    return {host: captures for host, captures in hosts.items() if len(captures) > 1}


def _talk(joined: Joined, ends: Sequence[int]) -> bool:
    """Whether some of the endpoints send each other data: within a node that does not go through NICs."""
    flows = joined.flows
    between = np.isin(flows["src"], ends) & np.isin(flows["dst"], ends) & (flows["src"] != flows["dst"])
    return bool((between & (flows["messages"] > 0)).any())


def seen_until(joined: Joined) -> NDArray[np.int64]:
    """For each endpoint when the last message of a capture at its own node was, ns; NEVER without one."""
    transfers = joined.transfers
    last = np.full(len(joined.local), NEVER)
    for at, end in (("capture", "sent_end_ns"), ("arrival_capture", "arrived_end_ns")):
        np.maximum.at(last, transfers[at], transfers[end])
    until = np.full(len(joined.endpoints), NEVER)
    for capture, local in enumerate(joined.local):
        until[local] = np.maximum(until[local], last[capture])
    return until


def seen_whole(joined: Joined, told: Sequence[Communicator] = ()) -> frozenset[int] | None:
    """Endpoints all of whose messages were captured; None: everyone's.

    Two endpoints without a capture of their own exchange messages that nobody sees; a single one does not,
    unless it has further peers, which no capture shows (``all_but_one``). A capture at no endpoint (a switch,
    a mirror port) is taken to see all. Ranks that the bootstrap ``told`` of and of which nothing was heard
    count as well.
    """
    own, others = _captured(joined, told)
    more = 0 if joined.at_a_switch else unseen(told) or 0
    return own if len(others) + more > 1 else None


def all_but_one(joined: Joined, told: Sequence[Communicator] = ()) -> frozenset[int] | None:
    """Endpoints with a capture of their own where all but one that was heard of have one; else None.

    Where the bootstrap ``told`` of all ranks there are no further ones that this one could hide.
    """
    own, others = _captured(joined, told)
    return own if len(others) == 1 and unseen(told) is None else None


def uncaptured(joined: Joined) -> frozenset[int]:
    """Endpoints with messages that have no capture of their own, while others have; none where a capture
    was made at no endpoint."""
    return _captured(joined, ())[1]


def _captured(joined: Joined, told: Sequence[Communicator]) -> tuple[frozenset[int], frozenset[int]]:
    """Endpoints with messages, or that are a rank, with a capture of their own, and those that have none;
    none of these where a capture was made at no endpoint."""
    present = np.zeros(len(joined.endpoints), bool)
    # What sets a job up may have interfaces of its own; who is known by plain streams alone, beside a
    # library's messages, is a client of what the job serves.
    wire = joined.columns["wire"]
    job = wire != Wire.NCCL_SETUP
    spoken = job & (wire != Wire.TCP_BURST)
    job = spoken if spoken.any() else job
    for column in ("src", "dst"):
        present[joined.columns[column][job]] = True
    for communicator in told if unseen(told) is not None else ():
        present[list(communicator.seen)] = True
    ends = frozenset(np.flatnonzero(present).tolist())
    own = ends & {endpoint for rows in joined.local for endpoint in rows}
    return own, (frozenset() if joined.at_a_switch else ends - own)
