"""Bulk transfers in, findings out: decoding that stands still while KV caches are on their way.

What a receiver waits for is the transfer; whose side held that up is another question: where most of the
wait went by. Before the first page it is the sender's side, after the last one the receiver's, between pages
with none under way it is who posts them. With pages under way it is the path where that shows loss, marks or
a slow pace, else the amount. A GPU never is blamed: whether a sender still computed shows in no packet.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.findings.case import SMALL_SHARE, Cost, make_finding
from dpuflow.findings.evidence import SHOWN, message_evidence
from dpuflow.findings.losses import FEWEST
from dpuflow.quantities import name_of
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.pages import IDLE, begin_ns, end_ns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding
    from dpuflow.verdicts.bulk import Bulk

_PATHS = {
    "lossy": "packets on it were retransmitted",
    "slow": "its pages take at least three times as long as on the other paths",
    "marked": "packets on it are ECN-marked",
}
_NETWORK_ADVICE = (
    "Check the path from {src} to {dst} before any GPU: negotiated rate, shaping, error and drop counters,"
    " ECN marks; the caches wait for it."
)
_ENGINE_ADVICE = (
    "Move caches layer by layer while the prompt is still computed, over more links or queue pairs, or make"
    " them smaller; decode ranks may take up other requests meanwhile."
)
_WHERE = {
    "sender": "lay before the first page",
    "posting": "between pages",
    "transfer": "with pages in flight",
    "receiver": "after the last one",
}
_SIDES = {
    "sender": (
        "The sender's side: most of the wait lay before the first page{asked}.",
        "Look at what comes before the transfer: prefill ranks that are too few or too slow, or caches that"
        " are handed on only when the whole prompt is computed (move them layer by layer).",
    ),
    "posting": (
        "The {poster}'s side: most of the wait went by between pages, with none in flight.",
        "Look at the transfer engine at the {poster}: more pages in flight at once, more queue pairs or"
        " threads, larger pages.",
    ),
    "transfer": (
        "Most of the wait went by with pages in flight; they moved as fast as on the other paths.",
        _ENGINE_ADVICE,
    ),
    "receiver": (
        "The receiver's side: most of the wait came after the last page.",
        "Look at the receiver: how it learns that a cache is there (polling, scheduling), and what it does"
        " with it before its next collective.",
    ),
}


@dataclass(frozen=True)
class Wait:
    """Where a receiver's wait for one transfer went by, ns."""

    sender: int  # before the first page
    posting: int  # between pages, with none under way
    transfer: int  # with pages under way
    receiver: int  # after the last page, until its next collective


def wait_of(each: Bulk, first_ns: int) -> Wait:
    """The parts of the wait for ``each``, whose receiver entered its next collective at ``first_ns``."""
    begin = max(each.start_ns, each.idle_ns)
    span = max(each.end_ns - begin, 0)
    # What of it went by before the receiver stood idle is taken to be like the rest.
    under_way = round(span * each.busy_ns / max(each.end_ns - each.start_ns, 1))
    since = min(each.left_ns, begin) if each.left_ns != NEVER else begin
    return Wait(begin - since, span - under_way, under_way, max(first_ns - begin - span, 0))


def stood_ns(case: Case, each: Bulk) -> int:
    """How long the receiver of ``each`` stood idle while it was moved.

    Short pauses between pages belong to that: an engine with few of them under way makes them, or what else
    its port sends. In long ones the sender had none to move: layers of a prompt that it still computed.
    """
    begin, end = begin_ns(case.exchanges, each.rows), end_ns(case.exchanges, each.rows)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    until = np.maximum.accumulate(end)[:-1]
    # As long as a page takes, alone and behind another.
    usual = float((end - begin).min()) + float(median_of(np.diff(np.sort(end))))
    quiet = (begin[1:] - until > IDLE * usual) & (begin[1:] > each.idle_ns)
    paused = begin[1:] - np.maximum(until, each.idle_ns)
    return max(each.end_ns - max(each.idle_ns, each.start_ns) - int(paused[quiet].sum()), 0)


def find_kv_bottlenecks(case: Case) -> Iterator[Finding]:
    """One finding for each way that the network troubles, and one for all others together."""
    ways: dict[tuple[int, int] | None, list[Bulk]] = {}
    waits: dict[tuple[int, int] | None, list[Wait]] = {}
    for each, told in zip(case.inferred.bulk, case.result.transfers, strict=True):
        if each.waited and each.last and each.cache and told.first_token_ns is not None:
            way = (each.src, each.dst) if each.path else None
            ways.setdefault(way, []).append(each)
            waits.setdefault(way, []).append(wait_of(each, told.first_token_ns))
    for way, mine in ways.items():
        receivers = sorted({each.dst for each in mine})
        stood = [stood_ns(case, each) for each in mine]
        cost = Cost(sum(stood), sum(stood) / (case.span_ns(receivers) * len(receivers)))
        if len(mine) >= FEWEST and cost.share >= SMALL_SHARE:
            yield _finding(case, mine, waits[way], stood, cost)


def _finding(case: Case, mine: list[Bulk], waits: list[Wait], stood: list[int], cost: Cost) -> Finding:
    """Of transfers with the parts of their waits, and for how long their receivers stood idle, ns."""
    from statistics import median

    sources, receivers = sorted({each.src for each in mine}), sorted({each.dst for each in mine})
    endpoints, path = case.result.endpoints, mine[0].path
    senders, waiting = (_listed([name_of(endpoints[end]) for end in ends]) for ends in (sources, receivers))
    stood_ms = median(stood) / 1e6
    rate = median(8 * each.bytes / max(each.busy_ns, 1) for each in mine)
    parts = {part.name: sum(getattr(wait, part.name) for wait in waits) for part in fields(Wait)}
    because, advice = _why(max(parts, key=parts.__getitem__), mine[0].read, path)
    if path:
        advice = advice.format(src=name_of(endpoints[sources[0]]), dst=name_of(endpoints[receivers[-1]]))
    total = max(sum(parts.values()), 1)
    total_ms = sum(parts.values()) / len(mine) / 1e6
    shares = ", ".join(f"{100 * part / total:.0f} % {_WHERE[name]}" for name, part in parts.items())
    worst = sorted(zip(stood, mine, strict=True), key=lambda pair: -pair[0])[:SHOWN]
    return make_finding(
        "kv_transfer_bottleneck",
        [*receivers, *sources],
        (min(each.idle_ns for each in mine), max(each.end_ns for each in mine)),
        cost,
        0.9 if path else 0.8,
        f"{waiting} stood idle {len(mine)} times while pages"
        f" (likely KV caches) came from {senders}: {stood_ms:.2f} ms in the"
        f" median, {100 * cost.share:.1f} % of the time, at {rate:.1f} Gbit/s."
        f" Of {total_ms:.2f} ms between two collectives (mean) {shares}. {because}",
        advice=advice,
        alternatives=[
            "memory or PCIe of either host that cannot keep up with the link",
            "a transfer engine that keeps too few pages in flight",
            *([] if path else ["a link shared with other traffic"]),
        ],
        evidence=message_evidence(case.captures, case.joined, sorted(each.message for _, each in worst)),
    )


def _why(side: str, reads: bool, path: str | None) -> tuple[str, str]:
    """What the wait is due to, and what to do: by the side that took most of it and the path's trouble."""
    said, advice = _SIDES[side]
    asked = " was asked for: the sender was not ready, or the receiver asked late" if reads else " left"
    poster = "receiver" if reads else "sender"
    because, advice = said.format(asked=asked, poster=poster), advice.format(poster=poster)
    if path and side in ("sender", "receiver"):
        return f"{because} Besides, {_PATHS[path]}.", advice
    return (f"The path is at fault: {_PATHS[path]}.", _NETWORK_ADVICE) if path else (because, advice)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
