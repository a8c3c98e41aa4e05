"""Twins of a case: the same packets as a worse capture would have kept them.

A twin maker takes a case's captures and a random generator (seeded by case and twin) and returns captures;
those it leaves alone are the very same objects. Sizes follow what capture systems do: stamps are late and
never early, and order within a queue, here the packets of one direction at one capture, holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from bench.robustness.cases import Capture

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.random import Generator
    from numpy.typing import NDArray

    from bench.robustness.cases import Subject

US: Final = 1_000
MS: Final = 1_000_000
Captures = tuple[Capture, ...]
Maker = Callable[[Captures, "Generator", "Collection[int]"], Captures]
"""Captures, generator, and the nodes of those that were made late."""


@dataclass(frozen=True)
class Twin:
    """A kind of twin. ``scatter_ns``: by how much every stamp may be off, and bounds with them."""

    name: str
    make: Maker
    about: str
    quick: bool = True
    """Whether it belongs to the reduced run."""
    scatter_ns: int = 0


@dataclass(frozen=True)
class Step:
    """A clock that was set while it was captured: from ``at_ns`` on (as it read then) by ``by_ns``."""

    vantage: str
    at_ns: int
    by_ns: int


def make_twin(subject: Subject, twin: Twin, late_nodes: Collection[int], seed: int = 0) -> Captures:
    """The captures of a twin; always the same ones for the same names and ``seed``."""
    generator = np.random.default_rng(zlib.crc32(f"{subject.name}/{twin.name}/{seed}".encode()))
    made = twin.make(subject.captures, generator, late_nodes)
    return tuple(capture for capture in made if len(capture.records))


def step_of(before: Captures, after: Captures) -> Step | None:
    """The clock step between a case's captures and those of its twin, None where there is none."""
    was = {capture.name: capture for capture in before}
    for capture in after:
        stamps, old = capture.records.stamp_ns, was[capture.name].records.stamp_ns
        if len(stamps) == len(old) > 0 and stamps[0] == old[0] and abs(int(stamps[-1] - old[-1])) >= MS:
            first = int(np.argmax(stamps != old))
            return Step(capture.vantage, int(old[first]), int(stamps[first] - old[first]))
    return None


def whole(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
    """Nothing is changed."""
    return captures


def late_stamps(share: float, low_us: float, high_us: float) -> Maker:
    """A share of the stamps of one direction, at least one, is late; what follows on its queue is pushed."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        made = []
        for capture in captures:
            records = capture.records
            rows = np.flatnonzero(capture.own == bool(generator.integers(2)))
            delay = generator.uniform(low_us * US, high_us * US, len(rows))
            hit = generator.random(len(rows)) < share
            hit[generator.integers(max(1, len(rows))) :][:1] = True
            delay[~hit] = 0
            made.append(replace(capture, records=records.stamped(_pushed(records.stamp_ns, rows, delay))))
        return tuple(made)

    return make


def jitter(within_us: float) -> Maker:
    """Every stamp is late by up to so much; each direction keeps its order."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        made = []
        for capture in captures:
            stamps, own = capture.records.stamp_ns, capture.own
            for rows in (np.flatnonzero(own), np.flatnonzero(~own)):
                stamps = _pushed(stamps, rows, generator.uniform(0, within_us * US, len(rows)))
            made.append(replace(capture, records=capture.records.stamped(stamps)))
        return tuple(made)

    return make


def _pushed(
    stamp_ns: NDArray[np.int64], rows: NDArray[np.int64], delay_ns: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Stamps with those of ``rows``, a queue, later by ``delay_ns``, and none earlier than one before it."""
    order = rows[np.argsort(stamp_ns[rows], kind="stable")]
    delays = np.zeros(len(stamp_ns), np.int64)
    delays[rows] = delay_ns.astype(np.int64)
    moved = stamp_ns.copy()
    moved[order] = np.maximum.accumulate(stamp_ns[order] + delays[order])
    return moved


def coarse(unit_ns: int) -> Maker:
    """Stamps in whole units."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        return tuple(
            replace(c, records=replace(c.records, stamp_ns=c.records.stamp_ns // unit_ns * unit_ns))
            for c in captures
        )

    return make


def lost(share: float, everywhere: bool) -> Maker:
    """A share of the packets was not captured, of one node or of all."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        node = _one(captures, generator)
        return tuple(
            replace(c, records=c.records.take(generator.random(len(c.records)) >= share))
            if everywhere or c.node == node
            else c
            for c in captures
        )

    return make


def bursts(length_ns: int, share: float, most: float) -> Maker:
    """Of one node all packets of some stretches of ``length_ns`` were not captured: ``share`` of its time, at
    least one stretch, and none longer than ``most`` of the capture. Each begins at some packet."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        node = _one(captures, generator)
        made = []
        for capture in captures:
            if capture.node == node:
                stamps = capture.records.stamp_ns
                span_ns = int(stamps.max() - stamps.min())
                hole_ns = min(length_ns, round(most * span_ns))
                count = max(1, round(share * span_ns / max(hole_ns, 1)))
                kept = np.ones(len(stamps), np.bool_)
                for begin in stamps[generator.integers(len(stamps), size=count)].tolist():
                    kept &= (stamps < begin) | (stamps >= begin + hole_ns)
                capture = replace(capture, records=capture.records.take(kept))
            made.append(capture)
        return tuple(made)

    return make


def single(place: int | None = None) -> Maker:
    """One packet was not captured: number ``place`` of all captures, counted through; None: any."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        sizes = [len(capture.records) for capture in captures]
        at = int(generator.integers(sum(sizes))) if place is None else place % sum(sizes)
        made = []
        for capture, size in zip(captures, sizes, strict=True):
            if 0 <= at < size:
                capture = replace(capture, records=capture.records.take(np.arange(size) != at))
            at -= size
            made.append(capture)
        return tuple(made)

    return make


def without(late_one: bool) -> Maker:
    """The captures of one node are missing: of one that was made late, or of another one."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        node = _one(captures, generator, lambda each: (each in late) == late_one)
        return tuple(capture for capture in captures if capture.node != node) or captures

    return make


def alone(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
    """The captures of one node only."""
    node = _one(captures, generator)
    return tuple(capture for capture in captures if capture.node == node)


def ragged(begins: bool, most_ns: int, most: float) -> Maker:
    """Captures begin (or end) at other times: up to ``most_ns``, and ``most`` of the capture, apart."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        made = []
        for capture in captures:
            stamps = capture.records.stamp_ns
            first, last = int(stamps.min()), int(stamps.max())
            off = round(generator.uniform(0, min(most_ns, most * (last - first))))
            kept = stamps >= first + off if begins else stamps <= last - off
            made.append(replace(capture, records=capture.records.take(kept)))
        return tuple(made)

    return make


def stepped(by_ns: int) -> Maker:
    """One clock is set forth or back in the middle of its capture."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        vantages = sorted({capture.vantage for capture in captures})
        chosen = vantages[generator.integers(len(vantages))]
        first = next(capture for capture in captures if capture.vantage == chosen).records.stamp_ns
        at_ns = int(first[round(generator.uniform(0.3, 0.7) * (len(first) - 1))])
        moved_ns = by_ns if generator.integers(2) else -by_ns
        made = []
        for capture in captures:
            if capture.vantage == chosen:
                stamps = capture.records.stamp_ns
                later = np.where(stamps >= at_ns, stamps + moved_ns, stamps)
                capture = replace(capture, records=replace(capture.records, stamp_ns=later))
            made.append(capture)
        return tuple(made)

    return make


def snapped(length: int) -> Maker:
    """No more than ``length`` bytes of each packet are kept."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        return tuple(replace(c, records=c.records.cut(length)) for c in captures)

    return make


def reordered(share: float, low_us: float, high_us: float) -> Maker:
    """A share of the packets took a longer way and came after later ones, yet before their receiver answers:
    before its next packet to where they came from."""

    def make(captures: Captures, generator: Generator, late: Collection[int]) -> Captures:
        made = []
        for capture in captures:
            records, own = capture.records, capture.own
            to, by = capture.ways
            rows = np.flatnonzero(~own & (generator.random(len(records)) < share))
            delay = generator.uniform(low_us * US, high_us * US, len(rows)).astype(np.int64)
            stamps = records.stamp_ns.copy()
            answers = {peer: np.sort(stamps[own & (to == peer)]) for peer in np.unique(by[rows]).tolist()}
            for row, late_ns in zip(rows.tolist(), delay.tolist(), strict=True):
                ahead, stamp = answers[int(by[row])], int(stamps[row])
                at = int(np.searchsorted(ahead, stamp, "right"))
                limit = int(ahead[at]) - 1 if at < len(ahead) else stamp + late_ns
                stamps[row] = max(stamp, min(stamp + late_ns, limit))
            made.append(replace(capture, records=records.stamped(stamps)))
        return tuple(made)

    return make


def _one(captures: Captures, generator: Generator, fits: Callable[[int], bool] = lambda node: True) -> int:
    """One of the nodes that fit; of all where none does, -1 where that leaves none to choose from."""
    nodes = [node for node in sorted({capture.node for capture in captures}) if fits(node)]
    return nodes[generator.integers(len(nodes))] if nodes else -1


TWINS: Final = (
    Twin("whole", whole, "as captured"),
    Twin("late-0.02%", late_stamps(0.0002, 2, 60), "0.02 % of stamps 2 to 60 us late, in one direction"),
    Twin("late-0.2%", late_stamps(0.002, 2, 60), "0.2 % of them"),
    Twin("late-2%", late_stamps(0.02, 2, 60), "2 % of them"),
    Twin("late-long", late_stamps(0.0002, 20, 200), "one stamp in 5,000 20 to 200 us late", quick=False),
    Twin("jitter-8us", jitter(8), "every stamp up to 8 us late", scatter_ns=8 * US),
    Twin("coarse-1us", coarse(US), "stamps of 1 us", scatter_ns=US),
    Twin("lost-0.1%-node", lost(0.001, False), "0.1 % of one node's packets not captured", quick=False),
    Twin("lost-1%-node", lost(0.01, False), "1 % of them", quick=False),
    Twin("lost-5%-node", lost(0.05, False), "5 % of them", quick=False),
    Twin("lost-0.1%-all", lost(0.001, True), "0.1 % of all nodes' packets not captured"),
    Twin("lost-1%-all", lost(0.01, True), "1 % of them"),
    Twin("lost-5%-all", lost(0.05, True), "5 % of them"),
    Twin("bursts-5ms", bursts(5 * MS, 0.02, 0.1), "bursts of 5 ms at one node not captured"),
    Twin("without-late", without(True), "no capture of a late node"),
    Twin("without-other", without(False), "no capture of another node"),
    Twin("alone", alone, "one node's capture only"),
    Twin("begin-apart", ragged(True, 1000 * MS, 0.1), "captures begin at other times"),
    Twin("end-apart", ragged(False, 1000 * MS, 0.1), "captures end at other times"),
    Twin("step-10ms", stepped(10 * MS), "one clock set by 10 ms in mid-capture"),
    Twin("step-1s", stepped(1000 * MS), "one clock set by 1 s in mid-capture", quick=False),
    Twin("snap-96", snapped(96), "96 bytes of each packet"),
    Twin("reordered", reordered(0.005, 2, 20), "0.5 % of arrivals 2 to 20 us after later ones"),
)  # fmt: skip
SINGLE: Final = "single"


def twin_named(name: str) -> Twin:
    """The twin of this name; ``single-N`` is without packet N. Raises KeyError."""
    if name.startswith(f"{SINGLE}-"):
        return Twin(name, single(int(name.removeprefix(f"{SINGLE}-"))), "one packet not captured")
    return {twin.name: twin for twin in TWINS}[name]
