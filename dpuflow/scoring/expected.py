"""Whether the verdicts of an analysis are those to be expected of a case (docs/scoring.md, "Verdicts").

In: the case, and the ``lateness`` rows of the analysis. Out: None where they fit, else a sentence.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpuflow.scoring.truth import Case

ONSET_WITHIN: Final = 3  # iterations by which the onset may be missed
BLAMED: Final = ("compute", "host")


class _Said(NamedTuple):
    """Endpoints by what the verdicts call them."""

    late: set[int]
    at_times: set[int]
    steadiness: dict[str | None, set[int]]

    @classmethod
    def of(cls, rows: list[dict[str, Any]]) -> _Said:
        """Of ``lateness`` rows."""
        verdicts: dict[str, set[int]] = {"late": set(), "intermittent": set()}
        steadiness: dict[str | None, set[int]] = {}
        for row in rows:
            if row["verdict"] in verdicts:
                verdicts[row["verdict"]].add(row["endpoint"])
                steadiness.setdefault(row["steadiness"], set()).add(row["endpoint"])
        return cls(verdicts["late"], verdicts["intermittent"], steadiness)

    def steadily(self, how: str) -> set[int]:
        """Those that are late in that manner."""
        return self.steadiness.get(how, set())


def check_verdicts(
    case: Case, rows: list[dict[str, Any]], nodes: Mapping[int, list[int]] = MappingProxyType({})
) -> str | None:
    """What is wrong with the verdicts, None where nothing is. ``nodes``: the endpoints of each node."""
    rows = _of_members(case, rows, nodes)
    said, fault = _Said.of(rows), case.compute_fault
    if fault is not None:
        return _check_fault(case, fault, rows, said)
    if not case.network_fault:
        return f"nobody was made late, but {_names(said.late)} is called late" if said.late else None
    blamed = {row["endpoint"] for row in rows if row["cause"] in BLAMED} & (said.late | said.at_times)
    return f"a fault of the network is blamed on {_names(blamed)}" if blamed else None


def _check_fault(case: Case, fault: dict[str, Any], rows: list[dict[str, Any]], said: _Said) -> str | None:
    """The same where ranks were made late."""
    if fault["kind"] == "random":
        return _check_random(said)
    if fault["kind"] == "rotating":
        fits = len(said.steadily("rotating")) > 1 and not said.steadily("persistent")
        return None if fits else "rotating lateness is not called so"
    guilty = _guilty(case, fault)
    if fault["kind"] == "transient":
        fits = guilty <= said.steadily("transient") and said.late <= guilty
        return None if fits else f"{_names(guilty)} was late for a time, and that is not what is said"
    if said.late != guilty:
        late = _names(said.late) if said.late else "nobody"
        return f"{_names(guilty)} was made late, but {late} is called late"
    if fault["kind"] == "persistent" and said.late != said.steadily("persistent"):
        return f"{_names(guilty)} was late throughout, but is not called persistent"
    if fault.get("from_iter"):
        return _check_onset(case, fault["from_iter"], [row for row in rows if row["endpoint"] in guilty])
    return None


def _check_random(said: _Said) -> str | None:
    persistent = said.steadily("persistent")
    if persistent:
        return f"random lateness, but {_names(persistent)} is called persistently late"
    return None if said.late | said.at_times else "random lateness, but nobody is called late"


def _of_members(
    case: Case, rows: list[dict[str, Any]], nodes: Mapping[int, list[int]]
) -> list[dict[str, Any]]:
    """Rows that name a node as rows of its endpoints that were made late; of its first without any."""
    made_late = {endpoint for collective in case.collectives for endpoint in collective.injected}
    found = []
    for row in rows:
        ends = [row["endpoint"]]
        if row["endpoint"] is None:
            ends = sorted(made_late & set(nodes[row["node"]])) or nodes[row["node"]][:1]
        found += [row | {"endpoint": end} for end in ends]
    return found


def _guilty(case: Case, fault: dict[str, Any]) -> set[int]:
    """The endpoints that were made late, by the fault's own words, else by what was injected most often."""
    if "ms_by_rank" in fault:
        return {case.endpoint_of_rank[int(rank)] for rank, ms in fault["ms_by_rank"].items() if ms}
    if "rank" in fault:
        return {case.endpoint_of_rank[fault["rank"]]}
    counts = Counter(endpoint for collective in case.collectives for endpoint in collective.injected)
    return {endpoint for endpoint, number in counts.items() if 2 * number > max(counts.values())}


def _check_onset(case: Case, first: int, rows: list[dict[str, Any]]) -> str | None:
    near = [c for c in case.collectives if abs(c.iteration - first) <= ONSET_WITHIN]
    if not near:
        return None
    low_ns, high_ns = min(c.start_ns for c in near), max(c.end_ns for c in near)
    for row in rows:
        if row["since_ns"] is None or not low_ns <= row["since_ns"] <= high_ns:
            return (
                f"{_names({row['endpoint']})} was late from iteration {first} on, but that onset is not given"
            )
    return None


def _names(endpoints: set[int]) -> str:
    return "endpoint " + " and ".join(str(endpoint) for endpoint in sorted(endpoints))
