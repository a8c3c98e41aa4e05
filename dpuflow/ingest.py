"""One capture's files to its tables: the only place where packets pass through memory, block by block."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.errors import CaptureError, FormatError
from dpuflow.schema.rows import MESSAGE
from dpuflow.schema.tables import SUFFIX, CaptureTables

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.capture import CaptureSource
    from dpuflow.messages.roce import RoceMessages
    from dpuflow.messages.tcp import TcpMessages
    from dpuflow.schema.tables import Block, Rows


def ingest(
    files: list[str],
    vantage: str | None = None,
    id: int = 0,
    threads: int = 1,
    progress: Callable[[int, int | None], None] | None = None,
) -> CaptureTables:
    """Read one vantage point's ``files`` ("-" is standard input) to messages, in order of completion.

    ``progress`` gets bytes done and bytes in all (None: not known). Memory grows with flows and
    messages, not with packets. Raises CaptureError and FormatError; damage within a file is told in
    the info instead. Column files (``store``) are loaded as they are, and joined; of several, those that are
    damaged are left out, and named in the info.
    """
    from dpuflow.capture import open_capture
    from dpuflow.store.columns import is_saved

    saved = [is_saved(file) for file in files]
    if any(saved):
        other = [file for file, is_column in zip(files, saved, strict=True) if not is_column]
        if not all(file.endswith(SUFFIX) for file in other):
            raise FormatError(
                files[saved.index(True)], "column files cannot be mixed with captures in one vantage point"
            )
        from dpuflow.messages.stamps import set_aside
        from dpuflow.store.segments import join_segments

        files, parts, damaged = _undamaged(files)
        times = [(part.info.first_ns, part.info.last_ns) for part in parts]
        for number, time in enumerate(times):
            if time in times[:number]:
                twice = files[times.index(time)]
                raise FormatError(files[number], f"covers the same time as {twice}, and cannot follow it")
        parts.sort(key=lambda part: part.info.first_ns if part.info.first_ns is not None else 0)
        tables = join_segments(parts)
        info = tables.info
        info.id, info.vantage, info.files = id, vantage or info.vantage, files
        info.warnings += damaged
        info.complete &= not damaged
        return set_aside(tables, saved=True)
    return ingest_source(open_capture(files, vantage=vantage, id=id), threads, progress)


def _undamaged(files: list[str]) -> tuple[list[str], list[CaptureTables], list[str]]:
    """The column files that can be read, their tables, and of each other one why not.

    Raises FormatError; CaptureError where none can be read.
    """
    from dpuflow.store.columns import is_saved, load_tables

    read, parts, damaged = [], [], []
    for file in files:
        try:
            parts.append(load_tables(file))
            read.append(file)
        except (CaptureError, FormatError) as error:
            if isinstance(error, FormatError) and is_saved(file):
                raise  # of another version: not damage
            if len(files) == 1:
                raise
            damaged.append(f"left out: {error}")
            if len(damaged) == len(files):
                told = "; ".join(each.removeprefix("left out: ") for each in damaged)
                raise FormatError(os.path.dirname(file) or ".", f"no file can be read: {told}") from None
    return read, parts, damaged


def ingest_source(
    source: CaptureSource, threads: int = 1, progress: Callable[[int, int | None], None] | None = None
) -> CaptureTables:
    """The same of an open source of packets, such as a live capture."""
    from dpuflow.messages.stamps import restamp, set_aside
    from dpuflow.packets.records import read_blocks
    from dpuflow.schema.rows import MEMBER, PAUSE, SETUP

    reader = read_blocks(source, threads, progress, mend=True)
    readers = _Messages()
    pauses = [PAUSE.zeros(0)]
    for block in reader:
        readers.feed(block, reader.flows, reader.endpoints)
        if len(block.pause):
            seen = block.pause.copy()
            seen["packet"] = block.columns["frame"][seen["packet"]]
            pauses.append(seen)
    flows, tcp = reader.flows, readers.tcp
    name = reader.info.files[0] if reader.info.files else reader.info.vantage
    if tcp and tcp.barred:
        reader.info.warnings.append(
            f"{name}: {tcp.barred} TCP streams are read as bursts from some point on: they have too many"
            " messages, smaller than any library's"
        )
    messages = readers.finish(flows, reader.endpoints)
    if tcp and tcp.hidden.too_many:
        reader.info.warnings.append(
            f"{name}: {tcp.hidden.too_many} stretches of TCP streams whose headers were cut off are read as"
            " bursts: they would be more messages than so few captured bytes are worth"
        )
    if readers.roce:
        reader.info.snaplen_needed = readers.roce.snaplen_needed
    restamp(messages, flows, reader.wrong_stamps)
    tables = CaptureTables(
        reader.info, reader.endpoints.copy(), flows.copy(), messages, np.concatenate(pauses),
        tcp.told if tcp else SETUP.zeros(0), tcp.members if tcp else MEMBER.zeros(0),
    )  # fmt: skip
    return set_aside(tables)


class _Messages:
    """Reads the messages of RoCE and of TCP, each from where there is any."""

    def __init__(self) -> None:
        self.roce: RoceMessages | None = None
        self.tcp: TcpMessages | None = None

    def feed(self, block: Block, flows: Rows, endpoints: Rows) -> None:
        """Take in one block."""
        if len(block.tcp):
            if self.tcp is None:
                from dpuflow.messages.tcp import TcpMessages

                self.tcp = TcpMessages()
            self.tcp.feed(block, flows, endpoints)
        if len(block.tcp) < block.rows:
            if self.roce is None:
                from dpuflow.messages.roce import RoceMessages

                self.roce = RoceMessages()
            # Before the packets of these queue pairs: they follow their exchange.
            self._name_pairs(flows, endpoints)
            self.roce.feed(block, flows)

    def _name_pairs(self, flows: Rows, endpoints: Rows) -> None:
        if self.roce and self.tcp:
            self.roce.name_pairs(self.tcp.setups.named(endpoints), flows)

    def finish(self, flows: Rows, endpoints: Rows) -> Rows:
        """All MESSAGE rows."""
        self._name_pairs(flows, endpoints)
        empty = MESSAGE.zeros(0)
        return merge(
            self.roce.finish(flows) if self.roce else empty, self.tcp.finish(flows) if self.tcp else empty
        )


def merge(roce: Rows, tcp: Rows) -> Rows:
    """Both, each in order of ``last_ns``, in that order; equal ones in order of frames."""
    if not len(roce) or not len(tcp):
        return roce if len(roce) else tcp
    messages = np.concatenate([roce, tcp])
    times = messages["last_ns"]
    if (times[1:] < times[:-1]).any():
        messages = messages[np.lexsort((messages["last_frame"], times))]
    return messages
