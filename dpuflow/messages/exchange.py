"""What the two sides of a net_ib connection told each other: bytes in, queue pairs, GIDs and keys out.

In: the first bytes of both directions of its socket, as far as captured. Out: a ``Found``, None where they
are no whole exchange of a version that is known (``wire.nccl.EXCHANGES``). The lengths of both directions
tell the version, so it is known even where the snap length hides the contents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.wire import nccl as nw

if TYPE_CHECKING:
    from dpuflow.messages.setups import Bytes

Gid = tuple[int, int]
"""Upper and lower half, as ENDPOINT has addresses."""

_MOST_PAIR: Final = 1 << 24  # queue pair numbers have 24 bits
_MTUS: Final = range(1, 6)  # ibv_mtu: 256 to 4096 bytes


class Pair(NamedTuple):
    """A queue pair of the connection; GIDs are None, the key is 0 where they were cut off."""

    src_qp: int
    dst_qp: int
    src_gid: Gid | None
    dst_gid: Gid | None
    rkey: int


class Found(NamedTuple):
    """A connection. ``since``: first version that writes it so, 230 for 2.30."""

    since: int
    pairs: list[Pair]
    mtu: int
    entries_va: int


class _Side(NamedTuple):
    """One side's metadata."""

    stream: Bytes
    at: int  # where it begins
    layout: nw.Exchange

    def number(self, at: int, count: int = 4) -> int | None:
        return self.stream.number(self.at + at, count)

    def pair(self, place: int) -> tuple[int, int | None] | None:
        """Number and device of a queue pair; None where there is none, or it was cut off."""
        at = self.layout.pair_at + place * self.layout.pair_bytes
        number = self.number(at)
        if number is None or not 0 < number < _MOST_PAIR:
            return None
        if not self.layout.device_bytes:
            return number, 0
        device = self.number(at + nw.DEVICE_AT)
        # Up to 2.23 entries that are not used are whatever was there; their devices are mostly none.
        if device is not None and (device >= self.layout.slots or device > place):
            return None
        return number, device

    def gid(self, device: int | None) -> Gid | None:
        if device is None:
            return None
        raw = self.stream.seen(self.at + self.layout.gid_at + device * self.layout.device_bytes, 16)
        if raw is None or not any(raw):
            return None
        return int.from_bytes(raw[:8], "big"), int.from_bytes(raw[8:], "big")

    def rkey(self, device: int | None) -> int:
        at = self.layout.rkey_at + (device or 0) * self.layout.device_bytes
        return (self.number(at) or 0) if device is not None else 0

    def mtu(self) -> int:
        told = self.number(self.layout.mtu_at) or 0
        return 128 << told if told in _MTUS else 0


def read_exchange(client: Bytes, server: Bytes) -> Found | None:
    """The connection that a socket set up, once it is whole; ``client`` is the data's sender."""
    for layout in nw.EXCHANGES:
        # The last word, "ready", may be missing.
        sent = client.length in (layout.client_bytes, layout.client_bytes - 4)
        if not sent or server.length != layout.server_bytes:
            continue
        source = _Side(client, nw.HANDSHAKE + layout.props, layout)
        sink = _Side(server, layout.props, layout)
        pairs = _pairs(source, sink)
        if not pairs:
            return None
        mtus = [mtu for mtu in (source.mtu(), sink.mtu()) if mtu]
        return Found(
            version_number(layout.since), pairs, min(mtus, default=0),
            source.number(layout.address_at, 8) or 0,
        )  # fmt: skip
    return None


def version_number(since: str) -> int:
    """A version as one number: 2.30 and 2.30.7 are 230."""
    major, minor = since.split(".")[:2]
    return 100 * int(major) + int(minor)


def _pairs(source: _Side, sink: _Side) -> list[Pair]:
    """The queue pairs that both sides tell of, in their order, from the first on."""
    found: list[Pair] = []
    taken: tuple[set[tuple[int, int | None]], set[tuple[int, int | None]]] = (set(), set())
    for place in range(nw.PAIRS):
        one, other = source.pair(place), sink.pair(place)
        if one is None or other is None or one in taken[0] or other in taken[1]:
            break
        taken[0].add(one)
        taken[1].add(other)
        found.append(Pair(one[0], other[0], source.gid(one[1]), sink.gid(other[1]), source.rkey(one[1])))
    return found
