"""Headers that the snap length cut off -> messages, inferred where the protocol leaves no choice.

In: MESSAGE rows of one capture with their LINK rows, each flow's in stream order; a stretch of
bytes without a readable header is a run of "pieces", one a segment. Out: rows in which solved
stretches are messages. All inferred rows keep the flag HIDDEN; what stays unsolved stays a BURST.
``hidden_gloo`` solves Gloo's, ``ob1`` Open MPI's, ``hidden_tagged`` those of UCX and libfabric,
``hidden_nccl`` those of NCCL's sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.messages import ob1
from dpuflow.messages.hidden_gloo import resolve_gloo
from dpuflow.messages.hidden_nccl import resolve_nccl
from dpuflow.messages.hidden_tagged import resolve_tagged
from dpuflow.messages.matchbits import name_messages
from dpuflow.messages.stretches import Solved
from dpuflow.schema.rows import Framing

if TYPE_CHECKING:
    from dpuflow.messages.stretches import HiddenCounts
    from dpuflow.schema.tables import Rows


def resolve(rows: Rows, links: Rows, flows: Rows, room: int) -> tuple[Rows, HiddenCounts]:
    """All of it: the rows with what could be inferred (``rows`` is changed), and the counts.

    ``room``: how many messages may be inferred.
    """
    known = [Framing.GLOO, Framing.OB1, Framing.UCX, Framing.OFI, Framing.NCCL]
    framed = np.isin(flows["framing"][rows["flow"]], known)
    index = np.flatnonzero(framed)
    by_flow = index[np.argsort(rows["flow"][index], kind="stable")]
    cuts = np.flatnonzero(np.diff(rows["flow"][by_flow].astype(np.int64))) + 1
    orders = {int(rows["flow"][o[0]]): o for o in np.split(by_flow, cuts) if len(o)}
    solved = Solved(rows, links, room)
    framing = flows["framing"].tolist()
    for resolve_framing, framings in (
        (resolve_gloo, (Framing.GLOO,)),
        (ob1.resolve_ob1, (Framing.OB1,)),
        (resolve_tagged, (Framing.UCX, Framing.OFI)),
        (resolve_nccl, (Framing.NCCL,)),
    ):
        mine = {flow: order for flow, order in orders.items() if framing[flow] in framings}
        if mine:
            resolve_framing(rows, links, flows, mine, solved)
    rows, links = solved.applied()
    ob1.inherit(rows, links, flows)
    name_messages(rows, links, flows)
    return rows, solved.counts
