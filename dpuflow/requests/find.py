"""Bursts on clients' connections in, requests out.

A request is what a client sends until the first answer, and all that comes back until it asks again: so
HTTP/1.1 with keep-alive speaks, with TLS or without. Each burst of an answer counts as a token: what the
front end wrote at once. Streams that share a connection (HTTP/2) cannot be told apart; such connections are
counted alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.requests.connections import client_connections
from dpuflow.schema.rows import NEVER, MessageFlag, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching import Instance
    from dpuflow.requests.connections import Connections
    from dpuflow.schema.tables import Joined, Rows

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

CONTROL: Final = 64
"""Bytes: what a client sends in mid-answer and is shorter asks for nothing. HTTP/2's acknowledgments, PING
and WINDOW_UPDATE, have 17 bytes at most (RFC 9113 sections 6.7 and 6.9), 46 with TLS 1.3 around them."""
FEWEST: Final = 8
"""Whole requests that it takes to say what is usual."""
HALF: Final = 0.5
"""Prompts behind which an answer just goes on: if most are so, streams share the connection."""


@dataclass
class Requests:
    """Columns, one row a request, in order of ``sent_ns``; times ns, NEVER where it was not seen."""

    connections: Connections
    connection: Ints  # row of ``connections``
    prompt_bytes: Ints
    answer_bytes: Ints
    sent_ns: Ints  # first packet of the prompt
    asked_ns: Ints  # the prompt was there
    first_ns: Ints  # first answer left
    last_ns: Ints  # last answer was there
    tokens: Ints
    gap_ns: Floats  # between tokens, median; nan with fewer than two
    gap_p99_ns: Floats
    held_ns: Ints  # by lost packets
    again_up: Ints  # bursts of the prompt of which packets were sent again
    again_down: Ints
    whole: NDArray[np.bool_]  # it began and ended within the capture
    token_ns: Ints = field(repr=False)  # when each token left, request by request
    token_bytes: Ints = field(repr=False)
    late_ns: Ints = field(repr=False)  # by how much each was acknowledged after it left, NEVER if unknown
    offsets: Ints = field(repr=False)  # tokens of request i: offsets[i] to offsets[i + 1]
    held: Ints = field(repr=False)  # (4, bursts) held up by losses: connection, 1 of a prompt, from, to (ns)
    shared: int = 0  # connections that several streams share
    seen: bool = False  # some front end has a capture of its own

    def __len__(self) -> int:
        return len(self.sent_ns)

    @property
    def client(self) -> Ints:
        """Of each request the endpoint that asks."""
        return self.connections.client[self.connection]

    @property
    def server(self) -> Ints:
        """Of each request the endpoint that answers."""
        return self.connections.server[self.connection]

    @property
    def wait_ns(self) -> Ints:
        """From the prompt to the first answer; only of ``whole`` ones."""
        return self.first_ns - self.asked_ns

    @property
    def open_ns(self) -> int:
        """Request-nanoseconds that whole requests were open."""
        return int((self.last_ns - self.sent_ns)[self.whole].sum())

    @property
    def why_not(self) -> str | None:
        """Why conditions of requests cannot be judged; None where they can."""
        if not len(self.connections.number):
            return "no client's connection was captured"
        if self.shared and not len(self):
            return "several streams share each client's connection (HTTP/2), and cannot be told apart"
        if int(self.whole.sum()) < FEWEST:
            return f"only {int(self.whole.sum())} requests were captured from beginning to end"
        return None

    @property
    def no_front_end(self) -> str | None:
        """Why what a front end does cannot be judged."""
        return None if self.seen else "no front end has a capture of its own"


def find_requests(joined: Joined, exchanges: Rows, instances: Sequence[Instance]) -> Requests:
    """All of them, in order of time."""
    connections = client_connections(joined, exchanges, instances)
    columns = joined.columns
    rows = np.flatnonzero(
        (columns["wire"] == Wire.TCP_BURST) & np.isin(columns["connection"], connections.number)
    )
    bursts = joined.transfers[rows]
    of = np.searchsorted(connections.number, bursts["connection"].astype(np.int64))
    order = np.lexsort((bursts["sent_ns"], of))
    bursts, of = bursts[order], of[order]
    up = bursts["src"] == connections.client[of] if len(of) else np.zeros(0, bool)
    starts = _starts(up, of, bursts["bytes"])
    alone = ~_shared(up, of, starts, bursts["sent_ns"], len(connections.number))
    kept = alone[of] if len(of) else np.zeros(0, bool)
    captured = {end for ends in joined.local for end in ends}
    seen = bool(captured & set(connections.server.tolist()))
    columns_of = _cut(bursts[kept], of[kept], up[kept], starts[kept], joined.end_ns)
    return Requests(connections, **columns_of, shared=int((~alone).sum()), seen=seen)


def _starts(up: NDArray[np.bool_], of: Ints, size: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Bursts that begin a request: a client's behind an answer, or the first of its connection."""
    fresh = np.r_[True, of[1:] != of[:-1]] if len(of) else np.zeros(0, bool)
    behind = np.r_[False, ~up[:-1]] if len(of) else fresh
    asks = up & (behind | fresh) & (size >= np.where(fresh, 0, CONTROL))
    return np.asarray(asks | fresh)


def _shared(
    up: NDArray[np.bool_], of: Ints, starts: NDArray[np.bool_], sent_ns: Ints, count: int
) -> NDArray[np.bool_]:
    """Of each connection whether answers just go on behind most of its prompts."""
    found = np.zeros(count, bool)
    bounds = np.searchsorted(of, np.arange(count + 1))
    for number in range(count):
        part = slice(bounds[number], bounds[number + 1])
        down = np.flatnonzero(~up[part])
        times = sent_ns[part]
        asked = np.flatnonzero(starts[part] & up[part])
        asked = asked[(asked > down.min(initial=len(times))) & (asked < down.max(initial=-1))]
        if len(down) < 2 or not len(asked):
            continue
        after = np.searchsorted(down, asked)
        across = times[down[after]] - times[down[after - 1]]
        usual = median_of(np.diff(times[down]))
        found[number] = np.mean(across <= usual) > HALF
    return found


def _cut(
    bursts: Rows, of: Ints, up: NDArray[np.bool_], starts: NDArray[np.bool_], end_ns: int
) -> dict[str, Any]:
    """The columns of ``Requests``, from ``connection`` on."""
    begin = np.flatnonzero(starts)
    number = np.cumsum(starts) - 1
    count = len(begin)
    down = ~up

    def add(values: NDArray[np.generic], chosen: NDArray[np.bool_]) -> Ints:
        return np.bincount(number[chosen], values[chosen].astype(np.float64), count).astype(np.int64)

    def edge(values: Ints, chosen: NDArray[np.bool_], last: bool) -> Ints:
        found = np.full(count, NEVER)
        order = np.flatnonzero(chosen) if last else np.flatnonzero(chosen)[::-1]
        found[number[order]] = values[order]
        return found

    ones = np.ones(len(bursts), np.int64)
    first_down = edge(np.arange(len(bursts)), down, last=False)
    asking = up & (
        np.arange(len(bursts)) < np.where(first_down[number] >= 0, first_down[number], len(bursts))
    )
    tokens = add(ones, down)
    sent = bursts["sent_ns"].astype(np.int64)
    offsets = np.r_[0, np.cumsum(tokens)]
    token_ns, token_bytes = sent[down], bursts["bytes"][down].astype(np.int64)
    gap, p99 = _gaps(token_ns, offsets)
    first, last = (
        edge(sent, down, last=False),
        edge(bursts["arrived_end_ns"].astype(np.int64), down, last=True),
    )
    late = np.where(bursts["acked_ns"] != NEVER, bursts["acked_ns"] - bursts["sent_end_ns"], NEVER)[down]
    cut = (bursts["flags"] & (MessageFlag.STARTS_BEFORE | MessageFlag.GAP)) != 0
    whole = up[begin] & (tokens > 0) & ~(add(ones, cut) > 0)
    # The last one of a connection may go on: it is over if it is silent for longer than its gaps were.
    final = np.r_[of[begin][1:] != of[begin][:-1], True] if count else whole
    slow = np.where(np.isnan(p99), 0.0, 2 * np.nan_to_num(p99))
    whole &= ~final | (end_ns - last > slow)
    lost = _held(bursts, asking, down)
    late_ns = lost[1] - lost[0]
    made: dict[str, NDArray[Any]] = {
        "connection": of[begin],
        "prompt_bytes": add(bursts["bytes"], asking),
        "answer_bytes": add(bursts["bytes"], down),
        "sent_ns": edge(sent, asking, last=False),
        "asked_ns": edge(bursts["arrived_end_ns"].astype(np.int64), asking, last=True),
        "first_ns": first,
        "last_ns": last,
        "tokens": tokens,
        "gap_ns": gap,
        "gap_p99_ns": p99,
        "held_ns": add(late_ns, late_ns > 0),
        "again_up": add(_sent_again(bursts), asking),
        "again_down": add(_sent_again(bursts), down),
        "whole": whole,
    }
    held = np.stack([of, up, *lost])[:, late_ns > 0]
    of_tokens = {"token_ns": token_ns, "token_bytes": token_bytes, "late_ns": late}
    return {**_in_time(made, of_tokens, offsets), "held": held}


def _in_time(
    made: dict[str, NDArray[Any]], of_tokens: dict[str, Ints], offsets: Ints
) -> dict[str, NDArray[Any]]:
    """Columns of requests and those of tokens (``offsets``: each request's first), in order of asking."""
    order = np.argsort(np.where(made["sent_ns"] == NEVER, made["first_ns"], made["sent_ns"]), kind="stable")
    several = [np.arange(offsets[n], offsets[n + 1]) for n in order.tolist()]
    places = np.concatenate(several) if several else np.zeros(0, np.int64)
    moved = {name: column[order] for name, column in made.items()}
    moved |= {name: column[places] for name, column in of_tokens.items()}
    return moved | {"offsets": np.r_[0, np.cumsum(moved["tokens"])]}


def _gaps(token_ns: Ints, offsets: Ints) -> tuple[Floats, Floats]:
    """Median and 99th percentile of the gaps between each request's tokens."""
    median, p99 = np.full((2, len(offsets) - 1), np.nan)
    for n, (a, b) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if b - a > 1:
            median[n], p99[n] = np.percentile(np.diff(token_ns[a:b]), (50, 99))
    return median, p99


def _sent_again(bursts: Rows) -> NDArray[np.bool_]:
    """Bursts of which packets were sent again; where the first copy was lost before the tap, the second one
    comes behind what followed it."""
    return np.asarray((bursts["retransmitted"] > 0) | ((bursts["flags"] & MessageFlag.REORDERED) != 0))


def _held(bursts: Rows, asking: NDArray[np.bool_], down: NDArray[np.bool_]) -> Ints:
    """From when to when each burst was held up because packets of it were lost, which it took longer than
    bursts usually do: two rows."""
    again = _sent_again(bursts)
    over = bursts["arrived_end_ns"].astype(np.int64)
    # An answer is seen as it leaves, a prompt as it comes.
    acked = down & (bursts["acked_ns"] != NEVER)
    over[acked] = bursts["acked_ns"][acked]
    took, longer = over - bursts["sent_ns"], np.zeros(len(bursts), np.int64)
    for part in (asking, acked):
        sound, hit = part & ~again, part & again
        usual = int(median_of(took[sound])) if sound.any() else 0
        longer[hit] = np.maximum(took[hit] - usual, 0)
    return np.stack([over - longer, over])
