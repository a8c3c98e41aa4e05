"""First acts that came too long after their input to have waited for it, told from all those of a rank.

In: entries, and what may have waited. Out: rows that had not (docs/inference/lateness.md, "Overdue").

One long delay proves little where hosts are busy: some reactions take milliseconds. But a rank that had been
waiting mostly acts as quickly as its peers do. So each delay is given the share of known reactions that
are as long (its p-value); what part of a rank's acts had waited is told from how many of its delays are
ordinary (Storey, "A direct approach to false discovery rates", 2002); and the longest delays are taken for
entries as far as at most one in a hundred of them should be wrong (Benjamini and Hochberg, 1995).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.entries.rules import FEWEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.rows import Entries

WRONG_SHARE: Final = 0.01
"""Of the acts taken for entries, the share that may have waited after all."""
ORDINARY: Final = 0.5
"""p-values above this are ordinary: half of all waiting acts have such (Storey's lambda)."""


def overdue(
    entries: Entries, answers: NDArray[np.bool_], sends: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Rows that had not waited. ``answers`` and ``sends``: rows that may have, by what their first act was;
    ``of_row``: each row's group.

    What is known of reactions: how long hosts take from a grant to its data (for an answer, which needs no
    more), from an input to a send that had waited for it, both together, and from the inputs of the group's
    other ranks to their first acts. Each may hold more than a reaction, late entries above all, so the one
    counts that makes a delay look the rarest.
    """
    out = np.zeros(len(answers), bool)
    both = answers | sends
    if not both.any():
        return out
    begun = np.maximum(entries.enter_ns - entries.signs.unmoved_ns, entries.since_ns)
    delay = np.where(both, entries.enter_ns - begun, 0)  # not while it was in what came before
    of_waited = of_row[entries.reactions.waited[0]]
    for mine, granted in ((answers, entries.reactions.granted_data_ns), (sends, None)):
        for each in np.unique(of_row[mine]).tolist():
            group = np.flatnonzero(mine & (of_row == each))
            waited = entries.reactions.waited[1][of_waited == each]
            known = [waited if len(waited) >= FEWEST else entries.reactions.waited[1]]
            known += [] if granted is None else [granted, np.concatenate([known[0], granted])]
            ends = entries.endpoint[group]
            for endpoint in np.unique(ends).tolist():
                rows = group[ends == endpoint]
                found = [*known, delay[group[ends != endpoint]]]
                p = rarity(delay[rows], [values for values in found if len(values) >= FEWEST])
                out[rows] = discoveries(p, WRONG_SHARE)
    return out


def rarity(delays: NDArray[np.int64], known: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """For each delay the share of values that are at least as long, itself counted among them; the least over
    all sets of ``known`` values, 1 without any.
    """
    p = np.ones(len(delays))
    for values in known:
        longer = len(values) - np.searchsorted(np.sort(values), delays, side="left")
        p = np.minimum(p, (longer + 1) / (len(values) + 1))
    return p


def discoveries(p: NDArray[np.float64], wrong_share: float) -> NDArray[np.bool_]:
    """Which hypotheses of p-values ``p`` to reject so that at most ``wrong_share`` of these should be true.

    Benjamini and Hochberg's procedure, with the share of true ones as of Storey's estimate (one more counted,
    so that it is never 0).
    """
    count = len(p)
    if not count:
        return np.zeros(0, bool)
    true = min(1.0, (1 + int((p > ORDINARY).sum())) / (count * (1 - ORDINARY)))
    order = np.argsort(p, kind="stable")
    good = np.flatnonzero(true * p[order] * count <= wrong_share * np.arange(1, count + 1))
    out = np.zeros(count, bool)
    out[order[: good[-1] + 1 if len(good) else 0]] = True
    return out
