"""Where the time of steps went: each step along its critical path, in parts that add up to it.

In: paths (``paths``), causes, what ranks answer for, and the job's steps; where a job repeats none, its
collectives one after the other. Out: one account a job. Unexplained is what of a path nothing in the captures
tells, and what the scatter of their like does not explain of work whose end is not told exactly, and of
messages that left their sender's node slowly, though nothing of them was lost or marked. What they were on
their way beyond the usual is the network's. What a step would take without a rank's lateness is read off the
same paths: they shorten by that, until another rank is the one that its peers wait for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import percentiles
from dpuflow.entries import Rule, latest_two, previous_row
from dpuflow.entries.rows import EXACT_RULES, QUARTER_IN_SIGMAS
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.causes import NETWORK, RECEIVER
from dpuflow.verdicts.chance import LATE_SHARE, SIGMAS
from dpuflow.verdicts.paths import Paths, What
from dpuflow.verdicts.steps import jobs, own_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows
    from dpuflow.verdicts.causes import Causes
    from dpuflow.verdicts.paths import Segment
    from dpuflow.verdicts.pipelines import Pipeline
    from dpuflow.verdicts.steps import Steps


MOST: Final = 400
"""Steps that are walked: the last ones stand for all."""
FEWEST: Final = 3
"""Segments that it takes to say what is usual of their like."""
WIDEST: Final = 1 << 18
"""Messages of these steps at most."""

Key = tuple[str, int]
"""A part's name and its endpoint, -1 for none."""


@dataclass
class Account:
    """The mean of a job's typical steps, ns: those of the middle half by length; all parts add up to it.

    ``in_node``: between input and output of an endpoint whose node has several ranks. ``waited`` is of
    ``work``: what peers waited for a rank because it worked longer than they. ``hidden_share``: of all
    steps' time, the unexplained share. ``lengths_ns``, ``ends_ns`` and ``saved_ns`` (by endpoint) are of each
    step. ``moves``: messages on the paths, each with sender, receiver, and from when to when (four rows);
    where a path says of a rank alone that the network kept it, both are -1.
    """

    group: int
    steps: int
    endpoints: list[int]
    work: dict[int, int] = field(default_factory=dict)
    waited: dict[int, int] = field(default_factory=dict)
    in_node: dict[int, int] = field(default_factory=dict)
    library: int = 0
    transfer: int = 0
    network: int = 0
    credit: int = 0
    unexplained: int = 0
    hidden_share: float = 0.0
    lengths_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    ends_ns: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    saved_ns: dict[int, Ints] = field(default_factory=dict)
    moves: Ints = field(default_factory=lambda: np.zeros((4, 0), np.int64))

    @property
    def exposed_ns(self) -> int:
        """Time of the step in which nobody on its path worked: communication that nothing hides."""
        named = self.library + self.transfer + self.network + self.credit
        return named + sum(self.in_node.values())

    @property
    def step_ns(self) -> int:
        """How long the step is."""
        return sum(self.work.values()) + self.exposed_ns + self.unexplained


class Known(NamedTuple):
    """What the stages before came to, by rows of Entries where nothing else is said."""

    causes: Causes
    held_up: Bools  # of each exchange (``links``)
    apart: Bools  # of each collective: a transfer between two
    beside: Bools  # its rank goes on beside its collectives (``waits``)
    sooner_ns: Ints  # so much sooner it would have come if it worked like its peers
    kind: Ints  # of each collective its operation, size and group (``kinds_of``)
    group: Ints  # ... and its group


def account_for(
    exchanges: Rows,
    instances: Sequence[Instance],
    entries: Entries,
    steps: Sequence[Steps],
    pipelines: Sequence[Pipeline],
    known: Known,
) -> list[Account]:
    """One account for each job."""
    of = {end: each.ends for each in steps for end in each.endpoints}
    rows_before = np.cumsum([0, *(len(i.rows) for i in instances)])
    times = np.bincount(entries.endpoint)
    laid: list[tuple[list[int], Ints]] = []  # of each job its endpoints, and the rows where its steps end
    since = np.full(len(times), FAR)  # of each endpoint's job the first step
    for members in jobs(instances):
        ends = of.get(members[0])
        if ends is None:
            ends = own_rows(entries, max(members, key=lambda end: times[end]))
        ends = ends[entries.leave_ns[ends] != NEVER][-MOST - 1 :]
        if len(ends):
            number = entries.collective[ends]
            ends = ends[rows_before[number[-1]] - rows_before[number] <= WIDEST]
        if len(ends) >= 2:
            laid.append((members, ends))
            since[members] = entries.leave_ns[ends[0]]
    if not laid:
        return []
    first = entries.offsets[:-1]
    wanted = np.maximum.reduceat(np.maximum(entries.leave_ns, entries.enter_ns), first)
    wanted = wanted >= since[entries.endpoint[first]]
    paths = Paths(exchanges, instances, entries, previous_row(entries), pipelines, known.beside, wanted)
    shared = {
        n
        for n, i in enumerate(instances)
        if i.placement.nodes or i.view.inside or i.hides_ranks or i.placement.processes is not None
    }
    joins, found = _Joins(instances, entries), []
    for members, ends in laid:
        walks = [paths.walk(*pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        account = Account(int(known.group[entries.collective[ends[-1]]]), len(walks), members)
        account.lengths_ns, account.ends_ns = np.diff(entries.leave_ns[ends]), entries.leave_ns[ends[1:]]
        account.moves = _moves(walks, account.ends_ns, exchanges, known.causes)
        _sum_up(account, walks, _Usual(walks, exchanges, entries, known), joins, shared, entries, known)
        found.append(account)
    return found


def _moves(walks: Sequence[Sequence[Segment]], ends_ns: Ints, exchanges: Rows, causes: Causes) -> Ints:
    """What of the paths was a message's way, or the network's doing: four rows as of ``Account``."""
    found: list[tuple[int, int, int]] = []
    for walk, end in zip(walks, ends_ns.tolist(), strict=True):
        for each in walk:
            kept = each.what == What.WORK and each.row >= 0 and causes.cause[each.row] == NETWORK
            if each.exchange >= 0 or kept:
                found.append((each.exchange, end - each.length_ns, end))
            end -= each.length_ns
    number, begin, until = np.array(found, np.int64).reshape(-1, 3).T
    ends = (np.where(number < 0, -1, exchanges[name][number].astype(np.int64)) for name in ("src", "dst"))
    return np.stack([*ends, begin, until])


def _sum_up(
    account: Account,
    walks: Sequence[Sequence[Segment]],
    usual: _Usual,
    joins: _Joins,
    shared: set[int],
    entries: Entries,
    known: Known,
) -> None:
    """Fill in the parts of the typical steps, and what each step would be shorter by."""
    sums = [_parts(walk, usual, shared, entries, known) for walk in walks]
    saved = [joins.saved(walk, known.sooner_ns) for walk in walks]
    lengths = account.lengths_ns
    low, high = percentiles(lengths, (25, 75))
    middle = [n for n, length in enumerate(lengths.tolist()) if low <= length <= high]
    typical = middle or range(len(lengths))  # of two steps neither is in the middle
    total: defaultdict[Key, int] = defaultdict(int)
    for number in typical:
        for key, ns in (*sums[number].items(), *((("waited", e), ns) for e, ns in saved[number].items())):
            total[key] += ns
    for (name, endpoint), ns in sorted(total.items()):
        mean = round(ns / len(typical))
        if name in ("work", "waited", "in_node"):
            getattr(account, name)[endpoint] = mean
        else:
            setattr(account, name, mean)
    hidden = sum(part.get(("unexplained", -1), 0) for part in sums)
    account.hidden_share = hidden / max(int(lengths.sum()), 1)
    late = sorted({endpoint for each in saved for endpoint in each})
    account.saved_ns = {e: np.array([each.get(e, 0) for each in saved], np.int64) for e in late}


class _Usual:
    """What is usual of segments: the median of their like, of messages on the same link, and their scatter.

    Messages that the network held up are compared with those of the same size on other links, too. Where
    messages take any time (hosts that share a processor), what is beyond the median alone is half of all
    that their scatter makes.
    """

    def __init__(
        self, walks: Sequence[Sequence[Segment]], exchanges: Rows, entries: Entries, known: Known
    ) -> None:
        self.kind, self.collective = known.kind.data, entries.collective.data
        passed = sorted({each.exchange for walk in walks for each in walk if each.exchange >= 0})
        self.held = dict(zip(passed, known.held_up[passed].tolist(), strict=True))
        columns = (exchanges[name][passed].tolist() for name in ("bytes", "src", "dst"))
        self.messages = dict(zip(passed, zip(*columns, strict=True), strict=True))
        seen: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for segment in (segment for walk in walks for segment in walk if segment.row >= 0):
            for key in self._like(segment):
                seen[key].append(segment.length_ns)
        self.told = {
            key: percentiles(np.array(lengths), (25, 50))
            for key, lengths in seen.items()
            if len(lengths) >= FEWEST
        }

    def _like(self, segment: Segment) -> list[tuple[int, ...]]:
        what, _, row, exchange = segment
        kind = self.kind[self.collective[row]]
        if exchange < 0:
            return [(what, kind)]
        nbytes, src, dst = self.messages[exchange]
        alike = (what, kind, nbytes)
        return [alike] if self.held[exchange] else [(*alike, src, dst), alike]

    def beyond_ns(self, segment: Segment, sigmas: float = 0.0) -> int:
        """By how much a segment is longer than usual, and so many standard deviations of that (by its quicker
        side); of what has no like, nothing is known to be."""
        quartiles = next((self.told[key] for key in self._like(segment) if key in self.told), None)
        if quartiles is None:
            return 0
        quarter, middle = quartiles
        usual = middle + sigmas * (middle - quarter) / QUARTER_IN_SIGMAS
        return max(segment.length_ns - round(float(usual)), 0)


def _parts(
    walk: Sequence[Segment], usual: _Usual, shared: set[int], entries: Entries, known: Known
) -> dict[Key, int]:
    """The parts of one step."""
    parts: defaultdict[Key, int] = defaultdict(int)
    for segment in walk:
        what, length, row, _ = segment
        if row < 0:
            parts["unexplained", -1] += length
            continue
        endpoint, number = int(entries.endpoint[row]), int(entries.collective[row])
        mine, why = ("work", endpoint), ""
        if what == What.WORK:
            why = _why_longer(row, entries, known)
        elif what in (What.SENT, What.MOVED):
            mine = ("transfer", -1)
            why = "network" if what == What.MOVED or usual.held[segment.exchange] else "unexplained"
        elif number in shared:
            mine = ("in_node", endpoint)
        elif what == What.CREDIT:
            mine = ("credit", -1)
        else:
            mine = ("library", -1)
            if what == What.FIRST:  # so long it had its input, and did not send: it was not there
                beyond = usual.beyond_ns(segment)
                parts["work", endpoint] += beyond
                length -= beyond
        if why:
            beyond = usual.beyond_ns(segment, SIGMAS if why == "unexplained" else 0.0)
            parts[why, -1] += beyond
            length -= beyond
        parts[mine] += length
    return parts


def _why_longer(row: int, entries: Entries, known: Known) -> str:
    """What else than work the excess of a rank's work over the usual may be; nothing where it is exact."""
    cause = known.causes.cause[row]
    if cause == NETWORK:
        return "network"
    if cause == RECEIVER:
        return "credit"
    if entries.rule[row] == Rule.QUEUED:
        return "library"
    return "" if entries.rule[row] in EXACT_RULES or known.apart[entries.collective[row]] else "unexplained"


class _Joins:
    """By how much each collective's last rank came after the second last."""

    def __init__(self, instances: Sequence[Instance], entries: Entries) -> None:
        self.instances, self.entries = instances, entries
        self.last, self.second = latest_two(entries, entries.enter_ns)
        self.members = [frozenset(i.order) for i in instances]

    def _bound(self, row: int) -> tuple[int, int] | None:
        """How much sooner the rank may come until another one is last, and which; None where none is."""
        number = int(self.entries.collective[row])
        instance, enter = self.instances[number], self.entries.enter_ns
        place = row - int(self.entries.offsets[number])
        root = instance.op in (Op.BROADCAST, Op.SCATTER) and place == instance.root
        if instance.op == Op.SEND_RECV or root:
            return None
        second = int(self.second[number])
        if second < 0 or enter[second] == NEVER or enter[row] == NEVER:
            return None
        lead = int(enter[row] - enter[second]) if row == self.last[number] else 0
        return max(lead, 0), int(self.entries.endpoint[second])

    def saved(self, walk: Sequence[Segment], sooner_ns: Ints) -> dict[int, int]:
        """By endpoint what the step would be shorter by without its lateness.

        Where a rank came last to a collective, what is taken off before that counts as far as it came after
        the second last: until, further back, that one was in what the path passes, too, and would come
        sooner as well.
        """
        found: defaultdict[int, int] = defaultdict(int)
        bounds: list[list[int]] = []
        last = -1
        for what, length, row, _ in walk:
            if row < 0:
                continue
            number = int(self.entries.collective[row])
            if number != last:
                bounds = [each for each in bounds if each[1] not in self.members[number]]
                last = number
            if what not in (What.WORK, What.FIRST):
                continue
            bound = self._bound(row)
            bounds += [list(bound)] if bound is not None and what == What.WORK else []
            less = min([int(sooner_ns[row]), length, *(each[0] for each in bounds)])
            if less > 0:
                found[int(self.entries.endpoint[row])] += less
                for each in bounds:
                    each[0] -= less
        return found


def without(account: Account, endpoint: int, from_ns: int | None, steady: bool) -> tuple[int, int] | None:
    """The typical step, and without the endpoint's lateness, ns; None where steps are too few.

    ``from_ns``: steps that began before are left out (the rank was not late then). ``steady``: the median
    step is told, which lateness that comes now and then, or in fewer than two of three steps, leaves as it
    is; else the mean.
    """
    chosen = account.ends_ns - account.lengths_ns >= (NEVER if from_ns is None else from_ns)
    saved = account.saved_ns.get(endpoint, np.zeros(len(chosen), np.int64))
    if chosen.sum() < 2:
        return None
    typical = np.median if steady and np.mean(saved[chosen] > 0) >= LATE_SHARE else np.mean
    lengths = account.lengths_ns[chosen]
    return round(float(typical(lengths))), round(float(typical(lengths - saved[chosen])))
