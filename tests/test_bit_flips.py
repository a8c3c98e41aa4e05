"""A history of which one bit has flipped: never another verdict without a word."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dpuflow import Vantage, analyze
from dpuflow.errors import CaptureError, FormatError
from dpuflow.ingest import ingest
from dpuflow.schema.tables import CaptureTables
from dpuflow.store import columns as store
from dpuflow.store.segments import segment_name

CASE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"
TABLES = ("endpoints", "flows", "messages", "pauses", "setups", "members")


def segments(tables: CaptureTables, folder: Path, parts: int) -> list[str]:
    """The capture in as many files as an agent would write."""
    ends = np.linspace(0, len(tables.messages), parts + 1).astype(int)
    files = []
    for low, high in pairwise(ends):
        rows = tables.messages[low:high]
        first, last = int(rows["first_ns"].min()), int(rows["last_ns"].max())
        info = replace(tables.info, first_ns=first, last_ns=last)
        files.append(str(folder / segment_name("node0", first, last)))
        store.save_tables(replace(tables, messages=rows, info=info), files[-1])
    return files


@pytest.fixture
def history(tmp_path: Path) -> list[str]:
    return segments(ingest([str(CASE / "node0.pcap.gz")], "node0"), tmp_path, 4)


def test_no_flip_changes_a_verdict_silently(history: list[str]) -> None:
    """Of 400, 24 changed the verdict and 104 a figure, before files had checksums."""
    whole = ingest(list(history), "node0")
    random = np.random.default_rng(16)
    named = refused = left = 0
    for _ in range(400):
        file = Path(history[int(random.integers(len(history)))])
        data = bytearray(file.read_bytes())
        place, bit = int(random.integers(len(data))), 1 << int(random.integers(8))
        data[place] ^= bit
        good, _ = file.read_bytes(), file.write_bytes(data)
        try:
            found = ingest(list(history), "node0")
        except (CaptureError, FormatError) as error:
            named += str(file) in str(error)
            refused += 1
            continue
        finally:
            file.write_bytes(good)
        if found.info.complete:  # a verdict rests on these alone: the same rows, the same verdict
            assert all(np.array_equal(getattr(found, t), getattr(whole, t)) for t in TABLES)
            assert found.info == whole.info
        else:
            named += any(str(file) in warning for warning in found.info.warnings)
            left += 1
    assert named == refused + left
    assert named > 350  # the rest fell between two tables


@pytest.mark.parametrize("spared", [0, 1])
def test_all_damaged_files_are_named(history: list[str], spared: int) -> None:
    """Where none could be read, only the last one was."""
    for name in history[spared:]:
        data = bytearray(Path(name).read_bytes())
        data[30] ^= 1
        Path(name).write_bytes(data)
    vantage = Vantage("node0", tuple(history))
    if spared:
        result = analyze([vantage])
        told = " ".join(result.captures[0].warnings)
        assert not result.captures[0].complete
    else:
        with pytest.raises(FormatError) as error:
            analyze([vantage])
        told = str(error.value)
    assert all(name in told for name in history[spared:])
