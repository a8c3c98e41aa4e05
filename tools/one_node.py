"""What one node's capture alone tells, over every node of cases with truth, and what it could tell at best.

usage: python tools/one_node.py [--why] CASE...
       (folders with meta.json, truth.json and a capture for each node; --why: what is behind the misses)

Asked are the true collectives in which the captured rank, or one that it exchanges messages with in it, was
last by at least 1 ms. ``named``: the analysis of that node's capture claims (exact, at least) most lateness
for that rank; where claims are equal (0 or more) the first listed counts. ``proven``: the same, by a claim
above 0 that no other equals. ``points``: of all bounds, upper ones too, the largest lateness is that rank's:
it, or one that it waits for, was the last. ``can be told``: in how many an onlooker would know it that sees
the same messages and knows algorithm and places (both as told from all captures), while everything but
waiting for others takes no time: the rank is the captured one; or a message stands for its entry alone; or
all others that a message may have waited for had been heard of before.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import dpuflow
import dpuflow.matching
from dpuflow.reports.json import json_lines
from dpuflow.schedules.graph import depths
from dpuflow.schema.rows import Op
from dpuflow.scoring.score import match_collectives, score_case
from dpuflow.scoring.truth import Case, TrueCollective, read_case

if TYPE_CHECKING:
    from dpuflow.matching import Instance, Job
    from dpuflow.schema.tables import Rows

MARGIN_NS = 1_000_000
CLAIMS = ("exact", "at_least")


def analysed(files: list[Path]) -> tuple[dict[str, Any], Rows, list[Instance]]:
    """The JSON of an analysis, and the exchanges and collectives that it was made of."""
    kept: list[Any] = []
    build = dpuflow.matching.build_collectives

    def keep(job: Job) -> list[Instance]:
        kept[:] = [job.exchanges, build(job)]
        return kept[1]

    with mock.patch.object(dpuflow.matching, "build_collectives", keep):
        vantages = [dpuflow.Vantage(file.name.split(".")[0], (str(file),)) for file in files]
        result = json.loads("".join(json_lines(dpuflow.analyze(vantages))))
    return result, kept[0], kept[1]


class Whole:
    """A case as all its captures show it: who exchanges messages with whom in each true collective."""

    def __init__(self, folder: Path) -> None:
        nodes = json.loads((folder / "meta.json").read_text())["nodes"]
        self.folder = folder
        self.nodes = [(node.get("rank", at), folder / node["capture"]) for at, node in enumerate(nodes)]
        result, self.exchanges, instances = analysed([file for _, file in self.nodes])
        case = read_case(str(folder), result)
        self.rank = {endpoint: rank for rank, endpoint in case.endpoint_of_rank.items()}
        matches = match_collectives(case.collectives, result["collectives"])
        whole = len(instances) == len(result["collectives"])
        self.of = {true: instances[guess] for true, guess in matches.items()} if whole else {}

    def visible(self, rank: int, case: Case) -> list[TrueCollective]:
        """The true collectives with those endpoints alone that this rank exchanges messages with."""
        name = {endpoint: rank for rank, endpoint in case.endpoint_of_rank.items()}
        found = []
        for number, truth in enumerate(case.collectives):
            seen = self.peers(number, rank) | {rank}
            enter = {end: at for end, at in truth.enter_ns.items() if name.get(end) in seen}
            found.append(replace(truth, enter_ns=enter or truth.enter_ns))
        return found

    def peers(self, number: int, rank: int) -> set[int]:
        """The ranks that this one exchanges messages with in a true collective."""
        if number not in self.of:
            return set()
        rows = self.exchanges[self.of[number].rows]
        pairs = {(self.rank[a], self.rank[b]) for a, b in zip(rows["src"], rows["dst"], strict=True)}
        return {b for a, b in pairs if a == rank} | {a for a, b in pairs if b == rank}

    def tellable(self, number: int, rank: int, last: int, enter: dict[int, int]) -> bool:
        """Whether an onlooker at ``rank`` could know that ``last`` was last; ``enter`` by rank."""
        instance = self.of[number]
        if last == rank or instance.algorithm is None:
            return last == rank
        ranks = [self.rank[end] for end in instance.order]
        own, me = enter[rank], ranks.index(rank)
        heard = [
            (src, links.keys() - {me}, me in links)
            for ((src, dst), _), links in depths(instance.algorithm, len(ranks), instance.root or 0).items()
            if dst == me and src != me
        ]
        when = [max([enter[ranks[p]] for p in others] + [own] * mine) for _, others, mine in heard]
        carries = instance.algorithm.op != Op.ALL_TO_ALL
        first: dict[int, int] = {}
        for at in np.argsort(when, kind="stable").tolist():
            src, others, _ = heard[at]
            for place in others if carries else [src]:
                first.setdefault(place, at)
        known = {me: own}
        for at, (src, others, _) in enumerate(heard):
            unknown = [place for place in others if when[first.get(place, at)] >= when[at]]
            if len(unknown) == 1 and (carries or unknown == [src]):
                known[unknown[0]] = when[at]
        return ranks[max(known, key=lambda place: known[place])] == last


def last_of(truth: TrueCollective, case: Case) -> int | None:
    """The endpoint that was last by enough; None where none was, or no packet can show it."""
    order = sorted(truth.lateness_ns.items(), key=lambda item: item[1])
    if truth.warm_up or len(order) < 2 or order[-1][1] - order[-2][1] < MARGIN_NS:
        return None
    hidden = truth.op == "broadcast" and order[-1][0] == truth.root and "openmpi" in case.software
    return None if hidden else order[-1][0]


def view(whole: Whole, rank: int, file: Path) -> Counter[str]:
    """Counts for one node's capture."""
    result, _, _ = analysed([file])
    case = read_case(str(whole.folder), result)
    name = {endpoint: rank for rank, endpoint in case.endpoint_of_rank.items()}
    matches = match_collectives(whole.visible(rank, case), result["collectives"])
    score = score_case(result, case)
    found: Counter[Any] = Counter(bounds=score.bounds, violated=score.bounds_violated)
    for number, truth in enumerate(case.collectives):
        last = last_of(truth, case)
        enter = {name.get(end, -1 - end): at for end, at in truth.enter_ns.items()}
        if last is None or rank not in enter:
            continue
        late = name.get(last, -1 - last)
        if late != rank and late not in whole.peers(number, rank):
            continue
        guess = result["collectives"][matches[number]] if number in matches else None
        ranks = guess["ranks"] if guess else []
        told = {r["endpoint"]: r["lateness_ns"] for r in ranks if r["bound"] in CLAIMS}
        most = max(told.values(), default=0)
        proven = most > 0 and [end for end, value in told.items() if value == most] == [last]
        bounds = {r["endpoint"]: r["lateness_ns"] for r in ranks if r["lateness_ns"] is not None}
        named, points = _largest(told) == last, _largest(bounds) == last
        can = number in whole.of and whole.tellable(number, rank, late, enter)
        found.update(asked=1, named=named, proven=proven, points=points, can=can, both=named and can)
        if not points:
            row = next((r for r in ranks if r["endpoint"] == last), None)
            shown = f"{row['bound']}: {row['why'].split(' (')[0]}" if row else "not found"
            place = "itself" if late == rank else f"+{(late - rank) % len(enter)} of {len(enter)}"
            found[truth.op, guess["algorithm"] if guess else None, place, shown] += 1
    return found


def _largest(lateness: dict[int, int]) -> int | None:
    return max(lateness, key=lambda end: lateness[end]) if lateness else None


def main(arguments: list[str]) -> None:
    """Print a line a case and one for all."""
    why = "--why" in arguments
    print(
        f"{'case':45} {'asked':>6} {'named':>6} {'proven':>7} {'points':>7} {'can be told':>12}"
        f" {'named of these':>15} {'violated':>10}"
    )
    total: Counter[Any] = Counter()
    for folder in (Path(argument) for argument in arguments if argument != "--why"):
        if (folder / "truth.json").exists() and (folder / "meta.json").exists():
            whole = Whole(folder)
            found = sum((view(whole, rank, file) for rank, file in whole.nodes), Counter[Any]())
            print(_line(folder.name, found), flush=True)
            if why:
                _print_misses(found)
            total += found
    print(_line("all", total))


def _print_misses(found: Counter[Any]) -> None:
    """How often the late rank was at which place, and what was said of it instead."""
    misses = {key: count for key, count in found.items() if isinstance(key, tuple)}
    for (op, algorithm, place, shown), count in sorted(misses.items(), key=lambda item: -item[1]):
        print(f"    {count:4} {op} {algorithm}, the late one {place}: {shown}")


def _line(name: str, found: Counter[Any]) -> str:
    def share(part: str, of: str) -> str:
        return f"{100 * found[part] / found[of]:.1f}" if found[of] else "-"

    return (
        f"{name:45} {found['asked']:6} {share('named', 'asked'):>6} {share('proven', 'asked'):>7}"
        f" {share('points', 'asked'):>7} {share('can', 'asked'):>12}"
        f" {share('both', 'can'):>15} {found['violated']:>4}/{found['bounds']}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
