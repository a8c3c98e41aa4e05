"""What roles of messages are told from: payloads that may be clear-to-send entries, WRITEs by flow.

In: payload bytes, MESSAGE rows. Out: words of the payloads, counts. Sources as in ``roles``.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inlined, kernel, le16, le32, u4, void
from dpuflow.kernels.lanes import GRANT, NEVER, WIRE_READ, WIRE_WRITE, WIRE_WRITE_IMM, WORDS
from dpuflow.schema import MESSAGE

# NCCL's clear-to-send entries: 32 or 64 B each, at most eight in one WRITE (net_ib, common.h).
CTS_UNIT, CTS_MAX = 32, 512
WORD_PLACES = np.array([8, 16, 20, 24, 32, 36, 40, 48, 52, 56], np.int64)
N_WORDS = 12  # the words at these places, the bytes captured, the row
WORD_LENGTH, WORD_ROW = 10, 11
SPREAD = 0x9E3779B1  # odd: mixes words without losing any (Knuth, TAOCP 3, 6.4)


@inlined
def keep_words(data, at, length, words, counts, row):  # type: ignore[no-untyped-def]
    """Keep the words of a payload that may be a clear-to-send entry, as far as captured."""
    n = counts[WORDS]
    counts[WORDS] = n + 1
    for k in range(len(WORD_PLACES)):
        place = WORD_PLACES[k]
        if place + 4 <= length:
            words[n, k] = le32(data, at + place)
        elif place + 2 <= length:
            words[n, k] = le16(data, at + place)
        else:
            words[n, k] = 0
    words[n, WORD_LENGTH] = length
    words[n, WORD_ROW] = row


SAMPLED = 12  # bytes that a sample of a message is taken from


@inlined
def sample_of(data, at):  # type: ignore[no-untyped-def]
    """A number for a message's first bytes: what is passed on unchanged has the same one at every hop.

    Of NCCL's LL, whose lines are data and flag in turn and whose flags change from hop to hop, only the data
    (device/prims_ll.h): bytes 0 to 3 and 8 to 11. 0 says nothing: data not captured, or zeros.
    """
    mixed = np.int64(le32(data, at)) * np.int64(SPREAD) + np.int64(le32(data, at + 8))
    return np.uint32(mixed & 0xFFFFFFFF)


READS, UNSORTED = range(2)  # places in `facts`


@kernel(void(from_dtype(MESSAGE.dtype)[::1], i8, i8[:, ::1], i8[::1]))
def survey(rows, n, writes, facts):  # type: ignore[no-untyped-def]
    """What the first ``n`` rows hold, in one pass over them.

    Out: ``writes`` of each flow, without and with immediate; ``facts``: READs, and rows that end
    before the one before them.
    """
    last = np.int64(NEVER)
    for i in range(n):
        wire = np.int64(rows[i].wire)
        if wire == WIRE_WRITE:
            writes[0, rows[i].flow] += 1
        elif wire == WIRE_WRITE_IMM:
            writes[1, rows[i].flow] += 1
        elif wire == WIRE_READ:
            facts[READS] += 1
        if rows[i].last_ns < last:
            facts[UNSORTED] += 1
        last = rows[i].last_ns


@kernel(void(from_dtype(MESSAGE.dtype)[::1], u4[::1], i8[::1], i8[::1], i8[::1]))
def read_entries(rows, row_of, flow, psn, size):  # type: ignore[no-untyped-def]
    """Flow, first PSN and bytes of the rows ``row_of``."""
    for i in range(row_of.shape[0]):
        row = rows[row_of[i]]
        flow[i] = row.flow
        psn[i] = np.int64(row.seq)
        size[i] = np.int64(row.bytes)


@kernel(void(from_dtype(MESSAGE.dtype)[::1], u4[::1], i8[::1], i8[::1], i8[::1], i8[::1]))
def write_entries(rows, row_of, number, capacity, count, tag):  # type: ignore[no-untyped-def]
    """Mark the rows ``row_of`` as grants; ``number`` is each one's place in the columns, -1 for no grant."""
    for i in range(row_of.shape[0]):
        k = number[i]
        if k < 0:
            continue
        row = rows[row_of[i]]
        row.role = GRANT
        row.announces = capacity[k]
        row.sub = np.uint32(count[k])
        row.tag = np.uint32(tag[k])
