"""Findings about the path: slow links, lost packets, congestion, receivers that grant no credit.

In: flows and messages of all captures, and links' paces. Out: findings with evidence, the packets of
messages that show the condition.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.identity.endpoints import address_text
from dpuflow.quantities import name_of
from dpuflow.results import Evidence, Finding
from dpuflow.schema.rows import Transport
from dpuflow.verdicts.habits import CRITICAL_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.results import Analysis
    from dpuflow.schema.tables import CaptureTables, Joined, Rows
    from dpuflow.verdicts.links import Links
    from dpuflow.verdicts.turnaround import Queue

    Ints = NDArray[np.int64]

LOSS_SHARE = 1e-4
"""Retransmissions below one packet in ten thousand are everyday noise."""
SMALL_SHARE = 0.01
"""A loss that held up messages for less than a hundredth of the time is told as information."""
FEWEST = 3
"""Fewer packets sent again, or not granted, are told as information."""
SHOWN = 3
"""Messages that a finding shows as evidence."""


def message_evidence(
    captures: Sequence[CaptureTables], joined: Joined, transfers: Sequence[int]
) -> list[Evidence]:
    """For TRANSFER rows the frames of their messages, at the vantage point nearest the sender."""
    found = []
    for number in transfers:
        transfer = joined.transfers[number]
        capture = int(transfer["capture"])
        tables = captures[capture]
        message = tables.messages[int(transfer["message"])]
        found.append(
            Evidence(
                capture,
                (int(message["first_frame"]) + 1, int(message["last_frame"]) + 1),
                flow_filter(tables, tables.flows[int(message["flow"])]),
            )
        )
    return found


def flow_filter(tables: CaptureTables, flow: np.void) -> str:
    """A Wireshark display filter that shows one flow."""
    src = address_text(tables.endpoints[int(flow["src"])])
    dst = address_text(tables.endpoints[int(flow["dst"])])
    layer = "ipv6" if ":" in src else "ip"
    both = f"{layer}.src == {src} && {layer}.dst == {dst}"
    if flow["transport"] == Transport.TCP:
        return f"{both} && tcp.srcport == {int(flow['sport'])} && tcp.dstport == {int(flow['dport'])}"
    return f"{both} && infiniband.bth.destqp == 0x{int(flow['dest_qp']):06x}"


class _ByEnd:
    """The rows of TRANSFER from or to an endpoint, in order; sorted once, since findings may be as many."""

    def __init__(self, joined: Joined, column: str) -> None:
        self._joined, self._column = joined, column

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        ends = self._joined.columns[self._column]
        count = len(self._joined.endpoints)
        order = np.argsort(ends.astype(np.uint16) if count < 1 << 16 else ends, kind="stable")  # by counting
        return order, np.r_[0, np.cumsum(np.bincount(ends, minlength=count))]

    @cached_property
    def _room(self) -> NDArray[np.int64]:
        return np.empty(5 * int(np.diff(self._sorted[1]).max(initial=0)), np.int64)

    def __getitem__(self, end: int) -> Ints:
        order, bounds = self._sorted
        return order[bounds[end] : bounds[end + 1]]

    def columns(self, end: int) -> NDArray[np.int64]:
        """Five columns of an endpoint's rows, see ``kernels.links.under_way``; good until the next call."""
        from dpuflow.kernels.links import under_way

        rows = self[end]
        out = self._room[: 5 * len(rows)].reshape(5, -1)
        under_way(self._joined.transfers, rows, out)
        return out


def _worst(rows: Ints, values: NDArray[np.generic]) -> list[int]:
    """Of the transfers ``rows`` the few with the largest ``values``, in order of time."""
    most = rows[np.argsort(-values.astype(np.float64), kind="stable")[:SHOWN]]
    return sorted(most.tolist())


def _most(rows: Ints, own: NDArray[np.integer]) -> list[int]:
    """The same by counts; those that have none only where all do."""
    return _worst(rows[own > 0], own[own > 0]) if (own > 0).any() else _worst(rows, own)


def find_slow_links(
    captures: Sequence[CaptureTables], joined: Joined, links: Links, result: Analysis
) -> Iterator[Finding]:
    """One finding for each endpoint all of whose slow links meet in it, else one a link.

    Where the receivers of these links announced TCP windows of zero, they could not take the data:
    that is no slow link but a want of credit.
    """
    slow = [(int(links.src[i]), int(links.dst[i]), i) for i in np.flatnonzero(links.slow)]
    transfers = joined.transfers
    received = _ByEnd(joined, "dst")
    captured = {end for ends in joined.local for end in ends}
    while slow:
        ends = [end for src, dst, _ in slow for end in (src, dst)]
        node = max(sorted(set(ends)), key=ends.count)
        here = [link for link in slow if node in link[:2]]
        slow = [link for link in slow if node not in link[:2]]
        peers = sorted({end for link in here for end in link[:2]} - {node})
        quick = np.flatnonzero(~links.slow & (links.messages > 0))
        usual = float(np.median(links.pace_ns[quick])) if len(quick) else 0.0
        pace = float(np.median([links.pace_ns[i] for _, _, i in here]))
        pairs = _listed(
            [f"{name_of(result.endpoints[src])} to {name_of(result.endpoints[dst])}" for src, dst, _ in here]
        )
        against = f", against {8 / usual:.2f} Gbit/s between the other endpoints" if usual else ""
        mine: list[Ints] = []
        closed, lossy = 0, False
        for src, dst, _ in here:
            rows = received[dst]
            mine.append(rows[(joined.columns["src"][rows] == src) & (transfers["packets"][rows] >= 4)])
            back = (joined.flows["src"] == dst) & (joined.flows["dst"] == src)
            closed += int(joined.flows["zero_window"][back].sum())
            there = (joined.flows["src"] == src) & (joined.flows["dst"] == dst)
            lossy |= bool((_too_often(joined.flows) & there).any())
        rows = np.sort(np.concatenate(mine))
        moved = transfers[rows]
        sending = moved["sent_end_ns"] - moved["sent_ns"]
        receiving = moved["arrived_end_ns"] - moved["arrived_ns"]
        took = np.maximum(sending, receiving) / np.maximum(moved["bytes"].astype(np.float64), 1)
        evidence = message_evidence(captures, joined, _worst(rows, took))
        # What leaves a host leaves in a burst and arrives as the path allows: one end does not compare.
        unlike = any((src in captured) != (dst in captured) for src, dst, _ in here)
        moves = f"Data moves at {8 / pace:.2f} Gbit/s from {pairs}{against}"
        endpoints = [node, *peers] if len(here) > 1 else list(here[0][:2])
        if closed >= FEWEST:
            yield _starved(
                joined,
                endpoints,
                f"{moves}, and the receivers announced a window of zero {closed} times: they did not take it,"
                " the path did not hold it back.",
                evidence,
                0.8,
            )
            continue
        yield Finding(
            id=0,
            condition="slow_link",
            runbook="docs/report.md#slow_link",
            endpoints=endpoints,
            start_ns=joined.start_ns,
            end_ns=joined.end_ns,
            severity="info" if unlike else "warning",
            confidence=0.5 if lossy or unlike else 0.9 if len(here) > 1 else 0.7,
            summary=f"{moves}: the path {'may be' if unlike else 'is'} slow, not the ranks.",
            advice=(
                "Check the link's negotiated rate and width, shaping and policing, cable and port errors"
                + (f" of {name_of(result.endpoints[node])}." if len(here) > 1 else ".")
            ),
            alternatives=[
                *(["packets lost on it and sent again (see packet_loss)"] if lossy else []),
                "a busy receiver host that cannot take data faster",
                "traffic of another job",
            ],
            evidence=evidence,
        )


def find_queues(
    joined: Joined, queues: Mapping[int, Queue], told: Sequence[Finding], result: Analysis
) -> Iterator[Finding]:
    """One finding for each endpoint whose packets wait in its node; none where ``told`` names its link."""
    named = {finding.endpoints[0] for finding in told if finding.condition == "slow_link"}
    for endpoint, queue in queues.items():
        if endpoint in named:
            continue
        address = result.endpoints[endpoint].address
        yield Finding(
            id=0,
            condition="slow_link",
            runbook="docs/report.md#slow_link",
            endpoints=[endpoint],
            start_ns=joined.start_ns,
            end_ns=joined.end_ns,
            severity="warning",
            confidence=0.7,
            summary=(
                f"What {address} sends waits before its own tap: one in ten of its acknowledgments leaves"
                f" more than {queue.usual_ns / 1e6:.2f} ms after the data came, of the others'"
                f" {queue.others_ns / 1e6:.2f} ms. Its lateness up to {queue.most_ns / 1e6:.2f} ms is not"
                " told from that."
            ),
            advice="Look at shapers and at what else the host sends through that port.",
            alternatives=["traffic of another program in the same queue", "a host too busy to acknowledge"],
        )


def _too_often(flows: Rows) -> NDArray[np.bool_]:
    """Flows with more retransmissions than are usual."""
    return np.asarray(_lost(flows) > np.maximum(1, LOSS_SHARE * flows["packets"].astype(np.float64)))


def _lost(flows: Rows) -> NDArray[np.int64]:
    """Packets retransmitted less those that the receiver had already: probes of the tail, reordering."""
    lost = flows["retransmitted"].astype(np.int64) - flows["spurious"].astype(np.int64)
    return np.asarray(np.maximum(lost, 0), np.int64)


def find_losses(
    captures: Sequence[CaptureTables], joined: Joined, result: Analysis, cost_share: float
) -> Iterator[Finding]:
    """One finding for each place where packets are lost, as severe as the time that it cost.

    The place is the endpoint that most of what came again was from or to. ``cost_share``: of the job's time,
    what ranks waited because of the network.
    """
    from dpuflow.kernels.links import AGAIN

    flows = joined.flows
    lost = _lost(flows)
    sent = _ByEnd(joined, "src")
    for place, numbers in _lossy_places(flows):
        senders = sorted({int(flows["src"][n]) for n in numbers}, key=lambda end: end != place)
        again, packets = int(lost[numbers].sum()), int(flows["packets"][numbers].sum())
        held, shown = [], []
        for sender in senders:
            columns = sent.columns(sender)
            held.append(_held_up(columns))
            shown.append((sent[sender], columns[AGAIN].copy()))
        held_ns = _together_ns(np.concatenate(held, axis=1))
        if not held_ns:
            continue
        share = held_ns / max(joined.end_ns - joined.start_ns, 1)
        # Messages that nobody waited for cost the job nothing: both must be large.
        much = min(share, cost_share) >= CRITICAL_SHARE
        others = {int(flows[name][n]) for n in numbers for name in ("src", "dst")} - {place}
        ways = "from" if len(senders) == 1 else "from and to"
        yield Finding(
            id=0,
            condition="packet_loss",
            runbook="docs/report.md#packet_loss",
            endpoints=[place, *sorted(others)],
            start_ns=int(flows["first_ns"][numbers].min()),
            end_ns=int(flows["last_ns"][numbers].max()),
            severity="info" if share < SMALL_SHARE else "critical" if much else "warning",
            confidence=0.5 if again < FEWEST else 0.9,
            summary=(
                f"{again} of {packets} packets {ways} {name_of(result.endpoints[place])} were retransmitted"
                f" ({100 * again / max(packets, 1):.2f} %): they or their acknowledgments were lost"
                f" or late. Messages were held up by it for {held_ns / 1e6:.1f} ms"
                f" ({100 * share:.1f} % of the time)."
            ),
            advice="Check the path's error and drop counters (port, cable, switch queue) before any GPU.",
            alternatives=[
                "a switch port or cable that corrupts frames",
                "a queue that overflows",
                "reordering",
                "a receiver's host that was too slow to acknowledge",
            ],
            evidence=message_evidence(
                captures, joined, _most(*map(np.concatenate, zip(*shown, strict=True)))
            ),
        )


def _lossy_places(flows: Rows) -> Iterator[tuple[int, list[int]]]:
    """(endpoint, its flows that repeat too much), worst first: each flow once.

    What loses packets near an endpoint loses those that it sends, those sent to it, and their ACKs: several
    senders repeat packets for one fault.
    """
    lost = _lost(flows)
    left = np.flatnonzero(_too_often(flows)).tolist()
    while left:
        again = {n: int(lost[n]) for n in left}
        passed: dict[int, int] = {}
        sends: dict[int, int] = {}
        for n in left:
            src, dst = int(flows["src"][n]), int(flows["dst"][n])
            for end in (src, dst):
                passed[end] = passed.get(end, 0) + again[n]
            sends[src] = sends.get(src, 0) + again[n]
        # Of two ends of the same flows the one that sends what is repeated.
        place = max(passed, key=lambda end: (passed[end], sends.get(end, 0), -end))
        mine = [n for n in left if place in (int(flows["src"][n]), int(flows["dst"][n]))]
        yield place, mine
        left = [n for n in left if n not in mine]


def _held_up(columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """From when to when messages sent again, of a sender's, were under way longer than the others; two rows.

    ``columns`` as from ``_ByEnd``. A message is held to the usual pace of the same sender's other messages;
    where it has none, to the quickest.
    """
    from dpuflow.kernels.links import AGAIN, CARRIED, FROM, UNDER_WAY

    start, took, carried = columns[FROM], columns[UNDER_WAY], columns[CARRIED]
    again = columns[AGAIN] > 0
    if not again.any():
        return np.zeros((2, 0), np.int64)
    pace = took / np.maximum(carried, 1)
    usual = float(np.median(pace[~again])) if not again.all() else float(pace.min())
    took = took[again]
    end = start[again] + took
    return np.stack([end - np.maximum(took - usual * carried[again], 0).astype(np.int64), end])


def _together_ns(held: NDArray[np.int64]) -> int:
    """The length of stretches together; what they cover at the same time counts once."""
    if not held.shape[1]:
        return 0
    begin, end = held[:, np.argsort(held[0], kind="stable")]
    before = np.maximum.accumulate(np.concatenate([begin[:1], end[:-1]]))
    return int(np.maximum(end - np.maximum(begin, before), 0).sum())


def find_congestion(captures: Sequence[CaptureTables], joined: Joined, result: Analysis) -> Iterator[Finding]:
    """One finding for each receiver towards which packets were marked, or senders were told to slow down."""
    flows = joined.flows
    marked = (flows["ecn_marked"] > 0) | (flows["cnp"] > 0)
    if not marked.any():
        return
    src, dst, marks = (joined.columns[name] for name in ("src", "dst", "ecn_marked"))
    with_marks = np.flatnonzero(marks)
    for receiver in np.unique(flows["dst"][marked]).tolist():
        numbers = np.flatnonzero(marked & (flows["dst"] == receiver))
        senders = sorted({int(src) for src in flows["src"][numbers]})
        rows = with_marks[dst[with_marks] == receiver]
        rows = rows[_among(src[rows], senders)]
        if not len(rows):  # they were told to slow down; the marks are not on these messages
            rows = np.flatnonzero((dst == receiver) & _among(src, senders))
        yield Finding(
            id=0,
            condition="congestion",
            runbook="docs/report.md#congestion",
            endpoints=[*senders, receiver],
            start_ns=int(flows["first_ns"][numbers].min()),
            end_ns=int(flows["last_ns"][numbers].max()),
            severity="warning",
            confidence=0.9,
            summary=(
                f"{int(flows['ecn_marked'][numbers].sum())} of {int(flows['packets'][numbers].sum())} packets"
                f" from {_listed([name_of(result.endpoints[s]) for s in senders])} to"
                f" {name_of(result.endpoints[receiver])} carry a congestion mark;"
                f" {int(flows['cnp'][numbers].sum())} congestion notifications were seen."
            ),
            advice="Look at the switch port towards the receiver, whose queue marks; spread the load.",
            alternatives=["incast", "a marking threshold set too low"],
            evidence=message_evidence(captures, joined, _worst(rows, marks[rows])),
        )


def _among(values: NDArray[np.integer], few: Sequence[int]) -> NDArray[np.bool_]:
    """Where ``values`` is one of a few endpoints."""
    told = np.zeros(max(few) + 1, bool)
    told[list(few)] = True
    found: NDArray[np.bool_] = told[np.minimum(values, len(told) - 1)] & (values < len(told))
    return found


def find_starvation(captures: Sequence[CaptureTables], joined: Joined, result: Analysis) -> Iterator[Finding]:
    """One finding for each receiver that answered RoCE messages by receiver-not-ready NAKs."""
    from dpuflow.kernels.links import AGAIN, SENDER

    flows = joined.flows
    received = _ByEnd(joined, "dst")
    for receiver in np.unique(flows["src"][flows["rnr"] > 0]).tolist():
        numbers = np.flatnonzero((flows["src"] == receiver) & (flows["rnr"] > 0))
        senders = sorted({int(dst) for dst in flows["dst"][numbers]})
        columns = received.columns(receiver)
        theirs = _among(columns[SENDER], senders)
        refused = int(flows["rnr"][numbers].sum())
        whose = _listed([name_of(result.endpoints[s]) for s in senders])
        yield _starved(
            joined,
            [receiver, *senders],
            f"{name_of(result.endpoints[receiver])} refused messages from {whose} {refused} times (receiver"
            " not ready): it had posted no receive for them.",
            # What was refused came again.
            message_evidence(captures, joined, _most(received[receiver][theirs], columns[AGAIN][theirs])),
            0.9 if refused >= FEWEST else 0.6,
        )


def _starved(
    joined: Joined, endpoints: list[int], summary: str, evidence: list[Evidence], confidence: float
) -> Finding:
    return Finding(
        id=0,
        condition="credit_starvation",
        runbook="docs/report.md#credit_starvation",
        endpoints=endpoints,
        start_ns=joined.start_ns,
        end_ns=joined.end_ns,
        severity="warning",
        confidence=confidence,
        summary=summary,
        advice=(
            "Look at the receiver's host, not at the sender or the link: is its process running and reading,"
            " are its buffers and receive queues large enough, is its memory bandwidth or PCIe busy."
        ),
        alternatives=["a receiver that was late itself", "receive buffers set too small", "a busy host"],
        evidence=evidence,
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
