"""How fast machines hand over: the two noise profiles, and what a scenario says otherwise.

``fabric``: a data-centre GPU node with NICs that stamp in hardware; values assumed, of the order of NCCL's
own latency model (src/graph/tuning.cc). ``host``: a software stack on a loaded machine, no quieter than the
real Soft-RoCE captures of NCCL's net_ib (docs/synth.md says how that was measured).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from dpuflow.synth.scenario import Machine

PROFILES: Final[dict[str, dict[str, float]]] = {
    "fabric": {
        "copy_gbyte_s": 20.0,
        "step_us": 1.2,
        "launch_us": 4.0,
        "handover_us": 1.2,
        "handover_spread": 0.2,
        "proxy_us": 0.4,
        "stall_share": 0.0,
        "wake_share": 0.0,
        "stall_us": 0.0,
        "ack_us": 0.4,
        "ack_spread": 0.15,
        "repeat_share": 0.0,
        "packet_us": 0.0,
        "packet_spread": 0.0,
        "turn_us": 0.0,
        "turn_spread": 0.0,
    },
    "host": {
        "copy_gbyte_s": 0.5,
        "step_us": 20.0,
        "launch_us": 50.0,
        "handover_us": 400.0,
        "handover_spread": 1.3,
        "proxy_us": 40.0,
        "stall_share": 0.03,
        "wake_share": 0.15,
        "stall_us": 5000.0,
        "ack_us": 170.0,
        "ack_spread": 1.0,
        "repeat_share": 0.01,
        "packet_us": 90.0,
        "packet_spread": 1.0,
        "turn_us": 250.0,
        "turn_spread": 0.9,
    },
}


@dataclass(frozen=True)
class Timing:
    """Resolved values, ns."""

    copy_ns_per_byte: float
    step_ns: float
    launch_ns: float
    handover_ns: float
    spread: float
    proxy_ns: float
    stall_share: float
    wake_share: float
    stall_ns: float
    ack_ns: float
    ack_spread: float
    repeat_share: float
    packet_ns: float
    packet_spread: float
    turn_ns: float
    turn_spread: float

    @classmethod
    def of(cls, machine: Machine) -> Timing:
        """The profile's values where the scenario gives none."""
        profile = PROFILES[machine.profile]

        def value(name: str) -> float:
            given: Any = getattr(machine, name)
            return profile[name] if given is None else float(given)

        return cls(
            copy_ns_per_byte=1.0 / value("copy_gbyte_s"),
            step_ns=value("step_us") * 1e3,
            launch_ns=value("launch_us") * 1e3,
            handover_ns=value("handover_us") * 1e3,
            spread=value("handover_spread"),
            proxy_ns=value("proxy_us") * 1e3,
            stall_share=value("stall_share"),
            wake_share=value("wake_share"),
            stall_ns=value("stall_us") * 1e3,
            ack_ns=value("ack_us") * 1e3,
            ack_spread=value("ack_spread"),
            repeat_share=value("repeat_share"),
            packet_ns=value("packet_us") * 1e3,
            packet_spread=value("packet_spread"),
            turn_ns=value("turn_us") * 1e3,
            turn_spread=value("turn_spread"),
        )


_MAGIC: Final = 4 * exp(-0.5) / sqrt(2.0)
"""Of ``random.normalvariate``: Kinderman and Monahan, 1977."""


def lognormal(random: Random, median: float, spread: float) -> Callable[[], float]:
    """Draws around a median: ``random.lognormvariate(log(median), spread)``, to the last bit, without its
    three calls; a job draws millions."""
    if median <= 0:
        return lambda: 0.0
    middle, uniform = log(median), random.random

    def draw() -> float:
        while True:
            first, second = uniform(), 1.0 - uniform()
            value = _MAGIC * (first - 0.5) / second
            if value * value / 4.0 <= -log(second):
                return exp(middle + value * spread)

    return draw
