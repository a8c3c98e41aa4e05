"""``python -m bench.robustness``: twins of cases, how verdicts hold, what changed since a kept run."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import click

from bench.robustness.against import changes
from bench.robustness.cases import case_names, read_subject
from bench.robustness.play import play
from bench.robustness.table import lines
from bench.robustness.twins import SINGLE, TWINS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.robustness.judge import Outcome

SMALL: Final = 3
"""So many of the smallest cases lose every packet in turn (``--everywhere``)."""
AT_ONCE: Final = 250
"""Twins that one process makes of a case before it reads the next."""
Task = tuple[str, list[str]]


@click.command()
@click.option(
    "--cases", "patterns", multiple=True, metavar="GLOB", help="Only cases named so; may be repeated."
)
@click.option("--twins", "kinds", multiple=True, metavar="GLOB", help="Only twins named so; may be repeated.")
@click.option("--full", is_flag=True, help="All kinds of twins.")
@click.option(
    "--count", type=click.IntRange(min=0), default=0, show_default=True, help="Scenarios drawn besides."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Of the twins, and number of the first scenario.")  # fmt: skip
@click.option("--places", type=click.IntRange(min=0), default=2, show_default=True,
              help="Places of each case at which a single packet is missing.")  # fmt: skip
@click.option(
    "--everywhere",
    is_flag=True,
    help=f"A single packet missing at every place of the {SMALL} smallest cases.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Keep what became of each twin.")
@click.option(
    "--against", type=click.Path(path_type=Path, exists=True), help="Say what changed since this kept run."
)
def main(
    patterns: tuple[str, ...],
    kinds: tuple[str, ...],
    full: bool,
    count: int,
    seed: int,
    places: int,
    everywhere: bool,
    jobs: int,
    json_file: Path | None,
    against: Path | None,
) -> None:
    """Make twins of real and simulated cases, analyse them, and judge what is said by truth alone.

    The exit status says nothing about what was found.
    """
    before = json.loads(against.read_text(encoding="utf-8")) if against is not None else []
    named = [twin.name for twin in TWINS if full or twin.quick or kinds]
    chosen = [name for name in named if not kinds or any(fnmatch(name, kind) for kind in kinds)]
    singles = not kinds or any(fnmatch(f"{SINGLE}-0", kind) for kind in kinds)
    cases = case_names(patterns, count, seed)
    tasks: list[Task] = [(case, chosen + (_some(case, places, seed) if singles else [])) for case in cases]
    if everywhere:
        tasks += _everywhere(cases)
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs) as pool:
        every = pool.map if jobs > 1 else map
        results: Iterable[list[Outcome]] = every(partial(_one, seed=seed), tasks)
        for number, found in enumerate(results, 1):
            outcomes += found
            if json_file is not None:
                _keep(json_file, outcomes)
            if sys.stderr.isatty():
                print(f"\r{number}/{len(tasks)}", end="", file=sys.stderr)
    print("\n".join(lines(outcomes)))
    if against is not None:
        print("\n".join(changes(before, outcomes)))


def _keep(file: Path, outcomes: Sequence[Outcome]) -> None:
    rows = ",\n".join(json.dumps(asdict(outcome)) for outcome in outcomes)
    file.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


def _one(task: Task, seed: int) -> list[Outcome]:
    case, twins = task
    return play(case, twins, seed)


def _some(case: str, places: int, seed: int) -> list[str]:
    random = Random(f"{case}/{seed}")
    return [f"{SINGLE}-{random.randrange(1 << 30)}" for _ in range(places)]


def _everywhere(cases: Sequence[str]) -> list[Task]:
    sizes = []
    for case in cases:
        subject = read_subject(case)
        if subject.truth.get("collectives"):
            sizes.append((subject.packets, case))
    return [
        (case, [f"{SINGLE}-{place}" for place in range(first, min(first + AT_ONCE, packets))])
        for packets, case in sorted(sizes)[:SMALL]
        for first in range(0, packets, AT_ONCE)
    ]


if __name__ == "__main__":
    main()
