"""RDMA devices behind interfaces, by a made-up /sys: doctor and capture say what no capture of a host has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from dpuflow.cli.commands import dpuflow
from dpuflow.errors import DpuflowError
from dpuflow.kernels import ring as kernel
from dpuflow.live import capture, doctor, rdma
from dpuflow.live.base import Interface, find_interface
from dpuflow.live.clock import StampClock
from dpuflow.schema.ring import COUNTER_NAMES


@pytest.fixture
def sys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """lo has mlx5_0, two ports of a card are one device, bond0 is made of both, eth9 has none."""
    monkeypatch.setattr(rdma, "SYS", tmp_path)
    for interface, device, dev_port in (("lo", "mlx5_0", 0), ("p1", "mlx4_0", 0), ("p2", "mlx4_0", 1)):
        folder = tmp_path / "class/net" / interface
        (folder / "device/infiniband" / device).mkdir(parents=True)
        (folder / "dev_port").write_text(f"{dev_port}\n")
    for device, port in (("mlx5_0", 1), ("mlx4_0", 1), ("mlx4_0", 2)):
        counters = tmp_path / f"class/infiniband/{device}/ports/{port}/counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_packets").write_text("1000\n")
        (counters / "port_xmit_packets").write_text(f"{port}\n")
    (tmp_path / "class/net/bond0/lower_p1").mkdir(parents=True)
    (tmp_path / "class/net/bond0/lower_p2").mkdir()
    (tmp_path / "class/net/eth9").mkdir()
    (tmp_path / "class/infiniband/rxe0").mkdir()
    return tmp_path


def grow(sys: Path, packets: int) -> None:
    file = sys / "class/infiniband/mlx5_0/ports/1/counters/port_rcv_packets"
    file.write_text(f"{int(file.read_text()) + packets}\n")


def test_ports_behind_interfaces(sys: Path) -> None:
    assert [(port.device, port.port, port.packets()) for port in rdma.ports_of("lo")] == [("mlx5_0", 1, 1001)]
    assert [(port.interface, port.port) for port in rdma.ports_of("bond0")] == [("p1", 1), ("p2", 2)]
    assert rdma.ports_of("eth9") == rdma.ports_of("none") == []


def test_an_rdma_device_is_no_interface_and_where_it_is_captured_is_said(sys: Path) -> None:
    with pytest.raises(DpuflowError) as failed:
        find_interface("mlx4_0")
    checked = next(check.text for check in doctor.examine(["mlx4_0"]) if "mlx4_0" in check.text)
    asked = CliRunner().invoke(dpuflow, ["capture", "-i", "mlx4_0", "-w", str(sys / "x.pcap")])
    for told in (str(failed.value), checked, str(asked.exception)):
        assert "mlx4_0: no such interface; this machine has " in told
        hint = " (that is an RDMA device, captured by tcpdump or ibdump: README, Where to capture)"
        assert told.endswith(hint)
    with pytest.raises(DpuflowError, match=r"no such interface; this machine has [^()]*$"):
        find_interface("mlx9_0")


def test_doctor_says_what_no_capture_of_the_host_has(sys: Path) -> None:
    (line,) = [check for check in doctor.examine([]) if check.name == "rdma"]
    assert not line.met
    assert line.text.startswith("lo: RoCE by mlx5_0 bypasses the kernel")
    assert [check for check in doctor.examine(["eth9"]) if check.name == "rdma"] == []


def backend(packets: int, messages: int) -> SimpleNamespace:
    tally = np.zeros(kernel.D_IFACES + 1, np.int64)
    tally[kernel.D_LEFT] = 1 << 40
    tally[kernel.D_PACKETS], tally[kernel.D_ENDS] = packets, messages
    names = COUNTER_NAMES
    return SimpleNamespace(
        name="ebpf", interfaces=[Interface("lo", 1, bytes(6))], clock=StampClock(), hooks="tcx", tally=tally,
        read=lambda out, at: 0, wait=lambda seconds: None, counters=lambda: [dict.fromkeys(names, 0)],
        ring_share=lambda: 0.0, take_peak=lambda: 0.0, detach=lambda: None, close=lambda: None,
    )  # fmt: skip


def run(
    sys: Path, monkeypatch: pytest.MonkeyPatch, moved: int, *more: str, packets: int = 0, messages: int = 0
) -> tuple[str, str]:
    """What a capture of lo printed, and why it failed, while its RDMA device ``moved`` packets."""
    from dpuflow.cli.capture import capture as command

    def opened(options: object, name: str = "ebpf") -> SimpleNamespace:
        made = backend(packets, messages)
        made.detach = lambda: grow(sys, moved)
        return made

    monkeypatch.setattr(capture, "open_backend", opened)
    done = CliRunner().invoke(command, ["-i", "lo", "--duration", "0.01", *more])
    assert done.exception is None or isinstance(done.exception, DpuflowError), done.exception
    return done.output, str(done.exception or "")


def test_nothing_came_while_the_rdma_device_was_busy(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, failed = run(sys, monkeypatch, 12345)
    assert failed.startswith(
        "lo: its RDMA device mlx5_0 moved 12,345 packets during the capture, but no RoCE showed here"
    )
    assert "Where to capture" in failed


def test_where_tcp_came_it_is_a_warning(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, failed = run(sys, monkeypatch, 12345, packets=7)
    assert not failed
    assert "warning: lo: its RDMA device mlx5_0 moved 12,345 packets" in said


@pytest.mark.parametrize(
    ("moved", "more", "messages"),
    [(5, [], 0), (12345, [], 3), (12345, ["--protocol", "tcp"], 0), (12345, ["--host", "10.0.0.1"], 0)],
    ids=["chatter", "roce-came", "tcp-was-asked-for", "another-host"],
)
def test_nothing_is_said_without_reason(
    sys: Path, monkeypatch: pytest.MonkeyPatch, moved: int, more: list[str], messages: int
) -> None:
    assert "RDMA" not in "".join(run(sys, monkeypatch, moved, *more, messages=messages))
