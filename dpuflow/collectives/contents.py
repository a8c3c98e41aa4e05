"""What ranks do with what they receive: pass it on as it came, or reduced with their own.

In: connections' messages with their first bytes. Out: how much of what comes leaves again unchanged. That
tells operations apart that put the same messages on the wire: all_gather and reduce_scatter on a ring,
broadcast and reduce on a chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives.layouts import Lane

PASSED: Final = 0.9
"""Share of messages that must agree on what ranks do with what they receive: messages that were sent again or
lost from a capture may be told wrongly."""
NOTHING, SOME, ALL = range(3)


def passed_on(hops: Sequence[tuple[Lane, Lane]], behind: int, period: int = 1) -> int | None:
    """How much ranks pass on unchanged of what they receive: NOTHING, SOME, ALL, or None if that is not seen.

    ``hops`` are lanes into and out of a rank; out of it goes a message so many ``behind`` the one that came,
    but for as many at the beginning of each ``period``, which are the rank's own.
    """
    by_length: dict[int, list[tuple[Lane, Lane]]] = {}  # those of as many messages are compared at once
    for came, goes in _by_content(hops, behind):
        if len(goes.sizes) > behind:
            by_length.setdefault(len(goes.sizes), []).append((came, goes))
    same = seen = 0
    for length, alike in by_length.items():
        before = np.concatenate([came.samples[:, : length - behind] for came, _ in alike])
        after = np.concatenate([goes.samples[:, behind:] for _, goes in alike])
        sizes = np.concatenate([goes.sizes[behind:] for _, goes in alike]).reshape(len(alike), -1)
        whose = np.repeat(sizes > 0, len(after) // len(alike), axis=0)
        if behind:
            whose &= np.arange(behind, length) % period >= behind
        known = (before > 0) & (after > 0) & whose
        seen += int(known.sum())
        same += int((known & (before == after)).sum())
    return _share(same, seen)


def _by_content(hops: Sequence[tuple[Lane, Lane]], behind: int) -> list[tuple[Lane, Lane]]:
    """``hops`` with parallel channels of one kind put together by what they pass on.

    Which of them are the same channel is not known, in a capture that begins in mid-job not even by first
    use.
    """
    parallel: dict[tuple[object, ...], list[tuple[Lane, Lane]]] = {}
    for came, goes in hops:
        parallel.setdefault((*came[:2], *goes[:2], came.kind, goes.kind), []).append((came, goes))
    found = []
    for alike in parallel.values():
        left = [goes for _, goes in alike]
        for came, _ in alike:

            def same(goes: Lane, came: Lane = came) -> int:
                before = came.samples[:, : came.samples.shape[1] - behind]
                after = goes.samples[:, behind:]
                return int(np.count_nonzero((before > 0) & (before == after)))

            best = max(range(len(left)), key=lambda k: same(left[k])) if len(left) > 1 else 0
            found.append((came, left.pop(best)))
    return found


def passed_between(lanes: Sequence[Lane], nodes: NDArray[np.int64], behind: int, period: int) -> int | None:
    """The same of nodes of several GPUs: which lane goes on where another one came is hidden inside.

    So each message that leaves a node is looked for among all that came so many ``behind`` it.
    """
    same = seen = 0
    length = len(lanes[0].sizes)
    own = np.arange(behind, length) % period < behind
    for node in sorted({int(nodes[lane.src]) for lane in lanes}):
        came = [lane.samples[:, : length - behind] for lane in lanes if nodes[lane.dst] == node]
        goes = [lane for lane in lanes if nodes[lane.src] == node]
        if not came or {len(lane.sizes) for lane in goes} != {length}:
            return None
        after = np.stack([lane.samples[:, behind:] for lane in goes])
        full = np.stack([lane.sizes[behind:] for lane in goes])[:, None] > 0
        known = (after > 0) & full & ~own
        # The operation and the place in it, and the first bytes.
        place = np.arange(after[0].size, dtype=np.uint64).reshape(after[0].shape) << np.uint64(32)
        there = np.concatenate([(place | each)[each > 0] for each in came])
        seen += int(known.sum())
        same += int(np.isin((place | after)[known], there).sum())
    return _share(same, seen)


def _share(same: int, seen: int) -> int | None:
    if not seen:
        return None
    return ALL if same >= PASSED * seen else NOTHING if same <= (1 - PASSED) * seen else SOME
