"""Bulk transfers in, findings about pages that get smaller out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.findings.case import SMALL_SHARE, Cost, make_finding
from dpuflow.findings.clients import FEWEST, TWICE
from dpuflow.findings.hosts import since_larger
from dpuflow.quantities import name_of, percent, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding
    from dpuflow.verdicts.bulk import Bulk


def find_smaller_pages(case: Case) -> Iterator[Finding]:
    """One finding for each way on which pages get smaller for good, and transfers slower for it."""
    ways: dict[tuple[int, int], list[Bulk]] = {}
    for each in case.inferred.bulk:
        if each.complete and not each.path:
            ways.setdefault((each.src, each.dst), []).append(each)
    for (src, dst), mine in ways.items():
        if len(mine) < TWICE * FEWEST:
            continue  # too few to tell since when
        pages = np.array([each.bytes / len(each.rows) for each in mine])
        since = since_larger(1 / pages)
        if since is None:
            continue
        took = np.array([each.busy_ns / max(each.bytes, 1) for each in mine])
        carried = np.array([each.bytes for each in mine], float)
        lost = float(((took[since:] - np.median(took[:since])) * carried[since:]).sum())
        share = lost / max(sum(each.busy_ns for each in mine), 1)
        if share < SMALL_SHARE:
            continue
        ends = case.result.endpoints
        yield make_finding(
            "pinned_memory_shortage",
            [src, dst],
            (mine[since].start_ns, mine[-1].end_ns),
            Cost(round(lost), min(share, 1.0)),
            0.6,
            f"Pages from {name_of(ends[src])} to {name_of(ends[dst])} shrank from"
            f" {size(int(np.median(pages[:since])))} to {size(int(np.median(pages[since:])))}, which costs"
            f" transfers {percent(min(share, 1.0))} of their time.",
        )
