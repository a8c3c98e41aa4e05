"""``python -m bench.accuracy``: how right dpuflow is on scripted jobs, and on real captures beside them."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import dpuflow
from bench.accuracy.draw import PARTLY, STREAMED, TROUBLED, draw
from bench.accuracy.measure import Measured, handover_spread_ns, measure
from bench.accuracy.midjob import MID_JOB
from bench.accuracy.onesided import many
from bench.accuracy.partly import HELD, some
from bench.accuracy.smallest import smallest_ns
from bench.accuracy.sweep import sweep
from bench.accuracy.troubles import faulty
from dpuflow.quantities import duration
from dpuflow.reports.layout import table
from dpuflow.reports.scores import transfer_lines
from dpuflow.scoring.figures import percentile
from dpuflow.scoring.score import Score, score_case
from dpuflow.scoring.truth import read_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HEADER = (
    "", "cases", "true", "found", "invent", "op", "alike", "algo", "proto", "bytes", "within", "exact",
    "datable", "median", "p99", "prec", "recall", "shown", "of it", "bounds", "clock", "cause", "verdict",
)  # fmt: skip
"""``datable``: given as exact of what packets date; ``shown``: share of late ranks that packets prove to be
so, ``of it``: share of these that are said to be."""


def one(number: int, profile: str | None, setup: bool = False) -> tuple[int, Measured | str]:
    """Figures of scenario ``number``, or the error it ended with; ``setup``: with what set the job up."""
    # Numbers from MID_JOB on are those without it, cut; of NCCL over TCP the same behind STREAMED.
    cut = MID_JOB <= number % STREAMED < PARTLY
    mid_job = number - MID_JOB if cut else None
    scenario = draw(number if mid_job is None else mid_job, profile)
    if setup:
        scenario = replace(scenario, nccl=replace(scenario.nccl, setup=True))
    try:
        return number, measure(scenario, mid_job)
    except dpuflow.DpuflowError as error:
        return number, f"{type(error).__name__}: {error}"


@click.command()
@click.option("--count", type=click.IntRange(min=1), default=200, show_default=True, help="Scenarios.")
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first."
)
@click.option("--profile", type=click.Choice(["fabric", "host"]), help="One profile only.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--sweep", "swept", is_flag=True, help="Only the smallest lateness told, by kind: a minute.")
@click.option("--mid-job", "mid_job", is_flag=True, help="Cut all captures to a window in mid-job.")
@click.option("--setup", is_flag=True, help="The captures hold NCCL's set-up exchange, too.")
@click.option("--cases", is_flag=True, help="One row for each scenario as well.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the figures of each scenario."
)
def main(
    count: int,
    first: int,
    profile: str | None,
    jobs: int,
    swept: bool,
    mid_job: bool,
    setup: bool,
    cases: bool,
    json_file: Path | None,
) -> None:
    """Draw scenarios, write their captures, analyse and score them; then the real captures, where they are.

    The exit status says nothing about accuracy.
    """
    if swept:
        print("\n".join(sweep(profile or "fabric")))
        return
    start = time.monotonic()
    start_at = first + MID_JOB if mid_job else first
    others = [*many(count), *some(count), *faulty(count)] if start_at == 0 else []
    numbers = [*range(start_at, start_at + count), *others]
    run: Callable[[int], tuple[int, Measured | str]] = partial(one, profile=profile, setup=setup)
    found: list[Measured] = []
    partly: list[Measured] = []
    troubled: list[Measured] = []
    failed: list[str] = []
    with ProcessPoolExecutor(jobs) as pool:
        every = pool.map if jobs > 1 else map
        results: Iterable[tuple[int, Measured | str]] = every(run, numbers)
        for number, result in results:
            if isinstance(result, Measured):
                apart = found if number >= STREAMED else troubled if number >= TROUBLED else partly
                (apart if number >= PARTLY else found).append(result)
            else:
                failed.append(f"{number}: {result}")
            if sys.stderr.isatty():
                print(f"\r{numbers.index(number) + 1}/{len(numbers)}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    rows: list[list[str]] = [_row(each.name, [each]) for each in found + partly + troubled] if cases else []
    for title, key in (
        ("operation", lambda m: "-".join(m.name.split("-")[1:4])),
        ("fault", lambda m: m.name.split("-")[5]),
        ("profile", lambda m: m.name.split("-")[6]),
        ("clocks", lambda m: "one clock" if not m.estimated else "clocks estimated"),
        ("beginning", lambda m: m.begins),
    ):
        rows += [[f"by {title}", *[""] * (len(HEADER) - 1)], *_by(found, key)]
    rows.append(_row("simulated", found))
    if partly:
        rows += [["captured at", *[""] * (len(HEADER) - 1)]]
        rows += [
            _row(f"  {title}", group)
            for held, title in HELD.items()
            if (group := [each for each in partly if each.name.endswith(f"-{held}")])
        ]
    if troubled:
        rows += [["troubles, by kind", *[""] * (len(HEADER) - 1)]]
        rows += _by(troubled, lambda m: m.name.split("-")[5].split("+")[0])
        rows += [["troubles, by job", *[""] * (len(HEADER) - 1)]]
        rows += _by(troubled, lambda m: "-".join(m.name.split("-")[1:4]))
        rows += [["troubles, together", *[""] * (len(HEADER) - 1)]]
        rows += _by(troubled, lambda m: "a GPU late as well" if "+" in m.name else "nobody late")
    rows += _real()
    print("\n".join(table(list(HEADER), rows)))
    print("\n".join(transfer_lines(_together(found).score)))
    print("\n".join(_asked(found)))
    print("\n".join(_told_troubles(troubled)))
    print("\n".join(_against_handovers(found)))
    print("\n".join(_spread(found)))
    print("\n".join(_smallest(found)))
    every_one = found + partly + troubled
    packets = sum(each.packets for each in every_one)
    print(f"{len(every_one)} scenarios, {packets:,} packets, {time.monotonic() - start:.0f} s")
    for line in failed:
        print(f"failed: {line}")
    if json_file is not None:
        document = {each.name: _figures(each) for each in found + partly + troubled}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _told_troubles(troubled: list[Measured]) -> list[str]:
    """How often a finding speaks of the network or of credits, where that is what is wrong."""
    if not troubled:
        return []
    total = _together(troubled)
    return [
        f"troubles: of {total.troubled} {total.trouble_told} have a finding on the network or on credits; "
        f"verdicts not asked for in {total.unasked}"
    ]


def _by(found: list[Measured], key: Callable[[Measured], str]) -> list[list[str]]:
    """A row for each group."""
    groups: dict[str, list[Measured]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return [_row(f"  {name}", group) for name, group in sorted(groups.items())]


def _against_handovers(found: list[Measured]) -> list[str]:
    """The median error of exact lateness against how far two hand-overs of the profile differ by chance."""
    lines = []
    for profile in ("fabric", "host"):
        group = [each for each in found if f"-{profile}" in each.name]
        error_ns = percentile(_together(group).errors_ns, 0.5)
        if error_ns is not None:
            spread_ns = handover_spread_ns(profile)
            lines.append(
                f"{profile}: median error {duration(error_ns)}, {error_ns / spread_ns:.2f} of what two "
                f"hand-overs differ by in the median ({duration(round(spread_ns))})"
            )
    return lines


def _asked(found: list[Measured]) -> list[str]:
    """What is not asked for, as no packet shows it."""
    total = _together(found)
    return [
        f"bytes asked for in {total.bytes_asked} of {total.score.found} collectives: "
        "in the others more byte counts than one have these packets",
        f"verdicts and causes not asked for in {total.unasked} scenarios: "
        "packets do not show that the rank was late, or not by enough to speak of",
    ]


def _smallest(found: list[Measured]) -> list[str]:
    """The smallest lateness told with 99 % precision and recall, by kind of operation."""
    kinds: dict[str, list[tuple[int, int | None]]] = {}
    for each in found:
        parts = each.name.split("-")
        kinds.setdefault(f"{parts[6]} {'-'.join(parts[1:4])}", []).extend(each.pairs)
    rows = []
    for name, pairs in sorted(kinds.items()):
        exact = [pair for pair in pairs if pair[1] is not None]
        share = f"{100 * len(exact) / len(pairs):.0f} %" if pairs else "-"
        told = [_or_none(smallest_ns(each)) for each in (exact, pairs)]
        rows.append([name, str(len(pairs)), share, *told])
    return table(["smallest lateness, 99 %", "ranks", "exact", "of exact ones", "of all"], rows)


def _or_none(time_ns: int | None) -> str:
    return "-" if time_ns is None else duration(time_ns)


def _spread(found: list[Measured]) -> list[str]:
    """How the figures vary from scenario to scenario: quartiles, and the share of scenarios without fault."""
    lines = []
    for title, key in (
        ("found", "found_share"),
        ("op", "op_right"),
        ("algo", "algorithm_right"),
        ("bytes", "bytes_right"),
        ("exact", "exact_share"),
        ("prec", "late_precision"),
        ("recall", "late_recall"),
    ):
        every = [each.score.figures()[key] for each in found]
        shares = sorted(value for value in every if isinstance(value, float))
        if shares:
            quartiles = [f"{100 * shares[int(q * (len(shares) - 1))]:.0f}" for q in (0.25, 0.5, 0.75)]
            whole = sum(share == 1.0 for share in shares)
            lines.append(
                f"{title:<7} by scenario: {' / '.join(quartiles)} %; all right in {whole} of {len(shares)}"
            )
    return lines


def _together(group: list[Measured]) -> Measured:
    total = Measured("")
    for each in group:
        total.add(each)
    return total


def _figures(measured: Measured) -> dict[str, object]:
    return {
        **measured.score.figures(),
        "op_alike": measured.op_alike,
        "bytes_held": measured.bytes_held,
        "protocol_asked": measured.protocol_asked,
        "protocol_right": measured.protocol_right,
        "lateness_error_p99_ns": percentile(measured.errors_ns, 0.99),
        "bounds_violated": measured.violated,
        "causes": measured.causes,
        "causes_right": measured.causes_right,
    }


def _row(name: str, group: list[Measured]) -> list[str]:
    total = _together(group)
    figures = total.score.figures()

    def percent(value: object) -> str:
        return f"{100 * value:.1f}" if isinstance(value, float) else "-"

    def share(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    found = total.score.found
    return [
        name, str(len(group)), str(total.score.true), *(percent(figures[key]) for key in ("found_share",
        "invented_share", "op_right")), percent(share(total.op_alike, found)),
        percent(figures["algorithm_right"]), percent(share(total.protocol_right, total.protocol_asked)),
        percent(share(total.bytes_right, total.bytes_asked)), percent(share(total.bytes_held, found)),
        percent(figures["exact_share"]), percent(share(total.dated_exact, total.dated)),
        duration(percentile(total.errors_ns, 0.5)), duration(percentile(total.errors_ns, 0.99)),
        *(percent(figures[key]) for key in ("late_precision", "late_recall")), percent(share(total.late_shown,
        total.late)), percent(share(total.late_told, total.late_shown)), f"{total.violated}/{total.bounds}",
        duration(max(total.clock_ns, default=None)), f"{total.causes_right}/{total.causes}",
        f"{total.score.verdicts_right}/{total.score.verdicts}",
    ]  # fmt: skip


def _real() -> list[list[str]]:
    """The captures of real Soft-RoCE and of NCCL's own net_ib, where the checkout has them."""
    root = Path(os.environ.get("DPUFLOW_SHARED", "../shared")) / "captures" / "roce"
    rows = []
    groups: dict[str, list[Measured]] = {}
    for folder in sorted(root.glob("*")):
        files = sorted(folder.glob("node*.pcap.gz"))
        if not files or not (folder / "truth.json").exists() or folder.name.startswith("perftest"):
            continue
        result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
        from dpuflow.reports.json import json_lines

        analysis = json.loads("\n".join(json_lines(result)))
        score: Score = score_case(analysis, read_case(str(folder), analysis))
        measured = Measured(
            folder.name, score, op_alike=round(score.op_right), bytes_held=round(score.bytes_right)
        )
        measured.errors_ns, measured.clock_ns = list(score.lateness_errors_ns), list(score.clock_errors_ns)
        measured.bounds, measured.violated = score.bounds, score.bounds_violated
        groups.setdefault("net_ib" if folder.name.startswith("nccl") else "Soft-RoCE, MPI", []).append(
            measured
        )
    for name, group in groups.items():
        rows.append(_row(f"real: {name}", group))
    return rows or [["real: none found, set DPUFLOW_SHARED", *[""] * (len(HEADER) - 1)]]


if __name__ == "__main__":
    main()
