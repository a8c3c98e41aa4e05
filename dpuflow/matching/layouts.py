"""What the connections of one operation of NCCL make together: a ring, a chain, trees, PAT; and its bytes.

In: for each connection that takes part its messages, over all operations that look the same. Out: operation,
algorithm, the ranks in order and the bytes of the buffer as on the wire, or None where no algorithm of NCCL
has such messages: they are held against each algorithm as it would be seen (``lanes.View``).

PAT, at all nodes or at some: a rank passes blocks to ranks a power of two away, as many as numbers of ranks
have it as lowest bit, and gets as many from as far. Where blocks share a message of a reduce_scatter it has
gaps for numbers that are no rank's, as long as blocks. Only one number has the highest power as lowest
bit, so that peer gets one block; all of them together are the other ranks' blocks. So each captured rank
tells the bytes of a block, and how many ranks there are. An all_gather sends far first, a reduce_scatter to
its neighbour: with three ranks both are alike. Where only some nodes were captured it stays open which of two
peers that get as much is further away, and with it which rank is where; and of ranks without a capture no
entry is dated. NCCL 2.30 src/include/collectives.h (PatAGAlgorithm, PatRSAlgorithm).

Trees pass chunks up and down again: on an edge what comes down waits for what went up. Which ranks are next
to each other follows from their number (``nccl.double_tree``): half of the channels each.

Where only some nodes were captured, the edges at these are seen. A captured rank passes every channel's part
of the buffer up to its parent in that channel's tree, but for the channels of which it is the root: there
what comes up ends, and nothing that goes up waits for it. So each one tells the bytes by itself. Who else
there is remains open, unless the edges seen are all that NCCL's trees of the ranks seen have.
NCCL 2.30 src/graph/trees.cc, src/device/all_reduce.h (runTreeSplit).

A reduce goes along a chain as a broadcast does, from the last rank to the root: that what ranks pass on is
changed tells it. A ring's first messages wait for nothing, those of a chain for what came.
src/device/broadcast.h, reduce.h.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.components import in_a_row
from dpuflow.arrays.ordering import median_of
from dpuflow.matching.buffers import LINES_OF_8, RING, STEP
from dpuflow.matching.lanes import Layout, View, grouped, unchanged
from dpuflow.matching.model import MOST, RARE
from dpuflow.matching.rings import meet, open_ring, ring
from dpuflow.schedules.nccl import (
    BROADCAST_CHAIN,
    REDUCE_CHAIN,
    double_tree,
    pat,
    pat_dimensions,
    seen_pat,
    some_trees,
    tree_all_reduce,
)
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpuflow.matching.lanes import Lane
    from dpuflow.matching.model import Job
    from dpuflow.schedules.algorithms import Algorithm


def layout_of(job: Job, lanes: Sequence[Lane], ends: Sequence[int], among: int = 0) -> Layout | None:
    """What the connected ``lanes`` make together.

    ``ends`` are all endpoints of the communicator that were seen, ``among`` how many ranks it has, 0 where
    that is not known.
    """
    slots = {lane.slot for lane in lanes}
    if len(slots) > 1 or not slots <= job.buffers.keys():
        return None
    slot = slots.pop()
    if any(lane.sizes.max(initial=0) > slot for lane in lanes):
        return None
    view = View(job, lanes, ends, among)
    return next(filter(None, (shape(view) for shape in _shapes(view))), None)


def _shapes(view: View) -> Iterator[Callable[[View], Layout | None]]:
    """What the lanes may be, what is told best first."""
    if view.shared:
        yield ring if view.whole else open_ring
        if view.kind != RING:
            if view.whole:
                yield chain
            yield trees_by_rail
        return
    if view.near is not None:
        yield open_ring
    if view.kind == RING:
        yield ring
    elif view.kind != STEP:
        yield from (trees, ring, chain)
    elif len(view.members) == 2 or not view.whole:
        # Two ranks' PAT has the messages of a tree; what comes down a tree waits.
        yield from (trees, pat_of, chain)
    else:
        yield from (pat_of, trees, chain)


Carried = Counter[tuple[int, int]]
"""Bytes from each endpoint to each other one."""
BOTH = (Op.ALL_GATHER, Op.REDUCE_SCATTER)


def pat_of(view: View) -> Layout | None:
    """The PAT whose messages the lanes are, as captured ranks see them."""
    own = [end for end in view.members if view.is_captured(end)]
    if not own or not all(view.is_captured(lane.src) or view.is_captured(lane.dst) for lane in view.lanes):
        return None
    ranks = len(view.members) if view.whole else view.among
    parts = [_carried(lanes) for lanes in _by_block(view.lanes)]
    told = [_told(view, own, carried, ranks) for carried in parts]
    alike = set.intersection(*({each.ranks for each in every} for every in told))
    blocks = [each for every in told for each in every if each.ranks in alike]
    if len(alike) != 1 or len(blocks) != len(parts):
        return None
    n, block, share = blocks[0].ranks, sum(each.size for each in blocks), max(each.share for each in blocks)
    if view.whole:
        return _pat_of_all(view, _carried(view.lanes), blocks)
    if len(view.members) > n or n < 3:
        return None
    ops = BOTH if n == len(pat_dimensions(n)) + 1 else (BOTH[not _far_first(view, own)],)
    ops = ops if share == 1 else BOTH[1:]
    place = {end: number for number, end in enumerate(view.members)}
    shared = next(number for number, each in enumerate(blocks) if each.share == share)
    edges = sorted(
        (place[src], place[dst], size // blocks[shared].size) for (src, dst), size in parts[shared].items()
    )
    return Layout(
        ops[0],
        seen_pat(ops[0], tuple(edges), frozenset(place[end] for end in own)),
        view.members + [-1 - number for number in range(len(place), n)],
        block if ops[0] == Op.ALL_GATHER else n * block,
        alike=ops[1:],
        tails=0,
        among=n,
    )


class _Blocks(NamedTuple):
    """PAT on some channels: of how many ranks, bytes of a block, and how many share a message."""

    ranks: int
    size: int
    share: int


def _by_block(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes by channels whose blocks have as many bytes: of smaller ones more may share a message.

    Between ranks that are furthest apart goes one block, on each channel.
    """
    carried = _carried(lanes)
    least = min(carried, key=carried.__getitem__)
    units = {int(lane.sizes.sum()) for lane in lanes if lane[:2] == least}
    of = [[unit for unit in units if unit and int(lane.sizes.sum()) % unit == 0] for lane in lanes]
    if any(len(fits) != 1 for fits in of):
        return [list(lanes)]
    return [[lane for lane, fits in zip(lanes, of, strict=True) if fits == [unit]] for unit in sorted(units)]


def _carried(lanes: Sequence[Lane]) -> Carried:
    """Bytes of ``lanes`` by sender and receiver."""
    carried: Carried = Counter()
    for lane in lanes:
        carried[lane[:2]] += int(lane.sizes.sum())
    return carried


def _told(view: View, own: Sequence[int], carried: Carried, ranks: int) -> set[_Blocks]:
    """What captured ranks, ``own``, may all have passed on; ``ranks``: as of ``_blocks``."""
    back = Counter({(dst, src): size for (src, dst), size in carried.items()})
    told = set.intersection(*(_blocks(way, rank, ranks) for rank in own for way in (carried, back)))
    return {each for each in told if view.whole or all(_meets(carried, rank, each) for rank in own)}


def _pat_of_all(view: View, carried: Carried, blocks: Sequence[_Blocks]) -> Layout | None:
    """The same with the order of the ranks, where all of it was seen."""
    n, block, share = len(view.members), sum(each.size for each in blocks), max(each.share for each in blocks)
    ops = BOTH if share == 1 else BOTH[1:]
    orders = [view.members]
    around = _around(carried, view.members)
    if around is not None:
        # Numbered otherwise: the other way round all_gather looks like reduce_scatter, but sends far first.
        orders += [around, around[::-1]]
    for order in orders:
        fits = [op for op in ops if carried == _passed(op, order, blocks)]
        first = BOTH[not _far_first(view, order)] if len(fits) == 1 else None
        if len(fits) == 2 or (fits and order is view.members) or first in fits:
            size = block if fits[0] == Op.ALL_GATHER else block * n
            return Layout(fits[0], pat(fits[0], n, share), order, size, alike=tuple(fits[1:]))
    return None


def _blocks(carried: Carried, rank: int, ranks: int) -> set[_Blocks]:
    """What a rank sends may be (of ``ranks``, if not 0); of several with the same bytes the one whose
    messages have the fewest blocks."""
    sizes = sorted(size for (own, _), size in carried.items() if own == rank)
    if not sizes or not sizes[0] or any(size % sizes[0] for size in sizes):
        return set()
    counts = [size // sizes[0] for size in sizes]
    most = 1 << len(counts)  # peers at distances 1, 2, 4, ... below the number of ranks
    found: dict[int, _Blocks] = {}
    for n in (ranks,) if ranks else range(most // 2 + 1, most + 1):
        for share in (1 << k for k in range(len(counts))):
            if counts == sorted(pat_dimensions(n, share).values()):
                found.setdefault(n, _Blocks(n, sizes[0], share))
    return set(found.values())


def _meets(carried: Carried, rank: int, each: _Blocks) -> bool:
    """Whether as many peers as there would be among that many ranks get from a rank and send to it, and as
    much: one so far on and another so far back are the same where both distances make up the ranks."""
    n, block, share = each
    blocks = pat_dimensions(n, share)
    should = sorted((size, blocks[n - far]) for far, size in blocks.items() if n - far in blocks)
    gets = {dst: size // block for (src, dst), size in carried.items() if src == rank}
    sends = {src: size // block for (src, dst), size in carried.items() if dst == rank}
    return sorted((gets[end], sends[end]) for end in gets.keys() & sends.keys()) == should


def _passed(op: Op, order: list[int], blocks: Sequence[_Blocks]) -> Carried:
    """Bytes that each pair carries."""
    found: Carried = Counter()
    for each in blocks:
        size = each.size if op == Op.ALL_GATHER else each.size * len(order)
        for send in pat(op, len(order), each.share).sends(len(order), size, 0):
            found[order[send.src], order[send.dst]] += round(send.size)
    return found


def _around(carried: Carried, members: list[int]) -> list[int] | None:
    """The ranks in the order of who sends most to whom, where that goes round: distance 1."""
    most = max(carried.values())
    order, closed = in_a_row(members[0], {src: dst for (src, dst), size in carried.items() if size == most})
    return order if closed and len(order) == len(members) else None


def _far_first(view: View, ranks: Sequence[int]) -> bool:
    """Whether ranks send to others before the one that gets most, which is their neighbour."""
    told = []
    for lanes in grouped((lane for lane in view.lanes if lane.src in ranks), lambda lane: lane.src).values():
        peers = grouped(lanes, lambda lane: lane.dst).values()
        first = [np.min([lane.starts[:, 0] for lane in each], axis=0) for each in peers]
        near = int(np.argmax([sum(int(lane.sizes.sum()) for lane in each) for each in peers]))
        others = np.min([when for number, when in enumerate(first) if number != near], axis=0)
        told.append(float((first[near] > others).mean()))
    return float(np.mean(told)) > 0.5


class _Link(NamedTuple):
    """One channel of an edge."""

    up: Lane
    down: Lane


def chunked(lanes: Sequence[Lane]) -> bool:
    """Whether all messages of each lane are of one size, but for a shorter last one."""
    return all(
        (lane.sizes[:-1] == lane.sizes[0]).all() and 0 < lane.sizes[-1] <= lane.sizes[0] for lane in lanes
    )


def chunked_by_slots(lanes: Sequence[Lane]) -> bool:
    """Whether all messages of each lane but the last fill a slot (src/enqueue.cc calcCollChunking)."""
    return all((lane.sizes[:-1] == lane.slot).all() for lane in lanes)


def waits(down: Lane, up: Lane) -> bool:
    """Whether what goes ``down`` leaves after the same chunk has come ``up``."""
    known = (down.starts != NEVER) & (up.arrivals != NEVER)
    return bool(known.any() and (down.starts > up.arrivals)[known].mean() >= MOST)


def trees(view: View) -> Layout | None:
    """The trees of which the lanes are the edges: all of them, or those at captured ranks."""
    seen = all(view.is_captured(lane.src) or view.is_captured(lane.dst) for lane in view.lanes)
    if len(view.members) == 2 and view.kind == LINES_OF_8 and not chunked_by_slots(view.lanes):
        return None  # a ring's: of LL's trees all messages but the last fill their slots
    # Channels share the bytes of an operation: what carries next to none of them is another communicator's.
    carried = [int(lane.sizes.sum()) for lane in view.lanes]
    links = _links(view.lanes) if seen and min(carried) >= RARE * max(carried) else None
    if links is None:
        return None
    return _all_edges(view, links) if view.whole else _edges_at_captured(view, links)


def _all_edges(view: View, links: list[_Link]) -> Layout | None:
    """The trees of which ``links`` are all edges."""
    hops = len(view.members) - 1
    channels, rest = divmod(len(links), hops)
    size, more = divmod(sum(int(lane.sizes.sum()) for lane in view.lanes), 2 * hops)
    known = _known(links, channels, view.members)
    return None if rest or more else _layout(view, links, known, size, channels)


def _edges_at_captured(view: View, links: list[_Link]) -> Layout | None:
    """The trees of which ``links`` are the edges at captured ranks."""
    told = [_passed_up(end, links) for end in view.members if view.is_captured(end)]
    parts = view.rails()
    if None in told or (len(parts) > 1 and not meet(view.lanes, [part.members for part in parts])):
        return None
    sizes, counts = {each[0] for each in told if each}, {each[1] for each in told if each}
    channels = max(counts)
    # On one channel any inner rank looks like the root of fewer ranks.
    known = _known(links, channels, view.members) if len(counts) == 1 and channels > 1 else None
    return _layout(view, links, known, sizes.pop() if len(sizes) == 1 else None, channels)


def _layout(
    view: View, links: list[_Link], known: Algorithm | None, size: int | None, channels: int
) -> Layout:
    return Layout(Op.ALL_REDUCE, known or _some(links, view.members), view.members, size, tails=channels)


def trees_by_rail(view: View) -> Layout | None:
    """The trees of nodes with several GPUs: a tree's links to other nodes are all at one GPU of each node, so
    each rail has trees of its own, through the same nodes."""
    rails = view.rails()
    found = [each for rail in rails if (each := trees(rail)) is not None]
    if len(set(map(_captured_nodes, rails))) > 1 or len(found) < len(rails):
        return None
    whole = found[0] if view.whole and found else trees(view)
    if whole is None:
        return None
    sizes = [each.size for each in found]
    return whole._replace(
        order=view.members,
        size=None if None in sizes else sum(size or 0 for size in sizes),
        ranks=len(view.members),
        inside=True,
        tails=sum(each.tails for each in found),
    )


def _captured_nodes(view: View) -> frozenset[int]:
    return frozenset(view.node(end) for end in view.members if view.is_captured(end))


def _passed_up(rank: int, links: Sequence[_Link]) -> tuple[int, int] | None:
    """Bytes of all channels at a captured rank, and how many channels; None where that makes no trees."""
    up = [link.up for link in links if link.up.src == rank]
    below: dict[int, list[Lane]] = {}
    for link in links:
        if link.up.dst == rank:
            below.setdefault(link.up.src, []).append(link.up)
    ends = _ends(up, below)
    if ends is None:
        return None
    return sum(int(lane.sizes.sum()) for lane in (*up, *ends)), len(up) + len(ends)


def _ends(up: Sequence[Lane], below: dict[int, list[Lane]]) -> list[Lane] | None:
    """Of the lanes from ``below`` those that end at the rank, its trees' root; None where several ranks' do,
    as NCCL's roots have one child."""
    root = {child: [lane for lane in mine if not _goes_on(lane, up)] for child, mine in below.items()}
    most = max(map(len, below.values()), default=0)
    if not any(root.values()) and most >= max(len(up), 2):
        # It is late as a rule, so that all it sends comes after all it gets. But an inner rank has a parent
        # on all channels, and children on half of them.
        root = {child: mine for child, mine in below.items() if len(mine) == most}
    ends = [mine for mine in root.values() if mine]
    return None if len(ends) > 1 else ends[0] if ends else []


def _goes_on(lane: Lane, up: Sequence[Lane]) -> bool:
    return any(each.kind == lane.kind and waits(each, lane) for each in up)


def _links(lanes: Sequence[Lane]) -> list[_Link] | None:
    """The channels of all edges; None where one has not as many both ways, one waiting for the other."""
    if not chunked(lanes):
        return None
    ways: dict[tuple[int, int], list[Lane]] = {}
    for lane in sorted(lanes, key=lambda lane: lane.kind):
        ways.setdefault(lane[:2], []).append(lane)
    links: list[_Link] = []
    for (a, b), forth in ways.items():
        back = ways.get((b, a), [])
        if [lane.kind for lane in forth] != [lane.kind for lane in back]:
            return None
        if a < b:
            found = _oriented(forth, back)
            if found is None:
                return None
            links += found
    return links


def _oriented(forth: list[Lane], back: list[Lane]) -> list[_Link] | None:
    """An edge's channels, None where neither way waits for the other."""
    links: list[_Link] = []
    left = list(range(len(back)))
    for one in forth:
        for number in left:
            other = back[number]
            if one.kind != other.kind:
                continue
            link = next((_Link(u, d) for u, d in ((one, other), (other, one)) if waits(d, u)), None)
            if link is not None:
                left.remove(number)
                links.append(link)
                break
        else:
            return _in_order(forth, back)
    return links


def _in_order(forth: list[Lane], back: list[Lane]) -> list[_Link] | None:
    """The same for channels that are up one way in one tree and down in the other: of those that look alike
    the first ones go up, both ways, and what comes down first answers what went up first."""
    links: list[_Link] = []
    for kind in sorted({lane.kind for lane in forth}):
        one, other = (
            sorted((lane for lane in lanes if lane.kind == kind), key=lambda lane: int(lane.starts[0, 0]))
            for lanes in (forth, back)
        )
        count = len(one)
        for up in range(count + 1):
            pairs = [*zip(one[:up], other[count - up :], strict=True)]
            pairs += zip(other[: count - up], one[up:], strict=True)
            if all(waits(after, before) for before, after in pairs):
                links += [_Link(*pair) for pair in pairs]
                break
        else:
            return None
    return links


def _known(links: list[_Link], channels: int, members: list[int]) -> Algorithm | None:
    """NCCL's trees over ``members``, where they have these edges: half of the channels each."""
    edges = sorted((link.up.src, link.up.dst) for link in links)
    first, second = double_tree(len(members))
    for trees in ([first] * -(-channels // 2) + [second] * (channels // 2), [first] * channels):
        wanted = [
            (members[child], members[parent])
            for parents in trees
            for child, parent in enumerate(parents)
            if parent >= 0
        ]
        if sorted(wanted) == edges:
            return tree_all_reduce(tuple(dict.fromkeys(trees)))
    return None


def _some(links: list[_Link], members: list[int]) -> Algorithm:
    """Trees with these edges, of which no more is known."""
    place = {member: number for number, member in enumerate(members)}
    return some_trees(tuple(sorted({(place[link.up.src], place[link.up.dst]) for link in links})))


def chain(view: View) -> Layout | None:
    """The path of nodes; each channel reaches and leaves them at GPUs of its own.

    Where the root is not the first of its node that a channel comes to, the path ends in its node again.
    """
    several = len(set(map(view.node, view.members))) < len(view.members)
    order = _path(view, back=several) if chunked(view.lanes) else None
    if order is None or not all(_passes(view, node, late=several) for node in order[1:-1]):
        return None
    passed = unchanged((view.into[node], view.out[node]) for node in order[1:-1])
    kinds = [lane.kind for lane in view.out[order[0]]]
    op, algorithm = (Op.REDUCE, REDUCE_CHAIN) if passed is False else (Op.BROADCAST, BROADCAST_CHAIN)
    ends = sorted(view.members, key=lambda end: order.index(view.node(end)), reverse=op == Op.REDUCE)
    return Layout(
        op,
        algorithm,
        ends,
        sum(size for _, size in kinds),
        None if several else 0,  # which of its node's GPUs is the root shows in no packet
        (Op.REDUCE,) if passed is None else (),
        ranks=len(ends) if several else 0,
        inside=several,
        tails=len(kinds),
    )


def _path(view: View, *, back: bool) -> list[int] | None:
    """The nodes in a row, with as many lanes of the same bytes from each to the next; None without a path.

    ``back``: some lanes may lead from the last node to the first one.
    """
    after = {node: view.node(lanes[0].dst) for node, lanes in view.out.items()}
    if len({(view.node(lane.src), view.node(lane.dst)) for lane in view.lanes}) > len(after):
        return None
    heads = _heads(view, back=back)
    if len(heads) != 1:
        return None
    order, _ = in_a_row(heads[0], after)
    if len(order) != len(after.keys() | view.into.keys()) or len(order) < 2:
        return None
    kinds, *others, rest = (Counter(lane.kind for lane in view.out.get(node, ())) for node in order)
    whole = after.get(order[-1], order[0]) == order[0] and rest <= kinds
    return order if whole and all(each == kinds for each in others) else None


def _heads(view: View, *, back: bool) -> list[int]:
    """The nodes that nothing comes to; with ``back`` else the one that sent first."""
    heads = [node for node in view.out if node not in view.into]
    if heads or not back:
        return heads
    return [min(view.out, key=lambda node: int(median_of([x.starts[:, 0].min() for x in view.out[node]])))]


def _passes(view: View, node: int, *, late: bool) -> bool:
    """Whether what leaves the node in the middle had come before, as far as captures tell."""
    into, out = view.into[node], view.out[node]
    if late:  # which channels are the same is not known
        came = np.min([lane.arrivals[:, 0] for lane in into], axis=0)
        return bool((np.min([lane.starts[:, 0] for lane in out], axis=0) > came).mean() >= MOST)

    if view.whole or not view.is_captured(out[0].src):
        return True
    like = ([goes for goes in out if goes.kind == came.kind] for came in into)
    return all(
        not mine or any(waits(goes, came) for goes in mine) for came, mine in zip(into, like, strict=True)
    )
