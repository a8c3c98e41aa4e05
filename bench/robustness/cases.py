"""The cases that twins are made of: shared and bundled captures, and scenarios drawn as bench.accuracy draws.

A case is named ``kind/folder``: ``tcp/...``, ``roce/...``, ``nccl/...``, ``traces/...``, ``draw/NUMBER``.
Where a node has several NICs on one clock there are two cases of it: a capture a NIC, and (``@nodes``) all
captures of a node as one vantage point.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.accuracy.draw import draw
from bench.robustness.records import Records, read_records
from dpuflow.synth.case import write_case
from dpuflow.synth.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.synth.scenario import Scenario

SHARED: Final = ("tcp", "roce", "nccl")
GROUPED: Final = "@nodes"
SLACK_NS: Final = {"nccl": 50_000}
"""By how much a bound may miss the truth before it is violated: hand-overs, and the clocks' own error."""
REAL_SLACK_NS: Final = 500_000


@dataclass(frozen=True, eq=False)
class Capture:
    """One file of a case. ``vantage``: what has one clock; ``node``: the machine it was taken at."""

    name: str
    vantage: str
    node: int
    records: Records

    @property
    def ways(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ethernet destination and source of each packet, as numbers."""
        macs = self.records.bytes_at(0, 12).astype(np.int64)
        weights = 1 << (8 * np.arange(5, -1, -1, dtype=np.int64))
        return macs[:, :6] @ weights, macs[:, 6:] @ weights

    @property
    def own(self) -> NDArray[np.bool_]:
        """Which packets its node sent: those whose Ethernet source is the address that most packets have."""
        to, by = self.ways
        seen = Counter(to.tolist())
        seen.update(by.tolist())
        mac = min(seen, key=lambda each: (-seen[each], each), default=0)
        return by == mac


@dataclass(frozen=True, eq=False)
class Subject:
    """A case as read: what was captured, and what is known to have happened."""

    name: str
    captures: tuple[Capture, ...]
    truth: dict[str, Any]
    meta: dict[str, Any]
    slack_ns: float
    scenario: Scenario | None = None

    @property
    def nodes(self) -> list[int]:
        """The nodes that were captured."""
        return sorted({capture.node for capture in self.captures})

    @property
    def packets(self) -> int:
        """Of all captures."""
        return sum(len(capture.records) for capture in self.captures)


def case_names(patterns: Sequence[str] = (), count: int = 0, seed: int = 0) -> list[str]:
    """All cases whose name, or folder, fits one of ``patterns`` (none: all), and ``count`` drawn ones."""
    names = []
    for kind, folder in _folders():
        for path in sorted(folder.glob("*/truth.json")):
            names.append(f"{kind}/{path.parent.name}")
            meta = json.loads(path.with_name("meta.json").read_text(encoding="utf-8"))
            if meta.get("nics_per_node", 1) > 1 and str(meta.get("clock", "")).startswith("one"):
                names.append(names[-1] + GROUPED)
    names += [f"draw/{number}" for number in range(seed, seed + count)]
    return [
        name
        for name in names
        if not patterns or any(fnmatch(name, p) or fnmatch(name.partition("/")[2], p) for p in patterns)
    ]


@lru_cache(maxsize=1)
def read_subject(name: str) -> Subject:
    """The case of this name. Raises OSError, ValueError."""
    kind, _, folder = name.partition("/")
    if kind == "draw":
        scenario = draw(int(folder))
        with tempfile.TemporaryDirectory() as written:
            write_case(scenario, written)
            hand_over_ns = 3 * Timing.of(scenario.machine).handover_ns
            slack_ns = hand_over_ns + 2 * scenario.cluster.latency_us * 1e3
            return _read(name, Path(written), False, slack_ns, scenario)
    grouped = folder.endswith(GROUPED)
    path = dict(_folders())[kind] / folder.removesuffix(GROUPED)
    return _read(name, path, grouped, SLACK_NS.get(kind, REAL_SLACK_NS))


def _folders() -> list[tuple[str, Path]]:
    shared = Path(os.environ.get("DPUFLOW_SHARED", "../shared")) / "captures"
    return [(kind, shared / kind) for kind in SHARED] + [("traces", Path(__file__).parents[2] / "traces")]


def _read(
    name: str, folder: Path, grouped: bool, slack_ns: float, scenario: Scenario | None = None
) -> Subject:
    truth, meta = (
        json.loads((folder / f"{file}.json").read_text(encoding="utf-8")) for file in ("truth", "meta")
    )
    captures = []
    places = _nodes(meta)
    for file in sorted({*folder.glob("n*.pcap"), *folder.glob("n*.pcap.gz")}):
        stem = file.name.partition(".")[0]
        node = places[stem]
        captures.append(Capture(stem, f"node{node}" if grouped else stem, node, read_records(file)))
    return Subject(name, tuple(captures), truth, _with_times(meta, captures), slack_ns, scenario)


def _nodes(meta: dict[str, Any]) -> dict[str, int]:
    """For each capture's name without suffix the machine it was taken at."""
    found: dict[str, int] = {}
    for row in meta["nodes"]:
        file = row.get("capture") or row.get("pcap")
        if file:
            stem = str(file).partition(".")[0]
            found[stem] = row.get("node", len(found)) if stem not in found else found[stem]
    return found


def _with_times(meta: dict[str, Any], captures: Sequence[Capture]) -> dict[str, Any]:
    """``meta`` with the time at which each clock's offset holds: twins may begin at another packet."""
    reference = next((each for each in captures if each.name == meta.get("reference")), None)
    if reference is None:
        return meta
    at_ns = int(reference.records.stamp_ns[0])
    return {**meta, "clocks": [{"at_node0_ns": at_ns, **clock} for clock in meta["clocks"]]}
