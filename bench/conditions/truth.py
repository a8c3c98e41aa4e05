"""What a condition cost a job: against the same job, with the same seed, without it.

Machines take other times in each run. So the job without the condition is played several times, its machines'
times drawn anew (``machine.draw``), and a cost is known as far as these runs differ.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from bench.conditions.draw import OF_REQUESTS, STOPS, draw
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

if TYPE_CHECKING:
    from bench.conditions.draw import Drawn

NEGLIGIBLE = 0.01
"""Of the job's time, or its requests': what costs less is nothing to tell of."""
LARGE = 0.25
"""What costs so much is no chance: such a job is played without its condition once."""
DRAWS = 5
"""Runs without a condition that say what is chance."""
SURELY = 2.78
"""Standard errors that so few runs take to be sure (Student's t, 95 %)."""


class Cost(NamedTuple):
    """What a condition took, a share of the time, and the standard error of that."""

    share: float
    error: float = 0.0

    @property
    def there(self) -> bool:
        """It took something, beyond chance."""
        return self.share >= NEGLIGIBLE and self.share > SURELY * self.error

    @property
    def unsure(self) -> bool:
        """Whether it took anything is chance."""
        return not self.there and self.share + SURELY * self.error >= NEGLIGIBLE


def play(scenario: dict[str, Any], folder: str) -> None:
    """Write its captures and truth."""
    write_case(parse_scenario(yaml.safe_dump(scenario), scenario["name"]), folder)


def costs(number: int, drawn: Drawn, folder: str) -> dict[str, Cost]:
    """By condition: of the job's time, or of the time that requests were open, what it took.

    Each is taken away alone. What is played in ``folder`` is the job with all of them.
    """
    with_all = lasted(folder)
    found = {}
    for name, ranks in drawn.conditions.items():
        which = int(name in OF_REQUESTS)
        if name in STOPS:  # all of the time since a job stands still
            found[name] = Cost(1.0)
        elif name == "early_stop_skew":  # which costs the others nothing
            found[name] = Cost(_idle(folder, ranks))
        else:
            found[name] = _cost(number, name, with_all[which], which)
    return found


def _idle(folder: str, ranks: list[int]) -> float:
    """What share of the job's time these ranks have nothing more to do."""
    rows = json.loads((Path(folder) / "truth.json").read_text())["collectives"]
    begin = min(min(filter(None, row["enter_ns"])) for row in rows)
    ends = [(max(filter(None, row["leave_ns"])), row["ranks"]) for row in rows]
    end, last = max(ns for ns, _ in ends), max(ns for ns, of in ends if of == ranks)
    return float((end - last) / (end - begin))


def _cost(number: int, name: str, with_it: float, which: int) -> Cost:
    """``with_it``: what the job lasted; ``which`` of the figures of ``lasted`` that is."""
    without: list[float] = []
    for again in range(DRAWS):
        scenario = draw(number, without=name).scenario
        scenario["machine"]["draw"] = again
        with tempfile.TemporaryDirectory() as folder:
            play(scenario, folder)
            without.append(lasted(folder)[which])
        if not again and 1 - without[0] / with_it >= LARGE:
            return Cost(1 - without[0] / with_it)
    error = stdev(without) * (1 + 1 / DRAWS) ** 0.5 / with_it
    return Cost(max(0.0, 1 - mean(without) / with_it), error)


def waited(folder: str) -> dict[str, list[int]]:
    """Conditions that a job has by its nature: decoding that waits for caches a hundredth of the time.

    What a rank does between the last page and its next collective is its own work.
    """
    truth = json.loads((Path(folder) / "truth.json").read_text())
    waits = [
        (each["to"], max(each["end_ns"] - max(each["start_ns"], each["wanted_ns"]), 0))
        for each in truth["transfers"]
    ]
    ends = sorted({end for end, _ in waits})
    span, _ = lasted(folder)
    if sum(ns for _, ns in waits) < NEGLIGIBLE * span * max(len(ends), 1):
        return {}
    return {"kv_transfer_bottleneck": ends}


def lasted(folder: str) -> tuple[float, float]:
    """How long the job took, and how long one of its requests was open (mean), ns."""
    truth = json.loads((Path(folder) / "truth.json").read_text())
    times = [
        (min(filter(None, each["enter_ns"])), max(filter(None, each["leave_ns"])))
        for each in truth["collectives"]
        if any(each["enter_ns"]) and any(each["leave_ns"])
    ]
    times += [(each["start_ns"], each["end_ns"]) for each in truth["transfers"]]
    job = max(end for _, end in times) - min(begin for begin, _ in times) if times else 0
    requests = [each["last_ns"] - each["sent_ns"] for each in truth.get("requests", [])]
    return float(job), sum(requests) / max(len(requests), 1)
