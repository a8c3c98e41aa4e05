"""``dpuflow diff``: two results, what changed and how sure that is."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  Did the driver update help?
    dpuflow diff before.json after.json
  In a script: status 3 if steps are more than 2 % slower, beyond doubt
    dpuflow diff before.json after.json --fail-on 2
  An hour of an agent's history with the hour before
    dpuflow diff /var/lib/dpuflow@-2h..-1h /var/lib/dpuflow@-1h..
  Two jobs of a data set that "analyze --parquet jobs --append" made
    dpuflow diff jobs@20261121T0856 jobs@20261122T0901

A result is what "dpuflow analyze --json" or --parquet wrote, or a folder of captures
or of an agent's history, which is analysed first. Exit status: 0 whatever changed;
1 a file is at fault; 2 wrong usage; 3 --fail-on was met."""

FAILED = 3


@click.command(epilog=EPILOG)
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option("--json", "json_file", metavar="FILE", help="Write all of it as JSON; - is standard output.")
@click.option(
    "--fail-on",
    type=click.FloatRange(min=0),
    metavar="PERCENT",
    help="Exit with status 3 if the step time is worse by more than this (lower end of its interval).",
)
def diff(before: str, after: str, json_file: str | None, fail_on: float | None) -> None:
    """Compare two results: step time, lateness of each rank, collectives and findings, with 95 % intervals.

    Ranks are matched by number, else by label, address or place.
    """
    from dpuflow.cli.saved import result_of
    from dpuflow.cli.targets import check_target
    from dpuflow.differences import compare
    from dpuflow.reports.diff import diff_lines, write_diff_json

    check_target(json_file, "--json", [before, after])
    found = compare(result_of(before), result_of(after))
    if json_file is not None:
        write_diff_json(found, json_file)
    if json_file != "-":
        click.echo("\n".join(diff_lines(found)))
    steps = [each.share(each.low_ns) for each in found.changes if each.kind == "step"]
    if fail_on is not None and any(share is not None and share > fail_on / 100 for share in steps):
        raise click.exceptions.Exit(FAILED)
