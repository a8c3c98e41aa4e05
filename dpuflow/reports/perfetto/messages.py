"""Messages in a trace: a track for each flow at both of its ends, arrows, and counters of each endpoint.

In: a result with messages (``analyze --messages``). Counters: bytes in flight (sent and not yet acknowledged,
or arrived where no acknowledgement was seen), credits outstanding (that came and no data has used), and how
many packets were marked and retransmitted until then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.message_list import ROLES, UNKNOWN
from dpuflow.reports.perfetto.packets import BYTES, COUNTS, Slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.message_list import Messages
    from dpuflow.reports.names import Names
    from dpuflow.reports.perfetto.trace import Writer
    from dpuflow.results import Analysis

    Ints = NDArray[np.int64]

NOTES = ("id", "collective", "bytes", "packets", "retransmitted", "ecn_marked", "first_frame", "last_frame")


class MessageRows:
    """The messages of a result by endpoint; none where it has none."""

    def __init__(self, result: Analysis, names: Names) -> None:
        self._messages: Messages | None = result.messages
        self._result, self._names = result, names
        self._arrows = len(result.transfers) + 1
        self._rows: tuple[dict[int, Ints], dict[int, Ints]] = ({}, {})
        if self._messages is not None:
            self._rows = by(self._messages["src"]), by(self._messages["dst"])

    def has(self, endpoint: int) -> bool:
        """Whether it sent or received any."""
        return any(endpoint in rows for rows in self._rows)

    def write(self, endpoint: int, parent: int, writer: Writer) -> None:
        """Its tracks and counters, below the process ``parent``."""
        if self._messages is None:
            return
        for incoming, rows in zip((False, True), self._rows, strict=True):
            mine = rows.get(endpoint, np.zeros(0, np.int64))
            for flow, some in by(self._messages["flow"][mine]).items():
                writer.lanes(
                    parent, self._name(flow, mine[some], incoming), self._slices(mine[some], incoming)
                )
        self._counters(self._rows[0].get(endpoint, np.zeros(0, np.int64)), endpoint, parent, writer)

    def _name(self, flow: int, rows: Ints, incoming: bool) -> str:
        assert self._messages is not None
        src, dst = (self._names.short(int(self._messages[end][rows[0]])) for end in ("src", "dst"))
        said = f"{dst} from {src}" if incoming else f"{src} to {dst}"
        if flow == UNKNOWN:
            return said
        row = self._result.flows[flow]
        return f"{said}, " + (f"QP {row.dest_qp}" if row.ports is None else "ports {} {}".format(*row.ports))

    def _slices(self, rows: Ints, incoming: bool) -> Slices:
        messages = self._messages
        assert messages is not None
        begin, end = ("arrived_ns", "arrived_end_ns") if incoming else ("sent_ns", "sent_end_ns")
        captures = np.array([each.vantage for each in self._result.captures], object)
        notes: dict[str, NDArray[np.generic] | list[str]] = {key: messages[key][rows] for key in NOTES}
        notes["capture"] = captures[messages["capture"][rows]].tolist()
        names = np.array(ROLES, object)[messages["role"][rows]].tolist()
        arrows = (messages["id"][rows] + self._arrows).astype(np.uint64)
        slices = Slices(messages[begin][rows], messages[end][rows], names, notes)
        return replace(slices, ends=arrows) if incoming else replace(slices, starts=arrows)

    def _counters(self, rows: Ints, endpoint: int, parent: int, writer: Writer) -> None:
        messages, name = self._messages, self._names.short(endpoint)
        assert messages is not None
        sent, ended, acked = (messages[key][rows] for key in ("sent_ns", "sent_end_ns", "acked_ns"))
        gone = np.maximum(np.where(acked == UNKNOWN, messages["arrived_end_ns"][rows], acked), sent)
        size = messages["bytes"][rows]
        writer.counter(parent, f"{name} bytes in flight", BYTES, *running((sent, size), (gone, -size)))
        granted = messages["granted_ns"][rows]
        with_credit = granted != UNKNOWN
        came, used = granted[with_credit], np.maximum(granted, sent)[with_credit]
        each = np.ones(len(came), np.int64)
        writer.counter(parent, f"{name} credits outstanding", COUNTS, *running((came, each), (used, -each)))
        for key, what in (("ecn_marked", "marked packets"), ("retransmitted", "retransmissions")):
            some = messages[key][rows]
            there = some > 0
            writer.counter(parent, f"{name} {what}", COUNTS, *running((ended[there], some[there])))


def by(column: Ints) -> dict[int, Ints]:
    """Rows by what the column says of them."""
    order = np.argsort(column, kind="stable")
    values, starts = np.unique(column[order], return_index=True)
    return dict(zip(values.tolist(), np.split(order, starts[1:]), strict=False))


def running(*changes: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Sums of changes over time: each time once, with what the sum is from then on."""
    times = np.concatenate([at for at, _ in changes])
    values = np.concatenate([value for _, value in changes])
    once, place = np.unique(times, return_inverse=True)
    summed = np.zeros(len(once), np.int64)
    np.add.at(summed, place.reshape(-1), values)
    return once, np.cumsum(summed)
