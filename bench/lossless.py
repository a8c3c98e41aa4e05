"""How many packets a second one core takes, source, program and reader together, with nothing lost.

In a network namespace of its own the kernel makes packets as fast as it can (live frames of
bpf_prog_test_run), which go up the stack of an interface that `dpuflow capture` captures from; both run on
one core. What counts is the CPU time of both for a packet, as the rate of a machine that others use tells
little: the rate of one core is its inverse. The source's own limit is the rate with nobody capturing.

Lossless means here: taken from the ring and made into the blocks of a pcapng file, in memory. Twice, as it
makes a difference who reads the clock: with the kernel as it is, and where some program has it stamp whatever
comes, as chronyd, systemd-timesyncd and ptp4l do (a socket with SO_TIMESTAMPNS); N pays for that as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
from statistics import median
from typing import Any, Final

from bench.testrun import bench_programs, cpu_s, flood, write_middle
from dpuflow.errors import DpuflowError

NOBODY: Final = 0xFFFFFE  # a QP that no packet is for
PACKETS: Final = 2_000_000
CHUNK: Final = 500_000
INTERFACE: Final = "flood"

WAYS: Final[dict[str, tuple[str, ...] | None]] = {
    "nobody captures": None,
    "N": ("--qp", str(NOBODY)),
    "packets": (),
    "packets, snaplen 64": ("--snaplen", "64"),
    "messages": ("--mode", "messages"),
    "AF_PACKET": ("--backend", "afpacket"),
    "nobody captures, stamped": None,
    "N, stamped": ("--qp", str(NOBODY)),
    "packets, stamped": (),
    "packets, snaplen 64, stamped": ("--snaplen", "64"),
}
_STAMPED: Final = "stamped"  # ways that end so: the kernel stamps what comes, whoever captures
_SO_TIMESTAMPNS: Final = 35


def run_lossless(rounds: int) -> dict[str, dict[str, float]]:
    """CPU nanoseconds a packet of each way, and the share of packets lost. Raises DpuflowError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            words = json.dumps(_in_own_network(rounds))
        except BaseException as error:
            words = json.dumps({"error": str(error)})
        with open(writer, "w", encoding="ascii") as out:
            out.write(words)
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="ascii") as file:
        found: dict[str, Any] = json.loads(file.read())
    os.waitpid(child, 0)
    if "error" in found:
        raise DpuflowError(f"the lossless rate is not measured: {found['error']}")
    return found


def _in_own_network(rounds: int) -> dict[str, dict[str, float]]:
    if ctypes.CDLL(None).unshare(0x40000000) != 0:  # CLONE_NEWNET
        raise DpuflowError("no network namespace of its own")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    link = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", "other"]
    up = [["ip", "link", "set", name, "up"] for name in (INTERFACE, "other")]
    for command in (link, *up):
        subprocess.run(command, check=True)
    source, index = bench_programs()["source"], socket.if_nametoindex(INTERFACE)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, options in WAYS.items():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
                asking.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, int(name.endswith(_STAMPED)))
                samples[name].append(_once(source, index, options))
    return {
        name: {"ns": median(ns for ns, _ in values), "lost": max(lost for _, lost in values)}
        for name, values in samples.items()
    }


def _once(source: int, index: int, options: tuple[str, ...] | None) -> tuple[float, float]:
    """CPU nanoseconds a packet, and the share lost."""
    frame = write_middle(wire_len=1100)
    if options is None:
        return _flood(source, frame, index), 0.0
    command = [sys.executable, "-m", "dpuflow", "capture", "-i", INTERFACE, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(0.3)
        before = cpu_s(process.pid)
        spent = _flood(source, frame, index)
        time.sleep(0.1)
        spent += (cpu_s(process.pid) - before) * 1e9 / PACKETS
        process.terminate()
        said = process.stderr.read()
    lost = re.search(r"([\d,]+) lost", said)
    if lost is None:
        raise DpuflowError(said.strip() or "the capture said nothing")
    return spent, int(lost[1].replace(",", "")) / PACKETS


def _flood(source: int, frame: bytes, index: int) -> float:
    """Make PACKETS packets: this process's CPU nanoseconds for each."""
    start = time.process_time_ns()
    for _ in range(PACKETS // CHUNK):
        flood(source, frame, CHUNK, index)
    return (time.process_time_ns() - start) / PACKETS


def lossless_lines(figures: dict[str, dict[str, float]]) -> list[str]:
    """The figures in words."""
    nothing = figures["N"]["ns"]
    lines = []
    for name, each in figures.items():
        text = f"one core, {name:28} {each['ns']:6.0f} ns a packet, {1e3 / each['ns']:5.2f} Mpps"
        if not name.startswith(("nobody", "N")):
            base = figures["N, stamped" if name.endswith(_STAMPED) else "N"]["ns"]
            text += f" ({base / each['ns']:.0%} of N), {each['lost']:.2%} lost"
        lines.append(text)
    ours, theirs = figures["packets"]["ns"] - nothing, figures["AF_PACKET"]["ns"] - nothing
    lines.append(f"AF_PACKET takes {theirs / ours:.1f} times as long for a packet, source and N apart")
    return lines
