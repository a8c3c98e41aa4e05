"""What ranks got and did, in order of time, and which of their sends had waited for an input.

In: one element an exchange, with the rows of its sender and receiver. Out: rows and times.
"""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import i8, inlined, kernel, u1
from dpuflow.kernels.ordering import merge_sort

NEVER = np.int64(-(1 << 63))
INPUT, SEND, DONE = range(3)  # kinds of events; of one instant they come in this order
KINDS = 4  # room for them in a key

_I8, _U1 = i8[::1], u1[::1]


@inlined
def is_event(time_ns, enter_ns):  # type: ignore[no-untyped-def]
    """Whether it counts: what came before the rank had entered waited for the rank."""
    return time_ns != NEVER and time_ns >= enter_ns


@inlined
def put_event(row, i, kind, after, keys, order, at):  # type: ignore[no-untyped-def]
    """Append an event of exchange ``i`` to those of a rank and kind; ``after``: when it was, from zero."""
    event, place = 3 * i + kind, KINDS * row + kind
    keys[event] = after * KINDS + kind
    order[at[place]] = event
    at[place] += 1


@kernel(i8(_I8, _I8, _I8, _I8, _I8, _I8, _I8, _U1, _U1, _I8, i8, _I8, _I8, _I8, _I8, _I8, _I8))
def waited(  # type: ignore[no-untyped-def]
    sender, receiver, arrived, sent, start, ready, before, mapped, split, enter, zero, at, keys, order, room,
    own, waited_ns,
):  # fmt: skip
    """Find sends whose rank had done all it could and waited for an input; returns how many.

    Times of each exchange: ``arrived`` and ``sent`` (its end), ``start`` (the sender's first act) and
    ``ready`` (its input and its credit were there), ns or NEVER; ``before``: what else it waited for its
    sender to begin, NEVER for all that began before it. Where it is ``mapped``, its input is
    known; else the last event before it must be an input, unless connections are ``split``. ``enter`` of
    each row, no time but NEVER lies before ``zero``. Scratch: ``at``, KINDS a row and one more;
    ``keys``, ``order`` and ``room``, three times as long as there are exchanges. Out, in order of rows and
    time: the sender's row ``own``, and ``waited_ns``, from that input, or the end of its own last data, to
    the send.
    """
    n = sender.shape[0]
    for k in range(at.shape[0]):
        at[k] = 0
    for i in range(n):
        if is_event(arrived[i], enter[receiver[i]]):
            at[KINDS * receiver[i] + INPUT + 1] += 1
        if is_event(start[i], enter[sender[i]]):
            at[KINDS * sender[i] + SEND + 1] += 1
        if is_event(sent[i], enter[sender[i]]):
            at[KINDS * sender[i] + DONE + 1] += 1
    for k in range(1, at.shape[0]):
        at[k] += at[k - 1]
    # Event 3 i + kind is of exchange i. Each kind comes nearly in order; then sorting merges few runs.
    for i in range(n):
        if is_event(arrived[i], enter[receiver[i]]):
            put_event(receiver[i], i, INPUT, arrived[i] - zero, keys, order, at)
        if is_event(start[i], enter[sender[i]]):
            put_event(sender[i], i, SEND, start[i] - zero, keys, order, at)
        if is_event(sent[i], enter[sender[i]]):
            put_event(sender[i], i, DONE, sent[i] - zero, keys, order, at)
    found = np.int64(0)
    low = np.int64(0)
    for k in range(enter.shape[0]):
        high = at[KINDS * k + DONE]
        merge_sort(keys, order, room, low, high)
        begun, done = NEVER, NEVER
        input_ns = NEVER  # of the event before, if that is an input
        for j in range(low, high):
            i, kind = order[j] // 3, order[j] % 3
            if kind == INPUT:
                input_ns = arrived[i]
                continue
            if kind == DONE:
                done = sent[i]
            else:
                since = ready[i] if mapped[i] else (NEVER if split[i] else input_ns)
                last = begun if before[i] == NEVER else before[i]
                if since != NEVER and since >= enter[k] and since >= last and since <= start[i]:
                    own[found] = k
                    waited_ns[found] = start[i] - max(since, done)
                    found += 1
                begun = start[i]
            input_ns = NEVER
        low = high
    return found
