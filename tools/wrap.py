"""Wrap the prose of the project's pages at 100 columns; tables, code and headings stay as they are.

Usage: tools/wrap.py [--check] FILE...   --check writes nothing; status 1: a page would change.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

WIDTH = 100
ITEM = re.compile(r"(\s*)([-*]|\d+\.) ")
KEPT = re.compile(
    r"\s*(\||#|<!--|```|!\[|>)|\s*$| {4}"
)  # not prose: tables, headings, comments, code, empty lines


def wrapped(text: str) -> str:
    """``text`` with each paragraph and each item of a list filled."""
    done: list[str] = []
    prose: list[str] = []
    code = False

    def fill() -> None:
        if prose:
            item = ITEM.match(prose[0])
            indent = " " * (item.end() if item else len(prose[0]) - len(prose[0].lstrip()))
            first = prose[0][: item.end()] if item else indent
            words = " ".join(line.strip() for line in [prose[0][len(first) :], *prose[1:]])
            done.extend(
                textwrap.wrap(
                    _tied(words), WIDTH, initial_indent=first, subsequent_indent=indent,
                    break_long_words=False, break_on_hyphens=False,
                )
            )  # fmt: skip
            prose.clear()

    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        inside_item = bool(prose) and bool(ITEM.match(prose[0])) and line.startswith("  ") and line.strip()
        if code or fence or (KEPT.match(line) and not inside_item) or line.lstrip().startswith("|"):
            fill()
            done.append(line)
            code ^= fence
        else:
            if ITEM.match(line):
                fill()
            prose.append(line)
    fill()
    return "\n".join(done).replace(TIE, " ") + "\n"


TIE = "\x00"


def _tied(words: str) -> str:
    """Short code and links are not broken over lines; nor may a line begin like an item of a list."""
    words = re.sub(
        r"`[^`]{1,60}`|\[[^]]{1,40}\]\([^)]{1,60}\)", lambda found: found[0].replace(" ", TIE), words
    )
    return re.sub(r" (?=([-+*]|\d+[.)]|#+) )", TIE, words)


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    changed = []
    for name in arguments:
        if name != "--check":
            path = Path(name)
            text = path.read_text(encoding="utf-8")
            if wrapped(text) != text:
                changed.append(name)
                if not check:
                    path.write_text(wrapped(text), encoding="utf-8")
    for name in changed:
        print(f"{name}: {'not ' if check else ''}wrapped at {WIDTH} columns")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
