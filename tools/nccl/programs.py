"""What jobs do: programs over a library of collectives, and each rank's log of what it called and when.

A program is a function of a rank and its parameters, named ``p_NAME`` here and NAME in JOBS.json. It computes
(``Rank.work``) and calls collectives; every rank of a job runs the same one.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Params = dict[str, Any]
JITTER_US = 50
"""How much longer a rank may compute than asked for, where the job does not say (``jitter_us``)."""


class Clock(Protocol):
    """Where a rank's work is done and stamped: in the order of the stream that its collectives run on."""

    def stamp(self) -> int:
        """Note the time; returned is the number of the stamp, to be looked up at the end."""

    def spin(self, ns: int) -> None:
        """Compute for ``ns``."""

    def wait(self) -> None:
        """Return once all that was asked for is done."""


class Rank:
    """One rank of a job: its library, its faults, and its log."""

    def __init__(self, library: Any, clock: Clock, spec: dict[str, Any]) -> None:
        self.lib, self.clock, self.spec = library, clock, spec
        self.rank, self.size = library.rank, library.size
        self.log: list[dict[str, Any]] = []
        self.own = random.Random(1000 * spec["seed"] + self.rank)
        self.common = random.Random(spec["seed"])
        self.begun = clock.stamp()
        self.injected = 0
        self.last: int | None = None

    def injection_ns(self, step: int) -> int:
        """By how much this rank is delayed in ``step``."""
        fault = self.spec["fault"]
        if not fault:
            return 0
        draw = random.Random(f"{self.spec['seed']} {step}")
        kind = fault["kind"]
        if kind == "persistent":
            hit = self.rank == fault["rank"] and step >= fault.get("from_iter", 0)
            return int(fault["ms"] * 1e6) if hit else 0
        if kind == "two":
            return int(fault["ms_by_rank"].get(str(self.rank), 0) * 1e6)
        if kind == "sometimes":  # one rank, a share of the steps
            hit = draw.random() < fault["share"] and self.rank == fault["rank"]
            return int(fault["ms"] * 1e6) if hit else 0
        if kind == "random":
            who, ms = draw.randrange(self.size), draw.uniform(*fault["range_ms"])
            return int(ms * 1e6) if draw.random() < fault["prob"] and who == self.rank else 0
        if kind == "rotating":
            return int(fault["ms"] * 1e6) if step % self.size == self.rank else 0
        raise ValueError(kind)

    def work(self, ms: float, step: int | None = None, parts: int = 1) -> None:
        """Compute for ``ms``; with ``step`` its delay on top (a share of it where in parts).

        In mode "gpu" the delay is the GPU's; in mode "host" the GPU is done, and then the host sleeps.
        """
        self.begun = self.clock.stamp()
        extra = self.injection_ns(step) // parts if step is not None else 0
        self.injected += extra
        own = int(ms * 1e6 + self.own.uniform(0, self.spec.get("jitter_us", JITTER_US) * 1e3))
        if step is not None:
            if step != self.last and self.spec.get("sync", True):
                self.clock.wait()
            self.last = step
        if self.spec.get("mode", "gpu") == "gpu":
            self.clock.spin(own + extra)
            return
        self.clock.spin(own)
        self.clock.wait()
        if extra:
            time.sleep(extra / 1e9)

    def call(
        self,
        key: str,
        step: int,
        op: str,
        size: int | None,
        function: Callable[[bool], Any],
        group: Any = None,
        root: int | None = None,
        later: bool = False,
        **more: Any,
    ) -> Any:
        """Call a collective and log it; with ``later`` what to wait for is returned, and the stream goes on.

        Ranks log the same call under the same ``key``.
        """
        row = {
            "key": key,
            "iter": step,
            "op": op,
            "bytes": size,
            "injected": self.injected,
            "compute_start": self.begun,
            "ranks": self.lib.members(group),
            "root": root,
            **more,
        }
        self.injected = 0
        self.log.append(row)
        row["host"] = time.time_ns()
        row["enter"] = self.clock.stamp()

        def done(_: Any = None) -> None:
            row["leave"] = self.clock.stamp()

        if later:
            return self.lib.when_done(function(True), done)
        function(False)
        done()
        self.begun = row["leave"]
        return None

    def all_reduce(
        self, step: int, size: int, key: str = "", group: Any = None, later: bool = False, **more: Any
    ) -> Any:
        def run(async_op: bool) -> Any:
            return self.lib.all_reduce(size, group, async_op)

        return self.call(f"{step} ar{key}", step, "all_reduce", size, run, group, later=later, **more)

    def all_gather(self, step: int, size: int, key: str = "", group: Any = None, later: bool = False) -> Any:
        def run(async_op: bool) -> Any:
            return self.lib.all_gather(size, group, async_op)

        return self.call(f"{step} ag{key}", step, "all_gather", size, run, group, later=later)

    def reduce_scatter(self, step: int, size: int, key: str = "", group: Any = None) -> Any:
        def run(_: bool) -> Any:
            return self.lib.reduce_scatter(size, group)

        return self.call(f"{step} rs{key}", step, "reduce_scatter", size, run, group)

    def broadcast(self, step: int, size: int, root: int, key: str = "", group: Any = None) -> Any:
        def run(_: bool) -> Any:
            return self.lib.broadcast(size, root, group)

        return self.call(f"{step} bc{key}", step, "broadcast", size, run, group, root=root)

    def reduce(self, step: int, size: int, root: int, key: str = "", group: Any = None) -> Any:
        def run(_: bool) -> Any:
            return self.lib.reduce(size, root, group)

        return self.call(f"{step} rd{key}", step, "reduce", size, run, group, root=root)

    def gather(self, step: int, size: int, root: int, key: str = "") -> Any:
        def run(_: bool) -> Any:
            return self.lib.gather(size, root)

        return self.call(f"{step} ga{key}", step, "gather", size, run, root=root)

    def scatter(self, step: int, size: int, root: int, key: str = "") -> Any:
        def run(_: bool) -> Any:
            return self.lib.scatter(size, root)

        return self.call(f"{step} sc{key}", step, "scatter", size, run, root=root)

    def barrier(self, step: int, key: str = "", group: Any = None) -> Any:
        def run(_: bool) -> Any:
            return self.lib.barrier(group)

        return self.call(f"{step} ba{key}", step, "barrier", 0, run, group)

    def all_to_all(
        self, step: int, sends: Sequence[int], receives: Sequence[int], key: str = "", group: Any = None
    ) -> Any:
        def run(_: bool) -> Any:
            return self.lib.all_to_all(sends, receives, group)

        even = len(set(sends)) == 1 and len(set(receives)) == 1
        return self.call(f"{step} aa{key}", step, "all_to_all", sum(sends) if even else None, run, group)


def steps(r: Rank) -> range:
    return range(r.spec["iterations"])


def p_all_reduce(r: Rank, p: Params) -> None:
    """Data parallel: one all_reduce a step."""
    for s in steps(r):
        r.work(p["ms"], s)
        r.all_reduce(s, p["size"])


def p_one(r: Rank, p: Params) -> None:
    """One collective a step, of a fixed root."""
    for s in steps(r):
        r.work(p["ms"], s)
        if p["op"] == "all_gather":
            r.all_gather(s, p["size"])
        elif p["op"] == "reduce_scatter":
            r.reduce_scatter(s, p["size"])
        elif p["op"] == "all_to_all":
            r.all_to_all(s, [p["size"] // r.size] * r.size, [p["size"] // r.size] * r.size)
        elif p["op"] == "barrier":
            r.barrier(s)
        else:
            getattr(r, p["op"])(s, p["size"], p.get("root", 0))


def p_mixed(r: Rank, p: Params) -> None:
    """Several operations of several sizes a step."""
    for s in steps(r):
        r.work(p["ms"], s)
        r.all_reduce(s, p["size"], "a")
        r.work(1)
        r.all_gather(s, p["size"] // 4)
        r.work(1.5)
        r.broadcast(s, p["size"] // 2, s % r.size if p.get("roots") else 0)
        r.work(0.5)
        r.all_reduce(s, 8, "b")


def p_moe(r: Rank, p: Params) -> None:
    """Experts: uneven all_to_all there and back, maybe an all_reduce of gradients."""
    for s in steps(r):
        for layer in range(p["layers"]):
            r.work(p["ms"], s, p["layers"])
            table = [[r.common.randint(1, 40) * p["unit"] for _ in range(r.size)] for _ in range(r.size)]
            if p.get("holes"):
                table = [[0 if r.common.random() < 0.2 else cell for cell in row] for row in table]
            mine = table[r.rank], [row[r.rank] for row in table]
            r.all_to_all(s, *mine, f"d{layer}")
            r.work(p["ms"] / 2)
            r.all_to_all(s, mine[1], mine[0], f"c{layer}")
        if p["grad"]:
            r.work(1)
            r.all_reduce(s, p["grad"])


def p_roots(r: Rank, p: Params) -> None:
    """Operations with a root, another one each time."""
    for s in steps(r):
        for k, op in enumerate(p["ops"]):
            root = r.common.randrange(r.size)
            r.work(p["ms"], s if k == 0 else None)
            getattr(r, op)(s, p["size"], root, str(k))


def p_ddp(r: Rank, p: Params) -> None:
    """Gradients in buckets, reduced while the rest is computed."""
    for s in steps(r):
        r.work(p["ms"], s)
        works = []
        for bucket in range(p["buckets"]):
            r.work(p["ms"] / p["buckets"])
            size = p["size"] if bucket else p["size"] // 3 // 4 * 4
            works.append(r.all_reduce(s, size, str(bucket), later=True, bucket=bucket))
        for work in works:
            work.wait()
        r.work(1)
        if p.get("norm"):
            r.all_reduce(s, 4, "n")


def p_fsdp(r: Rank, p: Params) -> None:
    """Sharded weights: gathered layer by layer, gradients scattered."""
    for s in steps(r):
        for layer in range(p["layers"]):
            r.all_gather(s, p["size"] // r.size, f"f{layer}")
            r.work(p["ms"], s, p["layers"])
        for layer in reversed(range(p["layers"])):
            r.all_gather(s, p["size"] // r.size, f"b{layer}")
            r.work(2 * p["ms"])
            r.reduce_scatter(s, p["size"], f"g{layer}")


def p_decode(r: Rank, p: Params) -> None:
    """Tensor-parallel inference: small all_reduces, then a broadcast of the token."""
    for s in steps(r):
        for layer in range(p["layers"]):
            r.work(p["ms"], s, p["layers"])
            r.all_reduce(s, p["size"], f"{layer}")
        r.broadcast(s, 64, 0)


def p_tpdp(r: Rank, p: Params) -> None:
    """Tensor parallel inside, data parallel across; the latter maybe overlapped."""
    tp = p["tp"]
    tps = [r.lib.group(list(range(k, k + tp))) for k in range(0, r.size, tp)]
    dps = [r.lib.group(list(range(k, r.size, tp))) for k in range(tp)]
    mine_tp, mine_dp = tps[r.rank // tp], dps[r.rank % tp]
    for s in steps(r):
        works = []
        for layer in range(p["layers"]):
            r.work(p["ms"], s, p["layers"])
            r.all_reduce(s, p["size"], f"t{layer} {r.rank // tp}", mine_tp)
            work = r.all_reduce(s, p["dp_size"], f"d{layer} {r.rank % tp}", mine_dp, later=p["overlap"])
            if work:
                works.append(work)
        for work in works:
            work.wait()


def p_hier(r: Rank, p: Params) -> None:
    """Reduce within a node group, all_reduce of leaders, broadcast within."""
    k = p["per"]
    inner = [r.lib.group(list(range(a, a + k))) for a in range(0, r.size, k)]
    leaders = r.lib.group(list(range(0, r.size, k)))
    own = inner[r.rank // k]
    first = r.rank // k * k
    for s in steps(r):
        r.work(p["ms"], s)
        r.reduce(s, p["size"], first, f"i{first}", own)
        if r.rank == first:
            r.all_reduce(s, p["size"], "l", leaders)
        r.broadcast(s, p["size"], first, f"i{first}", own)


def p_pipeline(r: Rank, p: Params) -> None:
    """Microbatches through stages, then an all_reduce."""
    n, m = r.size, p["microbatches"]
    size = p["size"]
    pending: list[Any] = []

    def forward(s: int, mb: int) -> None:
        if r.rank:
            r.lib.recv(size, r.rank - 1, 2 * mb)
        r.work(p["fwd"], s, 2 * m)
        if r.rank < n - 1:
            pending.append(r.lib.isend(size, r.rank + 1, 2 * mb))

    def backward(s: int, mb: int) -> None:
        if r.rank < n - 1:
            r.lib.recv(size, r.rank + 1, 2 * mb + 1)
        r.work(p["bwd"], s, 2 * m)
        if r.rank:
            pending.append(r.lib.isend(size, r.rank - 1, 2 * mb + 1))

    ahead = m if p["schedule"] == "gpipe" else min(m, n - r.rank - 1)
    for s in steps(r):
        for mb in range(ahead):
            forward(s, mb)
        for mb in range(m):
            if mb + ahead < m:
                forward(s, mb + ahead)
            backward(s, mb)
        for work in pending:
            work.wait()
        pending.clear()
        r.injected = r.injection_ns(s)
        r.all_reduce(s, p["sync"])


def p_ring(r: Rank, p: Params) -> None:
    """Ring attention: keys and values go round, then a small all_reduce."""
    for s in steps(r):
        r.work(p["ms"], s)
        for _ in range(r.size - 1):
            r.lib.exchange(p["size"], [(r.rank + 1) % r.size], [(r.rank - 1) % r.size])
            r.work(p["hop_ms"])
        r.all_reduce(s, 4)


def p_halo(r: Rank, p: Params) -> None:
    """Neighbours on a line exchange borders, now and then a residual's all_reduce."""
    for s in steps(r):
        r.work(p["ms"], s)
        near = [x for x in (r.rank - 1, r.rank + 1) if 0 <= x < r.size]
        r.lib.exchange(p["size"], near, near)
        if s % p["every"] == 0:
            r.all_reduce(s, 8)


def p_server(r: Rank, p: Params) -> None:
    """Rank 0 gathers gradients and broadcasts weights."""
    for s in steps(r):
        r.work(p["ms"], s)
        r.gather(s, p["size"], 0)
        if r.rank == 0:
            r.work(1)
        r.broadcast(s, p["size"], 0)


def p_local(r: Rank, p: Params) -> None:
    """Local SGD: many steps of work, then everything at once: several all_reduces back to back."""
    for s in steps(r):
        r.work(p["ms"], s)
        for k in range(p["tensors"]):
            r.all_reduce(s, p["size"] * (k + 1), str(k))


def p_hang(r: Rank, p: Params) -> None:
    """One rank stays away from the last step, or calls another operation first (``desync``)."""
    for s in steps(r):
        r.work(p["ms"], s)
        if s == r.spec["iterations"] - 1 and r.rank == p["rank"]:
            if p.get("desync"):
                r.barrier(s, "x")  # another operation than all others'
            time.sleep(60)
        r.all_reduce(s, p["size"])


PROGRAMS = {name[2:]: value for name, value in globals().items() if name.startswith("p_")}
