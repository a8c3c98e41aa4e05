"""The table of parametrizations that only ``make test-all`` runs names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from longer import LONGER


@pytest.mark.parametrize("test", LONGER)
def test_the_table_names_tests_of_this_folder(test: str) -> None:
    file, _, name = test.partition("::")
    tests = Path(__file__).parent
    found = [
        path.read_text(encoding="utf-8") for path in (tests / file, tests / "root" / file) if path.exists()
    ]
    assert [text for text in found if f"def {name}(" in text]
    assert LONGER[test][1]
