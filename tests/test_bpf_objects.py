"""The eBPF objects: one file for the kernels of all little-endian processors."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = sorted((PROJECT / "bpf").glob("*.bpf.c"))
HEADERS = [  # of the kernel's user API, where Debian's packages put them
    Path(f"/usr/include/{os.uname().machine}-linux-gnu"),
    Path("/usr/include/x86_64-linux-gnu"),
    Path("/usr/aarch64-linux-gnu/include"),  # linux-libc-dev-arm64-cross
    Path("/usr/include/aarch64-linux-gnu"),
]
EM_BPF = 247


def compiled(source: Path, headers: Path, folder: Path) -> bytes:
    made = folder / "made.o"
    subprocess.run(
        ["clang", "-target", "bpf", "-mcpu=v3", "-g", "-O2", "-idirafter", str(headers), "-Ibpf", "-c",
         str(source.relative_to(PROJECT)), "-o", str(made)],
        check=True, cwd=PROJECT,
    )  # fmt: skip
    return made.read_bytes()


def sections(data: bytes) -> dict[str, bytes]:
    """The sections of an ELF file of 64 bits, little endian."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, table + size * k) for k in range(count)]
    names = data[rows[names_at][4] :]
    return {
        names[row[0] : names.index(b"\0", row[0])].decode(): data[row[4] : row[4] + row[5]] for row in rows
    }


@pytest.mark.skipif(not shutil.which("clang"), reason="no clang, which compiles the programs")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_one_object_fits_all_processors(source: Path, tmp_path: Path) -> None:
    """The same bytes with either's headers; no relocations, as only the kernel's user API is touched."""
    there = [headers for headers in HEADERS if (headers / "asm" / "types.h").is_file()]
    if not there:
        pytest.skip("no headers of the kernel's user API (package linux-libc-dev)")
    made = {headers.resolve(): compiled(source, headers, tmp_path) for headers in there}
    assert len(set(made.values())) == 1, list(made)
    data = next(iter(made.values()))
    assert data[:6] == b"\x7fELF\x02\x01"
    assert struct.unpack_from("<H", data, 18)[0] == EM_BPF
    found = sections(data)
    (relocations,) = struct.unpack_from("<I", found[".BTF.ext"], 28)
    assert relocations == 0
    assert (b".ksyms" in found[".BTF"]) == ("hardware" in source.name), "kfuncs need a kernel with BTF"


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("clang"), reason="no clang, which compiles the programs")
def test_objects_do_not_tell_where_they_were_compiled(tmp_path: Path) -> None:
    """Wheels and packages hold them: the same sources give the same bytes in any folder."""
    made = []
    for name in ("a", "another"):
        folder = tmp_path / name
        for part in ("bpf", "tools"):
            shutil.copytree(PROJECT / part, folder / part)
        (folder / "dpuflow/live").mkdir(parents=True)
        subprocess.run(["sh", str(folder / "tools/bpf.sh")], check=True, capture_output=True)
        made.append({path.name: path.read_bytes() for path in (folder / "dpuflow/live").glob("*.o")})
    assert len(made[0]) == len(SOURCES)
    assert made[0] == made[1]
