"""Why a rank was late: its own doing, the network's, or not told.

A rank enters a collective after it has left the one before and done its work. If it left late,
because data reached it late, that lateness is inherited and not its own. Network evidence
(retransmissions, ECN marks) on the exchange it waited for names the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness import previous_leave
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.judgement import Charges
    from dpuflow.lateness import Entries, Relative
    from dpuflow.tables import Rows


def causes_of(
    exchanges: Rows,
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    charges: Charges,
) -> list[str]:
    """For each row of Entries: compute, network, none or unknown."""
    causes = np.full(len(entries.endpoint), "none", object)
    late = charges.late
    if not late.any():
        return [str(c) for c in causes]
    before = previous_leave(entries)
    own = np.where(before != NEVER, entries.enter_ns - before, NEVER)
    own_excess = _excess(own, entries)
    troubled = _previous_trouble(entries)
    del exchanges, instances
    for row in np.flatnonzero(late).tolist():
        if own_excess[row] == NEVER:
            causes[row] = "unknown" if before[row] != NEVER else "compute"
        elif own_excess[row] > charges.noise_ns[row] or 2 * own_excess[row] >= relative.lateness_ns[row]:
            causes[row] = "compute"
        else:
            causes[row] = "network" if troubled[row] else "unknown"
    return [str(c) for c in causes]


def _excess(own: NDArray[np.int64], entries: Entries) -> NDArray[np.int64]:
    """How much longer each rank worked between two collectives than the quickest of its group, ns."""
    starts = entries.offsets[:-1]
    far = np.iinfo(np.int64).max
    least = np.minimum.reduceat(np.where(own != NEVER, own, far), starts)
    least = np.repeat(least, np.diff(entries.offsets))
    return np.where((own != NEVER) & (least != far), own - least, NEVER)


def _previous_trouble(entries: Entries) -> NDArray[np.bool_]:
    """Whether packets to or from the rank were sent again in the collective it was in before."""
    order = np.lexsort((entries.collective, entries.endpoint))
    trouble = np.zeros(len(order), bool)
    same = entries.endpoint[order][1:] == entries.endpoint[order][:-1]
    trouble[order[1:][same]] = entries.retransmitted[order[:-1][same]] > 0
    return trouble
