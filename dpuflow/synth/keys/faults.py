"""Keys of `faults`: what goes wrong, kind by kind."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import ClassVar, Literal

from dpuflow.settings import setting


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
class Churn(Fault):
    """A rank registers its memory anew each time: keys are new, and nothing begins before that is done.

    For every operation where buffers are registered, and for every cache that is moved into its memory
    (write) or out of it (read).
    """

    rank: int = setting(MISSING, "which rank", low=0)
    us: float = setting(MISSING, "what that takes, us", low=0)
    from_iteration: int = setting(0, "first iteration", low=0)


@dataclass(kw_only=True)
class SlowGpu(Fault):
    """All that a GPU computes takes longer: one that is throttled, or work that grew."""

    rank: int | None = setting(None, "which rank; all of them if none is named", low=0)
    factor: float = setting(MISSING, "so many times as long", low=0)
    from_iteration: int = setting(0, "first iteration", low=0)


@dataclass(kw_only=True)
class Stop:
    """Common to what makes the job stand still while captures go on."""

    rank: int = setting(MISSING, "which rank", low=0)
    iteration: int = setting(MISSING, "in which iteration", low=0)
    us: float = setting(200_000.0, "for how long captures go on after that, us", low=0)


@dataclass(kw_only=True)
class Hang(Stop, Fault):
    """A rank takes no part from an iteration on: its peers wait in their next operation."""


@dataclass(kw_only=True)
class Desync(Stop, Fault):
    """A rank passes another size to an iteration's first operation, and takes no part after it."""

    bytes: int = setting(MISSING, "what it passes", low=1)


@dataclass(kw_only=True)
class EarlyStop(Fault):
    """A replica has nothing more to do from an iteration on, while the others go on."""

    rank: int = setting(MISSING, "one of the replica's ranks", low=0)
    iteration: int = setting(MISSING, "from which iteration on", low=1)


@dataclass(kw_only=True)
class SlowInput(Fault):
    """A service's ranks begin a prompt late: copies to the device, tokenising, scheduling."""

    us: float = setting(MISSING, "how much later, us", low=0)
    from_us: float = setting(0.0, "of prompts from then on, us from the start", low=0)


@dataclass(kw_only=True)
class Nvlink(Fault):
    """The GPUs of a node hand on to each other slowly."""

    node: int = setting(MISSING, "which node", low=0)
    gbyte_s: float = setting(MISSING, "how fast, GB/s", low=0.001)


@dataclass(kw_only=True)
class SlowPcie(Fault):
    """A node's memory or bus is slow: what its NIC is asked for by RDMA READ it can send only later."""

    node: int = setting(MISSING, "which node", low=0)
    us: float = setting(MISSING, "by how much each answer begins later, us", low=0)


@dataclass(kw_only=True)
class Loss(Fault):
    """The network loses frames."""

    src: int | None = setting(None, "only those from this node", low=0)
    dst: int | None = setting(None, "only those to this node", low=0)
    share: float = setting(MISSING, "share of the frames", low=0, high=0.2)
    traffic: str = setting(
        "all",
        "whose: everyone's, between the nodes, of clients both ways, from them, or to them",
        choices=("all", "fabric", "clients", "from_clients", "to_clients"),
    )
    from_us: float = setting(0.0, "from then on, us from the start", low=0)
    until_us: float = setting(0.0, "until then; 0: to the end", low=0)


@dataclass(kw_only=True)
class Reorder(Fault):
    """Frames are held up on their way, and those behind them overtake.

    Nothing is lost by it: NICs put in place what comes out of order (adaptive routing), TCP keeps it.
    """

    share: float = setting(MISSING, "share of the frames", low=0, high=1)
    us: float = setting(MISSING, "how long at the most, us; drawn from 0 to this", low=0)


@dataclass(kw_only=True)
class SlowLink(Fault):
    """A node's link runs below its rate: frames queue in the switch (down) or the NIC (up)."""

    node: int | Literal["client"] = setting(
        MISSING, "which node; client: the link of each client, apart from the ranks'", low=0
    )
    gbps: float = setting(MISSING, "its rate, Gbit/s", low=0.001)
    where: str = setting("both", "direction, as the node sees it", choices=("up", "down", "both"))
    from_us: float = setting(0.0, "from then on, us from the start", low=0)
    until_us: float = setting(0.0, "until then; 0: to the end", low=0)


@dataclass(kw_only=True)
class Flap(Fault):
    """A node's link goes down and up again: all frames of that time are lost."""

    node: int = setting(MISSING, "which node", low=0)
    at_us: float = setting(MISSING, "first time, us from the start", low=0)
    us: float = setting(MISSING, "how long it is down, us", low=0)
    times: int = setting(1, "how often", low=1)
    every_us: float = setting(0.0, "from one time to the next, us", low=0)


@dataclass(kw_only=True)
class Pause(Fault):
    """A node's NIC stops the switch (PFC): frames queue; beyond half a buffer its senders stop.

    They can then send to nobody else either: head-of-line blocking.
    """

    node: int = setting(MISSING, "which node", low=0)
    at_us: float = setting(MISSING, "first time, us from the start", low=0)
    us: float = setting(MISSING, "how long it makes the switch wait, us", low=0)
    times: int = setting(1, "how often", low=1)
    every_us: float = setting(0.0, "from one time to the next, us", low=0)


@dataclass(kw_only=True)
class CrossTraffic(Fault):
    """Other jobs' traffic comes the same way to a node: its frames share the switch's queue towards it.

    They leave the way before the node's own port, and so are in no capture. Several hosts that send at once
    (incast) come faster than the link.
    """

    node: int = setting(MISSING, "which node", low=0)
    gbps: float = setting(MISSING, "how fast it comes, all senders together, Gbit/s", low=0.001)
    at_us: float = setting(MISSING, "first time, us from the start", low=0)
    us: float = setting(MISSING, "how long it comes, us", low=0)
    times: int = setting(1, "how often", low=1)
    every_us: float = setting(0.0, "from one time to the next, us", low=0)


Fault.KINDS = {
    "gpu_late": GpuLate,
    "slow_host": SlowHost,
    "slow_receiver": SlowReceiver,
    "churn": Churn,
    "slow_gpu": SlowGpu,
    "hang": Hang,
    "desync": Desync,
    "early_stop": EarlyStop,
    "slow_input": SlowInput,
    "nvlink": Nvlink,
    "slow_pcie": SlowPcie,
    "loss": Loss,
    "reorder": Reorder,
    "slow_link": SlowLink,
    "flap": Flap,
    "pause": Pause,
    "cross_traffic": CrossTraffic,
}
