"""Which message, and which collective, a captured packet belongs to: for reports that show packets.

In: the tables of captures and what they were read as. Out: ``Marks`` of each capture, by flow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.identity.endpoints import address_text
from dpuflow.schema.rows import NONE32, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.analysis import Worked
    from dpuflow.schema.tables import CaptureTables, Rows


class Mark(NamedTuple):
    """A message: its first and last frame (from 1), its number in the capture, its collective or None."""

    first: int
    last: int
    message: int
    collective: int | None


class Marks(NamedTuple):
    """The messages of one capture by flow (``10.0.0.1>10.0.0.2 tcp 5000 5001``, ``... qp 17``), in order."""

    vantage: str
    first_ns: int | None
    flows: Mapping[str, list[Mark]]


def marks_of(
    captures: Sequence[CaptureTables], islands: Sequence[Worked], numbers: Sequence[Sequence[int]]
) -> list[Marks]:
    """The marks of each capture; ``numbers``: of each island's collectives those of the result."""
    collective = [np.full(len(tables.messages), -1, np.int64) for tables in captures]
    for island, of_result in zip(islands, numbers, strict=True):
        whole = island.joined.transfers
        for number, instance in zip(of_result, island.listed, strict=True):
            rows = island.instances[instance].rows
            for name in ("offer", "grant", "data"):
                transfers = island.exchanges[name][rows]
                _mark(collective, whole[transfers[transfers < min(len(whole), NONE32)]], number)
    return [_of_capture(tables, of) for tables, of in zip(captures, collective, strict=True)]


def _mark(collective: list[NDArray[np.int64]], transfers: Rows, number: int) -> None:
    """At both ends: a message was seen by the capture nearest its sender, and that nearest its receiver."""
    for capture, message in (("capture", "message"), ("arrival_capture", "arrival_message")):
        for at in distinct(transfers[capture]).tolist():
            if at < len(collective):
                rows = transfers[message][transfers[capture] == at]
                collective[at][rows[rows < len(collective[at])]] = number


def _of_capture(tables: CaptureTables, collective: NDArray[np.int64]) -> Marks:
    names = [flow_name(tables, flow) for flow in tables.flows]
    flows: dict[str, list[Mark]] = {}
    messages = tables.messages
    columns = (messages["flow"], messages["first_frame"], messages["last_frame"], collective)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for number, (flow, first, last, of) in enumerate(rows):
        mark = Mark(first + 1, last + 1, number, of if of >= 0 else None)
        flows.setdefault(names[flow], []).append(mark)
    for marks in flows.values():
        marks.sort()
    return Marks(tables.info.vantage, tables.info.first_ns, flows)


def flow_name(tables: CaptureTables, flow: np.void) -> str:
    """A flow's addresses with its ports or its queue pair."""
    ends = ">".join(address_text(tables.endpoints[int(flow[end])]) for end in ("src", "dst"))
    if flow["transport"] == Transport.TCP:
        return f"{ends} tcp {int(flow['sport'])} {int(flow['dport'])}"
    return f"{ends} qp {int(flow['dest_qp'])}"
