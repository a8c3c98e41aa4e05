"""A live capture as the tables of a capture: its packets go through the same stages as those of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.capture.base import CaptureFile, CaptureSource
from dpuflow.capture.pcapng import Pcapng
from dpuflow.capture.streams import Streamed
from dpuflow.ingest import ingest_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dpuflow.live.base import Bytes
    from dpuflow.live.capture import LiveCapture
    from dpuflow.tables import CaptureTables


class _NoFile:
    """In place of the file that a stream is usually read from."""

    def close(self) -> None:
        """Nothing to close."""


def live_tables(capture: LiveCapture, pieces: Iterable[Bytes], vantage: str) -> CaptureTables:
    """The tables of what ``pieces`` of ``capture`` bring, once they have ended.

    Memory grows with flows and messages, not with packets.
    """

    def chunks() -> Iterator[bytes | memoryview]:
        yield capture.head()
        for piece in pieces:
            yield piece.data
        yield capture.statistics()

    stream = Streamed("live", chunks(), None, lambda: 0, _NoFile())
    return ingest_source(CaptureSource(0, vantage, ["live"], [CaptureFile("live", stream, Pcapng(), None)]))
