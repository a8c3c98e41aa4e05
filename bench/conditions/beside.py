"""Figures beside the findings, against the truth: clients' requests, caches that are moved, tokens; and what
share of an analysis detectors take."""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpuflow.findings import build
from dpuflow.reports.json import json_lines
from dpuflow.scoring.moved import Moved, score_transfers
from dpuflow.scoring.truth import read_case

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.results import Analysis, Request

MILLION = 1_000_000


@dataclass(slots=True)
class Beside:
    """Counts and errors (parts in a million) of one job, or of several."""

    requests: int = 0
    found: int = 0
    tokens_right: int = 0
    first_ppm: list[int] = field(default_factory=list)  # time to the first token
    gap_ppm: list[int] = field(default_factory=list)  # between tokens, in the mean of an answer
    transfers: Moved = field(default_factory=Moved)
    wait_ppm: list[int] = field(default_factory=list)
    cpu_ns: int = 0
    detectors_ns: int = 0

    def __add__(self, other: Beside) -> Beside:
        return Beside(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Beside)})


def beside(folder: str, result: Analysis) -> Beside:
    """All but times of the CPU, of the case in ``folder``."""
    truth = json.loads((Path(folder) / "truth.json").read_text())
    figures = Beside()
    _requests(figures, truth["requests"], result)
    if truth["transfers"]:
        analysis = json.loads("\n".join(json_lines(result)))
        case = read_case(folder, analysis)
        figures.transfers = score_transfers(case.transfers, analysis["transfers"])
        for true in case.transfers:
            one = score_transfers([true], analysis["transfers"])
            if one.wait_errors_ns and true.wait_ns:
                figures.wait_ppm.append(round(MILLION * one.wait_errors_ns[0] / true.wait_ns))
    return figures


def _requests(figures: Beside, truths: list[dict[str, Any]], result: Analysis) -> None:
    """Each true request against that of its client which was sent next to it."""
    of_client: dict[str | None, list[Request]] = {}
    for each in result.requests:
        of_client.setdefault(result.endpoints[each.client].address, []).append(each)
    for true in truths:
        figures.requests += 1
        open_ns = true["last_ns"] - true["sent_ns"]
        near = [
            each
            for each in of_client.get(f"172.16.0.{10 + true['client']}", ())
            if each.sent_ns is not None and abs(each.sent_ns - true["sent_ns"]) < open_ns / 2
        ]
        near = [each for each in near if each.prompt_bytes == true["prompt_bytes"]]
        if not near:
            continue
        found = near[0]
        assert found.sent_ns is not None
        figures.found += 1
        figures.tokens_right += found.tokens == true["tokens"]
        if found.first_ns is None or found.last_ns is None:
            continue
        first = (found.first_ns - found.sent_ns) / (true["first_ns"] - true["sent_ns"])
        figures.first_ppm.append(round(MILLION * abs(first - 1)))
        if true["tokens"] > 1:
            gaps = (found.last_ns - found.first_ns) / (true["last_ns"] - true["first_ns"])
            figures.gap_ppm.append(round(MILLION * abs(gaps - 1)))


def tokens_right(scenario: dict[str, Any], truths: list[dict[str, Any]], result: Analysis) -> list[str]:
    """Of each set of ranks that decodes, whether tokens, layers and bytes are "right", "wrong" or "untold".

    One token is let go at either end. ``scenario``: as drawn, all sizes given.
    """
    job = scenario["job"]
    steps: dict[tuple[int, ...], Counter[tuple[int, int]]] = {}  # by ranks: all_reduces of a token and size
    for row in truths:
        decodes = row.get("phase") == "decode" or job["kind"] == "decode"
        if decodes or (job["kind"] == "prefill_decode" and row["bytes"] == job["bytes"]):
            steps.setdefault(tuple(row["ranks"]), Counter())[row["iter"], row["bytes"]] += 1
    told = {tuple(sorted(_ranks(result, each.endpoints))): each for each in result.decode}
    out = []
    for ranks, counts in steps.items():
        each = next((row for of, row in told.items() if set(ranks) <= set(of)), None)
        if each is None:
            out.append("untold")
            continue
        sizes = {size for _, size in counts}
        tokens = sum(counts.values()) // (2 * job["layers"])
        size = sizes.pop() if len(sizes) == 1 else None
        right = abs(each.tokens - tokens) <= 1 and (each.layers, each.hidden_bytes) == (job["layers"], size)
        out.append("right" if right else "wrong")
    return out


def _ranks(result: Analysis, endpoints: list[int]) -> list[int]:
    ranks = [result.endpoints[end].rank for end in endpoints]
    return [rank for rank in ranks if rank is not None]


@contextmanager
def timed(figures: Beside) -> Iterator[None]:
    """Add what an analysis within takes of the CPU, and what its detectors take of that."""
    whole, run = time.process_time_ns(), build.run_detectors

    def clocked(*args: Any) -> Any:
        begin = time.process_time_ns()
        try:
            return run(*args)
        finally:
            figures.detectors_ns += time.process_time_ns() - begin

    build.run_detectors = clocked
    try:
        yield
    finally:
        build.run_detectors = run
        figures.cpu_ns += time.process_time_ns() - whole
