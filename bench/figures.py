"""The figures the benchmark states: what is compared with what, its target and its aim."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    Samples = dict[str, list[float]]  # name of a measurement -> one value a round


@dataclass(frozen=True)
class Figure:
    """A ratio (or a size) with the bound it should keep; ``upper``: smaller is better."""

    name: str
    what: str
    needs: tuple[str, ...]
    formula: Callable[..., float]
    unit: str = ""
    upper: bool = True
    target: float | None = None
    aim: float | None = None


@dataclass
class Stated:
    """A figure with what was measured: each round's value, and its median."""

    figure: Figure
    values: list[float] = field(default_factory=list)
    missing: str = ""

    @property
    def value(self) -> float | None:
        return median(self.values) if self.values else None

    def keeps(self, bound: float | None) -> bool | None:
        """Whether the median keeps ``bound``; None where there is no bound or no value."""
        if bound is None or self.value is None:
            return None
        return self.value <= bound if self.figure.upper else self.value >= bound

    def as_json(self) -> dict[str, Any]:
        f = self.figure
        return {
            "name": f.name, "what": f.what, "unit": f.unit, "values": self.values, "median": self.value,
            "bound": "at most" if f.upper else "at least", "target": f.target, "aim": f.aim,
            "target_met": self.keeps(f.target), "aim_met": self.keeps(f.aim), "missing": self.missing or None,
        }  # fmt: skip


def middle(values: list[float]) -> float:
    """The median."""
    return median(values)


def _over(a: float, b: float) -> float:
    return a / b


def _microseconds(ns: float) -> float:
    return ns / 1000


def _mebibytes(size: float) -> float:
    return size / 2**20


FIGURES: Final = (
    Figure(
        "parse / P",
        "reader, one thread, first pass over a file just written, to C over libpcap",
        ("parse_first", "P"),
        _over,
        target=1 / 6,
        aim=1 / 8,
    ),
    Figure(
        "scapy / parse",
        "scapy's PcapReader and RoCE layer to the reader",
        ("scapy", "parse_first"),
        _over,
        upper=False,
        target=20_000,
    ),
    Figure(
        "tshark / parse",
        "tshark -T fields to the reader",
        ("tshark", "parse_first"),
        _over,
        upper=False,
        target=1_300,
    ),
    Figure(
        "dpkt / parse",
        "dpkt's packet objects to the reader",
        ("dpkt_objects", "parse_first"),
        _over,
        upper=False,
        target=800,
    ),
    Figure(
        "dpkt struct / parse",
        "dpkt's reader and struct to the reader",
        ("dpkt_struct", "parse_first"),
        _over,
        upper=False,
    ),
    Figure("parse / S", "reader to C that sums the mapped bytes", ("parse_first", "S"), _over),
    Figure("pcapng / classic", "both read before", ("parse_pcapng", "parse_again"), _over, target=1.2),
    Figure(
        "two threads",
        "one thread's CPU time to that of the busier of two",
        ("parse_again", "parse_two_longest"),
        _over,
        upper=False,
        target=1.8,
    ),
    Figure("two threads, all CPU", "CPU of both to that of one", ("parse_two", "parse_again"), _over),
    Figure(
        "peak memory", "resident, reader on the capture", ("parse_peak",), _mebibytes, unit="MiB", target=200
    ),
    Figure(
        "peak memory, 5 x packets",
        "resident, reader on five times the packets (--big)",
        ("parse_peak_big",),
        _mebibytes,
        unit="MiB",
        target=200,
    ),
    Figure(
        "analyze / P, one thread",
        "the whole command on the capture, start included, to C over libpcap",
        ("analyze", "P"),
        _over,
        target=1.5,
        aim=0.75,
    ),
    Figure(
        "analyze / P, two threads",
        "the same with two threads, all their CPU time: where two processors share a core, that is more",
        ("analyze_two", "P"),
        _over,
    ),
    Figure(
        "after reading, a message",
        "all stages of the analysis after reading, imports included, one thread",
        ("after_reading",),
        _microseconds,
        unit="us",
        target=1,
    ),
    Figure("--help / python", "dpuflow --help to python -c pass", ("help", "python"), _over, target=4),
    Figure(
        "first result / tshark",
        "dpuflow analyze to tshark -T fields, 1,000 packets, kernels compiled",
        ("analyze_small", "tshark_small"),
        _over,
        target=4,
        aim=1,
    ),
)


def state(samples: Samples, missing: dict[str, str]) -> list[Stated]:
    """Every figure from the samples of the same run, round by round."""
    stated = []
    for figure in FIGURES:
        lacking = [name for name in figure.needs if not samples.get(name)]
        if lacking:
            stated.append(Stated(figure, missing=missing.get(lacking[0], "not measured")))
            continue
        rounds = zip(*(samples[name] for name in figure.needs), strict=False)
        stated.append(Stated(figure, [figure.formula(*values) for values in rounds]))
    return stated


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _bound(figure: Figure, value: float | None) -> str:
    return "-" if value is None else f"{'<=' if figure.upper else '>='} {_number(value)}"


def table(stated: list[Stated]) -> str:
    """Text for people: name, measured (and spread), target, aim, met."""
    rows = [("figure", "measured", "rounds", "target", "aim", "met")]
    for s in stated:
        f = s.figure
        spread = f"{_number(min(s.values))} .. {_number(max(s.values))}" if len(s.values) > 1 else ""
        if s.missing:
            verdict = "not measured"
        elif f.target is None:
            verdict = ""
        elif s.keeps(f.aim):
            verdict = "target and aim met"
        elif s.keeps(f.target):
            verdict = "target met" if f.aim is None else "target met, aim not met"
        else:
            verdict = "NOT MET"
        value = _number(s.value) + (f" {f.unit}" if f.unit and s.values else "")
        rows.append((f.name, value, spread, _bound(f, f.target), _bound(f, f.aim), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows
    )
