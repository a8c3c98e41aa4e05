"""The click group: names and one line of help for each command; a command's module is loaded when used."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from dpuflow import __version__
from dpuflow.kernels import when_compiling

COMMANDS: Final = {
    "capture": "Capture RoCE and TCP packets from interfaces with eBPF.",
    "mirror": "Mirror a card's or host's traffic to where it can be captured.",
    "doctor": "Check what this machine can capture live, and how to fix the rest.",
    "agent": "Run for weeks on a node: lateness and findings as they happen.",
    "ingest": "Reduce captures to column files, which analyze reads in their place.",
    "analyze": "Read captures of one job and say which rank was late.",
    "report": "Make reports of a saved result: page, trace, tables, summary.",
    "diff": "Compare two results: what changed, and how sure that is.",
    "top": "Watch who is late now, on a terminal.",
    "export": "Write the packets behind a finding, for Wireshark.",
    "synth": "Generate captures of a simulated job with known truth.",
    "score": "Score results against known truth.",
}
"""Every command with its line in ``dpuflow --help``; its module is ``dpuflow.cli.NAME``."""


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own, imported only when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"dpuflow.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name what was likely meant where there is no such command."""
        import difflib

        near = difflib.get_close_matches(args[0], COMMANDS, 1) if args[0] not in COMMANDS else []
        if near:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


EPILOG = """\b
Examples:
  dpuflow analyze node0.pcap.gz node1.pcap.gz
  dpuflow analyze node*.pcap.gz --json result.json
  dpuflow score result.json captures/case1

dpuflow COMMAND --help says more."""


@click.command(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def dpuflow() -> None:
    """Packet-level telemetry for GPU jobs over RoCE and TCP: who was late, by how much, and what it cost."""
    from dpuflow.cli.compiling import COMPILING, once

    when_compiling[:] = [once(COMPILING)]
