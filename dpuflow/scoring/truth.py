"""What is known to have happened: a case's truth.json and meta.json, placed on the clock of an analysis.

In: a case folder (docs/scoring.md describes the files) and the JSON of an analysis. Out: a ``Case``:
true collectives by endpoint of the analysis, in its reference clock, and the true clock offsets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from dpuflow.errors import TruthError
from dpuflow.identity.rankmap import canonical_address
from dpuflow.schema.rows import ANALYSIS_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WARM_UP = -1


@dataclass(slots=True)
class TrueCollective:
    """One collective as it happened. Keys of ``enter_ns`` and ``leave_ns`` are endpoint ids.

    Ranks that share an endpoint count as the latest of them. A rank whose address the analysis does
    not list has the key ``-1 - rank``: it took part, and no inferred endpoint is it.
    """

    op: str
    bytes: int | None
    algorithm: str | None
    warm_up: bool
    iteration: int
    enter_ns: dict[int, int]
    leave_ns: dict[int, int]
    injected: set[int]  # endpoints that were delayed on purpose
    root: int | None
    held_ns: dict[int, int] | None = None
    """How long something else than the endpoint held up its first message; without those that sent none.
    None: the truth does not say."""
    entered_ns: dict[int, int] | None = None
    """``enter_ns`` on one clock, where that of the analysis is several."""

    @property
    def start_ns(self) -> int:
        """When the first of them entered."""
        return min(self.enter_ns.values())

    @property
    def end_ns(self) -> int:
        """When the last of them left."""
        return max(self.leave_ns.values())

    @property
    def lateness_ns(self) -> dict[int, int]:
        """Each endpoint's entering after the first one's."""
        entered = self.enter_ns
        if self.entered_ns is not None:
            entered = {endpoint: self.entered_ns[endpoint] for endpoint in self.enter_ns}
        first = min(entered.values())
        return {endpoint: enter - first for endpoint, enter in entered.items()}


@dataclass(slots=True)
class TrueTransfer:
    """One bulk transfer as it happened; ``wait_ns`` None where its receiver had not waited for it."""

    src: int
    dst: int
    verb: str
    start_ns: int
    end_ns: int
    bytes: int
    page_bytes: int | None
    wait_ns: int | None


@dataclass(slots=True)
class Case:
    """A case on the reference clock of one analysis."""

    name: str
    software: str
    collectives: list[TrueCollective]
    endpoint_of_rank: dict[int, int]
    compute_fault: dict[str, Any] | None
    network_fault: bool
    transfers: list[TrueTransfer] = field(default_factory=list)
    clock_offsets: dict[int, Callable[[int], float]] = field(default_factory=dict)
    """For a capture id: its clock minus the reference clock at a time on the reference clock."""


def read_analysis(file: str) -> dict[str, Any]:
    """The JSON of ``dpuflow analyze --json``. Raises TruthError, OSError."""
    analysis = _read(Path(file))
    if analysis.get("schema") != ANALYSIS_ID:
        raise TruthError(f"{file}: not a result of dpuflow analyze: schema is {analysis.get('schema')!r}")
    return analysis


def read_case(folder: str, analysis: dict[str, Any]) -> Case:
    """Read truth.json and meta.json of ``folder``. Raises TruthError with file and key, OSError."""
    truth, meta = _read(Path(folder) / "truth.json"), _read(Path(folder) / "meta.json")
    return place_case(truth, meta, analysis, folder)


def place_case(truth: dict[str, Any], meta: dict[str, Any], analysis: dict[str, Any], where: str) -> Case:
    """The case in terms of ``analysis``; ``where`` names it in errors. Raises TruthError."""
    try:
        return _placed(truth, meta, analysis, where)
    except KeyError as error:
        raise TruthError(f"{where}: truth.json or meta.json lacks {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise TruthError(f"{where}: truth.json or meta.json is not in the known form ({error})") from None


def _placed(truth: dict[str, Any], meta: dict[str, Any], analysis: dict[str, Any], where: str) -> Case:
    ranks = _endpoints_of_ranks(meta, analysis)
    clocks = _true_clocks(meta, analysis)
    reference = _reference(analysis)
    unknown = bool(meta.get("clocks")) and reference not in clocks
    on_switch = _lab_times(truth) if unknown else None
    if unknown and on_switch is None:
        raise TruthError(f"{where}/meta.json: no clock for the reference capture of the analysis")
    own = clocks.get(reference)
    places = _Places(ranks, own, {} if on_switch else _lines_of_ranks(meta, analysis, clocks))
    # perftest has no collectives
    rows = truth["collectives"] if "case" not in truth else truth.get("collectives", [])
    times = on_switch or [(row["enter_ns"], row["leave_ns"]) for row in rows]
    collectives = [_collective(row, *each, places, meta) for row, each in zip(rows, times, strict=True)]
    fault = meta.get("fault") or {}
    return Case(
        name=str(meta.get("case", where)),
        software=_software(meta.get("software")),
        collectives=sorted(collectives, key=lambda c: c.start_ns),
        endpoint_of_rank=ranks,
        compute_fault=fault.get("compute"),
        network_fault=bool(fault.get("network")),
        transfers=[] if on_switch else [_transfer(row, ranks, own) for row in truth.get("transfers", ())],
        clock_offsets={} if on_switch else _offsets(clocks, reference, analysis),
    )


def _software(told: str | dict[str, Any] | None) -> str:
    """What a case was made with."""
    return told if isinstance(told, str) else str((told or {}).get("stack") or "")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TruthError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TruthError(f"{path}: not a JSON object")
    return value


def _endpoints_of_ranks(meta: dict[str, Any], analysis: dict[str, Any]) -> dict[int, int]:
    by_address = {
        canonical_address(address): row["id"]
        for row in analysis["endpoints"]
        for address in (row["address"], *row["addresses"])
    }
    ranks = {}
    for node in meta["nodes"]:
        addresses = [canonical_address(a) for a in (node.get("ips") or [node["ip"]])]
        found = [by_address[a] for a in addresses if a in by_address]
        ranks[node["rank"]] = found[0] if found else -1 - node["rank"]
    return ranks


class _Places(NamedTuple):
    """Where ranks and times of the truth are in an analysis."""

    ranks: dict[int, int]
    own: Callable[[int], float] | None
    lines: Mapping[int, Callable[[int], float]]
    """Of ranks on other islands than the first."""

    def placed(self, times: list[int | None]) -> dict[int, int]:
        """The latest time of each endpoint's ranks."""
        latest: dict[int, int] = {}
        for rank, time_ns in enumerate(times):
            if time_ns is not None:
                line = self.lines.get(rank, self.own)
                moved = time_ns if line is None else time_ns + round(line(time_ns))
                end = self.ranks[rank]
                latest[end] = max(moved, latest.get(end, moved))
        return latest


def _collective(
    row: dict[str, Any],
    enter: list[int | None],
    leave: list[int | None],
    places: _Places,
    meta: dict[str, Any],
) -> TrueCollective:
    ranks = places.ranks
    enter_ns, leave_ns = places.placed(enter), places.placed(leave)
    if not enter_ns or enter_ns.keys() != leave_ns.keys():
        raise TruthError(
            f"{meta.get('case')}: collective {row.get('seq')} has no times, or enter without leave"
        )
    held: dict[int, int] = {}
    for rank, time_ns in enumerate(row.get("held_ns") or []):
        if time_ns is not None:
            held[ranks[rank]] = max(time_ns, held.get(ranks[rank], 0))
    root = row.get("root", 0 if row["op"] in ("broadcast", "reduce", "gather", "scatter") else None)
    return TrueCollective(
        op=row["op"],
        bytes=row["bytes"],
        algorithm=_algorithm(row.get("algorithm") or meta.get("algorithm")),
        warm_up=row["iter"] == WARM_UP,
        iteration=row["iter"],
        enter_ns=enter_ns,
        leave_ns=leave_ns,
        injected={ranks[rank] for rank, ns in enumerate(row.get("injected_ns") or []) if ns},
        root=None if root is None else ranks[root],
        held_ns=held or None,
        entered_ns=places._replace(lines={}).placed(enter) if places.lines else None,
    )


def _algorithm(name: str | None) -> str | None:
    """Grouped sends are no algorithm that could be asked for."""
    return None if name == "p2p" else name


def _transfer(row: dict[str, Any], ranks: dict[int, int], own: Callable[[int], float] | None) -> TrueTransfer:
    start_ns, end_ns = (
        row[key] if own is None else row[key] + round(own(row[key])) for key in ("start_ns", "end_ns")
    )
    return TrueTransfer(
        src=ranks[row["from"]],
        dst=ranks[row["to"]],
        verb=row["op"],
        start_ns=start_ns,
        end_ns=end_ns,
        bytes=row["bytes"],
        page_bytes=row.get("page_bytes"),
        wait_ns=row.get("wait_before_first_token_ns"),
    )


def _reference(analysis: dict[str, Any]) -> int:
    for clock in analysis["clocks"]:
        if clock["reference"]:
            return int(clock["capture"])
    return int(analysis["captures"][0]["id"])


def _lines_of_ranks(
    meta: dict[str, Any], analysis: dict[str, Any], clocks: Mapping[int, Callable[[int], float]]
) -> dict[int, Callable[[int], float]]:
    """For each rank whose capture is on another island than the first: that island's time line minus the
    truth's clock, at a time on the truth's."""
    rows = {row["capture"]: row for row in analysis["clocks"]}
    references = [row for row in analysis["clocks"] if row["reference"]]
    first = references[0].get("island") if references else None
    leads = {row.get("island"): row for row in reversed(references) if row["capture"] in clocks}
    holds = {
        _stem(file): row["id"] for row in analysis["captures"] for file in row.get("files", [row["file"]])
    }
    found: dict[int, Callable[[int], float]] = {}
    for node in meta["nodes"]:
        capture = holds.get(_stem(str(node.get("capture") or node.get("pcap") or "")))
        island = rows[capture].get("island") if capture in rows else None
        if island != first and island in leads:
            lead = leads[island]
            found[node["rank"]] = _behind(clocks[lead["capture"]], lead["offset_ns"])
    return found


def _behind(clock: Callable[[int], float], offset_ns: int) -> Callable[[int], float]:
    return lambda time_ns: clock(time_ns) - offset_ns


def _true_clocks(meta: dict[str, Any], analysis: dict[str, Any]) -> dict[int, Callable[[int], float]]:
    """For each capture that meta.json has a clock for: its clock minus the truth's, at a time on the truth's.

    Captures are named with or without their suffix. Without ``at_node0_ns`` an offset holds at the first
    packet of ``meta.reference``, whose clock the truth is on.
    """
    known = {_stem(clock["capture"]): clock for clock in meta.get("clocks") or []}
    if not known:
        return {capture["id"]: _line(0, 0, 0) for capture in analysis["captures"]}
    rows = [(row, known[_stem(row["file"])]) for row in analysis["captures"] if _stem(row["file"]) in known]
    at_ns = _first_ns(rows, _stem(str(meta.get("reference", ""))))
    return {
        row["id"]: _line(clock["offset_ns"], clock["drift_ppb"], clock.get("at_node0_ns", at_ns))
        for row, clock in rows
    }


def _stem(file: str) -> str:
    return PurePath(file).name.partition(".")[0]


def _first_ns(rows: list[tuple[dict[str, Any], dict[str, Any]]], reference: str) -> int:
    """The first packet of the ``reference`` capture; of the first capture, on the truth's clock, where that
    one was not read."""
    seen = [(row, clock) for row, clock in rows if row["first_ns"] is not None]
    named = [row["first_ns"] for row, _ in seen if _stem(row["file"]) == reference]
    others = [row["first_ns"] - clock["offset_ns"] for row, clock in seen]
    return int((named or others or [0])[0])


def _line(offset_ns: int, drift_ppb: float, at_ns: int) -> Callable[[int], float]:
    slope = drift_ppb * 1e-9
    return lambda time_ns: offset_ns + slope * (time_ns - at_ns)


def _offsets(
    clocks: dict[int, Callable[[int], float]], reference: int, analysis: dict[str, Any]
) -> dict[int, Callable[[int], float]]:
    own = clocks.get(reference)
    if own is None:
        return {}

    def against(other: Callable[[int], float]) -> Callable[[int], float]:
        def offset(time_ns: int) -> float:
            on_node0 = time_ns - round(
                own(time_ns - round(own(time_ns)))
            )  # drift is small: two steps suffice
            return other(on_node0) - own(on_node0)

        return offset

    return {capture: against(clock) for capture, clock in clocks.items() if capture != reference}


def _lab_times(truth: dict[str, Any]) -> list[tuple[list[int | None], list[int | None]]] | None:
    """Times on the switch's clock, where truth.json has them for every collective."""
    calls = truth.get("calls")
    if not calls or len(calls) != len(truth.get("collectives", ())):
        return None
    times = []
    for call, row in zip(calls, truth["collectives"], strict=True):
        enter: list[int | None] = [None] * len(row["enter_ns"])
        leave: list[int | None] = [None] * len(row["enter_ns"])
        for entry in call["ranks"]:
            enter[entry["rank"]], leave[entry["rank"]] = entry["enter_lab_ns"], entry["leave_lab_ns"]
        times.append((enter, leave))
    return times
