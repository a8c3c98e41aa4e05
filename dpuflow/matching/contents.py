"""What ranks do with what they receive: pass it on as it came, or reduced with their own.

In: lanes into and out of nodes, with messages' first bytes. Out: how often what comes leaves again unchanged.
That tells operations apart that put the same messages on the wire: all_gather and reduce_scatter on a ring,
broadcast and reduce on a chain; and how many GPUs a ring passes in a node.

That bytes differ shows that they were changed. That they are alike shows that they were passed on only if a
buffer's bytes are not all the same: zeros stay zeros whatever is done with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.matching.lanes import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.lanes import Lane

    Ints = NDArray[np.int64]

AGREE: Final = 0.9
"""Share of messages that must be passed on, or changed, as an operation has it: messages that were sent again
or lost from a capture may be told wrongly."""
FEW: Final = 32
"""Operations whose first bytes tell which lanes are of one channel."""


class Passed(NamedTuple):
    """Of lanes of as many messages, by the place of the message that leaves: how often it was seen together
    with the one that came so many before it, and how often it was the same."""

    known: Ints
    same: Ints


def passed_on(hops: Iterable[tuple[Sequence[Lane], Sequence[Lane]]], behind: int) -> dict[int, Passed]:
    """What goes on through nodes, by lanes' numbers of messages.

    ``hops``: the lanes into each node and out of it; out of it goes a message so many ``behind`` the one that
    came. Which lane goes on as which is told by what they carry.
    """
    found: dict[int, Passed] = {}
    for into, out in hops:
        came = grouped(into, lambda lane: len(lane.sizes))
        for length, goes in grouped(out, lambda lane: len(lane.sizes)).items():
            if length <= behind or length not in came:
                continue
            each = found.setdefault(length, Passed(*np.zeros((2, length), np.int64)))
            for one, other in _paired(came[length], goes, behind):
                before, after = one.samples[:, : length - behind], other.samples[:, behind:]
                some = (before > 0) & (after > 0) & (other.sizes[behind:] > 0)
                same = some & (before == after)
                telling = _telling(one.samples)[:, : length - behind]
                each.same[behind:] += (same & telling).sum(axis=0)
                each.known[behind:] += (some & (telling | ~same)).sum(axis=0)
    return found


def _telling(samples: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Whether each of a lane's bytes are others than what most of its messages carry."""
    values, counts = np.unique(samples, return_counts=True)
    most = counts.argmax()
    constant = samples.size > 1 and 2 * counts[most] > samples.size
    return np.asarray(samples != values[most]) if constant else np.ones(samples.shape, bool)


def _paired(came: Sequence[Lane], goes: Sequence[Lane], behind: int) -> list[tuple[Lane, Lane]]:
    """Lanes into a node with those on which they go on, as far as there are as many."""
    if len(came) == len(goes) == 1:
        return [(came[0], goes[0])]
    after = np.stack([lane.samples[:FEW, behind:] for lane in goes])
    alike = np.zeros((len(came), len(goes)), np.int64)
    for number, lane in enumerate(came):
        before = lane.samples[:FEW, : after.shape[2]]
        alike[number] = ((after == before) & (before > 0)).sum(axis=(1, 2))
    found: dict[int, int] = {}
    left = list(range(len(goes)))
    for place in np.argsort(-alike, axis=None, kind="stable").tolist():
        one, other = divmod(place, len(goes))
        if one not in found and other in left:
            found[one] = other
            left.remove(other)
    return [(came[one], goes[other]) for one, other in found.items()]


def unchanged(hops: Iterable[tuple[Sequence[Lane], Sequence[Lane]]]) -> bool | None:
    """Whether nodes pass on all that they get at once; False: nothing of it; None: some, or none was seen."""
    each = passed_on(hops, 0).values()
    known, same = (sum(int(part[place].sum()) for part in each) for place in (0, 1))
    return True if known and same >= AGREE * known else False if same < (1 - AGREE) * known else None
