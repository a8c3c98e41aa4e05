"""Scripted collectives with known answers: schedules played out on a scripted network, as TRANSFER rows.

A rank sends a step's messages as soon as it has entered, has every input of its earlier steps and has
sent what it had to send before. Times are plain integers from zero; a hop takes ``HOP`` ns, and a link
does what it is told: it may be slow, or lose a message once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import key_numbers
from dpuflow.assemble import Known, assemble
from dpuflow.entries import Entries, build_entries
from dpuflow.findings.build import build_findings
from dpuflow.islands.analyse import Read
from dpuflow.matching import Instance
from dpuflow.results import Analysis
from dpuflow.schedules.algorithms import GLOO, Algorithm
from dpuflow.schedules.graph import schedule
from dpuflow.schema.rows import (
    ENDPOINT,
    FLOW,
    MESSAGE,
    NEVER,
    NONE32,
    PAUSE,
    TRANSFER,
    Op,
    Role,
    Transport,
    Wire,
)
from dpuflow.schema.tables import CaptureInfo, CaptureTables, Clock, Joined
from dpuflow.verdicts import infer
from dpuflow.verdicts.bulk import fed_rows
from dpuflow.verdicts.causes import Waits
from dpuflow.verdicts.units import kinds_of
from dpuflow.verdicts.waits import Overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.schema.tables import Rows

HOP = 20_000
REACT = 5_000
GAP = 1_000  # between two packets of a message
TIME_0 = 1_700_000_000_000_000_000

RETRANSMISSION_NS = 200_000_000  # Linux's smallest retransmission timeout


def algorithm_of(op: Op, name: str) -> Algorithm:
    """The first algorithm of that operation and name."""
    return next(a for a in GLOO if a.op == op and a.name == name)


def no_waits(entries: Entries, instances: Sequence[Instance]) -> Waits:
    """Ranks that waited for nothing but their peers."""
    never, zeros = np.full(len(entries.rule), NEVER), np.zeros(len(entries.rule), np.int64)
    overlap = Overlap(zeros > 0, zeros, zeros - 1)
    group = key_numbers(tuple(sorted(i.order)) for i in instances)
    kind = kinds_of(instances, group)[entries.collective]
    return Waits(fed_rows([], entries), never, never, zeros - 1, overlap, zeros, (kind, zeros))


@dataclass
class Played:
    """One collective as it happened."""

    algorithm: Algorithm
    size: int
    ranks: list[int]
    enter_ns: dict[int, int]
    leave_ns: dict[int, int] = field(default_factory=dict)
    root: int = 0

    def lateness_ns(self, rank: int) -> int:
        """Enter of ``rank`` less the earliest."""
        return self.enter_ns[rank] - min(self.enter_ns.values())

    def waiting_ns(self) -> int:
        """How long all ranks together waited for the last one to enter."""
        last = max(self.enter_ns.values())
        return sum(last - at for at in self.enter_ns.values())


class World:
    """Plays collectives one after the other and keeps the messages they make."""

    def __init__(
        self,
        style: str = "eager",
        *,
        packets: int = 1,
        slow: Mapping[tuple[int, int], float] | None = None,
        react: Callable[[], int] = lambda: REACT,
    ) -> None:
        self.style = style  # eager (one message), rendezvous (offer, grant, data), gloo (grant unasked)
        self.packets = packets  # of each message's data
        self.slow = slow or {}  # (src, dst) -> how many times as long its packets take
        self.react = react  # what a rank needs to hand a message on, ns
        self.lose_next: set[tuple[int, int]] = set()  # edges whose next data is lost once
        self.rows: list[dict[str, int]] = []
        self.played: list[Played] = []
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.turns: dict[tuple[int, int, int, int], int] = {}
        self.connections: dict[tuple[int, int, int], int] = {}
        self.tags: dict[int, int] = {}
        self.in_order: np.ndarray = np.zeros(0, np.int64)  # of transfers(): place -> row played

    def play(
        self,
        algorithm: Algorithm,
        size: int,
        enter_ns: dict[int, int],
        *,
        root: int = 0,
        context: int = 0,
        tag: int | None = None,
        cuts: int = 1,
    ) -> Played:
        """Let the ranks (the keys, in order of position) carry out one collective.

        ``context`` is the communicator. Without ``tag`` Gloo's counts up in it, Open MPI's is 0.
        """
        if tag is None:
            tag = self.tags[context] = self.tags.get(context, -1) + 1 if self.style == "gloo" else 0
        ranks = list(enter_ns)
        done = Played(algorithm, size, ranks, dict(enter_ns), dict(enter_ns), root)
        ready = {rank: at + self.react() for rank, at in enter_ns.items()}
        heard = dict(enter_ns)
        sends = schedule(algorithm, len(ranks), root)
        for step in sorted({send.step for send in sends}):
            now = [send for send in sends if send.step == step]
            arrivals: list[tuple[int, int]] = []
            for send in now:
                src, dst = ranks[send.src], ranks[send.dst]
                for _ in range(cuts):
                    start = max(ready[src], heard[src] + self.react())
                    nbytes = round(send.size * size / cuts)
                    gone, end = self._message(
                        algorithm.op, src, dst, nbytes, start, enter_ns[dst], context, tag
                    )
                    ready[src] = start + 1_000
                    done.leave_ns[src] = max(done.leave_ns[src], gone)
                    arrivals.append((dst, end))
            for dst, end in arrivals:
                heard[dst] = max(heard[dst], end)
                done.leave_ns[dst] = max(done.leave_ns[dst], end)
        self.played.append(done)
        return done

    def _message(
        self, op: Op, src: int, dst: int, nbytes: int, start: int, entered: int, context: int, tag: int
    ) -> tuple[int, int]:
        """One transfer with its hand-shake; returns when its data has left and when it has arrived."""
        ends = (min(src, dst), max(src, dst), context)
        connection = self.connections.setdefault(ends, len(self.connections))
        edge = (src, dst, context)
        number = self.numbers[edge] = self.numbers.get(edge, -1) + 1
        gloo = self.style == "gloo"  # shows no process group, and numbers within a collective only
        turn = self.turns[(*edge, tag)] = self.turns.get((*edge, tag), -1) + 1
        common = {
            "connection": connection,
            "context": 0 if gloo else context,
            "tag": tag,
            "op": int(op),
            "seen": 3,
            "sub": turn if gloo else number,
            "play": len(self.played),
        }

        def add(role: Role, wire: Wire, who: int, whom: int, at: int, size: int, announces: int) -> int:
            packets = self.packets if role == Role.DATA else 1
            took = round((packets - 1) * GAP * self.slow.get((who, whom), 1.0))
            lost = role == Role.DATA and (who, whom) in self.lose_next
            if lost:
                self.lose_next.discard((who, whom))
            end = at + took + HOP + lost * RETRANSMISSION_NS
            self.rows.append(
                common
                | {
                    "role": int(role),
                    "wire": int(wire),
                    "src": who,
                    "dst": whom,
                    "bytes": size,
                    "announces": announces,
                    "packets": packets,
                    "retransmitted": int(lost),
                    "sent_ns": at,
                    "sent_end_ns": at + took,  # first time sent
                    "arrived_ns": at + HOP,
                    "arrived_end_ns": end,
                    "acked_ns": end + HOP,
                }
            )
            return end

        def data(wire: Wire, at: int) -> tuple[int, int]:
            end = add(Role.DATA, wire, src, dst, at, nbytes, 0)
            return self.rows[-1]["sent_end_ns"], end

        if self.style == "eager":
            return data(Wire.OB1_MATCH, start)
        if self.style == "rendezvous":
            offered = add(Role.OFFER, Wire.OB1_RNDV, src, dst, start, 0, nbytes)
            granted = max(offered, entered) + self.react()
            allowed = add(Role.GRANT, Wire.OB1_PUT_REQUEST, dst, src, granted, 0, nbytes)
            return data(Wire.OB1_PUT, allowed + self.react())
        add(Role.OFFER, Wire.GLOO_SEND_READY, src, dst, start, 0, nbytes)
        allowed = add(Role.GRANT, Wire.GLOO_RECV_READY, dst, src, entered + self.react(), 0, nbytes)
        return data(Wire.GLOO_DATA, max(start, allowed) + self.react())

    def transfers(self) -> np.ndarray:
        """All messages as TRANSFER rows in order of time."""
        out = TRANSFER.zeros(len(self.rows))
        for name in ("sent_ns", "sent_end_ns", "arrived_ns", "arrived_end_ns", "acked_ns"):
            out[name] = NEVER
        for name in self.rows[0] if self.rows else ():
            if name != "play":
                shift = TIME_0 if name.endswith("_ns") else 0
                out[name] = [row[name] + shift for row in self.rows]
        self.in_order = np.argsort(out["sent_ns"], kind="stable")
        out = out[self.in_order]
        out["message"] = np.arange(len(out))
        return out

    def instances(self, exchanges: Rows) -> list[Instance]:
        """The collectives as they were played, on the exchanges that ``transfers`` make."""
        first = np.minimum(np.minimum(exchanges["offer"], exchanges["grant"]), exchanges["data"])
        played = np.array([row["play"] for row in self.rows])[self.in_order][first]
        return [
            Instance(
                np.flatnonzero(played == number),
                done.algorithm.op,
                list(done.ranks),
                done.algorithm,
                root=done.root if done.algorithm.rooted else None,
                size=done.size,
            )
            for number, done in enumerate(self.played)
        ]


def run_job(
    world: World,
    algorithm: Algorithm,
    size: int,
    ranks: list[int],
    times: int,
    *,
    compute_ns: int = 5_000_000,
    late: Mapping[int, int] | Callable[[int, int], int] | None = None,
    start_ns: int = 1_000_000,
    **options: int,
) -> list[Played]:
    """``times`` collectives with computing in between.

    ``late``: rank -> nanoseconds it takes longer, or a function of (rank, turn).
    """
    free = dict.fromkeys(ranks, start_ns)
    done = []

    def longer(rank: int, turn: int) -> int:
        return late(rank, turn) if callable(late) else (late or {}).get(rank, 0)

    for turn in range(times):
        # A little uneven, as computing is, but repeatable.
        enter = {
            rank: free[rank] + compute_ns + longer(rank, turn) + (rank * 7919 + turn * 104729) % 20_000
            for rank in ranks
        }
        played = world.play(algorithm, size, enter, **options)
        free = played.leave_ns
        done.append(played)
    return done


def captured(transfers: Rows, endpoints: int) -> tuple[list[CaptureTables], Joined]:
    """``transfers`` as one capture saw them: each message one frame a packet, each direction a flow."""
    edges = np.stack([transfers["connection"], transfers["src"], transfers["dst"]], axis=1)
    keys, of = np.unique(edges, axis=0, return_inverse=True)
    of = of.reshape(-1)
    flows = FLOW.zeros(len(keys))
    flows["src"], flows["dst"] = keys[:, 1], keys[:, 2]
    flows["sport"], flows["dport"] = 40_000 + keys[:, 0], 5_000
    flows["transport"], flows["peer"], flows["rtt_min_ns"] = Transport.TCP, NONE32, NEVER
    for name in ("packets", "bytes", "retransmitted"):
        flows[name] = np.bincount(of, transfers[name], len(keys)).astype(np.int64)
    flows["messages"] = np.bincount(of, minlength=len(keys))
    flows["first_ns"], flows["last_ns"] = np.iinfo(np.int64).max, NEVER
    np.minimum.at(flows["first_ns"], of, transfers["sent_ns"])
    np.maximum.at(flows["last_ns"], of, transfers["arrived_end_ns"])
    messages = MESSAGE.zeros(len(transfers))
    messages["flow"] = of
    last = np.cumsum(transfers["packets"])
    messages["first_frame"], messages["last_frame"] = last - transfers["packets"], last - 1
    rows = ENDPOINT.zeros(endpoints)
    rows["addr_lo"] = (0xFFFF << 32) + 0x0A000001 + np.arange(endpoints)  # 10.0.0.1 and so on
    info = CaptureInfo(0, "node0", ["node0.pcap"])
    start, end = (
        (int(transfers["sent_ns"].min()), int(transfers["arrived_end_ns"].max())) if len(of) else (0, 0)
    )
    info.first_ns, info.last_ns = start, end
    tables = CaptureTables(info, rows, flows, messages, PAUSE.zeros(0))
    joined = Joined(
        [info], [Clock(0, True, "reference", 0, 0, 0)], rows, [[] for _ in rows], [list(range(endpoints))],
        flows, transfers, start, end,
    )  # fmt: skip
    return [tables], joined


def analysed(transfers: Rows, exchanges: Rows, instances: list[Instance], endpoints: int) -> Analysis:
    """The whole result for collectives that are already known."""
    captures, joined = captured(transfers, endpoints)
    return concluded(captures, joined, exchanges, instances)


def concluded(
    captures: list[CaptureTables], joined: Joined, exchanges: Rows, instances: Sequence[Instance]
) -> Analysis:
    """The result for collectives that are already known, of captures made by hand."""
    read = Read(joined, exchanges, list(instances), build_entries(exchanges, instances), 0, {})
    inferred = infer(joined, exchanges, instances, read.entries)
    result, _ = assemble(captures, read, inferred, Known())
    build_findings(captures, joined, exchanges, instances, inferred, result)
    return result
