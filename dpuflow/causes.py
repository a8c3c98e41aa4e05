"""Why a rank was late: its own doing, the network's, or handed on by a peer.

A rank enters a collective after it has left the one before and done its work. Its own time is what
lies between. A rank whose own time is no longer than its peers' was late because it left late: it
inherited the lateness. Where the collective it left shows retransmissions on its own messages, or
it has a link that is slow (``links``), the network made it late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness import against_others, previous_row
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.judgement import Charges
    from dpuflow.lateness import Entries, Relative

NONE, COMPUTE, NETWORK, UNKNOWN = range(4)
CAUSES = ("none", "compute", "network", "unknown")


@dataclass
class Causes:
    """Per row of Entries: an index into CAUSES, and how much longer than its peers the rank worked.

    NONE also stands for lateness that a peer handed on: there is nothing to find at this rank.
    ``excess_ns`` is NEVER where there is nothing to compare: the rank was in no collective before, or
    came from a point-to-point transfer, which its peers leave at other times by design (pipelines).
    """

    cause: NDArray[np.int64]
    excess_ns: NDArray[np.int64]


def causes_of(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    charges: Charges,
    slow: NDArray[np.bool_],
) -> Causes:
    """Why each rank was late; ``slow`` marks rows whose endpoint has a slow link."""
    last = previous_row(entries)
    transfer = np.array([i.op == Op.SEND_RECV for i in instances], bool)
    staged = (last >= 0) & transfer[entries.collective[last]] if len(last) else last >= 0
    # Whether a call returns before its last data has left the node depends on the library: a rank is
    # blamed only if it worked longer by either reckoning.
    excess = np.minimum(_excess(entries, last, entries.leave_ns), _excess(entries, last, entries.idle_ns))
    excess[staged] = NEVER
    known = excess != NEVER
    working = known & ((2 * excess >= relative.lateness_ns) | (excess > charges.noise_ns))
    working |= last < 0  # nothing was there to wait for
    troubled = (last >= 0) & ((entries.retransmitted[last] > 0) | slow[last])
    causes = np.where(working, COMPUTE, np.where(troubled, NETWORK, np.where(known, NONE, UNKNOWN)))
    return Causes(np.where(charges.late, causes, NONE), excess)


def _excess(entries: Entries, last: NDArray[np.int64], left_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much longer each rank worked between two collectives than the others of its group, ns."""
    known = (last >= 0) & (entries.enter_ns != NEVER) & (left_ns[last] != NEVER)
    own = np.where(known, entries.enter_ns - left_ns[last], NEVER)
    return np.where(known, against_others(entries, own, known), NEVER).astype(np.int64)
