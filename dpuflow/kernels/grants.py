"""What roles of messages are told from: payloads that may be clear-to-send entries, WRITEs by flow.

In: payload bytes, MESSAGE rows. Out: words of the payloads, counts; index and tag of the entries. Sources
as in ``messages.roles``.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import from_dtype, i8, inlined, inner, kernel, le16, le32, u4, void
from dpuflow.kernels.lanes import GRANT, NEVER, PSNS, WIRE_READ, WIRE_WRITE, WIRE_WRITE_IMM, WORDS
from dpuflow.schema.rows import MESSAGE

# NCCL's clear-to-send entries: 32 or 64 B each, at most eight in one WRITE (net_ib, common.h).
CTS_UNIT, CTS_MAX = 32, 512
WORD_PLACES = np.array([0, 4, 8, 16, 20, 24, 32, 36, 40, 48, 52, 56], np.int64)
N_WORDS = 14  # the words at these places, the bytes captured, the row
WORD_ADDRESS, WORD_CAPACITY, WORD_LENGTH, WORD_ROW = 0, 2, 12, 13
CAPACITY = 8  # where the receive capacity lies in all versions, behind the address
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


_MESSAGES, _WORDS, _I8 = from_dtype(MESSAGE.dtype)[::1], u4[:, ::1], i8[::1]


@kernel(void(_MESSAGES, _WORDS, _I8, _I8, _I8))
def read_entries(rows, words, flow, psn, size):  # type: ignore[no-untyped-def]
    """Flow, first PSN and bytes of the rows that ``words`` are of."""
    for i in range(words.shape[0]):
        row = rows[words[i, WORD_ROW]]
        flow[i] = row.flow
        psn[i] = np.int64(row.seq)
        size[i] = np.int64(row.bytes)


UNIT, TAG_PLACE, TAG_WORD, INDEX_PLACE, INDEX_WORD = range(5)  # of a layout: bytes, places, words
GRANTED, INDEX, TAG = range(3)  # columns of `found`


@inner
def _counts_up(words, order, low, high, psn, size, unit, word, mask):  # type: ignore[no-untyped-def]
    """Whether a word grows by one a message in one flow's entries, as PSNs do; a lone one must be PSN + 1."""
    steps = np.int64(0)
    some = False
    for k in range(low, high):
        i = order[k]
        if size[i] % unit != 0:
            return False
        some |= words[i, word] != 0
        if k > low:
            before = order[k - 1]
            grown = np.int64(words[i, word]) - np.int64(words[before, word])
            steps += 1 if (grown - (psn[i] - psn[before])) & mask & (PSNS - 1) == 0 else 0
    if high - low == 1:
        return (np.int64(words[order[low], word]) - (psn[order[low]] & (PSNS - 1)) - 1) & mask == 0
    return some and 2 * steps > high - low - 1


@kernel(void(_WORDS, _I8, _I8, _I8, _I8, i8[:, ::1], _WORDS))
def read_layouts(words, order, bounds, psn, size, layouts, found):  # type: ignore[no-untyped-def]
    """Index and tag of clear-to-send entries, flow by flow: ``order[bounds[f]:bounds[f + 1]]`` are of one.

    The first of ``layouts`` that fits all of a flow's entries counts; without any, PSNs count them, and they
    have no tag. Where 16 bits of the index were captured, the PSN, which counts the same, has the rest.
    """
    for f in range(bounds.shape[0] - 1):
        low, high = bounds[f], bounds[f + 1]
        shortest = np.int64(1) << 32
        for k in range(low, high):
            shortest = min(shortest, np.int64(words[order[k], WORD_LENGTH]))
        chosen = np.int64(-1)
        bits = np.int64(0)
        for e in range(layouts.shape[0]):
            known = shortest - layouts[e, INDEX_PLACE]
            bits = np.int64(32) if known >= 4 else np.int64(16)
            if known >= 2 and _counts_up(
                words, order, low, high, psn, size, layouts[e, UNIT], layouts[e, INDEX_WORD],
                (np.int64(1) << bits) - 1,
            ):  # fmt: skip
                chosen = np.int64(e)
                break
        tagged = chosen >= 0 and shortest >= layouts[chosen, TAG_PLACE] + 4
        for k in range(low, high):
            i = order[k]
            index = (psn[i] & (PSNS - 1)) + 1  # NCCL's queue pairs begin with PSN 0
            if chosen >= 0:
                index = np.int64(words[i, layouts[chosen, INDEX_WORD]])
                if bits == 16:
                    expected = (psn[i] & (PSNS - 1)) + 1
                    index = expected + ((index - expected + (1 << 15)) & 0xFFFF) - (1 << 15)
            found[i, GRANTED] = 1
            found[i, INDEX] = np.uint32(index & 0xFFFFFFFF)
            found[i, TAG] = words[i, layouts[chosen, TAG_WORD]] if tagged else np.uint32(0)


@kernel(void(_MESSAGES, _WORDS, _WORDS))
def write_entries(rows, words, found):  # type: ignore[no-untyped-def]
    """Mark the rows that ``words`` are of as grants, with what was ``found``."""
    for i in range(words.shape[0]):
        if found[i, GRANTED] == 0:
            continue
        row = rows[words[i, WORD_ROW]]
        row.role = GRANT
        captured = words[i, WORD_LENGTH] >= CAPACITY + 4
        row.announces = np.uint64(words[i, WORD_CAPACITY]) if captured else np.uint64(0)
        # The address that data is to go to, in place of the one that the entry was written to.
        row.va = np.uint64(0)
        if words[i, WORD_LENGTH] >= CAPACITY:
            row.va = np.uint64(words[i, WORD_ADDRESS]) | np.uint64(words[i, WORD_ADDRESS + 1]) << np.uint64(
                32
            )
        row.sub = found[i, INDEX]
        row.tag = found[i, TAG]
