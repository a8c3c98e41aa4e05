"""The table of the agent's own metrics: name, type, labels and meaning, as docs/metrics.md lists them.

In: nothing. Out: ``METRICS``, from which ``metrics`` makes the exposition. Names follow Prometheus' and
OpenMetrics' rules: base units, unit last, ``_total`` on counters (left out here: the client adds it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Metric:
    """One family of series."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    about: str

    @property
    def shown(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


_PAIR: Final = ("transport", "src", "dst")
_MEMBER: Final = ("group", "peer")

FLOWS: Final = {
    "packets": Metric("dpuflow_flow_packets", "counter", _PAIR, "Packets sent from src to dst."),
    "bytes": Metric(
        "dpuflow_flow_payload_bytes",
        "counter",
        _PAIR,
        "Transport payload from src to dst, repetitions included.",
    ),
    "messages": Metric("dpuflow_flow_messages", "counter", _PAIR, "Messages from src to dst."),
    "retransmitted": Metric(
        "dpuflow_flow_retransmitted_packets",
        "counter",
        _PAIR,
        "Retransmitted packets: their bytes or PSN had been sent before.",
    ),
    "out_of_order": Metric(
        "dpuflow_flow_out_of_order_packets",
        "counter",
        _PAIR,
        "Packets that arrived ahead of one sent earlier (reordering).",
    ),
    "missing": Metric(
        "dpuflow_flow_missing_packets",
        "counter",
        _PAIR,
        "Packets acknowledged but never captured: capture loss.",
    ),
    "ecn_marked": Metric(
        "dpuflow_flow_ecn_marked_packets", "counter", _PAIR, "Packets from src to dst marked CE."
    ),
    "cnp": Metric(
        "dpuflow_flow_cnp_packets",
        "counter",
        _PAIR,
        "Congestion notifications from src, which ask dst to slow down.",
    ),
    "nak": Metric("dpuflow_flow_nak_packets", "counter", _PAIR, "NAKs from src: it missed packets from dst."),
    "rnr": Metric(
        "dpuflow_flow_rnr_nak_packets",
        "counter",
        _PAIR,
        "Receiver-not-ready NAKs from src: it had no receive posted.",
    ),
    "zero_window": Metric(
        "dpuflow_flow_zero_window_segments",
        "counter",
        _PAIR,
        "TCP segments of src with a zero window: it does not read.",
    ),
}

PFC_FRAMES: Final = Metric(
    "dpuflow_pfc_frames",
    "counter",
    ("sender", "priority"),
    "Pause frames captured, by the sender's MAC address; priority is empty for plain 802.3 pause.",
)
PFC_QUANTA: Final = Metric(
    "dpuflow_pfc_requested_quanta",
    "counter",
    ("sender", "priority"),
    "Sum of the pause times asked for, in quanta of 512 bit times.",
)
COLLECTIVES: Final = Metric(
    "dpuflow_collectives",
    "counter",
    ("group", "op", "algorithm"),
    "Collectives seen, by group and operation.",
)
COLLECTIVE_BYTES: Final = Metric(
    "dpuflow_collective_wire_bytes",
    "counter",
    ("group", "op"),
    "Payload of the messages of collectives, each once.",
)
DURATION: Final = Metric(
    "dpuflow_collective_duration_seconds",
    "histogram",
    ("group", "op"),
    "From the first packet of a collective to its last; whole collectives only.",
)
LATENESS: Final = Metric(
    "dpuflow_lateness_seconds",
    "histogram",
    _MEMBER,
    "How much later than the first of its group a peer entered a collective, where that is known exactly.",
)
LATENESS_BOUND: Final = Metric(
    "dpuflow_lateness_lower_bound_seconds",
    "histogram",
    _MEMBER,
    "The same for entries of which only a lower bound is known: it was at least this late.",
)
ENTRIES: Final = Metric(
    "dpuflow_entries",
    "counter",
    (*_MEMBER, "bound"),
    "Entries of a peer into collectives, by what its lateness is: exact, at_most, at_least, unobservable.",
)
LATE_ENTRIES: Final = Metric(
    "dpuflow_late_entries", "counter", _MEMBER, "Entries of a peer that were later than its group's noise."
)
CAUSED_WAIT: Final = Metric(
    "dpuflow_caused_wait_seconds",
    "counter",
    _MEMBER,
    "Time that the others of the group waited for a peer that came last, summed over them (rank-seconds).",
)
_WAY: Final = ("verb", "src", "dst")
TRANSFERS: Final = Metric(
    "dpuflow_transfers",
    "counter",
    _WAY,
    "Transfers of pages that src wrote into dst, or dst read from src (KV caches among them).",
)
TRANSFER_BYTES: Final = Metric("dpuflow_transfer_bytes", "counter", _WAY, "Bytes of their pages, each once.")
TRANSFER_PAGES: Final = Metric("dpuflow_transfer_pages", "counter", _WAY, "Their pages.")
TRANSFER_BUSY: Final = Metric(
    "dpuflow_transfer_busy_seconds",
    "counter",
    _WAY,
    "Time in which pages of theirs were under way; bytes over it are their rate.",
)
TRANSFER_WAIT: Final = Metric(
    "dpuflow_transfer_wait_seconds",
    "histogram",
    ("peer",),
    "How long a receiver that had nothing else to do waited before it went on, where it had waited.",
)
GROUP_INFO: Final = Metric(
    "dpuflow_group_info",
    "gauge",
    ("group", "kind", "size"),
    "1 for each group seen recently; kind is tp, dp, pp or ep.",
)
PEER_INFO: Final = Metric(
    "dpuflow_peer_info",
    "gauge",
    ("peer", "rank", "label"),
    "1 for each peer judged recently; rank and label from the rank map.",
)
VERDICT: Final = Metric(
    "dpuflow_peer_verdict",
    "gauge",
    ("peer", "verdict"),
    "1 for the verdict that holds of a peer, 0 for the others: on_time, late, intermittent, unknown.",
)
LATE_BY: Final = Metric(
    "dpuflow_peer_late_seconds",
    "gauge",
    ("peer", "bound"),
    "How late a peer is when it is late (median), as reports say it; bound: exact, at_least.",
)
STEP: Final = Metric(
    "dpuflow_step_seconds",
    "gauge",
    ("group", "kind"),
    "Median time of what a job repeats: a training step, a token (kind decode), a prompt (prefill).",
)
STEP_TAIL: Final = Metric(
    "dpuflow_step_tail_seconds", "gauge", ("group", "kind"), "99th percentile of the same time."
)
STEP_COLLECTIVES: Final = Metric(
    "dpuflow_step_collectives", "gauge", ("group", "kind"), "Operations of one endpoint that make a step."
)
TOKENS: Final = Metric(
    "dpuflow_tokens_per_second", "gauge", ("group", "kind"), "Tokens a second, where a decode was recognised."
)
WITHOUT: Final = Metric(
    "dpuflow_step_without_lateness_seconds",
    "gauge",
    ("peer",),
    "What a step would take without the peer's lateness.",
)
FINDINGS_ACTIVE: Final = Metric(
    "dpuflow_findings_active",
    "gauge",
    ("condition", "severity", "endpoint", "rank", "label", "runbook"),
    "Active findings, by the endpoint at fault (empty: the capture itself).",
)
FINDINGS: Final = Metric(
    "dpuflow_findings",
    "counter",
    ("condition", "severity"),
    "Findings opened; severity is that at the opening.",
)

BUILD_INFO: Final = Metric("dpuflow_build_info", "gauge", ("version",), "1, with the version of dpuflow.")
WINDOWS: Final = Metric("dpuflow_agent_windows", "counter", (), "Windows settled.")
LAST_WINDOW: Final = Metric(
    "dpuflow_agent_last_window_timestamp_seconds", "gauge", (), "End of the last settled window, Unix time."
)
LAG: Final = Metric("dpuflow_agent_lag_seconds", "gauge", (), "Now minus the end of what is settled.")
CPU: Final = Metric("dpuflow_agent_cpu_ratio", "gauge", (), "CPU in use, of one core.")
CPU_LIMIT: Final = Metric("dpuflow_agent_cpu_limit_ratio", "gauge", (), "CPU the agent may use, of one core.")
MEMORY_LIMIT: Final = Metric(
    "dpuflow_agent_memory_limit_bytes",
    "gauge",
    (),
    "Memory the agent may use; what it uses is process_resident_memory_bytes.",
)
RING: Final = Metric("dpuflow_agent_ring_used_ratio", "gauge", (), "Share of the capture ring that is full.")
CAPTURE: Final = Metric(
    "dpuflow_capture_packets",
    "counter",
    ("outcome",),
    "Packets that the interfaces handed over, by what became of each; seen is their sum.",
)
LOST: Final = Metric(
    "dpuflow_capture_lost_packets",
    "counter",
    ("kind",),
    "Packets known to be missing from the capture, by where they were lost.",
)
DEGRADED: Final = Metric(
    "dpuflow_agent_degraded", "gauge", (), "1 while the agent reduces detail to stay within its limits."
)
FIDELITY: Final = Metric(
    "dpuflow_agent_fidelity",
    "gauge",
    ("fidelity",),
    "1 for how traffic is captured now: packets, messages, sampled.",
)
FOLLOWED: Final = Metric(
    "dpuflow_agent_followed_ratio",
    "gauge",
    (),
    "Share of the pairs of hosts that is followed; below 1 while sampling.",
)
INTERFACE: Final = Metric(
    "dpuflow_agent_interface_captured",
    "gauge",
    ("interface",),
    "1 where an interface is being captured from, 0 where it is down or gone.",
)
HELD_MESSAGES: Final = Metric(
    "dpuflow_agent_held_messages", "gauge", (), "Messages held in memory for the next windows."
)
HELD_FLOWS: Final = Metric("dpuflow_agent_held_flows", "gauge", (), "Flows held in memory.")
HISTORY_BYTES: Final = Metric("dpuflow_agent_history_bytes", "gauge", (), "Size of the history on disk.")
HISTORY_OLDEST: Final = Metric(
    "dpuflow_agent_history_oldest_timestamp_seconds",
    "gauge",
    (),
    "Start of the oldest history kept, Unix time.",
)
HISTORY_WRITING: Final = Metric(
    "dpuflow_agent_history_writing",
    "gauge",
    (),
    "1 while history is written, 0 where it cannot be (disk full, say).",
)
CLOCK_STEPS: Final = Metric("dpuflow_agent_clock_steps", "counter", (), "Steps of the wall clock.")
GENERATION: Final = Metric(
    "dpuflow_agent_config_generation",
    "gauge",
    (),
    "Generation of the configuration: grows with each accepted reload.",
)
ERRORS: Final = Metric("dpuflow_agent_errors", "counter", ("kind",), "Failures of the agent's parts.")
MISSED: Final = Metric(
    "dpuflow_agent_missed_events",
    "counter",
    ("reader",),
    "Events lost as a part of the agent did not read them in time.",
)
NAMES: Final = Metric(
    "dpuflow_agent_label_names",
    "gauge",
    ("kind",),
    "Names that have series of their own: pairs, members, groups, senders, ways, receivers.",
)
NAMES_EVICTED: Final = Metric(
    "dpuflow_agent_label_names_evicted",
    "counter",
    ("kind",),
    "Names that gave up their series, having been idle.",
)

CLIENTS: Final = Metric("dpuflow_api_event_clients", "gauge", (), "Clients that listen to the event stream.")
REQUESTS: Final = Metric("dpuflow_api_requests", "counter", ("route", "status"), "HTTP requests answered.")
EVENTS_MISSED: Final = Metric(
    "dpuflow_api_events_missed",
    "counter",
    (),
    "Events that clients of the stream were too slow for; the stream says so to them.",
)

DELIVERIES: Final = Metric(
    "dpuflow_webhook_deliveries",
    "counter",
    ("webhook", "outcome"),
    "Notices: delivered, failed (after all tries), refused (no retry would help), dropped (queue full).",
)
RETRIES: Final = Metric("dpuflow_webhook_retries", "counter", ("webhook",), "Delivery retries.")
QUEUED: Final = Metric("dpuflow_webhook_queued", "gauge", ("webhook",), "Notices queued for delivery.")

METRICS: Final[tuple[Metric, ...]] = tuple(
    each
    for value in list(globals().values())
    for each in (value.values() if isinstance(value, dict) else (value,))
    if isinstance(each, Metric)
)
"""All of the above, in their order."""


def table() -> str:
    """The table of docs/metrics.md."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for each in METRICS:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        lines.append(f"| `{each.shown}` | {each.kind} | {labels} | {each.about} |")
    return "\n".join(lines)
