"""Programs of PyTorch's own distributed training, stamped where torch calls its collectives.

The model is a stack of linear layers whose work is lengthened by ``Rank.work``; what is sent, in which
order and on which stream is decided by torch: DistributedDataParallel's buckets, FSDP2's gathers ahead,
the pipelining package's schedules, ZeRO's broadcasts of what each rank has updated.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from programs import Params, Rank

WORDS = {
    "all_reduce": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
}
"""Functions of torch.distributed: the operation, and which argument has the bytes that truth states."""


class Stamped:
    """Logs what torch calls by name in ``torch.distributed``; each group numbers its own calls.

    ``parts``: how many layers share a step's delay (a slow GPU); 0 where it comes before the step.
    """

    def __init__(self, rank: Rank, params: Params, forwards: int) -> None:
        self.rank, self.step = rank, 0
        self.parts = forwards if params.get("spread") else 0
        self.calls: dict[str, int] = {}

    def wrap(self, name: str, function: Any) -> Any:
        operation, sized = WORDS[name]

        def stamped(*args: Any, **kwargs: Any) -> Any:
            r = self.rank
            group = kwargs.get("group")
            ranks = r.lib.dist.get_process_group_ranks(group) if group else list(range(r.size))
            key = f"{ranks} {operation}"
            self.calls[key] = self.calls.get(key, 0) + 1
            tensor = args[sized] if len(args) > sized else kwargs.get("input", kwargs.get("tensor"))
            size = tensor.numel() * tensor.element_size()
            root = kwargs.get("src", args[1] if len(args) > 1 else 0) if operation == "broadcast" else None
            later = bool(kwargs.get("async_op"))

            def run(_: bool) -> Any:
                return function(*args, **kwargs)

            return r.call(
                f"{key} {self.calls[key]}", self.step, operation, size, run, ranks, root=root, later=later
            )

        return stamped

    def begin(self, step: int, ms: float) -> None:
        self.step = step
        self.rank.work(ms, None if self.parts else step)

    def forward(self, ms: float) -> None:
        if self.parts:
            self.rank.work(ms, self.step, self.parts)
        else:
            self.rank.work(ms)

    def reduced(self) -> Any:
        """A hook that averages a bucket of gradients as DistributedDataParallel does, but seen here."""
        r = self.rank

        def hook(_: Any, bucket: Any) -> Any:
            work = r.lib.dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0] / r.size)

        future = r.lib.torch.futures.Future[r.lib.torch.Tensor]
        hook.__annotations__ = {"bucket": r.lib.dist.GradBucket, "return": future}
        return hook

    @contextmanager
    def on(self) -> Iterator[Stamped]:
        dist = self.rank.lib.dist
        before = {name: getattr(dist, name) for name in WORDS}
        for name, function in before.items():
            setattr(dist, name, self.wrap(name, function))
        try:
            yield self
        finally:
            for name, function in before.items():
                setattr(dist, name, function)


def layers(stamped: Stamped, p: Params, count: int, first: int = 0) -> Any:
    """``count`` linear layers of ``width``, each with work of its own when it runs forward."""
    torch = stamped.rank.lib.torch

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(p["width"], p["width"])

        def forward(self, x: Any) -> Any:
            stamped.forward(p["fwd"])
            return torch.nn.functional.gelu(self.linear(x))

    torch.manual_seed(first)
    return torch.nn.Sequential(*[Layer() for _ in range(count)]).to(stamped.rank.lib.device)


def batch(r: Rank, p: Params) -> Any:
    return r.lib.torch.rand(p["batch"], p["width"], device=r.lib.device)


def p_torch_ddp(r: Rank, p: Params) -> None:
    """DistributedDataParallel: buckets as torch cuts them, reduced while the backward pass goes on."""
    torch, dist = r.lib.torch, r.lib.dist
    stamped = Stamped(r, p, p["layers"] * p["accumulate"])
    model = torch.nn.parallel.DistributedDataParallel(
        layers(stamped, p, p["layers"]), bucket_cap_mb=p["bucket_mb"], gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with stamped.on():
        model.register_comm_hook(None, stamped.reduced())
        for step in range(r.spec["iterations"]):
            stamped.begin(step, p["ms"])
            for _ in range(p["accumulate"] - 1):
                with model.no_sync():
                    model(batch(r, p)).square().mean().backward()
            loss = model(batch(r, p)).square().mean()
            loss.backward()
            if p["clip"]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if p["log"] and step % p["log"] == 0:
                dist.all_reduce(loss.detach())


def p_torch_fsdp(r: Rank, p: Params) -> None:
    """FSDP2: each layer's weights gathered ahead of it, gradients scattered behind it."""
    torch, dist = r.lib.torch, r.lib.dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if p.get("replicas", 1) > 1:
        shape = (p["replicas"], r.size // p["replicas"])
        mesh = init_device_mesh(r.lib.device, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(r.lib.device, (r.size,))
    stamped = Stamped(r, p, p["layers"])
    model = layers(stamped, p, p["layers"])
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=p["reshard"])
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with stamped.on():
        for step in range(r.spec["iterations"]):
            stamped.begin(step, p["ms"])
            loss = model(batch(r, p)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if p["log"] and step % p["log"] == 0:
                dist.all_reduce(loss.detach())


def p_torch_zero(r: Rank, p: Params) -> None:
    """ZeRO's first stage: gradients reduced by DistributedDataParallel, weights broadcast by their owners."""
    torch = r.lib.torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    stamped = Stamped(r, p, p["layers"])
    model = torch.nn.parallel.DistributedDataParallel(
        layers(stamped, p, p["layers"]), bucket_cap_mb=p["bucket_mb"]
    )
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, parameters_as_bucket_view=True
    )
    with stamped.on():
        model.register_comm_hook(None, stamped.reduced())
        for step in range(r.spec["iterations"]):
            stamped.begin(step, p["ms"])
            model(batch(r, p)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def p_torch_pipeline(r: Rank, p: Params) -> None:
    """The pipelining package: GPipe, 1F1B or interleaved, then gradients reduced among replicas."""
    torch, dist = r.lib.torch, r.lib.dist
    from torch.distributed import pipelining

    replicas = p.get("replicas", 1)
    stages = r.size // replicas
    pipes = [r.lib.group(list(range(k, r.size, replicas))) for k in range(replicas)]
    peers = [r.lib.group(list(range(k, k + replicas))) for k in range(0, r.size, replicas)]
    pipe, mine = pipes[r.rank % replicas], r.rank // replicas
    chunks = 2 if p["schedule"] == "interleaved" else 1
    stamped = Stamped(r, p, p["layers"] * p["microbatches"] * chunks)
    models = [layers(stamped, p, p["layers"], mine + k * stages) for k in range(chunks)]
    built = [
        pipelining.PipelineStage(
            model, mine + k * stages, stages * chunks, torch.device(r.lib.device), group=pipe
        )
        for k, model in enumerate(models)
    ]

    def loss(out: Any, target: Any) -> Any:
        return (out - target).square().mean()

    if chunks > 1:
        schedule = pipelining.ScheduleInterleaved1F1B(built, p["microbatches"], loss_fn=loss)
    else:
        made = pipelining.ScheduleGPipe if p["schedule"] == "gpipe" else pipelining.Schedule1F1B
        schedule = made(built[0], p["microbatches"], loss_fn=loss)
    big = {**p, "batch": p["batch"] * p["microbatches"]}
    with stamped.on():
        for step in range(r.spec["iterations"]):
            stamped.begin(step, p["ms"] * (mine == 0))
            first = [batch(r, big)] if mine == 0 else []
            last = {"target": batch(r, big)} if mine == stages - 1 else {}
            schedule.step(*first, **last)
            for model in models:
                for parameter in model.parameters():
                    if replicas > 1:
                        dist.all_reduce(parameter.grad, group=peers[mine])
                    parameter.grad = None
            if p["log"] and step % p["log"] == 0:
                dist.all_reduce(torch.zeros(1, device=r.lib.device))


PROGRAMS = {name[2:]: value for name, value in globals().items() if name.startswith("p_")}
