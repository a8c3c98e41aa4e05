"""Ring all_reduces of several sizes in, what another algorithm would have made of them out.

A ring of n ranks takes 2 (n - 1) steps, each of which costs a latency (alpha) and the time of its bytes at a
rate (1 / beta). Both are fitted to what the group's all_reduces took once all had entered, and put into:

- recursive doubling: log2(n) rounds, in each of which a rank sends its whole buffer;
- two levels: reduce_scatter inside each node, recursive doubling of each rank's part between nodes,
  all_gather inside each node.

An interval reaches from the best to the worst of what the ring does not tell: a round takes half a step's
latency, because puts ask nobody and carry no flags, or all of it; all rounds' partners send to a rank one
after the other, or at once in each; and what passes inside nodes costs nothing, or as much as on the network.
To that comes the error of the fit, and that the line itself is only nearly true.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import exp, log, log2, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.arrays.quantiles import student
from dpuflow.figures.operations import after_last, classes_of
from dpuflow.results.figures import AllReduceWhatIf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from dpuflow.results import Analysis, Collective

    Floats = NDArray[np.float64]
    Gain = tuple[float | None, float | None, float | None]

FEWEST: Final = 3
"""Sizes, or else nothing tells how far from a line they lie; and all_reduces of each."""
MOST: Final = 2.0
"""A fit whose error is more than this factor tells nothing."""
UNASKED: Final = 1 / 2
"""Of a step's latency: a put goes one way, of NCCL's credit and data there are two."""
SURE: Final = 0.95
USEFUL: Final = {"ll": 1 / 2, "ll128": 120 / 128}
"""Share of what is on the wire that is not flags, by NCCL's protocol."""
NONE: Final[Gain] = (None, None, None)


@dataclass
class Shape:
    """A group's ranks, nodes and NICs."""

    ranks: int
    nodes: int
    nics: int
    useful: float

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    def ring(self, size: int) -> tuple[float, float]:
        """Steps, and the bytes that a NIC sends in all of them, one after the other."""
        steps = 2 * (self.ranks - 1)
        return steps, steps * size / self.ranks * self.nodes / self.nics


@dataclass
class Fit:
    """``alpha`` (ns a step) and ``beta`` (ns a byte), their covariance, how far from the line sizes lie
    (relative), and the factor by which a standard error becomes an interval's half."""

    line: Floats
    errors: Floats
    apart: float
    times: float

    def of(self, steps: float, nbytes: float) -> tuple[float, float]:
        """The time of so much, and the relative half-width of its interval."""
        x = np.array([steps, nbytes])
        took = float(x @ self.line)
        return took, self.times * sqrt(float(x @ self.errors @ x) / took**2 + self.apart**2)


def list_all_reduce_what_if(result: Analysis) -> Iterator[AllReduceWhatIf]:
    """One row for each group, protocol and size of which enough ring all_reduces were seen."""
    found: dict[tuple[int, str | None], dict[int, list[float]]] = defaultdict(dict)
    shapes: dict[tuple[int, str | None], set[tuple[int, int, int] | None]] = defaultdict(set)
    for (group, op, algorithm, protocol, size), mine in classes_of(result.collectives):
        took = [float(ns) for each in mine if (ns := after_last(each)) is not None and ns > 0]
        if op == "all_reduce" and algorithm == "ring" and size and len(took) >= FEWEST:
            found[group, protocol][size] = took
            shapes[group, protocol].add(_shape(result, mine[0]))
    for key in sorted(found, key=str):
        told = shapes[key].pop() if len(shapes[key]) == 1 else None
        shape = None if told is None else Shape(*told, USEFUL.get(key[1] or "", 1.0))
        fit = None if shape is None else fitted(shape, found[key])
        for size, took in sorted(found[key].items()):
            seen = float(median_of(took))
            doubling, two_level = (
                (NONE, NONE) if fit is None or shape is None else gains(shape, fit, size, seen)
            )
            yield AllReduceWhatIf(
                group=key[0],
                protocol=key[1],  # type: ignore[arg-type]
                ranks=None if shape is None else shape.ranks,
                per_node=None if shape is None else shape.per_node,
                bytes=size,
                count=len(took),
                after_last_ns=round(seen),
                alpha_ns=None if fit is None else round(float(fit.line[0])),
                alpha_error_ns=None if fit is None else round(fit.times * sqrt(fit.errors[0, 0])),
                beta_ns_per_kib=None if fit is None else 1024 * float(fit.line[1]),
                beta_error_ns_per_kib=None if fit is None else 1024 * fit.times * sqrt(fit.errors[1, 1]),
                doubling_gain=doubling[0],
                doubling_low=doubling[1],
                doubling_high=doubling[2],
                two_level_gain=two_level[0],
                two_level_low=two_level[1],
                two_level_high=two_level[2],
            )


def _shape(result: Analysis, each: Collective) -> tuple[int, int, int] | None:
    """Ranks, nodes, NICs. Ranks that own no NIC show in the bytes: of n ranks a ring sends 2 (n - 1) / n
    times the buffer over each of the links between nodes."""
    ends = [result.endpoints[n] for n in result.groups[each.group].endpoints]
    nodes = len({end.id if end.node is None else end.node for end in ends})
    links = each.wire_bytes * USEFUL.get(each.protocol or "", 1.0) / (nodes * (each.bytes or 1))
    ranks = round(2 / (2 - links)) if nodes > 1 and 0 < links < 2 else 0
    if not ranks or ranks % nodes or abs(2 * (ranks - 1) / ranks - links) > 1 / (4 * ranks * ranks):
        return None
    return (ranks, nodes, len(ends)) if ranks >= len(ends) else None


def fitted(shape: Shape, seen: dict[int, list[float]]) -> Fit | None:
    """Least squares of relative errors over the sizes' medians; None where they make no line."""
    if len(seen) < FEWEST:
        return None
    middle = np.array([median_of(took) for took in seen.values()])
    rows = np.array([shape.ring(size) for size in seen]) / middle[:, None]
    inverse = np.linalg.pinv(rows.T @ rows)
    line = inverse @ rows.sum(axis=0)
    freedom = len(seen) - 2
    apart = sqrt(float(((rows @ line - 1) ** 2).sum()) / freedom)
    if (line <= 0).any():
        return None
    return Fit(line, inverse * apart**2, apart, student(1 - (1 - SURE) / 2, freedom))


def gains(shape: Shape, fit: Fit, size: int, seen: float) -> tuple[Gain, Gain]:
    """How many times as quick recursive doubling and two levels are, each with its interval."""
    between, inside = log2(shape.nodes), log2(shape.per_node)
    if between % 1 or inside % 1:  # neither pairs all ranks in each round
        return NONE, NONE
    share = shape.nodes / shape.nics  # of what a node sends, what a NIC does
    flat = [(between, between * size * shape.per_node * share), (inside, inside * size)]
    if shape.per_node == 1:
        return _gain(shape, fit, seen, flat), NONE
    part = 2 * size * (shape.per_node - 1) / shape.per_node
    return (
        _gain(shape, fit, seen, flat),
        _gain(shape, fit, seen, [(between, between * size * share), (2, part)]),
    )


def _gain(shape: Shape, fit: Fit, seen: float, parts: Sequence[tuple[float, float]]) -> Gain:
    (rounds, nbytes), (more, inside) = parts
    # One of per_node steps of the ring crosses the network: perhaps it takes the time of all of them.
    slow = rounds * shape.per_node + more
    near, far = fit.of(rounds, nbytes)[0], fit.of(slow, nbytes + inside)[0]
    least, error = fit.of(rounds * UNASKED, nbytes * shape.useful)
    # Each round's partner may send to a rank that is still in the first round: all of them at once.
    most, worse = fit.of(slow, nbytes * max(rounds, 1) + inside)
    if max(error, worse) > log(MOST):
        return NONE
    return seen / sqrt(near * far), seen / most * exp(-worse), seen / least * exp(error)
