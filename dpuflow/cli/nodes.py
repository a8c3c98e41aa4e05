"""``dpuflow capture --on``: the same capture on other machines."""

from __future__ import annotations

import click


def given(name: str) -> bool:
    """Whether the option stands on the command line."""
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def ending_of(mode: str) -> str:
    """What a node's file ends with."""
    from dpuflow.schema.tables import SUFFIX

    return SUFFIX if mode == "messages" else ".pcapng.zst"


def on_nodes(
    on: tuple[str, ...], over: str, path: str | None, mode: str, duration: float | None, quiet: bool
) -> None:
    """The same capture on other machines: a file of each in the folder ``path``."""
    from contextlib import suppress
    from pathlib import Path

    from dpuflow.errors import DpuflowError, OptionError
    from dpuflow.live.nodes import capture_on, split_nodes

    if path in (None, "", "-"):
        raise click.UsageError("--on needs -w with the name of a folder for the nodes' files.")
    for name in ("rotate_size", "rotate_time", "files"):
        if given(name):
            raise click.UsageError("--on takes no rotation: each node sends one file.")
    folder = Path(path)
    words = ["dpuflow", "capture", *_words(), "--as-node"]
    made = not folder.exists()

    def warn(text: str) -> None:
        click.echo(text, err=True)

    try:
        nodes = split_nodes(on, folder, ending_of(mode))
        folder.mkdir(parents=True, exist_ok=True)
        capture_on(nodes, over, words, duration, (lambda _: None) if quiet else warn, warn)
    except OptionError as error:
        raise click.UsageError(f"{error}.") from None
    finally:
        if made:
            with suppress(OSError):  # there is no such folder, or something in it
                folder.rmdir()
    there = [str(node.file) for node in nodes if node.came]
    failed = [node for node in nodes if node.failed is not None]
    if there and not quiet:
        click.echo(f"dpuflow analyze {' '.join(there)}")
    if failed:
        raise DpuflowError(f"no complete capture from {', '.join(node.name for node in failed)}; see above")


def _words() -> list[str]:
    """This command line's options, less those for this machine alone."""
    context = click.get_current_context()
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        if name in ("on", "over", "path", "duration", "as_node") or not given(name):
            continue
        value = context.params[name]
        if isinstance(option, click.Option) and option.is_flag:
            words.append(option.opts[-1])
            continue
        for each in value if option.multiple else [value]:
            words += [option.opts[-1], str(each)]
    return words
