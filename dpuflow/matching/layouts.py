"""What the connections of one operation of NCCL make together: a ring, a chain, trees, PAT; and its bytes.

In: for each connection that takes part its messages, over all operations that look the same. Out: operation,
algorithm, the ranks in order and the bytes of the buffer as on the wire, or None where no algorithm of NCCL
has such messages: they are held against each algorithm as it would be seen (``lanes.View``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.matching.branches import chain, trees, trees_by_rail
from dpuflow.matching.buffers import DEFAULT, RING, STEP
from dpuflow.matching.lanes import View
from dpuflow.matching.pats import pat_of
from dpuflow.matching.rings import open_ring, ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.matching.buffers import Buffer
    from dpuflow.matching.lanes import Lane, Layout


def layout_of(
    lanes: Sequence[Lane],
    position: NDArray[np.int64],
    nodes: NDArray[np.int64],
    ends: Sequence[int],
    near: AbstractSet[int] | None = None,
    among: int = 0,
    buffers: Mapping[int, Buffer] = DEFAULT,
) -> Layout | None:
    """What the connected ``lanes`` make together.

    ``position``, ``near`` and ``nodes``: see ``structured_instances``; ``ends`` are all endpoints of the
    communicator that were seen, ``among`` how many ranks it has, 0 where that is not known;
    ``buffers`` says what slots are.
    """
    slots = {lane.slot for lane in lanes}
    if len(slots) > 1 or not slots <= buffers.keys():
        return None
    slot = slots.pop()
    if any(lane.sizes.max(initial=0) > slot for lane in lanes):
        return None
    view = View(lanes, position, nodes, ends, near, among, buffers[slot])
    return next(filter(None, (shape(view) for shape in _shapes(view))), None)


def _shapes(view: View) -> Iterator[Callable[[View], Layout | None]]:
    """What the lanes may be, what is told best first."""
    if view.shared:
        yield ring if view.whole else open_ring
        if view.kind != RING:
            if view.whole:
                yield chain
            yield trees_by_rail
        return
    if view.near is not None:
        yield open_ring
    if view.kind == RING:
        yield _ring_of_nodes
    elif view.kind != STEP:
        yield from (trees, _ring_of_nodes, chain)
    elif len(view.members) == 2 or not view.whole:
        # Two ranks' PAT has the messages of a tree; what comes down a tree waits.
        yield from (trees, pat_of, chain)
    else:
        yield from (pat_of, trees, chain)
    yield ring  # NICs that several GPUs share: more ranks than endpoints


def _ring_of_nodes(view: View) -> Layout | None:
    return ring(view, 1)
