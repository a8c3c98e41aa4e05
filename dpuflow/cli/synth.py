"""``dpuflow synth``: a scenario in, a case folder out."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  dpuflow synth --list                            the built-in scenarios
  dpuflow synth straggler -o case                 captures, truth.json, meta.json
  dpuflow synth --show straggler > my.yaml        a start for your own
  dpuflow synth --keys                            everything a scenario may contain
  dpuflow synth --keys faults                     one part of that
  dpuflow synth my.yaml -o case && dpuflow analyze case/node*.pcap.gz --json r.json
  dpuflow score r.json case

SCENARIO is a YAML file or the name of a built-in one. What is simulated and how faithfully, and what is
assumed: docs/synth.md."""


@click.command(epilog=EPILOG)
@click.argument("scenario", required=False)
@click.option("-o", "--output", "folder", metavar="DIR", help="Where to write the case.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Seed, instead of the scenario's.")
@click.option("--list", "listing", is_flag=True, help="List the built-in scenarios.")
@click.option("--show", metavar="NAME", help="Print a built-in scenario, to start from.")
@click.option("--keys", is_flag=True, help="Print what a scenario may contain; with SCENARIO: those parts.")
def synth(
    scenario: str | None, folder: str | None, seed: int | None, listing: bool, show: str | None, keys: bool
) -> None:
    """Write captures of a simulated job, and the ground truth.

    Plays NCCL's traffic over RoCEv2 packet by packet and writes one capture for each vantage point, in the
    form that analyze reads and score checks. The same scenario and seed give the same bytes.
    """
    from dpuflow.synth.scenario import read_scenario, ready, ready_text

    if keys:
        from dpuflow.synth.describe import plain

        click.echo(plain(scenario))
        return
    if show is not None:
        click.echo(ready_text(show), nl=False)
        return
    if listing:
        for name, what in ready().items():
            click.echo(f"{name:<20} {what}")
        return
    if scenario is None or folder is None:
        raise click.UsageError("Give a SCENARIO and -o DIR, or --list, --show or --keys.")
    from dpuflow.synth.case import write_case

    chosen = read_scenario(scenario)
    if seed is not None:
        chosen.seed = seed
    for capture in write_case(chosen, folder):
        click.echo(f"{folder}/{capture.name}: {capture.packets} packets", err=True)
