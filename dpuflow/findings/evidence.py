"""Rows of TRANSFER in, what a finding shows of them out: frames and display filters."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.identity.endpoints import address_text
from dpuflow.results import SHOWN as SHOWN
from dpuflow.results import Evidence
from dpuflow.schema.rows import Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import CaptureTables, Joined

    Ints = NDArray[np.int64]


def message_evidence(
    captures: Sequence[CaptureTables], joined: Joined, transfers: Sequence[int]
) -> list[Evidence]:
    """For TRANSFER rows the frames of their messages, at the vantage point nearest the sender."""
    found = []
    for number in transfers:
        transfer = joined.transfers[number]
        capture = int(transfer["capture"])
        tables = captures[capture]
        message = tables.messages[int(transfer["message"])]
        found.append(
            Evidence(
                capture,
                (int(message["first_frame"]) + 1, int(message["last_frame"]) + 1),
                flow_filter(tables, tables.flows[int(message["flow"])]),
                tables.info.unopenable,
            )
        )
    return found


def flow_filter(tables: CaptureTables, flow: np.void) -> str:
    """A Wireshark display filter that shows one flow."""
    src = address_text(tables.endpoints[int(flow["src"])])
    dst = address_text(tables.endpoints[int(flow["dst"])])
    layer = "ipv6" if ":" in src else "ip"
    both = f"{layer}.src == {src} && {layer}.dst == {dst}"
    if flow["transport"] == Transport.TCP:
        return f"{both} && tcp.srcport == {int(flow['sport'])} && tcp.dstport == {int(flow['dport'])}"
    return f"{both} && infiniband.bth.destqp == 0x{int(flow['dest_qp']):06x}"


class ByEnd:
    """The rows of TRANSFER from or to an endpoint, in order; sorted once, since findings may be as many."""

    def __init__(self, joined: Joined, column: str) -> None:
        self._joined, self._column = joined, column

    @cached_property
    def _sorted(self) -> tuple[Ints, Ints]:
        ends = self._joined.columns[self._column]
        count = len(self._joined.endpoints)
        order = np.argsort(ends.astype(np.uint16) if count < 1 << 16 else ends, kind="stable")  # by counting
        return order, np.r_[0, np.cumsum(np.bincount(ends, minlength=count))]

    @cached_property
    def _room(self) -> NDArray[np.int64]:
        return np.empty(5 * int(np.diff(self._sorted[1]).max(initial=0)), np.int64)

    def __getitem__(self, end: int) -> Ints:
        order, bounds = self._sorted
        return order[bounds[end] : bounds[end + 1]]

    def columns(self, end: int) -> NDArray[np.int64]:
        """Five columns of an endpoint's rows, see ``kernels.links.under_way``; good until the next call."""
        from dpuflow.kernels.links import under_way

        rows = self[end]
        out = self._room[: 5 * len(rows)].reshape(5, -1)
        under_way(self._joined.transfers, rows, out)
        return out


def worst(rows: Ints, values: NDArray[np.generic]) -> list[int]:
    """Of the transfers ``rows`` the few with the largest ``values``, in order of time."""
    few = rows[np.argsort(-values.astype(np.float64), kind="stable")[:SHOWN]]
    return sorted(few.tolist())


def most(rows: Ints, own: NDArray[np.integer]) -> list[int]:
    """The same by counts; those that have none only where all do."""
    return worst(rows[own > 0], own[own > 0]) if (own > 0).any() else worst(rows, own)
