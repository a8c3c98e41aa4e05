"""How the cost of each stage grows: with messages, flows, ranks and captures. No peers, no targets of time.

A job is made in several sizes (``shapes``, ``traffic``), each analysed in a process of its own. CPU time of
a stage is given for a message; the exponent is the slope of log(CPU) over log(messages), 1 where a stage is
linear, fitted where it takes LEAST_NS at least. Where messages stay the same it is over the flows, so 0.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from bench import shapes
from bench.generate import write_captures
from bench.measure import FailedError, python, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LEAST_NS: Final = 30_000_000
"""Less says more of kernels' loading and of chance than of growth."""
STAGES: Final = (
    "read_captures", "join", "build_exchanges", "build_collectives", "build_entries", "infer", "assemble",
    "build_findings",
)  # fmt: skip
"""As ``probe`` names them; what is left of the whole analysis is "rest"."""


class Series(NamedTuple):
    """Sizes of one job: what grows, its values, and what writes the captures of one."""

    name: str
    grows: str
    values: tuple[int, ...]
    make: Callable[[int, Path], list[Path]]


def _mirror(packets: int, folder: Path) -> list[Path]:
    write_captures(packets, pcap=folder / "mirror.pcap")
    return [folder / "mirror.pcap"]


def _flows(messages: int) -> Callable[[int, Path], list[Path]]:
    def make(flows: int, folder: Path) -> list[Path]:
        return [shapes.write(shapes.writes(messages, flows), folder / "writes.pcap")]

    return make


def _ring(ranks: int, folder: Path) -> list[Path]:
    return [shapes.write(shapes.rings(ranks, ranks, 3), folder / "ring.pcap")]


def _rings(ranks: int, folder: Path) -> list[Path]:
    return [shapes.write(shapes.rings(ranks, 16, 6), folder / "rings.pcap")]


def _nodes(nodes: int, folder: Path) -> list[Path]:
    return shapes.write_nodes(shapes.rings(nodes, 8, 30), nodes, folder)


def series(scale: int) -> tuple[Series, ...]:
    """What is measured; ``scale`` divides the sizes."""

    def sizes(*values: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(max(value // scale, 16) for value in values))

    return (
        Series("mirror port, 64 ranks", "packets", sizes(500_000, 2_000_000, 8_000_000), _mirror),
        Series(
            f"{250_000 // scale:,} WRITEs that nothing orders", "flows", sizes(100, 1_000, 10_000, 100_000),
            _flows(250_000 // scale),
        ),
        Series("one ring over all ranks, 3 times", "ranks", sizes(64, 128, 256, 512), _ring),
        Series("rings of 16, 6 times", "ranks", sizes(64, 256, 1024, 4096), _rings),
        Series("rings of 8, 30 times, a capture a node", "captures", sizes(16, 64, 256), _nodes),
    )  # fmt: skip


def measure(each: Series, rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Of each size its value, and the least of some rounds: messages, peak of memory, CPU ns by stage."""
    sizes = []
    with tempfile.TemporaryDirectory(prefix="dpuflow-scale-") as name:
        small = shapes.write(shapes.rings(8, 8, 3), Path(name) / "small.pcap")
        made = [each.make(value, _folder(name, value)) for value in each.values]
        found: list[list[dict[str, int]]] = [[] for _ in made]
        for number in range(rounds):
            for value, paths, spent in zip(each.values, made, found, strict=True):
                say(f"{each.name}: {value:,} {each.grows}, round {number + 1} of {rounds}")
                command = python("-m", "bench.probe", "stages", ",".join(map(str, paths)), "1", str(small))
                try:
                    spent.append(json.loads(run(command).output))
                except FailedError as error:
                    say(str(error))
        for value, spent in zip(each.values, found, strict=True):
            if spent:
                least = {stage: min(one[stage] for one in spent) for stage in spent[0]}
                sizes.append({"value": value, **least})
    for size in sizes:
        size["rest"] = size["analyze"] - sum(size[stage] for stage in STAGES)
    return sizes


def _folder(parent: str, value: int) -> Path:
    folder = Path(parent) / str(value)
    folder.mkdir(exist_ok=True)
    return folder


def exponent(over: Sequence[float], cost: Sequence[float], least: float = LEAST_NS) -> float | None:
    """Slope of log(cost) over log(size) where the cost is ``least`` at least; None for fewer than two."""
    kept = [(x, y) for x, y in zip(over, cost, strict=True) if y >= least]
    if len({x for x, _ in kept}) < 2:
        return None
    x, y = np.log(np.array(kept, float).T)
    return float(np.polyfit(x, y, 1)[0])


def table(each: Series, sizes: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a stage, CPU us a message at each size, and the exponent."""
    messages = [size["messages"] for size in sizes]
    still = max(messages) < 2 * min(messages)
    over = [size["value"] for size in sizes] if still else messages
    head = [each.name, *(f"{size['value']:,} {each.grows}" for size in sizes), "exponent"]
    rows = [["messages", *(f"{count:,}" for count in messages), ""]]
    for stage in (*STAGES, "rest", "analyze"):
        cost = [size[stage] for size in sizes]
        grown = exponent(over, cost)
        each_us = [f"{ns / 1e3 / count:.2f}" for ns, count in zip(cost, messages, strict=True)]
        rows.append([stage, *each_us, "" if grown is None else f"{grown:.2f}"])
    peaks = [f"{size['peak_bytes'] / count:,.0f}" for size, count in zip(sizes, messages, strict=True)]
    rows.append(["peak memory, B", *peaks, ""])
    lines = ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def run_scale(scale: int, rounds: int, pick: str, say: Callable[[str], None]) -> Iterator[str]:
    """The tables of all jobs whose name has ``pick`` in it, one after the other."""
    return (table(each, measure(each, rounds, say)) for each in series(scale) if pick in each.name)
