"""The few calls of libbpf that load a program made beforehand, through ctypes: no compiler, no build.

libbpf 1.x (libbpf.so.1; packages libbpf1 of Debian 12 and Ubuntu 24.04; dpuflow's package for Ubuntu 22.04
brings it).
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.schema import ring

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Pointer = ctypes.c_void_p
_PRINT: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, _Pointer)
_BROUGHT: Final = Path(__file__).with_name("libbpf.so.1")  # by a package for a system without it
_said: list[str] = []
_ARRAY, _PERCPU_ARRAY, _RINGBUF = 2, 6, 27  # enum bpf_map_type
_MMAPABLE: Final = 1 << 10  # BPF_F_MMAPABLE
_DEVICE_BOUND: Final = 1 << 6  # BPF_F_XDP_DEV_BOUND_ONLY


def _listen(level: int, form: bytes | None, arguments: Any) -> int:
    """Keep libbpf's warnings for the error text."""
    if level == 0 and form is not None:
        text = ctypes.create_string_buffer(4096)
        _c().vsnprintf(text, 4096, form, ctypes.c_void_p(arguments))
        _said.append(text.value.decode("utf-8", "replace").strip())
        del _said[:-40]
    return 0


_LISTEN: Final = _PRINT(_listen)


@cache
def _c() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _open(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, use_errno=True)
    except OSError:
        return None


@cache
def library() -> ctypes.CDLL:
    """libbpf, its functions declared. Raises MissingError."""
    lib = _open("libbpf.so.1") or _open(str(_BROUGHT))
    if lib is None:
        raise MissingError("libbpf.so.1 is not installed: apt-get install libbpf1")
    for name, result, arguments in (
        ("bpf_object__open_file", _Pointer, (ctypes.c_char_p, _Pointer)),
        ("bpf_object__load", ctypes.c_int, (_Pointer,)),
        ("bpf_object__close", None, (_Pointer,)),
        ("bpf_object__find_map_by_name", _Pointer, (_Pointer, ctypes.c_char_p)),
        ("bpf_object__next_map", _Pointer, (_Pointer, _Pointer)),
        ("bpf_object__find_program_by_name", _Pointer, (_Pointer, ctypes.c_char_p)),
        ("bpf_object__next_program", _Pointer, (_Pointer, _Pointer)),
        ("bpf_map__name", ctypes.c_char_p, (_Pointer,)),
        ("bpf_map__fd", ctypes.c_int, (_Pointer,)),
        ("bpf_map__set_max_entries", ctypes.c_int, (_Pointer, ctypes.c_uint32)),
        ("bpf_map__reuse_fd", ctypes.c_int, (_Pointer, ctypes.c_int)),
        ("bpf_map__initial_value", _Pointer, (_Pointer, ctypes.POINTER(ctypes.c_size_t))),
        ("bpf_program__name", ctypes.c_char_p, (_Pointer,)),
        ("bpf_program__fd", ctypes.c_int, (_Pointer,)),
        ("bpf_program__set_ifindex", None, (_Pointer, ctypes.c_uint32)),
        ("bpf_program__set_flags", ctypes.c_int, (_Pointer, ctypes.c_uint32)),
        ("bpf_program__set_autoload", ctypes.c_int, (_Pointer, ctypes.c_bool)),
        ("bpf_link_create", ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int, _Pointer)),
        ("bpf_link_update", ctypes.c_int, (ctypes.c_int, ctypes.c_int, _Pointer)),
        ("bpf_map_lookup_elem", ctypes.c_int, (ctypes.c_int, _Pointer, _Pointer)),
        ("bpf_map_create", ctypes.c_int, (ctypes.c_int, ctypes.c_char_p, *(ctypes.c_uint32,) * 3, _Pointer)),
        ("bpf_tc_hook_create", ctypes.c_int, (_Pointer,)),
        ("bpf_tc_attach", ctypes.c_int, (_Pointer, _Pointer)),
        ("bpf_tc_detach", ctypes.c_int, (_Pointer, _Pointer)),
        ("bpf_tc_query", ctypes.c_int, (_Pointer, _Pointer)),
        ("bpf_prog_test_run_opts", ctypes.c_int, (ctypes.c_int, _Pointer)),
        ("libbpf_num_possible_cpus", ctypes.c_int, ()),
        ("libbpf_set_print", _Pointer, (_PRINT,)),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.libbpf_set_print(_LISTEN)
    return lib


def last_words() -> str:
    """What libbpf and the kernel said last, on one line."""
    words = "; ".join(line for line in _said[-3:] if line)
    _said.clear()
    return words


class _MapOptions(ctypes.Structure):
    """struct bpf_map_create_opts."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *(
            (name, ctypes.c_uint32)
            for name in ("btf_fd", "btf_key", "btf_value", "btf_vmlinux", "inner", "flags")
        ),
        ("extra", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("numa_node", "ifindex")),
    )


class Loaded:
    """The programs of one object file, loaded for one interface; ``close`` gives them back."""

    def __init__(
        self,
        path: Path,
        programs: tuple[str, ...],
        settings: NDArray[np.void],
        maps: dict[str, int],
        device: int = 0,
    ) -> None:
        """Load ``programs`` with ``settings``, with ``maps`` (descriptors by name) in place of their own.

        With ``device``, an interface's index, they are bound to it, and may ask its driver.

        Raises MissingError, DpuflowError.
        """
        lib = library()
        self._object = lib.bpf_object__open_file(os.fsencode(path), None)
        if not self._object:
            raise DpuflowError(f"{path}: {last_words() or os.strerror(ctypes.get_errno())}")
        try:
            self._set(path, settings)
            self._choose(programs, device)
            for name, fd in maps.items():
                lib.bpf_map__reuse_fd(self._map(name), fd)
            status = lib.bpf_object__load(self._object)
            if status < 0:
                raise load_error(-status)
        except BaseException:
            self.close()
            raise
        self.fds = {
            name: lib.bpf_program__fd(lib.bpf_object__find_program_by_name(self._object, name.encode()))
            for name in programs
        }
        self.counters_fd = int(lib.bpf_map__fd(self._map("counters")))

    def _map(self, name: str) -> Any:
        found = library().bpf_object__find_map_by_name(self._object, name.encode())
        assert found, name
        return found

    def _set(self, path: Path, settings: NDArray[np.void]) -> None:
        """Write the settings, if the object was made for this layout of them."""
        lib, found = library(), None
        while found := lib.bpf_object__next_map(self._object, found):
            if lib.bpf_map__name(found).endswith(b".rodata.settings"):
                break
        size = ctypes.c_size_t()
        place = lib.bpf_map__initial_value(found, ctypes.byref(size)) if found else None
        expected = ring.SETTINGS.dtype
        if place and size.value == expected.itemsize:
            held = np.ctypeslib.as_array((ctypes.c_uint8 * size.value).from_address(place)).view(expected)
            if int(held["schema"][0]) == ring.layout_number():
                held[:] = settings
                return
        raise DpuflowError(
            f"{path}: built for another version of dpuflow; reinstall dpuflow (in a checkout: `make bpf`)"
        )

    def _choose(self, programs: tuple[str, ...], device: int) -> None:
        lib, program = library(), None
        while program := lib.bpf_object__next_program(self._object, program):
            name = lib.bpf_program__name(program).decode()
            lib.bpf_program__set_autoload(program, name in programs)
            if device and name.endswith("_xdp"):
                lib.bpf_program__set_ifindex(program, device)
                lib.bpf_program__set_flags(program, _DEVICE_BOUND)

    def close(self) -> None:
        """Give the programs and maps back; what is attached by a link stays as long as the link."""
        if self._object:
            library().bpf_object__close(self._object)
            self._object = None


class _Run(ctypes.Structure):
    """struct bpf_test_run_opts, as far as a program needs it whose input and output nobody looks at."""

    _fields_ = (
        *(("size", ctypes.c_size_t), ("data", ctypes.c_void_p), ("out", ctypes.c_void_p)),
        *(("data_size", ctypes.c_uint32), ("rest", ctypes.c_uint8 * 52)),
    )


def run_program(fd: int, frame: bytes = b"") -> None:
    """Run a program of type syscall once, or one of another type on ``frame``."""
    data = ctypes.create_string_buffer(frame, len(frame)) if frame else None
    run = _Run(ctypes.sizeof(_Run), ctypes.addressof(data) if data else None, None, len(frame))
    status = library().bpf_prog_test_run_opts(fd, ctypes.byref(run))
    if status < 0:
        raise DpuflowError(f"a program for user space cannot be run ({os.strerror(-status)}): {last_words()}")


def load_error(number: int) -> DpuflowError:
    """Why the kernel would not load a program or map, and what to do."""
    refused = any("PROG LOAD LOG" in line for line in _said) and _privileged()
    untyped = any("valid kernel BTF" in line for line in _said)
    words = last_words()
    if number == errno.EPERM or (number == errno.EACCES and not refused):
        return MissingError(
            "eBPF is not permitted: run as root or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON"
            ", or use --backend afpacket (CAP_NET_RAW only)"
        )
    if number == errno.ENOMEM:
        return DpuflowError(
            "not enough locked memory for the ring: use a smaller --buffer, or raise ulimit -l"
        )
    if number == errno.ENOSYS:
        return MissingError("this kernel has no eBPF: use --backend afpacket")
    if untyped:
        return MissingError(
            "this kernel has no BTF (/sys/kernel/btf/vmlinux), without which the NIC's stamps cannot be"
            " read at XDP: use --timestamps kernel or another --hook, or a kernel with CONFIG_DEBUG_INFO_BTF"
        )
    return DpuflowError(f"the kernel refused the eBPF program ({os.strerror(number)}): {words[-600:]}")


def _privileged() -> bool:
    """Whether CAP_NET_ADMIN is held, and CAP_BPF and CAP_PERFMON or CAP_SYS_ADMIN."""
    with open("/proc/self/status", encoding="ascii") as file:
        held = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    return held >> 12 & 1 == 1 and (held >> 21 & 1 == 1 or held >> 38 & 3 == 3)


def create_ring(size: int) -> int:
    """The file descriptor of a new ring buffer of ``size`` bytes, a power of two.

    Raises MissingError, DpuflowError.
    """
    fd = int(library().bpf_map_create(_RINGBUF, b"dpuflow_ring", 0, 0, size, None))
    if fd < 0:
        if -fd == errno.EINVAL:
            raise MissingError(
                "this kernel has no eBPF ring buffer (Linux 5.8 and later): use --backend afpacket"
            )
        raise load_error(-fd)
    return fd


def create_cells(count: int, size: int) -> int:
    """The file descriptor of a new array of ``count`` values that can be mapped. Raises DpuflowError."""
    options = _MapOptions(ctypes.sizeof(_MapOptions), flags=_MMAPABLE)
    fd = int(library().bpf_map_create(_ARRAY, b"dpuflow_cells", 4, size, count, ctypes.byref(options)))
    if fd < 0:
        raise load_error(-fd)
    return fd


def create_counters() -> int:
    """The file descriptor of a new counters map. Raises MissingError, DpuflowError."""
    size = ring.COUNTERS.dtype.itemsize
    fd = int(library().bpf_map_create(_PERCPU_ARRAY, b"counters", 4, size, 1, None))
    if fd < 0:
        raise load_error(-fd)
    return fd


def read_counters(fd: int) -> dict[str, int]:
    """A counters map, summed over the CPUs, and their sum as ``seen``."""
    lib = library()
    rows = ring.COUNTERS.zeros(lib.libbpf_num_possible_cpus())
    key = ctypes.c_uint32(0)
    if lib.bpf_map_lookup_elem(fd, ctypes.byref(key), rows.ctypes.data) < 0:
        raise DpuflowError(f"cannot read the counters: {os.strerror(ctypes.get_errno())}")
    named = {name: int(rows[name].sum()) for name in ring.COUNTER_NAMES[1:]}
    return {"seen": sum(n for name, n in named.items() if name not in ring.BESIDE)} | named
