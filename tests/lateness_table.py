"""What packets can show of each rank's lateness, by operation, algorithm, stack and role.

In: the schedules of ``schedules.graph``. Out: rows, and the table of docs/theory/entries.md.
``PYTHONPATH=tests python -c "from lateness_table import markdown; print(markdown())"`` prints it.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schedules.graph import free_ranks, schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.schedules.algorithms import Algorithm

GLOO, EAGER, RENDEZVOUS, NCCL = "Gloo", "Open MPI, eager", "Open MPI, rendezvous", "NCCL"
STACKS: Final = (GLOO, EAGER, RENDEZVOUS, NCCL)
OPENS, PASSES, TAKES = "sends first", "sends after an input", "only receives"

ENTRY: Final = {
    # Role -> stack -> what dates the entry: Gloo declares itself ready to receive when called; a free send
    # waits for nothing; a later one, or the answer to an offer, may have waited; a credit dates nothing.
    OPENS: {GLOO: "exact", EAGER: "exact", RENDEZVOUS: "exact", NCCL: "exact"},
    PASSES: {GLOO: "exact", EAGER: "at_most", RENDEZVOUS: "at_most", NCCL: "at_most"},
    TAKES: {GLOO: "exact", EAGER: "unobservable", RENDEZVOUS: "at_most", NCCL: "unobservable"},
}


class Row(NamedTuple):
    """``ranks`` says who has this role; ``lateness`` is the bound of it for each of STACKS."""

    op: str
    algorithm: str
    ranks: str
    role: str
    lateness: tuple[str, ...]


def roles_of(algorithm: Algorithm, n: int, root: int = 0) -> dict[int, str]:
    """The role of each rank (by position) that takes part."""
    sends = schedule(algorithm, n, root)
    free, senders = free_ranks(algorithm, n, root), {send.src for send in sends}
    everyone = senders | {send.dst for send in sends}
    return {
        rank: OPENS if rank in free else PASSES if rank in senders else TAKES for rank in sorted(everyone)
    }


def lateness_of(roles: dict[int, str], stack: str) -> dict[str, str]:
    """The bound of each role's lateness: exact where all entries are, else what is left of it."""
    entry = {role: ENTRY[role][stack] for role in roles.values()}
    if set(entry.values()) == {"exact"}:
        return entry
    # A rank whose entry is no more than a bound may have been the earliest of all.
    return {role: "bound" if bound == "exact" else bound for role, bound in entry.items()}


def rows() -> Iterator[Row]:
    """All rows: for 8 ranks, and for 6 where their roles are others."""
    for algorithm in ALGORITHMS:
        seen: list[frozenset[str]] = []
        for n in (8, 6):
            if not algorithm.fits(n):
                continue
            roles = roles_of(algorithm, n)
            kinds = frozenset(roles.values())
            if kinds in seen:
                continue
            seen.append(kinds)
            for role in (OPENS, PASSES, TAKES):
                mine = [rank for rank, each in roles.items() if each == role]
                if mine:
                    lateness = tuple(lateness_of(roles, stack)[role] for stack in STACKS)
                    named = _named(mine, n, algorithm.rooted) + (", of 6" if n == 6 else "")
                    yield Row(algorithm.op.token, algorithm.name, named, role, lateness)


def _named(mine: list[int], n: int, rooted: bool) -> str:
    if len(mine) == n:
        return "all"
    if rooted and mine == [0]:
        return "the root"
    if rooted and len(mine) == n - 1 and 0 not in mine:
        return "all but the root"
    return "some"


def markdown() -> str:
    """The table of docs/theory/entries.md. Algorithms of one operation that come out alike share rows."""
    alike: dict[tuple[str, tuple[tuple[str, str, tuple[str, ...]], ...]], list[str]] = {}
    for op, named in groupby(rows(), key=lambda row: row.op):
        for name, group in groupby(named, key=lambda row: row.algorithm):
            names = alike.setdefault(
                (op, tuple(dict.fromkeys((row.ranks, row.role, row.lateness) for row in group))), []
            )
            if name not in names:
                names.append(name)
    lines = [
        "| operation | algorithm | ranks | role | " + " | ".join(STACKS) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(STACKS),
    ]
    for (op, key), names in alike.items():
        for ranks, role, lateness in key:
            lines.append(f"| {op} | {', '.join(names)} | {ranks} | {role} | {' | '.join(lateness)} |")
    return "\n".join(lines)
