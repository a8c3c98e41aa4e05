"""The public face: the names that users may import, each where it says it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dpuflow

EXPECTED = {
    "Analysis",
    "CaptureError",
    "DpuflowError",
    "FormatError",
    "MissingError",
    "OptionError",
    "TruthError",
    "Vantage",
    "__version__",
    "analyze",
    "load",
    "read_rank_map",
    "score_case",
    "write_json",
    "write_text",
}


def test_the_list_is_as_agreed() -> None:
    assert set(dpuflow.__all__) == EXPECTED
    assert dir(dpuflow) == sorted(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(dpuflow, name)
    assert isinstance(value, str) or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dpuflow.nonsense


def test_the_changelog_speaks_of_this_version() -> None:
    text = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(dpuflow.__version__)}\b", text, re.MULTILINE)
