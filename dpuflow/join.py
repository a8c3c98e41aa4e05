"""All captures of a job as one: common endpoints, one clock, and one TRANSFER a message.

In: the CaptureTables of all vantage points. Out: Joined. A message seen at several places is known by
its flow and the sequence number of its start (RoCE: 24-bit PSN, TCP: 32-bit; IBA volume 1, 9.7.2; RFC 9293).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.clocks import ClockMap, Clocks, Samples, tie_clocks
from dpuflow.schema import NEVER, TRANSFER, MessageFlag, Role, Transport, Wire
from dpuflow.tables import Joined
from dpuflow.vantage import Common, find_common, join_addresses, number_connections, total_flows
from dpuflow.wire import PSN_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.tables import CaptureTables, Rows

    Ints = np.typing.NDArray[np.int64]

CUT: Final = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER
UNFIT: Final = CUT | MessageFlag.GAP  # such messages do not show the same packets everywhere


@dataclass
class Sightings:
    """The messages of all captures in one row of columns; ``starts[c]`` is where capture c begins."""

    starts: Ints
    capture: np.typing.NDArray[np.uint16]
    flow: Ints  # common FLOW row
    key: Ints  # common flow and the low bits of the sequence number of the start
    span: Ints  # sequence numbers covered
    first_ns: Ints
    last_ns: Ints
    acked_ns: Ints
    flags: np.typing.NDArray[np.uint8]
    steady: np.typing.NDArray[np.bool_]  # sent once and whole: its stamps can be compared

    def of(self, capture: int) -> slice:
        """The rows of one capture."""
        return slice(int(self.starts[capture]), int(self.starts[capture + 1]))


def join(captures: list[CaptureTables], *, clock: str = "auto") -> Joined:
    """Join the captures of several vantage points; ``clock`` is "auto", "trust" or "estimate".

    Raises OptionError for another ``clock``. Captures that nothing ties to the reference clock keep
    their flows, but their messages are not among the transfers.
    """
    common = find_common(captures)
    seen = _sightings(captures, common)
    order = np.argsort(seen.key, kind="stable") if len(captures) > 1 else np.zeros(0, np.int64)
    ties = _ties(seen, order)
    _decide_local(common, seen, ties)
    found = tie_clocks([t.info for t in captures], _samples(common, seen, ties), clock)
    _to_reference(seen, found)
    join_addresses(captures, common)
    transfers = _transfers(captures, common, seen, order, found)
    flow_times = []
    for tables, place in zip(captures, found.maps, strict=True):
        first, last = tables.flows["first_ns"], tables.flows["last_ns"]
        used = place or ClockMap(0)
        flow_times.append((place is not None, used.to_reference(first), used.to_reference(last)))
    total_flows(captures, common, flow_times)
    start_ns, end_ns = _extent(captures, found)
    return Joined(
        [t.info for t in captures],
        found.clocks,
        common.endpoints,
        common.addresses,
        common.local,
        common.flows,
        transfers,
        start_ns,
        end_ns,
        found.limits + _limits(captures, common),
    )


def _sightings(captures: Sequence[CaptureTables], common: Common) -> Sightings:
    starts = np.concatenate([[0], np.cumsum([len(t.messages) for t in captures])]).astype(np.int64)

    def column(name: str) -> Ints:
        return np.concatenate([t.messages[name] for t in captures]).astype(np.int64, copy=False)

    flow = np.concatenate(
        [
            rows[t.messages["flow"]] if len(t.messages) else np.zeros(0, np.int64)
            for t, rows in zip(captures, common.flow_rows, strict=True)
        ]
    )
    bits = np.where(common.flows["transport"] == Transport.TCP, 32, PSN_BITS)
    low = (np.int64(1) << bits.astype(np.int64)) - 1
    seq = column("seq")
    flags = np.concatenate([t.messages["flags"] for t in captures])
    wire = np.concatenate([t.messages["wire"] for t in captures])
    steady = (flags & np.uint8(UNFIT)) == 0
    steady &= column("retransmitted") == 0
    # READ responses are numbered by the opposite flow, so they are a space of their own.
    key = (
        (flow << 33) | ((wire == Wire.ROCE_READ).astype(np.int64) << 32) | (seq & low[flow])
        if len(flow)
        else flow
    )
    return Sightings(
        starts,
        np.repeat(np.arange(len(captures), dtype=np.uint16), np.diff(starts)),
        flow,
        key,
        column("seq_end") - seq,
        column("first_ns"),
        column("last_ns"),
        column("acked_ns"),
        flags,
        steady,
    )


@dataclass
class Ties:
    """Pairs of sightings of one message: rows of Sightings, ``a`` in the lower-numbered capture."""

    a: Ints
    b: Ints
    pair: Ints  # captures, a's times their number plus b's


def _ties(seen: Sightings, order: Ints) -> Ties:
    """Messages that two captures each saw once, whole and sent once."""
    captures = len(seen.starts) - 1
    order = order[seen.steady[order]]
    key, capture = seen.key[order], seen.capture[order].astype(np.int64)
    # The sort is stable, so within a key the captures ascend; a capture twice: the number was used again.
    again = np.zeros(len(order), bool)
    if len(order):
        twice = (key[1:] == key[:-1]) & (capture[1:] == capture[:-1])
        again[1:] |= twice
        again[:-1] |= twice
    order, key, capture = order[~again], key[~again], capture[~again]
    a, b = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for step in range(1, captures):
        same = np.flatnonzero(key[step:] == key[:-step])
        if not len(same):
            break
        a.append(order[same])
        b.append(order[same + step])
    rows_a, rows_b = np.concatenate(a), np.concatenate(b)
    fits = seen.span[rows_a] == seen.span[rows_b]
    rows_a, rows_b = rows_a[fits], rows_b[fits]
    pair = seen.capture[rows_a].astype(np.int64) * captures + seen.capture[rows_b]
    return Ties(rows_a, rows_b, pair)


def _nearer(seen: Sightings, ties: Ties, at: Ints) -> float:
    """How much longer the first capture of the ties ``at`` waits for ACKs than the second, ns (median).

    Positive: it is nearer to the sender. Each difference is taken on one clock, so offsets do not matter.
    """
    a, b = ties.a[at], ties.b[at]
    both = (seen.acked_ns[a] != NEVER) & (seen.acked_ns[b] != NEVER)
    a, b = a[both], b[both]
    if not len(a):
        return 0.0
    return float(np.median((seen.acked_ns[a] - seen.last_ns[a]) - (seen.acked_ns[b] - seen.last_ns[b])))


def _decide_local(common: Common, seen: Sightings, ties: Ties) -> None:
    """Two endpoints in all packets of a capture: it sits at the one nearer than other captures are."""
    captures = len(seen.starts) - 1
    src = common.flows["src"][seen.flow[ties.a]] if len(ties.a) else np.zeros(0, np.uint32)
    dst = common.flows["dst"][seen.flow[ties.a]] if len(ties.a) else np.zeros(0, np.uint32)
    place: dict[int, list[tuple[int, int]]] = {}  # capture -> (nearest end, farthest end), one a pair
    for pair in np.unique(ties.pair):
        x, y = divmod(int(pair), captures)
        for capture in (x, y):
            if capture not in common.undecided:
                continue
            i, j = common.undecided[capture][:2]
            ahead = 0.0
            for sender, receiver, sign in ((i, j, 1.0), (j, i, -1.0)):
                at = np.flatnonzero((ties.pair == pair) & (src == sender) & (dst == receiver))
                ahead += sign * _nearer(seen, ties, at)
            if ahead:
                near_i = (ahead > 0) == (capture == x)
                place.setdefault(capture, []).append((i, j) if near_i else (j, i))
    for capture, votes in place.items():
        if len({v[0] for v in votes}) == 1:  # between two others it is nearest to neither: a switch
            common.local[capture] = [votes[0][0]]
        common.undecided.pop(capture)


def _samples(common: Common, seen: Sightings, ties: Ties) -> list[Samples]:
    """For each pair of captures the packets both saw, with the way they went."""
    captures = len(seen.starts) - 1
    near = common.near().astype(np.int64)
    order = np.argsort(ties.pair, kind="stable")
    samples = []
    for pair, rows in _runs(ties.pair[order]):
        x, y = divmod(pair, captures)
        at = order[rows]
        flow = seen.flow[ties.a[at]]
        way = np.sign(near[x] - near[y])  # by flow: 1 from x to y, -1 back, 0 not known
        for unknown in np.unique(flow[way[flow] == 0]):
            way[unknown] = np.sign(_nearer(seen, ties, at[flow == unknown]))
        at, flow = at[way[flow] != 0], flow[way[flow] != 0]
        a, b, forward = ties.a[at], ties.b[at], way[flow] > 0
        acked = (seen.acked_ns[a] != NEVER) & (seen.acked_ns[b] != NEVER)
        x_ns = np.concatenate([seen.first_ns[a], seen.last_ns[a], seen.acked_ns[a[acked]]])
        y_ns = np.concatenate([seen.first_ns[b], seen.last_ns[b], seen.acked_ns[b[acked]]])
        if len(x_ns):
            samples.append(Samples(x, y, x_ns, y_ns, np.concatenate([forward, forward, ~forward[acked]])))
    return samples


def _runs(values: Ints) -> list[tuple[int, slice]]:
    """Each value of a sorted array with the slice it fills."""
    if not len(values):
        return []
    edges = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [len(values)]]).tolist()
    return [(int(values[a]), slice(a, b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _to_reference(seen: Sightings, found: Clocks) -> None:
    for capture, place in enumerate(found.maps):
        if place is not None and (place.offset_ns or place.drift):
            rows = seen.of(capture)
            for times in (seen.first_ns, seen.last_ns, seen.acked_ns):
                times[rows] = place.to_reference(times[rows])


def _transfers(
    captures: Sequence[CaptureTables], common: Common, seen: Sightings, order: Ints, found: Clocks
) -> Rows:
    from dpuflow.kernels import match

    near_flow = common.near().astype(np.uint8)
    tied = np.array([m is not None for m in found.maps])
    near = near_flow[seen.capture, seen.flow] if len(seen.flow) else np.zeros(0, np.uint8)
    kept = tied[seen.capture]
    kept &= ~_superseded_bursts(captures, common, seen, near, kept)
    owner = np.full(len(seen.flow), -1, np.int64)
    gives = np.zeros(len(seen.flow), np.uint8)
    if int(np.count_nonzero(tied)) == 1:  # nothing to match
        rows = np.flatnonzero(kept)
        owner[rows] = np.arange(len(rows))
        gives[rows] = match.SENDER | match.RECEIVER | match.HEADER
        sent, shared = seen.first_ns[rows], seen.flags[rows] & np.uint8(match.SHARED)
        made = len(rows)
    else:
        key = _complete_keys(common, seen, kept)
        if key is not seen.key:
            order = np.argsort(key, kind="stable")
        order = order[kept[order]]
        sent, shared = np.zeros(len(order), np.int64), np.zeros(len(order), np.uint8)
        slack = sum(c.error_ns or 0 for c in found.clocks)
        made = match.group(
            order, key, seen.capture, seen.first_ns, seen.acked_ns, seen.span, near, seen.flags,
            slack, owner, gives, sent, shared,
        )  # fmt: skip
    in_time = np.argsort(sent[:made], kind="stable")
    place = np.empty(made + 1, np.int64)
    place[in_time] = np.arange(made)
    place[made] = -1  # what owner -1 picks
    row = place[owner]
    transfers = TRANSFER.zeros(made)
    transfers["flags"] = shared[:made][in_time]
    connection = number_connections(common.flows)
    flow = np.zeros(made, np.int64)
    flow[row[row >= 0]] = seen.flow[row >= 0]
    transfers["connection"] = connection[flow]
    transfers["src"], transfers["dst"] = common.flows["src"][flow], common.flows["dst"][flow]
    for capture, tables in enumerate(captures):
        rows = seen.of(capture)
        match.fold(
            tables.messages, capture, seen.first_ns[rows], seen.last_ns[rows], seen.acked_ns[rows],
            row[rows], gives[rows], near[rows], transfers,
        )  # fmt: skip
    return transfers


def _superseded_bursts(
    captures: Sequence[CaptureTables],
    common: Common,
    seen: Sightings,
    near: np.typing.NDArray[np.uint8],
    kept: np.typing.NDArray[np.bool_],
) -> np.typing.NDArray[np.bool_]:
    """Bursts of flows that a better placed capture cut into messages or bursts of its own.

    Where framing is not known the cuts follow the times at one place, so bursts of two places do not match.
    """
    out = np.zeros(len(seen.flow), bool)
    if len(captures) == 1:
        return out
    burst = np.concatenate([t.messages["role"] for t in captures]) == Role.BURST
    burst &= kept
    if not burst.any():
        return out
    rank = near.astype(np.int64) * len(captures) - seen.capture  # nearest the sender, then the first named
    rank += np.where(burst, 0, 4 * len(captures))  # framed messages before any burst
    best = np.full(len(common.flows), np.iinfo(np.int64).min)
    np.maximum.at(best, seen.flow[kept], rank[kept])
    return burst & (rank < best[seen.flow])


def _complete_keys(common: Common, seen: Sightings, kept: np.typing.NDArray[np.bool_]) -> Ints:
    """Give a message that began before one capture the key of the whole one that ends where it ends."""
    cut = np.flatnonzero(kept & ((seen.flags & np.uint8(MessageFlag.STARTS_BEFORE)) != 0))
    if not len(cut):
        return seen.key
    bits = np.where(common.flows["transport"] == Transport.TCP, 32, PSN_BITS).astype(np.int64)
    low = (np.int64(1) << bits) - 1

    def end(rows: Ints) -> Ints:
        flow = seen.flow[rows]
        return (seen.key[rows] & ~low[flow]) | ((seen.key[rows] + seen.span[rows]) & low[flow])

    touched = np.zeros(len(common.flows), bool)
    touched[seen.flow[cut]] = True
    whole = np.flatnonzero(kept & touched[seen.flow] & ((seen.flags & np.uint8(CUT)) == 0))
    whole_end = end(whole)
    order = np.argsort(whole_end, kind="stable")
    key = seen.key
    for row, wanted in zip(cut.tolist(), end(cut).tolist(), strict=True):
        a, b = np.searchsorted(whole_end[order], [wanted, wanted + 1])
        others = whole[order[a:b]]
        others = others[seen.capture[others] != seen.capture[row]]
        if len(others):
            if key is seen.key:
                key = seen.key.copy()
            key[row] = seen.key[others[np.argmin(np.abs(seen.last_ns[others] - seen.last_ns[row]))]]
    return key


def _extent(captures: Sequence[CaptureTables], found: Clocks) -> tuple[int, int]:
    """First and last packet of the tied captures on the reference clock; 0, 0 without packets."""
    times = [
        place.to_reference(np.array([t.info.first_ns, t.info.last_ns], np.int64))
        for t, place in zip(captures, found.maps, strict=True)
        if place is not None and t.info.first_ns is not None
    ]
    return (min(int(t[0]) for t in times), max(int(t[1]) for t in times)) if times else (0, 0)


def _limits(captures: Sequence[CaptureTables], common: Common) -> list[str]:
    """Sentences on what these captures cannot show."""
    limits = []
    for capture, candidates in sorted(common.undecided.items()):
        names = " and ".join(address(common.endpoints[c]) for c in candidates[:2])
        limits.append(
            f"{captures[capture].info.vantage} may sit at {names}: each takes part in all its packets, "
            "so whose own times it holds is not known."
        )
    local = {row for rows in common.local for row in rows}
    if local:
        ends = np.unique(np.concatenate([common.flows["src"], common.flows["dst"]]).astype(np.int64))
        absent = [address(common.endpoints[row]) for row in ends if row not in local]
        if absent:
            shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
            limits.append(
                f"Not captured at their own nodes: {shown}. What they sent is seen on the way or on arrival only."
            )
    for tables in captures:
        hidden = int(np.count_nonzero(tables.messages["flags"] & np.uint8(MessageFlag.HIDDEN)))
        if hidden:
            limits.append(
                f"{tables.info.vantage}: the snap length hid {hidden} message headers, whose fields are inferred."
            )
    return limits


def address(endpoint: np.void) -> str:
    """The address of an ENDPOINT row as text."""
    import ipaddress

    value = (int(endpoint["addr_hi"]) << 64) | int(endpoint["addr_lo"])
    whole = ipaddress.IPv6Address(value)
    return str(whole.ipv4_mapped or whole)
