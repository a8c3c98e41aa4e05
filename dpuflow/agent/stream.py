"""One endless capture: pieces of pcapng in, at any time the tables of what is held out (``tables``).

One reader and one builder of messages live as long as the agent. What is over is let go (``forget``), flows
that have been idle for long, too, so memory is bounded by the span that is held and by the flows that are
alive. Not thread-safe: the caller locks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema.rows import MEMBER, MESSAGE, NEVER, PAUSE, SETUP
from dpuflow.schema.tables import CaptureInfo, CaptureTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.capture.base import Bytes, Format
    from dpuflow.messages.roce import RoceMessages
    from dpuflow.messages.tcp import TcpMessages
    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

MOST_FRAMES: Final = 1 << 30  # numbers of frames are taken down before they reach the 31 bits they have
FEW_FLOWS: Final = 1024  # so many idle flows are kept, some 6 kB each: they may go on
PATIENCE: Final = 10
"""A message on its way whose flow was idle for so many times as long as others may be never ends: its sender
was killed, or its end was not captured."""
COUNTERS: Final = (
    "packets", "bytes", "messages", "retransmitted", "out_of_order", "missing", "ecn_marked", "cnp", "nak",
    "rnr", "zero_window", "spurious",
)  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Counters of all flows at some moment; ``flow`` are their numbers, which never change, ascending."""

    time_ns: int
    flow: Ints
    values: NDArray[np.uint64]  # flows x COUNTERS
    packets: int
    bytes: int


class Snapshot:
    """What a Stream held at ``time_ns``."""

    def __init__(
        self, time_ns: int, info: CaptureInfo, flows: Rows, numbers: Ints, endpoints: Rows,
        builders: list[RoceMessages | TcpMessages], pauses: Rows, pause_ns: Ints,
    ) -> None:  # fmt: skip
        self.time_ns, self.info, self.numbers = time_ns, info, numbers
        self._flows, self._endpoints, self._builders = flows, endpoints, builders
        self.pauses, self.pause_ns = pauses, pause_ns

    def tables(self) -> CaptureTables:
        """The tables as if the capture had ended then, to be asked for once; counters are since the start."""
        from dpuflow.ingest import merge
        from dpuflow.messages.roce import RoceMessages
        from dpuflow.messages.tcp import TcpMessages

        parts = [builder.finish(self._flows) for builder in self._builders]
        messages = merge(parts[0], parts[1]) if len(parts) == 2 else parts[0] if parts else MESSAGE.zeros(0)
        for builder in self._builders:
            if isinstance(builder, RoceMessages):
                self.info.snaplen_needed = builder.snaplen_needed
        tcp = next((each for each in self._builders if isinstance(each, TcpMessages)), None)
        setups, members = (SETUP.zeros(0), MEMBER.zeros(0)) if tcp is None else (tcp.told, tcp.members)
        return CaptureTables(self.info, self._endpoints, self._flows, messages, self.pauses, setups, members)

    def counts(self) -> Counts:
        """The counters of all flows, after ``tables``."""
        values = np.stack([self._flows[name].astype(np.uint64) for name in COUNTERS], axis=1)
        return Counts(self.time_ns, self.numbers, values, self.info.packets, self.info.bytes)


class Stream:
    """The reader and the builders of one vantage point."""

    def __init__(self, vantage: str) -> None:
        from dpuflow.capture.base import CaptureSource
        from dpuflow.packets.records import read_blocks

        self._reader = read_blocks(CaptureSource(0, vantage, ["live"]))
        self._roce: RoceMessages | None = None
        self._tcp: TcpMessages | None = None
        self._pauses: list[Rows] = []
        self._pause_ns: list[Ints] = []
        self._numbers = np.zeros(0, np.int64)  # of the flows' rows: what they are called for good
        self._next_number = 0
        self._bytes_before = 0

    @property
    def info(self) -> CaptureInfo:
        """What was read so far; ``packets`` are those since frames were last numbered anew."""
        return self._reader.info

    def feed(self, form: Format, piece: Bytes) -> None:
        """Take in whole records of a file of format ``form``."""
        from dpuflow.messages.roce import RoceMessages
        from dpuflow.messages.tcp import TcpMessages

        for block in self._reader.feed(form, piece):
            flows = self._reader.flows
            if len(block.tcp):
                self._tcp = self._tcp or TcpMessages()
                self._tcp.feed(block, flows, self._reader.endpoints)
            if len(block.tcp) < block.rows:
                self._roce = self._roce or RoceMessages()
                if self._tcp is not None:
                    self._roce.name_pairs(self._tcp.setups.named(self._reader.endpoints), flows)
                self._roce.feed(block, flows)
            if len(block.pause):
                seen = block.pause.copy()
                self._pause_ns.append(block.columns["time_ns"][seen["packet"]].astype(np.int64))
                seen["packet"] = block.columns["frame"][seen["packet"]]
                self._pauses.append(seen)
        if self.info.packets > MOST_FRAMES:
            self._renumber()

    def flow_numbers(self) -> Ints:
        """What each row of the flows is called for good."""
        count = len(self._reader.flows)
        more = count - len(self._numbers)
        if more > 0:
            fresh = self._next_number + np.arange(more)
            self._numbers = np.concatenate([self._numbers, fresh])
            self._next_number += more
        return self._numbers[:count]

    def snapshot(self, time_ns: int) -> Snapshot:
        """All that is held, to be read while this goes on; a copy is quick, reading it is not."""
        builders = [builder.copy() for builder in (self._roce, self._tcp) if builder is not None]
        info = replace(
            self.info, warnings=list(self.info.warnings), comments=[], skipped=self._reader.skipped()
        )
        flows, numbers = self._reader.flows.copy(), self.flow_numbers().copy()
        pauses = np.concatenate(self._pauses) if self._pauses else PAUSE.zeros(0)
        pause_ns = np.concatenate(self._pause_ns) if self._pause_ns else np.zeros(0, np.int64)
        return Snapshot(
            time_ns, info, flows, numbers, self._reader.count_endpoints(), builders, pauses, pause_ns
        )

    def held(self) -> int:
        """Messages that are held."""
        return sum(builder.held() for builder in (self._roce, self._tcp) if builder is not None)

    def held_flows(self) -> int:
        """Flows that are held."""
        return len(self._reader.flows)

    def forget(self, before_ns: Ints) -> None:
        """Let go of messages that ended before ``before_ns`` of their flow (by row), and of pause frames."""
        count = len(self._reader.flows)
        if len(before_ns) < count:  # flows that came meanwhile keep theirs
            more = np.full(count - len(before_ns), NEVER)
            before_ns = np.concatenate([before_ns, more])
        if self._roce is not None:
            self._roce.forget(before_ns)
        if self._tcp is not None:
            self._tcp.forget(before_ns, self._reader.flows)
        oldest = int(before_ns.max()) if len(before_ns) else NEVER
        kept = [n for n, times in enumerate(self._pause_ns) if times[-1] >= oldest]
        self._pauses = [self._pauses[n] for n in kept]
        self._pause_ns = [self._pause_ns[n] for n in kept]

    def shed(self, keep: int) -> int:
        """Let go of the oldest messages but for ``keep``; how many."""
        before = self.held()
        if before <= keep:
            return 0
        ends = np.concatenate([each.ends() for each in (self._roce, self._tcp) if each is not None])
        cut_ns = int(np.partition(ends, before - keep - 1)[before - keep - 1]) + 1
        self.forget(np.full(len(self._reader.flows), cut_ns))
        return before - self.held()

    def forget_flows(self, tables: CaptureTables, until_ns: int, longest_ns: int) -> int:
        """Forget flows idle for ``longest_ns`` that hold nothing, by the last ``tables``; how many.

        The last FEW_FLOWS of them are kept, and nothing is done before an eighth as many would go: a
        connection that is idle and goes on has then kept its peer and its framing.
        """
        flows = self._reader.flows
        busy = np.ones(len(flows), bool)
        last_ns = tables.flows["last_ns"]
        busy[: len(last_ns)] = (last_ns >= until_ns - longest_ns) | (last_ns == NEVER)
        over = np.zeros(len(flows), bool)
        over[: len(last_ns)] = (last_ns < until_ns - PATIENCE * longest_ns) & (last_ns != NEVER)
        if self._tcp is not None:
            self._tcp.setups.release(~busy, flows)
        for builder in (self._roce, self._tcp):
            if builder is not None:
                used = builder.in_use(over)
                busy[: len(used)] |= used
        paired = flows["peer"] < len(flows)
        busy[flows["peer"][busy & paired]] = True
        idle = np.flatnonzero(~busy)
        if len(idle) < FEW_FLOWS + FEW_FLOWS // 8:
            return 0
        latest = idle[np.argsort(last_ns[idle], kind="stable")[-FEW_FLOWS:]]
        keep = busy
        keep[latest] = True
        keep[flows["peer"][latest][flows["peer"][latest] < len(flows)]] = True
        numbers = self.flow_numbers()
        place, ends = self._reader.keep(keep)
        self._numbers = numbers[keep]
        if self._roce is not None:
            self._roce.keep_flows(place, ends, self._reader.flows)
        if self._tcp is not None:
            self._tcp.keep_flows(place, self._reader.flows)
        return int((~keep).sum())

    def shift(self, step_ns: int) -> None:
        """The clock was set by so much: move all times that are held."""
        from dpuflow.messages.retained import shift_times

        for builder in (self._roce, self._tcp):
            if builder is not None:
                builder.shift(step_ns)
        shift_times(self._reader.flows, ("first_ns", "last_ns"), step_ns)
        for times in self._pause_ns:
            times += step_ns
        info = self.info
        if info.first_ns is not None and info.last_ns is not None:
            info.first_ns, info.last_ns = info.first_ns + step_ns, info.last_ns + step_ns
        self._reader.shift(step_ns)

    def _renumber(self) -> None:
        """Take down the numbers of frames."""
        frames = self.info.packets
        self._reader.renumber(frames)
        for builder in (self._roce, self._tcp):
            if builder is not None:
                builder.renumber(frames)
        for rows in self._pauses:
            rows["packet"] = 0
