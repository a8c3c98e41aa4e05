"""Which finding explains which: one incident is one finding, and no cause is cheaper than what it does."""

from __future__ import annotations

import pytest

from dpuflow.findings.build import explained
from dpuflow.findings.case import Cost, make_finding
from dpuflow.results import Finding


def of(condition: str, share: float | None, endpoints: tuple[int, ...] = (0,)) -> Finding:
    cost = Cost(None, 0.0) if share is None else Cost(round(share * 1e9), share)
    return make_finding(condition, endpoints, (0, 1_000), cost, 0.9, condition)


@pytest.mark.parametrize(
    ("cause", "effect", "told"),
    [
        (of("egress_backlog", 0.05), of("admission_backlog", 0.08), ["egress_backlog"]),
        (of("egress_backlog", 0.05), of("admission_backlog", 0.8), ["egress_backlog", "admission_backlog"]),
        (of("packet_loss", 0.2, (0, 2)), of("kv_transfer_bottleneck", 0.3, (2, 0)), ["packet_loss"]),
        (
            of("packet_loss", 0.004, (0, 2)),
            of("kv_transfer_bottleneck", 0.02, (2, 0)),
            ["packet_loss", "kv_transfer_bottleneck"],
        ),
        (of("straggler", 0.5), of("credit_starvation", 0.02), ["straggler"]),
        (of("straggler", 0.02), of("credit_starvation", 0.5), ["straggler", "credit_starvation"]),
        (of("straggler", 0.5, (1,)), of("credit_starvation", 0.02), ["straggler", "credit_starvation"]),
        (of("load_skew", 0.02), of("straggler", 0.3), ["load_skew"]),
        (of("early_completion", 0.1), of("admission_backlog", 0.5), ["early_completion"]),
        (of("session_skew", None), of("admission_backlog", 0.3), ["session_skew"]),
        (of("slow_link", None), of("packet_loss", 0.02, (0, 2)), ["slow_link", "packet_loss"]),
    ],
)
def test_a_cause_costs_about_as_much_as_what_it_does(
    cause: Finding, effect: Finding, told: list[str]
) -> None:
    cause.consists_of = []
    assert [each.condition for each in explained([cause, effect])] == told
    assert [part.condition for part in cause.consists_of] == ([] if len(told) > 1 else [effect.condition])
