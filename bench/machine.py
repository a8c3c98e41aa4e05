"""What the benchmark ran on: processor, memory, kernel, versions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from bench.measure import ROOT


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return result.stdout.splitlines()[0].strip() if result.returncode == 0 and result.stdout else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def describe() -> dict[str, str | int | None]:
    """Names and versions; None for what is not there."""
    import dpuflow

    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": os.cpu_count(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "dpuflow": dpuflow.__version__,
        "commit": _first_line("git", "rev-parse", "--short", "HEAD"),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "scapy": _version("scapy"),
        "dpkt": _version("dpkt"),
        "tshark": _first_line("tshark", "--version"),
        "compiler": _first_line(os.environ.get("CC", "cc"), "--version"),
    }
