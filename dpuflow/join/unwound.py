"""Captures whose clock was set back in the middle, as if it had gone on.

In: CaptureTables. Out: the same with later stamps from there on. A capture's packets are numbered as they
came, so a clock that was set back shows on that capture alone: stamps fall behind those of packets before.
Left so, one stamp stands for two times. By how much it was set is only known up to the pause between the two
packets; the packets shared with other captures tell the rest, as of any clock that steps (``envelope``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from dpuflow.schema.tables import CaptureTables

    Ints = np.typing.NDArray[np.int64]

DISORDER_NS: Final = 1_000_000
"""Neighbours' stamps are swapped by up to the tail of what takes them, 0.2 ms; a clock set back by less than
this leaves hardly two meanings."""
LASTS: Final = 3
"""So many packets in a row must have earlier stamps: a single one may be mistaken."""


def unwound(tables: CaptureTables) -> tuple[CaptureTables, str | None]:
    """The capture without steps back, and a sentence on these; None where there are none."""
    rows = tables.messages
    if not tables.info.disordered or len(tables.info.files) > 1 or not len(rows):
        return tables, None
    frame = np.concatenate([rows["first_frame"], rows["last_frame"]]).astype(np.int64)
    time = np.concatenate([rows["first_ns"], rows["last_ns"]])
    order = np.argsort(frame, kind="stable")
    frame, time = frame[order], time[order]
    begins: list[int] = []  # frames from which on the clock was set back ...
    behind: list[int] = []  # ... and how far stamps fell behind
    at = 0
    while True:
        latest = np.maximum.accumulate(time[at:])
        fallen = np.flatnonzero(lasting(latest - time[at:] > DISORDER_NS))
        if not len(fallen):
            break
        at += int(fallen[0])
        begins.append(int(frame[at]))
        behind.append(int(latest[fallen[0]] - time[at]))
    if not begins:
        return tables, None
    later = np.concatenate([[0], np.cumsum(behind)])
    messages = rows.copy()
    piece = {name: np.searchsorted(begins, rows[f"{name}_frame"], side="right") for name in ("first", "last")}
    for name, number in piece.items():
        messages[f"{name}_ns"] += later[number]
    # No packet number goes with an ACK: it came after what it acknowledges, by the clock of its time.
    acked = rows["acked_ns"] + later[piece["last"]]
    for step, by_ns in enumerate(behind):
        acked = np.where((piece["last"] <= step) & (acked < messages["last_ns"]), acked + by_ns, acked)
    messages["acked_ns"] = np.where(rows["acked_ns"] == NEVER, NEVER, acked)
    last_ns = int(max(messages["last_ns"].max(), messages["acked_ns"].max()))
    info = replace(tables.info, last_ns=max(tables.info.last_ns or last_ns, last_ns))
    shown = ", ".join(
        f"{by / 1e6:.1f} ms before packet {at + 1}" for at, by in zip(begins, behind, strict=True)
    )
    text = (
        f"The clock of {tables.info.vantage} was set back in mid-capture, by at least {shown}: from there on"
        " its times are taken as if it had gone on."
    )
    return replace(tables, messages=messages, info=info), text


def lasting(values: np.typing.NDArray[np.bool_]) -> np.typing.NDArray[np.bool_]:
    """Where ``LASTS`` values in a row, from here on, are true; fewer at the end."""
    found: np.typing.NDArray[np.bool_] = values.copy()
    for ahead in range(1, LASTS):
        found[:-ahead] &= values[ahead:]
    return found
