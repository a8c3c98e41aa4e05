"""The algorithms that are known: for each operation, the ways libraries carry it out.

An ``Algorithm`` is a pattern of sends with what a reconstruction has to know of it beside. ``schedules`` says
what follows from one for a number of ranks. A pattern for which the result format has no name is "unknown".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpuflow.schedules.patterns import (
    bcube,
    binomial_barrier,
    bruck_all_gather,
    bruck_all_to_all,
    butterfly,
    dissemination,
    double_ring,
    doubling_all_gather,
    doubling_barrier,
    folded_barrier,
    folded_rabenseifner,
    linear_all_to_all,
    linear_barrier,
    neighbour_exchange,
    pairwise,
    rabenseifner,
    rabenseifner_reduce,
    recursive_doubling,
    recursive_halving,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce,
    ring_reduce_scatter,
)
from dpuflow.schedules.trees import (
    binary_by_level,
    binary_heap,
    binomial_in_order,
    binomial_outward,
    chains,
    down,
    flat,
    gathered,
    in_order_up,
    is_power,
    k_nomial,
    power_below,
    scattered,
    split_binary,
    synced_up,
    up,
)
from dpuflow.schema.rows import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpuflow.schedules.trees import Send


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One way to carry out an operation.

    ``sends(n, size, root)`` gives the schedule; ``fits(n)`` whether it can serve ``n`` ranks; ``cuts``
    whether each message may be cut into equal segments; ``turned`` whether another root's schedule is that of
    root 0 with the ranks turned; ``starters(n, root)`` the ranks whose first message needs no input, where
    steps do not tell: parts of the buffer that go side by side have steps of their own; ``edges(n, root)``
    how many edges it has, where that is plain, or counting them would take as many messages as the ranks
    squared.
    """

    op: Op
    name: str
    sends: Callable[[int, float, int], Iterator[Send]]
    fits: Callable[[int], bool] = lambda n: n >= 2
    rooted: bool = False
    cuts: bool = False
    turned: bool = True
    starters: Callable[[int, int], frozenset[int]] | None = None
    edges: Callable[[int, int], int] | None = None


def more_than(ranks: int) -> Callable[[int], bool]:
    """Fits from one rank more on: of fewer it is no other than one named before."""
    return lambda n: n > ranks


def no_power(n: int) -> bool:
    """Fits where some ranks fold into others first."""
    return n > 2 and not is_power(n)


def round_the_ring(n: int, root: int) -> int:
    """Each rank sends to the next one."""
    return n


def both_ways(n: int, root: int) -> int:
    """Each sends to both its neighbours."""
    return 2 * n


def ring_and_root(n: int, root: int) -> int:
    """Each to the next one, and all to the root: its neighbour does that anyway."""
    return 2 * n - 2


def halves_and_root(n: int, root: int) -> int:
    """Both ways between partners; a root that was folded away gathers in the first one's place."""
    power = power_below(n)
    extra, bits = n - power, power.bit_length() - 1
    place, folded = divmod(root, 2)
    own = bits + (place & (place - 1) > 0) if folded and root < 2 * extra else 0
    return power * bits + 2 * extra + own


def all_pairs(n: int, root: int) -> int:
    """Each to each other one."""
    return n * (n - 1)


def one_each(n: int, root: int) -> int:
    """A tree's: each rank but the root has one parent."""
    return n - 1


def tree_and_root(n: int, root: int) -> int:
    """A tree's, and from its top, the last rank, to another root."""
    return n - 1 + (root != n - 1)


SHAPES: tuple[tuple[str, Callable[[int], list[int]], Callable[[int], bool]], ...] = (
    ("binomial", binomial_in_order, more_than(1)),
    ("binomial", binomial_outward, more_than(3)),
    ("linear", flat, more_than(2)),
    ("chain", chains(1), more_than(2)),
    *(("chain", chains(heads), more_than(heads + 1)) for heads in (2, 3, 4)),
    ("tree", binary_by_level, more_than(3)),
    ("tree", binary_heap, more_than(5)),
    ("unknown", k_nomial(3), more_than(4)),  # the result format has no name for it
    ("unknown", k_nomial(4), more_than(5)),
)
"""Name, parents and for how many ranks it is no other shape, of what a buffer goes down or up on."""

ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(Op.ALL_REDUCE, "ring", ring_all_reduce, cuts=True, edges=round_the_ring),
    Algorithm(Op.ALL_REDUCE, "recursive_doubling", recursive_doubling),
    Algorithm(Op.ALL_REDUCE, "rabenseifner", rabenseifner),
    Algorithm(Op.ALL_REDUCE, "rabenseifner", folded_rabenseifner, no_power),
    Algorithm(Op.ALL_GATHER, "ring", ring_all_gather, cuts=True, edges=round_the_ring),
    Algorithm(Op.ALL_GATHER, "recursive_doubling", doubling_all_gather, is_power),
    Algorithm(Op.ALL_GATHER, "bruck", bruck_all_gather),
    # Neighbour exchange: the result format has no name for it.
    Algorithm(Op.ALL_GATHER, "unknown", neighbour_exchange, lambda n: n >= 4 and n % 2 == 0, edges=both_ways),
    Algorithm(Op.REDUCE_SCATTER, "ring", ring_reduce_scatter, cuts=True, edges=round_the_ring),
    Algorithm(Op.REDUCE_SCATTER, "halving_doubling", recursive_halving),
    Algorithm(Op.REDUCE_SCATTER, "halving_doubling", butterfly, more_than(3)),
    Algorithm(Op.REDUCE_SCATTER, "pairwise", pairwise, more_than(2), edges=all_pairs),
    Algorithm(Op.ALL_TO_ALL, "pairwise", pairwise, cuts=True, edges=all_pairs),
    Algorithm(Op.ALL_TO_ALL, "linear", linear_all_to_all, cuts=True, edges=all_pairs),
    Algorithm(Op.ALL_TO_ALL, "bruck", bruck_all_to_all),
    *(
        Algorithm(Op.BROADCAST, name, down(shape), fits, rooted=True, cuts=True, edges=one_each)
        for name, shape, fits in SHAPES
    ),
    Algorithm(Op.BROADCAST, "tree", split_binary(), rooted=True),
    *(
        Algorithm(Op.REDUCE, name, up(shape), fits, rooted=True, cuts=True, edges=one_each)
        for name, shape, fits in SHAPES
    ),
    Algorithm(
        Op.REDUCE,
        "tree",
        in_order_up,
        more_than(2),
        rooted=True,
        cuts=True,
        turned=False,
        edges=tree_and_root,
    ),
    Algorithm(
        Op.REDUCE, "rabenseifner", rabenseifner_reduce, rooted=True, turned=False, edges=halves_and_root
    ),
    Algorithm(Op.REDUCE, "ring", ring_reduce, rooted=True, cuts=True, edges=ring_and_root),
    Algorithm(Op.GATHER, "linear", up(flat), rooted=True),
    Algorithm(Op.GATHER, "linear", synced_up(), rooted=True),
    Algorithm(Op.GATHER, "binomial", gathered(binomial_in_order), rooted=True),
    Algorithm(Op.SCATTER, "linear", down(flat), rooted=True),
    Algorithm(Op.SCATTER, "binomial", scattered(binomial_in_order), rooted=True),
    Algorithm(Op.BARRIER, "recursive_doubling", doubling_barrier),
    Algorithm(Op.BARRIER, "recursive_doubling", folded_barrier, no_power),
    Algorithm(Op.BARRIER, "dissemination", dissemination),
    Algorithm(Op.BARRIER, "linear", linear_barrier, rooted=True),
    Algorithm(Op.BARRIER, "binomial", binomial_barrier, rooted=True),
    Algorithm(Op.BARRIER, "ring", double_ring),
)


def up_and_down(n: int, size: float, root: int) -> Iterator[Send]:
    """To the first rank along a binomial tree, and back along another (Open MPI, libnbc/nbc_iallreduce.c)."""
    yield from up(binomial_in_order)(n, size, root)
    for send in down(binomial_outward)(n, size, root):
        yield send._replace(step=n + send.step)


NONBLOCKING: tuple[Algorithm, ...] = (Algorithm(Op.ALL_REDUCE, "binomial", up_and_down), *ALGORITHMS)
"""The same for libraries of non-blocking operations, which name none: what is usual there first."""

GLOO: tuple[Algorithm, ...] = (*ALGORITHMS, Algorithm(Op.ALL_REDUCE, "unknown", bcube, no_power))
"""The same for Gloo. The result format has no name for its bcube, whose few edges between two ranks others'
pairs of collectives have as well."""
