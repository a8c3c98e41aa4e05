"""Manual pages and shell completion, from the commands; ``python -m dpuflow.cli.manpages`` writes them.

In: the click commands. Out: ``deploy/man/*.1`` (man(7)) and ``deploy/completion/*``, committed and compared
by a test.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from dpuflow import __version__
from dpuflow.cli.commands import COMMANDS, dpuflow

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPLETIONS = {"bash": "dpuflow", "zsh": "_dpuflow", "fish": "dpuflow.fish"}
"""The file of each shell as its folder for packages wants it called."""
COMPLETE = "_DPUFLOW_COMPLETE"


def files() -> dict[Path, str]:
    """What is to be written, and where."""
    pages = {DEPLOY / "man" / "dpuflow.1": "".join(page(dpuflow, ("dpuflow",)))}
    context = click.Context(dpuflow, info_name="dpuflow")
    for name in COMMANDS:
        command = dpuflow.get_command(context, name)
        assert command is not None
        pages[DEPLOY / "man" / f"dpuflow-{name}.1"] = "".join(page(command, ("dpuflow", name)))
    for shell, file in COMPLETIONS.items():
        kind = get_completion_class(shell)
        assert kind is not None
        pages[DEPLOY / "completion" / shell / file] = kind(dpuflow, {}, "dpuflow", COMPLETE).source()
    return pages


def page(command: click.Command, names: tuple[str, ...]) -> Iterator[str]:
    """The manual page of a command, in pieces."""
    context = click.Context(command, info_name=" ".join(names), help_option_names=["-h", "--help"])
    title, said = "-".join(names), (command.help or "").strip()
    yield f'.TH {title.upper()} 1 "" "dpuflow {__version__}" "dpuflow"\n'
    yield f".SH NAME\n{_text(title)} \\- {_text(command.get_short_help_str(200))}\n"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f".SH SYNOPSIS\n.B {_text(' '.join(names))}\n{_text(pieces)}\n"
    yield f".SH DESCRIPTION\n{_paragraphs(said)}"
    yield ".SH OPTIONS\n"
    for option in command.get_params(context):
        record = option.get_help_record(context)
        if isinstance(option, click.Option) and record is not None:
            yield f".TP\n.B {_text(record[0])}\n{_text(record[1])}\n"
    if names == ("dpuflow",):
        yield ".SH COMMANDS\n"
        for name, line in COMMANDS.items():
            yield f".TP\n.BR dpuflow-{name} (1)\n{_text(line)}\n"
    if command.epilog:
        yield f".SH EXAMPLES\n.nf\n{_text(re.sub(chr(8), '', command.epilog).strip())}\n.fi\n"
    yield _EXIT


_EXIT = """.SH EXIT STATUS
0 fine; 1 the input or the environment is at fault, as one sentence on standard error says; 2 wrong usage;
3 \\-\\-fail\\-on was met; 130 interrupted.
"""


def _paragraphs(text: str) -> str:
    return "".join(f".PP\n{_text(' '.join(each.split()))}\n" for each in text.split("\n\n"))


def _text(text: str) -> str:
    """As man(7) wants it: hyphens that are minus signs, no line that begins as a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(?=[.'])", r"\\&", escaped, flags=re.MULTILINE)


def write() -> None:
    """Write all of them."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write()
