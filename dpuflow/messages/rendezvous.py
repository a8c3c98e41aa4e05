"""RDMA that an MPI library does for a rendezvous: the READs or WRITEs of each offer get its name and number.

The sender offers data that lies at an address of its own, and the receiver READs it there; or the receiver
answers with an address of its own (a grant, which repeats the offer's id), and the sender WRITEs there. RETHs
name the addresses (InfiniBand volume 1, 9.3). So a READ belongs to the last offer of its address before it, a
WRITE to the last grant of its address, and what goes on where the one before it ended belongs to the same.
What tells the sender that its data was read repeats the offer's id, too.
Sources of the libraries' headers: ``sends``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.schema.rows import NONE32, Op, Role, Wire
from dpuflow.wire.headers import PSN_MASK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


class Said(NamedTuple):
    """Offers, grants and what says that an offer was read, as parallel arrays."""

    row: Ints  # of MESSAGE
    address: NDArray[np.uint64]  # 0 where none is told
    ident: NDArray[np.uint64]  # of the offer

    def only(self, chosen: NDArray[np.bool_]) -> Said:
        """Those alone."""
        return Said(self.row[chosen], self.address[chosen], self.ident[chosen])


def link_rendezvous(rows: Rows, flows: Rows, said: Said) -> None:
    """Name what carries the data of rendezvous. Changes op, context, tag and sub of MESSAGE rows."""
    role = rows["role"][said.row]
    offers, answered = said.only(role == Role.OFFER), said.only(role != Role.OFFER)
    if not len(offers.row):
        return
    flow, frame = rows["flow"].astype(np.int64), rows["first_frame"].astype(np.int64)
    peer = np.where(flows["peer"] == NONE32, -1, flows["peer"].astype(np.int64))[flow]

    read = (rows["wire"] == Wire.ROCE_READ) & (rows["op"] == Op.UNKNOWN)
    asks, answers = (np.flatnonzero(read & (rows["role"] == role)) for role in (Role.GRANT, Role.DATA))
    of = _spoken_of(rows, asks, peer[asks], offers.row, flow[offers.row], offers.address)
    asks, of = asks[of >= 0], of[of >= 0]
    _give(rows, asks, of)
    # An answer has its request's PSN and goes the other way.
    psn = (rows["seq"] & np.uint64(PSN_MASK)).astype(np.int64)
    match = _last_before((peer[asks], psn[asks]), frame[asks], (flow[answers], psn[answers]), frame[answers])
    _give(rows, answers[match >= 0], of[match[match >= 0]])

    match = _last_before(
        (flow[offers.row], offers.ident),
        frame[offers.row],
        (peer[answered.row], answered.ident),
        frame[answered.row],
    )
    _give(rows, answered.row[match >= 0], offers.row[match[match >= 0]])
    grants = answered.only((match >= 0) & (rows["role"][answered.row] == Role.GRANT))
    writes = np.flatnonzero((rows["wire"] == Wire.ROCE_WRITE) & (rows["op"] == Op.UNKNOWN))
    of = _spoken_of(rows, writes, flow[writes], grants.row, peer[grants.row], grants.address)
    _give(rows, writes[of >= 0], of[of >= 0])


def _give(rows: Rows, to: Ints, of: Ints) -> None:
    """Give the rows ``to`` name and number of the rows ``of``."""
    for name in ("op", "context", "tag", "sub"):
        rows[name][to] = rows[name][of]


def _spoken_of(
    rows: Rows, rdma: Ints, way: Ints, told: Ints, told_way: Ints, address: NDArray[np.uint64]
) -> Ints:
    """For each READ or WRITE the row of ``told`` that spoke of its address last before it, or -1.

    ``way`` and ``told_way``: the flow that the data goes on.
    """
    frame = rows["first_frame"].astype(np.int64)
    match = _last_before((told_way, address), frame[told], (way, rows["va"][rdma]), frame[rdma])
    # What goes on where the one before it ended belongs to the same.
    order = np.lexsort((frame[rdma], way))
    ask = rows["role"][rdma] == Role.GRANT
    end = rows["va"][rdma] + np.where(ask, rows["announces"][rdma], rows["bytes"][rdma])
    on = np.zeros(len(rdma), bool)
    on[1:] = (way[order][1:] == way[order][:-1]) & (rows["va"][rdma][order][1:] == end[order][:-1])
    begin = np.maximum.accumulate(np.where(on & (match[order] < 0), -1, np.arange(len(rdma))))
    match[order] = match[order][begin]
    found = np.full(len(rdma), -1)
    found[match >= 0] = told[match[match >= 0]]
    return found


def _last_before(
    keys: Sequence[NDArray[np.generic]], time: Ints, of: Sequence[NDArray[np.generic]], before: Ints
) -> Ints:
    """For each element of ``of`` the last of ``keys`` that is equal and earlier, or -1; columns of each."""
    count = len(time)
    columns = [np.concatenate(each) for each in zip(keys, of, strict=True)]
    asked = np.arange(count + len(before)) >= count
    order = np.lexsort((asked, np.concatenate([time, before]), *columns))
    new = np.ones(len(order), bool)
    new[1:] = False
    for column in columns:
        new[1:] |= column[order][1:] != column[order][:-1]
    place = np.arange(len(order))
    last = np.maximum.accumulate(np.where(asked[order], -1, place)) if len(order) else place
    good = last >= np.maximum.accumulate(np.where(new, place, 0)) if len(order) else place > 0
    found = np.full(len(order), -1)
    found[order[good]] = order[last[good]]
    return found[count:]
