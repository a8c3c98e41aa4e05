"""Fixtures that several test modules use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with more captures: DPUFLOW_SHARED, or ``shared`` beside the checkout."""
    named = os.environ.get("DPUFLOW_SHARED")
    path = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    if not (path / "captures").is_dir():
        pytest.skip(f"no captures in {path}: set DPUFLOW_SHARED to the folder that has captures/")
    return path
