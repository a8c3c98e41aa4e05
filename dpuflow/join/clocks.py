"""The clocks of several vantage points against one: trusted and checked, or estimated.

In: for pairs of captures the times at which each saw the same packets, in both directions. Out: one
Clock a capture and the map from its times to the reference's (``clockgraph`` estimates it).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.errors import OptionError
from dpuflow.join.clockgraph import Clocks, estimate, nearest, parts_of
from dpuflow.join.clockmap import ClockMap
from dpuflow.quantities import duration
from dpuflow.schema.tables import Clock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from dpuflow.join.clockmap import Samples
    from dpuflow.schema.tables import CaptureInfo

MODES: Final = ("auto", "trust", "estimate")
EARLY_SHARE: Final = 0.01  # of packets may arrive before they were sent on a clock that is trusted


class Check(NamedTuple):
    """How two clocks taken as one stand up: delays of packets either way on the raw stamps."""

    early: int  # packets that arrived before they were sent
    packets: int
    worst_ns: int  # by how much at most
    bound_ns: int  # the offset cannot be larger than this

    @property
    def passes(self) -> bool:
        """Whether hardly any packet arrived before it was sent."""
        return self.early <= EARLY_SHARE * self.packets


def check_pair(samples: Samples) -> Check:
    """Delays if both captures are on one clock."""
    delay = np.where(samples.forward, samples.y_ns - samples.x_ns, samples.x_ns - samples.y_ns)
    early = delay < 0
    sides = [delay[samples.forward], delay[~samples.forward]]
    # A hundredth of the smallest delays is left out: stamps of neighbours can be swapped.
    floors = [int(np.partition(s, len(s) // 100)[len(s) // 100]) for s in sides if len(s)]
    return Check(
        int(np.count_nonzero(early)),
        len(delay),
        int(-delay.min(initial=0)),
        max((abs(f) for f in floors), default=0),
    )


def tie_clocks(
    infos: Sequence[CaptureInfo],
    samples: Sequence[Samples],
    mode: str,
    copies: Mapping[int, int] | None = None,
    meeting: Collection[tuple[int, int]] = (),
    empty: Collection[int] = (),
) -> Clocks:
    """Put the captures of each island (those that packets tie) on the clock of its first one.

    ``copies``: captures that were given twice, with the one each is a copy of; these have no samples.
    ``meeting``: pairs of captures that saw the same packets, whether or not that ties their clocks;
    ``empty``: captures without messages. The first island is that of the first capture if it is tied to
    others, else the largest. What met an island and is not tied to it is left out, and so is what is empty:
    its messages would count twice, on clocks that are not understood.

    ``mode``: "trust": they are on one clock (checked); "estimate": offset and drift from the packets;
    "auto": trusted where the check passes. Raises OptionError for any other.
    """
    if mode not in MODES:
        raise OptionError(f"clock {mode!r} is none of {', '.join(MODES)}")
    copies = copies or {}
    islands = [list(range(len(infos)))]
    if mode != "trust":
        islands = _islands(len(infos), [s for s in samples if s.forward.any() and not s.forward.all()])
    found = _untied(len(infos))
    for island in islands:
        kept = set(island) - set(copies)
        if island is islands[0] or not (_meets(kept, found, meeting) or kept <= set(empty)):
            mine = [s for s in samples if s.x in kept and s.y in kept]
            _tie_island(infos, mine, island, mode, found)
    for copy, first in copies.items():
        _take_over(infos, copy, first, found)
    found.limits += _apart(infos, found)
    return found


def _untied(captures: int) -> Clocks:
    """As before anything is known of them."""
    why = "it shares no packets with the others"
    return Clocks([Clock(c, False, "none", why=why) for c in range(captures)], [None] * captures)


def _islands(captures: int, ties: Sequence[Samples]) -> list[list[int]]:
    """Captures that packets tie together; first those of the first capture, or the most if it has none."""
    parts = parts_of(captures, ties)
    home = parts[0] if len(parts[0]) > 1 else max(parts, key=len)
    return [home, *(part for part in parts if part is not home)]


def _meets(captures: set[int], found: Clocks, meeting: Collection[tuple[int, int]]) -> bool:
    """Whether any of them saw packets that captures of an island saw."""
    taken = {c for each in found.islands for c in each}
    return any((a in captures and b in taken) or (b in captures and a in taken) for a, b in meeting)


def _take_over(infos: Sequence[CaptureInfo], copy: int, first: int, found: Clocks) -> None:
    """A capture that was given twice has the clock of the one it is a copy of."""
    found.maps[copy] = found.maps[first]
    same = found.clocks[first]
    method = "trusted" if same.reference else same.method
    found.clocks[copy] = replace(
        same, capture=copy, reference=False, method=method, why="the same packets at the same times"
    )
    found.limits.append(
        f"{infos[copy].vantage} is a copy of {infos[first].vantage}: the same packets with the same time "
        "stamps. It counts once."
    )


def _tie_island(
    infos: Sequence[CaptureInfo],
    samples: Sequence[Samples],
    captures: Sequence[int],
    mode: str,
    found: Clocks,
) -> None:
    """Put ``captures`` on the clock of the first of them, as far as packets tie them to it."""
    reference = captures[0]
    origin = infos[reference].first_ns or 0
    island = len(found.islands)
    checks = [check_pair(s) for s in samples]
    if mode == "trust" or (mode == "auto" and all(c.passes for c in checks)):
        error = nearest(reference, samples, [float(c.bound_ns) for c in checks])[0]
        found.slack_ns = max(found.slack_ns, round(max(error.values())))
        for capture in captures:
            found.maps[capture] = ClockMap(origin)
            bound = error.get(capture)
            found.clocks[capture] = Clock(
                capture,
                False,
                "trusted",
                0,
                0,
                None if bound is None else round(bound),
                _why_trusted(mode, bound),
            )
        found.limits += _failed(infos, samples, checks)
    else:
        estimate(infos, samples, reference, found)
        if mode == "auto":
            _say_why([found.clocks[c] for c in captures], checks)
    found.clocks[reference] = Clock(reference, True, "reference", 0, 0, 0, "")
    found.maps[reference] = ClockMap(origin)
    tied = [c for c in captures if found.maps[c] is not None]
    found.islands.append(tied)
    for capture in tied:
        found.clocks[capture].island = island


def _apart(infos: Sequence[CaptureInfo], found: Clocks) -> Iterator[str]:
    """What is not on the first island's clock: a sentence each for islands, the empty, the rest."""
    names = [[infos[c].vantage for c in island] for island in found.islands]
    if len(names) > 1:
        each = ", ".join(_listed(island, 2) for island in names[:4])
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield (
            f"The captures are {len(names)} islands that share no packets ({each}{more}): nothing ties their"
            " clocks. Each is analysed on the clock of its first capture; times of two are not compared."
        )
    empty = [info.vantage for info in infos if info.first_ns is None]
    if empty:
        yield f"No packet was captured by {_listed(empty, 4)}: is it the interface of the job?"
    untied = [info for info, place in zip(infos, found.maps, strict=True) if place is None]
    left = [info.vantage for info in untied if info.first_ns is not None]
    if left:
        yield (
            f"Nothing ties the clock{'s' if len(left) > 1 else ''} of {_listed(left, 4)} to"
            f" {names[0][0]}: {'their' if len(left) > 1 else 'its'} messages are left out."
        )


def _listed(names: Sequence[str], most: int) -> str:
    """Names, the first ``most`` of them."""
    rest = f" + {len(names) - most}" if len(names) > most else ""
    return " + ".join(names[:most]) + rest


def _why_trusted(mode: str, bound: float | None) -> str:
    if bound is None:
        return "taken as synchronised; no packets in common to check it with"
    allowed = f"packets in common allow an offset of up to {bound / 1000:.1f} us"
    if mode == "trust":
        return f"taken as synchronised; {allowed}"
    return f"uncorrected, packets arrive after they were sent; {allowed}"


def _say_why(clocks: Sequence[Clock], checks: Sequence[Check]) -> None:
    """Why the stamps were not taken as they are, in each estimated clock's ``why``."""
    early, packets = sum(c.early for c in checks), sum(c.packets for c in checks)
    for clock in clocks:
        if clock.method == "estimated":
            clock.why += (
                f"; as stamped, {early:,} of {packets:,} packets of two captures would arrive before they"
                f" were sent, by up to {duration(max(c.worst_ns for c in checks))}"
            )


def _failed(infos: Sequence[CaptureInfo], samples: Sequence[Samples], checks: Sequence[Check]) -> list[str]:
    return [
        f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} disagree: {c.early:,} of {c.packets:,}"
        f" packets arrive before they were sent, by up to {duration(c.worst_ns)}."
        for s, c in zip(samples, checks, strict=True)
        if not c.passes
    ]
