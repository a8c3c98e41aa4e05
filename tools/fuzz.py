"""Feed broken captures to the readers and the stages after them, for as long as one likes.

    python tools/fuzz.py --minutes N --seed S [--kind mutants,packets,files,lives,stamps,talks,...]

mutants: good packets, each changed by itself, against the plain parser. packets: random ones. files:
damaged files through the reader (twice, plain and compressed) and the plain parser. lives: well-formed
captures of packets lost, doubled, late and altered, through the whole analysis. stamps: the same with stamps
that cannot be. talks: whole conversations, well formed for the wire, absurd in what they claim, in any
tunnels and options of pcapng, against the bound of memory. shapes: packets that strain one table each, of
any size and mix, against the same. columns: column files with flipped bits: what is loaded without a word is
what was saved. requests, texts: see ``fuzz_outside.py``. Each seed is one case, of one input or many; a case
that fails, crashes, hangs or takes too much memory is told by its kind and seed, and ``--only KIND:SEED``
runs it alone.

Good captures come from ``traces`` and, where they are, from DPUFLOW_SHARED or ``../shared``.
"""

from __future__ import annotations

import argparse
import faulthandler
import gzip
import itertools
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HOME = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HOME), str(HOME / "tests"), str(HOME / "tools")]

import conversations  # noqa: E402
import fuzz_outside  # noqa: E402
import mutants  # noqa: E402
import mutations  # noqa: E402
import naive_parse  # noqa: E402
import readings  # noqa: E402
import shapes  # noqa: E402

CASE_SECONDS = 60  # of CPU; a case takes well under one
STUCK_SECONDS = 900  # that nothing happens at all
MOST_MIB = 600  # resident; the reader's own buffers take some 20
MOST_FILE = 1 << 19
CHUNK = 400  # cases a process runs
SLOW = ("lives", "stamps", "talks", "shapes", "texts")  # a whole analysis each, or many inputs
MUTANTS = 2000  # packets of a capture
COLUMNS = ("endpoints", "flows", "messages", "pauses", "setups", "members")


class Finding(Exception):
    """A property that does not hold."""


@cache
def good_files() -> list[bytes]:
    """Small whole captures: public ones, the first packets of real ones."""
    shared = Path(os.environ.get("DPUFLOW_SHARED") or HOME.parent / "shared") / "captures"
    files = [p for end in ("pcap", "pcapng") for p in sorted(shared.glob(f"public/**/*.{end}"))]
    found = [raw for p in files if len(raw := p.read_bytes()) > 24]
    return found + [mutations.head(_unpacked(p), 60) for p in real_files()]


@cache
def real_files() -> list[Path]:
    """Captures of one node each."""
    shared = Path(os.environ.get("DPUFLOW_SHARED") or HOME.parent / "shared") / "captures"
    return sorted([*HOME.glob("traces/*/node0.pcap.gz"), *shared.glob("roce/*/node0.pcap.gz"),
                   *shared.glob("tcp/*/node0.pcap.gz")])  # fmt: skip


@cache
def _unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


@cache
def jobs() -> list[list[bytes]]:
    """For each job with captures of its nodes, the first packets of each."""
    folders = sorted({p.parent for p in real_files()})
    return [[mutations.head(_unpacked(p), 1500) for p in sorted(f.glob("node?.pcap.gz"))] for f in folders]


@cache
def heads() -> tuple[bytes, ...]:
    """The first packets of real captures."""
    return tuple(mutations.head(_unpacked(path), 60) for path in real_files())


def changed(rng: Random) -> int:
    """Good packets, each changed by itself: the reader against the plain parser, packet by packet."""
    raw = mutants.mutant_capture(rng, MUTANTS, heads())
    try:
        check(raw)
    except Finding as error:
        for number, record in enumerate(naive_parse.records(raw)):
            try:
                check(mutants.alone(record))
            except Finding as alone:
                frame = record.frame.hex()
                raise Finding(f"packet {number}, link {record.link}: {alone}: {frame}") from None
        raise error
    return MUTANTS


def packets(rng: Random) -> int:
    """Random packets: the reader against the plain parser."""
    count = rng.choice((1, 10, 60, 400))
    check(mutations.random_capture(rng, count))
    return count


def files(rng: Random) -> None:
    """A damaged file: whatever the reader gives agrees with the plain parser, and it tells of damage."""
    good = rng.choice(good_files()) if rng.random() < 0.7 else mutations.random_capture(rng)
    if len(good) < 25:
        return
    bad = mutations.mutate(good, rng)[:MOST_FILE]
    if len(bad) < 24:
        return
    reading = check(bad)
    untouched = mutations.first_difference(good, bad)
    kept = sum(1 for r in naive_parse.records(good) if r.end <= untouched)
    if reading.info.packets < kept:
        raise Finding(f"{reading.info.packets} packets, but {kept} were whole before the damage")
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder, "a.pcap"), Path(folder, "b.pcap.gz")
        plain.write_bytes(bad)
        packed.write_bytes(gzip.compress(bad, 1))
        for path in (plain, packed):
            again = readings.read_file(path)
            again.info.vantage = reading.info.vantage
            if not again.same(reading):
                raise Finding(f"read as {path.suffix}, it differs: {again.info} and {reading.info}")
        if rng.random() < 0.3:
            wrong = bytearray(gzip.compress(good, 1))
            for _ in range(rng.randrange(1, 4)):
                wrong[rng.randrange(3, len(wrong))] ^= 1 << rng.randrange(8)
            packed.write_bytes(wrong[: rng.choice((len(wrong), rng.randrange(3, len(wrong))))])
            through([[packed]])
        if rng.random() < 0.3:
            through([[plain]])


def lives(rng: Random) -> None:
    """All nodes' captures of a job, each with a bad life, through the analysis and the reports."""
    nodes = rng.choice(jobs())
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, raw in enumerate(nodes):
            part = mutations.head(raw, rng.choice((20, 200, 600, 1500)))
            if rng.random() < 0.8:
                part = mutations.shuffled_life(part, rng)
            if rng.random() < 0.1:
                part = mutations.mutate(part, rng, 24)
            path = Path(folder, f"node{number}.pcap")
            path.write_bytes(part)
            paths.append([path])
        if rng.random() < 0.2:
            paths = [[path for of_node in paths for path in of_node]]
        through(paths, rng.choice(("auto", "trust", "estimate")))


def stamps(rng: Random) -> None:
    """All nodes' captures of a job, a share of the stamps being of any time."""
    nodes = rng.choice(jobs())
    share, words = rng.choice((0.01, 0.3, 1.0)), (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1_700_000_000)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, raw in enumerate(nodes):
            data = bytearray(mutations.head(raw, rng.choice((20, 200, 600))))
            for record in naive_parse.records(bytes(data)):
                if rng.random() < share:
                    stamp = rng.choice((*words, rng.randrange(2**32)))
                    struct.pack_into("<I", data, record.start + rng.choice((0, 0, 0, 4)), stamp)
            path = Path(folder, f"node{number}.pcap")
            path.write_bytes(data)
            paths.append([path])
        through(paths, rng.choice(("auto", "trust", "estimate")))


def mixes(rng: Random) -> None:
    """Packets of some shapes, in turns, within the bound of memory."""
    names = rng.sample(sorted(shapes.SHAPES), 2)
    made = [shapes.SHAPES[name](rng.randrange(2000, 40_000), rng) for name in names]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*made))
    raw = shapes.capture((f for f in turns if f is not None), rng.choice((1, 1000, 10**6)))
    within_bound([raw], "a.pcap")


def talks(rng: Random) -> None:
    """Conversations that are followed as far as collectives, within the bound of memory."""
    within_bound(conversations.captures(rng), "a.pcapng")


def within_bound(vantages: list[bytes], name: str) -> None:
    """Captures through the whole analysis: what that may take is known in advance."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}-{name}") for number in range(len(vantages))]
        for path, raw in zip(paths, vantages, strict=True):
            path.write_bytes(raw)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        through([[path] for path in paths])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    size = sum(map(len, vantages))
    if grown > 64 * size + (300 << 20):
        raise Finding(f"{grown >> 20} MiB for {size} bytes")


@cache
def saved() -> tuple[bytes, dict[str, bytes]]:
    """A column file, and its tables."""
    from dpuflow.ingest import ingest
    from dpuflow.store.columns import load_tables, save_tables

    tables = ingest([str(real_files()[0])], "node0")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.dpuflow")
        save_tables(tables, str(path))
        kept = load_tables(str(path))  # of those that were saved, bytes between fields may be anything
        assert all(getattr(kept, name).tolist() == getattr(tables, name).tolist() for name in COLUMNS)
        return path.read_bytes(), {name: getattr(kept, name).tobytes() for name in COLUMNS}


def columns(rng: Random) -> None:
    """A column file with some bits flipped, bytes set, or its end gone."""
    from dpuflow.errors import DpuflowError
    from dpuflow.store.columns import load_tables

    raw, whole = saved()
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.dpuflow")
        path.write_bytes(data)
        try:
            found = load_tables(str(path))
        except DpuflowError:
            return
    if found.info.complete and any(getattr(found, name).tobytes() != whole[name] for name in COLUMNS):
        raise Finding("other rows, and not a word")


def check(raw: bytes) -> readings.Reading:
    """The reader's rows of ``raw`` against the plain parser's."""
    rows, whole = naive_parse.read(raw)
    reading = readings.read_bytes(raw)
    found = readings.problems(reading) + readings.differences(reading, rows)
    if whole != reading.info.complete:
        found.append(f"complete is {reading.info.complete}, expected {whole} ({reading.info.warnings})")
    if found:
        raise Finding("; ".join(found[:4]))
    return reading


def through(vantages: list[list[Path]], clock: str = "auto") -> None:
    """The whole analysis and both reports; a DpuflowError is an answer too."""
    from dpuflow import analyze
    from dpuflow.errors import DpuflowError
    from dpuflow.reports.json import json_lines
    from dpuflow.reports.text import text_lines
    from dpuflow.schema.tables import Vantage

    named = [Vantage(f"node{n}", tuple(str(p) for p in paths)) for n, paths in enumerate(vantages)]
    try:
        result = analyze(named, clock=clock, threads=1)
        for lines in (json_lines, text_lines):
            for _ in lines(result):
                pass
    except DpuflowError:
        pass


KINDS: dict[str, Callable[[Random], int | None]] = {
    "mutants": changed, "packets": packets, "files": files, "lives": lives, "stamps": stamps, "talks": talks,
    "shapes": mixes, "columns": columns, "requests": fuzz_outside.requests, "texts": fuzz_outside.texts,
}  # fmt: skip


def one(kind: str, seed: int) -> int:
    """One case; of how many inputs. Raises whatever goes wrong, and what NumPy only warns of."""
    warnings.simplefilter("error", RuntimeWarning)
    return KINDS[kind](Random(f"{kind}:{seed}")) or 1


def work(kind: str, first: int, last: int, mark: Path) -> int:
    """A run of cases in this process; each failure on a line of its own."""
    failed = inputs = 0
    faulthandler.register(signal.SIGPROF, chain=True)  # says where it was, and ends the process
    for seed in range(first, last):
        mark.write_text(f"{seed} {inputs}")
        signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        try:
            inputs += one(kind, seed)
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"{kind}:{seed}: {type(error).__name__} at {where.filename}:{where.lineno}: {error}",
                flush=True,
            )
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MIB << 10:
            print(f"{kind}:{seed}: more than {MOST_MIB} MiB", flush=True)
            return 1
    mark.write_text(f"{last - 1} {inputs}")
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()
    return failed


def main() -> int:
    """Share the time among the kinds, in processes of their own, so that a crash ends none but its own."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=5.0)
    options.add_argument("--seed", type=int, default=0, help="number of the first case")
    options.add_argument("--kind", default=",".join(KINDS), help="which kinds, with commas between")
    options.add_argument("--only", metavar="KIND:SEED", help="run this case alone")
    options.add_argument("--work", nargs=4, metavar=("KIND", "FIRST", "LAST", "MARK"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.only:
        kind, seed = given.only.split(":")
        one(kind, int(seed))
        return 0
    if given.work:
        kind, first, last, mark = given.work
        return min(work(kind, int(first), int(last), Path(mark)), 100)

    from dpuflow.kernels import warm

    warm()  # compiling is no case's time
    until, kinds = time.monotonic() + 60 * given.minutes, given.kind.split(",")
    at, done, failed = dict.fromkeys(kinds, given.seed), dict.fromkeys(kinds, 0), 0
    inputs = dict.fromkeys(kinds, 0)
    spent = dict.fromkeys(kinds, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        while time.monotonic() < until:
            kind = min(kinds, key=lambda k: spent[k])
            count = CHUNK // 8 if kind in SLOW else CHUNK
            started = _cpu_s()
            command = [
                sys.executable,
                __file__,
                "--work",
                kind,
                str(at[kind]),
                str(at[kind] + count),
                str(mark),
            ]
            status = subprocess.run(command, check=False).returncode
            spent[kind] += _cpu_s() - started
            reached, judged = map(int, mark.read_text().split())
            inputs[kind] += judged
            if status != 0:
                failed += 1
            if status < 0 or reached + 1 < at[kind] + count:
                print(f"{kind}:{reached}: the process ended with status {status}", flush=True)
            done[kind] += reached + 1 - at[kind]
            at[kind] = reached + 1
    for kind in kinds:
        print(
            f"{kind}: {inputs[kind]} inputs in {done[kind]} cases from seed {given.seed},"
            f" {spent[kind]:.0f} s of CPU, {inputs[kind] / max(spent[kind], 1e-3):.0f} inputs a second"
        )
    told = "nothing found" if not failed else "see above"
    print(f"{sum(inputs.values())} inputs, {_cpu_s():.0f} s of CPU; {told}")
    return 1 if failed else 0


def _cpu_s() -> float:
    """What the processes with cases have used in all."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
