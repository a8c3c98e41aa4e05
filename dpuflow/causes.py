"""Why a rank was late: its own doing, the network's, or handed on by a peer.

A rank enters a collective after it has left the one before and done its work. Its own time is what
lies between. A rank whose own time is no longer than its peers' was late because it left late: it
inherited the lateness. Where the collective it left shows retransmissions on its own messages, or
messages that took much longer on the wire than its peers', the network made it late.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness import previous_leave, previous_row
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.judgement import Charges
    from dpuflow.lateness import Entries, Relative

NONE, COMPUTE, NETWORK = range(3)
CAUSES = ("none", "compute", "network")


def causes_of(
    entries: Entries, relative: Relative, charges: Charges, slow: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """For each row of Entries an index into CAUSES; ``slow`` marks rows served by a slow link.

    NONE also stands for lateness that a peer handed on: there is nothing to find at this rank.
    """
    causes = np.zeros(len(entries.endpoint), np.int64)
    rows = np.flatnonzero(charges.late)
    if not len(rows):
        return causes
    before = previous_leave(entries)
    own = np.where((before != NEVER) & (entries.enter_ns != NEVER), entries.enter_ns - before, NEVER)
    excess = _excess(own, entries)[rows]
    lateness, noise = relative.lateness_ns[rows], charges.noise_ns[rows]
    # Without a collective before, nothing was there to wait for.
    working = (excess == NEVER) | (2 * excess >= lateness) | (excess > noise)
    last = previous_row(entries)[rows]
    troubled = (last >= 0) & ((entries.retransmitted[last] > 0) | slow[last])
    causes[rows] = np.where(working & (excess != NEVER), COMPUTE, np.where(troubled, NETWORK, NONE))
    causes[rows[excess == NEVER]] = COMPUTE
    return causes


def _excess(own: NDArray[np.int64], entries: Entries) -> NDArray[np.int64]:
    """How much longer each rank worked between two collectives than the quickest of its group, ns."""
    far = np.iinfo(np.int64).max
    least = np.minimum.reduceat(np.where(own != NEVER, own, far), entries.offsets[:-1])
    least = np.repeat(least, np.diff(entries.offsets))
    return np.where((own != NEVER) & (least != far), own - least, NEVER)
