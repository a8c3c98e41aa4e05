"""The table of parametrizations that only ``make test-all`` runs names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from longer import LONGER


@pytest.mark.parametrize("test", LONGER)
def test_the_table_names_tests_of_this_folder(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert LONGER[test][1]
