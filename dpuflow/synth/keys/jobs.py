"""Keys of `job`: what the ranks do, kind by kind."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar

from dpuflow.settings import setting
from dpuflow.synth.keys.cluster import PROTOCOLS

ALGORITHMS = ("ring", "tree", "pat", "doubling", "nvls_tree")
OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "all_to_allv",
    "send_recv",
)  # fmt: skip
ALGORITHM_OF = {
    "tree": ("all_reduce",),
    "pat": ("all_gather", "reduce_scatter"),
    "doubling": ("all_reduce",),
    "nvls_tree": ("all_reduce",),
}


@dataclass(kw_only=True)
class Operation:
    """One collective of an iteration."""

    op: str = setting(MISSING, "what", choices=OPS)
    bytes: int = setting(MISSING, "as the result format counts them (docs/analysis.md)", low=1)
    algorithm: str = setting(
        "ring",
        "tree: all_reduce; pat: all_gather, reduce_scatter; doubling: all_reduce, by NVSHMEM puts (NVRAR); "
        "nvls_tree: all_reduce, over NVLink SHARP inside nodes",
        choices=ALGORITHMS,
    )
    protocol: str | None = setting(None, "default: nccl.protocol", choices=PROTOCOLS)
    channels: int | None = setting(None, "default: by size, at most nccl.channels", low=1, high=64)
    root: int = setting(
        0,
        "of broadcast and reduce; the sender of send_recv; who gets more of all_to_allv: position in the"
        " group",
        low=0,
    )
    peer: int = setting(1, "the receiver of send_recv", low=0)
    skew: float = setting(
        0.0,
        "of all_to_allv, whose sizes differ by a fifth anyway: so much of what ranks would send to the others"
        " goes to root",
        low=0,
        high=1,
    )
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
    sharded: bool = setting(
        False,
        "weights are sharded (FSDP): a layer's are gathered while the one before computes, its gradients "
        "reduced and scattered; a bucket is a layer",
    )
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
    hot: int | None = setting(None, "rank whose experts more of all tokens are for", low=0)
    hot_share: float = setting(0.5, "what share of each other rank's tokens those are", low=0, high=1)
    token_bytes: int = setting(7408, "of a token on its way to an expert (FP8, hidden 7168)", low=16)
    combine_bytes: int = setting(14352, "of what comes back (BF16)", low=16)
    flag: str = setting(
        "atomic", "what follows the tokens: a FETCH_ADD, or a WRITE of 8 bytes", choices=("atomic", "write")
    )
    queue_pairs: int = setting(2, "between two ranks: one for each of the receiver's experts", low=1, high=16)
    attention_us: float = setting(100.0, "compute before a dispatch, us", low=0)
    expert_us: float = setting(60.0, "compute before a combine, us", low=0)
    jitter_us: float = setting(2.0, "random part of each: standard deviation, us", low=0)


@dataclass(kw_only=True)
class Service(Job):
    """An inference service: prompts of `clients` drive prefill and decode, step by step."""

    tp: int | None = setting(
        None, "ranks that share a model (default: all); more are further replicas", low=2
    )
    batching: str = setting(
        "continuous",
        "when a prompt may join: after any step, or when all answers of the batch are done",
        choices=("continuous", "static"),
    )
    max_batch: int = setting(8, "answers at the same time, of a replica", low=1)
    balance: str = setting(
        "even", "which replica a session asks: each in turn, or mostly the first", choices=("even", "skewed")
    )
    layers: int = setting(4, "of the model: two all_reduces each", low=1)
    bytes: int = setting(8192, "of each all_reduce, for each answer of the batch", low=1)
    prefill_bytes: int = setting(262144, "of each all_reduce of a prefill", low=1)
    layer_us: float = setting(100.0, "compute of one layer of one step, us", low=0)
    prefill_us: float = setting(400.0, "compute of one layer of a prefill, us", low=0)
    egress_us: float = setting(5.0, "what the front end takes for each token, one after the other, us", low=0)
    egress_jitter_us: float = setting(0.0, "its random part: mean of an exponential, us", low=0)
    jitter_us: float = setting(1.0, "random part of each compute phase: standard deviation, us", low=0)


Job.KINDS = {
    "service": Service,
    "loop": Loop,
    "decode": Decode,
    "training": Training,
    "prefill_decode": PrefillDecode,
    "experts": Experts,
}
