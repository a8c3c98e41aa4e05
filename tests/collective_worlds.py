"""Scripted collectives with known answers: schedules played out on a perfect network, as TRANSFER rows.

A rank sends a step's messages as soon as it has entered, has every input of its earlier steps and has
sent what it had to send before. Times are plain integers from zero; a hop takes ``HOP`` ns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpuflow.collectives.schedules import Algorithm, schedule
from dpuflow.schema import NEVER, TRANSFER, Op, Role, Wire

HOP = 20_000
REACT = 5_000
TIME_0 = 1_700_000_000_000_000_000


@dataclass
class Played:
    """One collective as it happened."""

    algorithm: Algorithm
    size: int
    ranks: list[int]
    enter_ns: dict[int, int]
    leave_ns: dict[int, int] = field(default_factory=dict)
    root: int = 0


class World:
    """Plays collectives one after the other and keeps the messages they make."""

    def __init__(self, style: str = "eager") -> None:
        self.style = style  # eager (one message), rendezvous (offer, grant, data), gloo (grant unasked)
        self.rows: list[dict[str, int]] = []
        self.played: list[Played] = []
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.connections: dict[tuple[int, int, int], int] = {}

    def play(
        self,
        algorithm: Algorithm,
        size: int,
        enter_ns: dict[int, int],
        *,
        root: int = 0,
        context: int = 0,
        tag: int = 0,
        cuts: int = 1,
    ) -> Played:
        """Let the ranks (the keys, in order of position) carry out one collective."""
        ranks = list(enter_ns)
        done = Played(algorithm, size, ranks, dict(enter_ns), dict(enter_ns), root)
        ready = {rank: at + REACT for rank, at in enter_ns.items()}
        heard = dict(enter_ns)
        sends = schedule(algorithm, len(ranks), root)
        for step in sorted({send.step for send in sends}):
            now = [send for send in sends if send.step == step]
            arrivals: list[tuple[int, int]] = []
            for send in now:
                src, dst = ranks[send.src], ranks[send.dst]
                for _ in range(cuts):
                    start = max(ready[src], heard[src] + REACT)
                    nbytes = round(send.size * size / cuts)
                    end = self._message(algorithm.op, src, dst, nbytes, start, enter_ns[dst], context, tag)
                    ready[src] = start + 1_000
                    arrivals.append((dst, end))
            for dst, end in arrivals:
                heard[dst] = max(heard[dst], end)
                done.leave_ns[dst] = max(done.leave_ns[dst], end)
        self.played.append(done)
        return done

    def _message(
        self, op: Op, src: int, dst: int, nbytes: int, start: int, entered: int, context: int, tag: int
    ) -> int:
        """One transfer with its hand-shake; returns when its data has arrived."""
        ends = (min(src, dst), max(src, dst), context)
        connection = self.connections.setdefault(ends, len(self.connections))
        edge = (src, dst, context)
        number = self.numbers[edge] = self.numbers.get(edge, -1) + 1
        common = {"connection": connection, "context": context, "tag": tag, "op": int(op), "seen": 3}
        sub = 0 if self.style == "gloo" else number

        def add(role: Role, wire: Wire, who: int, whom: int, at: int, size: int, announces: int) -> int:
            self.rows.append(
                common
                | {
                    "role": int(role),
                    "wire": int(wire),
                    "src": who,
                    "dst": whom,
                    "sub": sub,
                    "bytes": size,
                    "announces": announces,
                    "packets": 1,
                    "sent_ns": at,
                    "sent_end_ns": at,
                    "arrived_ns": at + HOP,
                    "arrived_end_ns": at + HOP,
                    "acked_ns": at + 2 * HOP,
                }
            )
            return at + HOP

        if self.style == "eager":
            return add(Role.DATA, Wire.OB1_MATCH, src, dst, start, nbytes, 0)
        if self.style == "rendezvous":
            offered = add(Role.OFFER, Wire.OB1_RNDV, src, dst, start, 0, nbytes)
            granted = max(offered, entered) + REACT
            allowed = add(Role.GRANT, Wire.OB1_PUT_REQUEST, dst, src, granted, 0, nbytes)
            return add(Role.DATA, Wire.OB1_PUT, src, dst, allowed + REACT, nbytes, 0)
        add(Role.OFFER, Wire.GLOO_SEND_READY, src, dst, start, 0, nbytes)
        allowed = add(Role.GRANT, Wire.GLOO_RECV_READY, dst, src, entered + REACT, 0, nbytes)
        return add(Role.DATA, Wire.GLOO_DATA, src, dst, max(start, allowed) + REACT, nbytes, 0)

    def transfers(self) -> np.ndarray:
        """All messages as TRANSFER rows in order of time."""
        out = TRANSFER.zeros(len(self.rows))
        for name in ("sent_ns", "sent_end_ns", "arrived_ns", "arrived_end_ns", "acked_ns"):
            out[name] = NEVER
        for row, values in zip(out, self.rows, strict=True):
            for name, value in values.items():
                row[name] = value + TIME_0 if name.endswith("_ns") else value
        return out[np.argsort(out["sent_ns"], kind="stable")]


def run_job(
    world: World,
    algorithm: Algorithm,
    size: int,
    ranks: list[int],
    times: int,
    *,
    compute_ns: int = 5_000_000,
    late: dict[int, int] | None = None,
    start_ns: int = 1_000_000,
    **options: int,
) -> list[Played]:
    """``times`` collectives with computing in between; ``late``: rank -> nanoseconds it takes longer."""
    free = dict.fromkeys(ranks, start_ns)
    done = []
    for turn in range(times):
        # A little uneven, as computing is, but repeatable.
        enter = {
            rank: free[rank] + compute_ns + (late or {}).get(rank, 0) + (rank * 7919 + turn * 104729) % 20_000
            for rank in ranks
        }
        played = world.play(algorithm, size, enter, **options)
        free = played.leave_ns
        done.append(played)
    return done
