"""The benchmark: writes the captures, runs dpuflow and its peers in turn, states the figures.

Everything is user + system CPU time, in rounds: one after the other within a round, so that a slow
minute of the machine meets them all. Before each round the capture is written anew, and dpuflow
reads it first. Peers that would take minutes read its first packets.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import figures, machine
from bench.generate import write_captures
from bench.measure import FailedError, compile_peer, dpuflow, probe, python, rewrite, run, slope_ns
from bench.peers import tshark_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SMALL: Final = 1_000
BIG_FACTOR: Final = 5
SHORT_RUNS: Final = 3  # of the commands that take milliseconds, a round

# Packets of the two sizes whose difference tells what a packet costs.
_SIZES: Final = {
    "scapy_fields": (2_000, 12_000),
    "dpkt_objects": (20_000, 100_000),
    "dpkt_struct": (20_000, 100_000),
    "tshark": (20_000, 120_000),
}


@dataclass
class Options:
    """What to run."""

    packets: int = 10_000_000
    rounds: int = 5
    seed: int = 1
    big: bool = False
    folder: Path | None = None  # where the captures go; the system's temporary folder without
    say: Callable[[str], None] = print


class _Bench:
    def __init__(self, options: Options, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.samples: figures.Samples = defaultdict(list)
        self.missing: dict[str, str] = {}
        self.notes: list[str] = []
        self.checks: dict[str, Any] = {}
        self.master = folder / "master.pcap"
        self.pcap, self.pcapng = folder / "capture.pcap", folder / "capture.pcapng"
        self.small, self.small_ng = folder / "small.pcap", folder / "small.pcapng"
        self.programs: dict[str, Path] = {}
        self.messages = 0

    @contextmanager
    def _measuring(self, *names: str) -> Iterator[None]:
        """Leave out what cannot be run: the first reason is kept and said."""
        try:
            yield
        except FailedError as error:
            for name in names:
                if name not in self.missing:
                    self.missing[name] = str(error)
            if str(error) not in self.notes:
                self.notes.append(str(error))
                self.options.say(f"left out: {', '.join(names)}: {error}")

    def _add(self, name: str, value: float) -> None:
        self.samples[name].append(value)

    def prepare(self) -> dict[str, Any]:
        """Write the captures, build the C peers; what the capture holds."""
        o = self.options
        o.say(f"writing {o.packets:,} packets, twice, to {self.folder}")
        written = write_captures(o.packets, pcap=self.master, pcapng=self.pcapng, seed=o.seed)
        self.messages = written.messages
        write_captures(SMALL, pcap=self.small, pcapng=self.small_ng, seed=o.seed)
        for name, program, libraries in (("P", "pcap_fields", ["-lpcap"]), ("S", "sum_bytes", [])):
            with self._measuring(name):
                self.programs[name] = compile_peer(program, self.folder, *libraries)
        for name, module in (("scapy_fields", "scapy"), ("dpkt_objects", "dpkt"), ("dpkt_struct", "dpkt")):
            if importlib.util.find_spec(module) is None:
                self.missing[name] = f"{module} is not installed"
        if shutil.which("tshark") is None:
            self.missing["tshark"] = self.missing["tshark_small"] = "tshark is not installed"
        return {
            "packets": written.packets,
            "messages": written.messages,
            "bytes": written.bytes,
            "seed": o.seed,
        }

    def check(self) -> None:
        """Untimed: all readers must have read the same. Compiles dpuflow's kernels if that is not done."""
        with self._measuring("analyze", "analyze_small"):
            run(dpuflow("analyze", str(self.small)), keep_output=False)
        rewrite(self.master, self.pcap)
        for name, path in (("P", self.pcap), ("P pcapng", self.pcapng), ("P small", self.small)):
            if "P" in self.programs:
                with self._measuring("P"):
                    packets, checksum, _, version = run([str(self.programs["P"]), str(path)]).output.split(
                        " ", 3
                    )
                    self.checks[name] = {"packets": int(packets), "checksum": checksum}
                    self.checks["libpcap"] = version.strip()
        for name in ("scapy_fields", "dpkt_objects", "dpkt_struct", "tshark_fields"):
            if name.removesuffix("_fields") not in self.missing and name not in self.missing:
                with self._measuring(name):
                    words = run(
                        python("-m", f"bench.peers.{name}", str(self.small), str(SMALL), "check")
                    ).output
                    packets, checksum = words.split()
                    self.checks[f"{name} small"] = {"packets": int(packets), "checksum": checksum}
        for name, path, threads in (
            ("dpuflow", self.pcap, 1),
            ("dpuflow two threads", self.pcap, 2),
            ("dpuflow pcapng", self.pcapng, 1),
        ):
            with self._measuring(f"check of {name}"):
                self.checks[name] = probe("check", path, threads)

    def disagreements(self) -> list[str]:
        """Sentences about readers whose results differ; none when all is well."""
        found = []
        small = self.checks.get("P small")
        for name, result in self.checks.items():
            reference = small if name.endswith(" small") else self.checks.get("P")
            if isinstance(result, dict) and reference and result["checksum"] != reference["checksum"]:
                found.append(f"{name} read other fields than P: {result} and {reference}")
        one, two = self.checks.get("dpuflow"), self.checks.get("dpuflow two threads")
        if one and two and one["digest"] != two["digest"]:
            found.append("two threads give other columns than one")
        return found

    def round(self) -> None:
        """One value of everything."""
        rewrite(self.master, self.pcap)
        small, small_ng = str(self.small), str(self.small_ng)
        with self._measuring("parse_first", "parse_again", "parse_peak", "parse_two", "parse_two_longest"):
            first = probe("parse", self.pcap, 1, small)
            self._add("parse_first", first["cpu_ns"] / first["packets"])
            self._add("parse_peak", first["peak_bytes"])
        for name in ("P", "S"):
            if name in self.programs:
                cpu = int(run([str(self.programs[name]), str(self.pcap)]).output.split()[2])
                self._add(name, cpu / self.options.packets)
        with self._measuring("parse_again", "parse_two", "parse_two_longest"):
            again, two = probe("parse", self.pcap, 1, small), probe("parse", self.pcap, 2, small)
            self._add("parse_again", again["cpu_ns"] / again["packets"])
            self._add("parse_two", two["cpu_ns"] / two["packets"])
            self._add("parse_two_longest", two["longest_ns"] / two["packets"])
        with self._measuring("parse_pcapng"):
            modern = probe("parse", self.pcapng, 1, small_ng)
            self._add("parse_pcapng", modern["cpu_ns"] / modern["packets"])
        for name, threads in (("analyze", "1"), ("analyze_two", "2")):
            with self._measuring(name):
                options = ["--json", str(self.folder / "result.json"), "--threads", threads]
                cpu = run(dpuflow("analyze", str(self.pcap), *options), keep_output=False).cpu_ns
                self._add(name, cpu / self.options.packets)
        with self._measuring("stages"):
            spent = probe("stages", self.pcap, 1)
            for name in ("messages", "peak_bytes"):
                spent.pop(name)
            for name, cpu in spent.items():
                self._add(f"stage {name}", cpu / self.messages)
            self._add("after_reading", (spent["analyze"] - spent["read_captures"]) / self.messages)
        self._short_commands()
        self._slow_peers()

    def _short_commands(self) -> None:
        commands = {
            "python": python("-c", "pass"),
            "help": dpuflow("--help"),
            "analyze_small": dpuflow("analyze", str(self.small)),
            "tshark_small": tshark_fields.command(str(self.small)),
        }
        for _ in range(SHORT_RUNS):
            for name, command in commands.items():
                if name not in self.missing:
                    with self._measuring(name):
                        self._add(name, run(command, keep_output=False).cpu_ns)

    def _slow_peers(self) -> None:
        path = str(self.pcap)
        for name, (few, many) in _SIZES.items():
            few, many = min(few, self.options.packets // 10), min(many, self.options.packets)
            if name in self.missing:
                continue

            def command(packets: int, name: str = name) -> list[str]:
                if name == "tshark":
                    return tshark_fields.command(path, packets)
                return python("-m", f"bench.peers.{name}", path, str(packets))

            with self._measuring(name):
                self._add(name.removesuffix("_fields"), slope_ns(command, few, many))

    def big(self) -> None:
        """Peak memory on a capture of five times the packets."""
        if "parse_peak" in self.missing:
            self.missing["parse_peak_big"] = self.missing["parse_peak"]
            return
        path = self.folder / "big.pcap"
        packets = self.options.packets * BIG_FACTOR
        self.options.say(f"writing {packets:,} packets")
        write_captures(packets, pcap=path, seed=self.options.seed)
        with self._measuring("parse_peak_big"):
            self._add("parse_peak_big", probe("parse", path, 1, str(self.small))["peak_bytes"])
        path.unlink()


def run_benchmark(options: Options) -> dict[str, Any]:
    """The whole benchmark: figures, samples, machine and checks, as one JSON document."""
    with tempfile.TemporaryDirectory(prefix="dpuflow-bench-", dir=options.folder) as folder:
        bench = _Bench(options, Path(folder))
        capture = bench.prepare()
        options.say("checking that all readers read the same (not timed)")
        bench.check()
        for index in range(options.rounds):
            options.say(f"round {index + 1} of {options.rounds}")
            bench.round()
        if options.big:
            bench.big()
        else:
            bench.missing["parse_peak_big"] = "asked for with --big"
    stated = figures.state(bench.samples, bench.missing)
    return {
        "capture": capture,
        "machine": {**machine.describe(), "libpcap": bench.checks.pop("libpcap", None)},
        "figures": [s.as_json() for s in stated],
        "table": figures.table(stated),
        "ns": dict(bench.samples),
        "checks": bench.checks,
        "disagreements": bench.disagreements(),
        "left_out": bench.missing,
    }


def text(result: dict[str, Any]) -> str:
    """The result for people."""
    c, m = result["capture"], result["machine"]
    absolute = [
        f"  {name:<18} {figures.middle(values):12,.1f}"
        for name, values in result["ns"].items()
        if "peak" not in name and name != "after_reading" and not name.startswith("stage")
    ]
    stages = [
        f"  {name.removeprefix('stage '):<18} {figures.middle(values):12,.1f}"
        for name, values in result["ns"].items()
        if name.startswith("stage")
    ]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, why in result["left_out"].items():
        reasons[why].append(name)
    lines = [
        f"{c['packets']:,} packets in {c['messages']:,} messages,"
        f" {c['bytes'] / c['packets']:.0f} bytes a record",
        ", ".join(f"{key} {value}" for key, value in m.items() if value is not None),
        "",
        result["table"],
        "",
        "CPU ns a packet, medians (of the whole process: python, help, *_small):",
        *absolute,
        *(["", "CPU ns a message, by stage of the analysis:", *stages] if stages else []),
        "",
        *(f"WRONG: {sentence}" for sentence in result["disagreements"]),
        f"Same checksum: {', '.join(result['checks'])}" if not result["disagreements"] else "",
        *(f"left out: {', '.join(names)}: {why}" for why, names in reasons.items()),
    ]
    return "\n".join(lines).rstrip()


def save(result: dict[str, Any], path: Path) -> None:
    """Write the result as JSON."""
    kept = {key: value for key, value in result.items() if key != "table"}
    path.write_text(json.dumps(kept, indent=1) + "\n")
