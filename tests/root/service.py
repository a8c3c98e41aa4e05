"""A service on TCP, for tests: ranks that carry out all_reduces by Gloo, a front end, clients.

service.py rank LIBRARY RANK RANKS ADDRESS STORE ORDERS BYTES: 60 ms of work and an all_reduce a step. Rank 0
is the front end, too: after each step it sends a token to each client that waits for one. ORDERS: a file,
read before each step, of milliseconds that this rank works longer; ``stop``: it does nothing for as long as
that is there. stderr says when each step was entered.

service.py client FRONT_END: asks for 12 tokens, waits for the last of them, thinks for 0.2 s, asks again.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

PORT, TOKENS, THINK_S, WORK_S = 8000, 12, 0.2, 0.06
PROMPT, TOKEN = b"p" * 3000, b"t" * 200


class FrontEnd:
    """Clients' connections, each with the tokens that it still waits for."""

    def __init__(self, address: str) -> None:
        self.left: dict[socket.socket, int] = {}
        self.listener = socket.create_server((address, PORT))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._take, args=(client,), daemon=True).start()

    def _take(self, client: socket.socket) -> None:
        while read_all(client, len(PROMPT)):
            self.left[client] = TOKENS

    def step(self) -> None:
        for client, left in list(self.left.items()):
            client.sendall(TOKEN)
            self.left[client] = left - 1
            if left == 1:
                del self.left[client]


def read_all(stream: socket.socket, size: int) -> bool:
    """Whether so much came before the end."""
    while size:
        part = stream.recv(size)
        if not part:
            return False
        size -= len(part)
    return True


def rank() -> None:
    library, address, store, orders = sys.argv[2], sys.argv[5], sys.argv[6], Path(sys.argv[7])
    me, ranks, size = (int(sys.argv[k]) for k in (3, 4, 8))
    spec = importlib.util.spec_from_file_location("xoscar_pygloo", library)
    assert spec is not None
    assert spec.loader is not None
    gloo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gloo)
    context = gloo.rendezvous.Context(me, ranks)
    context.setTimeout(timedelta(hours=1))  # a job that hangs waits
    device = gloo.transport.tcp.CreateDevice(gloo.transport.tcp.attr(address))
    context.connectFullMesh(gloo.rendezvous.PrefixStore("job", gloo.rendezvous.FileStore(store)), device)
    mine, result = np.ones(size // 4, np.float32), np.zeros(size // 4, np.float32)
    front_end = FrontEnd(address) if me == 0 else None
    step = 0
    while True:
        while (said := orders.read_text().strip()) == "stop":
            time.sleep(0.1)
        time.sleep(WORK_S + float(said or 0) / 1000)
        sys.stderr.write(f"enter {me} {step} {time.time_ns()}\n")
        gloo.allreduce(
            context, mine.ctypes.data, result.ctypes.data, mine.size, gloo.glooFloat32, gloo.ReduceOp.SUM,
            gloo.AllreduceAlgorithm.RING, step,
        )  # fmt: skip
        step += 1
        if front_end is not None:
            front_end.step()


def client() -> None:
    stream = socket.create_connection((sys.argv[2], PORT))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        stream.sendall(PROMPT)
        if not read_all(stream, TOKENS * len(TOKEN)):
            return
        time.sleep(THINK_S)


if __name__ == "__main__":
    {"rank": rank, "client": client}[sys.argv[1]]()
