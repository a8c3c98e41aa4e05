"""Reports that ``analyze`` and ``report`` can write: an option each, its module imported when asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpuflow.results import Analysis


class Report(NamedTuple):
    """``writer`` of ``dpuflow.reports.module`` takes a result and the option's value."""

    module: str
    writer: str
    metavar: str
    help: str


REPORTS: Final = {
    "html": Report("html", "write_html", "FILE", "Write one page for a browser, which needs no network."),
    "perfetto": Report("perfetto", "write_perfetto", "FILE", "Write a trace for ui.perfetto.dev."),
    "parquet": Report("parquet", "write_parquet", "DIR", "Write the result as Parquet tables."),
    "markdown": Report(
        "markdown",
        "write_markdown",
        "FILE",
        "Write verdict, table and findings for a ticket, at most 60 lines.",
    ),
}
"""Every report by the name of its option."""

_ASKED: Final = "dpuflow.reports"
_APPEND: Final = "dpuflow.append"
_SITE: Final = "dpuflow.site"
_MESSAGES: Final = "dpuflow.messages"


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each report; what was asked for is ``asked_reports()``, no parameter."""
    command = click.option(
        "--append",
        is_flag=True,
        help="With --parquet: add the job to a data set in DIR, below day=.../job=...",
        expose_value=False,
        callback=_noted_append,
    )(command)
    command = click.option(
        "--site",
        metavar="NAME",
        help="With --parquet: name of the cluster, kept in each file.",
        expose_value=False,
        callback=_noted_site,
    )(command)
    for name, report in reversed(REPORTS.items()):
        command = click.option(
            f"--{name}", metavar=report.metavar, help=report.help, expose_value=False, callback=_noted
        )(command)
    return command


def message_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--messages``, which needs captures."""
    return click.option(
        "--messages",
        is_flag=True,
        help="With --parquet or --perfetto: every message as well.",
        expose_value=False,
        callback=_noted_messages,
    )(command)


def _noted_messages(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.meta[_MESSAGES] = value


def messages_asked() -> bool:
    """Whether reports are to have every message. Raises click.UsageError where no report would."""
    wanted: bool = click.get_current_context().meta.get(_MESSAGES, False)
    if wanted and not {"parquet", "perfetto"} & asked_reports().keys():
        raise click.UsageError("--messages goes with --parquet or --perfetto")
    return wanted


def _noted(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None and option.name is not None:
        context.meta.setdefault(_ASKED, {})[option.name] = value


def _noted_append(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.meta[_APPEND] = value


def _noted_site(context: click.Context, option: click.Parameter, value: str | None) -> None:
    context.meta[_SITE] = value


def asked_reports() -> dict[str, str]:
    """Which reports the command that runs was asked for: option to file or folder."""
    asked: dict[str, str] = click.get_current_context().meta.get(_ASKED, {})
    return asked


def check_reports(asked: dict[str, str], inputs: Iterable[str]) -> None:
    """Raise click.UsageError or MissingError before the work where a report could not be written after it."""
    from dpuflow.cli.targets import check_target

    named = list(inputs)
    for name, target in asked.items():
        check_target(target, f"--{name}", named)
        getattr(import_module(f"dpuflow.reports.{REPORTS[name].module}"), "check_installed", bool)()


def write_reports(result: Analysis, asked: dict[str, str]) -> None:
    """Write each report that was asked for. Raises OSError, DpuflowError."""
    for name, target in asked.items():
        report = REPORTS[name]
        write = getattr(import_module(f"dpuflow.reports.{report.module}"), report.writer)
        if name == "parquet":
            noted = click.get_current_context().meta
            write(result, target, append=noted.get(_APPEND, False), site=noted.get(_SITE))
        else:
            write(result, target)
