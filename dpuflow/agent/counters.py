"""Counters of the NIC and its driver, beside what the packets show: mlx5's RDMA and Ethernet counters.

In: a sysfs tree (a parameter, so that tests make one) and ethtool's statistics. Out: one ``Reading`` a
value; a counter that is not there is absent, never 0. Names: docs/metrics.md and, where they come from,
linux/drivers/infiniband/hw/mlx5/counters.c, Documentation/networking/device_drivers/ethernet/mellanox/
mlx5/counters.rst, Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dpuflow.agent.ethtool import EthtoolStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Statistics = Callable[[str], dict[str, int]]

MOST_INTERFACES: Final = 32
"""A card in switchdev mode has a representor for each function of the host: there may be hundreds."""


@dataclass(frozen=True)
class Counter:
    """One counter: how the driver spells it and how it is exported.

    ``name`` may hold ``{priority}`` or ``{lane}``, which become labels. ``scale`` turns the driver's unit
    into the metric's.
    """

    name: str
    metric: str  # without dpuflow_ and _total
    about: str
    scale: float = 1.0


@dataclass(frozen=True)
class Reading:
    """One value: labels in the order of ``LABELS`` of the counter's source."""

    counter: Counter
    labels: tuple[str, ...]
    value: float


def _plain(prefix: str, about: str, names: str, strip: str = "") -> list[Counter]:
    return [
        Counter(name, f"{prefix}_{name.removeprefix(strip).lower()}", f"{about}: {name}.")
        for name in names.split()
    ]


RDMA: Final = (
    *_plain(
        "rdma",
        "RDMA requests received",
        "rx_write_requests rx_read_requests rx_atomic_requests rx_dct_connect out_of_buffer",
    ),
    *_plain(
        "rdma",
        "RDMA ordering and retries",
        "out_of_sequence duplicate_request rnr_nak_retry_err packet_seq_err implied_nak_seq_err "
        "local_ack_timeout_err",
    ),
    *_plain(
        "rdma",
        "RDMA congestion",
        "rp_cnp_ignored rp_cnp_handled np_ecn_marked_roce_packets np_cnp_sent "
        "cc_rx_ce_pkts cc_rx_cnp_pkts cc_tx_cnp_pkts",
    ),
    *_plain(
        "rdma",
        "RDMA errors",
        "resp_local_length_error resp_cqe_error req_cqe_error req_remote_invalid_request "
        "req_remote_access_errors resp_remote_access_errors resp_cqe_flush_error req_cqe_flush_error "
        "req_transport_retries_exceeded req_rnr_retries_exceeded rx_icrc_encapsulated",
    ),
    *_plain(
        "rdma",
        "RDMA accelerated retransmission",
        "roce_adp_retrans roce_adp_retrans_to roce_slow_restart roce_slow_restart_cnps "
        "roce_slow_restart_trans",
    ),
    *_plain(
        "rdma",
        "RDMA traffic",
        "rdma_tx_packets rdma_tx_bytes rdma_rx_packets rdma_rx_bytes",
        strip="rdma_",
    ),
)
"""hw_counters of a port or a device. A zero of local_ack_timeout_err is no information: some firmware never
advances it."""

PORT: Final = (
    Counter("port_rcv_data", "rdma_port_rcv_data_bytes", "Bytes received by the port: port_rcv_data.", 4),
    Counter("port_xmit_data", "rdma_port_xmit_data_bytes", "Bytes sent by the port: port_xmit_data.", 4),
    *_plain(
        "rdma",
        "RDMA port",
        "port_rcv_packets port_xmit_packets port_xmit_wait port_rcv_errors port_xmit_discards "
        "port_rcv_constraint_errors port_xmit_constraint_errors symbol_error link_error_recovery "
        "link_downed local_link_integrity_errors excessive_buffer_overrun_errors",
    ),
)
"""counters of a port. The two of data are in words of 4 bytes."""

_PAUSE_US: Final = 1e-6


def _durations(names: str, about: str) -> list[Counter]:
    return [
        Counter(name, f"ethtool_{name.replace('{priority}', '')}_seconds", f"{about}: {name}.", _PAUSE_US)
        for name in names.split()
    ]


def _ethtool(names: str, about: str) -> list[Counter]:
    return [
        Counter(name, "ethtool_" + re.sub(r"_?\{\w+\}", "", name), f"{about}: {name}.")
        for name in names.split()
    ]


ETHTOOL: Final = (
    *_ethtool(
        "rx_prio{priority}_pause rx_prio{priority}_pause_transition tx_prio{priority}_pause",
        "Priority flow control (present where it is on for the priority)",
    ),
    *_durations(
        "rx_prio{priority}_pause_duration tx_prio{priority}_pause_duration", "Time paused on the priority"
    ),
    *_ethtool(
        "rx_prio{priority}_bytes rx_prio{priority}_packets rx_prio{priority}_buf_discard "
        "rx_prio{priority}_cong_discard rx_prio{priority}_marked rx_prio{priority}_discards "
        "tx_prio{priority}_bytes tx_prio{priority}_packets",
        "Traffic of one priority",
    ),
    *_ethtool(
        "rx_global_pause rx_global_pause_transition tx_global_pause rx_pause_ctrl_phy tx_pause_ctrl_phy "
        "tx_pause_storm_warning_events tx_pause_storm_error_events",
        "Pause of the whole port",
    ),
    *_durations("rx_global_pause_duration tx_global_pause_duration", "Time paused, the whole port"),
    *_ethtool(
        "rx_packets_phy tx_packets_phy rx_bytes_phy tx_bytes_phy rx_discards_phy tx_discards_phy "
        "rx_crc_errors_phy rx_symbol_err_phy rx_pcs_symbol_err_phy rx_corrected_bits_phy "
        "rx_err_lane_{lane}_phy link_down_events_phy rx_buffer_passed_thres_phy",
        "The physical port",
    ),
    *_ethtool(
        "rx_vport_rdma_unicast_packets rx_vport_rdma_unicast_bytes tx_vport_rdma_unicast_packets "
        "tx_vport_rdma_unicast_bytes rx_vport_rdma_multicast_packets rx_vport_rdma_multicast_bytes "
        "tx_vport_rdma_multicast_packets tx_vport_rdma_multicast_bytes rx_steer_missed_packets",
        "RDMA at the virtual port",
    ),
    *_ethtool(
        "rx_out_of_buffer rx_buff_alloc_err rx_xdp_drop rx_xdp_redirect rx_oversize_pkts_sw_drop "
        "dev_internal_queue_oob dev_out_of_buffer",
        "Drops on the way to a capture",
    ),
    *_ethtool(
        "outbound_pci_stalled_rd_events outbound_pci_stalled_wr_events outbound_pci_buffer_overflow "
        "rx_pci_signal_integrity tx_pci_signal_integrity",
        "PCIe",
    ),
)
"""Statistics as ``ethtool -S`` shows them. Durations are in microseconds."""

NETDEV: Final = tuple(
    _plain(
        "netdev",
        "Interface statistics of the kernel",
        "rx_bytes tx_bytes rx_packets tx_packets rx_errors tx_errors rx_dropped tx_dropped "
        "rx_missed_errors rx_fifo_errors rx_crc_errors",
    )
)

LABELS: Final = {
    **dict.fromkeys((*RDMA, *PORT), ("device", "port")),
    **dict.fromkeys(NETDEV, ("interface",)),
    **{counter: ("interface", *re.findall(r"\{(\w+)\}", counter.name)) for counter in ETHTOOL},
}
"""The labels of each counter."""


def shown(counter: Counter) -> str:
    """The name that queries use."""
    return f"dpuflow_{counter.metric}_total"


def table() -> str:
    """The table of docs/metrics.md: a row for each kind of counters with the same labels."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for counter, labels in LABELS.items():
        rows.setdefault((counter.about.partition(":")[0], labels), []).append(f"`{shown(counter)}`")
    lines = ["| counters | labels | what they count |", "| --- | --- | --- |"]
    for (about, labels), names in rows.items():
        named = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| {'<br>'.join(names)} | {named} | {about} |")
    return "\n".join(lines)


class NicCounterFiles:
    """Reads the counters of all RDMA devices and of some interfaces, anew at each call of ``read``."""

    def __init__(self, sysfs: str = "/sys", statistics: Statistics | None = None) -> None:
        self._sysfs = Path(sysfs)
        self._statistics = statistics or EthtoolStatistics().read

    def read(self, captured: Iterable[str] = ()) -> Iterator[Reading]:
        """All that can be read now; the interfaces ``captured`` are read whatever they are.

        A file that vanishes or cannot be read is left out.
        """
        for device in _entries(self._sysfs / "class" / "infiniband"):
            yield from self._device(device)
        for interface in self._interfaces(captured):
            folder = self._sysfs / "class" / "net" / interface / "statistics"
            for counter in NETDEV:
                value = _number(folder / counter.name)
                if value is not None:
                    yield Reading(counter, (interface,), value * counter.scale)
            for name, number in self._statistics(interface).items():
                found = _match(name)
                if found is not None:
                    counter, labels = found
                    yield Reading(counter, (interface, *labels), number * counter.scale)

    def _interfaces(self, captured: Iterable[str]) -> list[str]:
        """Those captured on, then those with a device behind them (PFC is counted at the uplink, which
        need not be where the copy of the traffic arrives)."""
        folder = self._sysfs / "class" / "net"
        names = [name for name in captured if (folder / name).exists()]
        names += [path.name for path in _entries(folder) if (path / "device").exists()]
        return list(dict.fromkeys(names))[:MOST_INTERFACES]

    def _device(self, device: Path) -> Iterator[Reading]:
        """In switchdev mode mlx5 counts congestion at the device alone; what a port has is not told twice."""
        told = set()
        for port in _entries(device / "ports"):
            for folder, counters in (("hw_counters", RDMA), ("counters", PORT)):
                for counter in counters:
                    value = _number(port / folder / counter.name)
                    if value is not None:
                        told.add(counter)
                        yield Reading(counter, (device.name, port.name), value * counter.scale)
        for counter in RDMA:
            value = None if counter in told else _number(device / "hw_counters" / counter.name)
            if value is not None:
                yield Reading(counter, (device.name, ""), value * counter.scale)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, not ours to read, or "N/A (no PMA)"
        return None


@cache
def _patterns() -> tuple[dict[str, Counter], list[tuple[re.Pattern[str], Counter]]]:
    plain = {counter.name: counter for counter in ETHTOOL if "{" not in counter.name}
    numbered = [
        (re.compile(re.sub(r"\{\w+\}", r"(\\d+)", counter.name)), counter)
        for counter in ETHTOOL
        if "{" in counter.name
    ]
    return plain, numbered


def _match(name: str) -> tuple[Counter, tuple[str, ...]] | None:
    plain, numbered = _patterns()
    if name in plain:
        return plain[name], ()
    for pattern, counter in numbered:
        if found := pattern.fullmatch(name):
            return counter, found.groups()
    return None
