"""Tables: nothing is lost on the way through them, and what the docs ask of them is answered."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_results import T0, job, messages
from test_html import PAGES
from test_loading import rich_job, text_of

from bench.reports import scripted
from dpuflow.cli import run
from dpuflow.errors import MissingError
from dpuflow.loading import load
from dpuflow.message_list import Message
from dpuflow.reports import parquet
from dpuflow.reports.json import write_json
from dpuflow.reports.meanings import MEANINGS, meaning_of
from dpuflow.reports.parquet import read_tables, write_parquet
from dpuflow.results import RankEntry

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow writes the tables: make setup installs it")
TRACES = Path(__file__).resolve().parents[1] / "traces"
QUERIES = Path(__file__).resolve().parents[1] / "docs" / "queries.md"


@pytest.mark.parametrize("name", PAGES)
def test_tables_hold_the_whole_result(name: str, tmp_path: Path) -> None:
    result = PAGES[name]()
    write_parquet(result, str(tmp_path))
    assert text_of(read_tables(str(tmp_path))) == text_of(result)


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBERS = st.none() | st.integers(-(2**62), 2**62)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(whys=st.lists(st.tuples(TEXTS, NUMBERS, NUMBERS), max_size=6), limits=st.lists(TEXTS), label=TEXTS)
def test_any_text_and_number_comes_back(
    whys: list[tuple[str, int | None, int | None]], limits: list[str], label: str, tmp_path: Path
) -> None:
    result = rich_job()
    result.limits, result.endpoints[0].label = limits, label
    result.collectives[3].ranks = [
        RankEntry(1, enter, None, late, 5, "exact", "none", why, None) for why, enter, late in whys
    ]
    result.captures[0].skipped = {label: 3}
    write_parquet(result, str(tmp_path))
    assert text_of(read_tables(str(tmp_path))) == text_of(result)


def test_columns_say_what_they_are(tmp_path: Path) -> None:
    write_parquet(rich_job(), str(tmp_path))
    schema = pq.read_schema(tmp_path / "entries.parquet")
    lateness = schema.field("lateness_ns").metadata
    assert lateness[b"unit"] == b"ns"
    assert lateness[b"meaning"].startswith(b"how much later than the earliest rank")
    assert schema.field("bound").metadata[b"tokens"] == b"exact at_most at_least unobservable"
    assert schema.metadata[b"dpuflow.schema"] == b"dpuflow.analysis/1"
    assert b"unobservable" in schema.metadata[b"meaning"]
    kept = pq.ParquetFile(tmp_path / "entries.parquet").metadata.row_group(0).column(1)
    assert kept.compression == "ZSTD"


def test_tables_are_small(tmp_path: Path) -> None:
    result = job(late_ms=5, iterations=3000)
    write_parquet(result, str(tmp_path / "tables"))
    size = sum(file.stat().st_size for file in (tmp_path / "tables").iterdir())
    assert size * 20 < len(text_of(result))


def test_times_that_vary_by_chance_are_small_too(tmp_path: Path) -> None:
    result = scripted(800, 64)
    write_parquet(result, str(tmp_path))
    assert (tmp_path / "entries.parquet").stat().st_size * 20 < len(text_of(result))


def test_encodings_are_those_that_all_readers_have(tmp_path: Path) -> None:
    """DuckDB before 2.0, the newest for Python 3.10, reads BYTE_STREAM_SPLIT of floating point alone."""
    write_parquet(rich_job(), str(tmp_path))
    for file in tmp_path.glob("*.parquet"):
        group = pq.ParquetFile(file).metadata.row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        assert not [c for c in columns if "BYTE_STREAM_SPLIT" in c.encodings and c.physical_type != "DOUBLE"]


def test_a_job_has_one_place_in_a_data_set(tmp_path: Path) -> None:
    for _ in range(2):
        write_parquet(job(late_ms=5), str(tmp_path), append=True)
    (part,) = (tmp_path / "lateness").glob("*/*/*")
    assert part.parts[-3:-1][0] == "day=2026-11-21"
    assert part.parent.name.startswith("job=20261121T")
    later = job(late_ms=5)
    later.start_ns = T0 + 5 * 10**9
    write_parquet(later, str(tmp_path), append=True)
    assert len(list((tmp_path / "lateness").glob("*/*/*"))) == 2
    assert text_of(read_tables_of(tmp_path, "20261121T085603")) == text_of(job(late_ms=5))


def read_tables_of(folder: Path, job_name: str) -> parquet.Analysis:
    flat = folder / "flat"
    flat.mkdir()
    for file in folder.glob(f"*/*/job={job_name}*/*.parquet"):
        (flat / file.name).write_bytes(file.read_bytes())
    return read_tables(str(flat))


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    write_json(rich_job(), str(file))
    (tmp_path / "taken").write_text("")
    assert run(["report", str(file), "--parquet", str(tmp_path / "taken")]) == 1
    assert capsys.readouterr().err == f"dpuflow: {tmp_path}/taken: File exists\n"
    result = rich_job()
    result.flows[0].bytes = 10**30
    with pytest.raises(OverflowError):
        write_parquet(result, str(tmp_path / "tables"))
    assert not (tmp_path / "tables").exists()
    (tmp_path / "here").mkdir()
    with pytest.raises(OverflowError):
        write_parquet(result, str(tmp_path / "here"))
    assert list((tmp_path / "here").iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tables = tmp_path / "result.json", tmp_path / "tables"
    write_json(rich_job(), str(file))
    real, left = pq.write_table, [3]

    def full(table: object, target: str, **how: object) -> None:
        """As Arrow says it."""
        real(table, target, **how)
        left[0] -= 1
        if not left[0]:
            detail = "Error writing bytes to file. Detail: [errno 28] No space left on device"
            raise OSError(errno.ENOSPC, detail)

    monkeypatch.setattr(pq, "write_table", full)
    assert run(["report", str(file), "--parquet", str(tables)]) == 1
    assert capsys.readouterr().err == f"dpuflow: {tables}: No space left on device\n"
    assert not tables.exists()


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingError, match=r"pip install '\.\[reports\]'"):
        write_parquet(rich_job(), str(tmp_path / "tables"))
    assert not (tmp_path / "tables").exists()


def test_append_is_an_option(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_json(rich_job(), str(file))
    assert run(["report", str(file), "--parquet", str(tmp_path / "set"), "--append"]) == 0
    assert run(["report", str(file), "--parquet", str(tmp_path / "tables")]) == 0
    assert list((tmp_path / "set" / "entries").glob("day=*/job=*/entries.parquet"))
    assert (tmp_path / "tables" / "entries.parquet").exists()
    assert json.loads(text_of(read_tables(str(tmp_path / "tables"))))


def test_messages_are_a_table_beside_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(file) for file in sorted((TRACES / "gloo-allreduce-n4").glob("node*.pcap.gz"))]
    command = [
        "analyze",
        *files,
        "--quiet",
        "--json",
        str(tmp_path / "r.json"),
        "--parquet",
        str(tmp_path / "t"),
    ]
    assert run([*command, "--messages"]) == 0
    result = load(str(tmp_path / "r.json"))
    table = pq.read_table(tmp_path / "t" / "messages.parquet")
    rows = table.to_pylist()
    assert len(rows) == sum(flow.messages for flow in result.flows)
    assert {row["role"] for row in rows} == {"control", "burst", "grant", "offer", "data"}
    assert [row["id"] for row in rows] == list(range(len(rows)))
    assert all(result.flows[row["flow"]].dst == row["dst"] for row in rows)
    assert table.schema.field("sent_ns").metadata[b"unit"] == b"ns"
    assert b"offer grant" in table.schema.field("role").metadata[b"tokens"]
    assert text_of(read_tables(str(tmp_path / "t"))) == text_of(result)
    assert run(command) == 0  # the same folder, without them: none of another run stay
    assert not (tmp_path / "t" / "messages.parquet").exists()
    assert run(["analyze", *files, "--messages"]) == 2
    assert "--messages goes with --parquet or --perfetto" in capsys.readouterr().err


def test_files_say_whose_they_are(tmp_path: Path) -> None:
    write_parquet(job(), str(tmp_path), append=True)
    (part,) = (tmp_path / "flows").glob("*/*/flows.parquet")
    said = pq.read_schema(part).metadata
    assert f"job={said[b'dpuflow.job'].decode()}" == part.parent.name
    assert said[b"dpuflow.vantages"] == b"node0 node1 node2 node3"
    assert said[b"dpuflow.version"]


@pytest.fixture(scope="module")
def data_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four jobs of two days; rank 2 is late in three of them, and one flow of node1 loses packets."""
    folder = tmp_path_factory.mktemp("jobs")
    for number, late_ms in enumerate((10.0, 10.0, 6.0, 0.0)):
        result = job(late_ms=late_ms)
        assert result.start_ns is not None
        result.start_ns += number * 13 * 3600 * 10**9
        for row in result.lateness:
            row.address = result.endpoints[row.endpoint].address
        for each in result.flows:
            each.retransmitted *= 10
        result.messages = messages([(result.start_ns, result.start_ns + 9)] * 3)
        write_parquet(result, str(folder), append=True)
    return folder


def queries() -> list[tuple[str, str]]:
    text = QUERIES.read_text()
    return re.findall(r"^## (.+?)\n.*?```sql\n(.*?)```", text, re.DOTALL | re.MULTILINE)


def test_ten_questions_are_asked() -> None:
    assert len(queries()) >= 10


@pytest.mark.parametrize(
    ("title", "sql"), queries(), ids=lambda text: text[:30] if "\n" not in text else "sql"
)
def test_duckdb_answers(title: str, sql: str, data_set: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb runs docs/queries.md: make setup installs it")
    rows = duckdb.connect().execute(sql.replace("jobs/", f"{data_set}/")).fetchall()
    assert rows, title
    if title.startswith(("Which ranks", "Which node")):
        assert "10.0.0.3" in rows[0]


@pytest.mark.parametrize(
    ("title", "sql"), queries(), ids=lambda text: text[:30] if "\n" not in text else "sql"
)
def test_clickhouse_answers_the_same(title: str, sql: str, data_set: Path) -> None:
    """chdb is ClickHouse's engine; what docs/queries.md says to write for it."""
    chdb = pytest.importorskip(
        "chdb", reason="chdb (pip install chdb) runs docs/queries.md as ClickHouse does"
    )
    duckdb = pytest.importorskip("duckdb", reason="duckdb runs docs/queries.md: make setup installs it")
    mine = re.sub(r"(?:read_parquet\()?('jobs/[^']*')(?:, hive_partitioning = true\))?", r"file(\1)", sql)
    mine = re.sub(r"quantile_cont\((.+?), ([\d.]+)\)", r"quantile(\2)(\1)", mine)
    mine = f"SET use_hive_partitioning = 1; {mine.replace('jobs/', f'{data_set}/')}"
    rows = [json.loads(line) for line in str(chdb.query(mine, "JSONCompactEachRow")).splitlines()]
    there = duckdb.connect().execute(sql.replace("jobs/", f"{data_set}/")).fetchall()
    assert len(rows) == len(there), title
    if "LIMIT 20" not in sql:  # of those that are alike, which come first is nobody's promise
        first = [
            sorted(r[0] if isinstance(r[0], str) else float(r[0]) for r in each) for each in (rows, there)
        ]
        assert first[0] == first[1]


@pytest.mark.parametrize("engine", ["pandas", "polars"])
def test_data_frames_answer(engine: str, data_set: Path) -> None:
    pytest.importorskip(
        engine, reason=f"{engine} (pip install {engine}) reads the tables as docs/queries.md says"
    )
    (code,) = re.findall(rf"```python\n(import {engine}\n.*?)```", QUERIES.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code.replace("jobs/", f"{data_set}/"), names)
    answer: object = names["answer"]
    found = answer.reset_index().to_dict("records") if engine == "pandas" else answer.to_dicts()  # type: ignore[attr-defined]
    assert found == [{"address": "10.0.0.3", "jobs": 3, "surest": 0.97}]


def test_each_column_says_what_it_means(tmp_path: Path) -> None:
    result = job(late_ms=5)
    for name, table in parquet.tables_of(result, "hall 3"):
        assert table.schema.metadata[b"dpuflow.site"] == b"hall 3"
        for field in table.schema:
            assert name == field.name or (field.metadata or {}).get(b"meaning"), f"{name}.{field.name}"
    assert all(meaning_of("messages", column) for column in get_type_hints(Message))
    described = {(table, column) for table, columns in MEANINGS.items() for column in columns}
    tables = dict(parquet.tables_of(result))
    known = {(name, column) for name, table in tables.items() for column in table.schema.names}
    assert {each for each in described if each[0] in tables} <= known, "columns that there are not"
