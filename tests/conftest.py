"""Fixtures that several test modules use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from longer import LONGER

# The same examples in every run, so that a change is judged by what it changed;
# HYPOTHESIS_PROFILE=default draws new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

CHECKOUT = Path(__file__).resolve().parents[1]
# Programs that tests start themselves, from packages that were unpacked, not installed (tools/setup.sh).
_UNPACKED = [str(folder) for folder in (CHECKOUT / ".cache/tools").glob("*/usr/*bin")]
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *_UNPACKED])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the parametrizations that ``LONGER`` names."""
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        test = test.rpartition("/")[2]
        if test in LONGER and LONGER[test][0].search(parameters.removesuffix("]")):
            item.add_marker("long")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with more captures: DPUFLOW_SHARED, or ``shared`` beside the checkout."""
    named = os.environ.get("DPUFLOW_SHARED")
    path = Path(named) if named else CHECKOUT.parent / "shared"
    if not (path / "captures").is_dir():
        pytest.skip(f"no captures in {path}: set DPUFLOW_SHARED to the folder that has captures/")
    return path
