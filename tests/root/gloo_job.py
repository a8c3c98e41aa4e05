"""One rank of a Gloo job: gloo_job.py LIBRARY RANK ADDRESS STORE LATE_RANK LATE_MS STEPS BYTES.

STEPS all_reduce operations by the ring algorithm between two ranks, 20 ms of work before each, LATE_MS
more in the late rank; stderr says in the end when each was entered. LIBRARY is xoscar's binding of Gloo, by
its path, as importing the package would need far more. Tags count up, as torch.distributed's do.
"""

from __future__ import annotations

import importlib.util
import sys
import time

import numpy as np


def main() -> None:
    library, address, store = sys.argv[1], sys.argv[3], sys.argv[4]
    rank, late_rank, late_ms, steps, size = (int(sys.argv[k]) for k in (2, 5, 6, 7, 8))
    spec = importlib.util.spec_from_file_location("xoscar_pygloo", library)
    assert spec is not None
    assert spec.loader is not None
    gloo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gloo)
    context = gloo.rendezvous.Context(rank, 2)
    device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr(address))
    context.connectFullMesh(gloo.rendezvous.PrefixStore("job", gloo.rendezvous.FileStore(store)), device)
    mine, result = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
    entered = []
    for step in range(steps):
        time.sleep(0.02 + (late_ms / 1000 if rank == late_rank else 0))
        entered.append(time.time_ns())
        gloo.allreduce(
            context, mine.ctypes.data, result.ctypes.data, mine.size, gloo.glooFloat32, gloo.ReduceOp.SUM,
            gloo.AllreduceAlgorithm.RING, step,
        )  # fmt: skip
        assert (result == 2).all()
    for step, at in enumerate(entered):
        sys.stderr.write(f"enter {rank} {step} {at}\n")


if __name__ == "__main__":
    main()
