"""What matching reads, the exchanges of a job, and what it tells: collectives with algorithm and places.

Levels that rules of matching share are named here, each once with its reason
(docs/theory/rules.md lists all).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.matching.buffers import DEFAULT
from dpuflow.matching.streams import columns_of
from dpuflow.schedules.graph import first_acts, free_ranks
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from dpuflow.arrays import Ints
    from dpuflow.identity.processes import Ends
    from dpuflow.matching.buffers import Buffer
    from dpuflow.matching.streams import Columns
    from dpuflow.schedules.algorithms import Algorithm
    from dpuflow.schema.tables import Rows


@dataclass(frozen=True, eq=False)
class Job:
    """EXCHANGE rows, and what is known of their endpoints and of what was captured.

    ``position``: each endpoint's place in the default numbering of ranks (a rank named by the library or a
    rank map, else the order of addresses). ``near``: the endpoints all of whose messages were captured, None
    for everyone; ``but_one``: those with a capture where all but one have one. ``places``: each endpoint's
    node, None where each is a node of its own. ``until``: when each one's capture ends, NEVER without one,
    None where nothing is known of that. ``ends``: who is at both ends of each connection, where processes may
    share addresses. Of NCCL: ``announced``: bytes that the clear-to-send entry of each row allowed, 0 where
    none was seen, ``granted_at`` the address that it named, -1 where none was; ``asked``: for how many
    messages it was, None where each was for one; ``buffers``: what slots are.
    """

    exchanges: Rows
    position: Ints
    near: frozenset[int] | None = None
    places: Ints | None = None
    announced: Ints | None = None
    asked: Ints | None = None
    until: Ints | None = None
    buffers: Mapping[int, Buffer] = field(default_factory=lambda: DEFAULT)
    ends: Ends | None = None
    but_one: frozenset[int] | None = None
    granted_at: Ints | None = None

    @cached_property
    def columns(self) -> Columns:
        """What cutting needs of every exchange."""
        return columns_of(self.exchanges)

    @cached_property
    def nodes(self) -> Ints:
        """The node of each endpoint."""
        return np.arange(len(self.position)) if self.places is None else self.places

    def ordered(self, ends: Iterable[int]) -> list[int]:
        """``ends``, each once, by their places in the default numbering."""
        return sorted(set(ends), key=lambda end: int(self.position[end]))

    def is_captured(self, end: int) -> bool:
        """Whether all messages of an endpoint are there."""
        return self.near is None or end in self.near

    def of(self, rows: Ints) -> Job:
        """The job of those who exchanged ``rows``: without a capture of others they were seen as well."""
        if self.near is None:
            return self
        ends = distinct([self.exchanges["src"][rows], self.exchanges["dst"][rows]])
        return replace(self, near=None) if self.near.issuperset(ends.tolist()) else self


@dataclass(frozen=True, eq=False, slots=True)
class InstanceView:
    """What of a collective was seen, and what its first messages may have waited for.

    ``near``: the endpoints all of whose messages were captured; None: everyone's. ``blind`` are the positions
    whose first message is known to be missing; ``free``, where the algorithm is not known, those whose first
    message is known to need no input, and of ``processes`` the ranks whose first message between nodes needs
    nothing of other nodes. ``at_once``: ranks declare all that they will send and receive as soon as they
    enter. ``inside``: a first message may have waited for ranks of the same node, of which nothing is on the
    wire. ``apart``: a part of an operation, whose other ranks captures on other clocks show.
    """

    near: frozenset[int] | None = None
    blind: frozenset[int] = frozenset()
    free: frozenset[int] = frozenset()
    at_once: bool = False
    inside: bool = False
    apart: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Which ranks endpoints stand for.

    Where ranks took part that no capture saw, ``ranks`` is how many took part and ``seats`` the positions of
    those in ``order``. ``nodes``: where nodes have several ranks, the node of each place. ``parts``: where
    adapters serve several ranks whose own messages are all seen, the rank behind each of ``rows``.
    ``processes``: where processes share addresses, those at the sender and at the receiver of ``rows`` (two
    lines), by rank where ``ranks`` are known.
    """

    ranks: int = 0
    seats: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    parts: Ints | None = None
    processes: Ints | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Slicing:
    """NCCL's ``protocol``, where it is known; ``tails``: so many parts of the buffer do not fill their slots,
    and ``between`` the least and most bytes of the buffer where its size is not told."""

    protocol: str | None = None
    tails: int = 0
    between: tuple[int, int] | None = None


@dataclass(slots=True)
class Instance:
    """One collective. ``rows`` are EXCHANGE rows in order of their first sign.

    ``order`` lists the endpoints by their position in the algorithm; ``root`` is a position.
    ``size`` is the buffer of one rank in bytes, None where the packets do not tell. ``alike``: other
    operations that have the same packets.
    """

    rows: Ints
    op: Op
    order: list[int]
    algorithm: Algorithm | None = None
    alternatives: list[str] = field(default_factory=list)
    root: int | None = None
    size: int | None = None
    complete: bool = True
    confidence: float = 1.0
    alike: tuple[Op, ...] = ()
    view: InstanceView = InstanceView()
    placement: Placement = Placement()
    slicing: Slicing = Slicing()

    @property
    def seats(self) -> tuple[int, ...]:
        """The positions of those in ``order``."""
        return self.placement.seats or tuple(range(len(self.order)))

    @property
    def rank_count(self) -> int:
        """How many ranks took part."""
        return self.placement.ranks or len(self.order)

    @property
    def hides_ranks(self) -> bool:
        """Whether ranks took part of which no message of their own is seen."""
        told = self.placement.parts is not None or self.placement.processes is not None
        return self.rank_count > len(self.order) and not told

    def was_captured(self, end: int) -> bool:
        """Whether all messages of an endpoint are there."""
        return self.view.near is None or end in self.view.near

    @property
    def root_endpoint(self) -> int | None:
        """The endpoint at the root, None without a root or where it was not seen."""
        if self.root is None:
            return None
        return self.order[self.seats.index(self.root)] if self.root in self.seats else None

    def free_rows(self) -> list[int]:
        """Places in ``order`` whose first message needs no input, and was not missed."""
        if self.view.inside:
            return []
        if self.algorithm is None:
            return sorted(self.view.free - self.view.blind)
        places = free_ranks(self.algorithm, self.rank_count, self.root or 0) - self.view.blind
        return [row for row, seat in enumerate(self.seats) if seat in places]

    def undated_rows(self) -> tuple[list[int], list[int]]:
        """Places in ``order`` whose first seen send, and whose first seen grant, need not be their first act.

        Of an endpoint without a capture of its own only what it exchanged with captured ones was seen. Its
        send dates its entry where the schedule has it as the first of all its sends, in its first step; its
        grant where the data is of that step. Whose first message is missing may have acted before. Libraries
        that post everything at once (``at_once``) need no such order.
        """
        near, algorithm = self.view.near, self.algorithm
        if self.view.inside:
            return list(range(len(self.order))), []
        if near is None:
            return (sorted(self.view.blind),) * 2
        hidden = [row for row, end in enumerate(self.order) if end not in near]
        if algorithm is not None and algorithm.rooted and len(self.order) == 2 and not self.placement.ranks:
            # One edge of a tree, of any size: who sends may have waited for others, who receives has not.
            down = self.op in (Op.BROADCAST, Op.SCATTER)
            return hidden, [] if down else hidden
        if self.view.at_once:
            return [], []
        if algorithm is None:
            return hidden, hidden
        captured = {seat for seat, end in zip(self.seats, self.order, strict=True) if end in near}
        return self._not_first(algorithm, hidden, captured)

    def _not_first(
        self, algorithm: Algorithm, hidden: Sequence[int], captured: AbstractSet[int]
    ) -> tuple[list[int], list[int]]:
        """The same of rows ``hidden``, by the schedule; ``captured`` are seats."""
        n, seats, root = self.rank_count, self.seats, self.root or 0
        sends, grants = first_acts(algorithm, n, root)
        # Where several send to one at once, data waits its turn in the network: its arrival dates no entry.
        alone = {seat for seat in captured if len(grants.get(seat, ())) < 2}
        free = set(seats) if algorithm.starters is None else algorithm.starters(n, root)
        return (
            [row for row in hidden if sends.get(seats[row]) not in alone or seats[row] not in free],
            [row for row in hidden if captured.isdisjoint(grants.get(seats[row], ()))],
        )


def placed(instance: Instance, near: frozenset[int] | None) -> Instance:
    """The instance with ranks that nobody saw (negative in ``order``) taken out of ``order``."""
    if near is None:
        return instance
    if min(instance.order) >= 0:
        return replace(instance, view=replace(instance.view, near=near))
    seats = tuple(place for place, end in enumerate(instance.order) if end >= 0)
    return replace(
        instance,
        order=[instance.order[place] for place in seats],
        view=replace(instance.view, near=near),
        placement=replace(instance.placement, ranks=len(instance.order), seats=seats),
    )


MOST: Final = 0.9
"""Share of cases that must confirm a reading. One in ten may be disturbed (a late stamp, a retransmission, a
message lost from the capture, the capture's ends); one that explains fewer does not fit the messages."""
RARE: Final = 0.1
"""Share of cases that may speak against a reading: the rest of ``MOST``."""
HALF: Final = 0.5
"""Share of cases beyond which those that agree speak for all, and are no chance."""
TWICE: Final = 2
"""How often something must have been seen: what happened once may be chance, or a wrong time."""
