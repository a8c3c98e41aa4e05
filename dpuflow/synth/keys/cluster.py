"""Keys of `cluster`, `nccl` and `machine`: where a job runs."""

from __future__ import annotations

from dataclasses import dataclass

from dpuflow.settings import SIZE, setting

PROTOCOLS = ("simple", "ll", "ll128")
VERSIONS = ("2.18", "2.20", "2.25", "2.29", "2.30")


def _eighths(value: int) -> str | None:
    """A buffer is eight slots; a slot holds whole lines of any protocol."""
    return "not a multiple of 16 KiB" if value % (16 << 10) else None


@dataclass(kw_only=True)
class Cluster:
    """Machines and the network between them."""

    nodes: int = setting(4, "machines", low=2, high=4096)
    gpus_per_node: int = setting(1, "GPUs in each; ranks are numbered node by node", low=1, high=16)
    nics_per_node: int | None = setting(
        None,
        "NICs (rails) in each; GPUs share them evenly, neighbours one (default: one each)",
        low=1,
        high=16,
    )
    link_gbps: float = setting(100.0, "rate of each NIC's link, Gbit/s", low=0.01, high=1600)
    latency_us: float = setting(1.5, "one way from NIC to NIC under the same switch, us", low=0.05)
    nodes_per_leaf: int = setting(32, "nodes under one leaf switch; beyond it the spine adds hop_us", low=1)
    hop_us: float = setting(0.8, "what the way over the spine adds, us", low=0)
    spray: int = setting(
        1,
        "paths that packets of one RoCE message take in turn; NICs put them in place as they come (adaptive"
        " routing)",
        low=1,
        high=256,
    )
    spray_us: float = setting(3.0, "by how much paths are longer, us: drawn from 0 to this", low=0)
    mtu: int = setting(4096, "RoCE path MTU, bytes", choices=(256, 512, 1024, 2048, 4096))
    queue_kib: float = setting(4096.0, "switch buffer of one port; frames beyond are dropped", low=8)
    pfc: bool = setting(True, "the switch pauses senders when a port's buffer is half full")
    ecn_kib: float | None = setting(
        400.0, "queue that begins to mark; from four times this all are; null: none", low=1
    )


@dataclass(kw_only=True)
class Nccl:
    """NCCL's settings and what its tuner would choose."""

    version: str = setting("2.30", "first version of the layout: CTS entry and immediate", choices=VERSIONS)
    transport: str = setting("ib", "RoCE, or sockets (TCP)", choices=("ib", "socket"))
    protocol: str = setting("simple", "where an operation does not say otherwise", choices=PROTOCOLS)
    channels: int = setting(2, "channels of each communicator, at most", low=1, high=64)
    buffsize: int = setting(
        4 << 20,
        "NCCL_BUFFSIZE: Simple's buffer, eight steps of a connection",
        low=64 << 10,
        high=1 << 30,
        unit=SIZE,
        check=_eighths,
    )
    ll_buffsize: int = setting(
        512 << 10, "NCCL_LL_BUFFSIZE: the same of LL", low=8 << 10, high=1 << 30, unit=SIZE, check=_eighths
    )
    ll128_buffsize: int = setting(
        4_915_200,
        "NCCL_LL128_BUFFSIZE: the same of LL128",
        low=512 << 10,
        high=1 << 30,
        unit=SIZE,
        check=_eighths,
    )
    qps_per_connection: int = setting(1, "NCCL_IB_QPS_PER_CONNECTION", low=1, high=16)
    split_data_on_qps: bool | None = setting(
        None, "NCCL_IB_SPLIT_DATA_ON_QPS: every message over all QPs; default: as 2.18 does, later ones not"
    )
    match_by: str = setting(
        "index",
        "what immediates are, from 2.29 on: the size, or the request's number "
        "(NCCL_IB_RECEIVER_SIDE_MATCHING_SCHEME 1)",
        choices=("index", "id"),
    )
    adaptive_routing: bool = setting(
        False, "NCCL_IB_ADAPTIVE_ROUTING: WRITE and an empty WRITE with immediate"
    )
    traffic_class: int = setting(0, "NCCL_IB_TC; its upper six bits are the DSCP", low=0, high=255)
    ecn: bool = setting(True, "data frames are ECN capable, ECT(0)")
    timeout: int | None = setting(
        None,
        "NCCL_IB_TIMEOUT: 4.096 us times two to this power; default: 18 before 2.23, then 20",
        low=1,
        high=31,
    )
    pxn: bool = setting(
        True,
        "NCCL_P2P_PXN_LEVEL 2: sends to other nodes leave by the NIC on the receiver's rail, over its GPU",
    )
    setup: bool = setting(
        False,
        "the job begins within the captures, with the TCP sockets that set it up (bootstrap, net_ib's "
        "exchange of queue pairs); false: they are older, or on an interface without a capture",
    )
    shared_comms: bool = setting(
        True,
        "NCCL_NET_SHARED_COMMS: with PXN, sends of a node's GPUs share connections, up to eight an entry",
    )
    registered: bool = setting(
        False, "registered buffers: CTS entries wait for the receiver's kernel, data walks the buffer"
    )

    @property
    def timeout_ns(self) -> float:
        """What a queue pair waits for an answer."""
        power = self.timeout if self.timeout is not None else 18 if self.version in ("2.18", "2.20") else 20
        return 4096.0 * float(2**power)

    @property
    def splits(self) -> bool:
        """Whether a message goes over all queue pairs."""
        return self.version == "2.18" if self.split_data_on_qps is None else self.split_data_on_qps


@dataclass(kw_only=True)
class Machine:
    """How fast GPUs, proxy threads and NICs hand over. ``None``: as the profile says."""

    profile: str = setting(
        "fabric",
        "hand-over of NICs with hardware stamps, or of a loaded software stack",
        choices=("fabric", "host"),
    )
    copy_gbyte_s: float | None = setting(
        None, "what one channel's thread block copies or reduces, GB/s", low=0.001
    )
    step_us: float | None = setting(None, "fixed cost of one slice on the GPU, us", low=0)
    launch_us: float | None = setting(None, "from launch on the host to the kernel's start, us", low=0)
    handover_us: float | None = setting(
        None, "median from a GPU's slice to the NIC without the proxy's cost", low=0
    )
    handover_spread: float | None = setting(None, "its spread: sigma of the logarithm", low=0, high=3)
    proxy_us: float | None = setting(None, "cost of one action of the proxy thread, us", low=0)
    stall_share: float | None = setting(None, "share of hand-overs that stall", low=0, high=1)
    wake_share: float | None = setting(
        None, "the same of hand-overs after a millisecond in which nothing was handed over", low=0, high=1
    )
    stall_us: float | None = setting(None, "mean length of a stall, us", low=0)
    ack_us: float | None = setting(None, "median from a message's end to its ACK, us", low=0)
    ack_spread: float | None = setting(None, "its spread: sigma of the logarithm", low=0, high=3)
    ack_packets: int = setting(
        0, "ACKs within messages, every so many packets (Soft-RoCE: 64); 0: at their ends", low=0
    )
    repeat_share: float | None = setting(
        None, "share of messages retransmitted though nothing was lost", low=0, high=1
    )
    packet_us: float | None = setting(
        None, "median of what sending one packet takes where software does it, us; 0: hardware does", low=0
    )
    packet_spread: float | None = setting(None, "its spread: sigma of the logarithm", low=0, high=3)
    turn_us: float | None = setting(
        None,
        "median from one time that software takes up what came to the next, us; 0: at once, by hardware",
        low=0,
    )
    turn_spread: float | None = setting(None, "its spread: sigma of the logarithm", low=0, high=3)
    draw: int = setting(
        0, "another one draws all times of this section anew; the job and its faults stay as they are", low=0
    )
    ack_coalesce: int = setting(1, "messages one ACK may cover if they end before it leaves", low=1, high=64)
    run_ahead: int = setting(8, "operations that the host launches ahead of the GPU", low=1)
