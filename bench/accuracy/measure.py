"""One scenario from traffic to figures: written, analysed, scored."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import dpuflow
from dpuflow.reports.json import json_lines
from dpuflow.scoring.score import Score, match_collectives, score_case
from dpuflow.scoring.truth import Case, place_case
from dpuflow.synth.case import write_case
from dpuflow.synth.timing import Timing

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Scenario

CAUSES: Final = {"compute": ("compute",), "host": ("host",)}
NETWORK_CAUSES: Final = {"loss": "network", "slow_link": "network", "slow_receiver": "receiver"}
MATERIAL: Final = 0.01
SUMS: Final = ("op_alike", "bytes_held", "protocol_asked", "protocol_right", "bounds", "violated", "causes",
               "causes_right", "packets")  # fmt: skip


@dataclass
class Measured:
    """Figures of one scenario, or of several together."""

    name: str
    score: Score = field(default_factory=Score)
    op_alike: int = 0  # found ones whose operation is right, or named as one with the same packets
    bytes_held: int = 0  # whose bytes are right, or within what is said to be open
    protocol_asked: int = 0
    protocol_right: int = 0
    errors_ns: list[int] = field(default_factory=list)  # of exact lateness
    bounds: int = 0
    violated: int = 0  # beyond the slack of this profile
    causes: int = 0
    causes_right: int = 0
    clock_ns: list[int] = field(default_factory=list)
    packets: int = 0
    estimated: bool = False  # whether the clocks differed
    pairs: list[tuple[int, int | None]] = field(default_factory=list)  # true and told lateness of all ranks
    """The told one is None where it is no exact value."""

    def add(self, other: Measured) -> None:
        """Take in another's figures."""
        from dpuflow.scoring.score import add_scores

        self.score = add_scores([self.score, other.score])
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors_ns += other.errors_ns
        self.clock_ns += other.clock_ns
        self.pairs += other.pairs


def measure(scenario: Scenario) -> Measured:
    """Write, analyse and score ``scenario``. Late means a third of what its fault puts in, at least 10 us."""
    with tempfile.TemporaryDirectory() as folder:
        captures = write_case(scenario, folder)
        files = sorted(str(Path(folder) / capture.name) for capture in captures)
        result = dpuflow.analyze([dpuflow.Vantage(Path(file).stem, (file,)) for file in files])
        analysis = json.loads("\n".join(json_lines(result)))
        truth, meta = (json.loads((Path(folder) / f"{name}.json").read_text()) for name in ("truth", "meta"))
    case = place_case(truth, meta, analysis, scenario.name)
    _leave_out_hidden(case)
    injected_ns = max((getattr(fault, "us", 0.0) * 1e3 for fault in scenario.faults), default=0.0)
    late_ns = round(max(10_000.0, injected_ns / 3))
    measured = Measured(scenario.name, score_case(analysis, case, late_ns, late_ns))
    measured.packets = sum(capture.packets for capture in captures)
    measured.estimated = scenario.observation.clocks.offset_us > 0
    measured.clock_ns = list(measured.score.clock_errors_ns)
    _collectives(measured, scenario, analysis, case, [row["protocol"] for row in truth["collectives"]])
    if _shows(truth, case):
        _cause(measured, scenario, analysis, case)
    else:
        measured.score.verdicts = measured.score.verdicts_right = 0
        measured.score.verdict_notes = []
    return measured


def _leave_out_hidden(case: Case) -> None:
    """Take ranks out whose adapter carried nothing: only NVLink knows of them (all nodes are captured)."""
    for collective in case.collectives:
        for key in [key for key in collective.enter_ns if key < 0]:
            if len(collective.enter_ns) > 1:
                del collective.enter_ns[key], collective.leave_ns[key]


def _shows(truth: dict[str, Any], case: Case) -> bool:
    """Whether a fault of ranks can be asked for: the guilty one is on the wire, and it costs what counts.

    A verdict takes 1 % of the time (docs/inference.md).
    """
    fault = case.compute_fault
    if fault is None:
        return True
    if fault.get("rank") is not None and case.endpoint_of_rank[fault["rank"]] < 0:
        return False
    rows = truth["collectives"]
    put_in = sum(sum(ns or 0 for ns in row["injected_ns"]) for row in rows)
    begin = min(ns for row in rows for ns in row["enter_ns"] if ns is not None)
    end = max(ns for row in rows for ns in row["leave_ns"] if ns is not None)
    return bool(put_in >= MATERIAL * (end - begin))


def _collectives(
    measured: Measured, scenario: Scenario, analysis: dict[str, Any], case: Case, protocols: list[str | None]
) -> None:
    # A bound is violated when the truth lies beyond it by more than hand-over and clocks may hide.
    slack_ns = 3 * Timing.of(scenario.machine).handover_ns + 2 * scenario.cluster.latency_us * 1e3
    matches = match_collectives(case.collectives, analysis["collectives"])
    for number, at in matches.items():
        true, guess = case.collectives[number], analysis["collectives"][at]
        measured.op_alike += true.op in (guess["op"], *guess["op_alternatives"])
        between = guess["bytes_between"] or (guess["bytes"], guess["bytes"])
        measured.bytes_held += between[0] is not None and between[0] <= (true.bytes or 0) <= between[1]
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


def _cause(measured: Measured, scenario: Scenario, analysis: dict[str, Any], case: Case) -> None:
    """Of persistent faults: is the guilty endpoint's cause right, and nobody blamed for the network?"""
    compute, network = case.compute_fault, [f for f in scenario.faults if not hasattr(f, "mode")]
    rows = {row["endpoint"]: row for row in analysis["lateness"]}
    if compute is not None and compute["kind"] == "persistent":
        row = rows.get(case.endpoint_of_rank[compute["rank"]])
        measured.causes += 1
        measured.causes_right += row is not None and row["cause"] in CAUSES[compute["cause"]]
    elif network:
        blamed = [r for r in rows.values() if r["verdict"] in ("late", "intermittent")]
        measured.causes += 1
        measured.causes_right += not any(row["cause"] in ("compute", "host") for row in blamed)
