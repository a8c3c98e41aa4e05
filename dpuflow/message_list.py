"""Every message of a job, one row each: for reports that show or store messages (``--messages``).

In: what the captures were joined to and read as. Out: ``Messages``, columns by name, on the reference clock
(of its island), in order of sending; islands one after the other, as in the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.join.common import number_connections
from dpuflow.schema.rows import NEVER, NONE32, Seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.analysis import Worked
    from dpuflow.schema.tables import CaptureTables, Joined

Role = Literal["data", "offer", "grant", "done", "control", "burst"]
Ends = Literal["neither", "sender", "receiver", "both"]
ROLES: Final[tuple[str, ...]] = ("data", "offer", "grant", "done", "control", "burst")  # as schema.rows.Role
ENDS: Final[tuple[str, ...]] = ("neither", "sender", "receiver", "both")  # as bits of schema.rows.Seen
UNKNOWN: Final = -(1 << 62)
"""Stands for None in a column."""


@dataclass(slots=True)
class Message:
    """One message of one flow. ``collective``: what it was a part of, None outside of all. ``role``: data;
    offer, grant and done are the hand-shake around it; burst: TCP bytes whose framing is not known.

    ``sent_ns``, ``sent_end_ns``: first and last packet near the sender; ``arrived_ns``, ``arrived_end_ns``:
    near the receiver; ``seen``: at which of the two nodes they were captured. ``granted_ns``: when the
    receiver's credit for it had come, None where there is none or none was seen. ``first_frame``,
    ``last_frame``: packets of ``capture``, counted from 1.
    """

    id: int
    flow: int | None
    src: int
    dst: int
    collective: int | None
    role: Role
    bytes: int
    packets: int
    retransmitted: int
    ecn_marked: int
    sent_ns: int
    sent_end_ns: int
    arrived_ns: int
    arrived_end_ns: int
    acked_ns: int | None
    granted_ns: int | None
    seen: Ends
    capture: int
    first_frame: int | None
    last_frame: int | None


TOKENS: Final = {"role": ROLES, "seen": ENDS}
"""Columns that hold places in these instead of texts."""


class Messages:
    """Columns of ``Message`` by name: int64, UNKNOWN for None, tokens as their places in ``TOKENS``."""

    name: Final = "messages"

    def __init__(self, columns: dict[str, NDArray[np.int64]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["id"])

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        return self.columns[name]

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table``. Raises MissingError where pyarrow is not installed."""
        from importlib import import_module

        return import_module("dpuflow.reports.parquet").message_table(self)


def messages_of(
    captures: Sequence[CaptureTables], islands: Sequence[Worked], numbers: Sequence[Sequence[int]]
) -> Messages:
    """All messages; ``numbers``: of each island's collectives those of the result."""
    parts = [_of_island(captures, each, of) for each, of in zip(islands, numbers, strict=True)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Messages({"id": np.arange(len(columns["src"])), **columns})


def _of_island(
    captures: Sequence[CaptureTables], island: Worked, numbers: Sequence[int]
) -> dict[str, NDArray[np.int64]]:
    transfers, exchanges = island.joined.transfers, island.exchanges
    rows = {name: transfers[name].astype(np.int64) for name in (
        "src", "dst", "role", "bytes", "packets", "retransmitted", "ecn_marked", "sent_ns", "sent_end_ns",
        "arrived_ns", "arrived_end_ns", "acked_ns", "seen", "capture")}  # fmt: skip
    rows["acked_ns"][rows["acked_ns"] == NEVER] = UNKNOWN
    rows["seen"] &= Seen.AT_SENDER | Seen.AT_RECEIVER
    rows["collective"] = np.full(len(transfers), UNKNOWN)
    for number, instance in zip(numbers, island.listed, strict=True):
        of = exchanges[island.instances[instance].rows]
        for name in ("offer", "grant", "data"):
            rows["collective"][_known(of[name], len(transfers))] = number
    rows["granted_ns"] = np.full(len(transfers), UNKNOWN)
    told = exchanges[(exchanges["grant_arrived_ns"] != NEVER) & (exchanges["data"] < len(transfers))]
    rows["granted_ns"][told["data"].astype(np.int64)] = told["grant_arrived_ns"]
    rows["flow"] = _flows(island.joined)
    rows["first_frame"], rows["last_frame"] = _frames(captures, island.joined)
    order = np.argsort(rows["sent_ns"], kind="stable")
    return {name: column[order] for name, column in rows.items()}


def _known(rows: NDArray[np.uint32], count: int) -> NDArray[np.int64]:
    return rows[rows < min(count, NONE32)].astype(np.int64)


def _flows(joined: Joined) -> NDArray[np.int64]:
    """The flow of each transfer: that of its connection which begins at its sender."""
    flows = joined.flows
    key = number_connections(flows).astype(np.int64) << 32 | flows["src"].astype(np.int64)
    order = np.argsort(key, kind="stable")
    wanted = joined.transfers["connection"].astype(np.int64) << 32 | joined.transfers["src"].astype(np.int64)
    place = np.minimum(np.searchsorted(key[order], wanted), max(len(order) - 1, 0))
    if not len(order):
        return np.full(len(wanted), UNKNOWN)
    return np.where(key[order][place] == wanted, order[place], UNKNOWN)


def _frames(captures: Sequence[CaptureTables], joined: Joined) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last packet of each transfer in its ``capture``, from 1."""
    transfers = joined.transfers
    found = np.full(len(transfers), UNKNOWN), np.full(len(transfers), UNKNOWN)
    for at in distinct(transfers["capture"]).tolist():
        if at >= len(captures):
            continue
        messages = captures[at].messages
        mine = np.flatnonzero((transfers["capture"] == at) & (transfers["message"] < len(messages)))
        for column, name in zip(found, ("first_frame", "last_frame"), strict=True):
            column[mine] = messages[name][transfers["message"][mine]].astype(np.int64) + 1
    return found
