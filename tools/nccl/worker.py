"""A rank: torch's collectives in its own network namespace, stamped by the GPU; record.py starts it.

    python tools/nccl/worker.py RANK NAMESPACE NET

It reads a job a line from its input, runs it, leaves ``rankN.json`` in the job's folder and answers with a
line: ``{"ready": ...}`` at first, then ``{"done": NAME}``, or ``{"failed": NAME, "why": ...}`` and ends.
Without a GPU the library is gloo and stamps are the host's.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import frameworks
import programs
from programs import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INTERFACE = "e0"
PROGRAMS = {**programs.PROGRAMS, **frameworks.PROGRAMS}
STAMPS = 200_000
"""Stamps that a job may have; each call has three."""
CALIBRATIONS = 300
PATIENCE = datetime.timedelta(seconds=40)
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_REC_PRIVATE = 0x4000 | 0x40000

KERNELS = r"""
#define NOW(t) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t))

extern "C" __global__ void stamp(unsigned long long *at)
{
    unsigned long long t;
    NOW(t);
    *at = t;
}

extern "C" __global__ void spin(unsigned long long ns)
{
    unsigned long long begin, t;
    NOW(begin);
    do {
        __nanosleep(500);
        NOW(t);
    } while (t - begin < ns);
}
"""

ENVIRONMENT = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": INTERFACE,
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""What keeps NCCL off the ways that no capture sees, and torch from meddling with a stuck job."""


def enter_network(namespace: str) -> None:
    """Move this process (before it has threads) into a network namespace of iproute2's."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no entry to network namespace {namespace}")


def remount_sys() -> None:
    """Show the namespace's own interfaces under /sys: they are those of whoever mounted it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWNS)
    libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None)
    if libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None):
        print("sysfs not mounted:", os.strerror(ctypes.get_errno()), file=sys.stderr)


class HostClock:
    """Stamps and work of the host, where there is no GPU."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def reset(self) -> None:
        self.times.clear()

    def stamp(self) -> int:
        self.times.append(time.time_ns())
        return len(self.times) - 1

    def spin(self, ns: int) -> None:
        time.sleep(ns / 1e9)

    def wait(self) -> None:
        pass

    def calibrate(self) -> list[int]:
        """As the GPU's; an uncertainty of 0 says that stamps are host time."""
        return [0, 0, time.time_ns()]

    def table(self) -> list[int]:
        return self.times


class GpuClock:
    """Stamps and work of the GPU, by kernels on the current stream."""

    def __init__(self, torch: Any) -> None:
        import cupy
        import numpy as np

        self.torch, self.cupy, self.word = torch, cupy, np.uint64
        self.times = torch.zeros(STAMPS, dtype=torch.int64, device="cuda")
        module = cupy.RawModule(code=KERNELS)
        self.k_stamp, self.k_spin = module.get_function("stamp"), module.get_function("spin")
        self.count = 0

    def launch(self, kernel: Any, argument: int) -> None:
        stream = self.torch.cuda.current_stream().cuda_stream
        with self.cupy.cuda.ExternalStream(stream):
            kernel((1,), (1,), (self.word(argument),))

    def reset(self) -> None:
        self.count = 0

    def stamp(self) -> int:
        self.count += 1
        self.launch(self.k_stamp, self.times.data_ptr() + 8 * self.count)
        return self.count

    def spin(self, ns: int) -> None:
        self.launch(self.k_spin, ns)

    def wait(self) -> None:
        self.torch.cuda.synchronize()

    def calibrate(self) -> list[int]:
        """The quickest of many stamps: how long it took, the host's time in its middle, the GPU's."""
        rows = []
        for _ in range(CALIBRATIONS):
            before = time.time_ns()
            at = self.stamp()
            self.wait()
            rows.append((time.time_ns() - before, before, at))
        took, before, at = min(rows)
        return [took, before + took // 2, int(self.times[at])]

    def table(self) -> list[int]:
        return [int(ns) for ns in self.times.cpu().numpy()[: self.count + 1]]


class Library:
    """torch.distributed as programs call it: sizes in bytes, tensors made for each call."""

    def __init__(self, torch: Any, rank: int, size: int, store: str) -> None:
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.gpu = torch.cuda.is_available()
        self.device = "cuda" if self.gpu else "cpu"
        dist.init_process_group(
            "nccl" if self.gpu else "gloo", init_method=store, rank=rank, world_size=size, timeout=PATIENCE
        )
        self.rank, self.size = rank, size
        self.made: dict[int, list[int]] = {}
        self.side = torch.cuda.Stream() if self.gpu else None

    def group(self, ranks: list[int]) -> Any:
        made = self.dist.new_group(ranks)
        self.made[id(made)] = ranks
        return made

    def members(self, group: Any) -> list[int]:
        if isinstance(group, list):
            return group
        return list(range(self.size)) if group is None else self.made[id(group)]

    def when_done(self, work: Any, done: Callable[..., None]) -> Any:
        """Have ``done`` called (on a GPU: stamped by a stream of its own) when ``work`` is done."""
        if self.gpu:
            with self.torch.cuda.stream(self.side):
                work.wait()
                done()
        else:
            work.get_future().then(done)
        return work

    def empty(self, count: int) -> Any:
        return self.torch.empty(count, device=self.device)

    def data(self, size: int) -> Any:
        """A tensor of ``size`` bytes: of floats, or of bytes where too small."""
        if size < 4:
            return self.torch.zeros(max(size, 1), dtype=self.torch.uint8, device=self.device)
        return self.torch.rand(size // 4, device=self.device)

    def all_reduce(self, size: int, group: Any, async_op: bool) -> Any:
        return self.dist.all_reduce(self.data(size), group=group, async_op=async_op)

    def all_gather(self, size: int, group: Any, async_op: bool) -> Any:
        one = self.data(size)
        every = self.empty(len(self.members(group)) * one.numel())
        return self.dist.all_gather_into_tensor(every, one, group=group, async_op=async_op)

    def reduce_scatter(self, size: int, group: Any) -> None:
        n = len(self.members(group))
        every = self.data(size // n // 4 * 4 * n)
        self.dist.reduce_scatter_tensor(self.empty(every.numel() // n), every, group=group)

    def broadcast(self, size: int, root: int, group: Any) -> None:
        self.dist.broadcast(self.data(size), root, group=group)

    def reduce(self, size: int, root: int, group: Any) -> None:
        self.dist.reduce(self.data(size), root, group=group)

    def gather(self, size: int, root: int) -> None:
        one = self.data(size)
        every = [self.torch.empty_like(one) for _ in range(self.size)] if self.rank == root else None
        self.dist.gather(one, every, root)

    def scatter(self, size: int, root: int) -> None:
        one = self.data(size)
        every = [self.data(size) for _ in range(self.size)] if self.rank == root else None
        self.dist.scatter(one, every, root)

    def barrier(self, group: Any) -> None:
        self.dist.all_reduce(self.data(4), group=group)

    def all_to_all(self, sends: Sequence[int], receives: Sequence[int], group: Any) -> None:
        count = sum(sends) // 4
        out = self.torch.rand(max(count, 1), device=self.device)[:count]
        self.dist.all_to_all_single(
            self.empty(sum(receives) // 4),
            out,
            [x // 4 for x in receives],
            [x // 4 for x in sends],
            group=group,
        )

    def isend(self, size: int, to: int, _tag: int) -> Any:
        return self.dist.isend(self.data(size), to)

    def recv(self, size: int, by: int, _tag: int) -> None:
        self.dist.recv(self.data(size), by)

    def exchange(self, size: int, to: Sequence[int], by: Sequence[int]) -> None:
        """Send to some and receive from some at once.

        NCCL asks for a group here: of two ranks that both send first, neither connects.
        """
        P2POp = self.dist.P2POp
        sends = [P2POp(self.dist.isend, self.data(size), peer) for peer in to]
        receives = [P2POp(self.dist.irecv, self.data(size), peer) for peer in by]
        for work in self.dist.batch_isend_irecv(sends + receives):
            work.wait()


def run_job(torch: Any, clock: GpuClock | HostClock, rank: int, job: dict[str, Any]) -> None:
    """Run a job's program and write its log, with stamps in place of their numbers."""
    before = dict(os.environ)
    os.environ.update(job.get("env", {}))
    clock.reset()
    library = Library(torch, rank, job["ranks"], job["store"])
    one = Rank(library, clock, job)
    first = clock.calibrate()
    library.dist.barrier()
    PROGRAMS[job["program"]](one, job["params"])
    clock.wait()
    second = clock.calibrate()
    table = clock.table()
    for row in one.log:
        for key in ("enter", "leave", "compute_start"):
            if key in row:
                row[key] = table[row[key]]
    library.dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    Path(job["work"], f"rank{rank}.json").write_text(json.dumps({"log": one.log, "clock": [first, second]}))


def answer(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    rank, namespace, net = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    enter_network(namespace)
    remount_sys()
    os.environ.update(ENVIRONMENT, NCCL_HOSTID=f"node{rank}")
    if net == "socket":
        os.environ["NCCL_IB_DISABLE"] = "1"
    import torch

    clock: GpuClock | HostClock
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        clock = GpuClock(torch)
        software = "nccl"
    else:
        clock = HostClock()
        software = "gloo"
    answer(ready=rank, software=software)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            run_job(torch, clock, rank, job)
        except BaseException as error:
            traceback.print_exc()
            answer(failed=job["name"], why=repr(error)[:300])
            return
        answer(done=job["name"])


if __name__ == "__main__":
    main()
