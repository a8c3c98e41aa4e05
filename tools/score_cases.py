"""Analyse every case folder given (truth.json beside node*.pcap.gz), print the scores in one table.

    python tools/score_cases.py ../shared/captures/tcp/*      # make score

Results and figures stay in build/score/. ``--only`` picks one vantage point (node0, central). ``--blind``
asks what structure alone tells: payload zeroed, ports renumbered.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

import dpuflow
from dpuflow.reports.scores import write_scores
from dpuflow.scoring.score import Score, score_files


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--clock", default="auto", type=click.Choice(["auto", "trust", "estimate"]))
@click.option("--only", help="Analyse just this vantage point.")
@click.option(
    "--blind", is_flag=True, help="Zero all TCP payload and renumber all ports before (plain pcap)."
)
def main(folders: tuple[Path, ...], clock: str, only: str | None, blind: bool) -> None:
    """Analyse and score the cases in FOLDERS; folders without truth.json are passed over."""
    out = Path("build/score")
    out.mkdir(parents=True, exist_ok=True)
    scores: list[Score] = []
    for folder in folders:
        files = sorted([*folder.glob(f"{only or 'node*'}.pcap.gz"), *folder.glob(f"{only or 'node*'}.pcap")])
        if not (folder / "truth.json").exists() or not files:
            continue
        target = out / f"{folder.name}.json"
        vantages = [dpuflow.Vantage(file.name.split(".")[0], (str(file),)) for file in files]
        try:
            with tempfile.TemporaryDirectory() as room:
                vantages = _blinded(vantages, Path(room)) if blind else vantages
                dpuflow.write_json(dpuflow.analyze(vantages, clock=clock), str(target))
            scores += score_files([(str(target), str(folder))], margin_ns=1_000_000, late_ns=2_000_000)
        except dpuflow.DpuflowError as error:
            sys.exit(f"{folder.name}: {error}")
    write_scores(scores, str(out / "figures.json"))


def _blinded(vantages: list[dpuflow.Vantage], room: Path) -> list[dpuflow.Vantage]:
    """Copies of their captures without anything that names the application."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from blinded import blind

    ports: dict[tuple[bytes, bytes], tuple[int, int]] = {}
    for vantage in vantages:
        blind(Path(vantage.files[0]), room / f"{vantage.name}.pcap", ports)
    return [dpuflow.Vantage(v.name, (str(room / f"{v.name}.pcap"),)) for v in vantages]


if __name__ == "__main__":
    main()
