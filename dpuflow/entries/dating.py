"""Entries by first acts in; what dates each entry for good, and its error, out.

A rule says what kind of act dates an entry (``entries``). Here each act is weighed against what the capture
shows of its host and its group: how fast they react (``reactions``), and all that it may have waited for
(``blockers``); then ranks that nothing dated yet are, by what others show of them; then errors follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import Picked, classes, percentile
from dpuflow.entries.blockers import Scene, find_blockers, packet_times, solve
from dpuflow.entries.handover import receiving_ns, spreads, usual_reactions, wide_spreads
from dpuflow.entries.inputs import lines_of
from dpuflow.entries.last_candidates import likely_entries
from dpuflow.entries.later_steps import date_behind, read_alike
from dpuflow.entries.queues import queued_rows
from dpuflow.entries.reactions import begun, credited, own_answers, released
from dpuflow.entries.rows import FAR
from dpuflow.entries.rules import BEYOND, BY_GPUS, FAR_BEYOND, FEWEST, QUICK, Rule
from dpuflow.entries.slots import date_by_slots, late_to_inputs
from dpuflow.entries.tails import handed_to_threads, room, served_alike, tails, worst_ns
from dpuflow.schema.rows import NEVER, NONE32, Seen, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.entries.handover import Usual
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Joined, Rows

_BOTH = Seen.AT_SENDER | Seen.AT_RECEIVER


def weigh(
    entries: Entries,
    exchanges: Rows,
    joined: Joined,
    instances: Sequence[Instance],
    group: NDArray[np.int64],
) -> Entries:
    """Entries with every doubt that the capture gives reason for, and with the error of each.

    ``group`` numbers each collective's group.
    """
    of_row = group[entries.collective]
    columns = Picked.exchanges(exchanges)
    usual, tail, left = usual_reactions(entries, of_row), tails(entries, of_row), entries.since_ns
    entries = _undated(entries, instances)
    entries = replace(entries, rule=np.where(own_answers(entries, usual), int(Rule.FREE_STEP), entries.rule))
    packet_ns = packet_times(entries, columns)
    scene = Scene(entries, columns, joined.columns, instances, of_row, usual, packet_ns)
    entries = _solved(scene, exchanges, joined, tail)
    heard = read_alike(exchanges, instances, entries)
    entries = likely_entries(date_behind(entries, heard, usual), heard)
    spread_ns = spreads(exchanges, instances, entries, usual, of_row)
    tail_ns = worst_ns(tail, entries, exchanges, instances)
    entries = replace(entries, margins=replace(entries.margins, spread_ns=spread_ns, tail_ns=tail_ns))
    entries = date_by_slots(entries, columns, instances)
    served = served_alike(entries, exchanges, instances)
    clock, clock_ns = _clocks(entries, joined)
    # Open MPI's caller sends itself: nobody has to wake up for it.
    room_ns = room(entries, begun(entries, left, usual, of_row), of_row)
    room_ns[~served & ~handed_to_threads(entries, exchanges, instances)] = 0
    room_ns = np.maximum(room_ns, _late_stamps(joined)[clock] if len(joined.clocks) else 0)
    # One captured rank is compared with what came to it: bounds hold without, and with it most tell nothing.
    alone = np.array([i.view.near is not None and len(i.view.near) == 1 for i in instances], bool)[
        entries.collective
    ]
    margins = replace(
        entries.margins,
        wide_ns=wide_spreads(entries, served, of_row),
        clock=clock,
        clock_ns=clock_ns,
        room_ns=np.where(alone & served, 0, room_ns),
    )
    return replace(entries, margins=margins)


def _solved(scene: Scene, exchanges: Rows, joined: Joined, tail: NDArray[np.float64]) -> Entries:
    """Entries with the rule that each rests on by all its blockers, since when it may be, and how far off.

    ``tail``: what hand-overs take at the worst.
    """
    entries, usual, of_row = scene.entries, scene.usual, scene.of_row
    way, usual_way = _ways(entries, joined)
    late = released(entries, usual, of_row, tail, _by_gpus(entries, joined))
    late |= late_to_inputs(entries, scene.exchanges, scene.instances)
    credit = credited(scene, way)
    queued = queued_rows(entries, exchanges, scene.instances, usual, tail)
    rule, after = solve(entries, late, list(find_blockers(scene, credit, queued)))
    # Two clocks may be off either way, by that much an input seems to come late.
    early_ns = entries.early_ns[entries.collective]
    rule[early_ns > 2 * _clocks(entries, joined)[1].max(initial=0)] = Rule.CONTRADICTED

    waited, allowed = rule == Rule.QUEUED, (rule == Rule.CREDIT) & (credit.since_ns != NEVER)
    waited &= queued.rows
    # Where packets are missing nothing shows when it had left what came before either.
    untold = rule == Rule.MISSING
    since = np.select([waited, allowed, untold], [queued.called_ns, credit.since_ns, NEVER], entries.since_ns)
    # A rank cannot have been held up before it was there: not before it left its last collective.
    there = np.where(since != NEVER, entries.enter_ns - since, FAR)
    slow = np.nan_to_num(usual.slowest_ns, nan=0.0).astype(np.int64)
    held = np.minimum(np.minimum(receiving_ns(scene.exchanges, entries, usual), there), slow)
    sends_after = (entries.rule == Rule.AFTER_INPUT) & late
    margins = replace(
        entries.margins,
        lead_ns=np.where(waited, queued.lead_ns, NEVER),
        way_ns=way,
        usual_way_ns=usual_way,
        held_ns=held,
        lag_ns=np.where(sends_after, _taking_up_ns(entries, usual, there), entries.margins.lag_ns),
        slow_ns=np.where(np.isnan(usual.slowest_ns), NEVER, slow),
    )
    # No message shows how long work takes.
    since_act = np.select([waited, allowed], [queued.called, NONE32], entries.since_act)
    stalled = _stalled(entries, usual)
    return replace(
        entries, rule=rule, after=after, since_ns=since, since_act=since_act, stalled_ns=stalled,
        margins=margins,
    )  # fmt: skip


def _by_gpus(entries: Entries, joined: Joined) -> NDArray[np.bool_]:
    """Rows whose first act is a GPU's message."""
    wire = np.append(joined.columns["wire"], 0)
    return np.isin(wire[np.where(entries.act == NONE32, -1, entries.act)], BY_GPUS)


def _taking_up_ns(entries: Entries, usual: Usual, there: NDArray[np.int64]) -> NDArray[np.int64]:
    """How long before its first message a rank may have entered that found its input there.

    It takes that up as one does that waits, so its message follows by a reaction; where data that had stopped
    went on before that, by what lies between. 0 for others; ``there``: no longer than since it left its last.
    """
    slow = np.where(usual.by_sends, np.nan_to_num(usual.slowest_ns, nan=0.0), 0.0).astype(np.int64)
    read = np.where(entries.signs.resumed_ns != NEVER, entries.enter_ns - entries.signs.resumed_ns, 0)
    return np.minimum(np.maximum(slow, read), there)


def _stalled(entries: Entries, usual: Usual) -> NDArray[np.int64]:
    """How long each rank sat on an input in mid-operation, at most, where that is far beyond what is usual.

    It had entered and sent all it could; the delay is its own, and later messages of others inherit it.
    Where packets of its messages were sent again, the network may have kept it.
    """
    out, (rows, waited_ns) = np.zeros(len(entries.endpoint), np.int64), entries.reactions.waited
    limit = FAR_BEYOND * usual.slowest_ns[rows]
    far = waited_ns > np.where(np.isnan(limit), np.inf, limit)
    np.maximum.at(out, rows[far], waited_ns[far])
    return np.where(entries.retransmitted > 0, 0, out)


def _ways(entries: Entries, joined: Joined) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For rows of ranks without a capture of their own: how long their first act may have been on its way.

    It is dated by its arrival. No longer, in 95 of 100 cases, than the way to that rank and back, from a
    message to its ACK. Over TCP receivers hold ACKs back (RFC 1122, 4.2.3.2), so there the shortest counts.
    The second: how long it usually was, half of the median way there and back.
    """
    out, usual = np.zeros((2, len(entries.endpoint)), np.int64)
    own = {end for local in joined.local for end in local}
    if not own or joined.at_a_switch:
        return out, usual
    # What set a job up over TCP says nothing of how long its own messages take.
    job = joined.columns["wire"] != Wire.NCCL_SETUP
    transfers = joined.transfers if job.all() else joined.transfers[job]
    held = bool(len(transfers)) and int(transfers["wire"].max()) >= Wire.GLOO_HELLO
    levels = (0, 0) if held else (95, 50)
    measured = (transfers["acked_ns"] != NEVER) & ((transfers["seen"] & Seen.AT_SENDER) != 0)
    measured &= transfers["retransmitted"] == 0
    trips, to = (transfers["acked_ns"] - transfers["sent_end_ns"])[measured], transfers["dst"][measured]
    for endpoint in np.unique(entries.endpoint):
        mine = trips[to == endpoint]
        mine = mine if len(mine) >= FEWEST else trips
        if endpoint in own or not len(mine):
            continue
        rows = entries.endpoint == endpoint
        slow, middle = np.maximum(np.percentile(mine, levels), 0).round().astype(np.int64).tolist()
        out[rows], usual[rows] = slow, middle // 2
    return out, usual


def _undated(entries: Entries, instances: Sequence[Instance]) -> Entries:
    """Make bounds of entries of ranks that may have acted before the first act that was seen of them.

    What such a rank is seen to send may have waited for an input that nobody saw, or not be its first:
    then how long after an input it came says nothing either.
    """
    sends, grants = np.zeros((2, len(entries.rule)), bool)
    for number, instance in enumerate(instances):
        if instance.view.near is not None or instance.view.inside:
            by_send, by_grant = instance.undated_rows()
            sends[entries.offsets[number] + np.array(by_send, np.int64)] = True
            grants[entries.offsets[number] + np.array(by_grant, np.int64)] = True
    declared = np.isin(entries.rule, (Rule.READY, Rule.ANSWER))
    undated = np.where(declared, grants, sends)
    entries = entries.marked(undated, Rule.PARTLY, entries.after)
    return replace(
        entries,
        signs=replace(
            entries.signs,
            unmoved_ns=np.where(undated, NEVER, entries.signs.unmoved_ns),
            free_ns=np.where(sends, NEVER, entries.signs.free_ns),
        ),
    )


def _clocks(entries: Entries, joined: Joined) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The capture that stamped each act, and how far its clock may be off the reference.

    Where nothing of a rank was seen, the one that stamped what it left before.
    """
    tied = [clock.error_ns if clock.tied_ns is None else clock.tied_ns for clock in joined.clocks]
    errors = np.array([error or 0 for error in tied], np.int64)
    acted = entries.act != NONE32
    clock = np.zeros(len(entries.endpoint), np.int64)
    clock[acted] = joined.transfers["capture"][entries.act[acted]]
    left = ~acted & (entries.since_act != NONE32)
    clock[left] = joined.transfers["arrival_capture"][entries.since_act[left]]
    return clock, errors[clock] if len(errors) else np.zeros_like(clock)


def _late_stamps(joined: Joined) -> NDArray[np.int64]:
    """How late each capture stamps what leaves, all but BEYOND of the times.

    A message whose sending is stamped late seems to arrive sooner than any way takes: as much less than the
    quick ones (5 %) of its connection's direction take.
    """
    columns, out = joined.columns, np.zeros(len(joined.clocks), np.int64)
    rows = np.flatnonzero((columns["seen"] & _BOTH) == _BOTH)
    way = columns["arrived_ns"][rows] - columns["sent_ns"][rows]
    early = np.zeros(len(rows))
    for at in classes(lines_of(columns)[rows]):
        if len(at) >= FEWEST:
            early[at] = np.maximum(percentile(way[at], QUICK) - way[at], 0)
    for at in classes(columns["capture"][rows].astype(np.int64)):
        out[columns["capture"][rows[at[0]]]] = round(percentile(early[at], 100 * (1 - BEYOND)))
    return out
