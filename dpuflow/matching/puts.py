"""All_to_alls that peers put into each other's memory, unasked: experts' dispatch and combine (DeepEP's way).

In: EXCHANGE rows that are puts (``flagged``), one each way and turn. Out: collectives. What makes a turn of
all ways one collective is not their time but that nobody puts again before it has the flags of all who put to
it: a kernel that combines, or dispatches the next layer's tokens, needs what came. How much goes each way may
differ; an all_gather or reduce_scatter of as much for everybody, put directly, would look the same, and so
would a doubling of two ranks.

Pages that only ever go one way are no collective: a plain WRITE tells its receiver nothing (IBA volume 1,
9.4.3), so one that takes part in a collective has an immediate, was asked for, has a flag or a SEND behind
it, or its receiver is seen to go on by what it WRITEs itself. They hand on caches (``verdicts.bulk`` makes
transfers of them).
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.components import connected
from dpuflow.matching.calls import all_to_all, even, in_turns
from dpuflow.matching.parts import Transfers
from dpuflow.matching.streams import edge_streams
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance, Job
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]


_DOUBLING: Final = next(a for a in ALGORITHMS if a.op == Op.ALL_REDUCE and a.name == "recursive_doubling")
_CUT: Final = MessageFlag.STARTS_BEFORE | MessageFlag.ENDS_AFTER | MessageFlag.GAP


def put_instances(job: Job, rows: Ints) -> tuple[list[Instance], Ints]:
    """The all_to_alls among ``rows``, and the rows of none."""
    exchanges = job.exchanges
    put = rows[(exchanges["wire"][rows] == Wire.ROCE_WRITE) & (exchanges["tag"][rows] > 1)]
    if not len(put):
        return [], rows
    found: list[Instance] = []
    for together in connected(_transfers(exchanges, put), attrgetter("edge")):
        members, _ = even(together)
        if in_turns(members, job.near):
            found += [_made(job, members, turn) for turn in range(len(members[0].rows))]
    taken = np.concatenate([instance.rows for instance in found]) if found else rows[:0]
    return found, np.setdiff1d(rows, taken, assume_unique=True)


def _transfers(exchanges: Rows, rows: Ints) -> list[Transfers]:
    """Puts by (sender, receiver), in order."""
    return [
        Transfers(
            edge,
            list(mine[:, None]),
            exchanges["data_ns"][mine],
            exchanges["arrived_end_ns"][mine],
            exchanges["bytes"][mine].astype(np.int64),
            (exchanges["flags"][mine] & _CUT) == 0,
            np.full(len(mine), NEVER),
            False,
        )
        for edge, mine in edge_streams(exchanges, rows).left()
    ]


def _made(job: Job, members: Sequence[Transfers], turn: int) -> Instance:
    """The collective of a turn, with the operations that would look the same."""
    made = all_to_all(job, members, turn)
    others = () if made.size is None else (Op.ALL_GATHER, Op.REDUCE_SCATTER)
    # Two that always put as much to each other make what one step of a doubling is.
    if len(members) > 2 or (members[0].size != members[1].size).any():
        return replace(made, alike=others)
    size = int(members[0].size[turn])
    return replace(
        made,
        op=Op.ALL_REDUCE,
        algorithm=_DOUBLING,
        alternatives=[],
        size=size,
        alike=(Op.ALL_TO_ALL, *others),
    )


LEAST: Final = 512
"""Bytes: NCCL's clear-to-send writes are no larger (eight entries of 64)."""


def without_pages(exchanges: Rows, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """``rows`` without unannounced WRITEs from who is never written to like that to who never writes so."""
    plain = rows[exchanges["wire"][rows] == Wire.ROCE_WRITE]
    plain = plain[(exchanges["grant"][plain] == NONE32) & (exchanges["tag"][plain] == 0)]
    plain = plain[exchanges["op"][plain] == Op.UNKNOWN]
    if not len(plain):
        return rows
    wire = np.ascontiguousarray(exchanges["wire"])
    connection = exchanges["connection"].astype(np.int64)
    size = int(connection.max()) + 1
    sends = np.isin(wire, (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)) & (exchanges["data_ns"] != NEVER)
    told = np.bincount(connection[sends], minlength=size) >= np.bincount(connection[plain], minlength=size)
    told |= np.bincount(connection, wire == Wire.ROCE_WRITE_IMM, size) > 0
    plain = plain[~told[connection[plain]] & (exchanges["bytes"][plain] > LEAST)]
    one_way = ~np.isin(exchanges["src"][plain], exchanges["dst"][plain])
    one_way &= ~np.isin(exchanges["dst"][plain], exchanges["src"][plain])
    return np.setdiff1d(rows, plain[one_way], assume_unique=True)
