"""Captures whose packets were lost, doubled, delayed and altered, through the whole analysis.

The records are well formed, so that the stages after the reader see the damage. They may say that
they cannot tell, and nothing but a DpuflowError may be raised.
"""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path
from random import Random

import mutations
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dpuflow import analyze
from dpuflow.errors import DpuflowError
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines
from dpuflow.schema.tables import Vantage

pytestmark = pytest.mark.long

SETTINGS = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
TRACES = Path(__file__).resolve().parents[1] / "traces"


def through(folder: Path, files: list[bytes], clock: str) -> None:
    """The analysis and both reports."""
    vantages = []
    for number, raw in enumerate(files):
        path = folder / f"node{number}.pcap"
        path.write_bytes(raw)
        vantages.append(Vantage(f"node{number}", (str(path),)))
    with suppress(DpuflowError):
        result = analyze(vantages, clock=clock, threads=1)
        assert all(isinstance(line, str) for line in (*json_lines(result), *text_lines(result)))


def nodes_of(folder: Path, packets: int = 1500) -> list[bytes]:
    """The first packets of each node's capture."""
    return [
        mutations.head(gzip.decompress(p.read_bytes()), packets) for p in sorted(folder.glob("node?.pcap.gz"))
    ]


@pytest.fixture(scope="module")
def jobs(request) -> list[list[bytes]]:
    found = [nodes_of(folder) for folder in sorted(TRACES.iterdir()) if folder.is_dir()]
    assert all(found)
    return found


@settings(max_examples=60, **SETTINGS)
@example(seed=87, clock="auto")  # after a first fit nothing fits any more
@example(seed=343, clock="auto")  # what pairs say leaves a drift open
@example(seed=632, clock="auto")  # every pair of clocks contradicts its own fit: nothing to adjust
@given(seed=st.integers(0, 2**64 - 1), clock=st.sampled_from(("auto", "trust", "estimate")))
def test_bad_lives(tmp_path_factory, jobs, seed, clock):
    rng = Random(seed)
    files = []
    for raw in rng.choice(jobs):
        part = mutations.head(raw, rng.choice((20, 200, 1500)))
        part = mutations.shuffled_life(part, rng) if rng.random() < 0.8 else part
        files.append(mutations.mutate(part, rng, 24) if rng.random() < 0.1 else part)
    through(tmp_path_factory.mktemp("lives", numbered=True), files, clock)


@settings(max_examples=60, **SETTINGS)
@given(seed=st.integers(0, 2**64 - 1))
def test_random_captures(tmp_path_factory, seed):
    """Random packets mean nothing, and so must the result."""
    rng = Random(seed)
    files = [mutations.random_capture(rng, 100) for _ in range(rng.randrange(1, 4))]
    through(tmp_path_factory.mktemp("random", numbered=True), files, "auto")
