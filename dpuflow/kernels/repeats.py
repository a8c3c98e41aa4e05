"""Patterns that repeat in a stream of bursts: where they may be cut, and what the ranks do at these places.

In: bursts in order of time as columns, ranks numbered from 0. Out: chains of places, and counts of what ranks
did first in the blocks between them. A block is the bursts from one place up to the next one of its chain.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import i8, kernel, u1, void

NEVER = np.int64(-(1 << 63))
FAR = np.int64((1 << 63) - 1)
FIRST, BEFORE, REACHED, LATER, LAST, BLOCK = range(6)  # rows of scratch
KNOWN, SILENT, ACTS, UNASKED = range(4)  # columns of facts

_I8 = i8[::1]


@kernel(i8(_I8, u1[::1], _I8, _I8))
def chains(following, preceded, places, bounds):  # type: ignore[no-untyped-def]
    """Places that follow each other, from each place that follows none: as long as they come later.

    ``following`` is each place's next one, -1 for none. Chain k, of two places or more, becomes
    ``places[bounds[k]:bounds[k + 1]]``; those beyond the room in ``places`` are left out. Returns the number
    of chains; ``bounds`` has one element more than there are places.
    """
    count, used = np.int64(0), np.int64(0)
    bounds[0] = 0
    for start in range(following.shape[0]):
        if preceded[start]:
            continue
        here, n = np.int64(start), used
        while here >= 0 and n < places.shape[0]:
            places[n] = here
            n += 1
            here = following[here] if following[here] > here else np.int64(-1)
        if here < 0 and n - used > 1:
            used = n
            count += 1
            bounds[count] = used
    return count


@kernel(void(_I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, i8, u1[::1], i8[:, ::1], _I8, i8[:, ::1], _I8))
def blocks(  # type: ignore[no-untyped-def]
    places, bounds, src, dst, sent, over, there, pause, slow, marked, ranks, touched, facts, times
):
    """For each chain of ``places``, count what ranks did first in its blocks.

    ``sent``, ``over`` and ``there`` are when a burst's first and last byte left and its last one arrived,
    ``pause`` how long nothing had happened at its sender, all in ns. Into ``facts``, a row a chain: ranks
    and blocks whose first burst can be compared, with an event before it in an earlier block of the chain
    and bursts after it; those of which it came after a pause twice as long as any later one; ranks and blocks
    with a burst; those of which the first one left unasked: before anything of the block had reached the rank
    and after a pause beyond ``slow``. ``times`` counts by rank the latter in blocks that begin at ``marked``
    places. ``ranks`` (6 rows) and ``touched`` are scratch, an element for each rank.
    """
    for chain in range(bounds.shape[0] - 1):
        for rank in range(touched.shape[0]):
            ranks[LAST, rank] = NEVER
            ranks[BLOCK, rank] = -1
        for column in range(4):
            facts[chain, column] = 0
        for cut in range(bounds[chain], bounds[chain + 1] - 1):
            n = np.int64(0)
            for i in range(places[cut], places[cut + 1]):
                for end in range(2):
                    rank = src[i] if end == 0 else dst[i]
                    if ranks[BLOCK, rank] != cut:
                        ranks[BLOCK, rank] = cut
                        ranks[FIRST, rank] = -1
                        ranks[BEFORE, rank] = ranks[LAST, rank]
                        ranks[REACHED, rank] = FAR
                        ranks[LATER, rank] = -1
                        touched[n] = rank
                        n += 1
                rank = src[i]
                if ranks[FIRST, rank] < 0:
                    ranks[FIRST, rank] = i
                else:
                    ranks[LATER, rank] = max(ranks[LATER, rank], pause[i])
                ranks[LAST, rank] = max(ranks[LAST, rank], over[i])
                rank = dst[i]
                ranks[REACHED, rank] = min(ranks[REACHED, rank], there[i])
                ranks[LAST, rank] = max(ranks[LAST, rank], there[i])
            for k in range(n):
                rank = touched[k]
                first = ranks[FIRST, rank]
                if first < 0:
                    continue
                facts[chain, ACTS] += 1
                if sent[first] <= ranks[REACHED, rank] and pause[first] > slow:
                    facts[chain, UNASKED] += 1
                    if marked[places[cut]]:
                        times[rank] += 1
                if ranks[BEFORE, rank] != NEVER and ranks[LATER, rank] >= 0:
                    facts[chain, KNOWN] += 1
                    if sent[first] - ranks[BEFORE, rank] > 2 * ranks[LATER, rank]:
                        facts[chain, SILENT] += 1
