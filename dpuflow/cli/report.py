"""``dpuflow report``: reports of a result that was saved as JSON."""

from __future__ import annotations

import click

from dpuflow.cli.reporting import asked_reports, check_reports, report_options, write_reports

EPILOG = """\b
Examples:
  The verdict again:
    dpuflow report result.json
  A page to mail, and a summary for a ticket:
    dpuflow report result.json --html page.html --markdown -
  A trace for ui.perfetto.dev:
    dpuflow report result.json --perfetto job.perfetto-trace
  Tables of many jobs (docs/queries.md):
    dpuflow report result.json --parquet jobs --append

What "dpuflow analyze" writes with the same options is the same. The result's
captures are not needed."""


@click.command(epilog=EPILOG)
@click.argument("result_file", metavar="RESULT.json")
@report_options
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colour of the verdict; auto: on a terminal, unless NO_COLOR is set.",
)
def report(result_file: str, color: str) -> None:
    """Make reports of RESULT.json, a result as "dpuflow analyze --json" wrote it.

    Also of a folder of tables (--parquet), or of one job of a data set: FOLDER@JOB.

    Without options the verdict is printed, as analyze prints it.
    """
    import dpuflow
    from dpuflow.cli.saved import result_of

    asked = asked_reports()
    check_reports(asked, [result_file])
    result = result_of(result_file)
    write_reports(result, asked)
    if not asked:
        dpuflow.write_text(result, color={"always": True, "never": False}.get(color))
