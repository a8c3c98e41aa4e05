"""``dpuflow doctor``: what this machine allows of live capture."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  dpuflow doctor
  dpuflow doctor -i eth2
  dpuflow doctor --clean

Exit status: 0 if at least one kind of capture works, and it works on every
interface named; else 1."""


@click.command(epilog=EPILOG)
@click.option(
    "-i", "--interface", "interfaces", metavar="IF", multiple=True, help="Check this interface, too."
)
@click.option("--clean", is_flag=True, help="Remove filters and mirrors left behind by a killed process.")
def doctor(interfaces: tuple[str, ...], clean: bool) -> None:
    """Check what this machine can capture live, and say how to fix the rest."""
    from dpuflow.errors import MissingError
    from dpuflow.live import doctor as live

    if clean and interfaces:
        raise click.UsageError("--clean looks at every interface: leave out --interface.")
    if clean:
        undone, removed = live.clean_mirrors(), live.clean()
        if removed:
            click.echo(f"removed from {', '.join(removed)}")
        for command in undone:
            click.echo(f"undone: {command}")
        if not removed and not undone:
            click.echo("nothing was left behind")
        return
    checks = live.examine(list(interfaces))
    for check in checks:
        mark = "ok" if check.met else "--" if check.absent else "NO"
        click.echo(f"{mark:3} {check.name:12} {check.text}")
    unmet = [check.name for check in checks if check.needed and not check.met]
    if "capture" in unmet:
        raise MissingError("live capture does not work on this machine; see above")
    if unmet:
        raise MissingError(f"{', '.join(unmet)}: cannot capture there; see above")
