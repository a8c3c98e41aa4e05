"""Ranks of one group that run another operation than the others, or the same one with other sizes.

In: collectives, entries and exchanges of an operation that was never finished. Out: which ranks are apart,
and what they run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.entries import Rule
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts import Inferred

SLICES: Final = 2
"""Messages of a ring's chunk on one connection at most: NCCL cuts a chunk into two (``ALLREDUCE_CHUNKSTEPS``
over ``ALLREDUCE_SLICESTEPS``, src/include/collectives.h), Gloo keeps two segments on their way."""


class Apart(NamedTuple):
    """Who runs what (the rest of a sentence), and who else runs what most do; nobody where half differ."""

    endpoints: list[int]
    what: str
    others: list[int]


def other_operation(
    inferred: Inferred,
    instances: Sequence[Instance],
    missing: Sequence[int],
    after_ns: int,
    op: Op,
    members: Sequence[int],
) -> Apart | None:
    """Of the ranks ``missing`` from an ``op`` those that began another one after ``after_ns`` (ns on the
    reference clock), and never finished it. Beside them are ``members`` of the group."""
    entries = inferred.entries
    for other, instance in enumerate(instances):
        rows = np.arange(*entries.offsets[other : other + 2])
        acted = rows[(entries.rule[rows] != Rule.UNSEEN) & (entries.enter_ns[rows] > after_ns)]
        apart = [end for end in entries.endpoint[acted].tolist() if end in missing]
        alone = instance.op != Op.SEND_RECV and not entries.whole[rows[0]]
        if apart and alone and instance.op != op:
            return Apart(apart, instance.op.token, [end for end in members if end not in apart])
    return None


def other_sizes(before: Rows, rows: Rows, members: Sequence[int]) -> Apart | None:
    """Ranks whose messages of an operation are all of other sizes than most ranks', where those of the one
    ``before`` it were alike; all of them where half stand against half. Both are EXCHANGE rows. Ranks, too,
    that send larger ones than anybody did in the one ``before`` while most go on with its sizes.

    One rank alone may have less to send: a ring's last chunk is what is left of the buffer, and whose chunk
    that is passes on whole ones only after it. Where all ``members`` sent, they would have gone on.
    """
    sent, known = _sizes(rows), {size for sizes in _sizes(before).values() for size in sizes}
    first = {end: sizes[0] for end, sizes in sent.items()}
    larger = sorted(end for end, size in first.items() if size > max(known, default=size))
    alike = sorted(end for end, sizes in sent.items() if known.issuperset(sizes))
    if larger and len(larger) < len(alike) == len(sent) - len(larger):
        at_most = f"{max(known):,}{' or less' if len(known) > 1 else ''}"
        return Apart(larger, f"messages of {first[larger[0]]:,} bytes instead of {at_most}", alike)
    usual = Counter(first.values()).most_common(2)
    if len(usual) < 2 or len({sizes[0] for sizes in _sizes(before).values()}) != 1:
        return None
    (common, most), (_, second) = usual
    known = {size for end, sizes in sent.items() if first[end] == common for size in sizes}
    apart = sorted(end for end, sizes in sent.items() if known.isdisjoint(sizes))
    least = [end for end, size in first.items() if size == min(first.values())]
    few = len(least) == 1 and _most_on_a_connection(rows, least[0]) <= SLICES
    if not apart or (few and not sent.keys() >= set(members)):
        return None
    if most == second:
        return Apart(sorted(first), f"messages of {common:,} and of {usual[1][0]:,} bytes", [])
    what = f"messages of {first[apart[0]]:,} bytes instead of {common:,}"
    return Apart(apart, what, sorted(first.keys() - set(apart)))


def _sizes(rows: Rows) -> dict[int, list[int]]:
    """Bytes of the messages that each rank sent, in order; of none that are empty."""
    rows = _data(rows)
    rows = rows[np.argsort(rows["data_ns"], kind="stable")]
    found: dict[int, list[int]] = {}
    for src, nbytes in zip(rows["src"].tolist(), rows["bytes"].tolist(), strict=True):
        found.setdefault(src, []).append(nbytes)
    return found


def _data(rows: Rows) -> Rows:
    kept: Rows = rows[(rows["data_ns"] != NEVER) & (rows["bytes"] > 0)]
    return kept


def _most_on_a_connection(rows: Rows, end: int) -> int:
    rows = _data(rows)
    return int(np.unique(rows["connection"][rows["src"] == end], return_counts=True)[1].max(initial=0))
