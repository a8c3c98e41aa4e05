"""Training steps: data, tensor, pipeline and expert parallel ranks, gradients reduced in overlapping buckets.

Ranks are numbered as Megatron does: tensor parallel ones are neighbours, then data parallel, then pipeline
stages. The pipeline's schedule is GPipe's: all microbatches forward, then all backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.synth.ranks import Wait
from dpuflow.synth.scenario import Operation

if TYPE_CHECKING:
    from dpuflow.synth.jobs import Builder
    from dpuflow.synth.ranks import Work
    from dpuflow.synth.scenario import Training

GRADIENTS, HANDING_ON = 1, 2
"""Streams beside the one that computes: buckets are reduced, activations handed on while it goes on."""


class Ranks:
    """Who is who."""

    def __init__(self, job: Training, ranks: int) -> None:
        self.tp, self.pp = job.tp, job.pp
        self.dp = ranks // (job.tp * job.pp)

    def tensor(self, stage: int, replica: int) -> range:
        """Ranks that share the layers of one stage in one replica."""
        first = (stage * self.dp + replica) * self.tp
        return range(first, first + self.tp)

    def data(self, stage: int, place: int) -> range:
        """Ranks that hold the same weights."""
        first = stage * self.dp * self.tp + place
        return range(first, first + self.dp * self.tp, self.tp)


def build_training(job: Training, builder: Builder) -> None:
    """All steps."""
    for step in range(job.steps):
        builder.begin(step)
        _Step(job, builder).write()


class _Step:
    """One step."""

    def __init__(self, job: Training, builder: Builder) -> None:
        self.job, self.builder = job, builder
        self.ranks = Ranks(job, builder.scenario.ranks)
        self.buckets: list[Work] = []

    def write(self) -> None:
        if self.job.sharded and self.ranks.dp > 1:
            self._write_sharded()
            return
        for micro in range(self.job.microbatches):
            for stage in range(self.ranks.pp):
                self._pass(stage, micro, forward=True)
        for micro in range(self.job.microbatches):
            for stage in reversed(range(self.ranks.pp)):
                self._pass(stage, micro, forward=False)
        if not self.job.overlap:
            for stage in range(self.ranks.pp):
                for bucket in range(self.job.buckets):
                    self._bucket(stage, bucket)
        for work in self.buckets:
            self.builder.wait(work)
        self.builder.compute(range(self.builder.scenario.ranks), self.job.optimizer_us)

    def _write_sharded(self) -> None:
        """Weights are gathered one layer ahead, forward and backward; gradients follow on the same stream.

        As PyTorch's FSDP does with its one communicator: gathers and scatters take turns as launched.
        """
        job = self.job
        passes = [(layer, True) for layer in range(job.layers)]
        passes += [(layer, False) for layer in reversed(range(job.layers))]
        ahead = self._gather(*passes[0])
        for place, (layer, forward) in enumerate(passes):
            gathered = ahead
            if place + 1 < len(passes):
                ahead = self._gather(*passes[place + 1])
            for work in gathered:
                self.builder.wait(work)
            us = job.forward_us if forward else 2 * job.forward_us
            for replica in range(self.ranks.dp):
                self.builder.compute(self.ranks.tensor(0, replica), us, job.jitter_us)
            if not forward:
                self.buckets += self._sharded("reduce_scatter", job.bucket_bytes, layer, "backward")
        for work in self.buckets:
            self.builder.wait(work)
        self.builder.compute(range(self.builder.scenario.ranks), job.optimizer_us)

    def _gather(self, layer: int, forward: bool) -> list[Work]:
        """The weights of a layer; all ranks' shards together are as long as its gradients."""
        size = max(1, self.job.bucket_bytes // self.ranks.dp)
        return self._sharded("all_gather", size, layer, "forward" if forward else "backward")

    def _sharded(self, op: str, size: int, layer: int, phase: str) -> list[Work]:
        operation = Operation(op=op, bytes=size, protocol=self.job.protocol)
        return [
            self.builder.launch(
                self.ranks.data(0, place), operation, GRADIENTS, group="dp", layer=layer, phase=phase
            )
            for place in range(self.ranks.tp)
        ]

    def _pass(self, stage: int, micro: int, forward: bool) -> None:
        """One microbatch through one stage of all replicas, one way."""
        job, ranks, builder = self.job, self.ranks, self.builder
        phase = "forward" if forward else "backward"
        us = job.forward_us if forward else 2 * job.forward_us
        for layer in range(job.layers):
            for replica in range(ranks.dp):
                mine = ranks.tensor(stage, replica)
                builder.compute(mine, us, job.jitter_us)
                if ranks.tp > 1 and job.tp_bytes:
                    reduce = Operation(op="all_reduce", bytes=job.tp_bytes, protocol=job.protocol)
                    builder.run(mine, reduce, group="tp", phase=phase, layer=layer)
            if ranks.dp > 1 and job.ep_bytes:
                exchange = Operation(op="all_to_all", bytes=job.ep_bytes)
                for part in ("dispatch", "combine"):
                    for place in range(ranks.tp):
                        builder.run(ranks.data(stage, place), exchange, group="ep", phase=part, layer=layer)
            if job.overlap and not forward and micro + 1 == job.microbatches:
                for bucket in range(
                    job.buckets * layer // job.layers, job.buckets * (layer + 1) // job.layers
                ):
                    self._bucket(stage, bucket)
        following = stage + 1 if forward else stage - 1
        if 0 <= following < ranks.pp:
            for replica in range(ranks.dp):
                self._hand_on(ranks.tensor(stage, replica), ranks.tensor(following, replica), phase)

    def _hand_on(self, mine: range, theirs: range, phase: str) -> None:
        """Activations or gradients to the next stage, which waits for them."""
        for src, dst in zip(mine, theirs, strict=True):
            pair = sorted((src, dst))
            send = Operation(
                op="send_recv", bytes=self.job.pp_bytes, root=pair.index(src), peer=pair.index(dst)
            )
            work = self.builder.launch(pair, send, HANDING_ON, group="pp", phase=phase)
            self.builder.programs[dst].append(Wait(work))

    def _bucket(self, stage: int, bucket: int) -> None:
        """Gradients of some layers, reduced among the ranks that hold the same weights."""
        if self.ranks.dp == 1:
            return
        job = self.job
        reduce = Operation(
            op="all_reduce", bytes=job.bucket_bytes, algorithm=job.algorithm, protocol=job.protocol
        )
        for place in range(self.ranks.tp):
            group = self.ranks.data(stage, place)
            self.buckets.append(self.builder.launch(group, reduce, GRADIENTS, group="dp", bucket=bucket))
