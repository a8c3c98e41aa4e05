"""The identification field of IPv4 headers: each sender counts, for each peer, or on each TCP connection.

So Linux does it (Soft-RoCE's captures show it); what adapters put there is not documented. What is sent again
has a number of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.synth.seeds import columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.synth.world import Played


def identities(played: Played) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Of the first packet of each burst, and of each reply, by row; further packets of a burst count on."""
    bursts, replies = played.trace.bursts.read(), played.trace.replies.read()
    ports = len(played.network.nics) + len(played.network.clients)
    there = np.empty(len(played.flows), np.int64)
    back = np.empty(len(played.flows), np.int64)
    for flow in played.flows:
        src, dst = flow.src.number, flow.dst.number
        there[flow.number], back[flow.number] = src * ports + dst, dst * ports + src
        if flow.stream:
            partner = played.partners.get(flow.number, flow.number)
            ways = ports * ports + 2 * min(flow.number, partner) + np.array((0, 1))
            there[flow.number], back[flow.number] = ways if flow.number <= partner else ways[::-1]
    # Numbers of four bytes where they do: there are millions of rows, and overflow is as good modulo 2^16.
    count = len(bursts["flow"])
    rank = np.unique(np.concatenate([there, back]), return_inverse=True)[1].astype(np.int32)
    ways = np.concatenate([rank[: len(there)][bursts["flow"]], rank[len(there) :][replies["flow"]]])
    order = np.lexsort((np.concatenate([bursts["tx_ns"], replies["tx_ns"]]), ways))
    firsts = np.flatnonzero(np.diff(ways[order], prepend=-1))
    ones = np.ones(len(replies["flow"]), np.uint32)
    packets = np.concatenate([bursts["count"].astype(np.uint32), ones])[order]
    number = np.cumsum(packets, dtype=np.uint32) - packets
    begin = columns(played.scenario.seed, "identities").integers(0, 1 << 16, len(firsts), np.uint32)
    number += np.repeat(begin - number[firsts], np.diff(firsts, append=len(order)))
    found = np.empty(len(order), np.uint16)
    found[order] = number & 0xFFFF
    return found[:count], found[count:]
