"""Keys of `clients` and `observation`: what runs beside the job, and what is captured of both."""

from __future__ import annotations

from dataclasses import dataclass

from dpuflow.settings import setting


@dataclass(kw_only=True)
class Clients:
    """North-south traffic beside the job: clients of an inference service, over TCP."""

    hosts: int = setting(0, "clients, each a host of its own; 0: no such traffic", low=0, high=250)
    sessions: int = setting(2, "connections of each", low=1, high=100)
    node: int = setting(0, "whose first NIC the front end answers on", low=0)
    requests: int = setting(5, "of each session", low=1)
    until_us: float = setting(0.0, "of a service: no session asks from then until resume_us; 0: never", low=0)
    resume_us: float = setting(0.0, "when sessions ask again, us", low=0)
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
