"""The messages of all captures as columns, and which of them are one message seen twice.

In: CaptureTables with their common flows. Out: Sightings, one element a message and capture, and Ties.
A message is known by its flow and the low bits of the sequence number of its start (RoCE: 24-bit PSN, IBA
volume 1, 9.7.2; TCP: 32 bits, RFC 9293), which come round again: time and order tell the rounds apart.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, is_in, median_of
from dpuflow.schema.rows import NEVER, MessageFlag, Role, Transport, Wire
from dpuflow.wire.headers import PSN_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.join.common import Common
    from dpuflow.schema.tables import CaptureTables

    Ints = np.typing.NDArray[np.int64]
    Bools = np.typing.NDArray[np.bool_]

_ODD: Final = np.int64(0x9E3779B97F4A7C1 | 1)
CUT: Final = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER
UNFIT: Final = CUT | MessageFlag.GAP  # such messages do not show the same packets everywhere
FEW: Final = 10
"""Where one in so many messages of a flow is whole, only these are compared."""
REPEAT_BITS: Final = 8
SAMPLE: Final = 256  # messages by which rounds are told apart
MOST_SLACK: Final = 10**15
"""Eleven days: by more no two sightings of one packet are laid over each other; keeps sums within 64 bits."""


class Sightings(NamedTuple):
    """The messages of all captures in one row of columns; ``starts[c]`` is where capture c begins."""

    starts: Ints
    capture: np.typing.NDArray[np.uint16]
    flow: Ints  # common FLOW row
    key: Ints  # common flow, lane, and the low bits of the sequence number of the start
    seq: Ints  # extended as its capture saw it
    psn: Bools  # its sequence numbers are PSNs
    span: Ints  # sequence numbers covered
    first_ns: Ints
    last_ns: Ints
    acked_ns: Ints
    flags: np.typing.NDArray[np.uint8]
    steady: Bools  # sent once, and whole where enough messages of its flow are: its stamps can be compared
    whole: Bools  # no packet of it is missing

    def of(self, capture: int) -> slice:
        """The rows of one capture."""
        return slice(int(self.starts[capture]), int(self.starts[capture + 1]))

    def within(self, captures: Sequence[int]) -> Sightings:
        """The rows of some captures, in order; they keep their numbers, but for ``starts`` and ``of``."""
        if len(captures) == len(self.starts) - 1:
            return self
        rows = np.concatenate([np.arange(self.starts[c], self.starts[c + 1]) for c in captures])
        starts = np.cumsum([0, *(np.diff(self.starts)[captures])])
        return Sightings(starts, *(column[rows] for column in self[1:]))


def low_bits(common: Common) -> Ints:
    """For each common flow the mask of a sequence number's bits that are on the wire."""
    bits = np.where(common.flows["transport"] == Transport.TCP, 32, PSN_BITS).astype(np.int64)
    mask: Ints = (np.int64(1) << bits) - 1
    return mask


def collect(captures: Sequence[CaptureTables], common: Common) -> Sightings:
    """Messages of all captures as columns."""
    starts = np.concatenate([[0], np.cumsum([len(t.messages) for t in captures])]).astype(np.int64)

    def column(name: str) -> Ints:
        return np.concatenate([t.messages[name] for t in captures]).astype(np.int64, copy=False)

    flow = np.concatenate(
        [
            rows[t.messages["flow"]] if len(t.messages) else np.zeros(0, np.int64)
            for t, rows in zip(captures, common.flow_rows, strict=True)
        ]
    )
    low = low_bits(common)
    seq = column("seq")
    flags = np.concatenate([t.messages["flags"] for t in captures])
    wire = np.concatenate([t.messages["wire"] for t in captures])
    once = column("retransmitted") == 0
    whole = (flags & np.uint8(UNFIT)) == 0
    # Of long messages nearly all may lack packets: there those will do of which the first one was seen.
    count, fit = (np.bincount(flow[mine], minlength=len(common.flows)) for mine in (once, once & whole))
    begun = (flags & np.uint8(CUT | MessageFlag.HIDDEN)) == 0
    steady = once & (whole | (begun & (FEW * fit < count)[flow]))
    # READ responses are numbered by the opposite flow, so they are a space of their own.
    role = np.concatenate([t.messages["role"] for t in captures])
    answer = (wire == Wire.ROCE_READ) & (role == Role.DATA)
    key = (flow << 33) | (answer.astype(np.int64) << 32) | (seq & low[flow]) if len(flow) else flow
    return Sightings(
        starts,
        np.repeat(np.arange(len(captures), dtype=np.uint16), np.diff(starts)),
        flow,
        key,
        seq,
        low[flow] < 1 << PSN_BITS,
        column("seq_end") - seq,
        column("first_ns"),
        column("last_ns"),
        column("acked_ns"),
        flags,
        steady,
        whole,
    )


def not_after(time_ns: Ints, other_ns: Ints, slack_ns: int = 0) -> Ints:
    """``time_ns``, but none more than ``slack_ns`` after ``other_ns`` (NEVER: not known) of what came of it.

    Stamps are late, never early: where that was seen first the earlier one of two stamps is nearer the truth.
    """
    found: Ints = time_ns.copy()
    np.minimum(found, other_ns + slack_ns, out=found, where=other_ns != NEVER)
    return found


def find_copies(captures: Sequence[CaptureTables]) -> dict[int, int]:
    """Captures that hold the same packets with the same stamps as an earlier one, which they map to.

    Two places never stamp all packets alike, so these are one file given twice.
    """
    copies: dict[int, int] = {}
    seen: dict[tuple[object, ...], list[int]] = {}
    for number, tables in enumerate(captures):
        info = tables.info
        earlier = seen.setdefault((info.packets, info.bytes, info.first_ns, info.last_ns), [])
        for other in earlier if len(tables.messages) else ():
            if np.array_equal(tables.messages, captures[other].messages):
                copies[number] = other
                break
        else:
            earlier.append(number)
    return copies


class Ties(NamedTuple):
    """Pairs of sightings of one message: rows of Sightings, ``a`` in the lower-numbered capture."""

    a: Ints
    b: Ints
    pair: Ints  # captures, a's times their number plus b's


def find_ties(seen: Sightings, order: Ints) -> Ties:
    """``steady`` messages that two captures saw; ``order`` sorts the keys, stable.

    Needs no clock: in flows where a key came once in each capture it names the message; in flows whose
    sequence numbers went round within one capture the rounds are laid over each other (``_align``).
    """
    captures = len(seen.starts) - 1
    order = order[seen.steady[order]]
    key, capture = seen.key[order], seen.capture[order].astype(np.int64)
    a, b = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    # The sort is stable, so within a key the captures ascend; a capture twice: the number came again.
    twice = (key[1:] == key[:-1]) & (capture[1:] == capture[:-1])
    if twice.any():
        round_again = np.zeros(int(seen.flow.max()) + 1, bool)
        round_again[seen.flow[order[1:][twice]]] = True
        apart = round_again[seen.flow[order]]
        for rows_a, rows_b in _tie_rounds(seen, order[apart]):
            a.append(rows_a)
            b.append(rows_b)
        order, key = order[~apart], key[~apart]
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


def recurs_ns(common: Common, seen: Sightings) -> Ints:
    """For each common flow how soon a sequence number may come again, ns; MOST_SLACK at most.

    That is the least time between two of one capture, and what a round of all numbers takes at the pace at
    which they went up.
    """
    flows = len(common.flows)
    soonest = np.full(flows, MOST_SLACK)
    order = np.lexsort((seen.first_ns, seen.capture, seen.key))
    before, after = order[:-1], order[1:]
    again = (seen.key[before] == seen.key[after]) & (seen.capture[before] == seen.capture[after])
    before, after = before[again], after[again]
    np.minimum.at(soonest, seen.flow[after], seen.first_ns[after] - seen.first_ns[before])
    whole = low_bits(common) + 1
    for capture in range(len(seen.starts) - 1):
        part = seen.of(capture)
        own, flow = np.unique(seen.flow[part], return_inverse=True)
        low, high, first, last = (
            np.full(len(own), far) for far in (MOST_SLACK, 0, np.iinfo(np.int64).max, 0)
        )
        np.minimum.at(low, flow, seen.seq[part])
        np.maximum.at(high, flow, seen.seq[part] + seen.span[part])
        np.minimum.at(first, flow, seen.first_ns[part])
        np.maximum.at(last, flow, seen.last_ns[part])
        met = np.flatnonzero(high > low)
        round_ns = (last - first)[met] * (whole[own[met]] / (high - low)[met])
        # Clocks that do not go on from one piece to the next may set an end before its beginning.
        rounds = np.clip(round_ns, 0, MOST_SLACK).astype(np.int64)
        soonest[own[met]] = np.minimum(soonest[own[met]], rounds)
    return soonest


def _tie_rounds(seen: Sightings, rows: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Ties of flows whose sequence numbers went round, each pair of captures aligned by itself."""
    space = seen.key[rows] >> 32
    rows = rows[np.argsort(space, kind="stable")]
    for _, of_flow in runs(seen.key[rows] >> 32):
        flow_rows = rows[of_flow]
        flow_rows = flow_rows[
            np.lexsort((seen.first_ns[flow_rows], seen.seq[flow_rows], seen.capture[flow_rows]))
        ]
        parts = [flow_rows[part] for _, part in runs(seen.capture[flow_rows].astype(np.int64))]
        for number, part_a in enumerate(parts):
            for part_b in parts[number + 1 :]:
                yield _align(seen, part_a, part_b)


def _align(seen: Sightings, a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Which rounds of ``b`` are those of ``a`` (rows of one flow, by extended sequence number)?

    Each capture counts rounds from its own first packet. Laid over each other rightly, the clocks
    differ by a straight line and network delays; wrongly, by the unevenness of the sender's schedule too.
    """
    whole_round = np.int64(1) << ((PSN_BITS if seen.psn[a[0]] else 32) + REPEAT_BITS)
    (seq_a, times_a), (seq_b, times_b) = _numbered(seen.seq[a]), _numbered(seen.seq[b])
    sample = distinct(np.linspace(0, len(a) - 1, SAMPLE).astype(np.int64))
    found: list[tuple[int, float, int]] = []  # hits, scatter, rounds
    low, high = int((seq_b[0] - seq_a[-1]) // whole_round), int((seq_b[-1] - seq_a[0]) // whole_round) + 1
    for rounds in range(low, high + 1):
        at = np.minimum(np.searchsorted(seq_b, seq_a[sample] + rounds * whole_round), len(b) - 1)
        hit = seq_b[at] == seq_a[sample] + rounds * whole_round
        if np.count_nonzero(hit) >= 3:
            time = seen.first_ns[a[sample[hit]]]
            differ = (seen.first_ns[b[at[hit]]] - time).astype(np.float64)
            time = (time - time[0]).astype(np.float64)
            differ -= median_of(differ)
            line = np.polynomial.Polynomial.fit(time, differ, 1) if time[-1] > time[0] else None
            rest = differ - line(time) if line is not None else differ
            found.append((int(np.count_nonzero(hit)), float(median_of(np.abs(rest))), rounds))
    most = max((f[0] for f in found), default=0)
    best = min((f for f in found if 2 * f[0] >= most), key=lambda f: f[1], default=None)
    if best is None:
        return a[:0], b[:0]
    wanted = seq_a + best[2] * whole_round
    at = np.minimum(np.searchsorted(seq_b, wanted), len(b) - 1)
    hit = (seq_b[at] == wanted) & (times_a == times_b[at])
    return a[hit], b[at[hit]]


def _numbered(seq: Ints) -> tuple[Ints, Ints]:
    """Sorted numbers with those that repeat (a queue pair that starts over) told apart by their order.

    Returns the numbers shifted up by REPEAT_BITS, plus 0, 1, ... for the repeats, and how often each comes.
    """
    _, first, times = np.unique(seq, return_index=True, return_counts=True)
    turn = np.arange(len(seq)) - np.repeat(first, times)
    return (seq << REPEAT_BITS) + np.minimum(turn, (1 << REPEAT_BITS) - 1), np.repeat(times, times)


def runs(values: Ints) -> list[tuple[int, slice]]:
    """Each value of a sorted array with the slice it fills."""
    if not len(values):
        return []
    edges = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1, [len(values)]]).tolist()
    return [(int(values[a]), slice(a, b)) for a, b in pairwise(edges)]


def superseded_bursts(
    roles: np.typing.NDArray[np.uint8], common: Common, seen: Sightings, near: np.typing.NDArray[np.uint8]
) -> Bools:
    """Bursts of flows that a better placed capture cut otherwise.

    Where framing is not known the cuts follow the times at one place, so those of two places need not match.
    """
    burst: Bools = roles == Role.BURST
    if len(seen.starts) == 2:
        burst[:] = False
    if not burst.any():
        return burst
    captures = int(seen.capture.max()) + 1
    flow = seen.capture * np.int64(len(common.flows)) + seen.flow  # as its capture shows it
    value = seen.key * _ODD + seen.span  # wraps round: no more than a hash of both
    rank = near.astype(np.int64) * captures - seen.capture  # nearest the sender, then the first named
    framed = np.zeros(captures * len(common.flows), bool)
    framed[flow[~burst]] = True
    rank += np.where(framed[flow], 4 * captures, 0)  # who knows the framing first
    best = np.full(len(common.flows), np.iinfo(np.int64).min)
    np.maximum.at(best, seen.flow, rank)
    chosen = rank == best[seen.flow]
    burst &= ~chosen & ~is_in(value, value[chosen])
    return burst


def complete_keys(common: Common, seen: Sightings, kept: Bools) -> Ints:
    """Give a message whose beginning one capture lacks the key of one that ends with it and began earlier."""
    lacking = np.uint8(MessageFlag.STARTS_BEFORE | MessageFlag.GAP)
    cut = np.flatnonzero(kept & ((seen.flags & lacking) != 0))
    if not len(cut):
        return seen.key
    low = low_bits(common)

    def end(rows: Ints) -> Ints:
        flow = seen.flow[rows]
        return (seen.key[rows] & ~low[flow]) | ((seen.key[rows] + seen.span[rows]) & low[flow])

    touched = np.zeros(len(common.flows), bool)
    touched[seen.flow[cut]] = True
    ended = np.flatnonzero(kept & touched[seen.flow] & ((seen.flags & np.uint8(MessageFlag.ENDS_AFTER)) == 0))
    ends = end(ended)
    order = np.argsort(ends, kind="stable")
    ended, ends = ended[order], ends[order]
    key: Ints = seen.key.copy()
    for row, wanted in zip(cut.tolist(), end(cut).tolist(), strict=True):
        a, b = np.searchsorted(ends, [wanted, wanted + 1])
        others = ended[a:b]
        others = others[(seen.capture[others] != seen.capture[row]) & (seen.span[others] > seen.span[row])]
        whole = others[(seen.flags[others] & np.uint8(UNFIT)) == 0]
        if len(whole):  # of several rounds the nearest in time
            key[row] = seen.key[whole[np.argmin(np.abs(seen.last_ns[whole] - seen.last_ns[row]))]]
        elif len(others):
            key[row] = seen.key[others[np.argmax(seen.span[others])]]
    return key
