"""Scoring: how near an analysis comes to what is known to have happened (docs/scoring.md).

In: the JSON of an analysis and its ``Case``. Out: a ``Score`` of counts and errors, which can be added up
over cases. Matching and figures follow the result format's section "Truth and scoring".
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from dpuflow.scoring.expected import check_verdicts
from dpuflow.scoring.figures import percentile, share_of
from dpuflow.scoring.moved import Moved, score_transfers
from dpuflow.scoring.truth import Case, TrueCollective, read_analysis, read_case

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SLACK_NS: Final = 500_000  # a bound is violated when the truth lies beyond it by more
LEFT_OUT: Final = 0.3  # ranks within this share of the "late" threshold are left out
_SAME: Final = ({"rabenseifner", "halving_doubling"},)  # one pattern under two names


@dataclass(slots=True)
class Score:
    """Counts and errors of one case, or of several added up. Errors are absolute, in ns."""

    cases: list[str] = field(default_factory=list)
    true: int = 0  # collectives that count: no warm-up, wholly within the captures
    found: int = 0
    inferred: int = 0  # collectives that count: found ones and invented ones
    invented: int = 0
    invented_outside: int = 0  # of these: mostly before the first or after the last true one
    uncounted: int = 0  # inferred warm-up, partial, or send_recv where the truth lists none
    op_right: int = 0
    algorithm_asked: int = 0
    algorithm_right: int = 0
    algorithm_alternative: int = 0  # of the right ones: named among ``alternatives``
    bytes_asked: int = 0
    bytes_right: int = 0
    ranks: int = 0  # true entries (collective x endpoint) of the found collectives
    exact: int = 0
    intervals: int = 0  # exact entries with an error stated
    intervals_held: int = 0  # of these: the truth lies within it
    bounds: int = 0
    bounds_violated: int = 0
    last_asked: int = 0
    last_right: int = 0
    last_untold: int = 0  # of those not right: no lateness was given at all
    late_hits: int = 0
    late_false: int = 0
    late_missed: int = 0
    verdicts: int = 0
    verdicts_right: int = 0
    verdict_notes: list[str] = field(default_factory=list)
    enter_errors_ns: list[int] = field(default_factory=list)
    lateness_errors_ns: list[int] = field(default_factory=list)
    clock_errors_ns: list[int] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)  # bulk transfers

    def figures(self) -> dict[str, object]:
        """The figures that reports show; shares of one, None where nothing was asked."""
        return {
            "cases": self.cases,
            "true": self.true,
            "found": self.found,
            "found_share": share_of(self.found, self.true),
            "invented": self.invented,
            "invented_outside": self.invented_outside,
            "invented_share": share_of(self.invented, self.inferred),
            "uncounted": self.uncounted,
            "op_right": share_of(self.op_right, self.found),
            "algorithm_right": share_of(self.algorithm_right, self.algorithm_asked),
            "algorithm_by_alternative": self.algorithm_alternative,
            "bytes_right": share_of(self.bytes_right, self.bytes_asked),
            "enter_error_median_ns": percentile(self.enter_errors_ns, 0.5),
            "enter_error_p90_ns": percentile(self.enter_errors_ns, 0.9),
            "lateness_error_median_ns": percentile(self.lateness_errors_ns, 0.5),
            "lateness_error_p90_ns": percentile(self.lateness_errors_ns, 0.9),
            "exact_share": share_of(self.exact, self.ranks),
            "intervals": self.intervals,
            "intervals_held": share_of(self.intervals_held, self.intervals),
            "bounds": self.bounds,
            "bounds_violated": self.bounds_violated,
            "last_asked": self.last_asked,
            "last_right": share_of(self.last_right, self.last_asked),
            "last_untold": self.last_untold,
            "late_precision": share_of(self.late_hits, self.late_hits + self.late_false),
            "late_recall": share_of(self.late_hits, self.late_hits + self.late_missed),
            "verdicts": self.verdicts,
            "verdicts_right": self.verdicts_right,
            "verdict_notes": self.verdict_notes,
            "clock_error_max_ns": max(self.clock_errors_ns, default=None),
            **self.moved.figures(),
        }


def add_scores(scores: Iterable[Score]) -> Score:
    """All of them together."""
    total = Score()
    for score in scores:
        for column in fields(Score):
            setattr(total, column.name, getattr(total, column.name) + getattr(score, column.name))
    return total


def score_files(pairs: Sequence[tuple[str, str]], margin_ns: int, late_ns: int) -> list[Score]:
    """Score each (analysis file, case folder). Raises TruthError, OSError."""
    scores = []
    for file, folder in pairs:
        analysis = read_analysis(file)
        scores.append(score_case(analysis, read_case(folder, analysis), margin_ns, late_ns))
    return scores


def score_case(
    analysis: dict[str, Any], case: Case, margin_ns: int = 1_000_000, late_ns: int = 2_000_000
) -> Score:
    """Score one analysis (parsed JSON). ``margin_ns``: where the last rank is asked for; ``late_ns``: what
    counts as late for precision and recall.
    """
    score = Score(cases=[case.name])
    nodes = members_of_nodes(analysis)
    matches = match_collectives(case.collectives, analysis["collectives"], nodes)
    span = _span(analysis)
    for number, truth in enumerate(case.collectives):
        guess = analysis["collectives"][matches[number]] if number in matches else None
        if truth.warm_up or _is_partial(truth, guess, span):
            score.uncounted += guess is not None
            continue
        score.true += 1
        if guess is not None:
            truth, guess = by_units(truth, guess, nodes)
            score.found += 1
            _score_identity(score, truth, guess, case)
            _score_times(score, truth, guess)
        _score_last(score, truth, guess, margin_ns, case)
        _score_late(score, truth, guess, late_ns, case)
    taken = set(matches.values())
    unmatched = [guess for number, guess in enumerate(analysis["collectives"]) if number not in taken]
    _score_invented(score, case, unmatched)
    score.inferred = score.found + score.invented
    note = check_verdicts(case, analysis["lateness"], nodes)
    score.verdicts = 1
    score.verdicts_right = int(note is None)
    score.verdict_notes = [] if note is None else [f"{case.name}: {note}"]
    score.clock_errors_ns = _clock_errors(case, analysis)
    score.moved = score_transfers(case.transfers, analysis.get("transfers", ()))
    return score


def _score_invented(score: Score, case: Case, unmatched: list[dict[str, Any]]) -> None:
    """Collectives of the analysis that are none of the truth's."""
    lists_transfers = any(truth.op == "send_recv" for truth in case.collectives)
    timed = [truth for truth in case.collectives if not truth.warm_up]
    first_ns = min((truth.start_ns for truth in timed), default=0)
    last_ns = max((truth.end_ns for truth in timed), default=0)
    for guess in unmatched:
        if not guess["complete"] or (guess["op"] == "send_recv" and not lists_transfers):
            score.uncounted += 1
        else:
            score.invented += 1
            middle_ns = (guess["start_ns"] + guess["end_ns"]) // 2
            score.invented_outside += not first_ns <= middle_ns <= last_ns


def members_of_nodes(analysis: dict[str, Any]) -> dict[int, list[int]]:
    """The endpoints of each node; one that is alone on its node has its own number."""
    found: dict[int, list[int]] = {}
    for row in analysis["endpoints"]:
        found.setdefault(row["id"] if row.get("node") is None else row["node"], []).append(row["id"])
    return found


def by_units(
    truth: TrueCollective, guess: dict[str, Any], nodes: Mapping[int, list[int]]
) -> tuple[TrueCollective, dict[str, Any]]:
    """Both with a node as one where ``guess`` names nodes: it enters when the last of its endpoints does."""
    named = [rank["node"] for rank in guess["ranks"] if rank["endpoint"] is None]
    if not named:
        return truth, guess
    unit = {end: nodes[node][0] for node in named for end in nodes[node]}

    def latest(times: Mapping[int, int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for end, time_ns in times.items():
            own = unit.get(end, end)
            found[own] = max(time_ns, found.get(own, time_ns))
        return found

    ranks = [
        rank | {"endpoint": nodes[rank["node"]][0]} if rank["endpoint"] is None else rank
        for rank in guess["ranks"]
    ]
    entered = truth.enter_ns if truth.entered_ns is None else truth.entered_ns
    whole = replace(
        truth,
        enter_ns=latest(truth.enter_ns),
        leave_ns=latest(truth.leave_ns),
        entered_ns=latest({end: entered[end] for end in truth.enter_ns}),
        injected={unit.get(end, end) for end in truth.injected},
        root=None if truth.root is None else unit.get(truth.root, truth.root),
    )
    return whole, guess | {"ranks": ranks}


def match_collectives(
    truths: Sequence[TrueCollective],
    guesses: Sequence[dict[str, Any]],
    nodes: Mapping[int, list[int]] = MappingProxyType({}),
) -> dict[int, int]:
    """Position of the inferred collective for each true one that has one; one to one, best overlap first.

    At least half of the endpoints of the larger side must be common. Overlap: the share of the time that both
    cover together, times the share of endpoints; and how much of each endpoint's own time in the inferred one
    lies in its call of the true one. (A host that comes back late from one call makes that one's span
    cover the next one, too; yet no endpoint is in two at once.) The latter is left out where more find a
    partner by the former alone: calls shorter than a hand-over are over when their first message leaves.
    """
    order = sorted(range(len(guesses)), key=lambda i: (guesses[i]["start_ns"], i))
    starts = [guesses[i]["start_ns"] for i in order]
    longest = max((g["end_ns"] - g["start_ns"] for g in guesses), default=0)
    members = [
        {
            end: _seen(rank)
            for rank in guess["ranks"]
            for end in ([rank["endpoint"]] if rank["endpoint"] is not None else nodes[rank["node"]])
        }
        for guess in guesses
    ]
    pairs: list[tuple[float, float, int, int]] = []
    for number, truth in enumerate(truths):
        own = truth.enter_ns.keys()
        low = bisect_left(starts, truth.start_ns - longest)
        high = bisect_left(starts, truth.end_ns + 1)
        for i in order[low:high]:
            common = len(own & members[i].keys())
            if 2 * common < max(len(own), len(members[i])) or not common:
                continue
            start_ns, end_ns = guesses[i]["start_ns"], guesses[i]["end_ns"]
            both = min(truth.end_ns, end_ns) - max(truth.start_ns, start_ns)
            if both < 0:
                continue
            either = max(truth.end_ns, end_ns) - min(truth.start_ns, start_ns)
            spans = both / max(either, 1) * common / len(own | members[i].keys())
            pairs.append((-spans, -spans - _inside(members[i], truth), number, i))
    by_times = _best_first([(both, number, i) for _, both, number, i in pairs])
    by_spans = _best_first([(spans, number, i) for spans, _, number, i in pairs])
    return by_spans if len(by_spans) > len(by_times) else by_times


def _best_first(pairs: list[tuple[float, int, int]]) -> dict[int, int]:
    """One to one, the least first element of ``pairs`` first: of each second one its third."""
    matches: dict[int, int] = {}
    taken: set[int] = set()
    for _, number, i in sorted(pairs):
        if number not in matches and i not in taken:
            matches[number] = i
            taken.add(i)
    return matches


def _seen(rank: dict[str, Any]) -> tuple[int, int] | None:
    """From when to when a rank is known to have been in an inferred collective, None where it is not."""
    times = [rank["enter_ns"] if rank["bound"] == "exact" else None, rank.get("leave_ns")]
    known = [time for time in times if time is not None]
    return (known[0], max(known)) if known else None


def _inside(seen: dict[int, tuple[int, int] | None], truth: TrueCollective) -> float:
    """The share of endpoints' times in an inferred collective that lies in their calls of the true one."""
    total = 0.0
    for endpoint in seen.keys() & truth.enter_ns.keys():
        times = seen[endpoint]
        if times is not None:
            common = min(times[1], truth.leave_ns[endpoint]) - max(times[0], truth.enter_ns[endpoint])
            length = times[1] - times[0]
            total += max(common, 0) / length if length else float(common >= 0)
    return total / len(seen.keys() | truth.enter_ns.keys())


def _score_identity(score: Score, truth: TrueCollective, guess: dict[str, Any], case: Case) -> None:
    # Gloo puts a reduce_scatter on the wire as an all_reduce: no packet tells them apart.
    as_all_reduce = truth.op == "reduce_scatter" and guess["op"] == "all_reduce" and "gloo" in case.software
    score.op_right += guess["op"] == truth.op or as_all_reduce
    if truth.algorithm is not None:
        names = {guess["algorithm"]} | {n for pair in _SAME if guess["algorithm"] in pair for n in pair}
        alternative = truth.algorithm not in names and truth.algorithm in guess["alternatives"]
        score.algorithm_asked += 1
        score.algorithm_right += truth.algorithm in names or alternative
        score.algorithm_alternative += alternative
    if truth.bytes is not None:
        score.bytes_asked += 1
        score.bytes_right += guess["bytes"] == truth.bytes


def _score_times(score: Score, truth: TrueCollective, guess: dict[str, Any]) -> None:
    entries = {rank["endpoint"]: rank for rank in guess["ranks"]}
    for endpoint, late_ns in truth.lateness_ns.items():
        score.ranks += 1
        entry = entries.get(endpoint)
        if entry is None or entry["lateness_ns"] is None:
            continue
        off_ns = entry["lateness_ns"] - late_ns
        if entry["bound"] == "exact":
            score.exact += 1
            score.enter_errors_ns.append(abs(entry["enter_ns"] - truth.enter_ns[endpoint]))
            score.lateness_errors_ns.append(abs(off_ns))
            if entry.get("error_ns") is not None:
                score.intervals += 1
                score.intervals_held += abs(off_ns) <= entry["error_ns"]
        elif entry["bound"] in ("at_most", "at_least"):
            score.bounds += 1
            beyond_ns = -off_ns if entry["bound"] == "at_most" else off_ns
            score.bounds_violated += beyond_ns > SLACK_NS


def _score_last(
    score: Score, truth: TrueCollective, guess: dict[str, Any] | None, margin_ns: int, case: Case
) -> None:
    ranking = sorted(truth.lateness_ns.items(), key=lambda item: item[1])
    if (
        len(ranking) < 2
        or ranking[-1][1] - ranking[-2][1] < margin_ns
        or not _visible(truth, ranking[-1][0], case)
    ):
        return
    score.last_asked += 1
    told = _told(guess)
    if not told:
        score.last_untold += 1
        return
    score.last_right += max(told, key=lambda endpoint: told[endpoint]) == ranking[-1][0]


def _score_late(
    score: Score, truth: TrueCollective, guess: dict[str, Any] | None, late_ns: int, case: Case
) -> None:
    told = _told(guess)
    for endpoint, true_ns in truth.lateness_ns.items():
        if abs(true_ns - late_ns) <= LEFT_OUT * late_ns or not _visible(truth, endpoint, case):
            continue
        called = told.get(endpoint, 0) >= late_ns
        score.late_hits += called and true_ns > late_ns
        score.late_false += called and true_ns < late_ns
        score.late_missed += not called and true_ns > late_ns


def _told(guess: dict[str, Any] | None) -> dict[int, int]:
    """Lateness that the analysis claims: an upper bound claims none."""
    return {
        rank["endpoint"]: rank["lateness_ns"]
        for rank in (guess["ranks"] if guess else ())
        if rank["bound"] in ("exact", "at_least") and rank["lateness_ns"] is not None
    }


def _visible(truth: TrueCollective, endpoint: int, case: Case) -> bool:
    """Whether packets can show this endpoint's lateness: the root of an Open MPI broadcast keeps nobody
    from sending, so nobody can see that it was late.
    """
    return not (truth.op == "broadcast" and endpoint == truth.root and "openmpi" in case.software)


def _span(analysis: dict[str, Any]) -> tuple[int, int]:
    """What all captures cover together, on the reference clock: beyond it some node was not captured."""
    offsets = {clock["capture"]: clock["offset_ns"] for clock in analysis["clocks"] if not clock["reference"]}
    covered = [
        (capture["first_ns"] - offset, capture["last_ns"] - offset)
        for capture in analysis["captures"]
        if (offset := offsets.get(capture["id"], 0)) is not None and capture["first_ns"] is not None
    ]
    if analysis.get("start_ns") is not None and analysis.get("end_ns") is not None:
        covered.append((analysis["start_ns"], analysis["end_ns"]))
    return max((first for first, _ in covered), default=0), min((last for _, last in covered), default=0)


def _is_partial(truth: TrueCollective, guess: dict[str, Any] | None, span: tuple[int, int]) -> bool:
    """Held only in part: it reaches beyond the captures, and was not found whole all the same."""
    beyond = truth.start_ns < span[0] or truth.end_ns > span[1]
    return beyond and (guess is None or not guess["complete"])


def _clock_errors(case: Case, analysis: dict[str, Any]) -> list[int]:
    """For each tied clock its offset's error, the larger of those at the first and the last packet.

    Against the reference of its island; of references themselves none is asked for.
    """
    leads = {clock.get("island"): clock for clock in reversed(analysis["clocks"]) if clock["reference"]}
    ends = {row["id"]: (row["first_ns"], row["last_ns"]) for row in analysis["captures"]}
    errors = []
    for clock in analysis["clocks"]:
        lead = leads.get(clock.get("island"))
        if lead is None or clock is lead or clock["offset_ns"] is None or ends[lead["capture"]][0] is None:
            continue
        true_offset = case.clock_offsets.get(clock["capture"])
        first = next(iter(leads.values()))
        true_lead = case.clock_offsets.get(lead["capture"], _none if lead is first else None)
        if true_offset is not None and true_lead is not None:
            offset, drift = clock["offset_ns"] - lead["offset_ns"], (clock["drift_ppb"] or 0) * 1e-9
            begin, end = (time_ns - lead["offset_ns"] for time_ns in ends[lead["capture"]])
            errors.append(
                max(
                    abs(round(offset + drift * (t - begin) - (true_offset(t) - true_lead(t))))
                    for t in (begin, end)
                )
            )
    return errors


def _none(_time_ns: int) -> float:
    return 0.0
