"""What NCCL's bootstrap sockets tell: which rank is where, and how many there are. Bytes in, MEMBER rows out.

A rank tells the root its number and the number of ranks; the root answers with the address of the next rank;
then each keeps a socket to the next one, around which all-gathers travel: every rank's addresses, later its
``ncclPeerInfo``, which begins with its rank. In step i a rank passes on what rank r - i told; in newer
versions to the one before it what rank r + i told, too, half as many of each. So one node's sockets name
all ranks.
Source: NVIDIA/nccl src/bootstrap.cc; lengths in ``wire.nccl``.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.wire import nccl as nw

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpuflow.messages.setups import Bytes

Address = tuple[int, int]

MOST_RANKS: Final = 1 << 20
MOST_MESSAGE: Final = 1 << 20
"""Longer messages and larger jobs are taken for something else."""
_IPV4: Final = 0xFFFF << 32


class Message(NamedTuple):
    """One message on such a socket: where its bytes begin, and how many they are."""

    at: int
    size: int


class Talk(NamedTuple):
    """A bootstrap socket: both directions; ``answered``: whether any packet of the other one was captured."""

    client: Bytes
    server: Bytes | None
    answered: bool

    @property
    def magic(self) -> int:
        """The communicator's number."""
        return self.client.number(0, 8) or 0


Member = tuple[int, int, int, int, int, int]
"""A MEMBER row: magic, address, host, rank, ranks."""


def read_bootstrap(talks: Mapping[int, Talk]) -> tuple[list[Member], set[int]]:
    """The ranks that ``talks`` (by any number) name, each once; the numbers of those that were understood."""
    told: set[int] = set()
    ranks: dict[tuple[int, int], dict[int, tuple[Address, int]]] = {}  # (magic, how many) -> rank -> ...
    for number, talk in talks.items():
        forth = messages_of(talk.client, nw.HANDSHAKE)
        back = messages_of(talk.server, 0) if talk.server is not None else []
        found = _hello(talk, forth) if len(forth) == 1 and not back else _ring(talk, forth, back)
        if found is None:
            if _answer(talk, forth, back):
                told.add(number)
            continue
        told.add(number)
        count, named = found
        known = ranks.setdefault((talk.magic, count), {})
        for rank, (address, host) in named.items():
            before = known.get(rank, ((0, 0), 0))
            known[rank] = (before[0] if any(before[0]) else address, before[1] or host)
    sizes: dict[int, int] = {}
    for magic, _ in ranks:
        sizes[magic] = sizes.get(magic, 0) + 1
    # One number for several communicators (NCCL_COMM_ID), or bytes that are something else: not used.
    members = [
        (magic, *address, host, rank, count)
        for (magic, count), known in sorted(ranks.items())
        if sizes[magic] == 1
        for rank, (address, host) in sorted(known.items())
    ]
    return members, told


def messages_of(stream: Bytes, at: int) -> list[Message]:
    """A length, so many bytes, and again; up to where a length was not captured or is none."""
    found = []
    while at + 4 <= stream.length:
        size = stream.number(at)
        if size is None or not 0 < size <= MOST_MESSAGE or at + 4 + size > stream.length:
            break
        found.append(Message(at + 4, size))
        at += 4 + size
    return found


def address_at(stream: Bytes, at: int) -> Address | None:
    """A socket address as NCCL writes it; None where it is none or was cut off."""
    family = stream.number(at, 2)
    if not stream.number(at + 2, 2):
        return None  # no socket has port 0; ncclPeerInfo may begin with the same number as a family
    if family == nw.FAMILY_IPV4:
        raw = stream.seen(at + 4, 4)
        return None if raw is None else (0, _IPV4 | int.from_bytes(raw, "big"))
    if family == nw.FAMILY_IPV6:
        raw = stream.seen(at + 8, 16)
        if raw is None:
            return None
        address = int(ipaddress.IPv6Address(raw))
        return address >> 64, address & (1 << 64) - 1
    return None


def _hello(talk: Talk, forth: list[Message]) -> tuple[int, dict[int, tuple[Address, int]]] | None:
    """What a rank told the root."""
    message = forth[0]
    layout = next((each for each in nw.HELLOS if each.size == message.size), None)
    if layout is None:
        return None
    rank, count = talk.client.number(message.at), talk.client.number(message.at + 4)
    if rank is None or count is None or not rank < count <= MOST_RANKS:
        return None
    address = address_at(talk.client, message.at + layout.root_address_at)
    if address is None:
        return None
    return count, {rank: (address, 0)}


def _answer(talk: Talk, forth: list[Message], back: list[Message]) -> bool:
    """Whether it is the root's answer: the next rank's address."""
    return (
        len(forth) == 1
        and not back
        and forth[0].size in {each.answer for each in nw.HELLOS}
        and address_at(talk.client, forth[0].at) is not None
    )


def _ring(
    talk: Talk, forth: list[Message], back: list[Message]
) -> tuple[int, dict[int, tuple[Address, int]]] | None:
    """All-gathers around the ring: what each rank told, and from how many."""
    if not talk.answered:
        return None  # whether anything went the other way was not captured
    ways = [(talk.client, *_gathers(talk.client, forth))]
    if talk.server is not None:
        ways.append((talk.server, *_gathers(talk.server, back)))
    (_, _, infos), *others = ways
    behind = others[0][2] if others else []
    # One all-gather: as many messages as there are ranks but one.
    count = len(infos) + len(behind) + 1
    start = talk.client.number(infos[0].at + nw.PEER_RANK_AT) if infos else None
    if start is None or not start < count <= MOST_RANKS or len(behind) not in (0, (count - 1) // 2):
        return None
    named: dict[int, tuple[Address, int]] = {}
    for (stream, addresses, told), first, step in zip(ways, (start, start + 1), (-1, 1), strict=False):
        for place, info in enumerate(told):
            rank = (first + step * place) % count
            if stream.number(info.at + nw.PEER_RANK_AT) not in (None, rank):
                return None
            # The first all-gather of all carries addresses, in the same order.
            address = addresses[place] if place < len(addresses) else (0, 0)
            named[rank] = (address, stream.number(info.at + nw.PEER_HOST_AT, 8) or 0)
    return count, named


def _gathers(stream: Bytes, messages: list[Message]) -> tuple[list[Address], list[Message]]:
    """The addresses that the first messages begin with; the messages of the all-gather of ncclPeerInfo."""
    addresses = []
    for message in messages:
        address = address_at(stream, message.at)
        if address is None:
            break
        addresses.append(address)
    rest = [message for message in messages[len(addresses) :] if message.size >= nw.PEER_LEAST]
    return addresses, [message for message in rest if message.size == rest[0].size]
