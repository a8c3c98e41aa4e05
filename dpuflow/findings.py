"""Named conditions with evidence and advice, from what the stages found.

Each detector is a small function from the result to findings. Advice never blames hardware for
lateness alone: packets show when a rank was late, not what it was doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.results import Evidence, Finding
from dpuflow.schema import NEVER, Transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.judgement import Charges
    from dpuflow.lateness import Entries
    from dpuflow.links import Links
    from dpuflow.results import Analysis, Lateness
    from dpuflow.tables import CaptureTables, Joined

CRITICAL_SHARE = 0.10
"""A cause that takes a tenth of a group's time or more is critical; below that a warning."""
LOSS_SHARE = 1e-4
"""Retransmissions below one packet in ten thousand are everyday noise."""


def build_findings(
    captures: Sequence[CaptureTables],
    joined: Joined,
    entries: Entries,
    charges: Charges,
    links: Links,
    result: Analysis,
) -> list[Finding]:
    """All findings, numbered, worst first within each detector."""
    found = [
        *_stragglers(captures, joined, entries, charges, result),
        *_slow_links(joined, links, result),
        *_losses(joined, result),
        *_congestion(joined, result),
        *_capture_losses(joined),
        *_untied(joined),
    ]
    for number, finding in enumerate(found):
        finding.id = number
    return found


def _stragglers(
    captures: Sequence[CaptureTables],
    joined: Joined,
    entries: Entries,
    charges: Charges,
    result: Analysis,
) -> Iterator[Finding]:
    span = _span(entries)
    names = [e.address if e.rank is None else f"rank {e.rank} ({e.address})" for e in result.endpoints]
    for row in sorted(result.lateness, key=lambda r: -(r.caused_wait_ns or 0)):
        if row.verdict not in ("late", "intermittent") or row.cause == "network":
            continue
        known = (entries.endpoint == row.endpoint) & (entries.enter_ns != NEVER) & entries.whole
        mine = np.flatnonzero(known & charges.late)
        if not len(mine):  # a little every time: never beyond the noise of one collective
            mine = np.flatnonzero(known)
        taken = float(charges.wait_ns[mine].sum()) / max(_peers(entries, mine) * span, 1)
        worst = int(mine[np.argmax(entries.enter_ns[mine])]) if row.since_ns else int(mine[0])
        yield Finding(
            id=0,
            condition="straggler",
            runbook="docs/report.md#straggler",
            endpoints=[row.endpoint],
            start_ns=row.since_ns if row.since_ns is not None else int(entries.enter_ns[mine].min()),
            end_ns=int(entries.leave_ns[mine].max()),
            severity="critical" if taken >= CRITICAL_SHARE else "warning",
            confidence=_confidence(row),
            summary=(
                f"{names[row.endpoint]} entered {round((row.late_share or 0) * row.collectives)} of"
                f" {row.collectives} collectives late,"
                f" {(row.median_ns or 0) / 1e6:.1f} ms in the median; its peers waited"
                f" {(row.caused_wait_ns or 0) / 1e9:.3f} rank-seconds for it."
            ),
            advice=_ADVICE[row.steadiness or "transient"],
            alternatives=_ALTERNATIVES[row.steadiness or "transient"],
            evidence=_evidence(captures, joined, entries, worst),
        )


_ADVICE = {
    "persistent": (
        "Compare this rank's work with its peers' before its hardware: shard and batch sizes, data"
        " loading, power and thermal limits; then move the rank to another GPU and see whether the"
        " lateness stays or moves with it."
    ),
    "rotating": (
        "The lateness moves from rank to rank: look for what every rank does in turn (garbage"
        " collection, checkpointing, evaluation, uneven input lengths) rather than for a bad GPU."
    ),
    "transient": (
        "Look at what else ran on this rank's host at the times of the late collectives (data loading,"
        " checkpoints, other jobs) before suspecting the GPU."
    ),
}
_ALTERNATIVES = {
    "persistent": [
        "an uneven shard or stage",
        "longer input on this rank",
        "a slower or throttled GPU or host",
    ],
    "rotating": ["garbage collection", "uneven input lengths", "checkpointing in turn"],
    "transient": ["input stalls", "scheduling noise on the host"],
}


def _confidence(row: Lateness) -> float:
    """One minus the chance that noise alone makes this many late: many collectives, much certainty."""
    late = (row.late_share or 0.0) * row.collectives
    return round(float(1 - 0.5 ** max(late, 1.0)), 3) if late < 10 else 0.99


def _peers(entries: Entries, rows: np.typing.NDArray[np.int64]) -> float:
    sizes = np.diff(entries.offsets)[entries.collective[rows]]
    return float(np.median(sizes)) - 1


def _span(entries: Entries) -> int:
    seen = entries.enter_ns > 0
    return int(entries.leave_ns[seen].max()) - int(entries.enter_ns[seen].min()) if seen.any() else 0


def _evidence(
    captures: Sequence[CaptureTables], joined: Joined, entries: Entries, row: int
) -> list[Evidence]:
    act = int(entries.act[row])
    if act >= len(joined.transfers):
        return []
    transfer = joined.transfers[act]
    capture = int(transfer["capture"])
    message = captures[capture].messages[int(transfer["message"])]
    flow = captures[capture].flows[int(message["flow"])]
    return [
        Evidence(
            capture,
            (int(message["first_frame"]) + 1, int(message["last_frame"]) + 1),
            _filter(captures[capture], flow),
        )
    ]


def _filter(tables: CaptureTables, flow: np.void) -> str:
    """A Wireshark display filter that shows one flow."""
    from dpuflow.identity import address_text

    src = address_text(tables.endpoints[int(flow["src"])])
    dst = address_text(tables.endpoints[int(flow["dst"])])
    layer = "ipv6" if ":" in src else "ip"
    both = f"{layer}.src == {src} && {layer}.dst == {dst}"
    if flow["transport"] == Transport.TCP:
        return f"{both} && tcp.srcport == {int(flow['sport'])} && tcp.dstport == {int(flow['dport'])}"
    return f"{both} && infiniband.bth.destqp == 0x{int(flow['dest_qp']):06x}"


def _slow_links(joined: Joined, links: Links, result: Analysis) -> Iterator[Finding]:
    """One finding for each endpoint all of whose slow links meet in it, else one a link."""
    slow = [(int(links.src[i]), int(links.dst[i]), i) for i in np.flatnonzero(links.slow)]
    while slow:
        ends = [end for src, dst, _ in slow for end in (src, dst)]
        node = max(sorted(set(ends)), key=ends.count)
        here = [link for link in slow if node in link[:2]]
        slow = [link for link in slow if node not in link[:2]]
        peers = sorted({end for link in here for end in link[:2]} - {node})
        quick = np.flatnonzero(~links.slow & (links.messages > 0))
        usual = float(np.median(links.pace_ns[quick])) if len(quick) else 0.0
        pace = float(np.median([links.pace_ns[i] for _, _, i in here]))
        pairs = ", ".join(
            f"{result.endpoints[src].address} to {result.endpoints[dst].address}" for src, dst, _ in here
        )
        yield Finding(
            id=0,
            condition="slow_link",
            runbook="docs/report.md#slow_link",
            endpoints=[node, *peers] if len(here) > 1 else list(here[0][:2]),
            start_ns=joined.start_ns,
            end_ns=joined.end_ns,
            severity="warning",
            confidence=0.9 if len(here) > 1 else 0.7,
            summary=(
                f"Data moves at {8 / pace:.2f} Gbit/s from {pairs}, against {8 / usual:.2f} Gbit/s between"
                " the other endpoints: the path is slow, not the ranks."
            ),
            advice=(
                "Check the link's negotiated rate and width, shaping and policing, cable and port errors"
                + (f" of {result.endpoints[node].address}." if len(here) > 1 else ".")
            ),
            alternatives=["a busy receiver host that cannot take data faster", "traffic of another job"],
        )


def _losses(joined: Joined, result: Analysis) -> Iterator[Finding]:
    flows = joined.flows
    bad = np.flatnonzero(
        flows["retransmitted"] > np.maximum(1, LOSS_SHARE * flows["packets"].astype(np.float64))
    )
    by_sender: dict[int, list[int]] = {}
    for number in bad.tolist():
        by_sender.setdefault(int(flows["src"][number]), []).append(number)
    for sender, numbers in sorted(
        by_sender.items(), key=lambda kv: -sum(int(flows["retransmitted"][n]) for n in kv[1])
    ):
        again = sum(int(flows["retransmitted"][n]) for n in numbers)
        packets = sum(int(flows["packets"][n]) for n in numbers)
        yield Finding(
            id=0,
            condition="packet_loss",
            runbook="docs/report.md#packet_loss",
            endpoints=[sender, *sorted({int(flows["dst"][n]) for n in numbers})],
            start_ns=int(flows["first_ns"][numbers].min()),
            end_ns=int(flows["last_ns"][numbers].max()),
            severity="critical" if again >= 0.01 * packets else "warning",
            confidence=0.9,
            summary=(
                f"{again} of {packets} packets from {result.endpoints[sender].address} came again"
                f" ({100 * again / max(packets, 1):.2f} %): they or their acknowledgments were lost or late."
            ),
            advice="Check the path's error and drop counters (port, cable, switch queue) before any GPU.",
            alternatives=[
                "a switch port or cable that corrupts frames",
                "a queue that overflows",
                "reordering",
            ],
        )


def _congestion(joined: Joined, result: Analysis) -> Iterator[Finding]:
    flows = joined.flows
    for number in np.flatnonzero((flows["ecn_marked"] > 0) | (flows["cnp"] > 0)).tolist():
        row = flows[number]
        yield Finding(
            id=0,
            condition="congestion",
            runbook="docs/report.md#congestion",
            endpoints=[int(row["src"]), int(row["dst"])],
            start_ns=int(row["first_ns"]),
            end_ns=int(row["last_ns"]),
            severity="warning",
            confidence=0.9,
            summary=(
                f"{int(row['ecn_marked'])} of {int(row['packets'])} packets from"
                f" {result.endpoints[int(row['src'])].address} to {result.endpoints[int(row['dst'])].address}"
                f" carry a congestion mark; {int(row['cnp'])} congestion notifications were sent."
            ),
            advice="Look at the switch port towards the receiver, whose queue marks; spread the load.",
            alternatives=["incast", "a marking threshold set too low"],
        )


def _capture_losses(joined: Joined) -> Iterator[Finding]:
    for capture in joined.captures:
        if not capture.lost_packets:
            continue
        share = capture.lost_packets / max(capture.packets + capture.lost_packets, 1)
        yield Finding(
            id=0,
            condition="capture_loss",
            runbook="docs/report.md#capture_loss",
            endpoints=[],
            start_ns=None,
            end_ns=None,
            severity="warning" if share > LOSS_SHARE else "info",
            confidence=1.0,
            summary=f"{capture.vantage} lost {capture.lost_packets} packets while capturing ({share:.2%}).",
            advice="Capture with a shorter snap length or a larger buffer; figures from here are less sure.",
        )


def _untied(joined: Joined) -> Iterator[Finding]:
    for clock in joined.clocks:
        if clock.method == "none":
            yield Finding(
                id=0,
                condition="clock_untied",
                runbook="docs/report.md#clock_untied",
                endpoints=[],
                start_ns=None,
                end_ns=None,
                severity="warning",
                confidence=1.0,
                summary=(
                    f"The clock of {joined.captures[clock.capture].vantage} is tied to no other: its"
                    " messages are left out of the common time line."
                ),
                advice="Capture traffic between this node and another that is captured too.",
            )
