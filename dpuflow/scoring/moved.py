"""Bulk transfers as an analysis tells them against the truth's: found, bytes, pages, rate, wait."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dpuflow.scoring.figures import percentile, share_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.scoring.truth import TrueTransfer


@dataclass(slots=True)
class Moved:
    """Counts and errors of one case's transfers, or of several cases'."""

    true: int = 0
    found: int = 0
    inferred: int = 0
    bytes_right: int = 0
    pages_right: int = 0
    waits: int = 0  # of the found ones: the receiver had waited
    waits_told: int = 0
    waits_false: int = 0  # a wait is told, but the receiver had not waited
    rate_errors_ppm: list[int] = field(default_factory=list)  # of bytes over the time from start to end
    wait_errors_ns: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """The figures that reports show, where the truth lists transfers; shares of one."""
        if not self.true:
            return {}
        rate = percentile(self.rate_errors_ppm, 0.5)
        return {
            "transfers": self.true,
            "transfers_found": share_of(self.found, self.true),
            "transfers_invented": self.inferred - self.found,
            "transfers_bytes_right": share_of(self.bytes_right, self.found),
            "transfers_pages_right": share_of(self.pages_right, self.found),
            "transfers_rate_error_median": None if rate is None else rate / 1e6,
            "transfers_waits_told": share_of(self.waits_told, self.waits),
            "transfers_waits_false": self.waits_false,
            "transfers_wait_error_median_ns": percentile(self.wait_errors_ns, 0.5),
            "transfers_wait_error_p90_ns": percentile(self.wait_errors_ns, 0.9),
        }

    def __add__(self, other: Moved) -> Moved:
        return Moved(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Moved)})


def score_transfers(truths: Sequence[TrueTransfer], guesses: Sequence[dict[str, Any]]) -> Moved:
    """Score them; one is found by that of the same ends and verb that covers most of the same time."""
    score = Moved(true=len(truths), inferred=len(guesses) if truths else 0)
    taken: set[int] = set()
    for true in truths:
        best, most = None, 0
        for number, guess in enumerate(guesses):
            if number in taken or (guess["src"], guess["dst"], guess["verb"]) != (
                true.src,
                true.dst,
                true.verb,
            ):
                continue
            both = min(true.end_ns, guess["end_ns"]) - max(true.start_ns, guess["start_ns"])
            if both > most:
                best, most = number, both
        if best is None:
            continue
        taken.add(best)
        _compare(score, true, guesses[best])
    return score


def _compare(score: Moved, true: TrueTransfer, guess: dict[str, Any]) -> None:
    score.found += 1
    score.bytes_right += guess["bytes"] == true.bytes
    score.pages_right += guess["page_bytes"] == true.page_bytes
    rates = [
        size / max(end_ns - start_ns, 1)
        for size, start_ns, end_ns in (
            (guess["bytes"], guess["start_ns"], guess["end_ns"]),
            (true.bytes, true.start_ns, true.end_ns),
        )
    ]
    score.rate_errors_ppm.append(round(1e6 * abs(rates[0] / rates[1] - 1)))
    told = guess["wait_before_first_token_ns"]
    if true.wait_ns is None:
        score.waits_false += told is not None
        return
    score.waits += 1
    if told is not None:
        score.waits_told += 1
        score.wait_errors_ns.append(abs(told - true.wait_ns))
