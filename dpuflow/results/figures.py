"""Lists of figures for dashboards and schedulers: what operations, communication and loss take.

Times are nanoseconds; None stands for what is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpuflow.results.tokens import Algorithm, OpToken, Protocol


@dataclass(slots=True)
class Operation:
    """A class of collectives: how many, how large, how long.

    ``p50_ns``, ``p99_ns``: from the first entry to the last exit; ``after_last_ns``: from the last entry,
    in the median, None where entries are not known. ``bus_bits_per_s``: over that, as nccl-tests count it.
    """

    group: int
    op: OpToken
    algorithm: Algorithm
    protocol: Protocol | None
    bytes: int | None
    count: int
    wire_bytes: int
    p50_ns: int
    p99_ns: int
    after_last_ns: int | None
    bus_bits_per_s: float | None


@dataclass(slots=True)
class Attribution:
    """What a class of collectives takes its time for: the transfer, or that its ranks come apart.

    ``skew_share``: of its time, from the first entry to the last; ``low_share`` and ``high_share`` hold that
    with 95 % confidence. ``zero_skew_ns``: what the rest takes in the quarter whose ranks come closest.
    """

    group: int
    op: OpToken
    bytes: int | None
    count: int
    zero_skew_ns: int
    skew_share: float
    low_share: float
    high_share: float
    verdict: str


@dataclass(slots=True)
class AllReduceWhatIf:
    """What other algorithms would have made of a group's ring all_reduces of one size.

    ``alpha_ns`` a step and ``beta_ns_per_kib``: fitted to ``after_last_ns`` of all sizes, None where those
    make no line. Gains: so many times as quick, between ``low`` and ``high`` (docs/analysis.md: what these
    hold); None where the fit's error is too large. ``ranks`` by the bytes on the wire, ``per_node`` of them
    to a node.
    """

    group: int
    protocol: Protocol | None
    ranks: int | None
    per_node: int | None
    bytes: int
    count: int
    after_last_ns: int
    alpha_ns: int | None
    alpha_error_ns: int | None
    beta_ns_per_kib: float | None
    beta_error_ns_per_kib: float | None
    doubling_gain: float | None
    doubling_low: float | None
    doubling_high: float | None
    two_level_gain: float | None
    two_level_low: float | None
    two_level_high: float | None


@dataclass(slots=True)
class Tax:
    """What a typical step of a job pays for communication (of its account, so of the critical path).

    ``exposed_ns``: no work hides it; ``overlapped_ns``: some does; ``waiting_ns``: for ranks that work
    longer; ``network_ns``: loss, marks, slow links, credits. ``gain_at_most``: were all that is exposed
    gone, the job would be so many times as quick.
    """

    group: int
    steps: int
    step_ns: int
    exposed_ns: int
    overlapped_ns: int
    waiting_ns: int
    network_ns: int
    unexplained_ns: int
    gain_at_most: float | None


@dataclass(slots=True)
class LossTax:
    """What loss recovery takes of a job's steps, at the most: ``tail_share`` of the 99th percentile,
    ``step_share`` of all; what tolerating these losses would save."""

    endpoints: list[int]
    steps: int
    held_steps: int
    p99_ns: int
    p99_without_ns: int
    tail_share: float
    step_share: float


@dataclass(slots=True)
class Decode:
    """Tokens of a job: ``hidden_bytes`` of each all_reduce (batch times hidden size), None where they differ.

    ``gap_ns``, ``gap_p99_ns``: between tokens, prompts between them included; ``prefill_ns_per_token``: how
    much of that prompts are.
    """

    endpoints: list[int]
    tokens: int
    prefills: int
    layers: int
    hidden_bytes: int | None
    step_ns: int
    gap_ns: int | None
    gap_p99_ns: int | None
    tokens_per_s: float | None
    prefill_ns_per_token: int


@dataclass(slots=True)
class NetworkCost:
    """What messages from ``src`` to ``dst`` of more than half of ``bytes_up_to`` took, from their first
    packet at the sender to their last at the receiver; ``last_ns``: when the last of them came."""

    src: int
    dst: int
    bytes_up_to: int
    count: int
    p50_ns: int
    p99_ns: int
    bits_per_s: float | None
    last_ns: int
