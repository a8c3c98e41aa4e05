"""Requests in, findings about what clients wait for before the first answer, and what the ranks wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.findings.case import SMALL_SHARE, Cost, make_finding
from dpuflow.findings.losses import LOSS_SHARE
from dpuflow.findings.onset import lasting
from dpuflow.quantities import duration, listed, name_of, percent
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.requests import Requests
    from dpuflow.results import Analysis, Finding

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

SURELY: Final = 3.29
"""Standard errors: with 99.95 % confidence, one side."""
FEWEST: Final = 3
"""Requests, pauses or units below this say nothing of what is usual."""
TWICE: Final = 2
OUTLIER: Final = 10
"""Times as long as three of four prompts take to come: a timeout of TCP, which lasts 200 ms at least."""


class Rise(NamedTuple):
    """How much longer a prompt waits for each one that waits already, ns, and the error of that."""

    ns: float
    error_ns: float


def rise_of(wait_ns: Ints, ahead: Ints) -> Rise:
    """The slope of ``wait_ns`` over ``ahead``, with its standard error; nan where ``ahead`` does not"
    " differ."""
    x, y = ahead - ahead.mean(), wait_ns - wait_ns.mean()
    spread = float((x * x).sum())
    if len(x) <= FEWEST or not spread:
        return Rise(np.nan, np.nan)
    slope = float((x * y).sum()) / spread
    rest = y - slope * x
    return Rise(slope, float(np.sqrt((rest * rest).sum() / (len(x) - 2) / spread)))


def waiting_ahead(asked_ns: Ints, first_ns: Ints) -> Ints:
    """For each prompt how many others had come before it and had no answer yet."""
    order = np.argsort(asked_ns, kind="stable")
    answered = np.searchsorted(np.sort(first_ns), asked_ns, side="right")
    ahead = np.empty(len(order), np.int64)
    ahead[order] = np.arange(len(order))
    return np.asarray(np.maximum(ahead - answered, 0))


def find_backlogs(case: Case) -> Iterator[Finding]:
    """One finding for each front end whose prompts wait for those before them."""
    requests = case.requests
    for server in distinct(requests.connections.server).tolist():
        chosen = requests.whole & (requests.server == server)
        asked, first = requests.asked_ns[chosen], requests.first_ns[chosen]
        if len(asked) <= FEWEST:
            continue
        ahead = waiting_ahead(asked, first)
        rise = rise_of(first - asked, ahead)
        # One that is answered just then is no queue: half of all find another one behind it.
        if not rise.ns > SURELY * rise.error_ns or 2 * int((ahead > 1).sum()) <= len(ahead):
            continue
        lost = rise.ns * float(ahead.sum())
        share = min(lost / max(requests.open_ns, 1), 1.0)
        usual = float(median_of((first - asked)[ahead == ahead.min()]))
        yield make_finding(
            "admission_backlog",
            [server],
            (int(asked[ahead > 0].min()), int(first[ahead > 0].max())),
            Cost(round(lost), share),
            0.9,
            f"Prompts queue at {name_of(case.result.endpoints[server])}: up to {int(ahead.max())} at once,"
            f" and each one ahead adds {duration(round(rise.ns))} to the time to the first token, otherwise"
            f" {duration(round(usual))}: {percent(share)} of the requests' time.",
        )


def find_starved_ranks(case: Case) -> Iterator[Finding]:
    """One finding for all pauses of the ranks with no prompt open, longer than such pauses were before."""
    requests = case.requests
    idle = idle_stretches(case)
    if not len(idle):
        return
    begin = np.where(requests.sent_ns == NEVER, requests.first_ns, requests.sent_ns)
    end = np.where(requests.last_ns == NEVER, case.joined.end_ns, requests.last_ns)
    opened, closed = np.sort(begin), np.sort(end)
    # None is open from when as many have ended as have begun, until the next one is.
    begun = np.searchsorted(opened, idle[:, 0], side="right")
    between = begun > 0
    following = np.minimum(np.r_[opened, case.joined.end_ns][begun], idle[:, 1])
    over = np.maximum(np.r_[case.joined.start_ns, closed][begun], idle[:, 0])
    none = over < following
    idle = np.where(none[:, None], np.stack([over, following], axis=1), idle)
    lengths = np.diff(idle, axis=1)[:, 0]
    usual, without = lengths[~none], np.flatnonzero(none & between)
    if len(usual) < FEWEST or not len(without):
        return
    arrivals = np.diff(opened)
    most = max(TWICE * float(usual.max()), float(arrivals.mean()) * _outlier(len(arrivals)))
    long = [
        n
        for n in without.tolist()
        if lengths[n] > max(most, _by_chance(lengths[without], lengths[n])) and _come_back(requests, idle[n])
    ]
    lost = int(sum(lengths[n] for n in long))
    share = lost / case.span_ns()
    if not long or share < SMALL_SHARE:
        return
    ranks = sorted({end for group in case.inferred.groups for end in group})
    yield make_finding(
        "ingress_starvation",
        ranks,
        (int(idle[long[0], 0]), int(idle[long[-1], 1])),
        Cost(lost * len(ranks), share),
        0.8,
        f"The ranks stood still {len(long)} times, for {duration(int(lengths[long].max()))} at most, while no"
        f" prompt was open: {percent(share)} of the time. With prompts open they pause for"
        f" {duration(int(usual.max()))} at most.",
    )


def _come_back(requests: Requests, pause: Ints) -> bool:
    """Whether most of those who had asked before a pause ask again after it: else they were just done."""
    before = distinct(requests.connection[requests.sent_ns < pause[0]])
    after = distinct(requests.connection[requests.sent_ns >= pause[1]])
    return 2 * len(np.intersect1d(before, after)) > len(before)


def idle_stretches(case: Case) -> Ints:
    """Stretches in which no rank is in any operation, from and to, in order."""
    entries = case.inferred.entries
    known = (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)
    if not known.any():
        return np.zeros((0, 2), np.int64)
    begin, end = entries.enter_ns[known], entries.leave_ns[known]
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    gap = np.flatnonzero(begin[1:] > end[:-1])
    return np.stack([end[gap], begin[gap + 1]], axis=1)


def _by_chance(pauses: Ints, one: int) -> float:
    """The length that one of so many pauses of random arrivals reaches in one of a hundred captures."""
    others = pauses[pauses < one]
    if len(others) < FEWEST:
        return 0.0
    return float(others.mean()) * _outlier(len(pauses))


def _outlier(count: int) -> float:
    """In means, what the longest of so many exponential gaps reaches in one of a hundred captures."""
    return float(np.log(100 * max(count, 1)))


def find_skews(case: Case) -> Iterator[Finding]:
    """One finding for the front end, or else the connection, that has more than its share beyond chance."""
    found = find_skew_of(case.result, (case.joined.start_ns, case.joined.end_ns))
    if found is not None or (found := _skew_of_connections(case)) is not None:
        yield found


def find_skew_of(result: Analysis, times: tuple[int, int]) -> Finding | None:
    """The front end that answers more than its share, of all that the result lists: no two of their times are
    compared, so they may be on clocks that nothing ties."""
    requests = result.requests
    server = np.array([each.server for each in requests], np.int64)
    tokens = np.array([each.tokens for each in requests], float)
    units, mine = np.unique(server, return_inverse=True)
    work: Floats = np.bincount(mine, tokens, len(units)).astype(float) if len(units) else np.zeros(0)
    if not _beyond_chance(work, tokens):
        return None
    most = int(work.argmax())
    whole = np.array([each.complete and None not in (each.sent_ns, each.first_ns) for each in requests])
    waited, opened = (
        np.array([(getattr(each, last) or 0) - (each.sent_ns or 0) for each in requests])
        for last in ("first_ns", "last_ns")
    )
    own, others = whole & (mine == most), whole & (mine != most)
    longer = 0.0
    if own.any() and others.any():
        longer = float(np.maximum(waited[own] - median_of(waited[others]), 0).sum())
    share = min(longer / max(int(opened[whole].sum()), 1), 1.0)
    who = name_of(result.endpoints[units[most]])
    return _skew(who, [int(units[most])], times, (work, "front ends"), Cost(round(longer), share))


def _skew_of_connections(case: Case) -> Finding | None:
    requests = case.requests
    tokens = requests.tokens.astype(np.float64)
    work: Floats = np.bincount(requests.connection, tokens, len(requests.connections.number)).astype(float)
    if not _beyond_chance(work, tokens):
        return None
    one = int(work.argmax())
    client, server = int(requests.connections.client[one]), int(requests.connections.server[one])
    who = f"a connection of {name_of(case.result.endpoints[client])}"
    times = case.joined.start_ns, case.joined.end_ns
    return _skew(who, [client, server], times, (work, "connections"), Cost(0, 0.0))


def _beyond_chance(work: Floats, tokens: Floats) -> bool:
    """Whether the one with most ``work`` has more than random assignment of these tokens gives."""
    if len(work) < 2:
        return False
    # Each request comes to any unit alike: the variance of a sum of so many of their sizes.
    share = 1 / len(work)
    error = float(np.sqrt(share * (1 - share) * (tokens * tokens).sum()))
    surely = SURELY + float(np.sqrt(2 * np.log(len(work))))  # the largest of so many
    return bool(error and (work.max() - work.mean()) / error > surely)


def _skew(
    who: str, endpoints: list[int], times: tuple[int, int], work: tuple[Floats, str], cost: Cost
) -> Finding:
    shares, units = work
    return make_finding(
        "session_skew",
        endpoints,
        times,
        cost,
        0.8,
        f"{who} has {percent(float(shares.max() / shares.sum()))} of all tokens, where an even share of"
        f" {len(shares)} {units} is {percent(1 / len(shares))}: more than chance explains. Its prompts waited"
        f" {duration(cost.ns or 0)} longer in total than those of the others.",
    )


def find_client_losses(case: Case) -> Iterator[Finding]:
    """One finding a direction and front end: segments of prompts, or of answers, that were sent again."""
    requests, flows = case.requests, case.joined.flows
    connections = requests.connections
    for server in distinct(connections.server).tolist():
        mine = connections.server == server
        up = connections.flow[mine]
        down = flows["peer"][up].astype(np.int64)
        down = down[down < len(flows)]
        for condition, rows, again in (
            ("ingress_loss", up, requests.again_up),
            ("egress_loss", down, requests.again_down),
        ):
            found = _client_loss(case, condition, server, rows, (requests.server == server) & (again > 0))
            if found is not None:
                yield found


def _rest_came_late(requests: Requests, server: int) -> Ints:
    """By how much the rest of each prompt came later than that of others: a last packet that is lost before
    the tap shows no other sign. Only what takes so long as no other prompt does, ten times the usual."""
    mine = requests.whole & (requests.server == server)
    took = np.where(mine, requests.asked_ns - requests.sent_ns, 0)
    if int(mine.sum()) < FEWEST:
        return np.zeros(len(took), np.int64)
    usual = float(np.percentile(took[mine], 75))
    return np.where(took > OUTLIER * usual, took - usual, 0).astype(np.int64)


def _client_loss(
    case: Case, condition: str, server: int, rows: Ints, hit: NDArray[np.bool_]
) -> Finding | None:
    requests: Requests = case.requests
    flows = case.joined.flows[rows]
    again = int(np.maximum(flows["retransmitted"].astype(np.int64) - flows["spurious"], 0).sum())
    held_ns = np.where(hit, requests.held_ns, 0)
    if condition == "ingress_loss":
        held_ns = np.maximum(held_ns, _rest_came_late(requests, server))
        hit = hit | (held_ns > 0)
    held = int(held_ns.sum())
    if condition == "ingress_loss" and held:
        again += int(flows["out_of_order"].sum())  # lost before the tap: only the second copy is seen, late
    packets = int(flows["packets"].sum())
    if again <= max(1, LOSS_SHARE * packets):
        return None
    share = min(held / max(requests.open_ns, 1), 1.0)
    clients = sorted({int(end) for end in requests.client[hit]})
    ends = case.result.endpoints
    names = [name_of(ends[end]) for end in clients]
    way = "from" if condition == "ingress_loss" else "to"
    whose = f" {way} {listed(names, 4)}" if names else ""
    return make_finding(
        condition,
        [server, *clients],
        _losing(case, condition == "ingress_loss", server, held_ns, rows),
        Cost(held, share),
        FEWEST / (FEWEST + 1) if again < FEWEST else 0.9,
        f"{again:,} of {packets:,} segments {way} clients of {name_of(ends[server])} were"
        f" retransmitted{whose}: requests waited {duration(held)} for them in all"
        f" ({percent(share)} of the requests' time).",
    )


def _losing(case: Case, up: bool, server: int, held_ns: Ints, rows: Ints) -> tuple[int, int]:
    """From when to when prompts (``up``) or answers of a front end were held up by losses; ``held_ns``: by
    request; ``rows``: of FLOW."""
    requests, flows = case.requests, case.joined.flows[rows]
    mine = (requests.held[1] == up) & (requests.connections.server[requests.held[0]] == server)
    stretches, seen = requests.held[2:, mine], requests.token_ns
    if up:
        seen = requests.asked_ns[requests.asked_ns != NEVER]
        late, over = held_ns[held_ns > 0], requests.asked_ns[held_ns > 0]
        stretches = np.concatenate([stretches, np.stack([over - late, over])], axis=1)
    return lasting(stretches, seen, (int(flows["first_ns"].min()), int(flows["last_ns"].max())))
