"""The rules and their levels as a page, from the code (``python -m bench.ablation.describe`` writes it)."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.ablation.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.ablation.switch import Rule

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "theory" / "rules.md"
ROOMS: Final = ("schedules", "matching", "entries", "verdicts")
SENTINELS: Final = 1 << 62
"""Numbers from here on stand for what is not known; they are no levels."""
INTRO: Final = """\
# Rules and levels

Made from the code by `python -m bench.ablation.describe`. Each rule can be switched off:
`python -m bench.ablation` measures what that changes on captures with known truth
([how](../../bench/ablation/README.md)). A rule claims what its docstring says; the levels that it
reads are numbers, each named once, with the reason in the second table.
"""


class Level(NamedTuple):
    """A number that a rule compares with. ``at``: its module below dpuflow."""

    at: str
    name: str
    value: str
    reason: str


def page() -> str:
    """Markdown: both tables."""
    levels = {(each.at, each.name): each for room in ROOMS for each in _levels(room)}
    lines = [INTRO, "| rule | claims | levels |", "| --- | --- | --- |"]
    for rule in RULES:
        read = ", ".join(f"`{each.name}` {each.value}" for each in _read_by(rule, levels))
        lines.append(f"| `{rule.name}` | {_cell(rule.function.__doc__)} | {read} |")
    lines += ["", "## Levels", "", "| level | value | because |", "| --- | --- | --- |"]
    lines += [f"| `{each.at}.{each.name}` | {each.value} | {each.reason} |" for each in levels.values()]
    return "\n".join(lines) + "\n"


def _cell(text: str | None) -> str:
    """The first paragraph of a docstring, in one line of a table."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def _levels(room: str) -> Iterator[Level]:
    """The numbers that modules of a room name, with the sentence that follows each."""
    for file in sorted((ROOT / "dpuflow" / room).glob("*.py")):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
            if not isinstance(target, ast.Name) or not target.id.isupper() or target.id.startswith("_"):
                continue
            at = room if file.stem == "__init__" else f"{room}.{file.stem}"
            value = getattr(importlib.import_module(f"dpuflow.{at}"), target.id)
            told = after.value if isinstance(after, ast.Expr) else None
            number = isinstance(value, (int, float)) and abs(value) < SENTINELS
            if number and isinstance(told, ast.Constant):
                shown = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
                yield Level(at, target.id, shown, _cell(str(told.value)))


def _read_by(rule: Rule, levels: dict[tuple[str, str], Level]) -> list[Level]:
    """The levels that the rule's function reads, wherever they are named."""
    module, _, name = rule.name.partition(":")
    tree = ast.parse(Path(importlib.import_module(f"dpuflow.{module}").__file__ or "").read_text("utf-8"))
    home = {
        alias.asname or alias.name: (node.module or "").removeprefix("dpuflow.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    names = sorted({node.id for node in ast.walk(function) if isinstance(node, ast.Name)})
    found = (levels.get((home.get(each, module), each)) for each in names)
    return [each for each in found if each is not None]


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
