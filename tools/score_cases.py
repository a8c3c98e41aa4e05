"""Analyse every case folder given (truth.json beside node*.pcap.gz), print the scores in one table.

    python tools/score_cases.py ../shared/captures/tcp/*      # make score

Results and figures stay in build/score/. ``--only`` picks one vantage point (node0, central).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

import dpuflow
from dpuflow.reports.scores import write_scores
from dpuflow.score import Score, score_files


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--clock", default="auto", type=click.Choice(["auto", "trust", "estimate"]))
@click.option("--only", help="Analyse just this vantage point.")
def main(folders: tuple[Path, ...], clock: str, only: str | None) -> None:
    """Analyse and score the cases in FOLDERS; folders without truth.json are passed over."""
    out = Path("build/score")
    out.mkdir(parents=True, exist_ok=True)
    scores: list[Score] = []
    for folder in folders:
        files = sorted(folder.glob(f"{only or 'node*'}.pcap.gz"))
        if not (folder / "truth.json").exists() or not files:
            continue
        target = out / f"{folder.name}.json"
        vantages = [dpuflow.Vantage(file.name.split(".")[0], (str(file),)) for file in files]
        try:
            dpuflow.write_json(dpuflow.analyze(vantages, clock=clock), str(target))
            scores += score_files([(str(target), str(folder))], margin_ns=1_000_000, late_ns=2_000_000)
        except dpuflow.DpuflowError as error:
            sys.exit(f"{folder.name}: {error}")
    write_scores(scores, str(out / "figures.json"))


if __name__ == "__main__":
    main()
