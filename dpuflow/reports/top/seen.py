"""What ``top`` shows of one moment, whoever told it: an agent's API, or a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpuflow.quantities import count, duration, listed, name_of, percent, rank_seconds, three_digits
from dpuflow.reports.tidy import LONGEST_NAME, clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpuflow.results import Analysis, Endpoint, Finding, Lateness, Steps

NAMED: Final = 4
"""Waiting ranks that are named before the rest is counted."""
MOST_WAITS: Final = 3


@dataclass(frozen=True)
class Rank:
    """A row of the table, and what is said of it once it is opened."""

    names: tuple[str, ...]  # the longest first
    row: Lateness
    end: Endpoint

    @property
    def name(self) -> str:
        """All that is known of who it is."""
        return self.names[0]

    @property
    def late_ns(self) -> int | None:
        """How late it is where it is late, else in the median."""
        if self.row.verdict == "unknown" and not self.row.late_ns:
            return None
        return self.row.median_ns if self.row.late_ns is None else self.row.late_ns

    @property
    def measured(self) -> bool:
        """Whether ``late_ns`` is a measurement, no bound."""
        return self.row.late_bound != "at_least" and (self.row.told.exact > 0 or not self.row.told.bounded)


@dataclass(frozen=True)
class Seen:
    """One moment. ``health`` are sentences on the one who tells; ``away`` says that he does not any more."""

    source: str
    ranks: tuple[Rank, ...] = ()
    groups: tuple[frozenset[str], ...] = ()  # addresses of those who take part in the same collectives
    jobs: tuple[str, ...] = ()
    findings: tuple[tuple[Finding, str], ...] = ()
    health: tuple[str, ...] = ()
    span_ns: int | None = None
    away: str | None = None

    def waits(self) -> list[str]:
        """Who waits for whom, the costliest first."""
        late = [each for each in self.ranks if each.row.verdict in ("late", "intermittent")]
        late.sort(key=lambda each: -(each.row.caused_wait_ns or 0))
        said = []
        for each in late[:MOST_WAITS]:
            met = frozenset().union(*(group for group in self.groups if each.end.address in group))
            peers = [
                other.names[-1] for other in self.ranks if other is not each and other.end.address in met
            ]
            if each.row.caused_wait_ns and peers:
                waited = rank_seconds(each.row.caused_wait_ns)
                said.append(f"{listed(peers, NAMED)} waited {waited} for {each.name}")
        return said


def ranks_of(rows: Iterable[Lateness], endpoints: Sequence[Endpoint]) -> tuple[Rank, ...]:
    """Rows with their names."""
    found = []
    for row in rows:
        end = endpoints[row.endpoint]
        names = (name_of(end), f"rank {end.rank} ({end.address})", _short(end))
        found.append(Rank(tuple(clean(each, LONGEST_NAME) for each in names), row, end))
    return tuple(found)


def _short(each: Endpoint) -> str:
    return each.address if each.rank is None else f"rank {each.rank}"


def jobs_of(steps: Iterable[Steps]) -> tuple[str, ...]:
    """What each job repeats, in a line."""
    said = []
    for each in steps:
        text = f"{count(len(each.endpoints), 'rank')}: {each.kind or 'step'} of {duration(each.step_ns)}"
        text += f" (99 %: {duration(each.p99_ns)}), {each.count:,} of them"
        rate = f", {three_digits(each.tokens_per_s)} tokens/s" if each.tokens_per_s else ""
        said.append(text + rate)
    return tuple(said)


def findings_of(rows: Iterable[Finding], endpoints: Sequence[Endpoint]) -> tuple[tuple[Finding, str], ...]:
    """Findings with whom they name, the gravest first."""
    order = ("critical", "warning", "info")
    told = [(each, listed([clean(_short(endpoints[end])) for end in each.endpoints], NAMED)) for each in rows]
    return tuple(sorted(told, key=lambda pair: order.index(pair[0].severity)))


def seen_of(result: Analysis, source: str) -> Seen:
    """A whole result as one moment."""
    address = [each.address for each in result.endpoints]
    groups = tuple(frozenset(address[end] for end in group.endpoints) for group in result.groups)
    lost = sum(each.lost_packets or 0 for each in result.captures)
    marked, again = (sum(getattr(f, key) for f in result.flows) for key in ("ecn_marked", "retransmitted"))
    packets = sum(each.packets for each in result.captures)
    health = [count(len(result.captures), "capture"), count(packets, "packet")]
    health += [f"{lost:,} not captured", f"{again:,} retransmitted", f"{marked:,} ECN-marked"]
    span = None if result.start_ns is None or result.end_ns is None else result.end_ns - result.start_ns
    return Seen(
        source, ranks_of(result.lateness, result.endpoints), groups, jobs_of(result.steps),
        findings_of(result.findings, result.endpoints), tuple(health), span,
    )  # fmt: skip


def line_of(seen: Seen) -> str:
    """The moment in one line: for a log, a pipe, a screen reader."""
    if seen.away is not None:
        return seen.away
    late = [each for each in seen.ranks if each.row.verdict == "late"]
    late.sort(key=lambda each: -(each.row.caused_wait_ns or 0))
    said = [f"late: {late_words(each)}" for each in late[:3]]
    said += [f"and {len(late) - 3} more late"] if len(late) > 3 else []
    if not late:
        unknown = sum(each.row.verdict == "unknown" for each in seen.ranks)
        said.append(f"nobody is late of {count(len(seen.ranks), 'rank')}" if seen.ranks else "no collectives")
        said += [f"{unknown} of them could not be judged"] if unknown else []
    named = dict.fromkeys(each.condition.replace("_", " ") for each, _ in seen.findings)
    said.append(f"findings: {listed(list(named), 4)}")
    return "; ".join([*said, *seen.jobs[:1], *seen.health])


def late_words(each: Rank) -> str:
    """``rank 1 (10.0.0.2) by 5.00 ms in 100 %, waited for 0.03 rank-seconds``."""
    bound = "" if each.measured else "at least "
    text = f"{each.name} by {bound}{duration(each.late_ns)} in {percent(each.row.late_share)}"
    return text + (f", waited for {rank_seconds(each.row.caused_wait_ns)}" if each.row.caused_wait_ns else "")
