"""What had reached a rank before its first act, of all that the act may have waited for.

In: the exchanges of all collectives and each rank's first act. Out: when the last of it had come, and what it
was (docs/theory/entries.md, "Blockers").

A first answer needs its own offer. So do those that follow it before any data has come: their receives were
posted at once, and who had been there would have answered the first of these offers when it came. Other
offers may lie there unanswered; they did not hold it up. A first message whose place in its algorithm is
known needs the inputs that its step has: of a transfer in segments the first one, however many more had come.
Elsewhere all that had come may be needed. How fast NCCL's ranks take their inputs the clear-to-send entries
show that give slots back (NCCL 2.30, src/transport/net.cc recvProxyProgress).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import Latest
from dpuflow.exchanges.build import there_ns
from dpuflow.schema.rows import NEVER, NONE32, Op, Wire
from dpuflow.wire.nccl import NCCL_STEPS

if TYPE_CHECKING:
    from dpuflow.arrays import Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.places import Needs
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows


def reached_before(
    needs: Needs, receiver: Ints, enter: Ints, answer_at: Ints, send_at: Ints
) -> tuple[Ints, Ints]:
    """For each rank when the last of what its first act (``enter``) may have waited for had come, and its
    TRANSFER row; NEVER and NONE32 where nothing had.

    ``receiver``: the rank's row of each of ``needs.rows``. ``answer_at`` and ``send_at``: which of these the
    first act answers, or sends after an input; -1 for ranks whose first act is another one.
    """
    picked, total = needs.picked, len(enter)
    reached = np.full(total, NEVER, np.int64)
    after = np.full(total, NONE32, np.int64)
    if not len(picked):
        return reached, after
    data, offer = there_ns(picked), picked["offer_arrived_ns"].copy()
    answers = (answer_at >= 0)[receiver]
    next_data = np.full(total, FAR)
    later = answers & (data > enter[receiver])
    np.minimum.at(next_data, receiver[later], data[later])
    posted = answers & (offer != NEVER) & (offer <= enter[receiver]) & (picked["grant_ns"] != NEVER)
    posted &= picked["grant_ns"] <= next_data[receiver]
    first = np.full(total, FAR)
    np.minimum.at(first, receiver[posted], offer[posted])
    offer[answers & (offer != first[receiver])] = NEVER
    came = {"data": data, "offer": offer}
    for times in came.values():
        before = (times != NEVER) & (times <= enter[receiver])
        np.maximum.at(reached, receiver[before], times[before])
    for what, times in came.items():
        latest = (times != NEVER) & (times == reached[receiver])
        after[receiver[latest]] = picked[what][latest]

    # NCCL's streams: any of several channels may have the first message .
    streams = np.isin(picked["wire"], (Wire.ROCE_WRITE_IMM, Wire.NCCL_DATA))
    row_of = np.full(len(picked), -1, np.int64)
    rows = np.flatnonzero(send_at >= 0)
    rows = rows[~streams[send_at[rows]]]
    row_of[send_at[rows]] = rows
    arcs = row_of[needs.send] >= 0
    row, needed = row_of[needs.send[arcs]], needs.input[arcs]
    when = data[needed]
    there = (when != NEVER) & (when <= enter[row])
    missing = np.zeros(total, bool)
    missing[row[~there]] = True  # an input that was not captured may have been the last
    told = np.zeros(total, bool)
    told[row] = True
    told &= ~missing
    reached[told], after[told] = NEVER, NONE32
    use = told[row]
    row, needed, when = row[use], needed[use], when[use]
    np.maximum.at(reached, row, when)
    last = when == reached[row]
    after[row[last]] = picked["data"][needed[last]]
    return reached, after


def last_event(needs: Needs, endpoint: Ints, enter: Ints) -> tuple[Ints, Ints]:
    """For each row when the last data or credit before its first act had reached its endpoint, of whatever
    operation, and its TRANSFER row; NEVER and NONE32 without.

    A transfer's own messages do not say what its sender had waited for: in a pipeline what came from another
    stage. Nothing but what comes from outside releases a rank that waits.
    """
    picked, none = needs.picked, np.array([NEVER])
    when = np.concatenate([there_ns(picked), picked["grant_arrived_ns"], none])
    to = np.concatenate([picked["dst"], picked["src"], [0]]).astype(np.int64)
    what = np.concatenate([picked["data"], picked["grant"], [NONE32]]).astype(np.int64)
    at = Latest(to, when).by(endpoint, np.maximum(enter, NEVER + 1) - 1)
    return when[at], what[at]


SLOTS: Final = NCCL_STEPS
"""Slots of a staging buffer. A message takes one, of Simple's rings
two."""


def lines_of(exchanges: Rows | Picked) -> Ints:
    """Numbers the directions of connections."""
    line: Ints = 2 * exchanges["connection"].astype(np.int64)
    line += exchanges["src"] > exchanges["dst"]
    return line


def messages_ahead(instance: Instance) -> int:
    """How many messages a receiver grants ahead of those its GPU has taken; 0 where that is not known.

    Of the pairs of an all_to_all a slot a message, as of single transfers: no protocol is told of these.
    """
    if instance.slicing.protocol is None or instance.algorithm is None:
        return SLOTS if instance.op == Op.ALL_TO_ALL and not instance.placement.nodes else 0
    simple = instance.slicing.protocol == "simple"
    return SLOTS // 2 if simple and instance.algorithm.name == "ring" else SLOTS
