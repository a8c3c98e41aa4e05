"""The row of a condition: what it needs, rests on and costs, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DIRECT: Final = "direct"
INDIRECT: Final = "indirect"
RUNBOOK: Final = "docs/runbook.md"
RDMA: Final = "`rdma statistic show link DEV/1`"
SWITCH: Final = "the switch's counters"


@dataclass(frozen=True)
class Condition:
    """One condition.

    ``shows``: what in the packets shows it; ``needs``: without which it is not judged (``needs.NEEDS``);
    ``threshold``: when it is reported, a clause; ``cost``: what its severity follows from; ``explains``:
    conditions at the same endpoints that it is the cause of; ``observability``: direct, or indirect (``why``
    says what looks the same). ``told_as``: another condition that looks the same, as which it is told:
    without that one it is not there either. ``commands``: what an operator runs to confirm it.
    """

    name: str
    family: str
    shows: str
    threshold: str
    cost: str
    advice: str
    alternatives: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    explains: tuple[str, ...] = ()
    observability: str = DIRECT
    why: str = ""
    told_as: str = ""
    commands: tuple[str, ...] = ()

    @property
    def runbook(self) -> str:
        """Where the runbook speaks of it."""
        return f"{RUNBOOK}#{self.name}"

    @property
    def of_ranks(self) -> bool:
        """Whether its cost is summed over ranks (rank-seconds), not a time of the job."""
        return "rank-seconds" in self.cost


NORTH_SOUTH: Final = "North-south: clients and front ends"
PCIE: Final = "PCIe observer: what a node's own bus and host do"
EAST_WEST: Final = "East-west: ranks and the network between them"
STOPPED: Final = "Slow links and jobs that stand still"
CAPTURE: Final = "The capture itself"
FAMILIES: Final = (NORTH_SOUTH, PCIE, EAST_WEST, STOPPED, CAPTURE)
