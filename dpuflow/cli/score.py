"""``dpuflow score``: analyses and cases in, figures out."""

from __future__ import annotations

import click

EPILOG = """\b
Examples:
  dpuflow score result.json captures/case1
  dpuflow score a.json captures/a b.json captures/b --json score.json

CASE_DIR holds truth.json and meta.json (docs/scoring.md). Several pairs give one
row each, and a last one for all of them together."""


@click.command(epilog=EPILOG)
@click.argument("pairs", metavar="ANALYSIS.json CASE_DIR...", nargs=-1)
@click.option("--json", "json_file", metavar="FILE", help="Write the figures as JSON; - for standard output.")
@click.option(
    "--margin-ms",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Score the last rank only where it was last by this much.",
)
@click.option(
    "--late-ms",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="What counts as late for precision and recall; ranks within 30 % of it are left out.",
)
def score(pairs: tuple[str, ...], json_file: str | None, margin_ms: float, late_ms: float) -> None:
    """Score analyses against the ground truth of a case (truth.json and meta.json)."""
    if not pairs or len(pairs) % 2:
        raise click.UsageError("Give pairs: ANALYSIS.json CASE_DIR ...")
    from dpuflow.cli.targets import check_target
    from dpuflow.reports.scores import write_scores
    from dpuflow.scoring.score import score_files

    check_target(json_file, "--json", pairs[::2])
    scores = score_files(
        list(zip(pairs[::2], pairs[1::2], strict=True)),
        margin_ns=round(margin_ms * 1e6),
        late_ns=round(late_ms * 1e6),
    )
    write_scores(scores, json_file)
