"""The list of parametrizations that only ``make test-all`` runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from longer import LONGER

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_every_row_names_a_parametrization_that_is_there() -> None:
    """One whose ids had changed named none: its tests were in the short run again."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    tests: dict[str, list[str]] = {}
    for line in listed.splitlines():
        test, _, parameters = line.partition("[")
        tests.setdefault(test.rpartition("/")[2], []).append(parameters.removesuffix("]"))
    rows = {
        test for test, (pattern, *_) in LONGER.items() if not any(map(pattern.search, tests.get(test, [])))
    }
    assert rows == set()
