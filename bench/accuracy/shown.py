"""What packets can show of true lateness, whoever reads them: a true collective in, bounds of ranks out.

A rank's entry shows in its first message, unless something else held that up: an input that it passes on, a
credit, its connection's turn (``held_ns`` of truth.json). Then it may have entered at any time before, and
the packets would be the same. So what can be shown of a rank is how much later it entered than the first
message of another rank, and nothing of a rank whose own first message was held up, or that sent none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpuflow.scoring.truth import TrueCollective


def shown_ns(collective: TrueCollective, slack_ns: float) -> dict[int, int]:
    """The least lateness of each endpoint that the packets prove; 0 where they prove none.

    ``slack_ns``: what held up a message by no more than that is a hand-over. All of it where the truth says
    nothing of what held messages up.
    """
    late = collective.lateness_ns
    if collective.held_ns is None:
        return late
    acted = {end: time + late[end] for end, time in collective.held_ns.items() if end in late}
    found = {}
    for end, own in late.items():
        others = [time for other, time in acted.items() if other != end]
        free = acted.get(end, own + slack_ns + 1) <= own + slack_ns
        found[end] = max(0, own - min(others)) if free and others else 0
    return found


def exact_shown(collective: TrueCollective, slack_ns: float) -> bool:
    """Whether the packets date every rank's entry, so that lateness can be exact."""
    held = collective.held_ns
    return held is None or all(held.get(end, slack_ns + 1) <= slack_ns for end in collective.enter_ns)
