"""Memory keys in (``keys``), findings about memory that is registered again and again out.

A key is new where no message has named it before. Whoever owns the memory has registered it since: the
receiver of a WRITE, the sender of what a READ brings. Uses are compared, a collective or a bulk transfer
each: with those of peers at the same time whose keys are known, else with the owner's own of known keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Places, distinct, first_alike, median_of, numbered
from dpuflow.entries.relative import previous_row
from dpuflow.findings.case import SMALL_SHARE, Cost, NotJudgedError, make_finding
from dpuflow.findings.clients import FEWEST, SURELY
from dpuflow.findings.evidence import SHOWN, message_evidence, worst
from dpuflow.quantities import duration, listed, name_of, percent
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.bulk import columns
from dpuflow.verdicts.units import kinds_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from dpuflow.findings.case import Case
    from dpuflow.results import Finding

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]

MOST: Final = 0.5
"""New for most uses is new for each, as far as a few that go to the same buffer allow."""
_READS, _WRITES = -2, -1
_FAR: Final = np.iinfo(np.int64).max


class Uses(NamedTuple):
    """Collectives and transfers, an owner of memory each, in order of time.

    ``like``: what may be compared (kinds of collectives; transfers: below 0). ``pause_ns``: before it, NaN
    where that is not known; ``usual_ns``: the same of its peers whose keys are known, NaN where there are
    none. ``data``: TRANSFER row.
    """

    owner: Ints
    begin_ns: Ints
    like: Ints
    new: Bools
    pause_ns: Floats
    usual_ns: Floats
    data: Ints


def find_churn(case: Case) -> Iterator[Finding]:
    """One finding for all owners of memory most of whose uses name new keys, and come later for it."""
    uses = _together(_of_collectives(case), _of_transfers(case))
    if not len(uses.owner):
        raise NotJudgedError("no memory key of a collective or a bulk transfer was captured")
    found: list[tuple[float, Ints, Floats]] = []
    untold = False
    of = Places(uses.owner)
    for owner in distinct(uses.owner[uses.new]).tolist():
        own = of[owner]
        fresh = _fresh(uses, own)
        later = _later(uses, own, fresh)
        untold |= len(fresh) >= FEWEST > (later == later).sum()
        fresh, later = fresh[later == later], later[later == later]
        share = min(float(later.sum()) / case.span_ns([owner]), 1.0)
        if _surely(later) and share >= SMALL_SHARE:
            found.append((share, fresh, later))
    if found:
        yield _finding(case, uses, sorted(found, key=lambda each: -each[0]))
    elif untold:
        raise NotJudgedError("keys are new each time, and nothing shows when these uses would have begun")


def _surely(later: Floats) -> bool:
    """Whether uses are later than chance makes them."""
    error = later.std() / np.sqrt(len(later)) if len(later) else 0.0
    return len(later) >= FEWEST and bool(later.mean() > SURELY * error)


def _fresh(uses: Uses, own: Ints) -> Ints:
    """An owner's uses of new keys, of those kinds whose keys do not come again.

    Buffers that are many are all new at first: the later half tells.
    """
    chosen = [own[:0]]
    for like in distinct(uses.like[own[uses.new[own]]]).tolist():
        mine = own[uses.like[own] == like]
        new = uses.new[mine[len(mine) // 2 :]]
        if new.sum() >= FEWEST and new.mean() >= MOST:
            chosen.append(mine[uses.new[mine]])
    return np.concatenate(chosen)


def _later(uses: Uses, own: Ints, fresh: Ints) -> Floats:
    """By how much longer than usual each of an owner's uses ``fresh`` was waited for; NaN: nothing tells."""
    later: Floats = uses.pause_ns[fresh] - uses.usual_ns[fresh]
    for like in distinct(uses.like[fresh[np.isnan(later)]]).tolist():
        known = own[~uses.new[own] & (uses.like[own] == like) & ~np.isnan(uses.pause_ns[own])]
        if len(known) >= FEWEST:
            mine = np.isnan(later) & (uses.like[fresh] == like)
            later[mine] = uses.pause_ns[fresh[mine]] - median_of(uses.pause_ns[known])
    return later


def _finding(case: Case, uses: Uses, found: list[tuple[float, Ints, Floats]]) -> Finding:
    """``found``: of each owner, the costliest first, its share of the time, its uses and by how much they are
    later. Ranks that register at the same time are waited for at the same time."""
    share = found[0][0]
    fresh, later = (np.concatenate([each[column] for each in found]) for column in (1, 2))
    owners = [int(uses.owner[mine[0]]) for _, mine, _ in found]
    names = listed([name_of(case.result.endpoints[owner]) for owner in owners], SHOWN)
    return make_finding(
        "registration_churn",
        owners,
        (int(uses.begin_ns[fresh].min()), int(uses.begin_ns[fresh].max())),
        Cost(round(found[0][2].sum()), share),
        0.6,
        f"{len(fresh)} collectives and transfers use memory of {names} under a key that is new each time, and"
        f" begin {duration(round(float(median_of(later))))} later (median) than those with a known key:"
        f" {percent(share)} of the time.",
        evidence=message_evidence(case.captures, case.joined, worst(uses.data[fresh], later)),
    )


def _of_collectives(case: Case) -> Uses:
    """What ranks registered for the collectives that they entered, as far as that is dated exactly."""
    keys, entries, instances = case.keys, case.inferred.entries, case.instances
    rows = np.concatenate([np.zeros(0, np.int64), *(each.rows for each in instances)])
    number = np.repeat(np.arange(len(instances)), [len(each.rows) for each in instances])
    rows, number = rows[keys.key[rows] > 0], number[keys.key[rows] > 0]
    # Rows of Entries of the owners of this memory.
    place, of_entry = number << 32 | keys.owner[rows], entries.collective << 32 | entries.endpoint
    order = np.argsort(of_entry)
    found = np.minimum(np.searchsorted(of_entry[order], place), len(order) - 1)
    there = of_entry[order[found]] == place if len(order) else place < 0
    entry, rows = order[found[there]], rows[there]
    used, first = np.unique(entry, return_index=True)
    new = np.bincount(entry, keys.new[rows], len(of_entry))[used] > 0
    before, enter, collective = previous_row(entries)[used], entries.enter_ns[used], entries.collective[used]
    left = np.where(before >= 0, entries.leave_ns[before], NEVER)
    known = (left != NEVER) & (enter != NEVER)
    pause = np.where(known, np.maximum(enter - np.where(known, left, 0), 0), np.nan)
    usual, at = np.full(len(used), np.nan), Places(collective)
    for one in distinct(collective[new]).tolist():
        others = at[one][~new[at[one]] & known[at[one]]]
        if len(others):
            usual[at[one]] = median_of(pause[others])
    pause[new & ~entries.exact[used]] = np.nan  # it may have waited for a peer
    kinds = kinds_of(instances, case.inferred.group_of)
    data = case.exchanges["data"][rows[first]].astype(np.int64)
    return Uses(entries.endpoint[used], enter, kinds[collective], new, pause, usual, data)


def _of_transfers(case: Case) -> Uses:
    """What owners registered for bulk transfers.

    Ranks that share a model each hand on their part of the same requests, in the same order: of ways with as
    many transfers those of the same place are peers.
    """
    named, fresh = _named_and_new(case)
    table = columns(
        case.inferred.bulk, "src", "dst", "read", "start_ns", "idle_ns", "left_ns", "row", "message"
    )[:, named]
    way = first_alike(*table[:3])
    order, count = np.argsort(way, kind="stable"), np.bincount(way)
    src, dst, read, start, idle, left, row, data = table[:, order]
    way, fresh = way[order], fresh[named][order]
    place = np.arange(len(way)) - (np.cumsum(count) - count)[way]
    peers = numbered(read, count[way], place)
    alike = np.full(int(peers.max(initial=0)) + 1, _FAR)  # when the first of peers with known keys began
    np.minimum.at(alike, peers[~fresh], start[~fresh])
    alike = alike[peers]
    waited = (idle != NEVER) & (np.r_[case.inferred.entries.enter_ns, NEVER][row] != NEVER)
    begin = np.maximum(start, idle)
    since = np.where(left != NEVER, np.minimum(left, begin), begin)
    pause = np.where(waited, begin - since, np.nan)
    # What its receiver did not wait for cost nothing.
    known = alike != _FAR
    later = np.maximum(start - alike, 0)
    pause = np.where(known, np.where(waited, np.minimum(pause, later), 0), pause)
    return Uses(
        np.where(read > 0, src, dst), start, np.where(read > 0, _READS, _WRITES), fresh, pause,
        np.where(known, 0.0, np.nan), data,
    )  # fmt: skip


def _named_and_new(case: Case) -> tuple[Bools, Bools]:
    """Of each bulk transfer whether some page named a key, and whether one of these was new."""
    rows = [each.rows for each in case.inferred.bulk]
    if not rows:
        return np.zeros(0, bool), np.zeros(0, bool)
    first, every = np.cumsum([0, *map(len, rows[:-1])]), np.concatenate(rows)
    named = np.logical_or.reduceat(case.keys.key[every] > 0, first)
    return named, np.logical_or.reduceat(case.keys.new[every], first)


def _together(a: Uses, b: Uses) -> Uses:
    """Both, in order of time."""
    order = np.argsort(np.concatenate([a.begin_ns, b.begin_ns]), kind="stable")
    return Uses(*(np.concatenate(pair)[order] for pair in zip(a, b, strict=True)))
