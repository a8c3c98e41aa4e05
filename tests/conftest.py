"""Fixtures that several test modules use."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from longer import LONGER

# The same examples in every run, so that a change is judged by what it changed;
# HYPOTHESIS_PROFILE=default draws new ones.
settings.register_profile("fixed", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

CHECKOUT = Path(__file__).resolve().parents[1]
# Programs that tests start themselves, from packages that were unpacked, not installed (tools/setup.sh).
_UNPACKED = [
    str(folder)
    for pattern in ("*/usr/*bin", "*/usr/lib/openvswitch-switch")  # which is an alternative's there
    for folder in (CHECKOUT / ".cache/tools").glob(pattern)
]
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), *_UNPACKED])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long the parametrizations that ``LONGER`` names."""
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        test = test.rpartition("/")[2]
        if test in LONGER and LONGER[test][0].search(parameters.removesuffix("]")):
            item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have the collector leave alone what thousands of tests are made of: 10 % of a run was that."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, *gc.get_threshold()[1:])


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """The folder with the case of a scenario, written once for all tests: for reading only."""
    from dpuflow.synth.case import write_case
    from dpuflow.synth.scenario import parse_scenario

    folders: dict[str, Path] = {}

    def case(scenario: dict[str, Any]) -> Path:
        text = json.dumps(scenario, sort_keys=True)
        if text not in folders:
            folders[text] = tmp_path_factory.mktemp("case")
            write_case(parse_scenario(text, "test"), str(folders[text]))
        return folders[text]

    return case


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with more captures: DPUFLOW_SHARED, or ``shared`` beside the checkout."""
    named = os.environ.get("DPUFLOW_SHARED")
    path = Path(named) if named else CHECKOUT.parent / "shared"
    if not (path / "captures").is_dir():
        pytest.skip(f"no captures in {path}: set DPUFLOW_SHARED to the folder that has captures/")
    return path
