"""The corpus that ``tools/corpus.py`` made, replayed: the reader against the plain parser."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from naive_parse import read, records
from readings import differences, problems, read_bytes

from dpuflow.schema.rows import Kind

FILES = sorted((Path(__file__).parent / "corpus").glob("*.pcap"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_each_packet_is_read_as_the_plain_parser_reads_it(path: Path) -> None:
    """All in turn, and each alone in front of memory that may not be touched."""
    raw = path.read_bytes()
    for part in (raw, *map(mutants.alone, records(raw))):
        rows, whole = read(part)
        reading = read_bytes(part)
        assert problems(reading) == []
        assert differences(reading, rows) == []
        assert reading.info.complete == whole


def test_the_corpus_reaches_every_kind_and_is_small() -> None:
    seen = {row.kind for path in FILES for row in read(path.read_bytes())[0]}
    assert seen == set(Kind) - {Kind.NONE}
    assert sum(path.stat().st_size for path in FILES) < 200_000
