"""The algorithms that are known: for each operation, the ways libraries carry it out.

An ``Algorithm`` is a pattern of sends with what a reconstruction has to know of it beside. ``schedules`` says
what follows from one for a number of ranks. A pattern for which the result format has no name is "unknown".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dpuflow.schedules.patterns import (
    binomial_barrier,
    bruck_all_gather,
    bruck_all_to_all,
    butterfly,
    dissemination,
    double_ring,
    doubling_all_gather,
    doubling_barrier,
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
from dpuflow.schedules.sending import Send, is_power, power_below
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
    k_nomial,
    scattered,
    split_binary,
    synced_up,
    up,
)
from dpuflow.schema import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One way to carry out an operation.

    ``sends(n, size, root)`` gives the schedule; ``size_of(n, total)`` the buffer from the payload
    of all messages together; ``fits(n)`` whether it can serve ``n`` ranks; ``cuts`` whether each
    message may be cut into equal segments; ``turned`` whether another root's schedule is that of root 0 with
    the ranks turned; ``starters(n, root)`` the ranks whose first message needs no input, where steps do not
    tell: parts of the buffer that go side by side have steps of their own.
    """

    op: Op
    name: str
    sends: Callable[[int, float, int], Iterator[Send]]
    size_of: Callable[[int, float], float]
    fits: Callable[[int], bool] = lambda n: n >= 2
    rooted: bool = False
    cuts: bool = False
    turned: bool = True
    starters: Callable[[int, int], frozenset[int]] | None = None


@lru_cache(maxsize=1024)
def _units(sends: Callable[[int, float, int], Iterator[Send]], n: int) -> float:
    """Payload of all messages together for a buffer of one byte."""
    return sum(send.size for send in sends(n, 1.0, 0))


SHAPES: tuple[tuple[str, Callable[[int], list[int]], Callable[[int], bool]], ...] = (
    ("binomial", binomial_in_order, lambda n: n > 1),
    ("binomial", binomial_outward, lambda n: n > 3),
    ("linear", flat, lambda n: n > 2),
    ("chain", chains(1), lambda n: n > 2),
    *(("chain", chains(heads), lambda n, heads=heads: n > heads + 1) for heads in (2, 3, 4)),
    ("tree", binary_by_level, lambda n: n > 3),
    ("tree", binary_heap, lambda n: n > 5),
    ("unknown", k_nomial(3), lambda n: n > 4),  # the result format has no name for it
    ("unknown", k_nomial(4), lambda n: n > 5),
)
"""Name, parents and for how many ranks it is no other shape, of what a buffer goes down or up on."""


ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(Op.ALL_REDUCE, "ring", ring_all_reduce, lambda n, t: t / (2 * (n - 1)), cuts=True),
    Algorithm(
        Op.ALL_REDUCE,
        "recursive_doubling",
        recursive_doubling,
        lambda n, t: t / (power_below(n) * (power_below(n).bit_length() - 1) + 2 * (n - power_below(n))),
    ),
    Algorithm(
        Op.ALL_REDUCE,
        "rabenseifner",
        rabenseifner,
        lambda n, t: t / (2 * (power_below(n) - 1) + 2.5 * (n - power_below(n))),
    ),
    Algorithm(
        Op.ALL_REDUCE,
        "rabenseifner",
        folded_rabenseifner,
        lambda n, t: t / (2 * n - 2),
        lambda n: n > 2 and not is_power(n),
    ),
    Algorithm(Op.ALL_GATHER, "ring", ring_all_gather, lambda n, t: t / (n * (n - 1)), cuts=True),
    Algorithm(
        Op.ALL_GATHER, "recursive_doubling", doubling_all_gather, lambda n, t: t / (n * (n - 1)), is_power
    ),
    Algorithm(Op.ALL_GATHER, "bruck", bruck_all_gather, lambda n, t: t / (n * (n - 1))),
    Algorithm(
        Op.ALL_GATHER,
        "unknown",  # neighbour exchange: the result format has no name for it
        neighbour_exchange,
        lambda n, t: t / (n * (n - 1)),
        lambda n: n >= 4 and n % 2 == 0,
    ),
    Algorithm(Op.REDUCE_SCATTER, "ring", ring_reduce_scatter, lambda n, t: t / (n - 1), cuts=True),
    Algorithm(
        Op.REDUCE_SCATTER,
        "halving_doubling",
        recursive_halving,
        lambda n, t: t / _units(recursive_halving, n),
    ),
    Algorithm(
        Op.REDUCE_SCATTER,
        "halving_doubling",
        butterfly,
        lambda n, t: t / _units(butterfly, n),
        lambda n: n > 3,
    ),
    Algorithm(Op.REDUCE_SCATTER, "pairwise", pairwise, lambda n, t: t / (n - 1), lambda n: n > 2),
    Algorithm(Op.ALL_TO_ALL, "pairwise", pairwise, lambda n, t: t / (n - 1), cuts=True),
    Algorithm(Op.ALL_TO_ALL, "linear", linear_all_to_all, lambda n, t: t / (n - 1), cuts=True),
    Algorithm(
        Op.ALL_TO_ALL,
        "bruck",
        bruck_all_to_all,
        lambda n, t: t / sum(bin(i).count("1") for i in range(n)),
    ),
    *(
        Algorithm(Op.BROADCAST, name, down(shape), lambda n, t: t / (n - 1), fits, rooted=True, cuts=True)
        for name, shape, fits in SHAPES
    ),
    Algorithm(Op.BROADCAST, "tree", split_binary(), lambda n, t: t / _units(split_binary(), n), rooted=True),
    *(
        Algorithm(Op.REDUCE, name, up(shape), lambda n, t: t / (n - 1), fits, rooted=True, cuts=True)
        for name, shape, fits in SHAPES
    ),
    Algorithm(
        Op.REDUCE,
        "tree",
        in_order_up,
        lambda n, t: t / _units(in_order_up, n),
        lambda n: n > 2,
        rooted=True,
        cuts=True,
        turned=False,
    ),
    Algorithm(
        Op.REDUCE,
        "rabenseifner",
        rabenseifner_reduce,
        lambda n, t: t / _units(rabenseifner_reduce, n),
        rooted=True,
        turned=False,
    ),
    Algorithm(Op.REDUCE, "ring", ring_reduce, lambda n, t: t / (n - 1) / (1 + 1 / n), rooted=True, cuts=True),
    Algorithm(Op.GATHER, "linear", up(flat), lambda n, t: t / (n - 1), rooted=True),
    Algorithm(Op.GATHER, "linear", synced_up(), lambda n, t: t / (n - 1), rooted=True),
    Algorithm(
        Op.GATHER,
        "binomial",
        gathered(binomial_in_order),
        lambda n, t: t / _units(gathered(binomial_in_order), n),
        rooted=True,
    ),
    Algorithm(Op.SCATTER, "linear", down(flat), lambda n, t: t / (n - 1), rooted=True),
    Algorithm(
        Op.SCATTER,
        "binomial",
        scattered(binomial_in_order),
        lambda n, t: t / _units(scattered(binomial_in_order), n),
        rooted=True,
    ),
    Algorithm(Op.BARRIER, "recursive_doubling", doubling_barrier, lambda n, t: 0.0),
    Algorithm(
        Op.BARRIER,
        "recursive_doubling",
        lambda n, size, root: recursive_doubling(n, 0, root),
        lambda n, t: 0.0,
        lambda n: n > 2 and not is_power(n),
    ),
    Algorithm(Op.BARRIER, "dissemination", dissemination, lambda n, t: 0.0),
    Algorithm(Op.BARRIER, "linear", linear_barrier, lambda n, t: 0.0, rooted=True),
    Algorithm(Op.BARRIER, "binomial", binomial_barrier, lambda n, t: 0.0, rooted=True),
    Algorithm(Op.BARRIER, "ring", double_ring, lambda n, t: 0.0),
)
