"""The fuzzers themselves: some seconds of each, so that they run when somebody wants hours of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpuflow.kernels import _ready

CHECKOUT = Path(__file__).resolve().parents[1]
RING = CHECKOUT / "doca_bindings" / "build" / "fuzz" / "ring"


def ran(*command: str, **environment: str) -> str:
    """What a command says that succeeds."""
    done = subprocess.run(
        command, cwd=CHECKOUT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inputs(said: str, name: str) -> int:
    """How many inputs were tried of a target."""
    (count,) = re.findall(rf"^{name}:.*?(\d+)(?: inputs| packets|$)", said, re.MULTILINE)
    return int(count)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mutants", "packets", "files", "columns", "requests", "texts"])
def test_seconds_of_every_quick_kind(kind: str) -> None:
    said = ran(sys.executable, "tools/fuzz.py", "--minutes", "0.05", "--seed", "5000000", "--kind", kind)
    assert inputs(said, kind) > 0
    assert said.rstrip().endswith("nothing found")


@pytest.mark.long
def test_seconds_of_the_c_targets() -> None:
    """With libFuzzer where clang has it, which found what the next test replays."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    kernels = {"KERNELS": str(_ready.library_path())} if _ready.library_path().exists() else {}
    said = ran("sh", "tools/fuzz.sh", "2", PYTHON=sys.executable, **kernels)
    assert inputs(said, "kernels") > 1000
    assert inputs(said, "ring") > 1000
    if "libFuzzer: not tried" not in said:
        assert inputs(said, "kernels, by libFuzzer") > 1000
        assert inputs(said, "ring, by libFuzzer") > 1000


@pytest.mark.parametrize("name", ["second_zero"])
def test_what_once_fell_in_the_ring(name: str) -> None:
    """A packet in the first second of a clock that was never set was taken for the ring's end, and lost."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    ran("make", "-s", "-C", "doca_bindings", "build/fuzz/ring")
    ran(str(RING), f"doca_bindings/simulator/fuzz/corpus/{name}")
