"""What one stage hands to the next: arrays of schema rows with the few facts that are not rows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked

    Rows = NDArray[np.void]


def _none(record: str) -> Rows:
    """No rows of a record. NumPy is loaded late."""
    from dpuflow.schema import rows as schema

    made: Rows = getattr(schema, record).zeros(0)
    return made


@dataclass(frozen=True, init=False)
class Vantage:
    """One vantage point to read: its name and its files in order; ``-`` is standard input. ``named``: a
    person called it so, no file did."""

    name: str
    files: tuple[str, ...]
    named: bool = field(default=True, compare=False, repr=False)

    def __init__(
        self, name: str, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], named: bool = True
    ) -> None:
        """``files``: one, or several in order."""
        several = [files] if isinstance(files, (str, os.PathLike)) else files
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "files", tuple(os.fspath(file) for file in several))
        object.__setattr__(self, "named", named)


@dataclass
class Block:
    """Some thousands of parsed packets. Reused: valid until the next one is asked for.

    ``columns`` holds one array a PACKET field, of which the first ``rows`` elements count.
    The sparse headers are whole arrays of their records (RETH, AETH, ...), already cut to length.
    ``data`` is the byte buffer that the column ``data_at`` points into.
    """

    first_frame: int
    rows: int
    columns: dict[str, NDArray[np.generic]]
    data: NDArray[np.uint8]
    reth: Rows
    aeth: Rows
    imm: Rows
    deth: Rows
    atomic: Rows
    tcp: Rows
    pause: Rows


SUFFIX: Final = ".dpuflow"
"""What the name of a column file ends in."""


@dataclass
class CaptureInfo:
    """One vantage point's capture: what was read, and what was lost or skipped on the way."""

    id: int
    vantage: str
    files: list[str]
    link_type: str = ""
    packets: int = 0
    bytes: int = 0
    first_ns: int | None = None
    last_ns: int | None = None
    lost_packets: int | None = None  # as the capture file states; None where it says nothing
    skipped: dict[str, int] = field(default_factory=dict)  # Kind name in lower case -> packets
    complete: bool = True
    warnings: list[str] = field(default_factory=list)  # one sentence each, naming file and offset
    disordered: int = 0  # records whose stamp is before the one they follow
    comments: list[str] = field(default_factory=list)
    machine: str = ""  # what an agent's machine is called for good; "" where it does not say
    snaplen_needed: int = (
        0  # bytes that would have shown the entries of NCCL's that were cut off; 0: none were
    )
    sampled: float | None = None  # about one of so many packets was captured (``join.sampled``); None: all
    named: bool = False  # as of Vantage

    @property
    def unopenable(self) -> str | None:
        """Why no file can be opened at the packets that results number; None where one can."""
        if "-" in self.files:
            return f"{self.vantage} was standard input, no file holds its packets"
        if "live" in self.files:
            return f"{self.vantage} was captured live, no file holds its packets"
        if any(file.endswith(SUFFIX) for file in self.files):
            return f"{self.vantage} holds messages, no packets"
        return None


@dataclass
class CaptureTables:
    """All that is kept of one capture. Rows refer to rows of the same capture."""

    info: CaptureInfo
    endpoints: Rows  # ENDPOINT
    flows: Rows  # FLOW
    messages: Rows  # MESSAGE
    pauses: Rows  # PAUSE, `packet` being the frame number
    setups: Rows = field(default_factory=lambda: _none("SETUP"))  # SETUP
    members: Rows = field(default_factory=lambda: _none("MEMBER"))  # MEMBER


@dataclass
class Clock:
    """How a capture's clock relates to the reference clock (see the result format, ``clocks``)."""

    capture: int
    reference: bool
    method: str  # reference, trusted, estimated, none
    offset_ns: int | None = None  # local minus reference at the reference's first packet
    drift_ppb: int | None = None
    error_ns: int | None = None  # from the reference's first packet to its last
    why: str = ""
    tied_ns: int | None = None  # the error while there are packets in common; None: the same
    island: int | None = None  # captures of one share a time line; None: left out of all


@dataclass
class Joined:
    """All captures on one clock. Endpoint rows are common to all captures from here on."""

    captures: list[CaptureInfo]
    clocks: list[Clock]
    endpoints: Rows  # ENDPOINT
    # For each endpoint its other ENDPOINT rows (several addresses, one port). Such a row has no list of
    # its own, and neither flows, transfers nor ``local`` name it.
    addresses: list[list[int]]
    local: list[list[int]]  # for each capture the endpoints whose own stamps it holds ([] for a switch)
    flows: Rows  # FLOW, src and dst being common endpoints, one row a flow over all captures
    transfers: Rows  # TRANSFER
    start_ns: int = 0  # first and last packet of all captures tied to the reference clock
    end_ns: int = 0
    limits: list[str] = field(default_factory=list)  # sentences: what these captures cannot show
    narrow: Picked | None = None  # columns of ``transfers`` that have been copied out of its rows
    used: frozenset[int] | None = None  # captures that ``transfers`` are of; None: all
    # Where nothing ties the clocks of some captures: each island of clocks with its own ``transfers`` on the
    # clock of its own reference, and ``local`` of its own captures only. The first is this one.
    islands: list[Joined] = field(default_factory=list)

    @property
    def at_a_switch(self) -> bool:
        """Whether some capture was made at no endpoint."""
        return any(not rows for c, rows in enumerate(self.local) if self.used is None or c in self.used)

    @property
    def columns(self) -> Rows | Picked:
        """The columns of ``transfers``, by name."""
        return self.transfers if self.narrow is None else self.narrow
