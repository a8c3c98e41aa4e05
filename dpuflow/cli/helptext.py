"""``help.txt``: what click prints for ``dpuflow --help`` at 80 columns, kept so that it needs no click.

``python -m dpuflow.cli.helptext`` (``make help-text``) writes it again; a test compares.
"""

from __future__ import annotations

from pathlib import Path

from dpuflow.cli.commands import dpuflow

PATH = Path(__file__).with_name("help.txt")


def render_help() -> str:
    """The text of ``dpuflow --help``."""
    context = dpuflow.make_context("dpuflow", [], resilient_parsing=True, terminal_width=80)
    return dpuflow.get_help(context) + "\n"


if __name__ == "__main__":
    PATH.write_text(render_help(), encoding="utf-8")
