"""Record real NCCL jobs with truth on one machine with one GPU: each rank in a network namespace, captured.

    python tools/nccl/record.py JOBS.json OUT [--net socket|roce] [--seconds S] ...

Each job becomes a folder of OUT with a capture for each node, truth.json and meta.json, as docs/scoring.md
has them; crop.py then makes the captures small. README.md beside this file says what is needed.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker import INTERFACE, enter_network

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
BRIDGE = "ncclbr"
MTU = {"socket": 1500, "roce": 4200}
"""RoCE's leaves room for the headers around 4096 bytes."""
ROCE = {
    "NCCL_NET": "IB",
    "NCCL_IB_HCA": "mlx5_0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_GIN_TYPE": "99",
    "NCCL_GIN_ENABLE": "0",
}
"""What has NCCL use the verbs library; README.md has the reasons."""
FIRST_PORT = 29600
PORT_STEP = 7
START_S = 120
RETRIES = 3
RETRY_S = 4
LIMIT_S = 30
"""Seconds for a job that names no ``limit_s``."""
SETTLE_S = 0.3
"""What the network gets to fall silent before captures end."""
SIOCETHTOOL = 0x8946
OFFLOADS = {"TSO": 0x1F, "GSO": 0x24, "GRO": 0x2C}
"""Commands of ethtool that set segmentation on the way out and its reverse on the way in."""

Json = dict[str, Any]


def tool(*words: object, check: bool = True, text: str | None = None) -> None:
    """Run a command, with ``text`` as its input."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, input=text)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def namespace(rank: int) -> str:
    return f"nccl{rank}"


def link(rank: int) -> str:
    """The bridge's end of a node's cable."""
    return f"ncclv{rank}"


def ip(rank: int) -> str:
    return f"10.88.0.{rank + 1}"


def mac(rank: int) -> str:
    return f"02:00:0a:58:00:{rank + 1:02x}"


# ---- the network


def remove_network(nodes: int) -> None:
    for rank in range(nodes):
        tool("ip", "link", "del", link(rank), check=False)
        tool("ip", "netns", "del", namespace(rank), check=False)
    tool("ip", "link", "del", BRIDGE, check=False)


def make_network(nodes: int, mtu: int) -> None:
    """A namespace for each node, with one interface, on one bridge."""
    remove_network(nodes)
    tool("ip", "link", "add", BRIDGE, "type", "bridge")
    tool("ip", "link", "set", BRIDGE, "up", "mtu", mtu)
    for rank in range(nodes):
        space = namespace(rank)
        peer = ("peer", "name", INTERFACE, "mtu", mtu, "address", mac(rank), "netns", space)
        tool("ip", "netns", "add", space)
        tool("ip", "link", "add", link(rank), "mtu", mtu, "type", "veth", *peer)
        tool("ip", "link", "set", link(rank), "master", BRIDGE, "up")
        tool("ip", "-n", space, "addr", "add", f"{ip(rank)}/24", "dev", INTERFACE)
        tool("ip", "-n", space, "link", "set", INTERFACE, "up")
        tool("ip", "-n", space, "link", "set", "lo", "up")


def set_offloads(rank: int, on: bool) -> None:
    """Segmentation offloads of a node's interface; those that it does not have are left."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        enter_network(namespace(rank))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for command in OFFLOADS.values():
                value = array.array("B", struct.pack("II", command, int(on)))
                request = struct.pack("16sP", INTERFACE.encode(), value.buffer_info()[0])
                try:
                    fcntl.ioctl(sock, SIOCETHTOOL, request)
                except OSError:
                    continue
    finally:
        os._exit(0)


@contextmanager
def network_faults(faults: list[Json]) -> Iterator[None]:
    """Losses of what a node sends (``permille``), and narrow links (``rate``, as tc has it), for a while."""
    for fault in faults:
        node = fault["node"]
        if fault["kind"] == "loss":
            hook = f'type filter hook ingress device "{link(node)}" priority 0;'
            drop = f"numgen random mod 1000 < {fault['permille']} counter drop;"
            tool("nft", "-f", "-", text=f"table netdev nccl{node} {{ chain loss {{ {hook}\n{drop}\n}}\n}}\n")
        else:
            shape = ("tbf", "rate", fault["rate"], "burst", "64kb", "latency", "200ms")
            tool("tc", "-n", namespace(node), "qdisc", "add", "dev", INTERFACE, "root", *shape)
    try:
        yield
    finally:
        for fault in faults:
            node = fault["node"]
            if fault["kind"] == "loss":
                tool("nft", "delete", "table", "netdev", f"nccl{node}", check=False)
            else:
                tool("tc", "-n", namespace(node), "qdisc", "del", "dev", INTERFACE, "root", check=False)


# ---- processes


def build(folder: Path, net: str) -> Path:
    """Compile what a folder lacks: the capture, and for RoCE the verbs library."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "capture").exists():
        tool("gcc", "-O2", "-Wall", "-Wextra", "-o", folder / "capture", HERE / "capture.c")
    if net == "roce" and not (folder / "libibverbs.so").exists():
        tool("sh", HERE / "verbs" / "build.sh", folder)
    return folder


class Workers:
    """A process for each rank, that runs job after job until one fails."""

    def __init__(self, count: int, net: str, environment: dict[str, str], logs: Path) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        mine = {**os.environ, **environment, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        for rank in range(count):
            command = [sys.executable, str(HERE / "worker.py"), str(rank), namespace(rank), net]
            with (logs / f"worker{rank}.log").open("ab") as log:
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=mine)
            self.processes.append(process)
        ready, _ = self.answers(count, START_S)
        software = {answer.get("software") for answer in ready.values()}
        if len(ready) < count or len(software) != 1 or None in software:
            self.stop()
            raise RuntimeError(f"not all workers are ready: see {logs}/worker*.log")
        self.software = str(software.pop())

    def send(self, count: int, job: Json) -> None:
        for process in self.processes[:count]:
            assert process.stdin
            process.stdin.write((json.dumps(job) + "\n").encode())
            process.stdin.flush()

    def answers(self, count: int, limit_s: float) -> tuple[dict[int, Json], set[int]]:
        """An answer of each of the first ``count`` ranks, and those that gave none in time."""
        until, left = time.time() + limit_s, set(range(count))
        got: dict[int, Json] = {}
        while left and time.time() < until:
            outputs = {output: rank for rank in left if (output := self.processes[rank].stdout)}
            for output in select.select(list(outputs), [], [], 0.5)[0]:
                rank, line = outputs[output], output.readline()
                if not line:
                    got[rank] = {"failed": "ended"}
                    left.discard(rank)
                    continue
                try:
                    got[rank] = json.loads(line)
                except ValueError:
                    continue  # something else was printed
                left.discard(rank)
        return got, left

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@contextmanager
def captures(nodes: int, program: Path, folder: Path) -> Iterator[list[str]]:
    """Capture at each node; the list gets, at the end, what each capture says about itself."""
    running: list[subprocess.Popen[str]] = []
    said: list[str] = []
    for rank in range(nodes):
        command = ["ip", "netns", "exec", namespace(rank), program, INTERFACE, folder / f"node{rank}.pcap"]
        running.append(subprocess.Popen([str(x) for x in command], stderr=subprocess.PIPE, text=True))
    for process in running:
        assert process.stderr
        process.stderr.readline()
    try:
        yield said
    finally:
        for process in running:
            process.terminate()
        said.extend(process.communicate()[1].strip() for process in running)


# ---- what is written


class GpuTime:
    """The GPU's stamps as host time: a line through the best calibrations before and after the job."""

    def __init__(self, clocks: dict[int, list[list[int]]]) -> None:
        self.first = min(clock[0] for clock in clocks.values())
        self.last = min(clock[1] for clock in clocks.values())

    def host_ns(self, stamp: int) -> int:
        uncertain, host, gpu = self.first
        if not uncertain:
            return stamp
        rate = (self.last[1] - host) / max(self.last[2] - gpu, 1)
        return int(host + (stamp - gpu) * rate)


def truth(name: str, nodes: int, logs: dict[int, list[Json]], clock: GpuTime) -> Json:
    """The ranks' logs as one list of collectives that all of their ranks left, by first entry."""
    rows: dict[str, Json] = {}
    for rank, log in logs.items():
        for call in log:
            row = rows.setdefault(
                call["key"],
                {
                    **{key: call[key] for key in ("iter", "op", "bytes", "ranks", "root")},
                    "enter_ns": [None] * nodes,
                    "leave_ns": [None] * nodes,
                    "injected_ns": [0] * nodes,
                    "compute_start_ns": [None] * nodes,
                    "host_ns": [None] * nodes,
                },
            )
            row["enter_ns"][rank] = clock.host_ns(call["enter"])
            row["leave_ns"][rank] = clock.host_ns(call["leave"]) if call.get("leave") else None
            row["injected_ns"][rank] = call["injected"]
            row["compute_start_ns"][rank] = clock.host_ns(call["compute_start"])
            row["host_ns"][rank] = call["host"]
    made = []
    for row in rows.values():
        if any(row["enter_ns"][r] is None or row["leave_ns"][r] is None for r in row["ranks"]):
            continue
        if row["root"] is None:
            del row["root"]
        if len(row["ranks"]) == nodes:
            del row["ranks"]
        made.append(row)
    made.sort(key=lambda row: min(ns for ns in row["enter_ns"] if ns is not None))
    collectives = [{"seq": number, **row} for number, row in enumerate(made)]
    return {"case": name, "world_size": nodes, "collectives": collectives}


def meta(job: Json, software: str, net: str, clocks: dict[int, Any], began: int, said: list[str]) -> Json:
    """What the case is, and how it was made."""
    fault = job.get("fault")
    if fault and fault["kind"] == "sometimes":
        fault = {**fault, "kind": "random"}
    return {
        "case": job["name"],
        "software": software,
        "transport": net,
        "workload": job["program"],
        "ops": None,
        "algorithm": None,
        "world_size": job["ranks"],
        "iterations": job["iterations"],
        "params": job["params"],
        "clock": "one CLOCK_REALTIME for all nodes",
        "gpu_clock": {str(rank): clock for rank, clock in clocks.items()},
        "nodes": [
            {"rank": rank, "ip": ip(rank), "mac": mac(rank), "capture": f"node{rank}.pcap.gz"}
            for rank in range(job["ranks"])
        ],
        "fault": {"compute": fault, "network": job.get("network")},
        "background": None,
        "started_ns": began,
        "captures": said,
        "spec": job,
    }


def read_logs(folder: Path, nodes: int) -> tuple[dict[int, list[Json]], dict[int, Any]]:
    """What the ranks left behind, taken away: logs and calibrations."""
    logs, clocks = {}, {}
    for rank in range(nodes):
        path = folder / f"rank{rank}.json"
        if path.exists():
            kept = json.loads(path.read_text())
            logs[rank], clocks[rank] = kept["log"], kept["clock"]
            path.unlink()
    return logs, clocks


def start_workers(nodes: int, net: str, environment: dict[str, str], logs: Path) -> Workers:
    """Workers, tried again: MPS takes no clients for some seconds after others of it were killed."""
    for _ in range(RETRIES):
        try:
            return Workers(nodes, net, environment, logs)
        except RuntimeError as error:
            print(error, flush=True)
            time.sleep(RETRY_S)
    return Workers(nodes, net, environment, logs)


def record(job: Json, port: int, workers: Workers, program: Path, out: Path, net: str) -> tuple[bool, str]:
    """Run one job and write its case; whether all ranks came through, and a line about it."""
    nodes, folder = job["ranks"], out / job["name"]
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(nodes):
        set_offloads(rank, job.get("offloads", True))
    with captures(nodes, program, folder) as said, network_faults(job.get("network") or []):
        began = time.time_ns()
        workers.send(nodes, {**job, "work": str(folder), "store": f"tcp://{ip(0)}:{port}"})
        got, left = workers.answers(nodes, job.get("limit_s", LIMIT_S))
        time.sleep(SETTLE_S)
    logs, clocks = read_logs(folder, nodes)
    if logs:
        case = truth(job["name"], nodes, logs, GpuTime(clocks))
        (folder / "truth.json").write_text(json.dumps(case, separators=(",", ":")))
    about = meta(job, workers.software, net, clocks, began, said)
    (folder / "meta.json").write_text(json.dumps(about, indent=1))
    fine = not left and all("done" in answer for answer in got.values())
    failed = {rank: answer for rank, answer in got.items() if "failed" in answer}
    how = "ok" if fine else f"FAILED {failed}, without an answer {sorted(left)}"
    return fine, f"{job['name']}: {how} {(time.time_ns() - began) / 1e9:.1f} s; {'; '.join(said)}"


def run(jobs: list[Json], options: argparse.Namespace, built: Path) -> bool:
    """Record job after job until the time is up; whether all were recorded whole."""
    deadline = time.time() + options.seconds
    environment = dict(word.split("=", 1) for word in options.env)
    if options.net == "roce":
        path = f"{built}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = {"LD_LIBRARY_PATH": path, **ROCE, **environment}
    nodes = max(job["ranks"] for job in jobs)
    whole = True
    make_network(nodes, MTU[options.net])
    workers = None
    try:
        for number, job in enumerate(jobs, 1):
            if time.time() > deadline:
                print("time is up before", job["name"], flush=True)
                return False
            workers = workers or start_workers(nodes, options.net, environment, options.out)
            port = FIRST_PORT + PORT_STEP * number
            try:
                fine, line = record(job, port, workers, built / "capture", options.out, options.net)
            except RuntimeError as error:  # a network fault that this machine cannot make
                fine, line = False, f"{job['name']}: FAILED {error}"
            print(line, flush=True)
            if not fine:
                whole = False
                workers.stop()
                workers = None
    finally:
        if workers:
            workers.stop()
        remove_network(nodes)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=Path, metavar="JOBS.json")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--net", choices=["socket", "roce"], default="socket")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no job after so long")
    parser.add_argument(
        "--build", type=Path, metavar="FOLDER", help="keep what is compiled, or use what is there"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for all ranks")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = json.loads(options.jobs.read_text())
    with tempfile.TemporaryDirectory() as folder:
        built = build((options.build or Path(folder)).resolve(), options.net)
        sys.exit(0 if run(jobs, options, built) else 1)


if __name__ == "__main__":
    main()
