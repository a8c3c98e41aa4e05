"""``dpuflow agent``: the long-running service of one node."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from dpuflow.agent.config import Config

EPILOG = """\b
Examples:
  On a node or a DPU, with a configuration file:
    dpuflow agent --config /etc/dpuflow/agent.yaml
  With nothing but defaults:
    dpuflow agent
  Check the file:
    dpuflow agent --config agent.yaml --check
  Every option with its value, as a start for a file:
    dpuflow agent --print-config > agent.yaml

SIGHUP reloads the file; a faulty one changes nothing, and the log says why.
SIGTERM or Ctrl-C stops it, with nothing left attached. Needs what dpuflow
capture needs; dpuflow doctor checks that."""


@click.command(epilog=EPILOG)
@click.option(
    "--config",
    "path",
    metavar="FILE",
    help="Configuration file (YAML; may be empty). Default: built-in defaults.",
)
@click.option("--check", is_flag=True, help="Check the configuration and exit.")
@click.option(
    "--user",
    metavar="NAME",
    help="Started as root: switch to this user, keeping only the capabilities that capture needs. Default:"
    " dpuflow, else nobody; root keeps root.",
)
@click.option(
    "--health",
    metavar="ADDRESS:PORT",
    help="Answer probes there, whatever the configuration's api.health says.",
)
@click.option(
    "--print-config", is_flag=True, help="Print the effective configuration, without secrets, and exit."
)
def agent(path: str | None, check: bool, user: str | None, health: str | None, print_config: bool) -> None:
    """Watch a node's traffic for weeks: collectives, lateness and findings as they happen.

    Captures, reconstructs collectives in sliding windows, and says within seconds which rank is late and why.
    """
    from dpuflow.agent.config import as_yaml, read_config, with_health

    def read() -> Config:
        return _checked(with_health(read_config(path), health))

    config = read()
    if print_config:
        click.echo(as_yaml(config, shown=True), nl=False)
    elif check:
        for said in _there(config, user):
            click.echo(said)
        click.echo(f"{path or 'the defaults'}: OK")
    else:
        _run(config, user, read)


def _there(config: Config, user: str | None) -> list[str]:
    """What is to be said of interfaces, folders and addresses before the agent runs. Raises OptionError."""
    import contextlib
    import socket

    from dpuflow.agent.capabilities import next_account
    from dpuflow.agent.door import check_addresses
    from dpuflow.agent.folder import acting_as, check_folder, is_claimed
    from dpuflow.agent.interfaces import present, wanted
    from dpuflow.errors import OptionError

    account = next_account(user)
    names = wanted(config.capture.interfaces)
    if not names:
        raise OptionError("capture.interfaces: auto: no Ethernet interface is up")
    if missing := [name for name in names if not present(name)]:
        raise OptionError(f"capture.interfaces: {', '.join(missing)}: no such interface")
    folder = config.history.directory
    said = None if folder is None else check_folder(folder, account)
    runs = folder is not None and is_claimed(folder, config.node or socket.gethostname())
    named = {"api.listen": config.api.listen, "api.health": config.api.health}
    with contextlib.nullcontext() if account is None else acting_as(account):
        check_addresses({option: each for option, each in named.items() if each != "off"}, runs)
    return [] if said is None else [said]


def _checked(config: Config) -> Config:
    """The configuration, if all that it names is usable."""
    from dpuflow.agent.access import check_files
    from dpuflow.agent.source import check_settings
    from dpuflow.errors import OptionError
    from dpuflow.identity.rankmap import read_rank_map

    check_settings(config.capture)
    check_files(config)
    if config.analysis.ranks is not None:
        try:
            read_rank_map(config.analysis.ranks)
        except OSError as error:
            raise OptionError(f"analysis.ranks: {config.analysis.ranks}: {error.strerror or error}") from None
    return config


def _become(user: str | None, config: Config) -> str | None:
    """Leave root, the history's folder in the new user's hands; whom it became. Raises DpuflowError."""
    from dpuflow.agent.capabilities import become

    folders = [] if config.history.directory is None else [config.history.directory]
    became = become(user, folders)
    if became is not None:
        _checked(config)  # files that this user may not read are told now, not in the middle of the night
    return became


def _run(config: Config, user: str | None, read: Callable[[], Config]) -> None:
    """Run until a signal ends it."""
    import logging
    import os

    stop, again = threading.Event(), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    def read_again(number: int, frame: FrameType | None) -> None:
        again.set()

    def reload() -> Config | None:
        if not again.is_set():
            return None
        again.clear()
        return read()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, read_again)

    # Only now: it takes a second, and a SIGHUP meanwhile would end the agent.
    from dpuflow.agent.log import FromLogging, Log
    from dpuflow.agent.service import run

    log = Log(config.log.level, config.log.format, journal="JOURNAL_STREAM" in os.environ)
    logging.basicConfig(level=logging.WARNING, handlers=[FromLogging(log)])
    became = _become(user, config)
    if became is not None:
        log.info(
            "user", f"started as root, now running as {became} with only the capabilities that capture needs"
        )
    try:
        run(config, log, stop, reload)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    log.info("ended", "ended")
