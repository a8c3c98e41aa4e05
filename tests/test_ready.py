"""Kernels from a library built beforehand: the same results as Numba's own, and arguments checked."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpuflow.kernels import _ready
from dpuflow.schema.rows import ENDPOINT

BUILD = """
import sys
from pathlib import Path
import numpy as np
from dpuflow.kernels import acks, tables
from dpuflow.kernels._build import build
from dpuflow.schema.rows import ENDPOINT
folder = Path(sys.argv[1])
assert build(folder / "kernels.so")
index = np.full(64, -1, np.int32)
tables.refill_index(np.load(folder / "endpoints.npy").view(ENDPOINT.dtype), 20, index)
np.save(folder / "index.npy", index)
"""
ENDPOINTS, INDEX = _ready.from_dtype(ENDPOINT.dtype)[::1], _ready.i4[::1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("cc") or shutil.which("ld")):
        pytest.skip("no linker (cc, ld) to build a library with")
    folder = tmp_path_factory.mktemp("ready")
    endpoints = ENDPOINT.zeros(32)
    endpoints["addr_lo"] = np.random.default_rng(1).integers(0, 1 << 40, 32)
    np.save(folder / "endpoints.npy", endpoints.view(np.uint8))
    package = Path(_ready.__file__).resolve().parents[2]
    environment = {"PYTHONPATH": str(package), "DPUFLOW_NUMBA": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], check=True, env=environment)
    return folder


@pytest.fixture(scope="module")
def refill_index(folder: Path) -> _ready.Kernel:
    library = ctypes.CDLL(str(folder / "kernels.so"))
    name = "dpuflow_kernels_tables_refill_index"
    return _ready.Kernel(library, name, *_ready.void(ENDPOINTS, _ready.i8, INDEX))


def test_library_does_what_numba_does(folder: Path, refill_index: _ready.Kernel) -> None:
    endpoints = np.load(folder / "endpoints.npy").view(ENDPOINT.dtype)
    index = np.full(64, -1, np.int32)
    assert refill_index(endpoints, np.int64(20), index) is None
    assert sorted(index[index >= 0]) == list(range(20))
    assert list(index) == list(np.load(folder / "index.npy"))


def test_library_shows_kernels_only(folder: Path) -> None:
    library = (folder / "kernels.so").read_bytes()
    assert b"dpuflow_kernels_acks_replay" in library
    assert b"PyErr_" not in library


@pytest.mark.parametrize(
    "wrong",
    [
        np.full(64, -1, np.int64),
        np.full((64, 1), -1, np.int32),
        np.full(128, -1, np.int32)[::2],
        np.broadcast_to(np.int32(-1), 64),
    ],
    ids=["type", "dimensions", "stride", "read-only"],
)
def test_an_array_of_another_kind_is_refused(refill_index: _ready.Kernel, wrong: np.ndarray) -> None:
    with pytest.raises(TypeError, match="argument 2"):
        refill_index(ENDPOINT.zeros(4), 4, wrong)


def test_the_number_of_arguments_is_checked(refill_index: _ready.Kernel) -> None:
    with pytest.raises(TypeError, match="3 arguments, not 2"):
        refill_index(ENDPOINT.zeros(4), 4)


def test_numbers_go_over_as_words(folder: Path) -> None:
    library = ctypes.CDLL(str(folder / "kernels.so"))
    endpoints = ENDPOINT.zeros(8)
    kernel = _ready.Kernel(
        library, "dpuflow_kernels_tables_refill_index", *_ready.void(ENDPOINTS, _ready.i8, INDEX)
    )
    index = np.full(16, -1, np.int32)
    kernel(endpoints, 0, index)
    assert (index == -1).all()


def test_bound_arguments_are_checked_once_and_read_at_each_call(refill_index: _ready.Kernel) -> None:
    endpoints, index = ENDPOINT.zeros(8), np.full(16, -1, np.int32)
    call = _ready.bound(refill_index, endpoints, 3, index)
    endpoints["addr_lo"] = np.arange(8)
    call()
    assert np.sort(index).tolist() == [-1] * 13 + [0, 1, 2]
    with pytest.raises(TypeError, match="argument 2"):
        _ready.bound(refill_index, endpoints, 3, index.astype(np.int64))


SHIPPED = """
import sys
from pathlib import Path
from dpuflow.kernels import tables
from dpuflow.kernels._build import build
build(Path(sys.argv[1]))
"""


def test_a_library_for_any_processor_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    if not (shutil.which("cc") or shutil.which("ld")):
        pytest.skip("no linker (cc, ld) to build a library with")
    if platform.machine() not in _ready.BASELINE:
        pytest.skip(f"nothing is shipped for {platform.machine()}")
    package = Path(_ready.__file__).resolve().parents[2]
    name, _ = _ready.BASELINE[platform.machine()]
    environment = {"PYTHONPATH": str(package), "DPUFLOW_NUMBA": "1", "PATH": "/usr/bin:/bin"}
    environment |= {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}
    for number in "12":
        place, cache = str(tmp_path / f"{number}.so"), str(tmp_path / number)
        subprocess.run(
            [sys.executable, "-c", SHIPPED, place], check=True, env=environment | {"NUMBA_CACHE_DIR": cache}
        )
    assert (tmp_path / "1.so").read_bytes() == (tmp_path / "2.so").read_bytes()
    assert hasattr(ctypes.CDLL(str(tmp_path / "1.so")), "dpuflow_kernels_tables_refill_index")


def test_a_shipped_library_is_taken_where_the_processor_has_what_it_needs() -> None:
    if platform.machine() not in _ready.BASELINE:
        pytest.skip(f"nothing is shipped for {platform.machine()}")
    _, needed = _ready.BASELINE[platform.machine()]
    assert _ready.suits({*needed, "other"})
    assert not _ready.suits({*needed} - {min(needed)})


BESIDE = """
from dpuflow.kernels import _ready, tables
_ready.compile_beside("dpuflow.kernels.tables", "refill_index")
print(sum(tables.refill_index.dispatcher.stats.cache_hits.values()), len(_ready.beside))
"""


def test_what_another_process_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    package = Path(_ready.__file__).resolve().parents[2]
    environment = {"PYTHONPATH": str(package), "DPUFLOW_NUMBA": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], check=True, env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["1", "0"]
