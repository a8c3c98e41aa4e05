"""Prefix operations (MPI_Scan, MPI_Exscan): EXCHANGE rows with their tags in, nameless collectives out.

The list of operations has no word for them, so they are ``unknown``. Open MPI passes partial results from
each rank to the next (ompi/mca/coll/base: linear): on the wire that is a chain, in which each sends what
needs its input. What is of another shape is left alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.framing import MPI_SCAN_TAGS
from dpuflow.matching.sequenced import cut_streams
from dpuflow.matching.streams import columns_of, edge_streams, numbered_streams
from dpuflow.schema.rows import Op, Wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance
    from dpuflow.schema.tables import Rows


def scan_rows(exchanges: Rows) -> NDArray[np.int64]:
    """The rows of EXCHANGE that carry a prefix operation's tag."""
    wire = exchanges["wire"]
    ob1 = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (exchanges["op"] == Op.UNKNOWN)
    tags = np.array([tag % (1 << 32) for tag in MPI_SCAN_TAGS], np.uint32)
    return np.flatnonzero(ob1 & np.isin(exchanges["tag"], tags)) if ob1.any() else np.zeros(0, np.int64)


def scan_instances(
    exchanges: Rows, rows: NDArray[np.int64], position: NDArray[np.int64], near: frozenset[int] | None = None
) -> list[Instance]:
    """The prefix operations among ``rows`` of one communicator; the rest as ``sequenced_instances``."""
    columns = columns_of(exchanges)
    return [
        replace(instance, op=Op.UNKNOWN, alternatives=[])
        for streams in numbered_streams(exchanges, edge_streams(exchanges, rows)).values()
        for instance in cut_streams(columns, streams, Op.BROADCAST, position, near=near)
        if instance.algorithm is not None and (instance.algorithm.name == "chain" or len(instance.order) == 2)
    ]
