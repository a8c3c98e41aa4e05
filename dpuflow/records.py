"""A capture source's windows of bytes to Blocks of packets, one after the other.

``read_blocks`` is what later stages use. What is damaged ends a file: the packets before it are
kept, the info says ``complete = False`` and a warning names file and offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow import wire
from dpuflow.blocks import Buffers, Parser
from dpuflow.capture.base import SLACK, WINDOW, Damage
from dpuflow.capture.pcapng import text_of
from dpuflow.kernels import columns as c
from dpuflow.schema import Kind
from dpuflow.tables import CaptureInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from dpuflow.capture.base import Bytes, CaptureFile, CaptureSource
    from dpuflow.tables import Block

    Rows = NDArray[np.void]
    Progress = Callable[[int, int | None], None]

MAX_COMMENTS: Final = 1000  # kept in the info; the rest are only counted


def read_blocks(source: CaptureSource, threads: int = 1, progress: Progress | None = None) -> BlockReader:
    """The packets of ``source`` in blocks; iterate once. ``progress`` gets bytes done and in all."""
    return BlockReader(source, threads, progress)


class BlockReader:
    """Iterable of Blocks, whose arrays are used again for the next block.

    ``info`` is complete after the iteration. ``flows`` and ``endpoints`` hold the rows found so far
    and are replaced by larger ones as they grow; what was written into ``flows`` is kept. A flow row
    has its key and transport filled in; packet counts of endpoints are set at the end.
    """

    def __init__(self, source: CaptureSource, threads: int = 1, progress: Progress | None = None) -> None:
        self._source = source
        self._threads = threads
        self._progress = progress
        self._parser = Parser()
        self._buffers = Buffers()
        self._more_comments = 0
        self.info = CaptureInfo(source.id, source.vantage, list(source.files))

    @property
    def flows(self) -> Rows:
        """FLOW rows so far."""
        return self._parser.known.flows[: int(self._parser.state[c.S_FLOWS])]

    @property
    def endpoints(self) -> Rows:
        """ENDPOINT rows so far."""
        return self._parser.known.endpoints[: int(self._parser.state[c.S_ENDPOINTS])]

    def __iter__(self) -> Iterator[Block]:
        links: list[int] = []
        lost: list[int] = []
        done = 0
        sizes = [] if self._progress is None else _sizes(self._source)
        for file in self._source.open_files():
            try:
                yield from self._file(file, done, sum(sizes) if all(sizes) else None)
            finally:
                done += file.bytes.done()
                file.bytes.close()
            links += [link for link in file.format.links if link not in links]
            if (stated := file.format.lost()) is not None:
                lost.append(stated)
            self._keep_comments(file.format.comments)
        self._finish(links, lost)

    def _file(self, file: CaptureFile, done: int, total: int | None) -> Iterator[Block]:
        """Blocks of one file."""
        state, data_of = self._parser.state, file.bytes.window
        pos = file.format.first_record
        while True:
            limit = (pos // WINDOW + 1) * WINDOW
            data = data_of(pos, limit + SLACK)
            if self._progress is not None:
                self._progress(done + file.bytes.done(), total)
            if not len(data):
                if file.bytes.size is not None and pos > file.bytes.size:
                    self._damaged(file, pos, "the file ends inside a block")
                break
            state[c.S_POS], state[c.S_END] = 0, len(data)
            state[c.S_LIMIT] = min(limit - pos, len(data))
            self._parser.start_block()
            reason = yield from self._window(file, data)
            pos += int(state[c.S_POS])
            if reason is not None:
                self._damaged(file, pos, reason)
                return
        if file.bytes.damage:
            self._damaged(file, pos, file.bytes.damage)

    def _window(self, file: CaptureFile, data: Bytes) -> Iterator[Block]:
        """Blocks of one window; returns why the file cannot be read on, or None."""
        parser, state = self._parser, self._parser.state
        reason: str | None = None
        while True:
            status = parser.run(file.format, data, self._buffers)
            if state[c.S_COMMENTS]:
                self._packet_comments(data)
            if status == c.FULL:
                yield self._deliver(data)
                parser.start_block()
            elif status == c.GROW:
                parser.grow()
            elif status == c.BLOCK:
                try:
                    following = file.format.block(data, int(state[c.S_POS]))
                except Damage as error:
                    reason = str(error)
                    break
                if following is None:
                    reason = file.bytes.damage or "the file is cut short in the middle of a block"
                    break
                state[c.S_POS] = following
            elif status == c.MORE:
                reason = file.bytes.damage or "the file is cut short in the middle of a packet"
                break
            elif status == c.DAMAGED:
                reason = c.REASONS[int(state[c.S_REASON])]
                break
            else:
                break
        if state[c.S_ROW]:
            yield self._deliver(data)
        return reason

    def _deliver(self, data: Bytes) -> Block:
        """The rows parsed so far as a Block, counted into the info."""
        info, state = self.info, self._parser.state
        rows, disordered = int(state[c.S_ROW]), int(state[c.S_DISORDERED])
        counts = [int(n) for n in state[c.S_SPARSE : c.S_SPARSE + len(c.SPARSE)]]
        block = self._buffers.block(info.packets, rows, counts, data, disordered == 0)
        first, last = int(self._buffers.times[0]), int(self._buffers.times[rows - 1])
        info.first_ns = first if info.first_ns is None else min(first, info.first_ns)
        info.last_ns = last if info.last_ns is None else max(last, info.last_ns)
        info.packets += rows
        info.bytes += int(state[c.S_BYTES])
        info.disordered += disordered
        return block

    def _damaged(self, file: CaptureFile, pos: int, reason: str) -> None:
        self.info.complete = False
        self.info.warnings.append(f"{file.name}: {reason} at byte {pos}; what comes before is kept")

    def _packet_comments(self, data: Bytes) -> None:
        state = self._parser.state
        found = int(state[c.S_COMMENTS])
        state[c.S_COMMENTS] = 0
        located = self._parser.comments[: min(found, c.COMMENTS)]
        self._more_comments += found - len(located)
        self._keep_comments([text_of(bytes(data[at : at + n])) for at, n in located])

    def _keep_comments(self, comments: list[str]) -> None:
        room = max(MAX_COMMENTS - len(self.info.comments), 0)
        self.info.comments += comments[:room]
        self._more_comments += len(comments[room:])

    def _finish(self, links: list[int], lost: list[int]) -> None:
        """What is known only at the end."""
        info = self.info
        info.link_type = ",".join(wire.LINK_TYPES.get(link, f"linktype_{link}") for link in links)
        dropped = int(self._parser.state[c.S_DROPS])
        if lost or dropped >= 0:  # both may count the same drops
            info.lost_packets = max(sum(lost), dropped)
        info.skipped = {
            kind.name.lower(): int(self._parser.skipped[kind]) for kind in Kind if self._parser.skipped[kind]
        }
        if self._more_comments:
            info.comments.append(f"({self._more_comments} more comments)")
        self._parser.known.count_packets(int(self._parser.state[c.S_FLOWS]))


def _sizes(source: CaptureSource) -> list[int]:
    """Bytes of each file as stored, 0 where that cannot be known."""
    from pathlib import Path

    return [Path(name).stat().st_size if name != "-" and Path(name).is_file() else 0 for name in source.files]
