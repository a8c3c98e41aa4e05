"""Entries in; the same with leaves as the adapters' acknowledgments tell them, for MPI over RoCE, out.

A message is complete when its receiver's adapter acknowledges it (InfiniBand volume 1, 9.7.5). Where a
processor does the adapter's work, as in Soft-RoCE, packets lie in its queue before that for as long as it is
busy: a rank that seems to have had all it needed still waits for its own host. Counted as its own work, that
would make late ranks of busy hosts. libfabric's sends end with their ACK, too: the call waits for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.relative import previous_row
from dpuflow.schema import NEVER, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.lateness.entries import Entries
    from dpuflow.ordering import Picked

_FAR = np.iinfo(np.int64).max


def as_acknowledged(
    entries: Entries, picked: Picked, sender: NDArray[np.int64], receiver: NDArray[np.int64]
) -> Entries:
    """Entries with ``leave_ns`` and ``idle_ns`` no sooner than the ACKs that the library waits for.

    ``sender``, ``receiver``: the rows of Entries of each of the exchanges ``picked``. An ACK may stand for
    several messages and leave after the rank has gone on: who enters its next collective has left. What
    bounds entries from below (``since_ns``) rests on arrivals and stays as it is.
    """
    wire = picked["wire"]
    mpi = (picked["op"] != Op.UNKNOWN) & (wire >= Wire.ROCE_SEND) & (wire <= Wire.ROCE_SEND_IMM)
    if not mpi.any():
        return entries
    leave = entries.leave_ns.copy()
    np.maximum.at(leave, receiver[mpi], picked["taken_ns"][mpi])
    holds = mpi & ((picked["flags"] & MessageFlag.HOLDS_SENDER) != 0)
    np.maximum.at(leave, sender[holds], picked["acked_ns"][holds])
    last = previous_row(entries)
    rows = np.flatnonzero((last >= 0) & (entries.enter_ns != NEVER))
    limit = np.full(len(leave), _FAR)
    limit[last[rows]] = entries.enter_ns[rows]
    leave = np.maximum(entries.leave_ns, np.minimum(leave, limit))
    return replace(entries, leave_ns=leave, idle_ns=np.maximum(entries.idle_ns, leave))
