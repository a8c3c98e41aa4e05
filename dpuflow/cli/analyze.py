"""``dpuflow analyze``: captures in, verdict and JSON out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from dpuflow.cli import one_line
from dpuflow.cli.reporting import (
    asked_reports,
    check_reports,
    message_option,
    messages_asked,
    report_options,
    write_reports,
)
from dpuflow.cli.vantages import Moment

if TYPE_CHECKING:
    from dpuflow.marks import Marks
    from dpuflow.results import Analysis

FAILED: Final = 3

EPILOG = """\b
Examples:
  One capture per node, one clock each:
    dpuflow analyze node0.pcap.gz node1.pcap.gz node2.pcap.gz
  The whole result for a program:
    dpuflow analyze node*.pcapng --json result.json
  Column files of dpuflow capture --mode messages, beside captures or alone:
    dpuflow analyze node0.dpuflow node1.dpuflow node2.pcapng
  A rotated capture of one node, and a switch:
    dpuflow analyze --vantage node0=a.pcap0,a.pcap1 --vantage switch=mirror.pcapng
  All captures of a folder, one vantage point each (rotated ones are joined):
    dpuflow analyze captures/
  The last five minutes of an agent's history:
    dpuflow analyze /var/lib/dpuflow --since -5m
  A page to mail:
    dpuflow analyze node*.pcapng --html page.html
  In a script: does this job have a straggler?
    dpuflow analyze node*.pcapng --quiet --fail-on late
  From tcpdump:
    tcpdump -i eth0 -s 128 -w - | dpuflow analyze -

Snap length 128 is enough; 192 behind ERSPAN or VXLAN, with IPv6 256.
Exit status: 0 the analysis ran, with or without a verdict; 1 a capture could
not be read (a link type that is not supported, say), or the environment is at
fault; 2 wrong usage; 3 --fail-on was met."""


def _write(result: Analysis, marks: list[Marks], lua_file: str | None, json_file: str | None) -> None:
    """The files that were asked for."""
    import dpuflow

    if lua_file is not None:
        from dpuflow.reports.lua import write_lua

        write_lua(result, marks, lua_file)
    if json_file is not None:
        dpuflow.write_json(result, json_file)


def _say(result: Analysis, color: str, warnings_only: bool) -> None:
    """The verdict, or what is wrong with captures alone."""
    if not warnings_only:
        import dpuflow

        dpuflow.write_text(result, color={"always": True, "never": False}.get(color))
        return
    for warning in (text for capture in result.captures for text in capture.warnings):
        click.echo(f"dpuflow: {one_line(warning)}", err=True)


@click.command(epilog=EPILOG)
@click.argument("captures", metavar="CAPTURE...", nargs=-1)
@click.option(
    "--vantage",
    "named",
    metavar="NAME=FILE,FILE",
    multiple=True,
    help="A named vantage point and its files in order (rotated, or one per interface).",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write the whole result as JSON; - writes it to standard output, instead of the verdict.",
)
@report_options
@message_option
@click.option(
    "--lua",
    "lua_file",
    metavar="FILE",
    help="Write a Wireshark script that shows message and collective beside each packet:"
    " wireshark -X lua_script:FILE node0.pcap.",
)
@click.option(
    "--compare",
    "recorded",
    metavar="FILE",
    multiple=True,
    help="What the job itself recorded: a trace of PyTorch's profiler, a dump of its Flight Recorder, a log"
    " of NCCL (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,COLL), lines of its Inspector, events of its"
    " profiler plugin. Says how far it agrees.",
)
@click.option("--ranks", "ranks_file", metavar="FILE", help="Rank map, YAML: address to rank, GPU and host.")
@click.option(
    "--clock",
    type=click.Choice(["auto", "trust", "estimate"]),
    default="auto",
    show_default=True,
    help="How to align the captures' clocks: trust them (PTP), estimate offset and drift from packets"
    " seen at both ends, or auto: whichever the packets support.",
)
@click.option(
    "--since",
    type=Moment(),
    metavar="TIME",
    help="Agent history: only from this time on, 2026-11-21T16:30:00 or -5m.",
)
@click.option("--until", type=Moment(), metavar="TIME", help="Agent history: only until this time.")
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Reader threads (default: one per core)."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Read captures in N processes instead of threads, with the same result. For many captures on many"
    " cores.",
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colour of the verdict; auto: on a terminal, unless NO_COLOR is set.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["late", "warning"]),
    help="Exit with status 3 if a rank was late, always or now and then; warning: also on any finding of"
    " that severity or worse.",
)
@click.option("--quiet", is_flag=True, help="No verdict and no progress; warnings and errors only.")
def analyze(
    captures: tuple[str, ...],
    named: tuple[str, ...],
    json_file: str | None,
    lua_file: str | None,
    recorded: tuple[str, ...],
    ranks_file: str | None,
    clock: str,
    since: int | None,
    until: int | None,
    threads: int | None,
    workers: int,
    color: str,
    fail_on: str | None,
    quiet: bool,
) -> None:
    """Read captures of one job and say which rank was late, how often, by how much and what it cost.

    CAPTURE is a pcap or pcapng file (plain, .gz or .zst), a column file of "dpuflow capture --mode
    messages", a folder of these or of an agent's history, or - for standard input. Each file is one
    vantage point: one node's interface, or a switch's mirror port. RoCEv2, RoCEv1 and TCP are read.
    """
    from dpuflow.cli.targets import check_target
    from dpuflow.cli.vantages import vantages_from

    vantages = vantages_from(captures, named, since, until)
    for target, option in ((json_file, "--json"), (lua_file, "--lua")):
        check_target(target, option, [file for vantage in vantages for file in vantage.files])
    asked = asked_reports()
    check_reports(asked, [file for vantage in vantages for file in vantage.files])
    with_messages = messages_asked()

    import dpuflow
    from dpuflow import analysis
    from dpuflow.cli.compiling import mind_compiling
    from dpuflow.cli.progress import ProgressLine

    ranks = dpuflow.read_rank_map(ranks_file) if ranks_file is not None else None
    with ProgressLine(enabled=not quiet) as progress:
        mind_compiling(vantages, workers, None if quiet else progress)
        result, marks = analysis.analyze_marked(
            vantages,
            clock=clock,
            ranks=ranks,
            threads=threads,
            workers=workers,
            progress=progress,
            marked=lua_file is not None,
            messages=with_messages,
        )
    _write(result, marks, lua_file, json_file)
    write_reports(result, asked)
    _say(result, color, quiet or "-" in (json_file, *asked.values()))
    if recorded:
        from dpuflow.recorded import say_agreement

        say_agreement(result, recorded, click.echo)
    if fail_on is not None and failed(result, fail_on):
        raise click.exceptions.Exit(FAILED)


def failed(result: Analysis, fail_on: str) -> bool:
    """Whether a result is what ``--fail-on`` asks about."""
    late = any(row.verdict in ("late", "intermittent") for row in result.lateness)
    return late or (fail_on == "warning" and any(each.severity != "info" for each in result.findings))
