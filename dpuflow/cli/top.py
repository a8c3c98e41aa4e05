"""``dpuflow top``: who is late now, on a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dpuflow.reports.top.sources import Source

EPILOG = """\b
Examples:
  The agent of this machine:
    dpuflow top
  Another one's:
    dpuflow top https://dpu-17:9477 --token-file token
  An interface; top runs an agent of its own meanwhile:
    dpuflow top eth2
  An agent's history, or captures, read again when files change:
    dpuflow top /var/lib/dpuflow
  Replay that history at ten times the speed:
    dpuflow top /var/lib/dpuflow --replay 10
  For a screen reader, a log or a pipe:
    dpuflow top --plain

Keys: q ends, s sorts, / filters, p pauses, arrows choose a rank and Enter opens
it, c copies the Wireshark filter of the worst finding to the terminal's
clipboard (OSC 52). A bar of full blocks is measured, of light ones a bound."""

AGENT = "http://127.0.0.1:9477"


@click.command(epilog=EPILOG)
@click.argument("where", metavar="[INTERFACE | URL | FOLDER | RESULT.json]", default=AGENT)
@click.option(
    "--plain", is_flag=True, help="Print a line per update instead of a screen; for pipes and logs."
)
@click.option("--every", type=click.FloatRange(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS",
              help="Time between updates.")  # fmt: skip
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --plain: stop after N lines.")
@click.option("--replay", type=click.FloatRange(min=0.01), metavar="SPEED",
              help="Replay an agent's history from its start, at SPEED times real time.")  # fmt: skip
@click.option("--token-file", metavar="FILE", help="File with the access token of the agent.")
def top(where: str, plain: bool, every: float, count: int | None, replay: float | None, token_file: str | None
) -> None:  # fmt: skip
    """Show who is late now: ranks, who waits for whom, findings, what was lost, how the agent fares.

    If the agent goes away, top keeps its last answer on screen, says so and retries. NO_COLOR is honoured.
    """
    from dpuflow.reports.top import sources, terminal

    token = None
    if token_file is not None:
        with open(token_file, encoding="utf-8") as file:
            token = file.read().strip()

    def show(source: Source) -> None:
        dumb = os.environ.get("TERM", "dumb") == "dumb" or not (sys.stdout.isatty() and sys.stdin.isatty())
        if plain or dumb:
            terminal.plain(source, every, count)
        else:
            terminal.full(source, every, not os.environ.get("NO_COLOR"))

    if replay is not None:
        if not os.path.isdir(where):
            raise click.UsageError("--replay needs the folder of an agent's history")
        show(sources.Replay(where, replay))
    elif "://" in where:
        show(sources.Agent(where, token))
    elif os.path.exists(where):
        show(sources.files(where))
    else:
        from dpuflow.agent.interfaces import present
        from dpuflow.errors import OptionError
        from dpuflow.reports.top.beside import agent_on

        if not present(where):
            raise OptionError(f"{where}: no such interface, folder or file, and no URL")
        with agent_on(where) as url:
            show(sources.Agent(url))
