"""Conversations that once were too much for the analysis, and some drawn at random (tools/fuzz.py: talks)."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from random import Random

import pytest
from conversations import captures

import dpuflow
from dpuflow.reports.json import json_lines
from dpuflow.reports.text import text_lines

FELL = (1011, 1137, 1534, 2668)
"""A pipeline without times; a loss held up for centuries; more packets marked than there were, in a sample; a
message that ended before it began on a clock in pieces."""


@pytest.mark.parametrize("seed", [*FELL, *range(12)])
def test_it_is_analysed_and_told(seed: int, tmp_path: Path) -> None:
    paths = []
    for number, raw in enumerate(captures(Random(f"talks:{seed}"))):
        paths.append(tmp_path / f"node{number}.pcapng")
        paths[-1].write_bytes(raw)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        result = dpuflow.analyze([str(path) for path in paths])
        assert list(json_lines(result))
        assert list(text_lines(result))
    assert time.process_time() - start < 20
