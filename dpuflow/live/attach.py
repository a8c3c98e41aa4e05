"""Programs onto interfaces: by links, which end with the process, or as clsact filters with a handle of ours.

What others have attached stays as it is. Links: bpf(2), BPF_LINK_CREATE; tcx needs Linux 6.6, XDP links 5.9.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from dataclasses import dataclass
from typing import Final

from dpuflow.errors import DpuflowError, MissingError
from dpuflow.live.libbpf import last_words, library

_XDP, _TCX_INGRESS, _TCX_EGRESS = 37, 46, 47  # enum bpf_attach_type
_BEFORE: Final = 1 << 3  # BPF_F_BEFORE: ahead of programs that may redirect or drop
_XDP_GENERIC, _XDP_NATIVE = 1 << 1, 1 << 2  # XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE

HANDLE: Final = 0xD9F10001  # dpuflow's own filters are known by this and the priority
PRIORITY: Final = 0xD9F1
_INGRESS, _EGRESS = 1, 2  # enum bpf_tc_attach_point
_REPLACE: Final = 1  # BPF_TC_F_REPLACE


class _LinkOptions(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("flags", ctypes.c_uint32), ("reserved", ctypes.c_uint32))


class _Hook(ctypes.Structure):
    """struct bpf_tc_hook."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("ifindex", ctypes.c_int),
        ("point", ctypes.c_int),
        ("parent", ctypes.c_uint32),
    )


class _Options(ctypes.Structure):
    """struct bpf_tc_opts."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("program", ctypes.c_int),
        ("flags", ctypes.c_uint32),
        ("program_id", ctypes.c_uint32),
        ("handle", ctypes.c_uint32),
        ("priority", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Link:
    """A program attached by a link, which ends with ``remove`` or with the process."""

    fd: int
    name: str
    hook: str

    def replace(self, program: int) -> Link:
        """Another program in its place, without a packet between that neither sees. Raises DpuflowError."""
        status = int(library().bpf_link_update(self.fd, program, None))
        if status < 0:
            raise _link_error(-status, self.name, self.hook)
        return self

    def remove(self) -> None:
        """Take the program off."""
        os.close(self.fd)


def link(program: int, ifindex: int, name: str, hook: str) -> Link:
    """Attach ``program`` by a link at ``hook`` (tcx-in, tcx-out, xdp, xdp-generic).

    Raises MissingError where the kernel has no such link, DpuflowError where the hook is taken.
    """
    kind, flags = {
        "tcx-in": (_TCX_INGRESS, _BEFORE),
        "tcx-out": (_TCX_EGRESS, _BEFORE),
        "xdp": (_XDP, _XDP_NATIVE),
        "xdp-generic": (_XDP, _XDP_GENERIC),
    }[hook]
    options = _LinkOptions(ctypes.sizeof(_LinkOptions), flags, 0)
    fd = int(library().bpf_link_create(program, ifindex, kind, ctypes.byref(options)))
    if fd < 0:
        raise _link_error(-fd, name, hook)
    return Link(fd, name, hook)


def _link_error(number: int, name: str, hook: str) -> DpuflowError:
    last_words()
    if number == errno.EBUSY or number == errno.EEXIST:
        return DpuflowError(f"{name}: another XDP program is attached: use --hook tcx")
    if number == errno.EOPNOTSUPP and hook == "xdp":
        return MissingError(f"{name}: the driver has no native XDP: use --hook xdp-generic or tcx")
    if number in (errno.EINVAL, errno.EOPNOTSUPP):
        return MissingError(f"{name}: this kernel has no {hook.split('-')[0]} links: use --hook clsact")
    if number == errno.ERANGE:
        return DpuflowError(f"{name}: the MTU is too large for this XDP program: use --hook tcx")
    if number == errno.ENODEV:
        return DpuflowError(f"{name}: the interface is gone")
    if number == errno.EPERM:
        return MissingError(f"{name}: attaching needs CAP_NET_ADMIN")
    return DpuflowError(f"{name}: cannot attach the {hook} program ({os.strerror(number)})")


def claim(ifindex: int, name: str) -> socket.socket:
    """Hold the clsact filters of an interface for this process, as long as the socket is open.

    An abstract name is free again once its holder is dead, and belongs to the network namespace, as
    interfaces do. Raises DpuflowError where a running dpuflow holds them.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(f"\0dpuflow-clsact-{ifindex}")
    except OSError:
        held.close()
        raise DpuflowError(
            f"{name}: another dpuflow is capturing there through clsact: stop it, or use --hook tcx"
        ) from None
    return held


def add_filter(program: int, ifindex: int, name: str, outbound: bool) -> Filter:
    """Attach ``program`` as a clsact filter of dpuflow's own handle. Raises DpuflowError."""
    lib = library()
    hook = _hook(ifindex, outbound)
    made = lib.bpf_tc_hook_create(ctypes.byref(hook))
    if made < 0 and made != -errno.EEXIST:
        last_words()
        raise DpuflowError(f"{name}: cannot add clsact ({os.strerror(-made)})")
    remove_filter(ifindex, outbound)  # of a dpuflow that was killed
    return _put_filter(program, ifindex, name, outbound, 0)


def _put_filter(program: int, ifindex: int, name: str, outbound: bool, flags: int) -> Filter:
    hook, options = (
        _hook(ifindex, outbound),
        _Options(ctypes.sizeof(_Options), program, flags, 0, HANDLE, PRIORITY),
    )
    status = library().bpf_tc_attach(ctypes.byref(hook), ctypes.byref(options))
    if status < 0:
        last_words()
        raise DpuflowError(f"{name}: cannot add the clsact filter ({os.strerror(-status)})")
    return Filter(ifindex, name, outbound, options.program_id)


@dataclass(frozen=True)
class Filter:
    """A clsact filter that is attached: where, and which program."""

    ifindex: int
    name: str
    outbound: bool
    program_id: int

    def replace(self, program: int) -> Filter:
        """Another program in its place, without a packet between that neither sees. Raises DpuflowError."""
        return _put_filter(program, self.ifindex, self.name, self.outbound, _REPLACE)

    def remove(self) -> None:
        """Take it off, unless another program has come in its place."""
        remove_filter(self.ifindex, self.outbound, self.program_id)


def remove_filter(ifindex: int, outbound: bool, program_id: int | None = None) -> bool:
    """Remove dpuflow's filter (if it runs ``program_id``, where given); whether there was one.

    The clsact qdisc stays: others may use it.
    """
    lib = library()
    hook, options = _hook(ifindex, outbound), _Options(ctypes.sizeof(_Options), 0, 0, 0, HANDLE, PRIORITY)
    there = lib.bpf_tc_query(ctypes.byref(hook), ctypes.byref(options)) == 0
    if there and program_id in (None, options.program_id):
        options = _Options(ctypes.sizeof(_Options), 0, 0, 0, HANDLE, PRIORITY)
        there = lib.bpf_tc_detach(ctypes.byref(hook), ctypes.byref(options)) == 0
    last_words()
    return bool(there)


def has_filter(ifindex: int, outbound: bool) -> bool:
    """Whether dpuflow's filter is there."""
    hook, options = _hook(ifindex, outbound), _Options(ctypes.sizeof(_Options), 0, 0, 0, HANDLE, PRIORITY)
    there: bool = library().bpf_tc_query(ctypes.byref(hook), ctypes.byref(options)) == 0
    last_words()
    return there


def _hook(ifindex: int, outbound: bool) -> _Hook:
    return _Hook(ctypes.sizeof(_Hook), ifindex, _EGRESS if outbound else _INGRESS, 0)
