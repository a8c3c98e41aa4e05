"""How far a hypothesis explains streams of messages, in counts and sizes and in time.

In: streams (rows of EXCHANGE by edge, HOLE -1 where one is known to be missing), a schedule as arrays
(``schedules.graph``). Message m of edge e in collective c is one of ``cuts`` segments each.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import f8, i8, inner, kernel, void

NEVER = np.int64(-(1 << 63))
FAR = np.int64((1 << 63) - 1)
BARRIER, SIZED = 1, 2  # kinds of operation: without data, surely with data; else 0

_I8, _F8 = i8[::1], f8[::1]


@kernel(i8(_I8, _I8, _I8, _I8))
def earliest(rows, at, end, starts):  # type: ignore[no-untyped-def]
    """The stream whose next message that was seen began first, -1 for none."""
    best, when = np.int64(-1), np.int64(0)
    for stream in range(at.shape[0]):
        if at[stream] == end[stream]:
            continue
        head = NEVER
        for i in range(at[stream], end[stream]):
            if rows[i] >= 0:
                head = starts[rows[i]]
                break
        if best < 0 or head < when:
            best, when = np.int64(stream), head
    return best


@kernel(i8(_I8, _I8, _I8, _I8, i8))
def largest(rows, at, end, sizes, most):  # type: ignore[no-untyped-def]
    """The largest of the next ``most`` messages of each stream; -1 without any."""
    size = np.int64(-1)
    for stream in range(at.shape[0]):
        for i in range(at[stream], min(end[stream], at[stream] + most)):
            if rows[i] >= 0:
                size = max(size, sizes[rows[i]])
    return size


@kernel(void(_I8, _I8, _I8, _I8, i8, _I8, _I8))
def heads(rows, at, end, sizes, most, alike, shorter):  # type: ignore[no-untyped-def]
    """For each stream how many messages come before the size changes, and 1 if it gets smaller there.

    Only the next ``most`` are looked at; where they are all alike, so are the others.
    """
    for stream in range(at.shape[0]):
        size = np.int64(-1)
        alike[stream] = end[stream] - at[stream]
        shorter[stream] = 0
        for i in range(at[stream], min(end[stream], at[stream] + most)):
            if rows[i] < 0:
                continue
            if size < 0:
                size = sizes[rows[i]]
            if sizes[rows[i]] != size:
                alike[stream] = i - at[stream]
                shorter[stream] = 1 if sizes[rows[i]] < size else 0
                break


@kernel(i8(_I8, _I8, _I8, _I8, _I8, _F8, i8, _I8, i8, i8, i8))
def run_length(rows, at, end, streams, counts, shares, cuts, sizes, kind, element, most):  # type: ignore[no-untyped-def]
    """How many collectives in a row, of ``most``, counts and sizes agree with.

    ``streams`` and ``counts`` are each edge's stream and messages, ``shares`` all edges' messages for a
    buffer of one byte. A message may differ by ``element`` bytes a segment; segments are equal, but for
    a shorter last one. Returns the number of collectives.
    """
    count = most
    for e in range(streams.shape[0]):
        count = min(count, (end[streams[e]] - at[streams[e]]) // (counts[e] * cuts))
    for c in range(count):
        # The buffer's size, from the messages whose own size is known.
        known, seen, units = np.int64(0), np.int64(0), 0.0
        share = np.int64(0)
        for e in range(streams.shape[0]):
            first = at[streams[e]] + c * counts[e] * cuts
            for m in range(counts[e]):
                for s in range(cuts):
                    row = rows[first + m * cuts + s]
                    if row >= 0:
                        known += sizes[row]
                        units += shares[share] / cuts
                        seen += 1
                share += 1
        if seen == 0 or (kind == BARRIER and known != 0) or (kind == SIZED and known == 0):
            return np.int64(c)
        size = known / max(units, 1e-12)
        share = np.int64(0)
        for e in range(streams.shape[0]):
            first = at[streams[e]] + c * counts[e] * cuts
            for m in range(counts[e]):
                total, largest, holes = np.int64(0), np.int64(-1), np.int64(0)
                for s in range(cuts):
                    row = rows[first + m * cuts + s]
                    if row < 0:
                        holes += 1
                    else:
                        total += sizes[row]
                        largest = max(largest, sizes[row])
                if holes == 0 and abs(total - shares[share] * size) > element * cuts:
                    return np.int64(c)
                for s in range(cuts - 1):
                    row = rows[first + m * cuts + s]
                    if row >= 0 and sizes[row] != largest:
                        return np.int64(c)
                share += 1
    return np.int64(count)


@inner
def sort(values, n):  # type: ignore[no-untyped-def]
    """Sort the first ``n`` values in place (shell sort: nothing to allocate, good where nearly sorted)."""
    step = np.int64(1)
    while step < n:
        step = 3 * step + 1
    while step > 0:
        for i in range(step, n):
            value = values[i]
            j = i
            while j >= step and values[j - step] > value:
                values[j] = values[j - step]
                j -= step
            values[j] = value
        step //= 3


@inner
def below(values, n, limit):  # type: ignore[no-untyped-def]
    """How many of the first ``n`` sorted values are less than ``limit``."""
    low, high = np.int64(0), np.int64(n)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < limit:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def gather(rows, at, streams, counts, cuts, c, edges, begin, stop, times, keys, n, bit):  # type: ignore[no-untyped-def]
    """Append twice the known times of collective ``c`` on some edges, plus ``bit``; returns the length."""
    for k in range(begin, stop):
        e = edges[k]
        per = counts[e] * cuts
        first = at[streams[e]] + c * per
        for i in range(first, first + per):
            row = rows[i]
            if row >= 0 and times[row] != NEVER:
                keys[n] = 2 * times[row] + bit
                n += 1
    return n


@kernel(void(_I8, _I8, _I8, _I8, i8, i8, i8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8, _I8))
def contrast(  # type: ignore[no-untyped-def]
    rows, at, streams, counts, cuts, count, longer, free, out_at, out_edges, in_at, in_edges, starts,
    arrivals, keys, first, later, facts,
):  # fmt: skip
    """Count the (first send, later send) pairs of a rank in which the first paused ``longer`` times as long.

    A first send's pause counts from the rank's last event in the collective before, a later one's from
    its last event in the same collective. ``out_edges[out_at[r]:out_at[r + 1]]`` are the edges that rank
    r sends on, ``in_edges`` those it receives on; ``free`` the ranks to ask. ``keys``, ``first`` and
    ``later`` are scratch: events of a rank in one collective, collectives, events in all. Adds to
    ``facts``: won pairs, pairs, later sends.
    """
    for f in range(free.shape[0]):
        rank = free[f]
        n_first = n_later = np.int64(0)
        before = NEVER
        for c in range(count):
            n = gather(rows, at, streams, counts, cuts, c, out_edges, out_at[rank], out_at[rank + 1], starts,
                       keys, np.int64(0), 1)  # fmt: skip
            begin = FAR
            for i in range(n):
                begin = min(begin, keys[i] >> 1)
            n = gather(rows, at, streams, counts, cuts, c, in_edges, in_at[rank], in_at[rank + 1], arrivals,
                       keys, n, 0)  # fmt: skip
            sort(keys, n)
            if c > 0:
                first[n_first] = 0 if before == NEVER else max(begin - before, 0)
                n_first += 1
            for i in range(1, n):
                if keys[i] & 1 and keys[i] >> 1 > begin:
                    later[n_later] = (keys[i] >> 1) - (keys[i - 1] >> 1)
                    n_later += 1
            before = keys[n - 1] >> 1 if n else NEVER
        sort(later, n_later)
        for i in range(n_first):
            facts[0] += below(later, n_later, first[i] // longer)
        facts[1] += n_first * n_later
        facts[2] += n_later


@kernel(void(_I8, _I8, _I8, _I8, i8, i8, i8[:, ::1], _I8, _I8, _I8, _I8, _I8, _I8, _I8))
def causality(  # type: ignore[no-untyped-def]
    rows, at, streams, counts, cuts, count, needs, needs_at, in_at, in_edges, starts, arrivals, keys, facts
):
    """Count sends that left after the input they need, and those that nothing else reached in between.

    ``needs[needs_at[r]:needs_at[r + 1]]`` are rank r's sends that need an input: edge and message of the
    send, edge and message of the input. ``keys`` is scratch for a rank's inputs in one collective. Adds
    to ``facts``: sends asked, after their input, right after it.
    """
    for rank in range(needs_at.shape[0] - 1):
        if needs_at[rank] == needs_at[rank + 1]:
            continue
        for c in range(count):
            n = gather(rows, at, streams, counts, cuts, c, in_edges, in_at[rank], in_at[rank + 1], arrivals,
                       keys, np.int64(0), 0)  # fmt: skip
            sort(keys, n)
            for k in range(needs_at[rank], needs_at[rank + 1]):
                sent_e, got_e = needs[k, 0], needs[k, 2]
                sent_at = at[streams[sent_e]] + (c * counts[sent_e] + needs[k, 1]) * cuts
                got_at = at[streams[got_e]] + (c * counts[got_e] + needs[k, 3]) * cuts
                for s in range(cuts):
                    sent, got = rows[sent_at + s], rows[got_at + s]
                    if sent < 0 or got < 0:
                        continue
                    sent_ns, got_ns = starts[sent], arrivals[got]
                    if sent_ns == NEVER or got_ns == NEVER:
                        continue
                    facts[0] += 1
                    if sent_ns < got_ns:
                        continue
                    facts[1] += 1
                    if below(keys, n, 2 * sent_ns + 1) == below(keys, n, 2 * got_ns + 1):
                        facts[2] += 1
