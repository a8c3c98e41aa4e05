"""What nodes pass on: samples of messages' bytes, and when messages came and left, in; how often what left
was what had come, and how long that took, out."""

from __future__ import annotations

import numpy as np

from dpuflow.kernels._jit import i8, kernel, u4, void
from dpuflow.kernels.links import select

NEVER = np.int64(-(1 << 63))


@kernel(void(u4[:, :, ::1], u4[:, :, ::1], i8, i8[:, ::1]))
def alike(came, goes, behind, count):  # type: ignore[no-untyped-def]
    """For each lane that ``came`` and each that ``goes`` (lanes, operations, messages) how many messages of
    the latter have the bytes of the one so many ``behind`` them."""
    for one in range(came.shape[0]):
        for other in range(goes.shape[0]):
            found = np.int64(0)
            for operation in range(came.shape[1]):
                for at in range(came.shape[2] - behind):
                    here = came[one, operation, at]
                    if here > 0 and here == goes[other, operation, at + behind]:
                        found += 1
            count[one, other] = found


@kernel(i8(u4[:, ::1]))
def usual(samples):  # type: ignore[no-untyped-def]
    """The value that more than half of several ``samples`` have; -1 where there is none."""
    # If there is one it is what is left of pairs of different ones.
    value, votes = np.int64(-1), np.int64(0)
    for operation in range(samples.shape[0]):
        for at in range(samples.shape[1]):
            if votes == 0:
                value = np.int64(samples[operation, at])
            votes += 1 if samples[operation, at] == value else -1
    often, count = np.int64(0), samples.shape[0] * samples.shape[1]
    for operation in range(samples.shape[0]):
        for at in range(samples.shape[1]):
            often += samples[operation, at] == value
    return value if count > 1 and 2 * often > count else np.int64(-1)


@kernel(void(u4[:, ::1], u4[:, ::1], i8[::1], i8, i8, i8[::1], i8[::1]))
def passed(came, goes, sizes, behind, ignored, known, same):  # type: ignore[no-untyped-def]
    """Add for each place of a message that ``goes`` on (operations, messages) in how many operations it was
    seen together with the one so many ``behind`` it that ``came``, and in how many it was the same.

    Both the same and ``ignored`` tell nothing. ``sizes``: of what goes.
    """
    for operation in range(came.shape[0]):
        for at in range(came.shape[1] - behind):
            here, there = came[operation, at], goes[operation, at + behind]
            if here == 0 or there == 0 or sizes[at + behind] <= 0:
                continue
            if here != there:
                known[at + behind] += 1
            elif here != ignored:
                known[at + behind] += 1
                same[at + behind] += 1


@kernel(void(i8[:, :, ::1], i8[:, ::1], i8[:, ::1], i8[:, ::1]))
def handed(came, left, known, early):  # type: ignore[no-untyped-def]
    """Of each connection's messages that ``came`` (operations, connections, messages) and each one's that
    ``left`` (connections, messages of all operations) of how many both times are ``known``, and how many left
    before they came."""
    messages = came.shape[2]
    for one in range(came.shape[1]):
        for other in range(left.shape[0]):
            both, before = np.int64(0), np.int64(0)
            for operation in range(came.shape[0]):
                for at in range(messages):
                    here, there = came[operation, one, at], left[other, operation * messages + at]
                    if here != NEVER and there != NEVER:
                        both += 1
                        before += there < here
            known[one, other] = both
            early[one, other] = before


@kernel(void(i8[:, :, ::1], i8[:, ::1], i8[:, ::1], i8[:, ::1], i8[::1], i8[:, ::1]))
def took(came, left, pairs, places, room, found):  # type: ignore[no-untyped-def]
    """How long it took from one connection's messages to another's, for each of ``pairs`` of these: what is
    at ``places`` of the sorted times. ``room`` has an element for each message of a connection."""
    messages = came.shape[2]
    for pair in range(pairs.shape[0]):
        one, other = pairs[pair, 0], pairs[pair, 1]
        n = np.int64(0)
        for operation in range(came.shape[0]):
            for at in range(messages):
                here, there = came[operation, one, at], left[other, operation * messages + at]
                if here != NEVER and there != NEVER:
                    room[n] = there - here
                    n += 1
        for k in range(places.shape[1]):
            select(room, np.int64(0), n, places[pair, k])
            found[pair, k] = room[places[pair, k]]
