"""How fast data really moved between each pair of endpoints, which links are slow, and whom the network kept.

A message's pace is the time from its first to its last packet over its bytes: the sender had the
data and the credit, so what stretches a message is the path. Measured at both ends, the longer of
the two counts: a shaper shows before the tap at one end and behind it at the other. Messages are
compared with their like only (same operation, same size), for libraries send different kinds of
messages in different ways. What was sent again is left out: a retransmission is a loss, no pace.

A shaper between a host and its own tap shows otherwise: the data leaves late though it was offered and its
credit is there. That is measured where a thread of the library's own sends then (Gloo). There the kernel, or
the NIC, acknowledges data as it comes, whatever the rank computes: an ACK that leaves its own node late had
waited behind what else the node sends, and so had the rank's first message. Only ACKs within an operation
count: between two of them one may be held back until there is data to send it with.

A packet that is sent again need not hold anything up: hosts that acknowledge late make their peers repeat
what has arrived. What counts is how long messages with repeated packets were under way beyond the usual, and
that excuses ranks of that path, for that time, by that amount.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, classes, distinct, lower_medians, median_of
from dpuflow.arrays.stretches import covered_ns
from dpuflow.entries import ONE_SIDED, places_of, previous_row
from dpuflow.entries.rows import FEWEST
from dpuflow.schema.rows import NEVER, Wire
from dpuflow.verdicts.chance import is_material, turn_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Bools, Floats, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

SLOW_FACTOR = 3.0
"""A link whose messages usually take this many times as long as their like is slow; so is a path of pages."""
MATHIS = 1.22
"""TCP's rate at a loss rate p: this many segments a round trip over the root of p (Mathis et al., 1997)."""


class Links(NamedTuple):
    """One row per (src, dst) that carried data, as parallel arrays."""

    src: Ints
    dst: Ints
    pace_ns: Floats  # time per byte: of a slow link what it sustains, else the median message's
    stretch: Floats  # median of the messages' time over that of their like
    lost_ns: Floats  # time beyond that of their like, all messages together
    messages: Ints
    slow: Bools
    since_ns: Ints  # of a link that turned slow: when; NEVER of all others


def measure_links(exchanges: Rows, instances: Sequence[Instance]) -> Links:
    """Pace of each link from the exchanges that are part of a collective and span several packets."""
    from dpuflow.kernels import links as kernels

    of = np.full(len(exchanges), -1)
    for number, instance in enumerate(instances):
        of[instance.rows] = number
    part = ((of >= 0) & (exchanges["retransmitted"] == 0)).astype(np.uint8)
    columns, grain = np.empty((5, int(np.count_nonzero(part))), np.int64), np.zeros(1, np.int64)
    columns = columns[:, : kernels.durations(exchanges, part, columns, grain)]
    took, nbytes, src, dst = (columns[k] for k in (kernels.TOOK, kernels.BYTES, kernels.SRC, kernels.DST))
    operation, near = columns[kernels.OP], {end for i in instances for end in i.view.near or ()}
    if near:  # a message looks otherwise at its sender than at its receiver
        ends = np.array(sorted(near))
        operation = 4 * operation + 2 * np.isin(src, ends) + np.isin(dst, ends)
    kind, link = _classes(operation, nbytes), _classes(src, dst)
    like = _usual(took, kind, link)[kind]
    stretch = took / np.maximum(like + grain[0], 1.0)

    # Floating-point numbers that are not negative are in the same order as their bits.
    median = lower_medians(stretch.view(np.int64), link).view(np.float64)
    count = np.bincount(link, minlength=len(median))
    middle, at = np.zeros(len(median), np.int64), np.flatnonzero(stretch == median[link])[::-1]
    middle[link[at]] = at  # of several the first one, which is assigned last
    lost = np.bincount(link, took - like, len(median)).astype(np.float64)
    order = np.lexsort((dst[middle], src[middle]))
    middle = middle[order]
    links = Links(
        src[middle],
        dst[middle],
        took[middle] / np.maximum(nbytes[middle].astype(np.float64), 1),
        stretch[middle],
        lost[order],
        count[order],
        (count[order] >= FEWEST) & (stretch[middle] >= SLOW_FACTOR),
        np.full(len(order), NEVER),
    )
    if len(links.src):
        for row in np.flatnonzero(links.slow).tolist():
            links.slow[row] = _surely(stretch[link == order[row]])
        _turned(links, stretch, link, order, lambda: _measured(exchanges, part))
        links.slow[:] |= _held_back(exchanges[(of >= 0) & (exchanges["wire"] == Wire.GLOO_DATA)], links)
    if links.slow.any():
        picked, of = exchanges[of >= 0], of[of >= 0]
        trip, parts = _round_trip_ns(picked), _by_link(picked, links)
        for row in np.flatnonzero(links.slow).tolist():
            _weigh(links, row, picked[parts[row]], of[parts[row]], trip)
    return links


def _measured(exchanges: Rows, part: NDArray[np.uint8]) -> tuple[Ints, Floats]:
    """Of each message that ``durations`` picks when it was sent, and the time that it took a byte."""
    from dpuflow.kernels.links import FEWEST_PACKETS

    whole = (exchanges["data_ns"] != NEVER) & (exchanges["arrived_end_ns"] != NEVER)
    at = np.flatnonzero((part > 0) & (exchanges["packets"] >= FEWEST_PACKETS) & whole)
    took = _took_ns(Picked(exchanges, at))
    return exchanges["data_ns"][at], took / np.maximum(exchanges["bytes"][at].astype(np.float64), 1)


def _took_ns(rows: Rows | Picked) -> Ints:
    """The longer one of the times that data took to send and to arrive; to send, where its sender says, at
    its leisure, when all has come."""
    arriving = np.where(rows["wire"] == Wire.TAGGED_DONE, 0, rows["arrived_end_ns"] - rows["arrived_ns"])
    return np.asarray(np.maximum(rows["data_end_ns"] - rows["data_ns"], arriving), np.int64)


def _turned(
    links: Links, stretch: Floats, link: Ints, order: Ints, measured: Callable[[], tuple[Ints, Floats]]
) -> None:
    """Links that turned slow while the job ran: they are, judged by what they carried since then."""
    slow = stretch >= SLOW_FACTOR
    some = np.bincount(link, slow, len(order))[order]
    rows = np.flatnonzero(~links.slow & (some >= FEWEST))
    if not len(rows):
        return
    sent_ns, pace = measured()
    for row in rows.tolist():
        mine = np.flatnonzero(link == order[row])
        mine = mine[np.argsort(sent_ns[mine], kind="stable")]
        turn = turn_of(slow[mine])
        if turn is None or len(mine) - turn < FEWEST or not _surely(stretch[mine[turn:]]):
            continue
        since = mine[turn:]
        links.slow[row], links.since_ns[row] = True, sent_ns[since[0]]
        links.stretch[row], links.pace_ns[row] = median_of(stretch[since]), median_of(pace[since])


def _by_link(rows: Rows | Picked, links: Links) -> list[Ints]:
    """For each link which of ``rows`` it carried."""
    key = rows["src"].astype(np.int64) << 32 | rows["dst"]
    order = np.argsort(key, kind="stable")
    link = np.asarray(links.src, np.int64) << 32 | np.asarray(links.dst, np.int64)
    start, stop = (np.searchsorted(key[order], link, side=side) for side in ("left", "right"))
    return [order[a:b] for a, b in zip(start.tolist(), stop.tolist(), strict=True)]


def _surely(stretch: Floats) -> bool:
    """Whether the median is beyond SLOW_FACTOR with 95 % confidence: the sign test, by its normal limit."""
    low = len(stretch) / 2 - ONE_SIDED * np.sqrt(len(stretch)) / 2
    return bool(np.sort(stretch)[max(int(low), 0)] >= SLOW_FACTOR)


def _usual(took: Ints, kind: Ints, link: Ints) -> Ints:
    """For each kind of message the time it takes on the quickest third of the links, on the slowest of these:
    of the links between three nodes two thirds are those of a slow one, of more nodes' fewer are."""
    both = _classes(kind, link)
    median = lower_medians(took, both)
    kinds = np.zeros(len(median), np.int64)
    kinds[both] = kind
    order = np.lexsort((median, kinds))
    starts = np.flatnonzero(np.r_[True, np.diff(kinds[order]) != 0]) if len(order) else order
    count = np.diff(np.r_[starts, len(order)])
    return np.asarray(median[order[starts + (count - 1) // 3]], np.int64)


def _held_back(exchanges: Rows, links: Links) -> Bools:
    """Links whose Gloo data leaves far later than it could: it was offered, and its credit had come."""
    known = (exchanges["data_ns"] != NEVER) & (exchanges["retransmitted"] == 0)
    for name in ("offer_ns", "grant_arrived_ns"):
        known &= exchanges[name] != NEVER
    rows = Picked(exchanges, np.flatnonzero(known))
    held = rows["data_ns"] - np.maximum(rows["offer_ns"], rows["grant_arrived_ns"])
    middle, most = np.zeros((2, len(links.src)))
    for row, part in enumerate(_by_link(rows, links)):
        if len(part) >= FEWEST:
            middle[row], most[row] = np.percentile(held[part], (50, 95))
    measured = most > 0
    if measured.sum() < 2:
        return np.zeros(len(links.src), bool)
    return measured & (middle > SLOW_FACTOR * np.quantile(most[measured], 0.5, method="lower"))


def _weigh(links: Links, row: int, mine: Rows, collective: Ints, trip_ns: float) -> None:
    """Give a slow link the pace it sustains; not slow after all if its losses alone explain that pace."""
    whole = (mine["data_ns"] != NEVER) & (mine["arrived_end_ns"] != NEVER)
    mine, collective = mine[whole], collective[whole]
    pace = links.pace_ns[row]
    if links.stretch[row] >= SLOW_FACTOR:
        # A token bucket lets a burst pass at full pace; its rate shows where it was empty.
        took = _took_ns(mine)
        alone = (mine["retransmitted"] == 0) & (mine["bytes"] > 0)
        links.pace_ns[row] = max(pace, float(np.percentile(took[alone] / mine["bytes"][alone], 75)))
    else:
        links.pace_ns[row] = max(pace, _sustained_ns(mine, collective))
    again, packets = int(mine["retransmitted"].sum()), max(int(mine["packets"].sum()), 1)
    segment = max(float(mine["bytes"].sum()) / packets, 1.0)
    explained = trip_ns * np.sqrt(again / packets) / (MATHIS * segment)
    links.slow[row] = links.pace_ns[row] > SLOW_FACTOR * explained


def _round_trip_ns(picked: Rows) -> float:
    """What the path usually takes from a message's end to its ACK: on the quicker quarter of the links."""
    rows = picked[(picked["acked_ns"] != NEVER) & (picked["data_ns"] != NEVER)]
    if not len(rows):
        return 0.0
    link = _classes(rows["src"].astype(np.int64), rows["dst"].astype(np.int64))
    return float(np.percentile(lower_medians(rows["acked_ns"] - rows["data_end_ns"], link), 25))


def _sustained_ns(mine: Rows, collective: Ints) -> float:
    """Time per byte within collectives, after the first message of each; in a quick quarter of them."""
    order = np.lexsort((mine["arrived_end_ns"], collective))
    starts = np.flatnonzero(np.r_[True, np.diff(collective[order]) != 0])
    ends = np.r_[starts[1:], len(order)] - 1
    nbytes = np.add.reduceat(mine["bytes"][order].astype(np.int64), starts) - mine["bytes"][order[starts]]
    several = nbytes > 0
    if not several.any():
        return 0.0
    arrived = mine["arrived_end_ns"][order]
    return float(np.percentile(((arrived[ends] - arrived[starts]) / np.maximum(nbytes, 1))[several], 25))


def _classes(first: Ints, second: Ints) -> Ints:
    """Pairs of values, numbered."""
    from dpuflow.kernels import links as kernels

    of = np.empty(len(first), np.int64)
    kernels.classes(first, second, np.full(1 << (2 * len(first)).bit_length(), -1), of)
    return of


def slow_rows(links: Links, entries: Entries) -> Bools:
    """Rows of Entries whose endpoint received or sent over a slow link in some collective."""
    touched = distinct(np.concatenate([links.src[links.slow], links.dst[links.slow]]))
    return np.isin(entries.endpoint, touched)


def excused_ns(exchanges: Rows, instances: Sequence[Instance], entries: Entries, held_up: Bools) -> Ints:
    """Per row of Entries how long, between its rank's last leave and its entry, messages from or to that rank
    were ``held_up`` (see there). Only that path and that time count: what is held up later, or between
    others, kept no rank from entering."""
    out = np.zeros(len(entries.endpoint), np.int64)
    if not instances or not held_up.any():
        return out
    held, rows = held_stretches(exchanges, np.concatenate([i.rows for i in instances]), held_up)
    src, dst = exchanges["src"][rows], exchanges["dst"][rows]
    last = previous_row(entries)
    since = np.where(last >= 0, entries.leave_ns[last], NEVER)
    # Who enters before it has left another group's collective works on both since it entered that one.
    since = np.where((last >= 0) & (since > entries.enter_ns), entries.enter_ns[last], since)
    for mine in classes(entries.endpoint):
        endpoint = entries.endpoint[mine[0]]
        path = (src == endpoint) | (dst == endpoint)
        for row in mine[entries.enter_ns[mine] != NEVER].tolist() if path.any() else []:
            out[row] = covered_ns(held[:, path], since[row], entries.enter_ns[row])
    return out


def held_up(exchanges: Rows, links: Links) -> Bools:
    """Messages of which packets were sent again, or marked by a queue, and those over slow links."""
    found = np.asarray((exchanges["retransmitted"] > 0) | (exchanges["ecn_marked"] > 0), np.bool_)
    for src, dst in zip(links.src[links.slow].tolist(), links.dst[links.slow].tolist(), strict=True):
        found |= (exchanges["src"] == src) & (exchanges["dst"] == dst)
    return found


def held_stretches(exchanges: Rows, at: Ints, held_up: Bools) -> tuple[Ints, Ints]:
    """When messages that were ``held_up``, of those in rows ``at``, were under way beyond the usual time for
    a byte of these: stretches from and until, and their rows."""
    known = (exchanges["data_ns"][at] != NEVER) & (exchanges["arrived_end_ns"][at] != NEVER)
    at = at[known & (exchanges["packets"][at] > 0)]
    sizes, end = exchanges["bytes"][at].astype(np.float64), exchanges["arrived_end_ns"][at]
    took, again = end - exchanges["data_ns"][at], held_up[at]
    if not again.any():
        return np.zeros((2, 0), np.int64), at[:0]
    pace = took / np.maximum(sizes, 1)
    usual = float(median_of(pace[~again])) if not again.all() else float(pace.min())
    beyond = np.maximum(took - usual * sizes, 0).astype(np.int64)
    again &= beyond > 0
    return np.stack([end - beyond, end])[:, again], at[again]


class Queue(NamedTuple):
    """How long the acknowledgments of an endpoint take, ns: nine in ten no longer than ``usual_ns``, 19 in 20
    no longer than ``most_ns``; of the other endpoints' in the median nine in ten take ``others_ns``."""

    usual_ns: int
    most_ns: int
    others_ns: int


def find_queues(
    exchanges: Rows, sent_ns: Ints, instances: Sequence[Instance], entries: Entries
) -> dict[int, Queue]:
    """The endpoints whose acknowledgments take far longer than their peers'; ``sent_ns`` of all messages."""
    of = np.full(len(exchanges), -1)
    for number, instance in enumerate(instances):
        if (
            instance.placement.processes is None and not instance.hides_ranks
        ):  # else others at the endpoint are not in it
            of[instance.rows] = number
    known = (of >= 0) & (exchanges["retransmitted"] == 0)
    for name in ("taken_ns", "arrived_end_ns"):
        known &= exchanges[name] != NEVER
    # An ACK that a message carries may have waited for that message.
    at = np.flatnonzero(known)
    if not len(at):
        return {}
    at = at[~np.isin(exchanges["taken_ns"][at], sent_ns)]
    came, taken = exchanges["arrived_end_ns"][at], exchanges["taken_ns"][at]
    row = places_of(of[at], exchanges["dst"][at], entries)
    inside = (row >= 0) & (came >= entries.enter_ns[row]) & (taken <= entries.leave_ns[row])
    took, end, where = (taken - came)[inside], entries.endpoint[row[inside]], of[at][inside]
    seen = [e for e in distinct(end).tolist() if np.count_nonzero(end == e) >= FEWEST]
    told = {e: np.percentile(took[end == e], (90, 95)) for e in seen}
    known = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    span_ns = int(np.ptp(entries.leave_ns[known])) if known.any() else 0
    found = {}
    for endpoint, (usual, most) in told.items():
        others = [float(each[0]) for e, each in told.items() if e != endpoint]
        # A single peer may be the quick one.
        if len(others) < 2:
            continue
        least = SLOW_FACTOR * float(median_of(others))
        slow = (end == endpoint) & (took > least)
        # A host that stalls once is late with many at a time.
        worst = np.zeros(len(instances), np.int64)
        np.maximum.at(worst, where[slow], took[slow])
        often = np.count_nonzero(worst) >= FEWEST and is_material(int(worst.sum()), span_ns)
        if usual > least and often:
            found[endpoint] = Queue(round(usual), round(most), round(float(median_of(others))))
    return found


def queued_ns(queues: dict[int, Queue], entries: Entries) -> Ints:
    """Per row of Entries how long its first message may have waited in its node's queue; 0 where in none."""
    found = np.zeros(len(entries.endpoint), np.int64)
    for endpoint, queue in queues.items():
        found[entries.of[endpoint]] = queue.most_ns
    return found
