"""Lines of log: a finding that changed, how the agent fares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.schema.ring import LOSSES

if TYPE_CHECKING:
    from dpuflow.agent.board import FindingState, Health
    from dpuflow.agent.log import Log


def tell(log: Log, state: FindingState) -> None:
    """One line for a finding that changed."""
    fields = {
        "id": state.id, "condition": state.condition, "addresses": list(state.addresses),
        "severity": state.severity, "since_ns": state.since_ns, "active": state.active,
    }  # fmt: skip
    if not state.active:
        log.info("finding_closed", f"over: {state.condition} {state.id}", **fields)
        return
    say = log.info if state.severity == "info" else log.warning
    say("finding", f"{state.severity}: {state.condition} {state.id}: {state.finding.summary}", **fields)


def in_words(health: Health) -> str:
    """How the agent fares, in a line."""
    lost = sum(health.losses.get(name, 0) for name in LOSSES)
    return (
        f"up {health.uptime_s:.0f} s, {health.cpu_share:.1%} of a core, {health.rss_bytes >> 20} MiB,"
        f" {health.lag_s:.1f} s behind, {health.packet_rate:.0f} packets/s, {health.message_rate:.0f}"
        f" messages/s, {lost} lost, {health.fidelity}"
    )
