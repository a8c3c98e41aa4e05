"""Files that a command writes: names from the command line, refused where they would replace its input."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable


def check_target(target: str | None, option: str, inputs: Iterable[str]) -> None:
    """Raise click.UsageError where ``target`` is no name, or one of the ``inputs`` by whatever name."""
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
