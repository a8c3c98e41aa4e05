"""One scenario from traffic to figures: written, analysed, scored."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, Final

import dpuflow
from bench.accuracy.midjob import as_captured, cut, windows, within
from bench.accuracy.partly import in_sight
from bench.accuracy.shown import exact_shown, shown_ns
from dpuflow.reports.json import json_lines
from dpuflow.scoring.score import LEFT_OUT, Score, match_collectives, score_case
from dpuflow.scoring.truth import Case, TrueCollective, place_case
from dpuflow.synth.case import write_case
from dpuflow.synth.observe import epoch_ns
from dpuflow.synth.scenario import Machine
from dpuflow.synth.timing import Timing

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Scenario

CAUSES: Final = {"compute": ("compute",), "host": ("host",)}
NETWORK_CAUSES: Final = {"loss": "network", "slow_link": "network", "slow_receiver": "receiver"}
TROUBLES_TOLD: Final = (
    "slow_link", "packet_loss", "congestion", "credit_starvation", "kv_transfer_bottleneck",
)  # fmt: skip
"""Findings that speak of the network or of credits."""
MATERIAL: Final = 0.01
SIGMAS: Final = 3.0
"""What is late now and then must stand out from what ranks differ by anyway (docs/theory/verdicts.md)."""
SUMS: Final = ("op_alike", "bytes_held", "bytes_asked", "bytes_right", "protocol_asked", "protocol_right",
"bounds", "violated", "causes",
               "causes_right", "packets", "late", "late_shown", "late_told", "dated", "dated_exact",
               "unasked", "troubled", "trouble_told")  # fmt: skip


@dataclass
class Measured:
    """Figures of one scenario, or of several together."""

    name: str
    score: Score = field(default_factory=Score)
    op_alike: int = 0  # found ones whose operation is right, or named as one with the same packets
    bytes_held: int = 0  # whose bytes are right, or within what is said to be open
    bytes_asked: int = 0  # of those whose bytes the packets tell (``_open``)
    bytes_right: int = 0
    protocol_asked: int = 0
    protocol_right: int = 0
    errors_ns: list[int] = field(default_factory=list)  # of exact lateness
    bounds: int = 0
    violated: int = 0  # beyond the slack of this profile
    causes: int = 0
    causes_right: int = 0
    clock_ns: list[int] = field(default_factory=list)
    packets: int = 0
    late: int = 0  # ranks that were late by what counts
    late_shown: int = 0  # of these: the packets prove it (``shown``)
    late_told: int = 0  # of these again: it is said
    dated: int = 0  # ranks of collectives in which the packets date every entry
    dated_exact: int = 0  # of these: given as exact
    unasked: int = 0  # scenarios whose fault of ranks the packets do not show
    troubled: int = 0  # scenarios with a fault of the network or of credits
    trouble_told: int = 0  # of these: a finding says something of that kind
    estimated: bool = False  # whether the clocks differed
    begins: str = "whole"  # or how its captures begin in mid-job (``midjob.KINDS``)
    pairs: list[tuple[int, int | None]] = field(default_factory=list)  # true and told lateness of all ranks
    """The told one is None where it is no exact value."""
    told: list[tuple[int, int | None, int]] = field(default_factory=list)
    """The same of exact values and lower bounds, with what the packets prove."""

    def add(self, other: Measured) -> None:
        """Take in another's figures."""
        from dpuflow.scoring.score import add_scores

        self.score = add_scores([self.score, other.score])
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors_ns += other.errors_ns
        self.clock_ns += other.clock_ns
        self.pairs += other.pairs
        self.told += other.told


def measure(scenario: Scenario, mid_job: int | None = None) -> Measured:
    """Write, analyse and score ``scenario``. Late means a third of what its fault puts in, at least 10 us.

    ``mid_job``: number of the window that its captures are cut to, None where they are whole.
    """
    with tempfile.TemporaryDirectory() as folder:
        captures = write_case(scenario, folder)
        truth, meta = (json.loads((Path(folder) / f"{name}.json").read_text()) for name in ("truth", "meta"))
        begins, part = "whole", truth
        if mid_job is not None:
            begins, spans = windows(mid_job, truth, scenario.cluster.nodes)
            cut(Path(folder), captures, epoch_ns(scenario), spans)
            part = within(truth, spans)
        files = sorted(str(Path(folder) / capture.name) for capture in captures)
        result = dpuflow.analyze([dpuflow.Vantage(Path(file).stem, (file,)) for file in files])
        analysis = json.loads("\n".join(json_lines(result)))
    packets = sum(capture.packets for capture in captures)
    measured = judge(scenario, truth, meta, analysis, packets, part)
    measured.begins = begins
    return measured


def judge(
    scenario: Scenario,
    truth: dict[str, Any],
    meta: dict[str, Any],
    analysis: dict[str, Any],
    packets: int,
    part: dict[str, Any] | None = None,
) -> Measured:
    """Score the ``analysis`` of a scenario, given the contents of truth.json and meta.json.

    ``part``: the truth of what the captures hold whole; None: all of it.
    """
    truth = in_sight(scenario, truth)
    whole = place_case(truth, meta, analysis, scenario.name)
    case = whole if part is None else place_case(part, meta, analysis, scenario.name)
    asked = bool(case.collectives) and as_captured(case, len(whole.collectives))
    whole.compute_fault = case.compute_fault
    for each in (whole, case):
        _leave_out_hidden(each)
    injected_ns = max((getattr(fault, "us", 0.0) * 1e3 for fault in scenario.faults), default=0.0)
    late_ns = round(max(10_000.0, injected_ns / 3))
    # Of all of the truth: what was found of what is cut off is not invented.
    measured = Measured(scenario.name, score_case(analysis, whole, late_ns, late_ns))
    measured.packets = packets
    measured.estimated = scenario.observation.clocks.offset_us > 0
    measured.clock_ns = list(measured.score.clock_errors_ns)
    rows = (truth if part is None else part)["collectives"]
    _collectives(measured, scenario, analysis, case, [row["protocol"] for row in rows])
    # What a hand-over takes is no holding up.
    slack_ns = 2 * Timing.of(scenario.machine).handover_ns
    _shown(measured, case, analysis, late_ns, slack_ns)
    measured.troubled = int(case.network_fault)
    conditions = {finding["condition"] for finding in analysis["findings"]}
    measured.trouble_told = int(case.network_fault and not conditions.isdisjoint(TROUBLES_TOLD))
    if asked and shows(scenario, case, slack_ns):
        _cause(measured, scenario, truth, analysis, case)
    else:
        measured.unasked = 1
        measured.score.verdicts = measured.score.verdicts_right = 0
        measured.score.verdict_notes = []
    return measured


def handover_spread_ns(profile: str) -> float:
    """Median distance of two hand-overs of a noise profile, by the quantiles of its distribution."""
    timing = Timing.of(Machine(profile=profile))
    normal = NormalDist()
    draws = [timing.handover_ns * exp(timing.spread * normal.inv_cdf((i + 0.5) / 400)) for i in range(400)]
    return median(abs(one - other) for one in draws for other in draws)


def _leave_out_hidden(case: Case) -> None:
    """Take ranks out of whose adapter no packet was seen: only NVLink or other nodes know of them."""
    for collective in case.collectives:
        for key in [key for key in collective.enter_ns if key < 0]:
            if len(collective.enter_ns) > 1:
                del collective.enter_ns[key], collective.leave_ns[key]


def shows(scenario: Scenario, case: Case, slack_ns: float) -> bool:
    """Whether a fault of ranks can be asked for: the packets show it, and it is what verdicts speak of.

    The guilty one is on the wire, and is late by more than NVLink hides; what packets prove of its lateness
    costs what counts, 1 % of the time and as much more as scoring leaves out; and what comes now and then
    stands out from what ranks differ by anyway (docs/theory/verdicts.md).
    """
    fault = case.compute_fault
    if fault is None:
        return True
    if "ms" not in fault:  # several faults at once (``sweep``)
        return False
    injected_ns = fault["ms"] * 1e6
    rank = fault.get("rank")
    only = scenario.observation.only
    if only is not None and (rank is None or rank // scenario.cluster.gpus_per_node not in only):
        return False  # who has no capture is seen in part, and of many ranks some are not seen at all
    hidden = rank is not None and case.endpoint_of_rank[rank] < 0
    if hidden or (rank is not None and injected_ns < _unseen_ns(scenario, case, rank)):
        return False
    if fault["kind"] != "persistent" and injected_ns < SIGMAS * 2**0.5 * scenario.job.jitter_us * 1e3:
        return False
    put_in = 0.0
    for collective in case.collectives:
        late = shown_ns(collective, slack_ns) if collective.injected else {}
        put_in += sum(min(injected_ns, late.get(end, 0)) for end in collective.injected)
    begin = min(collective.start_ns for collective in case.collectives)
    end = max(collective.end_ns for collective in case.collectives)
    return put_in >= (1 + LEFT_OUT) * MATERIAL * (end - begin)


def _unseen_ns(scenario: Scenario, case: Case, rank: int) -> float:
    """How far the GPUs of a rank's node usually leave apart: when each did is not on the wire, only
    NVLink."""
    gpus = scenario.cluster.gpus_per_node
    node = {case.endpoint_of_rank.get(rank // gpus * gpus + gpu, -1) for gpu in range(gpus)}
    left = [[ns for end, ns in each.leave_ns.items() if end in node] for each in case.collectives]
    spreads = sorted(max(times) - min(times) for times in left if len(times) > 1)
    return float(spreads[len(spreads) // 2]) if spreads else 0.0


def _shown(measured: Measured, case: Case, analysis: dict[str, Any], late_ns: int, slack_ns: float) -> None:
    """Count what the packets prove, and what of it is said."""
    matches = match_collectives(case.collectives, analysis["collectives"])
    for number, true in enumerate(case.collectives):
        guess = analysis["collectives"][matches[number]] if number in matches else {"ranks": []}
        rows = {row["endpoint"]: row for row in guess["ranks"]}
        exact = {end for end, row in rows.items() if row["bound"] == "exact"}
        told = {end: row["lateness_ns"] for end, row in rows.items() if row["bound"] in ("exact", "at_least")}
        proved = shown_ns(true, slack_ns)
        if exact_shown(true, slack_ns):
            measured.dated += len(true.enter_ns)
            measured.dated_exact += len(exact & true.enter_ns.keys())
        for end, late in true.lateness_ns.items():
            measured.told.append((late, told.get(end), proved[end]))
            if late > (1 + LEFT_OUT) * late_ns:
                measured.late += 1
                if proved[end] > late_ns:
                    measured.late_shown += 1
                    measured.late_told += told.get(end, 0) >= late_ns


def _open(true: TrueCollective, protocol: str | None) -> bool:
    """Whether other byte counts have the very same packets.

    LL rounds each chunk up to lines of 8 bytes, LL128 to 1920; two ranks' all_gather and reduce_scatter of
    half the bytes look alike.
    """
    alike = true.op in ("all_gather", "reduce_scatter") and len(true.enter_ns) == 2
    return protocol in ("ll", "ll128") or alike


def _collectives(
    measured: Measured, scenario: Scenario, analysis: dict[str, Any], case: Case, protocols: list[str | None]
) -> None:
    # A bound is violated when the truth lies beyond it by more than hand-over and clocks may hide.
    slack_ns = 3 * Timing.of(scenario.machine).handover_ns + 2 * scenario.cluster.latency_us * 1e3
    matches = match_collectives(case.collectives, analysis["collectives"])
    for number, at in matches.items():
        true, guess = case.collectives[number], analysis["collectives"][at]
        measured.op_alike += true.op in (guess["op"], *guess["op_alternatives"])
        if not _open(true, protocols[number]):
            measured.bytes_asked += 1
            measured.bytes_right += guess["bytes"] == true.bytes
        between = guess["bytes_between"] or (guess["bytes"], guess["bytes"])
        held = between[0] is not None and between[0] <= (true.bytes or 0) <= between[1]
        measured.bytes_held += held or true.bytes is None  # experts: each rank puts another number of tokens
        if guess.get("protocol") is not None:
            measured.protocol_asked += 1
            measured.protocol_right += str(guess["protocol"]).lower() == protocols[number]
        exact = {r["endpoint"]: r["lateness_ns"] for r in guess["ranks"] if r["bound"] == "exact"}
        if true.op != "send_recv":
            measured.pairs += [(late, exact.get(endpoint)) for endpoint, late in true.lateness_ns.items()]
        for rank in guess["ranks"]:
            late_ns = true.lateness_ns.get(rank["endpoint"])
            if late_ns is None or rank["lateness_ns"] is None:
                continue
            off_ns = rank["lateness_ns"] - late_ns
            if rank["bound"] == "exact":
                measured.errors_ns.append(abs(off_ns))
            elif rank["bound"] in ("at_most", "at_least"):
                measured.bounds += 1
                measured.violated += (-off_ns if rank["bound"] == "at_most" else off_ns) > slack_ns


def _cause(
    measured: Measured, scenario: Scenario, truth: dict[str, Any], analysis: dict[str, Any], case: Case
) -> None:
    """Of persistent faults: is the guilty endpoint's cause right, and nobody blamed for the network?"""
    compute, network = case.compute_fault, [f for f in scenario.faults if not hasattr(f, "mode")]
    rows = {row["endpoint"]: row for row in analysis["lateness"]}
    if compute is not None and compute["kind"] == "persistent":
        row = rows.get(case.endpoint_of_rank[compute["rank"]])
        # Who receives nothing over the network has no ready-to-receive that could come late.
        fed = any(compute["rank"] in collective.get("fed", ()) for collective in truth["collectives"])
        # A GPU that is late with its data beside credits that are late as well looks as a late host does.
        starved = any(getattr(fault, "rank", None) == compute["rank"] for fault in network)
        right = CAUSES[compute["cause"]] if fed and not starved else ("compute", "host")
        measured.causes += 1
        others = {key for key, each in rows.items() if _blamed(each) and each is not row}
        measured.causes_right += row is not None and row["cause"] in right and not (network and others)
    elif network:
        late = {end for collective in case.collectives for end in collective.injected}
        measured.causes += 1
        measured.causes_right += all(key in late for key, row in rows.items() if _blamed(row))


def _blamed(row: dict[str, Any]) -> bool:
    """Whether a row of ``lateness`` blames its endpoint."""
    return row["verdict"] in ("late", "intermittent") and row["cause"] in ("compute", "host")
