"""Messages that follow the last operation a group finished, and who of a stopped job waits for whom.

In: exchanges, collectives, until when captures go on. Out: stopped parts of the job, with who waits and who
is missing. A receiver that granted waits for the data; where that names nobody, those that took part wait for
those that did not. Who waits for another is itself kept: missing is who began nothing, and is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import Picked, cut_at, distinct, order_within, spans
from dpuflow.schema.rows import NEVER, NONE32
from dpuflow.verdicts.pauses import TWICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


LOOK_BACK: Final = 64
"""Operations before the last one that what was begun may be like."""


class Rest(NamedTuple):
    """What a group began after its last whole operation; times in ns on the reference clock."""

    group: int
    last: int  # the number of that operation among all
    before: int  # and of the one before it
    finished: int  # how many the group finished
    quiet_ns: int  # for so long nothing may follow, were it to go on
    rows: Ints  # EXCHANGE rows
    acted: frozenset[int]  # endpoints that sent or granted
    absent: frozenset[int]  # those that would first of all, as in an operation before that began like it
    waits: frozenset[tuple[int, int]]  # who granted, and who has not sent


class Stopped(NamedTuple):
    """A part of the job that stands still."""

    rest: Rest  # where a missing rank would be, else any
    part: list[Rest]
    missing: list[int]  # empty where that cannot be told
    waiting: list[int]
    others: list[int]  # members of its groups of whom nothing was seen since
    began_ns: int
    ended_ns: int  # the last sign of any of them
    rows: Ints


def find_stopped(case: Case, until: Mapping[int, int]) -> Iterator[Stopped]:
    """The parts of the job, each of groups that share endpoints, that began what nobody finished.

    ``until``: when each endpoint's capture ends; for those without one that of all counts.
    """
    numbers = [list[int]() for _ in case.inferred.groups]
    for number, group in enumerate(case.inferred.group_of.tolist()):
        numbers[group].append(number)
    lines = Lines(case.exchanges)
    rests = [
        rest
        for group, mine in enumerate(numbers)
        if (rest := _rest_of(case, group, np.array(mine, np.int64), lines)) is not None
    ]
    if not rests:
        return
    signs = _signs(case.exchanges, np.concatenate([i.rows for i in case.instances]))
    for part in connected(rests, lambda rest: case.inferred.groups[rest.group]):
        rows = distinct(np.concatenate([rest.rows for rest in part]))
        ends = {end for rest in part for end in case.inferred.groups[rest.group]}
        ended = max(int(_last_signs(case.exchanges[rows]).max()), *(signs.get(end, 0) for end in ends))
        goes_on = min(until.get(end, case.joined.end_ns) for end in ends)
        if goes_on < ended + max(rest.quiet_ns for rest in part):
            continue
        acted = frozenset().union(*(rest.acted for rest in part))
        missing = _missing(part, acted)
        if not missing and not any(rest.waits for rest in part):
            continue  # all took part, and nobody lacks anything: it was finished, whatever it was
        rest = next((rest for rest in part if rest.absent & missing), part[0])
        began = int(_first_signs(case.exchanges[rows]).min())
        others = sorted(ends - acted - missing)
        yield Stopped(rest, part, sorted(missing), sorted(acted - missing), others, began, ended, rows)


def _rest_of(case: Case, group: int, numbers: Ints, lines: Lines) -> Rest | None:
    """What a group began and did not finish; None where too few came before, or nothing after.

    ``numbers`` are its operations.
    """
    entries, exchanges = case.inferred.entries, case.exchanges
    numbers = numbers[entries.whole[entries.offsets[numbers]]]
    if len(numbers) < TWICE + 1:
        return None
    of = [case.instances[n].rows for n in numbers.tolist()]
    done, counts = np.concatenate(of), np.array([len(rows) for rows in of])
    starts = np.minimum.reduceat(_first_signs(Picked(exchanges, done)), np.cumsum(counts) - counts)
    numbers, starts = numbers[np.argsort(starts, kind="stable")], np.sort(starts)
    rows = lines.after(done)
    rows = rows[_first_signs(exchanges[rows]) > starts[-1]]
    rows = rows[~_overtaken(exchanges, rows, of)]
    if not len(rows):
        return None
    rest = exchanges[rows]
    granted = rest["grant_ns"] != NEVER
    pending = rest[granted & (rest["data_ns"] == NEVER)]
    acted = _acting(rest)
    like = _begun(case, rows, numbers[::-1][:LOOK_BACK].tolist(), lines)
    absent = (
        frozenset[int]()
        if like is None
        else _free(case.instances[like], exchanges[case.instances[like].rows])
    )
    return Rest(
        group,
        int(numbers[-1]),
        int(numbers[-2]),
        len(numbers),
        TWICE * int(np.diff(starts).max()),
        rows,
        acted,
        absent - acted,
        frozenset(zip(pending["dst"].tolist(), pending["src"].tolist(), strict=True)),
    )


def _overtaken(exchanges: Rows, rows: Ints, of: Sequence[Ints]) -> NDArray[np.bool_]:
    """Per row whether its sender then began an operation that the group finished; ``of``: rows of each.

    A communicator's operations follow each other: such a row is a part of one that is over. (Communicators of
    the same ranks are one group here.)
    """
    began = np.full(int(exchanges["src"].max(initial=0)) + 1, NEVER)
    done = Picked(exchanges, np.concatenate(of))
    # Of each operation and sender the first time; of each sender the latest of these.
    key = np.repeat(np.arange(len(of)), [len(mine) for mine in of]) * len(began) + done["src"]
    order = np.flatnonzero(done["data_ns"] != NEVER)
    order = order[np.lexsort((done["data_ns"][order], key[order]))]
    first = order[np.r_[True, np.diff(key[order]) > 0][: len(order)]]
    np.maximum.at(began, done["src"][first], done["data_ns"][first])
    sent = exchanges["data_ns"][rows]
    overtaken: NDArray[np.bool_] = (sent != NEVER) & (sent < began[exchanges["src"][rows]])
    return overtaken


def _begun(case: Case, rows: Ints, numbers: Sequence[int], lines: Lines) -> int | None:
    """Of operations ``numbers``, the last one first, that which ``rows`` may begin, by bytes on each line.

    Where no two have the same (tokens for experts) the last one, if all who sent now sent over these lines.
    None of them: nobody knows who takes part in it, nor who acts first.
    """
    sent = rows[case.exchanges["data_ns"][rows] != NEVER]
    begun = lines.sizes(sent)
    wholes: list[dict[int, list[int]]] = []
    for number in numbers:
        whole = lines.sizes(case.instances[number].rows)
        if all(whole.get(line, [])[: len(own)] == own for line, own in begun.items()):
            return number
        wholes.append(whole)
    acting = set(case.exchanges["src"][sent].tolist())
    theirs = case.instances[numbers[0]].rows
    theirs = theirs[np.isin(case.exchanges["src"][theirs], list(acting))]
    ragged = all(whole != wholes[0] for whole in wholes[1:])
    return numbers[0] if acting and ragged and lines.sizes(theirs).keys() == begun.keys() else None


class Lines:
    """EXCHANGE rows by direction of a connection."""

    def __init__(self, exchanges: Rows) -> None:
        self._bytes, self._order = exchanges["bytes"], exchanges["order"].astype(np.int64)
        line = 2 * exchanges["connection"].astype(np.int64) + (exchanges["src"] > exchanges["dst"])
        self._rows = order_within(np.arange(len(line)), line)
        in_order = line[self._rows]
        begins = np.r_[True, in_order[1:] != in_order[:-1]][: len(line)]
        self._bounds = np.r_[np.flatnonzero(begins), len(line)]
        self._line = np.empty_like(line)  # from 0 on, in the order of ``line``
        self._line[self._rows] = np.cumsum(begins) - 1
        self._last = np.full(len(self._bounds) - 1, -1)

    def sizes(self, rows: Ints) -> dict[int, list[int]]:
        """The bytes of ``rows`` by line, in order."""
        rows = rows[np.lexsort((self._order[rows], self._line[rows]))]
        lines, first = np.unique(self._line[rows], return_index=True)
        parts = cut_at(self._bytes[rows], first[1:])
        return {line: part.tolist() for line, part in zip(lines.tolist(), parts, strict=False)}

    def after(self, done: Ints) -> Ints:
        """Rows that come later than all of ``done`` in their direction of a connection of these."""
        lines = self._line[done]
        known = distinct(lines)
        np.maximum.at(self._last, lines, self._order[done])
        last, self._last[known] = self._last[known], -1
        begin = self._bounds[known]
        count = self._bounds[known + 1] - begin
        rows = self._rows[spans(begin, count)]
        later: Ints = np.sort(rows[self._order[rows] > np.repeat(last, count)])
        return later


def _acting(rows: Rows) -> frozenset[int]:
    """Endpoints that sent data or granted it."""
    sent, granted = rows["src"][rows["data_ns"] != NEVER], rows["dst"][rows["grant_ns"] != NEVER]
    return frozenset(sent.tolist()) | frozenset(granted.tolist())


def _free(instance: Instance, rows: Rows) -> frozenset[int]:
    """Endpoints that acted in a collective, and whose acts there (``rows``) wait for nobody unseen.

    What sends first in a tree or chain of which some was seen may pass on what it had to wait for.
    """
    sends, grants = ({instance.order[row] for row in found} for found in instance.undated_rows())
    sent, granted = rows["src"][rows["data_ns"] != NEVER], rows["dst"][rows["grant_ns"] != NEVER]
    captured = {end for end in instance.order if instance.was_captured(end)}
    own = captured & _acting(rows)
    algorithm = instance.algorithm
    if algorithm is not None and algorithm.rooted and not instance.placement.ranks:
        return frozenset(own)
    return frozenset(own | (set(sent.tolist()) - sends) | (set(granted.tolist()) - grants))


def _missing(part: Sequence[Rest], acted: frozenset[int]) -> frozenset[int]:
    """Who is waited for and began nothing anywhere."""
    absent = frozenset().union(*(rest.absent for rest in part)) - acted
    waited = frozenset(src for rest in part for _, src in rest.waits)
    return absent & waited or absent


def _first_signs(rows: Rows | Picked) -> Ints:
    first = np.full(len(rows), np.iinfo(np.int64).max)
    for name in ("offer_ns", "grant_ns", "data_ns", "arrived_ns"):
        times = rows[name]
        np.minimum(first, times, out=first, where=times != NEVER)
    return first


def _last_signs(rows: Rows | Picked) -> Ints:
    names = ("offer_ns", "grant_ns", "data_end_ns", "arrived_end_ns")
    last: Ints = np.maximum.reduce([rows[name] for name in names])  # NEVER is before all others
    return last


def _signs(exchanges: Rows, rows: Ints) -> dict[int, int]:
    """The last sign that each endpoint sent, or was sent, something."""
    picked = Picked(exchanges, rows)
    last = np.full(int(max(picked["src"].max(initial=0), picked["dst"].max(initial=0))) + 1, NEVER)
    for name in ("src", "dst"):
        np.maximum.at(last, picked[name], _last_signs(picked))
    return dict(enumerate(last.tolist()))


def evidence_rows(rows: Rows) -> list[int]:
    """TRANSFER rows of data, else of grants."""
    shown = np.where(rows["data"] != NONE32, rows["data"], rows["grant"])
    return [int(row) for row in shown[shown != NONE32]]
