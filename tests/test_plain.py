"""Kernels as plain Python: the same bytes as compiled; and when they are run so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Event
from types import ModuleType

import numpy as np
import pytest

from dpuflow import Vantage
from dpuflow.cli import compiling
from dpuflow.keeping import in_processes
from dpuflow.kernels import _plain, _ready, parse, when_compiling
from dpuflow.schema.rows import ENDPOINT

CHECKOUT = Path(__file__).resolve().parents[1]
FIRST_ANSWER_S = 10
"""CPU that an analysis without compiled kernels may take; about 3 s on a machine of 2026."""
JOBS = sorted(path for path in (CHECKOUT / "traces").iterdir() if path.is_dir())


def analysed(tmp_path: Path, captures: list[Path], **environment: str) -> bytes:
    told = tmp_path / "result.json"
    subprocess.run(
        [sys.executable, "-m", "dpuflow", "analyze", "--quiet", *map(str, captures), "--json", str(told)],
        check=True, cwd=CHECKOUT, env=os.environ | environment,
    )  # fmt: skip
    return told.read_bytes()


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_plain_python_says_what_compiled_kernels_say(job: Path, tmp_path: Path) -> None:
    captures = sorted(job.glob("node*.pcap.gz"))[:2]  # kernels are the same however many there are
    before = os.times()
    plain = analysed(tmp_path, captures, DPUFLOW_PLAIN="1")
    after = os.times()
    took_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert took_s < FIRST_ANSWER_S
    assert plain == analysed(tmp_path, captures)


def test_plain_python_simulates_what_compiled_kernels_simulate(tmp_path: Path) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(
        "name: small\nobservation: {compress: false, snaplen: 0}\ncluster: {nodes: 2}\n"
        "job: {kind: loop, iterations: 1, ops: [{op: all_reduce, bytes: 64KiB}]}\n"
    )
    found = []
    for name, plain in (("plain", {"DPUFLOW_PLAIN": "1"}), ("compiled", {})):
        command = [sys.executable, "-m", "dpuflow", "synth", str(scenario), "-o", str(tmp_path / name)]
        subprocess.run(command, check=True, cwd=CHECKOUT, env=os.environ | plain)
        found.append([(tmp_path / name / f"node{node}.pcap").read_bytes() for node in (0, 1)])
    assert found[0] == found[1]
    assert all(found[0])


def test_a_field_takes_the_low_bits_of_a_number_and_its_sign() -> None:
    rows = np.zeros(2, np.dtype([("a", "i4"), ("b", "u2"), ("c", "i8")], align=True))
    row = _plain.view(rows)[1]
    row.a, row.b, row.c = (1 << 31) + 5, -1, -(1 << 63) - 1
    assert rows[1].tolist() == (-(1 << 31) + 5, 0xFFFF, (1 << 63) - 1)
    assert (row.a, row.b, row.c) == rows[1].tolist()


def test_an_index_beyond_the_rows_is_an_error() -> None:
    with pytest.raises(IndexError):
        _plain.view(ENDPOINT.zeros(2))[2]


BACKGROUND = """
import subprocess, sys
from pathlib import Path
from dpuflow.kernels import _ready

folder = Path(sys.argv[1])
_ready.LIBRARY = None
_ready.library_path = lambda: folder / "kernels.so"
_ready._WARM = f"import time; open({str(folder / 'began')!r}, 'a').write('x'); time.sleep(60)"
started = []
begin = subprocess.Popen
subprocess.Popen = lambda *a, **k: started.append(begin(*a, **k)) or started[-1]
print(_ready.run_plainly(), _ready.run_plainly(), len(started))
from dpuflow.kernels import streams
print(type(streams.spans).__module__, "numba" in sys.modules)
started[0].kill()
"""


def test_one_process_compiles_in_the_background(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BACKGROUND, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=CHECKOUT,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["True True 1", "dpuflow.kernels._plain False"]


SWITCH = """
import sys
import numpy as np
from dpuflow.kernels import _ready

there = _ready.LIBRARY
_ready.LIBRARY, _ready.PLAIN, _ready.arrived = None, True, lambda: _ready.LIBRARY is not None
from dpuflow.kernels import tables
from dpuflow.schema.rows import ENDPOINT

def filled():
    index = np.full(64, -1, np.int32)
    tables.refill_index(ENDPOINT.zeros(32), 20, index)
    return index.tolist()

plain = filled()
assert tables.refill_index.compiled is None
_ready.LIBRARY = there
print(filled() == plain, tables.refill_index.compiled is not None)
"""


def test_once_compiled_kernels_are_there_they_go_on() -> None:
    if _ready.LIBRARY is None:
        pytest.skip("no library of compiled kernels here")
    done = subprocess.run(
        [sys.executable, "-c", SWITCH], capture_output=True, text=True, check=True, cwd=CHECKOUT
    )
    assert done.stdout.split() == ["True", "True"]


def test_only_small_files_and_pipes_are_read_without_compiled_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(_ready, "undecided", lambda: True)
    monkeypatch.setattr(_ready, "run_plainly", lambda: asked.append(1) or True)
    small, large, pipe = tmp_path / "a.pcap.gz", tmp_path / "b.pcap.gz", tmp_path / "c"
    small.write_bytes(bytes(1000))
    with open(large, "wb") as file:
        file.truncate(compiling.SMALL_BYTES // compiling.PACKED)
    os.mkfifo(pipe)
    for files, expected in (
        ([small], 1),
        ([small, large], 0),
        ([small, pipe], 1),
        ([large], 1),
        ([pipe, large, small], 0),
    ):
        asked.clear()
        said = None if expected == 0 else lambda *_: None
        compiling.mind_compiling([Vantage("n", tuple(map(str, files)))], 1, said)
        assert len(asked) == expected, files
    assert capsys.readouterr().err == f"{compiling.PLAINLY}\n" * 3


def test_large_captures_say_what_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_ready, "undecided", lambda: True)
    monkeypatch.setattr(_ready, "compile_beside", lambda *_: None)
    large = tmp_path / "a.pcap"
    with open(large, "wb") as file:
        file.truncate(compiling.SMALL_BYTES + 1)
    shown: list[tuple[str, int, int]] = []
    compiling.mind_compiling([Vantage("n", str(large))], 1, lambda *told: shown.append(told))
    for seconds in (1.2, 12.7):
        for tell in when_compiling:
            tell(3, seconds)
    stage = "compiling kernel 3 (once for this processor), seconds"
    assert shown == [(stage, 1, 0), (stage, 12, 0)]
    assert capsys.readouterr().err == f"{compiling.LARGE}\n"
    compiling.mind_compiling([Vantage("n", str(large))], 2, lambda *told: None)
    assert not when_compiling
    assert capsys.readouterr().err == f"{compiling.LARGE}\n", "workers compile by themselves, in silence"
    compiling.mind_compiling([Vantage("n", str(large))], 1, None)
    for tell in when_compiling:
        tell(3, 1.2)
    assert capsys.readouterr().err == "", "--quiet"


def test_who_waits_for_a_kernel_hears_of_it_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpuflow.kernels import _numba

    monkeypatch.setattr(_numba, "SLOW_S", 0.01)
    monkeypatch.setattr(_numba, "LONG_S", 0)
    done, heard = Event(), []

    def tell(number: int, seconds: float) -> None:
        heard.append((number, seconds))
        if len(heard) == 3:
            done.set()

    monkeypatch.setattr(_numba, "when_compiling", [tell])
    _numba._watch(done)
    assert [number for number, _ in heard] == [1, 1, 1]
    assert heard == sorted(heard)


def runs_plainly() -> bool:
    return _ready.PLAIN


@pytest.mark.parametrize("plain", [True, False])
def test_worker_processes_run_kernels_as_the_one_that_asks(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ready, "PLAIN", plain)
    assert list(in_processes(runs_plainly, [()], 1)) == [plain]


def test_threads_that_begin_together_wait_until_a_module_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures are read by threads, and the first kernel of each fills the same module."""
    translated = _plain._translated

    def slowly(value: object) -> object:
        time.sleep(0.001)
        return translated(value)

    monkeypatch.setattr(_plain, "_translated", slowly)
    monkeypatch.setattr(_plain, "_copy_of", cache(lambda name: ModuleType(name)))
    name = parse.__name__
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: set(vars(_plain._module(name))), range(4)))
    assert all(names == found[0] for names in found)
    assert {each for each in vars(parse) if each[:2] != "__"} <= found[0]


def test_a_pipe_is_answered_before_kernels_are_compiled(tmp_path: Path) -> None:
    """A checkout in which nothing is compiled yet: its own copy of the package."""
    package = tmp_path / "dpuflow"
    shutil.copytree(CHECKOUT / "dpuflow", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    capture = CHECKOUT / "traces" / "gloo-allreduce-n4" / "node2.pcap.gz"
    hold = "from dpuflow.kernels import _ready; _ready._WARM = 'pass'; from dpuflow.cli import main; main()"
    before = os.times()
    with open(capture, "rb") as file:
        done = subprocess.run(
            [sys.executable, "-c", hold, "analyze", "-"], stdin=file, capture_output=True, text=True,
            check=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
    after = os.times()
    assert done.stdout.startswith("LATE: 10.77.0.3.")
    assert compiling.PLAINLY in done.stderr
    assert after.children_user - before.children_user < FIRST_ANSWER_S
