"""Captures in, findings about what they lack out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.findings.case import Cost, make_finding
from dpuflow.findings.evidence import SHOWN
from dpuflow.findings.losses import LOSS_SHARE
from dpuflow.results import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding


def find_capture_losses(case: Case) -> Iterator[Finding]:
    """What the capture file says it dropped, and what was acknowledged yet never captured."""
    for tables in case.captures:
        info = tables.info
        # Of a sample nearly all is missing, and that is no loss.
        missing = int(tables.flows["missing"].sum()) if len(tables.flows) and info.sampled is None else 0
        lost = info.lost_packets or 0
        if not lost and not missing:
            continue
        share = max(lost, missing) / max(info.packets + max(lost, missing), 1)
        parts = [f"{info.vantage} lost {lost} packets while capturing ({share:.2%})"] if lost else []
        if missing:
            what = "it never captured" if lost else f"{info.vantage} never captured"
            parts.append(f"{missing} gaps in streams were acknowledged although {what} what fills them")
        lacking = "tcp.analysis.ack_lost_segment || infiniband"
        shown = Evidence(info.id, (1, info.packets), lacking, info.unopenable)
        yield make_finding(
            "capture_loss",
            [],
            (None, None),
            Cost(None, 0.0),
            1.0 if lost else 0.8,
            f"{'; '.join(parts)}.",
            severity="warning" if share > LOSS_SHARE else "info",  # of what else is told, not of the job
            advice="Capture with a shorter snap length or a larger buffer; figures from here are less sure.",
            alternatives=[] if lost else ["traffic that took another interface of the same node"],
            evidence=[shown] if info.packets else [],
        )


def find_untied(case: Case) -> Iterator[Finding]:
    """One finding for all captures whose messages are left out."""
    captures = case.joined.captures
    untied = [
        clock.capture
        for clock in case.joined.clocks
        if clock.method == "none"
        and captures[clock.capture].sampled is None
        and len(case.captures[clock.capture].messages)  # of none nothing is left out
    ]
    if not untied:
        return
    names = [captures[capture].vantage for capture in untied]
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    yield make_finding(
        "clock_untied",
        [],
        (None, None),
        Cost(None, 0.0),
        1.0,
        f"The clock of {shown} is tied to no other: its messages are left out."
        if len(names) == 1
        else f"The clocks of {shown} are tied to no other: their messages are left out.",
        severity="warning",
        advice="Capture traffic between such a node and another that is captured too.",
        evidence=[
            Evidence(capture, (1, captures[capture].packets), "frame", captures[capture].unopenable)
            for capture in untied
            if captures[capture].packets
        ],
    )
