"""Lateness of every rank in every collective in, one judgement an endpoint out.

An endpoint is judged on the collectives that tie ranks together (not on point-to-point transfers:
there a receiver that waits is no fault). What counts as late is measured against the group's own
noise, never against a fixed time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.inference.causes import CAUSES, COMPUTE, HOST, NONE, UNKNOWN, Causes
from dpuflow.inference.habits import (
    FEWEST,
    LATE_SHARE,
    MATERIAL_SHARE,
    MISSED,
    SIGMAS,
    USUAL_SHARE,
    comes_as_a_rule,
    in_rhythm,
    is_habit,
    is_material,
    is_regular,
    onset_of,
    usual_excess,
)
from dpuflow.inference.own import Own, tied_rows
from dpuflow.inference.rounds import going_round
from dpuflow.inference.standing import Standing, standing_of
from dpuflow.lateness import AT_LEAST, EXACT
from dpuflow.ordering import percentile
from dpuflow.schema import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.inference.charges import Charges
    from dpuflow.inference.stages import Stage
    from dpuflow.lateness import Entries, Relative

_OWN = (CAUSES[COMPUTE], CAUSES[HOST])


@dataclass
class Judgement:
    """What is said of one endpoint; times in ns, shares of ``collectives``."""

    endpoint: int
    collectives: int
    late_share: float
    last_share: float
    median_ns: int
    p99_ns: int
    caused_wait_ns: int
    verdict: str
    cause: str
    steadiness: str | None
    since_ns: int | None
    # Rows of Entries at which it works longer than its peers as a rule, and by how much.
    usual_ns: dict[int, int] = field(default_factory=dict)


def judge(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    charges: Charges,
    causes: Causes,
    own: Own,
    group: NDArray[np.int64],
    step: NDArray[np.int64],
    worked_ns: int,
    waiting: NDArray[np.bool_] | None = None,
) -> list[Judgement]:
    """One judgement for each endpoint that took part in a collective.

    ``causes`` as of ``causes_of``, ``own`` as of ``own_lateness``; ``group`` numbers each collective's
    group, ``step`` is each row's step (-1: in none), as of ``find_steps``; ``worked_ns`` how long the job
    took without stalls (``find_work``); ``waiting`` marks rows of groups that wait for the network
    (``troubles``).
    """
    row_tied = tied_rows(instances, entries)
    usable = row_tied & np.isin(relative.bound, (EXACT, AT_LEAST))
    peers = np.diff(entries.offsets)[entries.collective] - 1
    blame = np.where(charges.last, np.minimum(charges.wait_ns, own.amount_ns * peers), 0)
    seen = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    whole = int(entries.leave_ns[seen].max()) - int(entries.enter_ns[seen].min()) if seen.any() else 0
    kinds: dict[tuple[object, ...], int] = {}
    kind = [kinds.setdefault((i.op, i.size, g), len(kinds)) for i, g in zip(instances, group, strict=True)]
    endpoints = np.unique(entries.endpoint[row_tied]).tolist()
    rows = {e: np.flatnonzero(usable & (entries.endpoint == e)) for e in endpoints}
    counted = usable | (row_tied & own.unproved)
    counted[own.compared] = True
    kinds_of = np.array(kind, np.int64)

    def by(step: NDArray[np.int64]) -> dict[int, Units]:
        mine = {e: np.flatnonzero(counted & (entries.endpoint == e)) for e in endpoints}
        return {e: _units(rows, entries, own, blame, step, kinds_of) for e, rows in mine.items()}

    units = by(step)
    if len(kinds) == 1 and (step >= 0).any():
        # Collectives that are all alike are parted into steps by their pauses, and lateness makes some.
        alone = np.full(len(step), -1)
        singly = by(alone)
        if _turns(singly, own, entries.collective, worked_ns):
            units, step = singly, alone
    tests = sum(int(u.place.max(initial=-1)) + 1 for u in units.values())
    excess = np.where(counted, own.excess_ns, NEVER)
    world = World(whole, worked_ns, int(blame.sum()), standing_of(entries.collective, excess), tests)
    # While the network is in trouble, single incidents may well be its doing.
    trouble = (causes.cause[row_tied] == CAUSES.index("network")).any()
    trouble |= waiting is not None and bool((waiting & row_tied).any())
    if units and not trouble:
        amounts = np.concatenate([u.amount_ns for u in units.values()])
        world.among_ranks = is_habit(amounts, whole)
        world.third_ns = int(np.sort(amounts)[-FEWEST]) if len(amounts) >= FEWEST else 0
    if not any(is_habit(u.amount_ns, world.against_ns(u)) for u in units.values()):
        # What goes round meets all ranks, or by chance most; each of them may cost little.
        world.share = sharing_ranks([int(u.amount_ns.sum()) for u in units.values()], whole)
    world.turns = _turns(units, own, np.where(step >= 0, step, -1 - entries.collective), worked_ns)
    world.late_ranks = sum(e in world.turns or _comes_again(u, world) for e, u in units.items())
    return [_judge_one(e, rows[e], units[e], own, relative, charges, causes, world) for e in endpoints]


class Units(NamedTuple):
    """One endpoint's sequence of steps, or of collectives where it has no steps."""

    rows: NDArray[np.int64]  # of Entries, in order of time
    place: NDArray[np.int64]  # of each row in its unit
    amount_ns: NDArray[np.int64]  # of each unit: late of its own doing by this much; 0 within the noise
    blame_ns: NDArray[np.int64]  # of each unit: waits charged for that, rank-nanoseconds
    enter_ns: NDArray[np.int64]  # of each row
    kind: NDArray[np.int64]  # of each row: operation, size and group


def _units(
    rows: NDArray[np.int64],
    entries: Entries,
    own: Own,
    blame: NDArray[np.int64],
    step: NDArray[np.int64],
    kind: NDArray[np.int64],
) -> Units:
    """Sum rows by step. Where most belong to steps, what lies outside (start-up, the end) is no habit."""
    rows = rows[own.excess_ns[rows] != NEVER]
    rows = rows[np.argsort(entries.enter_ns[rows], kind="stable")]
    inside = step[rows] >= 0
    if 2 * inside.sum() > len(rows):
        rows = rows[inside]
        starts = np.flatnonzero(np.r_[True, np.diff(step[rows]) != 0])
    else:
        starts = np.arange(len(rows))
    if not len(rows):
        none = np.zeros(0, np.int64)
        return Units(rows, none, none, none, none, none)
    sigma = np.sqrt(np.add.reduceat(own.sigma_ns[rows] ** 2, starts))
    amount = np.add.reduceat(own.amount_ns[rows], starts)
    return Units(
        rows,
        np.arange(len(rows)) - np.repeat(starts, np.diff(np.r_[starts, len(rows)])),
        np.where(amount > SIGMAS / 2 * sigma, amount, 0),  # of many collectives some are late by chance
        np.add.reduceat(blame[rows], starts),
        entries.enter_ns[rows],
        kind[entries.collective[rows]],
    )


@dataclass
class World:
    """What a single endpoint is compared with."""

    whole_ns: int  # first entry to last leave
    span_ns: int  # ... stalls apart
    blame_ns: int  # waits charged to ranks for their own lateness
    standing: Standing  # of all ranks among their peers
    tests: int  # ranks compared, at each place of their steps
    share: int = 1  # of so many ranks each bears its part of what counts
    late_ranks: int = 0  # ranks that were late of their own doing as a habit
    turns: frozenset[int] = frozenset()  # endpoints that are late one after the other, each in its turn
    among_ranks: bool = False  # all ranks together were late as a habit, whoever it was
    third_ns: int = 0  # ... and by how much in the third worst unit of any of them

    def against_ns(self, units: Units) -> int:
        """What a rank's lateness is weighed against: incidents are stalls themselves, what comes as a rule is
        not."""
        often = len(units.amount_ns) and float((units.amount_ns > 0).mean()) >= LATE_SHARE
        return self.span_ns if often else self.whole_ns


def _turns(units: dict[int, Units], own: Own, of: NDArray[np.int64], span_ns: int) -> frozenset[int]:
    """The endpoints that take turns in being late (``rounds``); ``of`` is the unit of each row of Entries.

    Only of units that are all alike: steps, or collectives of one kind.
    """
    begins = {e: np.flatnonzero(u.place == 0) for e, u in units.items()}
    if len(units) < 2 or not all(len(each) for each in begins.values()):
        return frozenset()
    width = {len(u.rows) // len(begins[e]) for e, u in units.items()}
    pattern = next(iter(units.values())).kind[: max(width)]
    for endpoint, each in units.items():
        if len(width) > 1 or len(each.rows) != len(begins[endpoint]) * len(pattern):
            return frozenset()
        if (each.kind.reshape(-1, len(pattern)) != pattern).any():
            return frozenset()
    keys = {e: of[u.rows[begins[e]]] for e, u in units.items()}
    common = reduce(np.intersect1d, keys.values())
    sums = np.empty((2, len(common), len(units)), np.int64)
    for column, (endpoint, each) in enumerate(units.items()):
        order = np.argsort(keys[endpoint])
        rows = each.rows.reshape(-1, len(pattern))[order[np.searchsorted(keys[endpoint][order], common)]]
        sums[:, :, column] = own.excess_ns[rows].sum(axis=1), own.later_ns[rows].sum(axis=1)
    found = going_round(sums[0], sums[1], span_ns)
    return frozenset(e for e, turns in zip(units, found, strict=True) if turns)


def sharing_ranks(amounts_ns: Sequence[int], span_ns: int) -> int:
    """Of how many ranks each bears its part of what counts, given each one's own lateness; 1 where none.

    All of them, or at least as many as it takes for a habit.
    """
    ordered = sorted(amounts_ns, reverse=True)
    for ranks in range(len(ordered), 0, -1):
        if ranks < min(FEWEST, len(ordered)):
            break
        if is_material(ordered[ranks - 1] * ranks, span_ns):
            return ranks
    return 1


def _comes_again(units: Units, world: World) -> bool:
    """Whether the rank is late as a habit, or has its share in a habit of the whole group.

    What goes round may hit each rank once or twice only, and cost a share of what it costs in all.
    """
    total = int(np.minimum(units.amount_ns, world.third_ns).sum())
    return is_habit(units.amount_ns, world.against_ns(units)) or (
        world.among_ranks and is_material(total * world.share, world.whole_ns)
    )


def _usual(units: Units, own: Own, world: World, since: int = 0) -> dict[int, int]:
    """Rows at whose place in the step the rank works longer than its peers as a rule, and by how much.

    ``since``: from which of its rows on.

    The same work comes at the same place of every step. What makes the rank no later (it left its
    last collective sooner, say) does not count.
    """
    found: dict[int, int] = {}
    for place in range(int(units.place.max(initial=-1)) + 1):
        rows = units.rows[since:][units.place[since:] == place]
        sigma = float(np.median(own.sigma_ns[rows])) if len(rows) else 0.0
        standing, tests = world.standing, world.tests
        # A stretch that was chosen for its amounts (an onset) must stand the test wherever one may.
        least = standing.least(rows, 1.0 if since else USUAL_SHARE)
        chance = tests * standing.chance(rows), tests * least
        usual = usual_excess(own.excess_ns[rows], own.later_ns[rows], sigma, chance)
        if usual <= sigma and not is_material(usual * len(rows), world.span_ns):
            continue  # within the noise of single ones only what costs enough by itself is worth telling
        found.update(dict.fromkeys(rows.tolist() if usual else [], usual))
    return found


def _onset(units: Units, own: Own, ranks: int) -> int | None:
    """From which of its rows on the rank worked longer, None without an onset.

    Told at the place of the step where it was later than anywhere else, and from collectives of a kind
    to which it was ever late: others are no evidence that it was on time before. Where there are too few
    steps for that, from all of that kind; and of what it is late to in turn, from every such turn.
    """
    amount = own.amount_ns[units.rows]
    if not amount.any():
        return None
    worst = np.argmax(np.bincount(units.place, amount))
    kind = np.isin(units.kind, units.kind[amount > 0])
    for alike in (np.flatnonzero(kind & (units.place == worst)), np.flatnonzero(kind)):
        for at, least in ((alike, FEWEST), (alike[in_rhythm(amount[alike] > 0)], MISSED)):
            rows = units.rows[at]
            sigma = float(np.median(own.sigma_ns[rows])) if len(rows) else 0.0
            turned = onset_of(own.excess_ns[rows], sigma, least, ranks)
            if turned is not None:
                return int(at[turned])
    return None


def _main_cause(told: NDArray[np.int64], blamed: bool, partly: bool) -> int:
    """The cause that most late collectives have (``told``: how often each).

    Who is blamed was late of its own or its host's doing; who is not was not, whatever single
    collectives say. Where not all was captured (``partly``) that need not be known.
    """
    own = np.array([UNKNOWN, COMPUTE, HOST] if partly else [COMPUTE, HOST])
    if blamed:
        return int(own[np.argmax(told[own])])
    others = told.copy()
    others[own] = 0
    return int(np.argmax(others)) if others.any() else NONE


def _judge_one(
    endpoint: int,
    rows: NDArray[np.int64],
    units: Units,
    own: Own,
    relative: Relative,
    charges: Charges,
    causes: Causes,
    world: World,
) -> Judgement:
    if not len(rows):
        return Judgement(endpoint, 0, 0.0, 0.0, 0, 0, 0, "unknown", "unknown", None, None)
    # Beyond the noise of entries, or of its own doing beyond the noise of work: what the verdict counts.
    lateness, late = relative.lateness_ns[rows], charges.late[rows] | (own.amount_ns[rows] > 0)
    charged = int(charges.wait_ns[rows].sum())
    mine = units.amount_ns > 0
    # Who is always a little later than its peers yet never the last costs nobody anything.
    usual = _usual(units, own, world) if charged >= MATERIAL_SHARE * world.span_ns else {}
    verdict, steadiness, since = "on_time", None, None
    # One rank's incidents alone are none; the same among several ranks go round.
    habit = is_habit(units.amount_ns, world.against_ns(units)) or (
        _comes_again(units, world) and world.late_ranks > 1
    )
    habit |= endpoint in world.turns
    if habit or is_material(sum(usual.values()), world.span_ns):
        verdict, steadiness = "intermittent", ("rotating" if world.late_ranks > 1 else "transient")
        onset = _onset(units, own, max(world.late_ranks, 1))
        begin = int(units.enter_ns[onset]) if onset is not None else None
        # Among several that take turns none is the one, though each may come at even distances.
        most = 1 / 2 if world.late_ranks <= 1 else LATE_SHARE
        after = int((units.place[: onset or 0] == 0).sum())
        if (
            comes_as_a_rule(units.amount_ns[after:], world.span_ns)
            # Beside incidents that cost more, being a little longer as a rule makes them no habit.
            or 2 * sum(usual.values()) > int(units.amount_ns.sum())
            or (
                onset is not None
                and is_material(sum(_usual(units, own, world, onset).values()), world.span_ns)
            )
            or (
                endpoint not in world.turns
                and int(units.blame_ns.sum()) > most * world.blame_ns
                and is_regular(mine)
            )
        ):
            verdict, steadiness, since = "late", "persistent", begin
        elif not charged:
            verdict, steadiness = "on_time", None  # nobody ever waited for it alone
    if not len(units.rows) and late.any():  # it comes late, and nothing shows how long it worked
        verdict = "unknown"
    few = len(units.amount_ns) < FEWEST and is_material(int(units.amount_ns.sum()), world.whole_ns)
    if verdict == "on_time" and few:
        verdict = "unknown"  # late of its own doing, yet too seldom seen to call that a habit
    blamed = np.union1d(rows[late], units.rows[own.amount_ns[units.rows] > 0])
    told = np.bincount(causes.cause[blamed], minlength=len(CAUSES))
    return Judgement(
        endpoint,
        len(rows),
        float(late.mean()),
        float(charges.last[rows].mean()),
        int(np.median(lateness)),
        int(percentile(lateness, 99)),
        charged,
        verdict,
        CAUSES[_main_cause(told, verdict in ("late", "intermittent"), bool(causes.partly[rows].any()))],
        steadiness,
        since,
        usual,
    )


def doubt(judgements: Sequence[Judgement], elsewhere: frozenset[int]) -> list[Judgement]:
    """Judgements, where nothing is said against ranks that what nobody saw may have kept (``beside``)."""
    return [
        replace(each, verdict="unknown", cause=CAUSES[UNKNOWN], steadiness=None, since_ns=None, usual_ns={})
        if each.endpoint in elsewhere and each.verdict in ("late", "intermittent")
        else each
        for each in judgements
    ]


def doubt_incidents(judgements: Sequence[Judgement], far: frozenset[int]) -> list[Judgement]:
    """Judgements, without a cause for single incidents of ranks that have no capture of their own (``far``).

    What a link does to all messages shows at the captured rank, too. A loss between others holds up one,
    by a timeout of any length, and nobody here sees it.
    """
    return [
        replace(each, cause=CAUSES[UNKNOWN])
        if each.endpoint in far and each.verdict == "intermittent" and each.cause in _OWN
        else each
        for each in judgements
    ]


def add_stages(judgements: Sequence[Judgement], stages: Iterable[Stage]) -> list[Judgement]:
    """Judgements, with those of pipeline stages where the collectives alone say nothing against a rank.

    A stage that no other can be compared with stays as it was.
    """
    found = {judgement.endpoint: judgement for judgement in judgements}
    for stage in stages:
        late = stage.verdict in ("late", "intermittent")
        said = found.get(stage.endpoint)
        if said is None:
            said = Judgement(stage.endpoint, 0, 0.0, 0.0, 0, 0, 0, "unknown", "unknown", None, None)
        if late and said.verdict != "late":
            said = replace(
                said,
                verdict=stage.verdict,
                cause=CAUSES[COMPUTE],
                steadiness=stage.steadiness,
                since_ns=stage.since_ns,
            )
        elif stage.verdict == "on_time" and said.verdict == "unknown":
            said = replace(said, verdict="on_time", cause=CAUSES[NONE])
        found[stage.endpoint] = said
    return [found[endpoint] for endpoint in sorted(found)]
