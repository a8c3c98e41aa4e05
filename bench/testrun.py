"""The kernel's own way to run a program over and over (bpf_prog_test_run), for measuring. As root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from dpuflow.errors import DpuflowError
from dpuflow.live import libbpf

LIVE_FRAMES: Final = 1 << 1  # BPF_F_TEST_XDP_LIVE_FRAMES: what the program passes goes up the stack
BATCH: Final = 64  # frames at a time, as many as a NIC's poll brings
TSTAMP, SK_BUFF = 152, 192  # where the kernel's stamp is in struct __sk_buff, and its size
SOURCE: Final = Path(__file__).with_name("source.bpf.c")


class _Run(ctypes.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p)),
        *(("size_in", ctypes.c_uint32), ("size_out", ctypes.c_uint32)),
        *(("ctx_in", ctypes.c_void_p), ("ctx_out", ctypes.c_void_p)),
        *((name, ctypes.c_uint32) for name in ("ctx_size_in", "ctx_size_out", "retval", "repeat")),
        *((name, ctypes.c_uint32) for name in ("duration", "flags", "cpu", "batch")),
    )


class _Context(ctypes.Structure):
    """struct xdp_md."""

    _fields_ = tuple(
        (name, ctypes.c_uint32) for name in ("data", "end", "meta", "ifindex", "queue", "egress")
    )


def repeat(fd: int, frame: bytes, times: int, stamp_ns: int = 0) -> int:
    """Nanoseconds a run of the program on ``frame``, as the kernel measures them.

    With ``stamp_ns`` the kernel has stamped it so (programs for tc alone).
    """
    data = ctypes.create_string_buffer(frame, len(frame))
    run = _Run(ctypes.sizeof(_Run), ctypes.addressof(data), None, len(frame), repeat=times)
    if stamp_ns:
        buffer = ctypes.create_string_buffer(SK_BUFF)
        ctypes.c_uint64.from_buffer(buffer, TSTAMP).value = stamp_ns
        run.ctx_in, run.ctx_size_in = ctypes.addressof(buffer), SK_BUFF
    return _run(fd, run)


def flood(fd: int, frame: bytes, times: int, ifindex: int) -> None:
    """Have the kernel make ``frame`` that often, as if it came in behind the XDP program ``fd``."""
    data, context = ctypes.create_string_buffer(frame, len(frame)), _Context(0, len(frame), 0, ifindex, 0, 0)
    run = _Run(
        ctypes.sizeof(_Run), ctypes.addressof(data), None, len(frame), repeat=times, flags=LIVE_FRAMES,
        batch=BATCH, ctx_in=ctypes.addressof(context), ctx_size_in=ctypes.sizeof(context),
    )  # fmt: skip
    _run(fd, run)


def _run(fd: int, run: _Run) -> int:
    status = libbpf.library().bpf_prog_test_run_opts(ctypes.c_int(fd), ctypes.byref(run))
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return int(run.duration)


def bench_programs() -> dict[str, int]:
    """The programs of source.bpf.c, loaded for as long as this process lives. Raises DpuflowError."""
    lib = libbpf.library()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "source.bpf.o")
        include = f"/usr/include/{os.uname().machine}-linux-gnu"
        command = [
            "clang",
            "-target",
            "bpf",
            "-mcpu=v3",
            "-g",
            "-O2",
            "-idirafter",
            include,
            "-c",
            SOURCE,
            "-o",
            made,
        ]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DpuflowError(f"the benchmark's programs cannot be compiled ({error})") from None
        loaded = lib.bpf_object__open_file(os.fsencode(made), None)
    status = lib.bpf_object__load(loaded)
    if status < 0:
        raise libbpf.load_error(-status)
    found, program = {}, None
    while program := lib.bpf_object__next_program(loaded, program):
        found[lib.bpf_program__name(program).decode()] = int(lib.bpf_program__fd(program))
    return found


def write_middle(psn: int = 7, wire_len: int = 4174) -> bytes:
    """An RDMA WRITE MIDDLE packet with 4 KiB of payload, cut to what the kernel's test takes."""
    ethernet = bytes.fromhex("0200000000020200000000010800")
    ip = bytes.fromhex("4502000000004000401100000a0000010a000002")
    udp = bytes.fromhex("c00012b700000000")
    bth = bytes([7, 0, 0xFF, 0xFF, 0]) + (17).to_bytes(3, "big") + b"\0" + psn.to_bytes(3, "big")
    return (ethernet + ip + udp + bth).ljust(min(wire_len, 1514), b"\x55")


def cpu_s(process: int) -> float:
    """CPU time that a process has had, user and system, to the nanosecond (/proc/PID/schedstat)."""
    with open(f"/proc/{process}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9
