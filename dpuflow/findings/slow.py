"""Links' paces and queues in, findings about slow links out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.credit import starved
from dpuflow.findings.evidence import message_evidence, worst
from dpuflow.findings.losses import FEWEST, too_often
from dpuflow.findings.onset import lasting
from dpuflow.quantities import listed, name_of, often
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Evidence, Finding

    Ints = NDArray[np.int64]

_CHECK = "Check the link's negotiated rate and width, shaping and policing, cable and port errors"
TIMES = 3
"""So many times as long as on the other links (``verdicts.links``)."""
LONG = 4
"""Messages of fewer packets say little of a path's pace."""


class _Slow(NamedTuple):
    """The slow links that meet in one endpoint."""

    node: int
    links: list[tuple[int, int, int]]  # from, to, row of Links
    rows: Ints  # of TRANSFER: their longer messages
    took: NDArray[np.float64]  # ns a byte
    closed: int  # windows of zero that their receivers announced
    lossy: bool
    excused: bool  # most messages there carry congestion marks, or too many are lost, and some are quick
    unlike: bool  # seen at one end, which does not compare: what leaves a host leaves in a burst


def find_slow_links(case: Case) -> Iterator[Finding]:
    """One finding for each endpoint all of whose slow links meet in it, else one a link; and one for each
    endpoint whose packets wait in its node.

    Where the receivers of these links announced TCP windows of zero, they could not take the data:
    that is no slow link but a want of credit.
    """
    told: set[int] = set()
    for slow in _together(case):
        if slow.excused:
            continue  # congestion or losses, and told as that
        found = _starved(case, slow) if slow.closed >= FEWEST else _slow_link(case, slow)
        told |= {found.endpoints[0]} if found.condition == "slow_link" else set()
        yield found
    yield from _queues(case, told)


def _together(case: Case) -> Iterator[_Slow]:
    """Slow links by the endpoint in which most of them meet."""
    links, joined, usual = case.inferred.links, case.joined, _usual_pace(case)
    captured = {end for ends in joined.local for end in ends}
    slow = [(int(links.src[i]), int(links.dst[i]), i) for i in np.flatnonzero(links.slow).tolist()]
    while slow:
        ends = [end for src, dst, _ in slow for end in (src, dst)]
        node = max(sorted(set(ends)), key=ends.count)
        here = [link for link in slow if node in link[:2]]
        slow = [link for link in slow if node not in link[:2]]
        mine: list[Ints] = []
        closed, lossy = 0, False
        for src, dst, number in here:
            rows = case.received[dst]
            long = joined.transfers["packets"][rows] >= LONG
            long &= joined.columns["sent_ns"][rows] >= links.since_ns[number]
            mine.append(rows[(joined.columns["src"][rows] == src) & long])
            back = (joined.flows["src"] == dst) & (joined.flows["dst"] == src)
            closed += int(joined.flows["zero_window"][back].sum())
            there = (joined.flows["src"] == src) & (joined.flows["dst"] == dst)
            lossy |= bool((too_often(case) & there).any())
        rows = np.sort(np.concatenate(mine))
        moved = joined.transfers[rows]
        sending = moved["sent_end_ns"] - moved["sent_ns"]
        receiving = moved["arrived_end_ns"] - moved["arrived_ns"]
        took = np.maximum(sending, receiving) / np.maximum(moved["bytes"].astype(np.float64), 1)
        # A link that turned slow is held to itself.
        unlike = any(
            (src in captured) != (dst in captured) and links.since_ns[number] == NEVER
            for src, dst, number in here
        )
        marked = 2 * int((moved["ecn_marked"] > 0).sum()) > len(took)
        excused = (marked or lossy) and _some_quick(took, usual)
        yield _Slow(node, here, rows, took, closed, lossy, excused, unlike)


def _some_quick(took: NDArray[np.float64], usual: float) -> bool:
    """Whether it is a queue that makes messages slow, or a window that losses keep small, not the link: a
    link that is slow is never quick. A shaper lets bursts through; but that marks nothing, and loses nothing.
    """
    return bool(usual and np.percentile(took, 5) <= TIMES * usual)


def _usual_pace(case: Case) -> float:
    """ns a byte of the middle one of the links that are not slow; 0 without one."""
    links = case.inferred.links
    quick = np.flatnonzero(~links.slow & (links.messages > 0))
    return float(median_of(links.pace_ns[quick])) if len(quick) else 0.0


def _cost(case: Case, slow: _Slow) -> Cost:
    """What steps took longer because messages took longer than at the usual pace."""
    return case.cost(case.taken_share(_longer(case, slow), [slow.node]), [slow.node])


def _longer(case: Case, slow: _Slow, times: float = 1) -> Ints:
    """When messages took longer than at the usual pace, of those that took so many ``times`` as long."""
    moved, usual = case.joined.transfers[slow.rows], _usual_pace(case)
    longer = np.maximum(slow.took - usual, 0) * moved["bytes"].astype(np.float64)
    end = np.maximum(moved["sent_end_ns"], moved["arrived_end_ns"])
    return np.stack([end - longer.astype(np.int64), end])[:, slow.took >= times * usual]


def _lasting(case: Case, slow: _Slow) -> tuple[int, int]:
    """From when to when: since most messages take so long that the link is slow."""
    moved = case.joined.transfers[slow.rows]
    end = np.maximum(moved["sent_end_ns"], moved["arrived_end_ns"])
    return lasting(_longer(case, slow, TIMES), end, (case.joined.start_ns, case.joined.end_ns))


def _moves(case: Case, slow: _Slow) -> str:
    ends, usual = case.result.endpoints, _usual_pace(case)
    pace = float(median_of([case.inferred.links.pace_ns[i] for _, _, i in slow.links]))
    pairs = [f"from {name_of(ends[src])} to {name_of(ends[dst])}" for src, dst, _ in slow.links]
    against = f", against {8 / usual:.2f} Gbit/s between the other endpoints" if usual else ""
    return f"Data moves at {8 / pace:.2f} Gbit/s {listed(pairs, len(pairs))}{against}"


def _about(case: Case, slow: _Slow) -> tuple[list[int], list[Evidence]]:
    peers = sorted({end for link in slow.links for end in link[:2]} - {slow.node})
    endpoints = [slow.node, *peers] if len(slow.links) > 1 else list(slow.links[0][:2])
    return endpoints, message_evidence(case.captures, case.joined, worst(slow.rows, slow.took))


def _starved(case: Case, slow: _Slow) -> Finding:
    endpoints, evidence = _about(case, slow)
    said = (
        f"{_moves(case, slow)}, and the receivers advertised a zero window {often(slow.closed)}:"
        " the receivers were slow, not the path."
    )
    return starved(case, endpoints, said, evidence, 0.8, _cost(case, slow), _lasting(case, slow))


def _slow_link(case: Case, slow: _Slow) -> Finding:
    endpoints, evidence = _about(case, slow)
    whose = f" of {name_of(case.result.endpoints[slow.node])}." if len(slow.links) > 1 else "."
    cost = _cost(case, slow)
    found = make_finding(
        "slow_link",
        endpoints,
        _lasting(case, slow),
        cost,
        0.5 if slow.lossy or slow.unlike else 0.9 if len(slow.links) > 1 else 0.7,
        f"{_moves(case, slow)}: the path {'may be' if slow.unlike else 'is'} slow, not the ranks.",
        advice=f"{_CHECK}{whose}",
        alternatives=[
            *(["packet loss on that path"] if slow.lossy else []),
            "a busy receiver host that cannot take data faster",
            "traffic of another job",
        ],
        evidence=evidence,
    )
    if slow.unlike:
        found.severity = "info"
    return found


def _queues(case: Case, told: set[int]) -> Iterator[Finding]:
    """One finding for each endpoint whose packets wait in its node; none where ``told`` names its link.

    What it cost is not told: a host too busy to acknowledge looks the same.
    """
    for endpoint, queue in case.inferred.queues.items():
        if endpoint in told:
            continue
        name = name_of(case.result.endpoints[endpoint])
        yield make_finding(
            "slow_link",
            [endpoint],
            (case.joined.start_ns, case.joined.end_ns),
            Cost(None, 0.0),
            0.7,
            f"Packets of {name} queue in its host, before the capture point: 10 % of its acknowledgments"
            f" leave more than {queue.usual_ns / 1e6:.2f} ms after the data arrived (other endpoints:"
            f" {queue.others_ns / 1e6:.2f} ms). Up to {queue.most_ns / 1e6:.2f} ms of its lateness may"
            " come from that queue.",
            advice="Look at shapers and at what else the host sends through that port.",
            alternatives=["traffic of another program in the same queue", "a host too busy to acknowledge"],
        )


def among(values: NDArray[np.integer], few: Sequence[int]) -> NDArray[np.bool_]:
    """Where ``values`` is one of a few endpoints."""
    told = np.zeros(max(few) + 1, bool)
    told[list(few)] = True
    found: NDArray[np.bool_] = told[np.minimum(values, len(told) - 1)] & (values < len(told))
    return found
