"""One analysis of a twin against the truth: what it said, whether that is right, and its figures.

Wrong is what a user would act on wrongly; what is not told is not wrong. By order:

``accused``  an endpoint that nobody made late, and that was not late by itself either, is called late or
             intermittent by its own doing (cause compute, host or receiver);
``unasked``  the lateness put in is too little to be asked for, or there are no collectives;
``cleared``  somebody was late throughout, is not named, and is called on time or the report begins with
             NOBODY WAS LATE; of lateness now and then the same of all who were;
``right``    all that were late throughout are named, or some of those that were late now and then, as late
             by their own doing, or, where the twin has no capture of their node, as having come late; of a
             fault of the network or a receiver a finding speaks; nobody was late and somebody is on time;
``untold``   none of these;
``failed``   the analysis ended with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from dpuflow.scoring.score import by_units, match_collectives, members_of_nodes, score_case

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.robustness.truth import Truth
    from dpuflow.scoring.truth import Case

Verdict = Literal["right", "untold", "unasked", "cleared", "accused", "failed"]

OWN_DOING: Final = ("compute", "host", "receiver")
NAMED: Final = ("late", "intermittent")
ALL_CLEAR: Final = "NOBODY WAS LATE"
CAME_LATE: Final = "CAME LATE"
"""In a headline that names who may have kept the job, without saying whose doing it was."""
TROUBLES: Final = ("slow_link", "packet_loss", "congestion", "credit_starvation", "kv_transfer_bottleneck")
"""Findings that speak of the network or of credits."""
RARELY: Final = 0.1
OFTEN: Final = 0.5
"""Shares of its collectives between which a rank is late now and then."""


@dataclass
class Outcome:
    """What became of one twin; kept in the JSON file as it is."""

    case: str
    twin: str
    fault: str = ""
    verdict: Verdict = "failed"
    said: str = ""
    """The first line of the report."""
    rows: list[str] = field(default_factory=list)
    """Every endpoint that is not on time: verdict and cause."""
    true: int = 0
    found: int = 0
    invented: int = 0
    op_right: int = 0
    last_asked: int = 0
    last_right: int = 0
    bounds: int = 0
    violated: int = 0
    exact: int = 0
    held: int = 0
    """Of the exact ones those whose stated error holds."""
    sometimes: int = 0
    """Ranks late in 10 to 50 % of their collectives by more than five times the scatter."""
    sometimes_cleared: int = 0
    sure: list[tuple[float, bool]] = field(default_factory=list)
    """Confidence of each verdict that carries one, and whether the verdict is right."""
    unexplained: float | None = None
    """Share of the time of all steps that the account does not explain; None without an account."""
    cpu_s: float = 0.0


def judge(outcome: Outcome, analysis: dict[str, Any], case: Case, truth: Truth, slack_ns: float) -> Outcome:
    """Fill in ``outcome``; ``case`` holds what the twin can show, ``truth`` is the whole case's."""
    rows = [(row, _members(row, analysis)) for row in analysis["lateness"]]
    conditions = {finding["condition"] for finding in analysis["findings"]}
    outcome.fault = truth.fault
    outcome.rows = [
        f"{' '.join(map(str, sorted(ends)))}: {row['verdict']}, {row['cause']}"
        for row, ends in rows
        if row["verdict"] != "on_time"
    ]
    outcome.verdict = _verdict(rows, truth, outcome.said, not conditions.isdisjoint(TROUBLES))
    on_time = {end for row, ends in rows if row["verdict"] == "on_time" for end in ends}
    sometimes = {end for end, share in truth.often.items() if RARELY <= share <= OFTEN}
    outcome.sometimes, outcome.sometimes_cleared = len(sometimes), len(sometimes & on_time)
    outcome.sure = _sure(rows, analysis, truth)
    outcome.unexplained = _unexplained(analysis["accounts"])
    _figures(outcome, analysis, case, truth, slack_ns)
    return outcome


def _unexplained(accounts: Sequence[dict[str, Any]]) -> float | None:
    """Over all jobs of a capture, by their time."""
    time_ns = [each["steps"] * each["step_ns"] for each in accounts]
    shares = [each["unexplained_share"] * ns for each, ns in zip(accounts, time_ns, strict=True)]
    return float(sum(shares) / sum(time_ns)) if any(time_ns) else None


def _members(row: dict[str, Any], analysis: dict[str, Any]) -> frozenset[int]:
    """The endpoints that a row of ``lateness`` speaks of: one, or all of a node."""
    if row["endpoint"] is not None:
        return frozenset([row["endpoint"]])
    node = row.get("node")
    return frozenset(end["id"] for end in analysis["endpoints"] if node in (end.get("node"), end["id"]))


def _verdict(
    rows: list[tuple[dict[str, Any], frozenset[int]]], truth: Truth, said: str, trouble_told: bool
) -> Verdict:
    blamed = [ends for row, ends in rows if row["verdict"] in NAMED and row["cause"] in OWN_DOING]
    late = truth.made_late
    # What a network in trouble does to hosts is no doing of theirs.
    guilty = late if truth.fault == "network" else late | truth.late_by_itself
    if any(ends.isdisjoint(guilty) for ends in blamed):
        return "accused"
    if not truth.asked:
        return "unasked"
    on_time = {end for row, ends in rows if row["verdict"] == "on_time" for end in ends}
    all_clear = said.startswith(ALL_CLEAR)
    named = {end for ends in blamed for end in ends} & late
    if CAME_LATE in said:  # nobody can say more of who was not captured: its peers or a link may have kept it
        named |= {e for row, ends in rows if row["verdict"] in NAMED for e in ends} & late & truth.unwatched
    if truth.fault == "nobody":
        return "right" if on_time else "untold"
    if truth.fault in ("network", "receiver"):
        return "right" if trouble_told or blamed else "untold"
    if truth.fault == "throughout":
        if named == late:
            return "right"
        cleared = all_clear or bool((late - named) & on_time)
    else:
        if named:
            return "right"
        cleared = all_clear or late <= on_time
    return "cleared" if cleared else "untold"


def _sure(
    rows: list[tuple[dict[str, Any], frozenset[int]]], analysis: dict[str, Any], truth: Truth
) -> list[tuple[float, bool]]:
    """Verdicts with their confidence; where rows carry none, findings of stragglers with theirs."""
    guilty = truth.made_late | truth.late_by_itself
    found = []
    for row, ends in rows:
        if row.get("confidence") is None:
            continue
        if row["verdict"] in NAMED and row["cause"] in OWN_DOING:
            found.append((float(row["confidence"]), not ends.isdisjoint(guilty)))
        elif row["verdict"] == "on_time" and (truth.asked or ends.isdisjoint(truth.made_late)):
            found.append((float(row["confidence"]), ends.isdisjoint(truth.made_late)))
    if found:
        return found
    return [
        (float(finding["confidence"]), not guilty.isdisjoint(finding["endpoints"]))
        for finding in analysis["findings"]
        if finding["condition"] == "straggler"
    ]


def _figures(outcome: Outcome, analysis: dict[str, Any], case: Case, truth: Truth, slack_ns: float) -> None:
    score = score_case(analysis, case, truth.late_ns, truth.late_ns)
    outcome.true, outcome.found, outcome.invented = score.true, score.found, score.invented
    outcome.last_asked, outcome.last_right = score.last_asked, score.last_right
    outcome.exact, outcome.held = score.intervals, score.intervals_held
    nodes = members_of_nodes(analysis)
    for number, at in match_collectives(case.collectives, analysis["collectives"], nodes).items():
        true, guess = by_units(case.collectives[number], analysis["collectives"][at], nodes)
        if true.warm_up:
            continue
        as_all_reduce = (
            true.op == "reduce_scatter" and guess["op"] == "all_reduce" and "gloo" in case.software
        )
        outcome.op_right += true.op in (guess["op"], *guess["op_alternatives"]) or as_all_reduce
        for row in guess["ranks"]:
            late_ns = true.lateness_ns.get(row["endpoint"])
            if (
                late_ns is not None
                and row["lateness_ns"] is not None
                and row["bound"] in ("at_most", "at_least")
            ):
                off_ns = row["lateness_ns"] - late_ns
                outcome.bounds += 1
                outcome.violated += (-off_ns if row["bound"] == "at_most" else off_ns) > slack_ns
    outcome.op_right = min(outcome.op_right, outcome.found)
