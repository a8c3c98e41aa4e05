"""The scenarios of ``draw`` with captures at some nodes only: one, two, half, all but one."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

from bench.accuracy.draw import PARTLY, draw

if TYPE_CHECKING:
    from dpuflow.synth.scenario import Scenario

HELD: Final = {"one": "one node", "two": "two nodes", "half": "half of the nodes", "most": "all but one"}
"""Nodes with a capture; each comes up in turn."""


STRIDE: Final = 5
"""Of so many scenarios one, so that few cover most kinds of operations: there are 17."""


def draw_partly(number: int, profile: str | None = None) -> Scenario:
    """Scenario ``number``: every ``STRIDE``-th of ``draw``, seen from some nodes."""
    scenario = draw(STRIDE * (number - PARTLY), profile)
    nodes = scenario.cluster.nodes
    held = list(HELD)[number % len(HELD)]
    count = {"one": 1, "two": 2, "half": (nodes + 1) // 2, "most": nodes - 1}[held]
    only = Random(f"accuracy/{number}/nodes").sample(range(nodes), min(count, nodes - 1))
    return replace(
        scenario,
        name=f"{number}-{scenario.name.split('-', 1)[1]}-{held}",
        observation=replace(scenario.observation, only=sorted(only)),
    )


def in_sight(scenario: Scenario, truth: dict[str, Any]) -> dict[str, Any]:
    """``truth`` without collectives of which no packet is in any capture: none of their nodes has one."""
    only, gpus = scenario.observation.only, scenario.cluster.gpus_per_node
    if only is None:
        return truth
    seen = [row for row in truth["collectives"] if any(int(rank) // gpus in only for rank in row["ranks"])]
    return {**truth, "collectives": seen}


def some(count: int) -> list[int]:
    """The numbers of a fifth as many such scenarios as ``count``."""
    return list(range(PARTLY, PARTLY + count // 5))
