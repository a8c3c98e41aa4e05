"""Bulk transfers in, findings out: decoding that stands still while KV caches are on their way.

What a receiver waits for is the transfer; who is to blame is another question: the path where it shows loss,
marks or a slow pace, else how the caches are moved. A GPU never is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.findings.network import CRITICAL_SHARE, FEWEST, SHOWN, SMALL_SHARE, message_evidence
from dpuflow.results import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.inference.bulk import Bulk
    from dpuflow.results import Analysis
    from dpuflow.tables import CaptureTables, Joined

_PATHS = {
    "lossy": "packets of it came again",
    "slow": "its pages take three times as long as on the other ways, or longer",
    "marked": "packets of it carry congestion marks",
}
_NETWORK_ADVICE = (
    "Check the path from {src} to {dst} before any GPU: negotiated rate, shaping, error and drop counters,"
    " queues that mark; the caches wait for it."
)
_ENGINE_ADVICE = (
    "Move caches layer by layer while the prompt is still computed, over more links or queue pairs, or make"
    " them smaller; decode ranks may take up other requests meanwhile."
)


def find_kv_bottlenecks(
    captures: Sequence[CaptureTables], joined: Joined, bulk: Sequence[Bulk], result: Analysis
) -> Iterator[Finding]:
    """One finding for each way that the network troubles, and one for all others together."""
    from statistics import median

    waited = [each for each in bulk if each.waited and each.last and each.cache]
    ways: dict[tuple[int, int] | None, list[Bulk]] = {}
    for each in waited:
        ways.setdefault((each.src, each.dst) if each.path else None, []).append(each)
    span_ns = max(joined.end_ns - joined.start_ns, 1)
    for way, mine in ways.items():
        receivers = sorted({each.dst for each in mine})
        share = sum(each.exposed_ns for each in mine) / (span_ns * len(receivers))
        if len(mine) < FEWEST or share < SMALL_SHARE:
            continue
        sources = sorted({each.src for each in mine})
        names = [result.endpoints[end].address for end in (*sources, *receivers)]
        exposed_ms = median(each.exposed_ns for each in mine) / 1e6
        rate = median(8 * each.bytes / max(each.busy_ns, 1) for each in mine)
        path = mine[0].path if way is not None else None
        because = f" The path is at fault: {_PATHS[path]}." if path else ""
        worst = sorted(mine, key=lambda each: -each.exposed_ns)[:SHOWN]
        yield Finding(
            id=0,
            condition="kv_transfer_bottleneck",
            runbook="docs/report.md#kv_transfer_bottleneck",
            endpoints=[*receivers, *sources],
            start_ns=min(each.idle_ns for each in mine),
            end_ns=max(each.end_ns for each in mine),
            severity="critical" if path and share >= CRITICAL_SHARE else "warning",
            confidence=0.9 if path else 0.8,
            summary=(
                f"{_listed(names[len(sources) :])} stood idle {len(mine)} times while pages"
                f" (likely KV caches) came from {_listed(names[: len(sources)])}: {exposed_ms:.2f} ms in the"
                f" median, {100 * share:.1f} % of the time, at {rate:.1f} Gbit/s.{because}"
            ),
            advice=_NETWORK_ADVICE.format(src=names[0], dst=names[-1]) if path else _ENGINE_ADVICE,
            alternatives=[
                "memory or PCIe of either host that cannot keep up with the link",
                "a transfer engine that keeps too few pages under way",
                *([] if path else ["a link shared with other traffic"]),
            ],
            evidence=message_evidence(captures, joined, sorted(each.message for each in worst)),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
