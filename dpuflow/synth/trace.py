"""What a simulated world leaves behind: tables of integers that grow row by row and are read as columns."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema.simulated import ACKS, BURSTS, ENTRIES, MESSAGES, PAUSES, REPLIES

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Table:
    """Rows of integers; ``add`` is all that the simulation calls."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self._cells = array("q")
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, *row: int) -> int:
        """Add a row; returns its number."""
        self._cells.extend(row)
        self._rows += 1
        return self._rows - 1

    def read(self) -> dict[str, NDArray[np.int64]]:
        """All columns. The table must not grow while they are in use."""
        cells = self.cells()
        return {name: cells[:, i] for i, name in enumerate(self.columns)}

    def cells(self) -> NDArray[np.int64]:
        """All rows. The table must not grow while they are in use."""
        return np.frombuffer(self._cells, np.int64).reshape(-1, len(self.columns))


class Trace:
    """All tables of one world."""

    def __init__(self) -> None:
        self.messages = Table(MESSAGES)
        self.bursts = Table(BURSTS)
        self.replies = Table(REPLIES)
        self.acks = Table(ACKS)
        self.pauses = Table(PAUSES)
        self.entries = Table(ENTRIES)
