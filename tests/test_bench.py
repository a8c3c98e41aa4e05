"""The benchmark's generator and peers: valid packets, and one answer from all readers."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import figures
from bench.__main__ import main
from bench.checksum import Checksum
from bench.measure import FailedError, compile_peer, probe, python, run

PACKETS = 1_000

# A thousand packets take the generator half a second as plain Python, its compilation fifteen.
with pytest.MonkeyPatch.context() as plain:
    plain.setattr(numba.config, "DISABLE_JIT", 1)
    from bench.generate import WHOLE, write_captures
    from bench.traffic import Traffic

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

tshark = pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed")


def records(path: Path) -> list[tuple[int, int, bytes]]:
    """(time, length on the wire, captured bytes) of a classic little-endian nanosecond pcap."""
    data = path.read_bytes()
    found, at = [], 24
    while at < len(data):
        sec, nsec, kept, wire = struct.unpack_from("<IIII", data, at)
        found.append((sec * 10**9 + nsec, wire, data[at + 16 : at + 16 + kept]))
        at += 16 + kept
    return found


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated capture at snap length 96."""
    path = tmp_path_factory.mktemp("bench") / "cut.pcap"
    write_captures(PACKETS, pcap=path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same packets, whole."""
    path = tmp_path_factory.mktemp("bench") / "whole.pcap"
    write_captures(PACKETS, pcap=path, snaplen=WHOLE)
    return path


def test_snap_length_cuts_the_same_packets(cut: Path, whole: Path) -> None:
    for (time, wire, kept), (whole_time, whole_wire, data) in zip(records(cut), records(whole), strict=True):
        assert (time, wire, kept[:70]) == (whole_time, whole_wire, data[:70])
        assert len(data) == wire
        assert len(kept) == min(wire, 96)


def test_times_increase(cut: Path) -> None:
    times = [time for time, _, _ in records(cut)]
    assert len(times) == PACKETS
    assert all(a < b for a, b in pairwise(times))


def test_icrc_and_ip_checksum(whole: Path) -> None:
    for _, _, frame in records(whole):
        ip = bytearray(frame[14:-4])
        words = struct.unpack(">10H", ip[:20])
        assert sum(words) % 0xFFFF == 0
        for variant in (1, 8, 10, 11, 26, 27, 32):  # TOS, TTL, both checksums, BTH's reserved byte
            ip[variant] = 0xFF
        assert struct.unpack("<I", frame[-4:])[0] == zlib.crc32(b"\xff" * 8 + bytes(ip))


def compiled(packets: int, path: Path) -> None:
    """As the benchmark itself has the generator."""
    script = (
        "from pathlib import Path; from bench.generate import write_captures; "
        f"write_captures({packets}, pcap=Path({str(path)!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).resolve().parents[1])


@pytest.mark.long
def test_compiled_it_writes_the_same(tmp_path: Path, cut: Path) -> None:
    compiled(PACKETS, tmp_path / "again.pcap")
    assert (tmp_path / "again.pcap").read_bytes() == cut.read_bytes()


@pytest.mark.long
def test_psns_follow_each_other_but_for_retransmissions(tmp_path: Path) -> None:
    compiled(300_000, tmp_path / "long.pcap")
    following: dict[tuple[bytes, bytes], int] = {}
    opcodes: dict[int, int] = {}
    naks = back = 0
    for _, _, frame in records(tmp_path / "long.pcap"):
        opcode, flow = frame[42], (frame[26:34], frame[47:50])
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
        psn = int.from_bytes(frame[51:54], "big")
        naks += opcode == 0x11 and frame[54] == 0x60
        if opcode not in (0x11, 0x81):
            expected = following.get(flow, 0)
            back += psn < expected
            assert psn <= expected
            following[flow] = psn + 1
    assert set(opcodes) == {0x06, 0x07, 0x08, 0x09, 0x0A, 0x0B, 0x11, 0x81}
    assert len(following) == 2 * 64 * 8
    assert back == naks > 0


def test_same_seed_same_bytes(tmp_path: Path, cut: Path) -> None:
    write_captures(PACKETS, pcap=tmp_path / "again.pcap")
    write_captures(PACKETS, pcap=tmp_path / "other.pcap", seed=2)
    assert (tmp_path / "again.pcap").read_bytes() == cut.read_bytes()
    assert (tmp_path / "other.pcap").read_bytes() != cut.read_bytes()


def test_small_buffers_give_the_same_records(cut: Path) -> None:
    traffic, out, parts = Traffic(), np.zeros(5_000, np.uint8), []
    while size := traffic.write_into(out, PACKETS):
        parts.append(out[:size].tobytes())
    assert len(parts) > 10
    assert b"".join(parts) == cut.read_bytes()[24:]


@tshark
def test_tshark_finds_nothing_wrong(whole: Path) -> None:
    fields = ["infiniband.bth.opcode", "_ws.malformed", "ip.checksum.status", "infiniband.reth.dmalen"]
    command = ["tshark", "-n", "-r", str(whole), "-o", "ip.check_checksum:TRUE", "-T", "fields"]
    for name in fields:
        command += ["-e", name]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == PACKETS
    for line in lines:
        opcode, malformed, status, dma_len = line.split("\t")
        assert (malformed, status) == ("", "1")
        assert (dma_len != "") == (int(opcode) in (0x06, 0x0A, 0x0B))


@tshark
def test_pcapng_holds_the_same(cut: Path, tmp_path: Path) -> None:
    modern = tmp_path / "cut.pcapng"
    write_captures(PACKETS, pcapng=modern)
    seen = [
        subprocess.run(
            [
                "tshark",
                "-n",
                "-r",
                str(path),
                "-T",
                "fields",
                "-e",
                "frame.time_epoch",
                "-e",
                "frame.len",
                "-e",
                "frame.cap_len",
                "-e",
                "ip.src",
                "-e",
                "infiniband.bth.psn",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for path in (cut, modern)
    ]
    assert seen[0] == seen[1]


def expected_checksum(path: Path) -> str:
    """The checksum from the capture's bytes, by the definition."""
    extended = {0x06: 16, 0x09: 4, 0x0A: 16, 0x0B: 20, 0x11: 4, 0x81: 16}
    total = 0
    for i, (time, wire, frame) in enumerate(records(path)):
        number = {
            at: int.from_bytes(frame[at:to], "big") for at, to in ((26, 34), (34, 36), (36, 38), (38, 40))
        }
        flags = frame[50] >> 7 | (frame[43] >> 7) << 3 | (frame[43] >> 6 & 1) << 4 | (frame[43] >> 4 & 3) << 5
        payload = number[38] - 8 - 12 - extended.get(frame[42], 0) - 4
        bth = (
            int.from_bytes(frame[47:50], "big") << 40
            | int.from_bytes(frame[51:54], "big") << 16
            | frame[42] << 8
        )
        ports = number[34] << 48 | number[36] << 32 | wire
        value = time + 3 * number[26] + 5 * ports + 7 * (bth | flags) + 11 * ((frame[15] & 3) << 32 | payload)
        total += (2 * i + 1) * value
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize(
    ("peer", "module"),
    [("dpkt_struct", "dpkt"), ("dpkt_objects", "dpkt"), ("scapy_fields", "scapy"), ("tshark_fields", "")],
)
def test_python_peers_agree(peer: str, module: str, cut: Path) -> None:
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if not module and shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    output = run(python("-m", f"bench.peers.{peer}", str(cut), str(PACKETS), "check")).output
    assert output.split() == [str(PACKETS), expected_checksum(cut)]


def test_c_peer_agrees(cut: Path, tmp_path: Path) -> None:
    try:
        program = compile_peer("pcap_fields", tmp_path, "-lpcap")
    except FailedError as error:
        pytest.skip(str(error))
    assert run([str(program), str(cut)]).output.split()[:2] == [str(PACKETS), expected_checksum(cut)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ending", ["pcap", "pcapng"])
def test_dpuflow_agrees(ending: str, threads: int, cut: Path, tmp_path: Path) -> None:
    capture = tmp_path / f"cut.{ending}"
    write_captures(PACKETS, **{ending: capture})
    result = probe("check", capture, threads)
    assert (result["packets"], result["checksum"]) == (PACKETS, expected_checksum(cut))


def test_probe_measures_the_reader(cut: Path) -> None:
    result = probe("parse", cut, 1, str(cut))
    assert result["packets"] == PACKETS
    assert 0 < result["longest_ns"] <= result["cpu_ns"] * 1.1
    assert result["peak_bytes"] > 1 << 20


def test_columns_give_the_same_checksum(cut: Path) -> None:
    frames = records(cut)
    names = {
        "sport": (34, 36),
        "dport": (36, 38),
        "opcode": (42, 43),
        "dest_qp": (47, 50),
        "psn": (51, 54),
        "tos": (15, 16),
    }
    columns = {
        n: np.array([int.from_bytes(f[a:b], "big") for _, _, f in frames]) for n, (a, b) in names.items()
    }
    columns["time_ns"] = np.array([time for time, _, _ in frames])
    columns["wire_len"] = np.array([wire for _, wire, _ in frames])
    extended = {0x06: 16, 0x09: 4, 0x0A: 16, 0x0B: 20, 0x11: 4, 0x81: 16}
    columns["payload"] = np.array([wire - 58 - extended.get(f[42], 0) for _, wire, f in frames])
    columns["flags"] = np.array(
        [f[50] >> 7 | (f[46] >> 6 & 1) << 1 | (f[43] >> 6 & 1) << 4 for _, _, f in frames]
    )
    ends = np.array(
        [(int.from_bytes(f[26:30], "big"), int.from_bytes(f[30:34], "big")) for _, _, f in frames]
    )
    ipv4, rows = np.unique(ends, return_inverse=True)
    columns["src"], columns["dst"] = rows.reshape(ends.shape).T
    total = Checksum()
    for start in range(0, PACKETS, 1_000):
        part = {name: values[start:] for name, values in columns.items()}
        total.add_columns(part, 1_000, ipv4.astype(np.uint64))
    assert str(total) == expected_checksum(cut)


def test_figures_say_met_and_not_met() -> None:
    samples = {"parse_first": [7.0, 8.0, 9.0], "P": [56.0, 56.0, 56.0], "python": [10.0], "help": [50.0]}
    by_name = {s.figure.name: s for s in figures.state(samples, {"scapy": "scapy is not installed"})}
    ratio = by_name["parse / P"]
    assert ratio.value == pytest.approx(8 / 56)
    assert (ratio.keeps(1 / 6), ratio.keeps(1 / 8)) == (True, False)
    assert by_name["--help / python"].keeps(4) is False
    assert by_name["scapy / parse"].as_json()["missing"] == "scapy is not installed"
    lines = {line.split("  ")[0]: line for line in figures.table(list(by_name.values())).splitlines()}
    assert lines["parse / P"].endswith("target met, aim not met")
    assert lines["--help / python"].endswith("NOT MET")
    assert lines["scapy / parse"].endswith("not measured")


def test_kernels_are_timed_by_name(tmp_path: Path) -> None:
    """Where there is a library of them; one analysis calls the parser at least once."""
    from dpuflow.kernels import _ready

    if _ready.LIBRARY is None:
        pytest.skip("kernels come from Numba here")
    capture = tmp_path / "small.pcap"
    write_captures(2_000, pcap=capture)
    from bench.kernels import kernel_times

    times = kernel_times(str(capture))
    assert times["roce_scan"][0] >= 1
    assert list(times.values()) == sorted(times.values(), key=lambda entry: -entry[1])


def test_the_live_part_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("DPUFLOW_BPF", str(tmp_path))
    done = CliRunner().invoke(main, ["live"])
    assert done.exit_code == 0
    assert done.output.startswith("live capture is not measured: its programs are not there")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "run as root" in CliRunner().invoke(main, ["live"]).output
