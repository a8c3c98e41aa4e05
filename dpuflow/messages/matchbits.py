"""Tags of MPI libraries on UCX and libfabric over TCP -> operation, communicator, tag and number of messages.

In: MESSAGE rows of one capture with their LINK rows (the 64 bits of each message's tag, the requests that
offers and answers name). Which library's layout the bits have is told from the bits themselves: a flow has
one sender, so the field that names it does not change within a communicator, and most tags are those of
collectives. Layouts, and the tags that blocking collectives take:

- Open MPI on UCX: 24 bits tag, 20 rank, 20 communicator (ompi/mca/pml/ucx/pml_ucx_request.h); on libfabric
  32 bits tag, two of the protocol, communicator (ompi/mca/mtl/ofi/mtl_ofi_types.h). Collectives have negative
  tags.
- MPICH on UCX: 16 bits communicator, 16 rank, 32 tag (src/mpid/ch4/netmod/ucx/ucx_types.h); on libfabric 31
  bits tag, then 20 communicator (src/mpid/ch4/netmod/ofi/ofi_types.h). Intel MPI, as captured: 20 bits tag,
  20 communicator, rank. Collectives have a communicator of their own, an odd number, and the tags of
  src/include/mpir_tags.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.framing import MPI_TAG, OFI_DELIVERED
from dpuflow.kernels.tcp_state import KNOWN_MATCH
from dpuflow.messages.ob1 import Names, link
from dpuflow.schema.rows import Framing, Op, Role, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

MPICH_TAG: Final[dict[int, Op]] = {
    1: Op.BARRIER,
    2: Op.BROADCAST,
    3: Op.GATHER,
    4: Op.GATHER,
    5: Op.SCATTER,
    6: Op.SCATTER,
    7: Op.ALL_GATHER,
    8: Op.ALL_GATHER,
    9: Op.ALL_TO_ALL,
    10: Op.ALL_TO_ALL,
    11: Op.REDUCE,
    14: Op.ALL_REDUCE,
    17: Op.REDUCE_SCATTER,
    25: Op.ALL_TO_ALL,
    28: Op.REDUCE_SCATTER,
}
MOST: Final = 1 << 16
"""Ranks and communicators from here on are no MPI job's: other bits that look alike."""


class Layout(NamedTuple):
    """Where a library keeps what in the 64 bits of a tag, as (first bit, bits); no bits: not there."""

    framing: Framing
    tag: tuple[int, int]
    rank: tuple[int, int]
    communicator: tuple[int, int]
    negative: bool  # Open MPI's collectives; else MPICH's


LAYOUTS: Final = (
    Layout(Framing.UCX, (40, 24), (20, 20), (0, 20), negative=True),
    Layout(Framing.UCX, (0, 32), (32, 16), (48, 16), negative=False),
    Layout(Framing.OFI, (0, 32), (0, 0), (34, 28), negative=True),
    Layout(Framing.OFI, (0, 31), (0, 0), (31, 20), negative=False),
    Layout(Framing.OFI, (0, 20), (40, 24), (20, 20), negative=False),
)


class _Read(NamedTuple):
    """Messages by one layout."""

    tag: Ints
    rank: Ints
    communicator: Ints
    op: Ints
    good: NDArray[np.bool_]


def name_messages(rows: Rows, links: Rows, flows: Rows) -> None:
    """Give op, context, tag and sub to the messages of UCX and libfabric over TCP, in place."""
    tagged = (rows["wire"] == Wire.TAGGED) | (rows["wire"] == Wire.TAGGED_DONE)
    if not tagged.any():
        return
    rows["sub"][tagged] = rows["seq"][tagged].astype(np.uint32)
    named = np.flatnonzero(tagged & (links["known"] & KNOWN_MATCH != 0))
    named = named[np.argsort(rows["flow"][named], kind="stable")]
    flow = rows["flow"][named]
    for framing in (Framing.UCX, Framing.OFI):
        mine = named[flows["framing"][flow] == framing]
        if len(mine):
            _name(rows, mine, _best(framing, rows["flow"][mine], links[mine]))
    _inherit(rows, links, flows, np.flatnonzero(tagged))


def _best(framing: Framing, flow: NDArray[np.uint32], links: Rows) -> _Read:
    """What the layout says that explains most of the messages ``links`` of all flows of ``framing``."""
    read = [_by(layout, flow, links) for layout in LAYOUTS if layout.framing == framing]
    return max(read, key=lambda r: (int((r.good & (r.op != Op.SEND_RECV)).sum()), int(r.good.sum())))


def _by(layout: Layout, flow: NDArray[np.uint32], links: Rows) -> _Read:
    bits = links["request"].view(np.uint64)
    tag, rank, communicator = (
        ((bits >> np.uint64(first)) & np.uint64((1 << count) - 1)).astype(np.int64)
        for first, count in (layout.tag, layout.rank, layout.communicator)
    )
    if not layout.rank[1]:
        rank = links["address"].astype(np.int64)
    half = 1 << layout.tag[1] - 1
    if layout.negative:
        tag = np.where(tag >= half, tag - 2 * half, tag)
        collective, table = tag < 0, MPI_TAG
    else:
        collective, table = communicator % 2 == 1, MPICH_TAG
    op = np.where(collective, int(Op.UNKNOWN), int(Op.SEND_RECV))
    for value, name in table.items():
        op[collective & (tag == value)] = int(name)
    # A flow has one sender: it has one rank in a communicator.
    key = flow.astype(np.int64) << 32 | communicator
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    good = (rank == rank[first][which]) & (rank < MOST) & (communicator < MOST) & (op != Op.UNKNOWN)
    return _Read(tag, rank, communicator, op, good)


def _name(rows: Rows, mine: Ints, read: _Read) -> None:
    op = np.where(read.good, read.op, int(Op.UNKNOWN))
    # Nothing is reduced of nothing: a barrier may be made of an all_reduce's steps.
    steps = op == Op.ALL_REDUCE
    size = np.maximum(rows["bytes"], rows["announces"])[mine]
    full = distinct(read.communicator[steps & (size > 0)])
    op[steps & ~np.isin(read.communicator, full)] = int(Op.BARRIER)
    rows["op"][mine] = op
    rows["context"][mine] = read.communicator.astype(np.uint32)
    rows["tag"][mine] = (read.tag & 0xFFFFFFFF).astype(np.uint32)


def _inherit(rows: Rows, links: Rows, flows: Rows, tagged: Ints) -> None:
    """Give grants, the data that they allow and what says that it was read the name of their offer."""
    role = rows["role"][tagged]
    offers, grants, done = (tagged[role == each] for each in (Role.OFFER, Role.GRANT, Role.DONE))
    data = tagged[(role == Role.DATA) & (links["known"][tagged] & KNOWN_MATCH == 0)]
    # The flow that the data takes: the opposite one for what the receiver sends.
    way = rows["flow"].astype(np.int64)
    answers = np.concatenate([grants, done])
    way[answers] = flows["peer"][way[answers]]
    parent = np.full(len(rows), -1)

    def find(key: Ints, sources: Ints, users: Ints) -> None:
        found = link(rows, Names(key, way), sources, users)
        parent[found >= 0] = found[found >= 0]

    _acknowledged(rows, parent, links, flows, way, tagged)
    find(links["fragment"], offers, answers)
    # What names nothing, and what names an offer of which that was not seen, go in order.
    silent = grants[parent[grants] < 0]
    unread = offers if (links["fragment"][silent] == 0).all() else offers[links["fragment"][offers] == 0]
    _in_turn(rows, parent, way, unread, silent, grants)
    for name, of in (("request", "fragment"), ("address", "address")):
        key = links[of].copy()
        key[grants] = links[name][grants]
        find(key, grants[key[grants] != 0], data[parent[data] < 0])
    _give_back(rows, parent, data)
    # Data that names nothing, or a grant of which that was not seen; rxm's eager data has its own number.
    eager = (flows["framing"][rows["flow"][data]] == Framing.OFI) & (links["fragment"][data] != 0)
    lone = data[(parent[data] < 0) & (rows["bytes"][data] > 0) & ~eager]
    unread = grants[(links["address"][grants] == 0) | (links["request"][grants] == 0)]
    _in_turn(rows, parent, way, unread, lone, data)
    # What says that all was sent follows the data.
    late = data[(parent[data] < 0) & (rows["bytes"][data] == 0)]
    full = data[(parent[data] >= 0) & (rows["bytes"][data] > 0)]
    find(np.ones(len(rows), np.int64), full, late)
    parent[late] = np.where(parent[late] >= 0, parent[parent[late]], -1)
    # Data names its grant, and that its offer.
    via = data[parent[data] >= 0]
    parent[via] = parent[parent[via]]
    heirs = np.flatnonzero(parent >= 0)
    for name in ("op", "context", "tag", "sub"):
        rows[name][heirs] = rows[name][parent[heirs]]


def _give_back(rows: Rows, parent: Ints, data: Ints) -> None:
    """Take from grants, in place, data beyond what they allow: a grant that was not seen whole allowed it.

    Addresses are used again. What comes after a grant was used up belongs to a later one.
    """
    paid = data[parent[data] >= 0]
    paid = paid[np.lexsort((rows["first_ns"][paid], parent[paid]))]
    grant, carried = parent[paid], np.cumsum(rows["bytes"][paid].astype(np.int64))
    starts = np.flatnonzero(np.r_[True, grant[1:] != grant[:-1]]) if len(paid) else paid
    before = carried - rows["bytes"][paid].astype(np.int64)
    before -= np.repeat(before[starts], np.diff(np.r_[starts, len(paid)]))
    allowed = rows["announces"][grant].astype(np.int64)
    over = (allowed > 0) & (before >= allowed) & (rows["bytes"][paid] > 0)
    parent[paid[over]] = -1


def _acknowledged(rows: Rows, parent: Ints, links: Rows, flows: Rows, way: Ints, tagged: Ints) -> None:
    """libfabric: what says that a message has come belongs to the oldest one that asked for it."""
    mine = tagged[flows["framing"][rows["flow"][tagged]] == Framing.OFI]
    role, fragment = rows["role"][mine], links["fragment"][mine]
    asking = (role == Role.DATA) & (fragment == OFI_DELIVERED) & (links["known"][mine] & KNOWN_MATCH != 0)
    plain = mine[(role == Role.DONE) & (fragment == 0)]
    _in_turn(rows, parent, way, mine[asking], plain, plain)


def _in_turn(rows: Rows, parent: Ints, way: Ints, sources: Ints, users: Ints, kin: Ints) -> None:
    """Note in ``parent`` for users that name nothing, in order, the sources of their way that are free.

    Free is what none of ``kin``, rows like the users, is known to belong to.
    """
    when = rows["first_ns"]
    sources = sources[~np.isin(sources, parent[kin])]
    for each in distinct(way[users]).tolist():
        mine, free = users[way[users] == each], sources[way[sources] == each]
        mine, free = (some[np.argsort(when[some], kind="stable")] for some in (mine, free))
        if len(mine) == len(free):
            parent[mine] = free
            continue
        # Some are missing: the last one before counts, once.
        at = np.searchsorted(when[free], when[mine], side="right") - 1
        once = (at >= 0) & np.r_[True, at[1:] != at[:-1]]
        parent[mine[once]] = free[at[once]]
