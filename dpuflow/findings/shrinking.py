"""Bulk transfers in, findings about pages that get smaller out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import classes, first_alike, median_of
from dpuflow.findings.case import SMALL_SHARE, Cost, make_finding
from dpuflow.findings.clients import FEWEST, TWICE
from dpuflow.findings.hosts import since_larger
from dpuflow.quantities import name_of, percent, size
from dpuflow.verdicts.bulk import columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding


def find_smaller_pages(case: Case) -> Iterator[Finding]:
    """One finding for each way on which pages get smaller for good, and transfers slower for it."""
    bulk = case.inferred.bulk
    src, dst, nbytes, complete, *trouble = columns(
        bulk, "src", "dst", "bytes", "complete", "retransmitted", "ecn_marked", "slow"
    )
    page_bytes = nbytes / np.fromiter((len(each.rows) for each in bulk), np.int64, len(bulk))
    whole = np.flatnonzero((complete > 0) & ~np.any(trouble, axis=0))
    for places in classes(first_alike(src[whole], dst[whole])):
        pages = page_bytes[whole[places]]
        if len(pages) < TWICE * FEWEST or pages.max() <= TWICE * pages.min():
            continue  # too few to tell since when, or no smaller
        mine = [bulk[number] for number in whole[places].tolist()]
        since = since_larger(1 / pages)
        if since is None:
            continue
        took = np.array([each.busy_ns / max(each.bytes, 1) for each in mine])
        carried = np.array([each.bytes for each in mine], float)
        lost = float(((took[since:] - median_of(took[:since])) * carried[since:]).sum())
        share = lost / max(sum(each.busy_ns for each in mine), 1)
        if share < SMALL_SHARE:
            continue
        ends = case.result.endpoints
        yield make_finding(
            "pinned_memory_shortage",
            [mine[0].src, mine[0].dst],
            (mine[since].start_ns, mine[-1].end_ns),
            Cost(round(lost), min(share, 1.0)),
            0.6,
            f"Pages from {name_of(ends[mine[0].src])} to {name_of(ends[mine[0].dst])} shrank from"
            f" {size(int(median_of(pages[:since])))} to {size(int(median_of(pages[since:])))}, which costs"
            f" transfers {percent(min(share, 1.0))} of their time.",
        )
