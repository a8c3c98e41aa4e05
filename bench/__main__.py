"""``python -m bench``: the benchmark, its generator, and where dpuflow's CPU time goes."""

from __future__ import annotations

from pathlib import Path

import click


@click.group(invoke_without_command=True)
@click.option("--packets", type=click.IntRange(min=10_000), default=10_000_000, show_default=True)
@click.option("--quick", is_flag=True, help="A tenth of the packets, 3 rounds.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--big", is_flag=True, help="Also the peak memory on five times the packets.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the generated job.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write figures and samples.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where to put the captures (350 bytes a packet; they should fit into memory).",
)  # fmt: skip
@click.pass_context
def main(
    context: click.Context,
    packets: int,
    quick: bool,
    rounds: int,
    big: bool,
    seed: int,
    json_file: Path | None,
    folder: Path | None,
) -> None:
    """Measure dpuflow against its peers, as ratios of CPU time; see bench/README.md.

    The exit status says nothing about speed: a figure that is not met is printed as NOT MET.
    """
    if context.invoked_subcommand:
        return
    from bench.run import Options, run_benchmark, save, text

    if quick:
        packets, rounds = packets // 10, min(rounds, 3)
    result = run_benchmark(
        Options(packets, rounds, seed, big, folder, lambda line: click.echo(line, err=True))
    )
    click.echo(text(result))
    if json_file:
        save(result, json_file)
    click.echo("\nLive capture, medians:")
    _live(rounds)


def _live(rounds: int) -> None:
    """The live part, or why it is left out."""
    from bench.live import missing, run_live
    from dpuflow.errors import DpuflowError

    why = missing()
    if why is None:
        try:
            run_live(rounds, click.echo)
        except DpuflowError as error:  # programs of another version, say
            why = f"left out: {error}"
    if why is not None:
        click.echo(why)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--packets", type=click.IntRange(min=1), default=1_000_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--snaplen", type=click.IntRange(min=62), default=96, show_default=True)
def generate(file: Path, packets: int, seed: int, snaplen: int) -> None:
    """Write the generated capture to FILE, as pcapng if it is so named."""
    from bench.generate import write_captures

    kind = "pcapng" if file.suffix == ".pcapng" else "pcap"
    written = write_captures(packets, seed=seed, snaplen=snaplen, **{kind: file})  # type: ignore[arg-type]
    click.echo(f"{written.packets:,} packets in {written.messages:,} messages")


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True), required=False)
@click.option("--packets", type=click.IntRange(min=1), default=1_000_000, show_default=True)
def profile(file: Path | None, packets: int) -> None:
    """Say where the CPU time of `dpuflow analyze` goes, on FILE or on a generated capture."""
    from bench.profile import profile_analysis

    click.echo(profile_analysis(file, packets))


@main.command("scale")
@click.option("--quick", is_flag=True, help="A quarter of the sizes, one round.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--only", default="", metavar="WORDS", help="Jobs whose name has these words.")
def scale_command(quick: bool, rounds: int, only: str) -> None:
    """How each stage's cost grows with messages, flows, ranks and captures."""
    from bench.scale import run_scale

    def say(line: str) -> None:
        click.echo(line, err=True)

    scale, rounds = (4, 1) if quick else (1, rounds)
    for table in run_scale(scale, rounds, only, say):
        click.echo(table + "\n")


@main.command("live")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
def live_command(rounds: int) -> None:
    """What live capture costs: programs, reader, idling. As root."""
    _live(rounds)


if __name__ == "__main__":
    main()
