"""Counters of RDMA devices and interfaces: from a made sysfs, and from this kernel's own drivers."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from dpuflow.agent import ethtool
from dpuflow.agent.counters import ETHTOOL, LABELS, MOST_INTERFACES, NETDEV, PORT, RDMA, NicCounterFiles

Values = dict[tuple[str, tuple[str, ...]], float]


def put(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def read(root: Path, captured: tuple[str, ...] = (), **statistics: dict[str, int]) -> Values:
    files = NicCounterFiles(str(root), lambda name: statistics.get(name, {}))
    return {(each.counter.metric, each.labels): each.value for each in files.read(captured)}


def test_a_port_has_its_own_counters(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    put(port / "hw_counters/np_cnp_sent", 12)
    put(port / "hw_counters/rdma_tx_bytes", 5)
    put(port / "hw_counters/lifespan", 10)
    put(port / "counters/port_rcv_data", 1000)
    put(port / "counters/port_xmit_wait", "N/A (no PMA)")
    assert read(tmp_path) == {
        ("rdma_np_cnp_sent", ("mlx5_0", "1")): 12,
        ("rdma_tx_bytes", ("mlx5_0", "1")): 5,
        ("rdma_port_rcv_data_bytes", ("mlx5_0", "1")): 4000,  # words of four bytes
    }


def test_in_switchdev_mode_congestion_is_counted_at_the_device_and_nothing_twice(tmp_path: Path) -> None:
    device = tmp_path / "class/infiniband/mlx5_0"
    put(device / "ports/1/hw_counters/out_of_sequence", 3)
    put(device / "hw_counters/out_of_sequence", 3)
    put(device / "hw_counters/np_ecn_marked_roce_packets", 7)
    assert read(tmp_path) == {
        ("rdma_out_of_sequence", ("mlx5_0", "1")): 3,
        ("rdma_np_ecn_marked_roce_packets", ("mlx5_0", "")): 7,
    }


def test_interfaces_captured_from_and_those_with_a_device_are_read(tmp_path: Path) -> None:
    for name in ("lo", "p0", "en3f0pf0sf0"):
        put(tmp_path / f"class/net/{name}/statistics/rx_bytes", 100)
    (tmp_path / "class/net/p0/device").mkdir()
    values = read(
        tmp_path, ("en3f0pf0sf0", "gone"), p0={"rx_prio3_pause": 9, "rx_prio3_pause_duration": 1500}
    )
    assert values == {
        ("netdev_rx_bytes", ("en3f0pf0sf0",)): 100,
        ("netdev_rx_bytes", ("p0",)): 100,
        ("ethtool_rx_prio_pause", ("p0", "3")): 9,
        ("ethtool_rx_prio_pause_duration_seconds", ("p0", "3")): pytest.approx(0.0015),
    }


def test_lanes_and_plain_names_of_ethtool(tmp_path: Path) -> None:
    put(tmp_path / "class/net/p0/statistics/rx_bytes", 1)
    statistics = {"rx_err_lane_2_phy": 4, "rx_crc_errors_phy": 5, "rx0_packets": 6, "rx_prio9x_pause": 7}
    values = read(tmp_path, ("p0",), p0=statistics)
    del values["netdev_rx_bytes", ("p0",)]
    assert values == {("ethtool_rx_err_lane_phy", ("p0", "2")): 4, ("ethtool_rx_crc_errors_phy", ("p0",)): 5}


def test_representors_do_not_make_the_answer_endless(tmp_path: Path) -> None:
    for number in range(100):
        put(tmp_path / f"class/net/pf0vf{number:03}/statistics/rx_bytes", number)
        (tmp_path / f"class/net/pf0vf{number:03}/device").mkdir()
    put(tmp_path / "class/net/z0/statistics/rx_bytes", 1)
    values = read(tmp_path, ("z0",))
    assert len(values) == MOST_INTERFACES
    assert ("netdev_rx_bytes", ("z0",)) in values


def test_without_sysfs_there_is_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "none", ("p0",)) == {}


def test_metrics_do_not_share_a_name() -> None:
    every = (*RDMA, *PORT, *ETHTOOL, *NETDEV)
    assert len({counter.metric for counter in every}) == len(every)
    assert set(LABELS) == set(every)
    for counter in every:
        assert counter.metric.replace("_", "").isalnum(), counter
        assert counter.metric.islower(), counter


def test_ethtool_of_an_interface_that_is_none() -> None:
    assert ethtool.EthtoolStatistics().read("no-such-if0") == {}


def test_ethtool_as_the_tool_shows_it() -> None:
    tool = shutil.which("ethtool")
    names = [path.name for path in Path("/sys/class/net").iterdir()]
    own = {name: ethtool.EthtoolStatistics().read(name) for name in names}
    own = {name: values for name, values in own.items() if values}
    if tool is None or not own:
        pytest.skip("ethtool is not installed, or no interface here has statistics")
    for name, values in own.items():
        shown = subprocess.run([tool, "-S", name], capture_output=True, text=True, check=True).stdout
        told = [line.split(":")[0].strip() for line in shown.splitlines()[1:] if ":" in line]
        assert list(values) == told


def test_a_count_that_changes_in_between_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is given another channel between the two questions."""
    names = [b"rx_a", b"rx_b", b"rx_c"]
    count = [2]

    def asked(sock: object, interface: str, request: bytes, room: int = 0) -> bytes:
        command = struct.unpack_from("=I", request)[0]
        if command == 0x37:
            return struct.pack("=IIQI", 0x37, 0, 2, count[0])
        if command == 0x1B:
            text = b"".join(name.ljust(32, b"\0") for name in names[: count[0]])
            return struct.pack("=III", 0x1B, 1, count[0]) + text
        count[0] = 3
        return struct.pack(f"=II{count[0]}Q", 0x1D, count[0], *range(count[0]))

    monkeypatch.setattr(ethtool, "_ask", asked)
    made = ethtool.EthtoolStatistics()
    assert made.read("p0") == {}
    assert made.read("p0") == {"rx_a": 0, "rx_b": 1, "rx_c": 2}
