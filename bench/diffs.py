"""How often ``dpuflow diff`` claims a change where there is none, and finds one where there is.

In: a small scripted job, with as many seeds as asked for, twice: alike, and with a GPU that computes 5 %
longer. Out: how many of all pairs of alike jobs give a claim, and in how many of the others the slow rank is
named as worse. Compute varies from step to step as it does in dpuflow's own simulator; real jobs vary in more
ways.

    python -m bench.diffs --seeds 10 --steps 20
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import yaml

from dpuflow import Analysis, analyze
from dpuflow.differences import Change, compare
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import read_scenario

SLOW_RANK: Final = 2
FACTOR: Final = 1.05


def scenario(seed: int, steps: int, jitter_us: float, slow: bool) -> dict[str, Any]:
    """Ring all_reduces of four nodes."""
    loop = {"kind": "loop", "iterations": steps, "compute_us": 2000, "jitter_us": jitter_us,
            "ops": [{"op": "all_reduce", "bytes": "256KiB"}]}  # fmt: skip
    faults = [{"kind": "slow_gpu", "rank": SLOW_RANK, "factor": FACTOR}] if slow else []
    return {"name": "diffs", "seed": seed, "job": loop, "faults": faults}


def played(what: dict[str, Any]) -> Analysis:
    """What dpuflow says of it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scenario.yaml")
        file.write_text(yaml.safe_dump(what))
        write_case(read_scenario(str(file)), f"{folder}/case")
        return analyze(sorted(Path(folder, "case").glob("*.pcap.gz")))


def claims(before: Analysis, after: Analysis) -> list[Change]:
    """What is said to have changed."""
    return [each for each in compare(before, after).changes if each.state in ("worse", "better")]


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jitter-us", type=float, default=20.0)
    chosen = parser.parse_args()
    alike, slow = (
        [played(scenario(seed, chosen.steps, chosen.jitter_us, late)) for seed in range(1, chosen.seeds + 1)]
        for late in (False, True)
    )
    pairs = [claims(*pair) for pair in combinations(alike, 2)]
    print(f"alike: {sum(map(bool, pairs))} of {len(pairs)} diffs claim a change")
    for each in [change for pair in pairs for change in pair][:5]:
        print(f"    {each.kind} of {each.name}: {each.low_ns} to {each.high_ns} ns")
    named = [
        any(
            c.kind == "lateness" and c.name == f"rank {SLOW_RANK}" and c.state == "worse"
            for c in claims(*pair)
        )
        for pair in product(alike, slow)
    ]
    print(f"a rank slower by {FACTOR - 1:.0%}: named in {sum(named)} of {len(named)} diffs")
    steps = [
        any(c.kind == "step" and c.state == "worse" for c in claims(*pair)) for pair in product(alike, slow)
    ]
    print(f"    and the step said to be slower in {sum(steps)}")


if __name__ == "__main__":
    main()
