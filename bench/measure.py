"""Runs programs and says what CPU time they took: user and system, from wait4."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_PEERS: Final = Path(__file__).resolve().parent / "peers"


class FailedError(Exception):
    """A program could not be run, or ended with an error; the text says which and why."""


@dataclass(frozen=True)
class Ran:
    """One run of a program."""

    cpu_ns: int
    output: str


def run(command: list[str], *, keep_output: bool = True) -> Ran:
    """Run ``command`` from the repository's root; raises FailedError unless it exits with 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else modules would be compiled in every run
    with tempfile.TemporaryFile("w+") as errors:
        stdout = subprocess.PIPE if keep_output else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=errors, text=True, cwd=ROOT, env=environment
            )
        except OSError as error:
            raise FailedError(f"{command[0]}: {error.strerror}") from None
        output = process.stdout.read() if process.stdout else ""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        complaint = errors.read().strip()
    if process.returncode:
        last = (complaint.splitlines() or ["no message"])[-1]
        raise FailedError(f"{' '.join(command[:4])} ...: exit status {process.returncode}: {last}")
    return Ran(round((usage.ru_utime + usage.ru_stime) * 1e9), output)


def python(*words: str) -> list[str]:
    """A command for this interpreter."""
    return [sys.executable, *words]


def dpuflow(*words: str) -> list[str]:
    """The ``dpuflow`` command as installed beside this interpreter, else as a module."""
    script = Path(sys.executable).parent / "dpuflow"
    return [str(script), *words] if script.exists() else python("-m", "dpuflow", *words)


def probe(what: str, path: Path, threads: int, *small: str) -> dict[str, Any]:
    """bench/probe.py in a fresh process."""
    result: dict[str, Any] = json.loads(
        run(python("-m", "bench.probe", what, str(path), str(threads), *small)).output
    )
    return result


def compile_peer(name: str, folder: Path, *libraries: str) -> Path:
    """Build bench/peers/NAME.c into ``folder`` as P and S were defined: -O3."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FailedError("no C compiler (cc)")
    program = folder / name
    run([compiler, "-O3", "-march=native", "-o", str(program), str(_PEERS / f"{name}.c"), *libraries])
    return program


def slope_ns(command: Any, few: int, many: int) -> float:
    """CPU ns per packet of ``command(packets)`` with start-up taken off: two sizes, their difference."""
    small, large = run(command(few), keep_output=False), run(command(many), keep_output=False)
    return (large.cpu_ns - small.cpu_ns) / (many - few)


def rewrite(source: Path, target: Path) -> None:
    """Copy by reading and writing, so that the target's pages are fresh (no shared extents)."""
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(4 << 20):
            writer.write(chunk)
