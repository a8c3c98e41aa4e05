"""Memory keys of one-sided messages: which each exchange named, whose memory that is, whether it was new."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.schema.rows import NONE32, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import CaptureTables, Rows

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]


class Keys(NamedTuple):
    """Of each exchange the key that its data named (0: none), whose memory that is, whether it is new."""

    key: NDArray[np.uint32]
    owner: Ints
    new: Bools


def keys_of(captures: Sequence[CaptureTables], transfers: Rows, exchanges: Rows) -> Keys:
    """As told by the captures nearest to the sender of each message, else to its receiver."""
    key = _named(captures, transfers, exchanges)
    owner = np.where(exchanges["wire"] == Wire.ROCE_READ, exchanges["src"], exchanges["dst"]).astype(np.int64)
    new = np.zeros(len(exchanges), bool)
    if key.any():
        new[np.unique(owner << 32 | key, return_index=True)[1]] = True
    return Keys(key, owner, new & (key > 0))


def _named(captures: Sequence[CaptureTables], transfers: Rows, exchanges: Rows) -> NDArray[np.uint32]:
    """Of each exchange the key that its data named, 0: none."""
    key = np.zeros(len(exchanges), np.uint32)
    rows = np.flatnonzero(exchanges["data"] != NONE32)
    data = exchanges["data"][rows]
    for at, message in (("arrival_capture", "arrival_message"), ("capture", "message")):
        capture = transfers[at][data]  # columns alone: of many messages whole rows are hundreds of megabytes
        for number in distinct(capture).tolist():
            mine = np.flatnonzero(capture == number)
            told = captures[number].messages["rkey"][transfers[message][data[mine]]]
            key[rows[mine[told > 0]]] = told[told > 0]
    return key
