"""Fixtures of tests on the real kernel: skipped, with the reason, where it does not allow them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import PROJECT, Pair

TRACES = PROJECT / "traces"


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """What a shell without job control runs in the background ignores Ctrl-C, and so would its children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def programs() -> None:
    """The eBPF programs, compiled, and allowed here."""
    if os.geteuid() != 0:
        pytest.skip("not root: tests of live capture make network namespaces and load eBPF programs")
    if not shutil.which("ip"):
        pytest.skip("no ip command (package iproute2)")
    made = subprocess.run(["sh", str(PROJECT / "tools" / "bpf.sh")], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the eBPF programs cannot be made: {made.stderr.strip().splitlines()[-1]}")
    from dpuflow.errors import DpuflowError
    from dpuflow.live import libbpf

    try:
        os.close(libbpf.create_ring(4096))
    except DpuflowError as error:
        pytest.skip(f"eBPF is not to be had here: {error}")


@pytest.fixture
def pair(programs: None) -> Iterator[Pair]:
    try:
        made = Pair()
    except AssertionError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def nccl() -> list[Path]:
    """A capture of NCCL over RoCE, bundled."""
    return [TRACES / "nccl-allreduce-n2" / "node0.pcap.gz"]


@pytest.fixture(scope="session")
def gloo() -> list[Path]:
    """A capture of Gloo over TCP, bundled."""
    return [TRACES / "gloo-allreduce-n4" / "node0.pcap.gz"]
