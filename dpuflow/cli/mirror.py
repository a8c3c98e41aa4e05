"""``dpuflow mirror``: copies of traffic to an interface, as long as it or the command given runs."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  Copies made by a BlueField (between uplink and host) for its function 7, and their capture:
    dpuflow mirror tc --from p0 --peer pf0hpf --to en3f0pf0sf7 --receiver enp3s0f0s7 \\
        -- dpuflow capture -i enp3s0f0s7 -w node0.pcapng
  What that would do:
    dpuflow mirror tc --from p0 --peer pf0hpf --to en3f0pf0sf7 --dry-run
  Where OVS has the eSwitch:
    dpuflow mirror ovs --from p0 --to en3f0pf0sf7 -- tcpdump -i enp3s0f0s7
  One of 1000 packets, their first 128 bytes:
    dpuflow mirror sample --from p0 --peer pf0hpf --rate 1000 --truncate 128 \\
        -- dpuflow capture -i p0 -i pf0hpf --backend psample -w node0.pcapng
  A host's interface to another one, in software:
    dpuflow mirror tc-software --from eth2 --to mon0

Everything is undone at the end; after a crash, at the next start or by dpuflow doctor --clean.
dpuflow doctor says which of these work on this machine."""


@click.command(epilog=EPILOG, context_settings={"ignore_unknown_options": True})
@click.argument("way", type=click.Choice(["tc", "sample", "ovs", "doca", "tc-software"]))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--from", "source", metavar="IF", required=True, help="The interface to mirror.")
@click.option("--to", metavar="IF", default="", help="Where the copies go; for a function, its representor.")
@click.option(
    "--peer",
    metavar="IF",
    default="",
    help="tc, sample, doca: the other end of the traffic, which the card's rule must name.",
)
@click.option(
    "--receiver",
    metavar="IF",
    default="",
    help="The interface that gets the copies, if not --to itself: set up and made promiscuous.",
)
@click.option("--bridge", metavar="BR", default="", help="ovs: the bridge of --from.")
@click.option(
    "--protocol",
    "protocols",
    type=click.Choice(["roce", "tcp", "any"]),
    multiple=True,
    default=("roce",),
    show_default=True,
    help="What to mirror; ovs mirrors everything.",
)
@click.option("--rate", type=click.IntRange(min=1), default=1000, show_default=True, metavar="N",
              help="sample: one in N packets.")  # fmt: skip
@click.option("--group", type=click.IntRange(0, 2**32 - 1), default=55776, show_default=True, metavar="G",
              help="sample: the psample group.")  # fmt: skip
@click.option("--truncate", type=click.IntRange(min=0), default=128, show_default=True, metavar="B",
              help="sample: bytes to keep of each packet; 0: all.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the commands and those that undo them; run nothing.")
def mirror(
    way: str, command: tuple[str, ...], source: str, to: str, peer: str, receiver: str, bridge: str,
    protocols: tuple[str, ...], rate: int, group: int, truncate: int, dry_run: bool,
) -> None:  # fmt: skip
    """Copy traffic to an interface until Ctrl-C, or as long as COMMAND runs.

    WAY is tc (by the card), sample (by the card, one in N), ovs (by Open vSwitch), doca (by the card,
    with DOCA Flow) or tc-software (by the kernel). Only copies are added: the traffic itself is
    forwarded as before.
    """
    from dpuflow.errors import OptionError
    from dpuflow.live.mirror.base import MirrorPlan
    from dpuflow.live.mirror.providers import provider
    from dpuflow.live.mirror.running import run_command, signals_held, wait

    plan = MirrorPlan(source, to, peer, receiver, bridge, protocols, rate, group, truncate)
    try:
        prepared = provider(way, plan)
    except OptionError as error:
        raise click.UsageError(f"{error}.") from None
    if dry_run:
        click.echo("\n".join(prepared.lines()))
        return
    status = 0
    with signals_held(), prepared as running:
        click.echo(f"mirroring {source} by {way}", err=True)
        for line in running.undone:
            click.echo(f"undone first, left by a killed mirror: {line}", err=True)
        if command:
            status = run_command(command)
        else:
            wait()
    for warning in running.warnings:
        click.echo(f"warning: {warning}", err=True)
    if status:
        raise click.exceptions.Exit(status)
