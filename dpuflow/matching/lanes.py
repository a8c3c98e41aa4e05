"""One operation of NCCL's as connections saw it: its lanes, what could be seen, and what it is said to be.

A ``View`` says what of a schedule is on the wire: ranks of one node talk over NVLink, several may share an
adapter, and where some nodes have no capture only what these exchange with captured ones was seen.

What ranks do with what they receive, pass it on as it came or reduced with their own, tells operations apart
that put the same messages on the wire: all_gather and reduce_scatter on a ring, broadcast and reduce on a
chain; and how many GPUs a ring passes in a node. That bytes differ shows that they were changed. That they
are alike shows that they were passed on only if a buffer's bytes are not all the same: zeros stay zeros
whatever is done with them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.model import MOST, Instance, InstanceView, Placement, Slicing

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays import Ints
    from dpuflow.matching.model import Job
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schema.rows import Op


T = TypeVar("T")
K = TypeVar("K", bound="Hashable")


class Lane(NamedTuple):
    """One connection's part in operations that look alike. Times are (operations, messages)."""

    src: int
    dst: int
    slot: int
    sizes: Ints
    starts: Ints
    arrivals: Ints
    samples: NDArray[np.uint32]  # of the first bytes; 0 where they were not captured

    @property
    def kind(self) -> tuple[int, int]:
        """What tells channels apart: the number of messages, and their bytes."""
        return len(self.sizes), int(self.sizes.sum())


class Layout(NamedTuple):
    """An operation. ``order`` lists endpoints by position; ``alike``: operations with the same packets.

    ``ranks`` is how many took part where nodes have several GPUs, else 0; ``inside`` says that a first
    message may have waited for others of its node. ``size`` is None where the packets leave it open, and
    ``order`` has negative numbers for ranks that no capture saw; ``among``: how many ranks a ring has, 0
    where that is not known. ``tails``: so many parts of the buffer may end within a slot; all others fill
    theirs. 0: not known. ``held``: so many messages are what their sender had got, as the operation has it.
    """

    op: Op
    algorithm: Algorithm
    order: list[int]
    size: int | None
    root: int | None = None
    alike: tuple[Op, ...] = ()
    ranks: int = 0
    inside: bool = False
    tails: int = 1
    among: int = 0
    held: int = 0

    @property
    def named(self) -> tuple[Op, tuple[Op, ...]]:
        """What it is said to be, with what it may be as well."""
        return self.op, self.alike

    def made(self, rows: Ints, nodes: Ints) -> Instance:
        """The collective of these EXCHANGE rows; ``nodes``: each endpoint's."""
        return Instance(
            rows,
            self.op,
            list(self.order),
            self.algorithm,
            root=self.root,
            size=self.size,
            alike=self.alike,
            view=InstanceView(inside=self.inside),
            placement=Placement(self.ranks, tuple(range(len(self.order))), tuple(nodes[self.order].tolist()))
            if self.ranks
            else Placement(),
            slicing=Slicing(tails=self.tails),
        )


class View:
    """What was seen of one operation.

    ``ends``: all endpoints of the communicator; ``among``: how many ranks there are, 0 where that is not
    known; ``kind``: what the slots are.
    """

    def __init__(self, job: Job, lanes: Sequence[Lane], ends: Iterable[int], among: int = 0) -> None:
        self.lanes, self.near, self._job = sorted(lanes, key=lambda lane: lane.kind), job.near, job
        self.among, self.kind, self.is_captured = among, job.buffers[lanes[0].slot], job.is_captured
        self.members = job.ordered(end for lane in lanes for end in lane[:2])
        self.ends = job.ordered(ends)
        self.shared = len(set(map(self.node, self.ends))) < len(self.ends)
        self.whole = job.near is None or job.near >= set(self.members)

    def node(self, end: int) -> int:
        """The node of an endpoint."""
        return int(self._job.nodes[end])

    @cached_property
    def out(self) -> dict[int, list[Lane]]:
        """The lanes that leave each node, by kind."""
        return grouped(self.lanes, lambda lane: self.node(lane.src))

    @cached_property
    def into(self) -> dict[int, list[Lane]]:
        """The lanes that lead to each node, by kind."""
        return grouped(self.lanes, lambda lane: self.node(lane.dst))

    def rails(self) -> list[View]:
        """What is connected by endpoints, each by itself: NVLink joins the rails of a node."""
        parts = connected(self.lanes, lambda lane: lane[:2])
        return [
            View(self._job, part, {end for lane in part for end in lane[:2]}, self.among) for part in parts
        ]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """``items`` by their ``key``, in order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


FEW: Final = 32
"""Operations whose first bytes show which lanes are of one channel."""


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
    from dpuflow.kernels import passing

    found: dict[int, Passed] = {}
    for into, out in hops:
        came = grouped(into, lambda lane: len(lane.sizes))
        for length, goes in grouped(out, lambda lane: len(lane.sizes)).items():
            if length <= behind or length not in came:
                continue
            each = found.setdefault(length, Passed(*np.zeros((2, length), np.int64)))
            for one, other in _paired(came[length], goes, behind):
                ignored = _usual(one.samples)
                passing.passed(
                    one.samples, other.samples, other.sizes, behind, ignored, each.known, each.same
                )
    return found


def _usual(samples: NDArray[np.uint32]) -> int:
    """What most of a lane's messages carry, which tells nothing where it is passed on; -1: nothing."""
    from dpuflow.kernels import passing

    value: int = passing.usual(samples)
    return value


def _paired(came: Sequence[Lane], goes: Sequence[Lane], behind: int) -> list[tuple[Lane, Lane]]:
    """Lanes into a node with those on which they go on, as far as there are as many."""
    if len(came) == len(goes) == 1:
        return [(came[0], goes[0])]
    from dpuflow.kernels import passing

    count = np.zeros((len(came), len(goes)), np.int64)
    passing.alike(
        *(np.stack([lane.samples[:FEW] for lane in lanes]) for lanes in (came, goes)), behind, count
    )
    found: dict[int, int] = {}
    left = list(range(len(goes)))
    for place in np.argsort(-count, axis=None, kind="stable").tolist():
        one, other = divmod(place, len(goes))
        if one not in found and other in left:
            found[one] = other
            left.remove(other)
    return [(came[one], goes[other]) for one, other in found.items()]


def unchanged(hops: Iterable[tuple[Sequence[Lane], Sequence[Lane]]]) -> bool | None:
    """Whether nodes pass on all that they get at once; False: nothing of it; None: some, or none was seen."""
    each = passed_on(hops, 0).values()
    known, same = (sum(int(part[place].sum()) for part in each) for place in (0, 1))
    return True if known and same >= MOST * known else False if same < (1 - MOST) * known else None
