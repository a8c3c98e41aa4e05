"""What may import what: one direction through the package, Numba in one place, a light front door."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dpuflow"

# From the bottom up: a module or subpackage imports only what stands above it here. Inside a subpackage
# modules may import each other.
ORDER = [
    *("errors", "wire", "settings", "schema", "framing"),
    *("conditions", "quantities", "results", "kernels", "synth", "arrays", "capture", "packets"),
    *("messages", "store", "vantages", "ingest", "keeping", "live"),
    *("join", "identity", "exchanges", "schedules", "matching", "entries", "verdicts"),
    *(
        "requests",
        "outline",
        "assemble",
        "figures",
        "findings",
        "islands",
        "marks",
        "message_list",
        "analysis",
    ),
    *("loading", "differences", "scoring", "export", "recorded"),
    *("reports", "agent", "cli"),
]

HEAVY = ("numba", "llvmlite", "numpy", "click", "yaml", "scapy", "dpkt")


@cache
def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name not in ("__main__.py",))


def unit(path: Path) -> str:
    """The name in ORDER that a file belongs to; "" for the package itself."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


@cache
def imports(path: Path) -> frozenset[str]:
    """Names of all modules imported anywhere in the file, those for type checkers alone left out."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                walk(child)
            return
        if isinstance(node, ast.expr):  # nothing is imported inside one
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if (node.module or "").split(".")[0] == "dpuflow":
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(ast.parse(path.read_text()))
    return frozenset(found)


def test_every_module_has_its_place() -> None:
    assert {unit(path) for path in modules()} - {""} <= set(ORDER)


@pytest.mark.parametrize("own", ORDER)
def test_a_module_imports_only_what_is_below_it(own: str) -> None:
    files = [path for path in modules() if unit(path) == own]
    assert files
    for path in files:
        for name in imports(path):
            package, _, rest = name.partition(".")
            below = rest.split(".")[0]
            if package == "dpuflow" and below in ORDER and below != own:
                assert ORDER.index(below) < ORDER.index(own), f"{path} imports {below}, which stands above it"


def test_the_simulator_and_what_reads_its_captures_share_the_wire_formats_alone() -> None:
    """Nothing that analyses may know what wrote a capture; of the simulator only the command line knows.

    Its tables and kernels are its own: nothing else imports them.
    """
    own = ("dpuflow.schema.simulated", "dpuflow.kernels.simulated")
    for path in modules():
        used = {name for name in imports(path) if name.startswith("dpuflow.")}
        others = {name for name in used if not name.startswith(own)} - {"dpuflow.kernels", "dpuflow.schema"}
        if unit(path) == "synth":
            rooms = {name.split(".")[1] for name in others}
            assert rooms <= {"synth", "wire", "errors", "settings"}, path
        elif path != PACKAGE / "cli" / "synth.py":
            assert "synth" not in {name.split(".")[1] for name in used}, path
            assert others == used - {"dpuflow.kernels", "dpuflow.schema"} or path.stem == "simulated", path


def test_the_order_names_nothing_that_is_gone() -> None:
    assert set(ORDER) <= {unit(path) for path in modules()}


def test_numba_is_imported_by_the_makers_of_kernels_alone() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if any(name.split(".")[0] in ("numba", "llvmlite") for name in imports(path))
    }
    assert users == {"kernels/_numba.py", "kernels/_build.py"}


def test_reports_and_below_do_not_print_or_exit() -> None:
    for path in modules():
        if unit(path) in ("cli", "reports"):
            continue
        text = path.read_text()
        if not {"print(", "exit("} & set(re.findall(r"\w+\(", text)):
            continue  # most: parsing them all takes seconds
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        names = {ast.unparse(call.func) for call in calls}
        guarded = text.count('if __name__ == "__main__"')
        assert not names & {"print", "sys.exit", "exit"} or guarded, path


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stderr.split()}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import dpuflow") & set(HEAVY)


def test_help_loads_nothing_heavy() -> None:
    assert not loaded_after("from dpuflow.cli import run; assert run(['--help']) == 0") & set(HEAVY)


def test_analyses_without_reports_load_none() -> None:
    capture = next((PACKAGE.parent / "traces" / "nccl-allreduce-n2").glob("node0.pcap.gz"))
    code = f"from dpuflow.cli import run; assert run(['analyze', {str(capture)!r}, '--quiet']) == 0"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = set(done.stdout.split())
    assert not {f"dpuflow.reports.{name}" for name in ("html", "perfetto", "parquet", "markdown")} & loaded
    assert "pyarrow" not in loaded


def test_help_of_a_command_loads_click_alone() -> None:
    loaded = loaded_after("from dpuflow.cli import run; assert run(['analyze', '--help']) == 0")
    assert loaded & set(HEAVY) == {"click"}
