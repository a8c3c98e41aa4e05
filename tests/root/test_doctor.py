"""``dpuflow doctor``, and errors that it would have foretold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from network import ENVIRONMENT, PROJECT, Pair, run

HIDDEN = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/kernel/btf && exec "$@"', "-"]
"""In front of a command: without the kernel's type information."""
ALONE = ["setpriv", "--reuid", "65534", "--clear-groups"]


@pytest.fixture
def readable() -> None:
    """Tests that give up root need a checkout that others may read."""
    seen = subprocess.run([*ALONE, "test", "-r", str(PROJECT / "dpuflow/__init__.py")], timeout=60)
    if seen.returncode:
        pytest.skip(f"others than root may not read {PROJECT}")


def dpuflow(
    *arguments: str, before: list[str] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(before or []), sys.executable, "-m", "dpuflow", *arguments],
        env=ENVIRONMENT | more, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_all_is_well_here(programs: None) -> None:
    before = run("tc", "qdisc", "show", "dev", "lo")
    done = dpuflow("doctor", "-i", "lo")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "ok  capture      works"
    assert run("tc", "qdisc", "show", "dev", "lo") == before


def test_without_privileges(programs: None, readable: None) -> None:
    done = dpuflow("doctor", before=ALONE)
    assert done.returncode == 1
    assert "NO  privileges   missing: CAP_NET_ADMIN, CAP_NET_RAW, CAP_PERFMON, CAP_BPF" in done.stdout
    assert "run as root or with CAP_BPF" in done.stdout
    for backend in ("ebpf", "afpacket"):
        refused = dpuflow("capture", "-i", "lo", "--backend", backend, before=ALONE)
        assert refused.returncode == 1
        assert "run as root or with CAP_" in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_packet_sockets_need_one_capability(programs: None, readable: None) -> None:
    """The fallback of those who may not load eBPF."""
    one = [*ALONE, "--inh-caps", "+net_raw", "--ambient-caps", "+net_raw"]
    done = dpuflow("capture", "-i", "lo", "--backend", "afpacket", "--duration", "0.5", before=one)
    assert done.returncode == 0, done.stderr
    assert (
        dpuflow("doctor", before=one).stdout.splitlines()[-1]
        == "ok  capture      works only with --backend afpacket"
    )


def test_without_programs_or_with_those_of_another_version(programs: None, tmp_path: Path) -> None:
    here = {"DPUFLOW_BPF": str(tmp_path)}
    missing = dpuflow("capture", "-i", "lo", **here)
    assert "build it with `make bpf`" in missing.stderr
    (tmp_path / "packets.bpf.o").write_bytes(b"\x7fELF")
    broken = dpuflow("capture", "-i", "lo", **here)
    assert broken.returncode == 1
    assert broken.stderr.count("\n") == 1
    from dpuflow.live.base import object_path
    from dpuflow.schema.ring import layout_number

    number = layout_number().to_bytes(4, "little")
    (tmp_path / "packets.bpf.o").write_bytes(object_path().read_bytes().replace(number, b"1234"))
    old = dpuflow("capture", "-i", "lo", **here)
    assert "built for another version of dpuflow" in old.stderr


def test_without_btf_all_goes_on(programs: None, tmp_path: Path) -> None:
    """What a kernel without CONFIG_DEBUG_INFO_BTF lacks is said, and is not needed."""
    done = dpuflow("doctor", "-i", "lo", before=HIDDEN)
    assert done.returncode == 0, done.stdout
    assert ", without BTF (not needed)" in done.stdout.splitlines()[0]
    for mode, name in (("packets", "a.pcapng"), ("messages", "a.dpuflow")):
        options = ("-i", "lo", "-w", str(tmp_path / name), "--mode", mode, "--duration", "0.5")
        taken = dpuflow("capture", *options, before=HIDDEN)
        assert taken.returncode == 0, taken.stderr


def test_the_nics_stamps_without_btf_are_one_sentence(programs: None) -> None:
    """The one object that asks the kernel's type information for a function."""
    done = subprocess.run(
        [*HIDDEN, sys.executable, "-c", HARDWARE],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert "this kernel has no BTF (/sys/kernel/btf/vmlinux)" in done.stdout


HARDWARE = """
from dpuflow.errors import DpuflowError
from dpuflow.live import libbpf, place
from dpuflow.live.options import LiveOptions
from dpuflow.live.ring import Ring
ring, settings = Ring.of_bytes(1 << 17), LiveOptions(("lo",)).settings(0, 0)
ring.set(settings)
try:
    place.load(place.made("packets_hardware"), [(place.XDP,)], settings, ring.maps(), 1)
except DpuflowError as error:
    print(error)
"""


def test_a_filter_left_behind_is_told_and_removed(pair: Pair) -> None:
    """As if process and watchdog had both been killed."""
    code = (
        "import os; from dpuflow.live import attach, libbpf; from dpuflow.live.base import object_path;"
        "from dpuflow.live.options import LiveOptions; import socket;"
        "l = libbpf.Loaded(object_path(), ('dpuflow_in',), LiveOptions(('lo',)).settings(0, 0), {});"
        "attach.add_filter(l.fds['dpuflow_in'], socket.if_nametoindex('east'), 'east', False)"
    )
    assert pair.call(pair.b, sys.executable, "-c", code).returncode == 0
    told = pair.dpuflow(pair.b, "doctor")
    assert (
        "NO  leftovers    stale dpuflow filters on east: dpuflow doctor --clean removes them" in told.stdout
    )
    assert pair.dpuflow(pair.b, "doctor", "--clean").stdout == "removed from east\n"
    assert pair.dpuflow(pair.b, "doctor", "--clean").stdout == "nothing was left behind\n"


def test_a_full_disk_leaves_a_whole_file(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    from readings_live import counters_of, packets_of

    small = tmp_path / "small"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small))
    try:
        file = small / "x.pcapng"
        with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--protocol", "any") as capture:
            sent = pair.send(pair.a, "west", *nccl)
            capture.process.wait(timeout=120)
        assert capture.status == 1
        assert f"{file}: No space left on device" in capture.said.splitlines()[-1]
        assert 1000 < len(packets_of(file)) < sent
        assert counters_of(file)[0]["seen"] > 0
        assert os.path.getsize(file) <= 1 << 20
    finally:
        run("umount", str(small))
