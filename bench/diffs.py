"""How often ``dpuflow diff`` claims a change where there is none, and finds one where there is.

In: a small scripted job three times for each pair asked for, with other seeds: twice alike, and with a GPU
that computes 5 % longer. Out: how many pairs of alike jobs give a claim, and in how many of the others the
slow rank is named as worse. No job is in two pairs: one odd job would count again and again. Compute varies
from step to step as it does in dpuflow's own simulator; real jobs vary in more ways.

    python -m bench.diffs --pairs 100 --steps 20
"""

from __future__ import annotations

import argparse
import tempfile
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
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jitter-us", type=float, default=20.0)
    chosen = parser.parse_args()
    alike: list[list[Change]] = []
    slow: list[list[Change]] = []
    for pair in range(chosen.pairs):
        first, second, late = (
            played(scenario(3 * pair + turn, chosen.steps, chosen.jitter_us, turn == 3)) for turn in (1, 2, 3)
        )
        alike.append(claims(first, second))
        slow.append(claims(first, late))
    print(f"alike: {sum(map(bool, alike))} of {chosen.pairs} diffs claim a change")
    for each in [change for found in alike for change in found][:5]:
        print(f"    {each.kind} of {each.name}: {each.low_ns} to {each.high_ns} ns")
    named = sum(any(_worse(c, "lateness") and c.name == f"rank {SLOW_RANK}" for c in found) for found in slow)
    print(f"a rank slower by {FACTOR - 1:.0%}: named in {named} of {chosen.pairs} diffs")
    steps = sum(any(_worse(c, "step") for c in found) for found in slow)
    print(f"    and the step said to be slower in {steps}")


def _worse(change: Change, kind: str) -> bool:
    return change.kind == kind and change.state == "worse"


if __name__ == "__main__":
    main()
