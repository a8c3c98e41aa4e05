"""The C header is the schema's, and compilers lay it out as NumPy does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dpuflow.schema import c_header as schema_c
from dpuflow.schema import ring as schema_ring


def test_the_committed_header_is_current() -> None:
    assert schema_c.PATH.read_text() == schema_c.header_text(), "run `make headers`"


def test_records_are_in_natural_alignment_without_hidden_padding() -> None:
    for record in schema_ring.RECORDS:
        assert record.dtype.itemsize == sum(record.dtype[name].itemsize for name in record.dtype.names or ())
        assert record.dtype.itemsize % 8 == 0


def test_the_layout_number_changes_with_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    before = schema_ring.layout_number()
    monkeypatch.setattr(schema_ring, "RECORDS", schema_ring.RECORDS[:-1])
    assert schema_ring.layout_number() != before


@pytest.mark.parametrize("target", ["x86_64-linux-gnu", "aarch64-linux-gnu", "bpf"])
def test_a_compiler_agrees(target: str, tmp_path: Path) -> None:
    """The header's own assertions on sizes and offsets speak."""
    if not shutil.which("clang"):
        pytest.skip("no clang to compile the header with")
    types = "\n".join(f"typedef unsigned {kind} __u{8 * size};" for kind, size in
                      (("char", 1), ("short", 2), ("int", 4), ("long long", 8)))  # fmt: skip
    source = tmp_path / "x.c"
    source.write_text(f'{types}\n#include "{schema_c.PATH}"\n')
    subprocess.run(["clang", "-target", target, "-fsyntax-only", "-Werror", str(source)], check=True)
