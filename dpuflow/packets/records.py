"""A capture source's windows of bytes to Blocks of packets, one after the other.

``read_blocks`` is what later stages use. What is damaged ends a file: the packets before it are
kept, the info says ``complete = False`` and a warning names file and offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpuflow.capture.base import SLACK, WINDOW, Damage
from dpuflow.capture.pcapng import text_of
from dpuflow.capture.streams import Mapped
from dpuflow.errors import FormatError
from dpuflow.kernels import columns as c
from dpuflow.packets.blocks import Buffers, Parser
from dpuflow.packets.order import FileOrder
from dpuflow.packets.workers import WindowEnd, Workers
from dpuflow.quantities import duration
from dpuflow.schema.rows import NEVER, Kind
from dpuflow.schema.tables import CaptureInfo
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.capture.base import Bytes, CaptureFile, CaptureSource, Format, Numbers
    from dpuflow.packets.workers import Parsed
    from dpuflow.schema.tables import Block

    Rows = NDArray[np.void]
    Progress = Callable[[int, int | None], None]

MAX_COMMENTS: Final = 1000  # kept in the info; the rest are only counted


def read_blocks(
    source: CaptureSource, threads: int = 1, progress: Progress | None = None, mend: bool = False
) -> BlockReader:
    """The packets of ``source`` in blocks; iterate once. ``progress`` gets bytes done and in all.

    ``mend``: stamps that contradict the order of their file are replaced, and named (``order``).
    """
    return BlockReader(source, threads, progress, mend)


class BlockReader:
    """Iterable of Blocks, whose arrays are used again for the next block.

    ``info`` is complete after the iteration. ``flows`` and ``endpoints`` hold the rows found so far
    and are replaced by larger ones as they grow; what was written into ``flows`` is kept. A flow row
    has its key and transport filled in; packet counts of endpoints are set at the end.
    """

    def __init__(
        self, source: CaptureSource, threads: int = 1, progress: Progress | None = None, mend: bool = False
    ) -> None:
        self._source = source
        self._threads = threads
        self._progress = progress
        self._parser = Parser()
        self._buffers = Buffers()
        self._more_comments = 0
        self.info = CaptureInfo(source.id, source.vantage, list(source.files))
        self.wrong_stamps: list[tuple[int, int, int]] = []  # as FileOrder.late
        self._mend = mend
        self._order: FileOrder | None = None  # of the file that is being read

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
            self._order = FileOrder() if self._mend else None
            try:
                yield from self._file(file, done, sum(sizes) if all(sizes) else None)
                if self._order is not None:
                    self._tell_wrong(file.name, self._order)
            finally:
                self._order = None
                done += file.bytes.done()
                file.bytes.close()
            links += [link for link in file.format.links if link not in links]
            if (stated := file.format.lost()) is not None:
                lost.append(stated)
            self._keep_comments(file.format.comments)
        self._finish(links, lost)

    def _file(self, file: CaptureFile, done: int, total: int | None) -> Iterator[Block]:
        """Blocks of one file."""
        pos: int | None = file.format.first_record
        ahead: Workers | None = None
        try:
            while pos is not None:
                if self._progress is not None:
                    self._progress(done + (file.bytes.done() if file.bytes.size is None else pos), total)
                if ahead is None and pos >= WINDOW and self._worth(file, pos):
                    near_ns = int(self._parser.state[c.S_PREVIOUS])
                    ahead = Workers(file, self._threads, pos // WINDOW, near_ns)
                if ahead is not None:
                    if ahead.version == file.format.version:
                        pos = yield from self._window_ahead(file, ahead, pos)
                        continue
                    ahead.close()  # another section or interface: begin anew behind it
                    ahead = None
                pos = yield from self._window(file, pos, (pos // WINDOW + 1) * WINDOW)
        finally:
            if ahead is not None:
                ahead.close()

    def _worth(self, file: CaptureFile, pos: int) -> bool:
        """Whether threads are wanted and there is enough left for them."""
        size = file.bytes.size
        if self._threads < 2 or size is None or not isinstance(file.bytes, Mapped):
            return False
        return size - pos > 4 * WINDOW

    def _window_ahead(
        self, file: CaptureFile, ahead: Workers, pos: int
    ) -> Generator[Block, None, int | None]:
        """Blocks of the window at ``pos`` from the threads, as far as they had it right; where it ends."""
        window, done = pos // WINDOW, 0
        ahead.skip_to(window)
        if not ahead.has(window):
            return (yield from self._window(file, pos, (window + 1) * WINDOW))
        if ahead.start_of(window) == pos:
            for part in ahead.blocks(window):
                if isinstance(part, WindowEnd):
                    if part.complete:
                        return part.stop
                    done = part.stop - pos
                else:
                    yield self._adopt(part)
        else:
            ahead.skip_to(window, started=True)
        return (yield from self._window(file, pos, (window + 1) * WINDOW, done))

    def _adopt(self, part: Parsed) -> Block:
        """A thread's block as the reader's own."""
        from dpuflow.kernels.tables import adopt

        parser, its = self._parser, part.tables
        state, rows, first = parser.state, int(part.state[c.S_ROW]), 0
        flows = part.adopted.reaching(int(part.state[c.S_FLOWS]))
        while True:
            known = parser.known
            first = adopt(
                part.buffers.bytes, rows, first, flows, its.flows, its.keys, its.endpoints,
                state, known.slots, known.flows, known.ends, known.keys, known.endpoints, known.index,
            )  # fmt: skip
            if first == rows:
                break
            parser.grow()
        parser.skipped += part.skipped
        late = part.first_ns < int(state[c.S_PREVIOUS])
        state[c.S_PREVIOUS] = part.state[c.S_PREVIOUS]
        if part.state[c.S_DROPS] >= 0:
            state[c.S_DROPS] = max(int(state[c.S_DROPS]), 0) + int(part.state[c.S_DROPS])
        self._packet_comments(part.data, int(part.state[c.S_COMMENTS]), part.comments)
        part.state[c.S_DISORDERED] += late
        part.buffers.number(self.info.packets, rows)
        return self._deliver(part.buffers, part.state, part.data)

    def _window(
        self, file: CaptureFile, pos: int, limit: int, done: int = 0
    ) -> Generator[Block, None, int | None]:
        """Blocks of the records from ``pos`` and before ``limit``; where they end, None if the file does.

        The first ``done`` bytes have been seen to.
        """
        state = self._parser.state
        data = file.bytes.window(pos, limit + SLACK)
        if not len(data):
            if file.bytes.size is not None and pos > file.bytes.size:
                self._damaged(file, pos, "the file ends inside a block")
            elif file.bytes.damage:
                self._damaged(file, pos, file.bytes.damage)
            return None
        state[c.S_POS], state[c.S_END] = done, len(data)
        state[c.S_LIMIT] = min(limit - pos, len(data))
        self._parser.start_block(self.info.packets)
        reason = yield from self._blocks(file.format, data, lambda: file.bytes.damage)
        pos += int(state[c.S_POS])
        if reason is not None:
            self._damaged(file, pos, reason)
            return None
        return pos

    def feed(self, form: Format, data: Bytes) -> Iterator[Block]:
        """Blocks of whole records in ``data``, for one whose source never ends; ``info`` is not finished.

        Raises FormatError where they are no records.
        """
        state = self._parser.state
        state[c.S_POS], state[c.S_END], state[c.S_LIMIT] = 0, len(data), len(data)
        self._parser.start_block(self.info.packets)
        reason = yield from self._blocks(form, data, lambda: None)
        if reason is not None:
            raise FormatError(self.info.vantage, f"{reason} at byte {int(state[c.S_POS])} of a piece")

    def keep(self, flows: NDArray[np.bool_]) -> tuple[Numbers, Numbers]:
        """Forget the flows that are False in ``flows``, and endpoints without any.

        Returns the new row of each flow and of each endpoint, -1 where it is gone.

        FLOW.peer is translated; whoever keeps rows of flows or endpoints has to follow.
        """
        return self._parser.keep(flows)

    def renumber(self, frames: int) -> None:
        """Take ``frames`` off the numbers of frames to come."""
        self.info.packets -= frames

    def shift(self, step_ns: int) -> None:
        """The clock was set: what is remembered of the last stamp moves along."""
        state = self._parser.state
        if state[c.S_PREVIOUS] != NEVER:
            state[c.S_PREVIOUS] += step_ns

    def count_endpoints(self) -> Rows:
        """A copy of ``endpoints`` with the packets counted so far."""
        self._parser.known.count_packets(int(self._parser.state[c.S_FLOWS]))
        counted: Rows = self.endpoints.copy()
        return counted

    def skipped(self) -> dict[str, int]:
        """Packets skipped so far, by reason."""
        counts = self._parser.skipped
        return {kind.name.lower(): int(counts[kind]) for kind in Kind if counts[kind]}

    def _blocks(
        self, form: Format, data: Bytes, damage: Callable[[], str | None]
    ) -> Generator[Block, None, str | None]:
        """Blocks of one window; returns why the file cannot be read on, or None."""
        parser, state = self._parser, self._parser.state
        reason: str | None = None
        while True:
            status = parser.run(form, data, self._buffers)
            if state[c.S_COMMENTS]:
                self._packet_comments(data, int(state[c.S_COMMENTS]), parser.comments)
                state[c.S_COMMENTS] = 0
            if status == c.FULL:
                yield self._deliver(self._buffers, state, data)
                parser.start_block(self.info.packets)
            elif status == c.GROW:
                parser.grow()
            elif status == c.BLOCK:
                try:
                    following = form.block(data, int(state[c.S_POS]))
                except Damage as error:
                    reason = str(error)
                    break
                if following is None:
                    reason = damage() or "the file is cut short in the middle of a block"
                    break
                state[c.S_POS] = following
            elif status == c.MORE:
                reason = damage() or "the file is cut short in the middle of a packet"
                break
            elif status == c.DAMAGED:
                reason = c.REASONS[int(state[c.S_REASON])]
                break
            else:
                break
        if state[c.S_ROW]:
            yield self._deliver(self._buffers, state, data)
        return reason

    def _deliver(self, buffers: Buffers, state: Numbers, data: Bytes) -> Block:
        """The rows of ``buffers`` as a Block, counted into the info."""
        info, told = self.info, state.tolist()
        rows, disordered = told[c.S_ROW], told[c.S_DISORDERED]
        counts = told[c.S_SPARSE : c.S_SPARSE + len(c.SPARSE)]
        unsure = 0
        if self._order is not None:
            self._order.mend(buffers.times[:rows], info.packets, disordered > 0)
            unsure = min(self._order.unsure, rows - 1)
        block = buffers.block(info.packets, rows, counts, data, disordered == 0)
        first, last = int(buffers.times[0]), int(buffers.times[rows - 1 - unsure])
        info.first_ns = first if info.first_ns is None else min(first, info.first_ns)
        info.last_ns = last if info.last_ns is None else max(last, info.last_ns)
        info.packets += rows
        info.bytes += told[c.S_BYTES]
        info.disordered += disordered
        return block

    def _tell_wrong(self, name: str, order: FileOrder) -> None:
        """Name what a file's order says of stamps, once it has been read."""
        info = self.info
        if order.last_ns is not None and info.last_ns is not None:
            info.last_ns = max(info.last_ns, order.last_ns)
        self.wrong_stamps += order.late
        if order.wrong:
            self.info.warnings.append(
                f"{name}: {order.wrong:,} of its packets are stamped out of the file's order, by up to"
                f" {duration(order.most_ns)}; each is given the time of the packet before it"
            )

    def _damaged(self, file: CaptureFile, pos: int, reason: str) -> None:
        self.info.complete = False
        self.info.warnings.append(f"{file.name}: {reason} at byte {pos}; everything before it is kept")

    def _packet_comments(self, data: Bytes, found: int, located: Numbers) -> None:
        """Keep the comments of packets, of which the first are located in ``data``."""
        texts = [text_of(bytes(data[at : at + n])) for at, n in located[: min(found, c.COMMENTS)]]
        self._more_comments += found - len(texts)
        self._keep_comments(texts)

    def _keep_comments(self, comments: list[str]) -> None:
        room = max(MAX_COMMENTS - len(self.info.comments), 0)
        self.info.comments += comments[:room]
        self._more_comments += len(comments[room:])

    def _finish(self, links: list[int], lost: list[int]) -> None:
        """What is known only at the end."""
        info = self.info
        info.link_type = ",".join(_link_name(link) for link in links)
        dropped = int(self._parser.state[c.S_DROPS])
        if lost or dropped >= 0:  # both may count the same drops
            info.lost_packets = max(sum(lost), dropped)
        info.skipped = self.skipped()
        if self._more_comments:
            info.comments.append(f"({self._more_comments} more comments)")
        self._parser.known.count_packets(int(self._parser.state[c.S_FLOWS]))


def _sizes(source: CaptureSource) -> list[int]:
    """Bytes of each file as stored, 0 where that cannot be known."""
    from pathlib import Path

    return [Path(name).stat().st_size if name != "-" and Path(name).is_file() else 0 for name in source.files]


def _link_name(link: int) -> str:
    return wire.LINK_TYPES.get(link) or wire.OTHER_LINK_TYPES.get(link) or f"linktype_{link}"
