"""Results as tables and figures, and the notebook in docs/ that shows them."""

from __future__ import annotations

import ast
import builtins
import json
import pickle
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from scripted_results import job
from test_loading import RESULTS, text_of

import dpuflow
from dpuflow.errors import MissingError
from dpuflow.reports.html import page
from dpuflow.results import Analysis, Rows

DOCS = Path(__file__).resolve().parents[1] / "docs"
LISTS = [name for name in Analysis.__dataclass_fields__ if not name.endswith("_ns") and name != "messages"]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """A cell as a notebook runs it; its last expression's value."""
    *body, last = ast.parse(source).body
    shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module(body if shown else [*body, last], []), "cell", "exec"), names)
    return (
        eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if isinstance(last, ast.Expr)
        else None
    )


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(DOCS)
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    shown = [run_cell("".join(c["source"]), names) for c in cells if c["cell_type"] == "code"]
    result, rows, metadata, means, *figures, compared = shown
    assert "LATE: 10.77.0.3" in unescape(result._repr_html_())
    assert [address for address, verdict, *_ in rows if verdict == "late"] == ["10.77.0.3"]
    assert metadata[0][b"unit"] == b"ns"
    assert max(means, key=lambda row: row["lateness_ns_mean"])["endpoint"] == 2
    assert [len(each.page) > 5000 for each in figures] == [True] * 3
    assert {state for _, _, state in compared} <= {"no_difference", "too_few"}


@pytest.mark.parametrize("name", RESULTS)
def test_every_list_is_a_table(name: str) -> None:
    pytest.importorskip("pyarrow")
    result = RESULTS[name]()
    for key in LISTS:
        rows = getattr(result, key)
        assert isinstance(rows, Rows)
        assert rows.to_arrow().num_rows == len(rows)
    entries = result.entries.to_arrow()
    assert entries.num_rows == sum(len(each.ranks) for each in result.collectives)
    calls = {each.id: each for each in result.collectives}
    for row in entries.to_pylist():
        assert row["endpoint"] in [None, *(entry.endpoint for entry in calls[row["collective"]].ranks)]


def test_rows_are_lists_all_the_same() -> None:
    result = job(late_ms=5)
    rows = result.lateness
    assert rows == list(rows)
    kept = pickle.loads(pickle.dumps(result))
    assert kept.lateness == rows
    assert kept.lateness.name == "lateness"
    result.lateness = []
    assert isinstance(result.lateness, Rows)


def test_frames_keep_whole_numbers_whole() -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    result = job(late_ms=5)
    result.collectives[0].ranks[1].enter_ns = None
    frame = result.entries.to_pandas()
    assert frame["enter_ns"][0] == result.collectives[0].ranks[0].enter_ns
    assert frame["enter_ns"][1] is pandas.NA


def test_polars_frames() -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("polars")
    result = job(late_ms=5)
    assert result.entries.to_polars()["lateness_ns"][2] == result.collectives[0].ranks[2].lateness_ns


@pytest.mark.parametrize(
    ("package", "method"), [("pyarrow", "to_arrow"), ("pandas", "to_pandas"), ("polars", "to_polars")]
)
def test_what_is_not_installed_is_one_sentence(
    package: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingError, match=f"{method} needs {package}"):
        getattr(job().lateness, method)()


@pytest.mark.parametrize("name", RESULTS)
def test_figures_are_the_pages_own(name: str) -> None:
    result = RESULTS[name]()
    for figure in (result.plot.timeline(), result.plot.lateness(), result.plot.ring()):
        for drawn in re.findall(r"<svg.*?</svg>", figure.page):
            assert drawn in page(result)
    frame = result._repr_html_()
    assert frame.count("<iframe") == 1
    assert "<script" not in frame
    assert "Content-Security-Policy" in frame


def test_a_loaded_result_shows_the_same(tmp_path: Path) -> None:
    result = job(late_ms=5)
    (tmp_path / "result.json").write_text(text_of(result))
    assert dpuflow.load(str(tmp_path / "result.json"))._repr_html_() == result._repr_html_()
