"""What is captured: the eBPF programs' filters against ``kernels/packets`` and the options' own meaning."""

from __future__ import annotations

import ctypes
import errno
import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from network import Pair
from readings_live import counters_of, packets_of
from send import frames

from dpuflow.agent.usage import memory
from dpuflow.kernels import packets as kernel
from dpuflow.kernels import ring as ring_kernel
from dpuflow.live import libbpf
from dpuflow.live.afpacket import filter_words
from dpuflow.live.base import object_path
from dpuflow.live.options import LiveOptions
from dpuflow.live.ring import Ring
from dpuflow.live.sampling import SampleMap

VLAN_TAG = b"\x81\x00\x61\x2c"  # priority 3, id 300
V6 = "2001:db8::1"


class TestRun(ctypes.Structure):
    """struct bpf_test_run_opts."""

    __test__ = False
    _fields_ = (
        *(("size", ctypes.c_size_t), ("data_in", ctypes.c_void_p), ("data_out", ctypes.c_void_p)),
        *(("size_in", ctypes.c_uint32), ("size_out", ctypes.c_uint32)),
        *(("ctx_in", ctypes.c_void_p), ("ctx_out", ctypes.c_void_p)),
        *((name, ctypes.c_uint32) for name in ("ctx_size_in", "ctx_size_out", "retval", "repeat")),
        *((name, ctypes.c_uint32) for name in ("duration", "flags", "cpu", "batch")),
    )


def run_program(fd: int, frame: bytes) -> bool:
    """Run the program on ``frame``; False where the kernel makes no socket buffer of so short a packet."""
    data = ctypes.create_string_buffer(frame, len(frame))
    run = TestRun(ctypes.sizeof(TestRun), ctypes.addressof(data), None, len(frame), repeat=1)
    status = libbpf.library().bpf_prog_test_run_opts(ctypes.c_int(fd), ctypes.byref(run))
    if status == -errno.EINVAL and len(frame) < 54:
        return False
    assert status == 0, os.strerror(-status)
    return True


def variants(shared_frames: list[bytes]) -> list[bytes]:
    """Real packets, each kind once, and what is made of them: tags, IPv6, v1, fragments, options, cuts."""
    found: dict[tuple[int, ...], bytes] = {}
    for frame in shared_frames:
        key = (
            frame[12],
            frame[13],
            frame[23],
            *frame[36:38],
            frame[42] if len(frame) > 42 else 0,
            len(frame) // 200,
        )
        found.setdefault(key, frame)
    made = []
    for frame in found.values():
        made.append(frame)
        made.append(frame[:12] + VLAN_TAG + frame[12:])
        made.append(frame[:12] + b"\x88\xa8\x00\x05" + VLAN_TAG + frame[12:])
        if frame[12:14] != b"\x08\x00":
            continue
        ip, rest = frame[14:34], frame[34:]
        six = (
            struct.pack(">IHBB", 6 << 28, len(rest), ip[9], 64)
            + bytes.fromhex("20010db8" + 11 * "00" + "01") * 2
        )
        made.append(frame[:12] + b"\x86\xdd" + six + rest)
        made.append(frame[:12] + b"\x86\xdd" + six[:6] + b"\x2c" + six[7:] + rest)
        made.append(frame[:14] + ip[:6] + b"\x20\x10" + ip[8:] + rest)  # a later fragment
        made.append(frame[:14] + ip[:6] + b"\x20\x00" + ip[8:] + rest)  # the first
        made.append(frame[:14] + b"\x4f" + ip[1:] + bytes(40) + rest)
        if ip[9] == 17:
            made.append(frame[:12] + b"\x89\x15" + six + rest[8:])
        made += [frame[:size] for size in (14, 20, 34, 40, 44, 53, 54)]
    made.append(bytes.fromhex("0180c2000001") + bytes(6) + b"\x88\x08\x01\x01" + bytes(46))
    return made


@pytest.mark.parametrize("program", ["dpuflow_xdp", "dpuflow_in"])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"protocols": ("roce",)},
        {"protocols": ("tcp",)},
        {"protocols": ("any",)},
        {"hosts": ("HOST",)},
        {"hosts": (V6,)},
        {"qps": (1, 17)},
        {"ports": (5201, 22)},
        {"vlans": (300,)},
        {"vlans": (5, 7)},
        {"sample": 1},
        {"sample": 3},
    ],
    ids=str,
)
def test_the_program_judges_as_its_twin(
    programs: None, nccl: list[Path], gloo: list[Path], program: str, choice: dict[str, object]
) -> None:
    real = frames(nccl[0])[:3000] + frames(gloo[0])[:1000]
    first = next(frame for frame in real if frame[12:14] == b"\x08\x00")
    if choice.get("hosts") == ("HOST",):
        choice = {"hosts": (".".join(map(str, first[26:30])),)}
    if "qps" in choice:
        roce = next(frame for frame in real if frame[23] == 17 and frame[36:38] == b"\x12\xb7")
        choice = {"qps": (1, int.from_bytes(roce[47:50], "big"))}
    if "ports" in choice:
        tcp = next(frame for frame in real if frame[23] == 6)
        choice = {"ports": (int.from_bytes(tcp[34:36], "big"),)}
    options = LiveOptions(("lo",), **choice)  # type: ignore[arg-type]
    ring = Ring(1 << 20, 1 << 14)
    settings = options.settings(0, 0)
    ring.set(settings)
    sampling = SampleMap(options.below)
    maps = ring.maps() | {"sampling": sampling.fd}
    loaded = libbpf.Loaded(object_path(), (program,), settings, maps)
    wanted, found = filter_words(options), np.zeros(2, np.int64)
    tally = np.zeros(ring_kernel.D_SIZE, np.int64)
    tally[ring_kernel.D_LEFT] = 1 << 60
    out = np.zeros(1 << 19, np.uint8)
    before = libbpf.read_counters(loaded.counters_fd)
    seen = set()
    for frame in variants(real):
        ends = tally[ring_kernel.D_ENDS]
        if not run_program(loaded.fds[program], frame):
            assert program == "dpuflow_in"
            continue
        ring.drain(out, 0, tally)
        after = libbpf.read_counters(loaded.counters_fd)
        (name,) = [name for name in after if name != "seen" and after[name] != before[name]]
        verdict = kernel.judge_one(np.frombuffer(bytearray(frame), np.uint8), 0, len(frame), 0, wanted, found)
        assert name == kernel.VERDICTS[verdict], frame.hex()
        if name == "captured":
            assert tally[ring_kernel.D_ENDS] - ends == found[1], frame.hex()
        seen.add(name)
        before = after
    loaded.close()
    sampling.close()
    ring.close()
    assert "captured" in seen
    assert len(seen) > 1 or choice == {"protocols": ("any",)}


@pytest.mark.parametrize("program", ["dpuflow_xdp", "dpuflow_in"])
@pytest.mark.parametrize("snaplen", [64, 71, 96, 128, 0])
@pytest.mark.parametrize("cell", [0, 1 << 14], ids=["kernel's ring", "CPU's ring"])
def test_packets_of_every_length_are_kept_byte_for_byte(
    programs: None, program: str, snaplen: int, cell: int
) -> None:
    """Around the size classes of the ring, where packets are copied in several ways."""
    options = LiveOptions(("lo",), snaplen=snaplen, protocols=("any",))
    ring = Ring(1 << 20, cell)
    settings = options.settings(0, 0)
    ring.set(settings)
    loaded = libbpf.Loaded(object_path(), (program,), settings, ring.maps())
    tally = np.zeros(ring_kernel.D_SIZE, np.int64)
    tally[ring_kernel.D_LEFT] = 1 << 60
    out = np.zeros(1 << 19, np.uint8)
    head = bytes(12) + b"\x08\x00\x45" + bytes(8) + b"\x11"
    for length in [*range(54, 300), 1023, 1024, 1025, 1514]:
        frame = head + bytes(k * 7 % 251 for k in range(length - len(head)))
        assert run_program(loaded.fds[program], frame)
        end = ring.drain(out, 0, tally)
        captured, wire = (int(word) for word in out[20:28].view(np.uint32))
        assert wire == length
        assert out[28 : 28 + captured].tobytes() == frame[: snaplen or length], length
        assert end == ring_kernel.BLOCK_BYTES + (captured + 3 & ~3)
    loaded.close()
    ring.close()


def test_the_kernels_ring_is_read_past_its_end_and_mapped_once(programs: None) -> None:
    """Its second mapping was counted as memory that is used, whole: as much again as the ring."""
    size = 1 << 21
    options = LiveOptions(("lo",), snaplen=0, protocols=("any",))
    before = memory().resident
    ring = Ring(size)
    assert memory().resident - before < 1.5 * size
    settings = options.settings(0, 0)
    ring.set(settings)
    loaded = libbpf.Loaded(object_path(), ("dpuflow_in",), settings, ring.maps())
    tally = np.zeros(ring_kernel.D_SIZE, np.int64)
    tally[ring_kernel.D_LEFT] = 1 << 60
    out = np.zeros(1 << 19, np.uint8)
    head, rest = bytes(12) + b"\x08\x00\x45" + bytes(8) + b"\x11", bytes(k * 7 % 251 for k in range(1600))
    for number in range(2000):  # of 4 KiB each in the ring
        frame = head + rest[: 1100 + number % 400]
        assert run_program(loaded.fds["dpuflow_in"], frame)
        assert ring.drain(out, 0, tally) > 0
        assert out[28 : 28 + len(frame)].tobytes() == frame, number
    loaded.close()
    ring.close()


def pcap_of(packets: list[bytes], path: Path) -> Path:
    """A classic pcap file of whole packets."""
    records = [struct.pack("<IIII", 1, 0, len(each), len(each)) + each for each in packets]
    path.write_bytes(
        gzip.compress(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262144, 1) + b"".join(records))
    )
    return path


@pytest.mark.parametrize("way", [("--hook", "tcx"), ("--hook", "xdp"), ("--backend", "afpacket")], ids=str)
def test_vlan_tags_stay_where_they_were(
    pair: Pair, nccl: list[Path], tmp_path: Path, way: tuple[str, str]
) -> None:
    plain = frames(nccl[0])[:300]
    tagged = [frame[:12] + VLAN_TAG + frame[12:] for frame in plain]
    double = [frame[:12] + b"\x88\xa8\x00\x05" + VLAN_TAG + frame[12:] for frame in plain]
    source = pcap_of([*plain, *tagged, *double], tmp_path / "source.pcap.gz")
    every, some = tmp_path / "every.pcapng", tmp_path / "some.pcapng"
    with (
        pair.capturing(pair.b, "-i", "east", "-w", str(every), "--protocol", "any", "--snaplen", "0", *way),
        pair.capturing(
            pair.b, "-i", "east", "-w", str(some), "--protocol", "any", "--vlan", "300", "--snaplen", "100",
            *(("--hook", "tcx") if way[1] == "xdp" else way),
        ),
    ):  # fmt: skip
        pair.send(pair.a, "west", source)
    assert [packet.data for packet in packets_of(every)] == [*plain, *tagged, *double]
    assert [packet.data for packet in packets_of(some)] == [frame[:100] for frame in tagged]
    (counters,) = counters_of(some)
    assert counters["not_wanted"] == 600
