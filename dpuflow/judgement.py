"""Lateness of every rank in every collective in, one judgement an endpoint out.

An endpoint is judged on the collectives that tie ranks together (not on point-to-point transfers:
there a receiver that waits is no fault). What counts as late is measured against the group's own
noise, never against a fixed time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.causes import CAUSES, COMPUTE, NONE, Causes
from dpuflow.lateness import AT_LEAST, EXACT, against_others
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness import Entries, Relative

LATE_SHARE = 2 / 3
"""Late in at least two of three collectives: an endpoint is `late`, less often `intermittent`."""
FEWEST = 3
"""Less often than this is an incident, not a habit of the endpoint."""
USUAL_SHARE = 0.8
"""An endpoint that enters after its peers in this share of collectives does so as a rule."""
INTERVAL_IN_SIGMAS = 1.96
"""Half of the interval that holds 95 % of a normal distribution, in standard deviations."""
SIGMAS = 3.0
"""How many standard deviations of the group's noise make an entry late. Lateness counts from the
earliest rank, so entries pass it more often than one normal value in 700 would."""
QUARTER_IN_SIGMAS = 0.6745
"""Median to quartile of a normal distribution, in standard deviations."""
MATERIAL_SHARE = 0.01
"""An endpoint that costs its group less than this share of its time is not worth a verdict."""


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
    seen = np.bincount(entries.collective[entries.enter_ns != NEVER], minlength=len(count))
    # The two latest entries of each collective, by sorting within it.
    order = np.lexsort((entries.enter_ns, entries.collective))
    ends = entries.offsets[1:] - 1
    whole = count >= 2
    top = order[ends[whole]]
    second = order[ends[whole] - 1]
    lead = entries.enter_ns[top] - entries.enter_ns[second]
    good = (entries.enter_ns[second] != NEVER) & (lead > 0) & usable[top]
    last[top[good]] = True
    wait[top[good]] = lead[good] * (seen[whole][good] - 1)
    return Charges(late, last, wait, noise, error, offset)


def _noise(
    entries: Entries, relative: Relative, offset: NDArray[np.float64], of_row: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per row the lateness that its group's own noise explains, and its error, ns.

    Noise is how much each rank's entry scatters about its own median, on the quieter side (a fault
    shows on one side only), taken as the median over ranks, and at least what a rank's host usually
    needs to hand a message on.
    """
    out = np.zeros(len(entries.endpoint), np.int64)
    error = np.zeros(len(entries.endpoint), np.int64)
    usable = relative.lateness_ns != NEVER
    for each in np.unique(of_row):
        mine = (of_row == each) & usable
        scatter = []
        for endpoint in np.unique(entries.endpoint[mine]):
            low, middle, high = np.percentile(offset[mine & (entries.endpoint == endpoint)], (25, 50, 75))
            scatter.append(min(middle - low, high - middle) / QUARTER_IN_SIGMAS)
        reactions = entries.reaction_ns[mine]
        reactions = reactions[reactions != NEVER]
        floor = float(np.median(reactions)) if len(reactions) else 0.0
        sigma = float(np.median(scatter)) if scatter else 0.0
        out[of_row == each] = round(max(SIGMAS * sigma, floor))
        error[of_row == each] = round(max(INTERVAL_IN_SIGMAS * sigma, floor))
    return out, error


def judge(
    instances: Sequence[Instance],
    entries: Entries,
    relative: Relative,
    charges: Charges,
    causes: Causes,
) -> list[Judgement]:
    """One judgement for each endpoint that took part in a collective; ``causes`` as of ``causes_of``."""
    tied = np.array([i.op != Op.SEND_RECV for i in instances], bool)
    row_tied = tied[entries.collective] if len(instances) else np.zeros(0, bool)
    usable = row_tied & np.isin(relative.bound, (EXACT, AT_LEAST))
    own = usable & charges.late & (causes.cause == COMPUTE)
    # A rank answers for its own time only. How far apart processes start is no habit: a rank's first
    # collective counts for nothing.
    amount = np.where(own, np.clip(causes.excess_ns, 0, np.maximum(relative.lateness_ns, 0)), 0)
    peers = np.diff(entries.offsets)[entries.collective] - 1
    blame = np.where(own & charges.last, np.minimum(charges.wait_ns, amount * peers), 0)
    seen = row_tied & (entries.enter_ns != NEVER)
    world = World(
        span_ns=int(entries.leave_ns[seen].max()) - int(entries.enter_ns[seen].min()) if seen.any() else 0,
        blame_ns=int(blame.sum()),
        late_ranks=0,
    )
    endpoints = np.unique(entries.endpoint[row_tied]).tolist()
    world.late_ranks = sum(_is_habit(amount[entries.endpoint == e], world.span_ns) for e in endpoints)
    return [
        _judge_one(
            endpoint,
            np.flatnonzero(usable & (entries.endpoint == endpoint)),
            entries,
            relative,
            charges,
            own,
            amount,
            blame,
            causes,
            world,
        )
        for endpoint in endpoints
    ]


@dataclass
class World:
    """What a single endpoint is compared with."""

    span_ns: int  # first entry to last leave
    blame_ns: int  # waits charged to ranks for their own lateness
    late_ranks: int  # ranks that were late of their own doing as a habit


def _judge_one(
    endpoint: int,
    rows: NDArray[np.int64],
    entries: Entries,
    relative: Relative,
    charges: Charges,
    own: NDArray[np.bool_],
    amount: NDArray[np.int64],
    blame: NDArray[np.int64],
    causes: Causes,
    world: World,
) -> Judgement:
    count = len(rows)
    if not count:
        return Judgement(endpoint, 0, 0.0, 0.0, 0, 0, 0, "unknown", "unknown", None, None)
    lateness = relative.lateness_ns[rows]
    late, mine = charges.late[rows], own[rows]
    onset = onset_of(mine)
    charged = int(charges.wait_ns[rows].sum())
    # Who is always a little later than its peers yet never the last costs nobody anything.
    usual = _usual_excess(charges, causes, rows) if charged >= MATERIAL_SHARE * world.span_ns else 0
    verdict, steadiness, since = "on_time", None, None
    if _is_habit(amount[rows], world.span_ns) or _is_material(usual * count, world.span_ns):
        verdict, steadiness = "intermittent", ("rotating" if world.late_ranks > 1 else "transient")
        blamed = int(blame[rows].sum())
        if (
            float(mine[onset or 0 :].mean()) >= LATE_SHARE
            or usual
            or (2 * blamed > world.blame_ns and _regular(mine))
        ):
            verdict, steadiness = "late", "persistent"
            since = int(entries.enter_ns[rows[onset]]) if onset else None
        elif not charged:
            verdict, steadiness = "on_time", None  # nobody ever waited for it alone
    told = np.bincount(causes.cause[rows[late]], minlength=len(CAUSES)) if late.any() else None
    return Judgement(
        endpoint,
        count,
        float(late.mean()),
        float(charges.last[rows].mean()),
        int(np.median(lateness)),
        int(np.percentile(lateness, 99)),
        charged,
        verdict,
        CAUSES[COMPUTE if verdict != "on_time" else NONE if told is None else int(np.argmax(told))],
        steadiness,
        since,
    )


def _is_habit(amount: NDArray[np.int64], span_ns: int) -> bool:
    """Whether a rank's own lateness (0 where it was not late) came often enough, and to enough."""
    return int((amount > 0).sum()) >= FEWEST and _is_material(int(amount.sum()), span_ns)


def _is_material(amount_ns: int, span_ns: int) -> bool:
    return amount_ns > 0 and amount_ns >= MATERIAL_SHARE * span_ns


def _usual_excess(charges: Charges, causes: Causes, rows: NDArray[np.int64]) -> int:
    """How much longer than its peers a rank works as a rule, ns; 0 where there is no such rule.

    An excess below the threshold of a single collective is no accident if it comes every time.
    """
    excess = causes.excess_ns[rows]
    excess = excess[excess != NEVER]
    if not len(excess) or np.percentile(excess, 100 * (1 - USUAL_SHARE)) <= 0:
        return 0
    usual = float(np.median(excess))
    return round(usual) if usual > np.median(charges.noise_ns[rows]) / SIGMAS else 0


def _regular(mine: NDArray[np.bool_]) -> bool:
    """Whether the late collectives come at even distances, as once a step they would.

    Of independent events, few lie as far apart as the middle pair: the distances are geometric. One
    more or one less now and then does not matter.
    """
    gaps = np.diff(np.flatnonzero(mine))
    if len(gaps) < 5:
        return False
    middle = float(np.median(gaps))
    return float((np.abs(gaps - middle) <= 0.25 * middle).mean()) >= USUAL_SHARE


def onset_of(late: NDArray[np.bool_]) -> int | None:
    """Where a rank turned late: the cut that best parts rarely late from mostly late, or None.

    The likelihood-ratio change point of a Bernoulli sequence (Hinkley and Hinkley, 1970), accepted
    where it beats "no change" by more than log n (the Bayesian information criterion for one more
    rate and one place). 0 is never returned: late from the start has no onset.
    """
    n = len(late)
    if n < 4:
        return None
    ones = np.cumsum(late)
    k = np.arange(1, n)

    def fit(hits: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
        rate = np.clip(hits / size, 1e-9, 1 - 1e-9)
        return np.asarray(hits * np.log(rate) + (size - hits) * np.log(1 - rate), np.float64)

    total = np.array([float(ones[-1])])
    alone = fit(total, np.array([float(n)]))[0]
    before, after = ones[:-1].astype(np.float64), total - ones[:-1]
    gain = fit(before, k.astype(np.float64)) + fit(after, (n - k).astype(np.float64)) - alone
    best = int(np.argmax(gain))
    rises = before[best] / k[best] < LATE_SHARE / 2 and after[best] / (n - k[best]) >= LATE_SHARE
    rises &= after[best] >= FEWEST
    return best + 1 if rises and gain[best] > np.log(n) else None
