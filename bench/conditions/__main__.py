"""``python -m bench.conditions``: conditions that scripted jobs have, against those that are found."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from bench.conditions.others import DRAWS
from bench.conditions.outcome import one
from bench.conditions.summary import asked, matrix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.conditions.others import Told
    from bench.conditions.outcome import Outcome


@click.command()
@click.option("--count", type=click.IntRange(min=1), default=300, show_default=True, help="Jobs.")
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first."
)
@click.option(
    "--others",
    type=click.IntRange(min=0),
    default=None,
    help="Further jobs of each kind (onset, shadow, inside, tokens); a tenth of --count if not given.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--cases", is_flag=True, help="Each job that is not as it should be.")
def main(count: int, first: int, others: int | None, jobs: int, cases: bool) -> None:
    """Draw jobs, analyse them, print what was found of what they have."""
    more = max(count // 10, 1) if others is None else others
    with ProcessPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(one, range(first, first + count)))
        work = [(kind, number) for kind in DRAWS for number in range(first, first + more)]
        told = list(pool.map(_other, work))
    for line in matrix(outcomes):
        print(line)
    print()
    for line in asked(outcomes, [each for _, _, some in told for each in some]):
        print(line)
    for line in _cases(outcomes, told) if cases else ():
        print(line)


def _other(which: tuple[str, int]) -> tuple[str, int, list[Told]]:
    kind, number = which
    told: Any = DRAWS[kind](number)
    return kind, number, told if isinstance(told, list) else [told]


def _cases(outcomes: list[Outcome], told: list[tuple[str, int, list[Told]]]) -> Iterator[str]:
    """Jobs that are not as they should be, with what was said of them."""
    for each in outcomes:
        names = {name for name, severity, _ in each.found if severity != "info"}
        if names - each.unsure != set(each.true):
            had = ", ".join(f"{name} ({100 * cost.share:.1f} %)" for name, cost in each.costs.items())
            yield f"{each.number}: has {had or 'nothing'}"
            yield from (f"    {said[:200]}" for said in each.said)
        for where, loud in each.partly.items():
            if loud - set(each.true) - each.unsure:
                yield f"{each.number}, captured at {where}: {', '.join(sorted(loud))}"
    for kind, number, some in told:
        for one_told in some:
            if one_told.word not in ("right", None):
                off = "" if one_told.steps is None else f", {one_told.steps:.0f} steps off"
                yield f"{kind} {number}: {one_told.name} {one_told.word}{off}"


if __name__ == "__main__":
    main()
