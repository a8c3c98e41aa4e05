"""All_to_alls over nodes of several GPUs, sent through the NICs on the receivers' rails (PXN).

In: the transfers between NICs. Out: calls of all GPUs with all, and the transfers that are part of none. Each
NIC receives for its own GPU, and sends for all of its node, one connection a channel and receiver (NCCL 2.30,
src/graph/search.cc ncclTopoGetNetDev, src/transport/net.cc sendSetup). So a call's transfers lead from every
node to every NIC of the others, on that NIC's rail; what GPUs of one node send each other shows in no packet.
That a transfer is of several senders is told by entries for several messages (``bunches``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.model import Instance
from dpuflow.matching.parts import ALIKE
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.transfers import Transfers

    Ints = NDArray[np.int64]

_LINEAR: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")


def calls_over_rails(
    every: Sequence[Transfers], asked: Ints, position: Ints, nodes: Ints
) -> tuple[list[Instance], list[Transfers]]:
    """The all_to_alls among ``every``, and the transfers that are of none."""
    found: list[Instance] = []
    left: list[Transfers] = []
    for members in _by_nodes(every, nodes):
        senders = [_senders(each, asked) for each in members]
        if min(senders) < 2 or not _is_call(members, nodes):
            left += members
            continue
        for turn in range(len(members[0].rows)):
            found.append(_call(members, senders, turn, position, nodes))
    return found, left


def _by_nodes(every: Sequence[Transfers], nodes: Ints) -> list[list[Transfers]]:
    """Transfers by the nodes that they connect, those of as many calls."""
    return connected(every, lambda each: [(len(each.rows), int(nodes[end])) for end in each.edge])


def _senders(each: Transfers, asked: Ints) -> int:
    """Of how many GPUs the transfers are, as far as entries tell."""
    return int(asked[np.concatenate(each.rows)].max())


def _is_call(members: Sequence[Transfers], nodes: Ints) -> bool:
    """Whether the k-th transfers together are one call of all with all, for every k."""
    ends = {end for each in members for end in each.edge}
    places = {int(nodes[end]) for end in ends}
    asked = {(place, end) for place in places for end in ends if int(nodes[end]) != place}
    ways = [(int(nodes[each.edge[0]]), each.edge[1]) for each in members]
    if len(places) < 2 or len(ways) != len(asked) or set(ways) != asked:
        return False
    if len(members[0].rows) > 1:
        # A node's GPUs send again when each has all of the call before.
        for place in places:
            sent = np.min([e.start_ns[1:] for e in members if nodes[e.edge[0]] == place], axis=0)
            came = np.max([e.end_ns[:-1] for e in members if nodes[e.edge[1]] == place], axis=0)
            if (sent >= came).mean() < ALIKE:
                return False
    return True


def _call(
    members: Sequence[Transfers],
    senders: Sequence[int],
    turn: int,
    position: Ints,
    nodes: Ints,
) -> Instance:
    rows = np.sort(np.concatenate([each.rows[turn] for each in members]))
    ends = sorted({end for each in members for end in each.edge}, key=lambda end: int(position[end]))
    mates = {end: sum(nodes[other] == nodes[end] for other in ends) for end in ends}
    # Where all GPUs of a node send, each sends an equal part of what a NIC receives from the node.
    parts = {
        int(each.size[turn]) / count if count == mates[each.edge[0]] else None
        for each, count in zip(members, senders, strict=True)
    }
    part = parts.pop() if len(parts) == 1 else None
    whole = all(bool(each.whole[turn]) for each in members)
    return Instance(
        rows,
        Op.ALL_TO_ALL,
        ends,
        _LINEAR,
        size=None if part is None else round(part * len(ends)),
        complete=whole,
        ranks=len(ends),
        nodes=tuple(nodes[ends].tolist()),
        inside=True,
    )
