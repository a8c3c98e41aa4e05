"""A scenario: what job runs on which cluster, what goes wrong, and what is captured. Read from YAML.

Every key with its meaning and default is declared here; docs/synth.md lists them.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from importlib import resources
from typing import ClassVar

import yaml

from dpuflow.errors import OptionError
from dpuflow.settings import Reader, setting

PROTOCOLS = ("simple", "ll", "ll128")
ALGORITHMS = ("ring", "tree", "pat", "doubling")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv")
ALGORITHM_OF = {"tree": ("all_reduce",), "pat": ("all_gather", "reduce_scatter"), "doubling": ("all_reduce",)}
VERSIONS = ("2.18", "2.20", "2.25", "2.29", "2.30")


@dataclass(kw_only=True)
class Cluster:
    """Machines and the network between them."""

    nodes: int = setting(4, "machines", low=2, high=4096)
    gpus_per_node: int = setting(1, "GPUs in each; ranks are numbered node by node", low=1, high=16)
    link_gbps: float = setting(100.0, "rate of each NIC's link, Gbit/s", low=0.01, high=1600)
    latency_us: float = setting(1.5, "one way from NIC to NIC under the same switch, us", low=0.05)
    nodes_per_leaf: int = setting(32, "nodes under one leaf switch; beyond it the spine adds hop_us", low=1)
    hop_us: float = setting(0.8, "what the way over the spine adds, us", low=0)
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
    qps_per_connection: int = setting(1, "NCCL_IB_QPS_PER_CONNECTION", low=1, high=16)
    split_data_on_qps: bool = setting(False, "NCCL_IB_SPLIT_DATA_ON_QPS: every message over all QPs")
    adaptive_routing: bool = setting(
        False, "NCCL_IB_ADAPTIVE_ROUTING: WRITE and an empty WRITE with immediate"
    )
    traffic_class: int = setting(0, "NCCL_IB_TC; its upper six bits are the DSCP", low=0, high=255)
    ecn: bool = setting(True, "data frames are ECN capable, ECT(0)")
    timeout: int = setting(20, "NCCL_IB_TIMEOUT: 4.096 us times two to this power", low=1, high=31)
    pxn: bool = setting(
        True,
        "NCCL_P2P_PXN_LEVEL 2: sends to other nodes leave by the NIC on the receiver's rail, over its GPU",
    )
    registered: bool = setting(
        False, "registered buffers: CTS entries wait for the receiver's kernel, data walks the buffer"
    )


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
    stall_us: float | None = setting(None, "mean length of a stall, us", low=0)
    ack_us: float | None = setting(None, "median from a message's end to its ACK, us", low=0)
    ack_spread: float | None = setting(None, "its spread: sigma of the logarithm", low=0, high=3)
    ack_packets: int = setting(
        0, "ACKs within messages, every so many packets (Soft-RoCE: 64); 0: at their ends", low=0
    )
    repeat_share: float | None = setting(
        None, "share of messages sent again though nothing was lost", low=0, high=1
    )
    ack_coalesce: int = setting(1, "messages one ACK may cover if they end before it leaves", low=1, high=64)
    run_ahead: int = setting(8, "operations that the host launches ahead of the GPU", low=1)


@dataclass(kw_only=True)
class Operation:
    """One collective of an iteration."""

    op: str = setting(MISSING, "what", choices=OPS)
    bytes: int = setting(MISSING, "as the result format counts them (docs/analysis.md)", low=1)
    algorithm: str = setting(
        "ring",
        "tree: all_reduce; pat: all_gather, reduce_scatter; doubling: all_reduce, by NVSHMEM puts (NVRAR)",
        choices=ALGORITHMS,
    )
    protocol: str | None = setting(None, "default: nccl.protocol", choices=PROTOCOLS)
    channels: int | None = setting(None, "default: by size, at most nccl.channels", low=1, high=64)
    root: int = setting(0, "of broadcast and reduce; the sender of send_recv: position in the group", low=0)
    peer: int = setting(1, "the receiver of send_recv", low=0)
    gap_us: float = setting(0.0, "compute before it, us", low=0)


@dataclass(kw_only=True)
class Job:
    """What the ranks do."""

    KINDS: ClassVar[dict[str, type]]


@dataclass(kw_only=True)
class Loop(Job):
    """The same operations again and again, each iteration after a compute phase."""

    ops: list[Operation] = setting(MISSING, "operations of one iteration, in order")
    iterations: int = setting(30, "how many", low=1)
    compute_us: float = setting(2000.0, "compute before each iteration, us", low=0)
    jitter_us: float = setting(5.0, "its random part: standard deviation per rank, us", low=0)


@dataclass(kw_only=True)
class Decode(Job):
    """Inference with tensor parallelism, token by token: two all_reduces a layer."""

    tp: int | None = setting(
        None, "ranks that share a model (default: all); more are further replicas", low=2
    )
    tokens: int = setting(10, "how many", low=1)
    layers: int = setting(8, "of the model", low=1)
    bytes: int = setting(64 * 1024, "of each all_reduce", low=1)
    algorithm: str = setting("ring", "of the all_reduces", choices=ALGORITHMS[:2])
    protocol: str | None = setting("ll", "of the all_reduces", choices=PROTOCOLS)
    layer_us: float = setting(60.0, "compute of one layer, us", low=0)
    token_us: float = setting(100.0, "compute between two tokens, us", low=0)
    jitter_us: float = setting(0.5, "random part of each compute phase: standard deviation, us", low=0)


@dataclass(kw_only=True)
class Training(Job):
    """Training steps. What remains of the ranks after tp and pp is data parallel."""

    tp: int = setting(1, "tensor parallel ranks: neighbours", low=1)
    pp: int = setting(1, "pipeline stages", low=1)
    steps: int = setting(8, "how many", low=1)
    microbatches: int = setting(1, "of each step (GPipe: all forward, then all backward)", low=1)
    layers: int = setting(4, "of each stage", low=1)
    buckets: int = setting(2, "of gradients, of each stage", low=1)
    bucket_bytes: int = setting(4 << 20, "of each", low=1)
    overlap: bool = setting(True, "buckets are reduced while the backward pass goes on")
    tp_bytes: int = setting(1 << 20, "tensor parallel all_reduce of each layer and direction; 0: none", low=0)
    pp_bytes: int = setting(1 << 20, "activations between stages", low=1)
    ep_bytes: int = setting(
        0, "all_to_all among data parallel ranks, twice a layer (experts); 0: none", low=0
    )
    algorithm: str = setting("ring", "of the buckets", choices=ALGORITHMS[:2])
    protocol: str | None = setting(None, "of buckets and tensor parallel all_reduces", choices=PROTOCOLS)
    forward_us: float = setting(
        300.0, "compute of one layer forward, us; backward takes twice as long", low=0
    )
    optimizer_us: float = setting(500.0, "compute at the end of a step, us", low=0)
    jitter_us: float = setting(5.0, "random part of each compute phase: standard deviation, us", low=0)


@dataclass(kw_only=True)
class PrefillDecode(Job):
    """Disaggregated inference: prefill ranks hand each request's KV cache to decode ranks over RDMA."""

    prefill: int | None = setting(
        None, "ranks that prefill (default: half of them); the others decode", low=1
    )
    requests: int = setting(10, "how many, one after the other", low=1)
    mode: str = setting("write", "who moves the cache: the sender or the receiver", choices=("write", "read"))
    kv_bytes: int = setting(8 << 20, "cache that each prefill rank hands on, for each request", low=1)
    page_bytes: int = setting(64 * 1024, "of the pieces that are moved one by one", low=512)
    queue_pairs: int = setting(2, "between two ranks", low=1, high=16)
    notice: str = setting(
        "hidden",
        "how the other side learns of the end: a SEND, or nothing in the captures",
        choices=("hidden", "send"),
    )
    layerwise: bool = setting(False, "caches are moved as the layers are computed (write)")
    prefill_us: float = setting(3000.0, "compute of a prefill, us", low=0)
    prefill_layers: int = setting(
        4, "of the model: all_reduces of a prefill, half as many as layers have", low=1
    )
    prefill_bytes: int = setting(2 << 20, "of each of them", low=1)
    tokens: int = setting(6, "decoded of each request", low=1)
    layers: int = setting(4, "of the model: two all_reduces each", low=1)
    bytes: int = setting(32 * 1024, "of each of them", low=1)
    layer_us: float = setting(60.0, "compute of one layer of one token, us", low=0)
    jitter_us: float = setting(2.0, "random part of each compute phase: standard deviation, us", low=0)


@dataclass(kw_only=True)
class Experts(Job):
    """Experts on all ranks: tokens are put into the peers' memory, a flag behind them (as DeepEP does)."""

    steps: int = setting(10, "how many", low=1)
    layers: int = setting(4, "of the model: a dispatch and a combine each", low=1)
    tokens: int = setting(16, "that a rank sends to each other one", low=1)
    skew: float = setting(0.5, "by what share of that the numbers differ at most", low=0, high=1)
    token_bytes: int = setting(7408, "of a token on its way to an expert (FP8, hidden 7168)", low=16)
    combine_bytes: int = setting(14352, "of what comes back (BF16)", low=16)
    flag: str = setting(
        "atomic", "what follows the tokens: a FETCH_ADD, or a WRITE of 8 bytes", choices=("atomic", "write")
    )
    queue_pairs: int = setting(2, "between two ranks: one for each of the receiver's experts", low=1, high=16)
    attention_us: float = setting(100.0, "compute before a dispatch, us", low=0)
    expert_us: float = setting(60.0, "compute before a combine, us", low=0)
    jitter_us: float = setting(2.0, "random part of each: standard deviation, us", low=0)


Job.KINDS = {
    "loop": Loop,
    "decode": Decode,
    "training": Training,
    "prefill_decode": PrefillDecode,
    "experts": Experts,
}


@dataclass(kw_only=True)
class Fault:
    """Something that goes wrong."""

    KINDS: ClassVar[dict[str, type]]


@dataclass(kw_only=True)
class Late:
    """Common to faults of a rank: which iterations."""

    us: float = setting(MISSING, "how long, us", low=0)
    mode: str = setting(
        "persistent",
        "which iterations: all, a random rank's, one after the other, one span",
        choices=("persistent", "random", "rotating", "transient"),
    )
    rank: int | None = setting(None, "which rank (persistent, transient)", low=0)
    from_iteration: int = setting(0, "first iteration", low=0)
    iterations: int | None = setting(None, "transient: how many", low=1)
    share: float = setting(0.4, "random: share of iterations", low=0, high=1)


@dataclass(kw_only=True)
class GpuLate(Late, Fault):
    """A GPU computes longer."""


@dataclass(kw_only=True)
class SlowHost(Late, Fault):
    """A host launches the iteration's first operation late: its CTS entries come late, too."""


@dataclass(kw_only=True)
class SlowReceiver(Fault):
    """A rank grants late: each of its CTS entries is posted after a delay."""

    rank: int = setting(MISSING, "which rank", low=0)
    us: float = setting(MISSING, "delay of each CTS entry, us", low=0)
    from_iteration: int = setting(0, "first iteration", low=0)


@dataclass(kw_only=True)
class Loss(Fault):
    """The network loses frames."""

    src: int | None = setting(None, "only those from this node", low=0)
    dst: int | None = setting(None, "only those to this node", low=0)
    share: float = setting(MISSING, "share of the frames", low=0, high=0.2)


@dataclass(kw_only=True)
class SlowLink(Fault):
    """A node's link runs below its rate: frames queue in the switch (down) or the NIC (up)."""

    node: int = setting(MISSING, "which node", low=0)
    gbps: float = setting(MISSING, "its rate, Gbit/s", low=0.001)
    where: str = setting("both", "direction, as the node sees it", choices=("up", "down", "both"))


@dataclass(kw_only=True)
class Flap(Fault):
    """A node's link goes down and up again: all frames of that time are lost."""

    node: int = setting(MISSING, "which node", low=0)
    at_us: float = setting(MISSING, "first time, us from the start", low=0)
    us: float = setting(MISSING, "how long it is down, us", low=0)
    times: int = setting(1, "how often", low=1)
    every_us: float = setting(0.0, "from one time to the next, us", low=0)


Fault.KINDS = {
    "gpu_late": GpuLate,
    "slow_host": SlowHost,
    "slow_receiver": SlowReceiver,
    "loss": Loss,
    "slow_link": SlowLink,
    "flap": Flap,
}


@dataclass(kw_only=True)
class Clients:
    """North-south traffic beside the job: clients of an inference service, over TCP."""

    hosts: int = setting(0, "clients, each a host of its own; 0: no such traffic", low=0, high=250)
    sessions: int = setting(2, "connections of each", low=1, high=100)
    node: int = setting(0, "whose first NIC the front end answers on", low=0)
    requests: int = setting(5, "of each session", low=1)
    together: bool = setting(False, "all sessions ask at the same time: ingress bursts")
    think_us: float = setting(5000.0, "pause before a request, us; random unless together", low=0)
    prompt_bytes: int = setting(16 * 1024, "of a prompt on average; half as many to one and a half", low=2)
    first_token_us: float = setting(3000.0, "from a prompt to its first token, us", low=0)
    tokens: int = setting(20, "of an answer at most; half as many at least", low=1)
    token_us: float = setting(500.0, "from token to token, us", low=0)
    token_bytes: int = setting(180, "of each token's message", low=1)


@dataclass(kw_only=True)
class Clocks:
    """How the captures' clocks differ. Offsets and drifts are drawn between minus and plus these."""

    offset_us: float = setting(0.0, "largest offset against node 0, us", low=0)
    drift_ppm: float = setting(0.0, "largest drift against node 0, ppm", low=0, high=500)
    jitter_ns: float = setting(10.0, "standard deviation of one stamp, ns", low=0)


@dataclass(kw_only=True)
class Observation:
    """What is captured, and how well."""

    vantages: str = setting(
        "nodes", "a capture per node, at the switch, or both", choices=("nodes", "switch", "both")
    )
    only: list[int] | None = setting(None, "nodes with a capture (default: all)", low=0)
    snaplen: int = setting(128, "bytes kept of each frame; 0: all", low=0)
    truncate: int = setting(
        0, "bytes to which a mirror cuts frames before they are captured; 0: it does not", low=0
    )
    sample: int = setting(1, "of so many frames one is taken, at random, as sFlow and psample do", low=1)
    loss: float = setting(0.0, "share of frames that a capture misses", low=0, high=1)
    clocks: Clocks = setting(Clocks(), "see below")
    compress: bool = setting(True, "pcap.gz instead of pcap")


@dataclass(kw_only=True)
class Scenario:
    """All of it."""

    name: str = setting("scenario", "name of the case")
    about: str = setting("", "one sentence")
    seed: int = setting(1, "same seed, same bytes", low=0)
    cluster: Cluster = setting(Cluster(), "see below")
    nccl: Nccl = setting(Nccl(), "see below")
    machine: Machine = setting(Machine(), "see below")
    job: Job = setting(MISSING, "see below")
    clients: Clients = setting(Clients(), "see below")
    faults: list[Fault] = setting([], "see below")
    observation: Observation = setting(Observation(), "see below")

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.cluster.nodes * self.cluster.gpus_per_node


def read_scenario(file: str) -> Scenario:
    """A scenario from a YAML file or, where there is no such file, a ready one by name.

    Raises OptionError with file, line and key, OSError.
    """
    if file in ready():
        text = (resources.files("dpuflow.synth") / "ready" / f"{file}.yaml").read_text(encoding="utf-8")
    else:
        with open(file, encoding="utf-8") as stream:
            try:
                text = stream.read()
            except UnicodeDecodeError:
                raise OptionError(f"{file}: not YAML: not UTF-8 text") from None
    return parse_scenario(text, file)


def parse_scenario(text: str, name: str) -> Scenario:
    """A scenario from YAML text; ``name`` is what errors call it. Raises OptionError."""
    reader = Reader(name)
    root = reader.root(text)
    scenario = reader.build(Scenario, root, "")
    problem = _contradiction(scenario)
    if problem is not None:
        key, reason = problem
        raise reader.fail(_locate(root, key), key, reason)
    return scenario


def ready() -> dict[str, str]:
    """The ready scenarios: name -> the first comment line, which says what it is."""
    folder = resources.files("dpuflow.synth") / "ready"
    found = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".yaml"):
            first = entry.read_text(encoding="utf-8").split("\n", 1)[0]
            found[entry.name.removesuffix(".yaml")] = first.lstrip("# ")
    return dict(sorted(found.items()))


def _contradiction(scenario: Scenario) -> tuple[str, str] | None:
    """The key and the reason of the first value that does not go with another; None where all do."""
    cluster = scenario.cluster
    for i, fault in enumerate(scenario.faults):
        rank = getattr(fault, "rank", None)
        if rank is not None and rank >= scenario.ranks:
            return f"faults[{i}].rank", f"{rank} is not one of the {scenario.ranks} ranks, which count from 0"
        if isinstance(fault, Late):
            if fault.mode in ("persistent", "transient") and rank is None:
                return f"faults[{i}].mode", f"{fault.mode} needs a rank"
            if fault.mode == "transient" and fault.iterations is None:
                return f"faults[{i}].mode", "transient needs iterations"
        for name in ("node", "src", "dst"):
            node = getattr(fault, name, None)
            if node is not None and node >= cluster.nodes:
                return f"faults[{i}].{name}", f"{node} is not one of the {cluster.nodes} nodes"
    if 0 < scenario.observation.truncate < 14:
        return "observation.truncate", "a mirror leaves the Ethernet header: 14 bytes at least"
    for i, node in enumerate(scenario.observation.only or ()):
        if node >= cluster.nodes:
            return f"observation.only[{i}]", f"{node} is not one of the {cluster.nodes} nodes"
    job = scenario.job
    tp, pp = getattr(job, "tp", None) or 1, getattr(job, "pp", 1)
    if scenario.ranks % (tp * pp):
        return "job.tp", f"{scenario.ranks} ranks cannot be divided by {tp * pp}"
    if scenario.clients.node >= cluster.nodes:
        return "clients.node", f"{scenario.clients.node} is not one of the {cluster.nodes} nodes"
    if isinstance(job, PrefillDecode):
        prefill = job.prefill or scenario.ranks // 2
        if prefill >= scenario.ranks:
            return "job.prefill", f"{prefill} of {scenario.ranks} ranks leave none to decode"
        if job.mode == "read" and job.layerwise:
            return "job.layerwise", "who reads a cache reads it when it is whole: take write"
    for i, op in enumerate(getattr(job, "ops", ())):
        if op.op == "send_recv" and (op.peer >= scenario.ranks or op.peer == op.root):
            return f"job.ops[{i}].peer", f"{op.peer} is the sender or not one of the ranks"
        if op.root >= scenario.ranks:
            return f"job.ops[{i}].root", f"{op.root} is not one of the {scenario.ranks} ranks"
        if op.algorithm == "doubling" and cluster.nodes & (cluster.nodes - 1):
            return f"job.ops[{i}].algorithm", f"doubling is for 2, 4, 8, ... nodes, not {cluster.nodes}"
        if op.op not in ALGORITHM_OF.get(op.algorithm, OPS):
            return f"job.ops[{i}].algorithm", f"NCCL has no {op.algorithm} for {op.op}"
    return None


def _locate(root: yaml.Node, key: str) -> yaml.Node:
    """The node that ``key`` (a.b[1].c) names, or the nearest one above it that was written."""
    node = root
    for part in key.replace("[", ".").replace("]", "").split("."):
        below: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            below = next((value for name, value in node.value if name.value == part), None)
        elif isinstance(node, yaml.SequenceNode):
            below = node.value[int(part)]
        if below is None:
            return node
        node = below
    return node
