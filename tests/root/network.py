"""Two network namespaces with a veth pair between them, and what is run in them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PROJECT)}

FIRST = ("sh", "-c", 'renice -n -10 -p $$ >/dev/null 2>&1; exec "$@"', "sh")
"""In front of a job's ranks: where that is allowed they come before the machine's other work, so that who is
late is who was told to be."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Pair:
    """Namespaces ``a`` and ``b`` with interfaces ``west`` and ``east``.

    They have no addresses until ``give_addresses``: what a test sends is all that is on the wire.
    """

    def __init__(self) -> None:
        self.a, self.b = f"dpuflow-a{os.getpid()}", f"dpuflow-b{os.getpid()}"
        run("ip", "netns", "add", self.a)
        run("ip", "netns", "add", self.b)
        self.connect()

    def connect(self) -> None:
        """Make the interfaces."""
        run("ip", "-n", self.a, "link", "add", "west", "mtu", "9000", "type", "veth",
            "peer", "name", "east", "mtu", "9000", "netns", self.b)  # fmt: skip
        for space, device in ((self.a, "west"), (self.b, "east")):
            # Not by sysctl: bare systems have none.
            run("ip", "netns", "exec", space, "sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "set", device, "up")

    def give_addresses(self) -> None:
        """10.77.0.1 to west and 10.77.0.2 to east."""
        run("ip", "-n", self.a, "addr", "add", "10.77.0.1/24", "dev", "west")
        run("ip", "-n", self.b, "addr", "add", "10.77.0.2/24", "dev", "east")

    def close(self) -> None:
        for space in (self.a, self.b):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def start(self, space: str, *command: str, **more: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["ip", "netns", "exec", space, *command],
            env=ENVIRONMENT,
            **{"stderr": subprocess.PIPE, **more},  # type: ignore[call-overload]
        )

    def call(self, space: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", space, *command],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=600,
        )

    def dpuflow(self, space: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.call(space, sys.executable, "-m", "dpuflow", *arguments)

    @contextlib.contextmanager
    def capturing(self, space: str, *options: str) -> Iterator[Capture]:
        """``dpuflow capture`` while the block runs; ended by SIGTERM unless it has ended."""
        process = self.start(space, sys.executable, "-m", "dpuflow", "capture", *options)
        capture = Capture(process)
        try:
            assert process.stderr is not None
            capture.first_line = process.stderr.readline().decode()
            yield capture
        finally:
            capture.end()

    @contextlib.contextmanager
    def tcpdump(self, space: str, device: str, file: Path, *options: str) -> Iterator[None]:
        """tcpdump into ``file`` while the block runs."""
        process = self.start(space, "tcpdump", "-i", device, "-B", "65536", "-w", str(file), "-U", *options)
        try:
            assert process.stderr is not None
            while b"listening" not in process.stderr.readline():
                assert process.poll() is None
            yield
            # Its ring's blocks are handed over once a second, and on a busy machine read later still.
            written = received = 0
            end = time.monotonic() + 120
            while not received or written < received:
                assert time.monotonic() < end, f"tcpdump has taken {written} of {received} packets"
                time.sleep(0.2)
                process.send_signal(signal.SIGUSR1)
                said = process.stderr.readline().decode()
                written, received = map(int, re.findall(r"(\d+) packets? (?:captured|received)", said))
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)

    def send(self, space: str, device: str, *files: Path, rate: int = 0) -> int:
        """Replay captures' packets at their full length; how many were sent."""
        done = self.call(space, sys.executable, str(HERE / "send.py"), device, str(rate), *map(str, files))
        assert done.returncode == 0, done.stderr
        until_passed_on()
        return int(done.stdout)


def until_passed_on() -> None:
    """Wait until no CPU has packets that were sent and not yet received (/proc/net/softnet_stat)."""
    for _ in range(500):
        lines = Path("/proc/net/softnet_stat").read_text().splitlines()
        if not any(int(line.split()[11], 16) for line in lines):
            return
        time.sleep(0.02)


@contextlib.contextmanager
def inside(space: str) -> Iterator[None]:
    """This thread in another network namespace while the block runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net", "rb") as home, open(f"/run/netns/{space}", "rb") as there:
        assert libc.setns(there.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            assert libc.setns(home.fileno(), 0x40000000) == 0


class Capture:
    """A running ``dpuflow capture``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.first_line = ""
        self.said = ""
        self.status: int | None = None

    def end(self, how: int = signal.SIGTERM, settle_s: float = 0.2) -> int:
        """Stop it, once what was sent has arrived; the exit status."""
        if self.status is None:
            time.sleep(settle_s)
            until_passed_on()
            if self.process.poll() is None:
                self.process.send_signal(how)
            _, said = self.process.communicate(timeout=120)
            self.said = self.first_line + said.decode()
            self.status = self.process.returncode
        return self.status


class Star:
    """Namespaces with an interface ``eth`` each, 10.78.0.1 and so on, at ports ``p0`` ... of one switch."""

    def __init__(self, count: int) -> None:
        self.switch = f"dpuflow-s{os.getpid()}"
        self.hosts = [f"dpuflow-{n}s{os.getpid()}" for n in range(count)]
        self.b = self.hosts[0]  # where an agent runs
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for n, space in enumerate(self.hosts):
            run("ip", "netns", "add", space)
            # One packet is one frame, as on a wire.
            run("ip", "-n", space, "link", "add", "eth", "gso_max_segs", "1", "type", "veth",
                "peer", "name", f"p{n}", "netns", self.switch)  # fmt: skip
            run("ip", "-n", self.switch, "link", "set", f"p{n}", "master", "bridge", "up")
            run("ip", "-n", space, "addr", "add", f"{self.address(n)}/24", "dev", "eth")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "set", "eth", "up")

    @staticmethod
    def address(n: int) -> str:
        return f"10.78.0.{n + 1}"

    def close(self) -> None:
        for space in (*self.hosts, self.switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def start(self, n: int, *command: str, **more: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["ip", "netns", "exec", self.hosts[n], *command],
            env=ENVIRONMENT,
            **more,  # type: ignore[call-overload]
        )
