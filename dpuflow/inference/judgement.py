"""Lateness of every rank in every collective in, one judgement an endpoint out.

An endpoint is judged on the collectives that tie ranks together (not on point-to-point transfers:
there a receiver that waits is no fault). What counts as late is measured against the group's own
noise, never against a fixed time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.inference.causes import CAUSES, COMPUTE, HOST, NONE, UNKNOWN, Causes
from dpuflow.inference.habits import (
    LATE_SHARE,
    MATERIAL_SHARE,
    QUARTER_IN_SIGMAS,
    SIGMAS,
    is_habit,
    is_material,
    is_regular,
    onset_of,
    usual_excess,
)
from dpuflow.lateness import AT_LEAST, EXACT, Rule, against_others
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.inference.replicas import Compared
    from dpuflow.inference.stages import Stage
    from dpuflow.lateness import Entries, Relative

SIXTH_IN_SIGMAS = 0.4307
"""Median to the third that lies around it, of a normal distribution, in standard deviations."""
FEWEST_IN_HEAPS = 16
"""Values that can be told to make two heaps: enough for quartiles of each."""
INTERVAL_IN_SIGMAS = 1.96
"""Half of the interval that holds 95 % of a normal distribution, in standard deviations."""


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


@dataclass
class Charges:
    """Per row of Entries: whether it is late, and the wait charged to it (rank-nanoseconds)."""

    late: NDArray[np.bool_]
    last: NDArray[np.bool_]
    wait_ns: NDArray[np.int64]
    noise_ns: NDArray[np.int64]  # of the row's group: what it takes to be called late
    error_ns: NDArray[np.int64]  # half-width of a 95 % interval of the row's lateness
    offset_ns: NDArray[np.float64]  # entry less the median of the other ranks' entries


def charge(entries: Entries, relative: Relative, group: NDArray[np.int64]) -> Charges:
    """Mark late and last ranks and charge each collective's wait to its last rank.

    ``group`` numbers each collective's group. The last rank is charged, for every other rank whose entry
    was seen, the time between the second latest entry (or that rank's own, whichever is later) and its
    own: a rank that nobody saw may have entered last of all, and then waited for no one.
    """
    total = len(entries.endpoint)
    late, last = np.zeros(total, bool), np.zeros(total, bool)
    wait = np.zeros(total, np.int64)
    offset = against_others(entries, entries.enter_ns, relative.lateness_ns != NEVER)
    noise, error = _noise(entries, relative, offset, group[entries.collective])
    usable = np.isin(relative.bound, (EXACT, AT_LEAST))
    late[usable] = relative.lateness_ns[usable] > noise[usable]
    count = np.diff(entries.offsets)
    # Who waited for an input may have come last only by what its first message took: the last of the others
    # is charged, for these.
    waits = (entries.rule == Rule.AFTER_INPUT) & ~usable & (entries.granted_ns != NEVER)
    when = np.where(waits, NEVER, entries.enter_ns)
    seen = np.bincount(entries.collective[when != NEVER], minlength=len(count))
    # The two latest entries of each collective, by sorting within it.
    order = np.lexsort((when, entries.collective))
    ends = entries.offsets[1:] - 1
    whole = count >= 2
    top = order[ends[whole]]
    second = order[ends[whole] - 1]
    lead = when[top] - np.where(when[second] == NEVER, when[top], when[second])
    good = (when[second] != NEVER) & (lead > 0) & usable[top]
    last[top[good]] = True
    wait[top[good]] = lead[good] * (seen[whole][good] - 1)
    return Charges(late, last, wait, noise, error, offset)


def _noise(
    entries: Entries, relative: Relative, offset: NDArray[np.float64], of_row: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per row the lateness that its group's own noise explains, and its error, ns.

    Noise is the scatter of entries (``_sigmas``), and at least what a rank's host usually needs to hand
    a message on.
    """
    sigma, floor = _sigmas(entries, offset, relative.lateness_ns != NEVER, of_row)
    noise = np.maximum(SIGMAS * sigma, floor).round().astype(np.int64)
    return noise, np.maximum(INTERVAL_IN_SIGMAS * sigma, floor).round().astype(np.int64)


def _sigmas(
    entries: Entries, values: NDArray[np.float64], usable: NDArray[np.bool_], of_row: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Per row one standard deviation of its group's noise, and its hosts' usual reaction, ns.

    Noise is how much each rank's ``values`` scatter about their own median, on the quieter side (a
    fault shows on one side only), taken as the median over ranks.
    """
    sigma, floor = np.zeros(len(values)), np.zeros(len(values))
    for each in np.unique(of_row):
        whole = of_row == each
        mine = whole & usable
        scatter = []
        for endpoint in np.unique(entries.endpoint[mine]):
            scatter.append(_scatter(values[mine & (entries.endpoint == endpoint)]))
        reactions = entries.reaction_ns[mine]
        reactions = reactions[reactions != NEVER]
        floor[whole] = float(np.median(reactions)) if len(reactions) else 0.0
        sigma[whole] = float(np.median(scatter)) if scatter else 0.0
    return sigma, floor


def _scatter(values: NDArray[np.float64]) -> float:
    """One standard deviation of a rank's ``values`` about their own median.

    A fault that sets in halfway, or goes round among few ranks, is no noise, yet parts the values into two
    heaps. They are two where the closest third of all values lies twice as close as quartiles do; then the
    wider heap counts. On a busy host heaps are too wide for that: where neighbours in time lie twice as close
    as quartiles do, an onset parts them, and the scatter of neighbours counts.
    """

    def of(part: NDArray[np.float64]) -> float:
        low, middle, high = np.percentile(part, (25, 50, 75))
        return float(min(middle - low, high - middle)) / QUARTER_IN_SIGMAS

    whole, ordered = of(values), np.sort(values)
    if len(values) < FEWEST_IN_HEAPS:
        return whole
    third = -(-len(values) // 3)
    closest = float((ordered[third - 1 :] - ordered[: len(ordered) - third + 1]).min())
    if closest / SIXTH_IN_SIGMAS >= whole:  # its half width, times two
        beside = float(np.median(np.abs(np.diff(values)))) / (QUARTER_IN_SIGMAS * 2**0.5)
        return beside if 2 * beside < whole else whole
    widest = int(np.argmax(np.diff(ordered[third // 2 : -(third // 2)]))) + third // 2 + 1
    return min(whole, max(of(ordered[:widest]), of(ordered[widest:])))


def judge(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    charges: Charges,
    causes: Causes,
    own: Own,
    group: NDArray[np.int64],
    step: NDArray[np.int64],
) -> list[Judgement]:
    """One judgement for each endpoint that took part in a collective.

    ``causes`` as of ``causes_of``, ``own`` as of ``own_lateness``; ``group`` numbers each collective's
    group, ``step`` is each row's step (-1: in none), as of ``find_steps``.
    """
    row_tied = _tied(instances, entries)
    usable = row_tied & np.isin(relative.bound, (EXACT, AT_LEAST))
    peers = np.diff(entries.offsets)[entries.collective] - 1
    blame = np.where(charges.last, np.minimum(charges.wait_ns, own.amount_ns * peers), 0)
    seen = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    span = int(entries.leave_ns[seen].max()) - int(entries.enter_ns[seen].min()) if seen.any() else 0
    kinds: dict[tuple[object, ...], int] = {}
    kind = [kinds.setdefault((i.op, i.size, g), len(kinds)) for i, g in zip(instances, group, strict=True)]
    endpoints = np.unique(entries.endpoint[row_tied]).tolist()
    rows = {e: np.flatnonzero(usable & (entries.endpoint == e)) for e in endpoints}
    counted = usable | (row_tied & own.unproved)
    counted[own.compared] = True
    units = {
        e: _units(
            np.flatnonzero(counted & (entries.endpoint == e)),
            entries,
            own,
            blame,
            step,
            np.array(kind, np.int64),
        )
        for e in endpoints
    }
    world = World(span, int(blame.sum()))
    # While the network is in trouble, single incidents may well be its doing.
    trouble = (causes.cause[row_tied] == CAUSES.index("network")).any()
    if units and not trouble:
        world.among_ranks = is_habit(np.concatenate([u.amount_ns for u in units.values()]), span)
    if not any(is_habit(u.amount_ns, span) for u in units.values()):
        # What goes round meets all ranks; each of them may cost little.
        world.share = len(units)
        if not all(_comes_again(u, world) for u in units.values()):
            world.share = 1
    world.late_ranks = sum(_comes_again(u, world) for u in units.values())
    return [_judge_one(e, rows[e], units[e], own, relative, charges, causes, world) for e in endpoints]


@dataclass
class Own:
    """Per row of Entries what the rank answers for itself."""

    amount_ns: NDArray[np.int64]  # late of its own doing by this much; 0 within the noise
    excess_ns: NDArray[np.int64]  # how much longer it worked than its peers; NEVER where not known
    later_ns: NDArray[np.int64]  # the same, no more than it was late; NEVER where not known
    sigma_ns: NDArray[np.float64]  # one standard deviation of its group's excess
    unproved: NDArray[np.bool_]  # nobody knows how late it was: none of it counts
    compared: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Rows that were compared with replicas."""


def with_replicas(own: Own, causes: Causes, compared: Compared) -> tuple[Own, Causes]:
    """The same with what stages of replicas took longer for their acts than their peers (``replicas``)."""
    if not compared.some:
        return own, causes
    rows = compared.rows
    unproved = own.unproved.copy()
    own = Own(
        own.amount_ns.copy(), own.excess_ns.copy(), own.later_ns.copy(), own.sigma_ns.copy(), unproved, rows
    )
    own.amount_ns[rows], own.excess_ns[rows] = compared.amount_ns, compared.excess_ns
    own.later_ns[rows], own.sigma_ns[rows] = compared.excess_ns, compared.sigma_ns
    cause = causes.cause.copy()
    cause[rows] = np.where(
        compared.amount_ns > 0, COMPUTE, np.where(cause[rows] == COMPUTE, NONE, cause[rows])
    )
    return own, replace(causes, cause=cause)


def _tied(instances: Sequence[Instance], entries: Entries) -> NDArray[np.bool_]:
    """Rows of collectives that tie ranks together: not of point-to-point transfers."""
    tied = np.array([i.op != Op.SEND_RECV for i in instances], bool)
    return tied[entries.collective] if len(instances) else np.zeros(0, bool)


def own_lateness(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    causes: Causes,
    group: NDArray[np.int64],
) -> Own:
    """How much of each rank's lateness is its own: it worked longer than its peers, beyond the noise.

    The noise is that of the work itself. Entries scatter by what peers of other groups handed on, too,
    and would hide a rank that is late once a step.
    """
    known = _tied(instances, entries) & np.isin(relative.bound, (EXACT, AT_LEAST))
    known &= causes.excess_ns != NEVER
    excess = np.where(known, causes.excess_ns, NEVER)
    sigma, floor = _sigmas(entries, excess.astype(np.float64), known, group[entries.collective])
    amount, beyond = np.minimum(excess, relative.lateness_ns), np.maximum(SIGMAS * sigma, floor)
    told = np.array([CAUSES[c] in ("compute", "host", "none") for c in range(len(CAUSES))])
    mine = (
        known
        & (relative.lateness_ns > beyond)
        & (told[causes.cause] | (causes.partly & (causes.cause == UNKNOWN)))
    )
    mine &= (2 * excess >= relative.lateness_ns) | (amount > beyond)
    # Who waited for an input was there before, and who sent first may not have been late at all: were these
    # not counted, single incidents would make a habit.
    waited = entries.rule == Rule.AFTER_INPUT
    unproved = _tied(instances, entries) & (waited | entries.exact) & (causes.excess_ns != NEVER) & ~known
    excess = np.where(unproved, np.where(waited, 0, causes.excess_ns), excess)
    amount = np.where(unproved, 0, amount)
    return Own(np.where(mine, amount, 0), excess, amount, sigma, unproved)


@dataclass
class Units:
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

    span_ns: int  # first entry to last leave
    blame_ns: int  # waits charged to ranks for their own lateness
    share: int = 1  # of so many ranks each bears its part of what counts
    late_ranks: int = 0  # ranks that were late of their own doing as a habit
    among_ranks: bool = False  # all ranks together were late as a habit, whoever it was


def _comes_again(units: Units, world: World) -> bool:
    """Whether the rank is late as a habit, or has its share in a habit of the whole group.

    What goes round may hit each rank once or twice only, and cost a share of what it costs in all.
    """
    total = int(units.amount_ns.sum())
    return is_habit(units.amount_ns, world.span_ns) or (
        world.among_ranks and is_material(total * world.share, world.span_ns)
    )


def _usual(units: Units, own: Own, since: int = 0) -> dict[int, int]:
    """Rows at whose place in the step the rank works longer than its peers as a rule, and by how much.

    ``since``: from which of its rows on.

    The same work comes at the same place of every step. What makes the rank no later (it left its
    last collective sooner, say) does not count.
    """
    found: dict[int, int] = {}
    for place in range(int(units.place.max(initial=-1)) + 1):
        rows = units.rows[since:][units.place[since:] == place]
        sigma = float(np.median(own.sigma_ns[rows])) if len(rows) else 0.0
        usual = usual_excess(own.excess_ns[rows], own.later_ns[rows], sigma)
        found.update(dict.fromkeys(rows.tolist() if usual else [], usual))
    return found


def _onset(units: Units, own: Own) -> int | None:
    """From which of its rows on the rank worked longer, None without an onset.

    Told at the place of the step where it was later than anywhere else, and from collectives of a kind
    to which it was ever late: others are no evidence that it was on time before.
    """
    amount = own.amount_ns[units.rows]
    if not amount.any():
        return None
    worst = np.argmax(np.bincount(units.place, amount))
    alike = np.isin(units.kind, units.kind[amount > 0]) & (units.place == worst)
    rows = units.rows[alike]
    turned = onset_of(own.excess_ns[rows], float(np.median(own.sigma_ns[rows])))
    return None if turned is None else int(np.flatnonzero(alike)[turned])


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
    usual = _usual(units, own) if charged >= MATERIAL_SHARE * world.span_ns else {}
    verdict, steadiness, since = "on_time", None, None
    # One rank's incidents alone are none; the same among several ranks go round.
    habit = is_habit(units.amount_ns, world.span_ns) or (_comes_again(units, world) and world.late_ranks > 1)
    if habit or is_material(sum(usual.values()), world.span_ns):
        verdict, steadiness = "intermittent", ("rotating" if world.late_ranks > 1 else "transient")
        onset = _onset(units, own)
        begin = int(units.enter_ns[onset]) if onset is not None else None
        # Among several that take turns none is the one, though each may come at even distances.
        most = 1 / 2 if world.late_ranks <= 1 else LATE_SHARE
        after = mine[int((units.place[: onset or 0] == 0).sum()) :]
        if (
            float(after.mean()) >= LATE_SHARE
            or usual
            or (onset is not None and is_material(sum(_usual(units, own, onset).values()), world.span_ns))
            or (int(units.blame_ns.sum()) > most * world.blame_ns and is_regular(mine))
        ):
            verdict, steadiness, since = "late", "persistent", begin
        elif not charged:
            verdict, steadiness = "on_time", None  # nobody ever waited for it alone
    blamed = np.union1d(rows[late], units.rows[own.amount_ns[units.rows] > 0])
    told = np.bincount(causes.cause[blamed], minlength=len(CAUSES))
    return Judgement(
        endpoint,
        len(rows),
        float(late.mean()),
        float(charges.last[rows].mean()),
        int(np.median(lateness)),
        int(np.percentile(lateness, 99)),
        charged,
        verdict,
        CAUSES[_main_cause(told, verdict != "on_time", bool(causes.partly[rows].any()))],
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
