"""Islands of clocks whose nodes take part in the same operations, beside each other without a common clock.

In: what was read on each island alone. Out: what is one operation on several islands. NICs of a node (rails)
share no packets, so nothing ties their clocks; but they carry the same operations in the same order, and the
times between these tell which are which where captures begin or end apart. That lays one island's times
beside another's, roughly, by the median over all messages: near enough to read operations that go over all
rails, never to compare times across islands.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import Picked, median_of
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schema.rows import NEVER, NONE32

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows

    Ints = NDArray[np.int64]

EXPLAINED: Final = 0.9
"""What leaves more than a tenth of the messages over, or out of the order that it asks for, is no reading."""
SAME_SIZE: Final = 1.1
"""Operations of two islands are in the same proportion throughout, up to roundings."""
MOST_SHIFTED: Final = 64
"""So many operations one NIC's captures may have begun later than another's, at most."""
CLOSER: Final = 30
"""Operations lie beside others than those in the same place where they lie so many times closer. Where steps
are even but for noise some shift is closer by chance: a few times."""
_FAR: Final = np.iinfo(np.int64).max
_IN_NODES: Final = ("tree", "chain")


@dataclass
class Read:
    """One island's operations. ``ties``: of each instance the number of the operation that it is a part of,
    where other islands have parts of it as well; -1: none. ``of_nodes``: whether those behind one NIC each
    stand for their nodes."""

    joined: Joined
    exchanges: Rows
    instances: list[Instance]
    entries: Entries
    untold: int
    ranks: Mapping[int, int]
    ties: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    of_nodes: bool = False

    @property
    def understood(self) -> bool:
        """Whether its operations explain its messages, and these come in the order that they ask for."""
        data = int((self.exchanges["data"] != NONE32).sum())
        early = int((self.entries.early_ns > 0).sum())
        return (
            bool(self.instances)
            and self.untold <= (1 - EXPLAINED) * data
            and (early <= (1 - EXPLAINED) * len(self.entries.early_ns))
        )


def read_islands(joined: Joined, nodes: Ints, read: Callable[[Joined], Read]) -> list[Read]:
    """All islands read: alone, or together where their operations make sense together only."""
    views = joined.islands or [joined]
    found: dict[int, Read] = {}
    for members in _sharing_nodes(views, nodes):
        alone = [read(views[members[0]])]
        together = None
        # Ranks that nothing was seen of here may be those that the nodes' other NICs serve.
        hidden = any(i.view.near is None and i.hides_ranks for i in alone[0].instances)
        if len(members) > 1 and (hidden or not alone[0].understood):
            together = _read_together([views[n] for n in members], nodes, read)
        if together is None:
            alone += [read(views[n]) for n in members[1:]]
        found.update(zip(members, together or alone, strict=True))
    reads = [part for n in range(len(views)) for part in _by_rails(found[n], nodes, read)]
    _without_doubles(reads)
    _tie(reads, nodes)
    return reads


def _by_rails(whole: Read, nodes: Ints, read: Callable[[Joined], Read]) -> list[Read]:
    """Trees and chains that go through all GPUs of nodes, each rail's part by itself: there a NIC stands for
    its node, whose entry it dates. What else there is, and captures of one place, as they are."""
    trees = all(i.view.inside and i.view.near is None and _in_nodes(i) for i in whole.instances)
    if not whole.instances or not trees or len(whole.joined.captures) < 2:
        return [whole]
    found = [read(_rail(whole.joined, ends)) for ends in _talking(whole.joined)]
    fit = all(each.understood and _of_nodes(each, nodes) is not None for each in found)
    alike = fit and all(_shift(found[0], each) == 0 for each in found)
    return found if alike and len(found) > 1 else [whole]


def _in_nodes(instance: Instance) -> bool:
    """Whether it is an algorithm that goes through all GPUs of a node."""
    return instance.algorithm is not None and instance.algorithm.name in _IN_NODES


def _talking(view: Joined) -> list[set[int]]:
    """Endpoints in sets that talk to each other."""
    pairs = {(int(a), int(b)) for a, b in zip(view.columns["src"], view.columns["dst"], strict=True)}
    return [{end for pair in part for end in pair} for part in connected(sorted(pairs), lambda pair: pair)]


def _rail(view: Joined, ends: set[int]) -> Joined:
    """What these endpoints sent, and the captures at them."""
    rows = view.transfers[np.isin(view.columns["src"], list(ends))]
    local = [[end for end in mine if end in ends] for mine in view.local]
    used = frozenset(capture for capture, mine in enumerate(local) if mine)
    return replace(view, transfers=rows, narrow=Picked.transfers(rows), local=local, used=used)


def _sharing_nodes(views: Sequence[Joined], nodes: Ints) -> list[list[int]]:
    """Numbers of islands that have captures of the same nodes, together."""
    at = [{int(nodes[end]) for ends in view.local for end in ends} for view in views]
    return connected(range(len(views)), lambda number: at[number])


def _without_doubles(reads: Sequence[Read]) -> None:
    """Who has no capture may talk to several islands: what it does is told of the first of them."""
    told_of: set[int] = set()
    for each in reads:
        if each.ties.any() or not len(each.ties):
            kept = [i for i in each.instances if told_of.isdisjoint(i.order)]
            if len(kept) < len(each.instances):
                from dpuflow.entries import build_entries

                each.instances, each.entries = kept, build_entries(each.exchanges, kept)
        told_of |= {end for instance in each.instances for end in instance.order}


# -- one operation over several islands ---------------------------------------------------------


def _read_together(views: Sequence[Joined], nodes: Ints, read: Callable[[Joined], Read]) -> list[Read] | None:
    """The islands read as one, each with its part of every operation; None where that makes no sense."""
    by_ns = _laid(views, nodes)
    if by_ns is None:
        return None
    laid = [shifted(view, by) for view, by in zip(views, by_ns, strict=True)]
    rows = np.concatenate([view.transfers for view in laid])
    of = np.repeat(np.arange(len(laid)), [len(view.transfers) for view in laid])
    order = np.argsort(rows["sent_ns"], kind="stable")
    rows, of = rows[order], of[order]
    local = [[end for view in laid for end in view.local[c]] for c in range(len(laid[0].local))]
    used = frozenset(c for view in laid for c in view.used or ())
    whole = read(replace(laid[0], transfers=rows, narrow=Picked.transfers(rows), local=local, used=used))
    if not whole.understood:
        return None
    for view, by in zip(laid, by_ns, strict=True):
        _set_clocks(view, by)
    line = np.full(int(rows["connection"].max(initial=0)) + 1, -1)
    line[rows["connection"]] = of
    island_of = line[whole.exchanges["connection"]]
    found = [_share(whole, view, of == n, island_of == n) for n, view in enumerate(laid)]
    for each in found[1:]:
        each.untold = 0
    return found


def _share(whole: Read, view: Joined, sent: NDArray[np.bool_], seen: NDArray[np.bool_]) -> Read:
    """An island's part of what was read together: transfers ``sent`` and exchanges ``seen`` there."""
    from dpuflow.entries import build_entries

    place = np.full(len(sent) + 1, NONE32, np.int64)
    place[:-1][sent] = np.arange(int(sent.sum()))
    transfers, exchanges = whole.joined.transfers[sent], whole.exchanges[seen]
    for name in ("offer", "grant", "data"):
        exchanges[name] = place[np.minimum(exchanges[name], len(sent))]
    row_of = np.cumsum(seen) - 1
    parts = [_part(i, i.rows[seen[i.rows]], whole, row_of) for i in whole.instances]
    instances = [part for part in parts if part is not None]
    return replace(
        whole,
        joined=replace(view, transfers=transfers, narrow=Picked.transfers(transfers)),
        exchanges=exchanges,
        instances=instances,
        entries=build_entries(exchanges, instances),
        ties=np.array([n for n, part in enumerate(parts) if part is not None], np.int64),
    )


def _part(instance: Instance, rows: Ints, whole: Read, row_of: Ints) -> Instance | None:
    """What an island saw of an operation: its messages, and the ranks that sent or received them."""
    if not len(rows):
        return None
    if len(rows) == len(instance.rows):
        return replace(instance, rows=row_of[rows])
    seen = {*whole.exchanges["src"][rows].tolist(), *whole.exchanges["dst"][rows].tolist()}
    places = [place for place, end in enumerate(instance.order) if end in seen]
    placement = instance.placement
    seats = placement.seats or tuple(range(len(instance.order)))
    return replace(
        instance,
        rows=row_of[rows],
        order=[instance.order[place] for place in places],
        view=replace(instance.view, apart=True),
        placement=replace(
            placement,
            seats=tuple(seats[place] for place in places),
            ranks=placement.ranks or len(instance.order),
            nodes=tuple(placement.nodes[place] for place in places) if placement.nodes else (),
            parts=None if placement.parts is None else placement.parts[np.isin(instance.rows, rows)],
        ),
    )


def _laid(views: Sequence[Joined], nodes: Ints) -> list[int] | None:
    """By how much islands' times are to be later to lie beside the first's; None where nothing shows it."""
    sent = [_sent_between(view, nodes) for view in views]
    ahead = [_ahead_ns(sent[0], mine) for mine in sent]
    return None if None in ahead else [-each for each in ahead if each is not None]


def _sent_between(view: Joined, nodes: Ints) -> dict[tuple[int, int], Ints]:
    """By pair of nodes when data was sent from one to the other, in order."""
    exchanges = build_exchanges(view.transfers, view.columns)
    exchanges = exchanges[exchanges["data_ns"] != NEVER]
    src, dst = nodes[exchanges["src"]], nodes[exchanges["dst"]]
    pairs, of = np.unique(np.stack([src, dst], axis=1), axis=0, return_inverse=True)
    return {
        (int(a), int(b)): np.sort(exchanges["data_ns"][of.reshape(-1) == number])
        for number, (a, b) in enumerate(pairs)
    }


def _ahead_ns(here: Mapping[tuple[int, int], Ints], there: Mapping[tuple[int, int], Ints]) -> int | None:
    """How far the second island's stamps are ahead: the median over messages of the same number.

    Counted from the first or from the last ones, as captures begin or end together; where counts say
    nothing the stamps as they are may.
    """
    common = [(here[pair], there[pair]) for pair in here.keys() & there.keys()]
    if not common:
        return None
    found: list[tuple[float, int]] = []
    for side in (slice(None, None, 1), slice(None, None, -1)):
        apart = [b[side][: len(a)] - a[side][: len(b)] for a, b in common]
        middle = int(median_of(np.concatenate([each - apart[0][0] for each in apart]))) + int(apart[0][0])
        spread = float(median_of(np.abs(np.concatenate([each - middle for each in apart]))))
        found.append((spread, middle))
    return min(found)[1]


def shifted(view: Joined, by_ns: int) -> Joined:
    """The island with all its times later by so much; its clocks' offsets are as they were."""

    transfers = _moved(view.transfers, by_ns)
    return replace(
        view,
        transfers=transfers,
        narrow=Picked.transfers(transfers),
        start_ns=view.start_ns + by_ns,
        end_ns=view.end_ns + by_ns,
    )


def _moved(rows: Rows, by_ns: int) -> Rows:
    """Rows of times with all of them later by so much."""
    rows = rows.copy()
    for name in rows.dtype.names or ():
        if name.endswith("_ns"):
            rows[name] += np.where(rows[name] == NEVER, 0, by_ns)
    return rows


def _set_clocks(view: Joined, by_ns: int) -> None:
    """Let the offsets of the island's clocks lead to its times as laid."""
    for clock in view.clocks:
        if view.used is not None and clock.capture in view.used and clock.offset_ns is not None:
            clock.offset_ns -= by_ns


# -- operations in the same order and number ----------------------------------------------------


def _tie(reads: Sequence[Read], nodes: Ints) -> None:
    """Number the operations that several islands have parts of: as many, the same in the same order."""
    number = max((int(each.ties.max(initial=-1)) for each in reads), default=-1) + 1
    left = [each for each in reads if not len(each.ties)]
    for each in left:
        each.ties = np.full(len(each.instances), -1)
    while left:
        first = left.pop(0)
        for of_nodes in (True, False):
            alike = _alike(first, left, nodes, of_nodes)
            if not alike:
                continue
            parts = [(first, 0), *alike]
            least = min(shift for _, shift in parts)
            for each, shift in parts:
                each.ties = number + shift - least + np.arange(len(each.instances))
                _lay_beside(each, first)
            if not of_nodes and first.instances[0].view.near is None:  # each carries channels of its own
                _add_up([each for each, _ in parts])
            number = max(int(each.ties.max()) for each, _ in parts) + 1
            left = [each for each in left if all(each is not other for other, _ in alike)]
            break


def _alike(first: Read, others: Sequence[Read], nodes: Ints, of_nodes: bool) -> list[tuple[Read, int]]:
    """Islands with parts of the same operations as the first: NICs ``of_nodes``, or some of the ranks; and by
    how many operations each began later."""

    def kind_of(each: Read) -> object:
        return _of_nodes(each, nodes) if of_nodes else _in_part(each)

    kind = kind_of(first)
    if kind is None:
        return []
    kin = [each for each in others if kind_of(each) == kind]
    if of_nodes and kin:  # each goes through these nodes' GPUs, whatever was lost of one's operations
        for each in (first, *kin):
            each.of_nodes = True
    shifts = [(each, _shift(first, each)) for each in kin]
    return [(each, shift) for each, shift in shifts if shift is not None]


def _add_up(reads: Sequence[Read]) -> None:
    """Give parts of one operation the size that they have together."""
    whole: dict[int, list[Instance]] = {}
    for each in reads:
        for tie, part in zip(each.ties.tolist(), each.instances, strict=True):
            whole.setdefault(tie, []).append(part)
    for parts in whole.values():
        sizes = [part.size if len(parts) == len(reads) else None for part in parts]
        for part in parts:
            part.size = None if None in sizes else sum(size or 0 for size in sizes)


def _of_nodes(read: Read, nodes: Ints) -> tuple[int, frozenset[int]] | None:
    """How many nodes trees or chains go through that have one NIC of each on this island, and those of them
    that were captured, for of others nobody knows which NICs are whose; None of anything else.

    Inside the nodes they go through all GPUs, so other NICs of the same nodes may carry other channels.
    """
    if not read.instances:
        return None
    captured = {int(nodes[end]) for ends in read.joined.local for end in ends}
    found = {
        (len(instance.order), frozenset(captured.intersection(nodes[instance.order].tolist())))
        for instance in read.instances
    }
    known = all(_in_nodes(i) for i in read.instances)
    alone = all(len({int(nodes[end]) for end in i.order}) == len(i.order) for i in read.instances)
    if len(found) > 1 or not known or not alone or len(read.instances[0].order) < 2:
        return None
    kind = found.pop()
    return kind if kind[1] else None


def _in_part(read: Read) -> int | None:
    """How many ranks there are where the island saw some of them only; None where it saw all."""
    found = {i.placement.ranks for i in read.instances if i.hides_ranks}
    part = all(i.view.near is not None or i.hides_ranks for i in read.instances)
    return found.pop() if len(found) == 1 and part else None


def _same(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> bool:
    """Whether operations, as far as both go, are the same in the same order; each by kind and bytes (0: not
    told), as of ``_kinds``."""
    count = min(len(a[0]), len(b[0]))
    if (a[0][:count] != b[0][:count]).any():
        return False
    told = (a[1][:count] > 0) & (b[1][:count] > 0)
    ratios = a[1][:count][told] / b[1][:count][told]
    return not len(ratios) or bool(ratios.max() <= SAME_SIZE * ratios.min())


def _kinds(*reads: Read) -> list[tuple[Ints, Ints]]:
    """Of each island's operations a number of operation and algorithm, and the bytes (0: not told)."""
    numbers: dict[tuple[object, ...], int] = {}
    out = []
    for read in reads:
        names = [(i.op, None if i.algorithm is None else i.algorithm.name) for i in read.instances]
        kinds = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        out.append((kinds, np.array([i.size or 0 for i in read.instances], np.int64)))
    return out


def _shift(a: Read, b: Read) -> int | None:
    """How many operations later the second island's captures begin; None where they are not the same.

    Where captures begin apart, operations that are all alike fit one beside the other: the times between them
    tell, which vary from one to the next. As many of both are the same unless others lie far closer.
    """
    began, (here, there) = (_began(a), _began(b)), _kinds(a, b)
    least = max(len(began[0]), len(began[1])) // 2 + 1

    def alike(shift: int) -> bool:
        begin, other = max(shift, 0), max(-shift, 0)
        return _same((here[0][begin:], here[1][begin:]), (there[0][other:], there[1][other:]))

    spread = {
        shift: _spread(began[0][max(shift, 0) :], began[1][max(-shift, 0) :])
        for shift in range(max(least - len(began[1]), -MOST_SHIFTED), len(began[0]) - least + 1)
        if shift <= MOST_SHIFTED and alike(shift)
    }
    if not spread:
        return None
    best = min(spread, key=lambda shift: (spread[shift], abs(shift)))
    if 0 in spread and len(began[0]) == len(began[1]):
        return best if CLOSER * spread[best] < spread[0] else 0
    others = [far for shift, far in spread.items() if shift != best]
    return best if others and CLOSER * spread[best] < min(others) else None


def _began(read: Read) -> Ints:
    """When each operation's first message was sent; in the far future where none was seen."""
    sent = np.where(read.exchanges["data_ns"] == NEVER, _FAR, read.exchanges["data_ns"])
    return np.array([int(sent[i.rows].min()) for i in read.instances], np.int64)


def _spread(a: Ints, b: Ints) -> float:
    """How far nearly all of two clocks' times of the same events are from lying at one distance: where one of
    them was missed, those after it lie beside others."""
    count = min(len(a), len(b))
    seen = (a[:count] != _FAR) & (b[:count] != _FAR)
    if not seen.any():
        return 0.0
    apart = (a[:count] - b[:count])[seen]
    return float(np.quantile(np.abs(apart - median_of(apart - apart[0]) - apart[0]), EXPLAINED))


def _lay_beside(read: Read, other: Read) -> None:
    """Lay the island's times beside those of another, by when each operation's first message was sent."""
    if (
        read is other
        or read.joined.clocks[min(read.joined.used or {0})].island
        == other.joined.clocks[min(other.joined.used or {0})].island
    ):
        return
    from dpuflow.entries import build_entries

    _, here, there = np.intersect1d(other.ties, read.ties, return_indices=True)
    began = _began(other)[here], _began(read)[there]
    seen = (began[0] != _FAR) & (began[1] != _FAR)
    if not seen.any():
        return
    apart = (began[0] - began[1])[seen]
    by_ns = int(median_of(apart - apart[0])) + int(apart[0])
    read.joined = shifted(read.joined, by_ns)
    read.exchanges = _moved(read.exchanges, by_ns)
    read.entries = build_entries(read.exchanges, read.instances)
    _set_clocks(read.joined, by_ns)
