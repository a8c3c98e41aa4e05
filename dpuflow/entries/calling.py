"""Ranks whose hosts post credits when they call: these date entries that messages leave open.

In: entries by the blockers of their first acts, exchanges. Out: rows that their own first credit dates.

NCCL's host posts an operation's receives when it launches the operation, or when the connection is done with
the one before (NCCL 2.30, src/enqueue.cc uploadProxyOps, src/proxy.cc ProxyAppend); in a CUDA graph a node of
the stream does so right before the kernel (hostStreamPlanCallback). Hosts that run ahead of their GPUs post
them long before these come to the operation: nobody's entry. But where a host launches when its GPU is there,
as in loops that wait for each step and in graphs of decode steps, credits and first messages come together,
long after the rank has left what it did before. Then a rank whose first message waited for a peer that came
late has shown by its own credit that it was there.

That is so of operations in which messages that waited for nothing followed their sender's credit: by less
than half of the time since it left the operation before, nine times in ten, and by less than a fifth of it
usually; or, where hardly any is known to have waited for nothing, three of four of those that may have waited
for a credit. A host may run ahead while another one is late: so it is of ranks whose messages mostly did so,
too, whatever they waited for, or that gave their credits about as long after what was before as those did.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import classes, distinct, key_numbers, median_of, percentile
from dpuflow.entries.relative import places_of
from dpuflow.entries.rows import EXACT_RULES, QUICK, SLOW, Rule
from dpuflow.matching.model import MOST
from dpuflow.schema.rows import NEVER, NONE32, Wire

if TYPE_CHECKING:
    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries.blockers import Scene
    from dpuflow.entries.rows import Entries


FEW: Final = 3
"""First messages by which an operation is known to be called like that."""
MOSTLY: Final = 0.75
"""Of first messages that may have waited for a peer's credit, those that followed their own as closely."""
NEAR: Final = 0.2
"""Of the time since a rank left the operation before, how far its first message usually is behind its credit
at the most."""
OPEN: Final = (Rule.CREDIT, Rule.AFTER_INPUT)
"""What leaves open whether a rank had been there before its first message."""


class Called(NamedTuple):
    """Arrays by row of Entries."""

    rows: Bools  # dated by their own credit
    enter_ns: Ints  # when the first message would have left
    error_ns: Ints  # half of the interval in which 95 % of first messages follow the credit
    act: Ints  # TRANSFER row of the credit


def without_calls(entries: Entries, rows: Bools, of_row: Ints) -> Entries:
    """Entries without times from an operation's last input to the next one's first credit that tell when the
    next one was called, not how soon a slot was given back: of groups that have such ``rows``."""
    at, ns = entries.reactions.between
    kept = ~np.isin(of_row[at], distinct(of_row[rows]))
    return replace(entries, reactions=entries.reactions._replace(between=(at[kept], ns[kept])))


def called(scene: Scene, rule: Ints) -> Called:
    """Rows that their own first credit dates; ``rule``: what each rests on by what it may have waited for."""
    entries = scene.entries
    none = np.zeros(len(rule), np.int64)
    found = Called(np.zeros(len(rule), np.bool_), entries.enter_ns.copy(), none, entries.act.copy())
    known = (entries.granted_ns != NEVER) & (entries.enter_ns != NEVER) & (entries.since_ns != NEVER)
    known &= _of_nccl(scene) & (entries.granted_ns > entries.since_ns)
    rows = np.flatnonzero(known)
    if not len(rows):
        return found
    ahead = (entries.enter_ns - entries.granted_ns)[rows]
    before = (entries.granted_ns - entries.since_ns)[rows]
    near = 2 * np.abs(ahead) <= (entries.enter_ns - entries.since_ns)[rows]  # a slow host's come long after
    free, waited = np.isin(rule[rows], EXACT_RULES), np.isin(rule[rows], OPEN)
    for mine in classes(scene.of_row[rows], _kinds(scene)[rows]):
        shown, least = mine[free[mine]], MOST
        if len(shown) < max(FEW, (1 - MOST) * len(mine)):
            shown, least = mine[free[mine] | (rule[rows[mine]] == Rule.CREDIT)], MOSTLY
        if len(shown) < FEW or near[shown].mean() < least:
            continue
        if median_of(ahead[shown]) > NEAR * median_of((ahead + before)[shown]):
            continue
        low, usual, high = (percentile(ahead[shown], each) for each in (QUICK, 50.0, SLOW))
        worked = before[mine] >= median_of(before[shown]) / 2
        ends = entries.endpoint[rows[mine]]
        alike = [np.bincount(ends, each) / np.maximum(np.bincount(ends), 1) for each in (near[mine], worked)]
        at = rows[mine[waited[mine] & (np.max(alike, axis=0)[ends] > 0.5)]]
        found.rows[at] = True
        found.enter_ns[at] = np.minimum(entries.enter_ns[at], entries.granted_ns[at] + round(usual))
        found.error_ns[at] = round(max(high - usual, usual - low))
    found.act[found.rows] = _own_credits(scene, np.flatnonzero(found.rows))
    return found


def _of_nccl(scene: Scene) -> Bools:
    """Rows of NCCL's operations over RoCE whose rank was captured."""
    wires = scene.exchanges["wire"]
    fit = [len(i.rows) > 0 and wires[i.rows[0]] == Wire.ROCE_WRITE_IMM for i in scene.instances]
    seen = np.array([i.was_captured(end) for i in scene.instances for end in i.order], np.bool_)
    return seen & np.array(fit, np.bool_)[scene.entries.collective]


def _kinds(scene: Scene) -> Ints:
    """By row a number for the operation and its bytes."""
    return key_numbers((i.op, i.size, i.root) for i in scene.instances)[scene.entries.collective]


def _own_credits(scene: Scene, rows: Ints) -> Ints:
    """TRANSFER rows of the first credit that the ranks of ``rows`` gave in their operations."""
    entries, exchanges = scene.entries, scene.exchanges
    out = np.full(len(entries.rule), NONE32, np.int64)
    numbers = distinct(entries.collective[rows]).tolist()
    mine = np.concatenate([np.zeros(0, np.int64), *(scene.instances[n].rows for n in numbers)])
    of = np.repeat(np.array(numbers, np.int64), [len(scene.instances[n].rows) for n in numbers])
    place = places_of(of, exchanges["dst"][mine], entries)
    first = (place >= 0) & (exchanges["grant_ns"][mine] == entries.granted_ns[place])
    out[place[first]] = exchanges["grant"][mine[first]]
    return out[rows]
