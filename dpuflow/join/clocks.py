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
from dpuflow.tables import Clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dpuflow.join.clockmap import Samples
    from dpuflow.tables import CaptureInfo

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
) -> Clocks:
    """Put all captures on the clock of the first that is tied to others.

    ``copies``: captures that were given twice, with the one each is a copy of; these have no samples.

    ``mode``: "trust": they are on one clock (checked); "estimate": offset and drift from the packets;
    "auto": trusted where the check passes. Raises OptionError for any other.
    """
    if mode not in MODES:
        raise OptionError(f"clock {mode!r} is none of {', '.join(MODES)}")
    checks = [check_pair(s) for s in samples]
    ties = [mode == "trust" or bool(s.forward.any() and not s.forward.all()) for s in samples]
    parts = parts_of(len(infos), [s for s, tie in zip(samples, ties, strict=True) if tie])
    largest = max(parts, key=len) if parts else [0]
    home = parts[0] if len(parts[0]) > 1 else largest
    reference = home[0]
    origin = infos[reference].first_ns or 0
    trusted = mode == "trust" or (mode == "auto" and all(c.passes for c in checks))
    found = Clocks(
        [Clock(c, False, "none", why="it shares no packets with the others") for c in range(len(infos))],
        [],
        reference,
    )
    maps: list[ClockMap | None] = [None] * len(infos)
    if trusted:
        error = nearest(reference, samples, [float(c.bound_ns) for c in checks])[0]
        found.slack_ns = round(max(error.values()))
        for capture in range(len(infos)) if mode == "trust" else home:
            maps[capture] = ClockMap(origin)
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
        estimate(infos, [s for s in samples if s.x in home and s.y in home], maps, found)
        if mode == "auto":
            _say_why(found.clocks, checks)
    found.clocks[reference] = Clock(reference, True, "reference", 0, 0, 0, "")
    maps[reference] = ClockMap(origin)
    found.maps = maps
    for copy, first in (copies or {}).items():
        maps[copy] = maps[first]
        same = found.clocks[first]
        method = "trusted" if same.reference else same.method
        found.clocks[copy] = replace(
            same, capture=copy, reference=False, method=method, why="the same packets at the same times"
        )
        found.limits.append(
            f"{infos[copy].vantage} is a copy of {infos[first].vantage}: the same packets with the same time "
            "stamps. It counts once."
        )
    for capture, place in enumerate(maps):
        if place is None:
            found.limits.append(
                f"{infos[capture].vantage} shares no packets with {infos[reference].vantage}: nothing ties "
                "its clock, so its messages are left out of the common time line."
            )
    return found


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
                f"; as stamped, {early} of {packets} packets of two captures would arrive before they were "
                f"sent, by up to {max(c.worst_ns for c in checks) / 1000:.1f} us"
            )


def _failed(infos: Sequence[CaptureInfo], samples: Sequence[Samples], checks: Sequence[Check]) -> list[str]:
    return [
        f"The clocks of {infos[s.x].vantage} and {infos[s.y].vantage} do not agree: {c.early} of {c.packets} "
        f"packets arrive before they were sent, by up to {c.worst_ns / 1000:.1f} us."
        for s, c in zip(samples, checks, strict=True)
        if not c.passes
    ]
