"""Files that a command writes: names from the command line, refused where they would replace a capture."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_target(
    target: str | None, option: str, inputs: Iterable[str], *, makes_captures: bool = False
) -> None:
    """Raise click.UsageError where ``target`` is no name, or one of the ``inputs`` by whatever name, or any
    capture: ``--json node*.pcap`` names the first one. ``makes_captures``: what is written is one itself.
    """
    if target is None or target == "-":
        return
    if not target:
        raise click.BadParameter("the name of the file is empty.", param_hint=f"'{option}'")
    if not os.path.isfile(target):
        return
    for name in inputs:
        if name != "-" and os.path.isfile(name) and os.path.samefile(target, name):
            said = f"{target!r} is an input and would be overwritten."
            raise click.BadParameter(said, param_hint=f"'{option}'")
    if not makes_captures and _is_capture(target):
        said = f"{target!r} is a capture and would be overwritten."
        raise click.BadParameter(said, param_hint=f"'{option}'")


def _is_capture(name: str) -> bool:
    """Whether a file that there is can be read as a capture."""
    from dpuflow.capture.pcapfile import open_file
    from dpuflow.errors import DpuflowError

    try:
        open_file(name).bytes.close()
    except (DpuflowError, OSError):
        return False
    return True
