"""What an analysis hands to reports and users: the result format, ``dpuflow.analysis/1``, as dataclasses.

In: nothing but what the stages found. Out: objects that ``reports`` only format. Field names, their
order and their meaning are the result format's own (docs/analysis.md); ``captures`` and ``clocks`` are
the bundles of ``schema.tables``. Its closed lists of words are in ``tokens``, its
lists of figures in ``figures``. Ids are positions in the list that holds the row. All times are integer
nanoseconds on the reference clock; None stands for what is not known, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dpuflow.quantities import count, listed, name_of
from dpuflow.results.figures import (
    AllReduceWhatIf,
    Attribution,
    Decode,
    LossTax,
    NetworkCost,
    Operation,
    Tax,
)
from dpuflow.results.tokens import (
    Algorithm,
    Bound,
    Cause,
    OpToken,
    Protocol,
    Severity,
    Steadiness,
    Unjudged,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dpuflow.schema.tables import CaptureInfo, Clock

T = TypeVar("T")

SHOWN = 3
"""Messages that a finding shows as evidence."""


@dataclass(slots=True)
class Endpoint:
    """What sends and receives on the fabric; ``address`` is the first of ``addresses``."""

    id: int
    address: str
    addresses: list[str]
    mac: str | None = None
    rank: int | None = None
    label: str | None = None  # host and GPU, from a rank map
    node: int | None = None  # endpoints of one node have the same number: that of the first of them
    role: Literal["client", "front_end"] | None = None  # of an inference service; a client is no rank
    host: str | None = None  # its node's name: of a rank map, or what its NICs' captures are named after


@dataclass(slots=True)
class Flow:
    """One direction of a conversation; ``dest_qp`` for RoCE, ``ports`` for TCP, the other is None.

    ``cnp``, ``nak`` and ``rnr`` are RoCE's: None for TCP.
    """

    id: int
    src: int
    dst: int
    transport: Literal["roce", "tcp"]
    dest_qp: int | None
    ports: tuple[int, int] | None
    packets: int
    bytes: int
    messages: int
    retransmitted: int
    ecn_marked: int
    cnp: int | None
    nak: int | None
    rnr: int | None
    spurious: int | None = None  # of the retransmitted, what the receiver had already; None for RoCE


@dataclass(slots=True)
class Group:
    """The endpoints that take part in the same collectives."""

    id: int
    endpoints: list[int]
    kind: Literal["tp", "dp", "pp", "ep"] | None = None


@dataclass(slots=True)
class Phase:
    """A part of a collective, such as the reduce_scatter of an all_reduce."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class RankEntry:
    """One endpoint in one collective; ``error_ns`` is the half-width of a 95 % interval.

    Where ``bound`` is at_most or at_least, ``lateness_ns`` is that bound and ``enter_ns`` the matching
    one; where it is unobservable all three are None. ``why`` names the rule and the packets.
    """

    endpoint: int
    enter_ns: int | None
    leave_ns: int | None
    lateness_ns: int | None
    error_ns: int | None
    bound: Bound
    cause: Cause
    why: str
    node: int | None = None  # where only the node of a GPU can be told: it; ``endpoint`` is null in JSON


@dataclass(slots=True)
class Collective:
    """One instance of an operation. ``bytes`` is the buffer one rank passed to the call."""

    id: int
    group: int
    op: OpToken
    algorithm: Algorithm
    alternatives: list[Algorithm]
    root: int | None
    bytes: int | None
    wire_bytes: int
    start_ns: int
    end_ns: int
    confidence: float
    complete: bool
    phases: list[Phase]
    ranks: list[RankEntry]
    op_alternatives: list[OpToken] = field(default_factory=list)  # other operations with the same packets
    protocol: Protocol | None = None  # NCCL's
    bytes_between: tuple[int, int] | None = None  # least and most, where the packets leave some open


@dataclass(slots=True)
class Told:
    """In how many of a rank's collectives its time is exact, bounded, and not told.

    What messages outside all collectives would have made counts as not told."""

    exact: int = 0
    bounded: int = 0
    untold: int = 0


@dataclass(slots=True)
class Lateness:
    """One endpoint over the whole analysis.

    Shares are of the ``collectives`` in which its lateness is known. ``caused_wait_ns`` is in
    rank-nanoseconds. ``since_ns``: the onset, None if from the start. ``perhaps_last``: in so many
    collectives beside those it, or one that it waits for, is likely to have been the last, by more than the
    noise, and nothing shows which; ``perhaps_ns``: later than the others by this much, in the median.
    ``own_share``: late by its own doing, of the same collectives; the rest of ``late_share`` it was handed.
    ``late_ns``, ``late_most_ns``: how late it was where it was late, median and most; ``late_bound`` is
    at_least where bounds among these leave the median open.
    ``detectable_ns``: the smallest lateness a step that would have been named with 95 % probability; None
    where none would. ``confidence``: how often verdicts that rest on as much as this one are right; None
    where nothing is claimed. ``together``: endpoints of its node, itself among them, that were late in the
    same operations by as much, so that one of them may have kept the others; empty where it was alone.
    ``unjudged``: why its verdict is unknown; else None. It came late at times, which is neither a habit nor
    nothing (incidents); the network, or messages of no collective, may have kept it (excused); lateness that
    matters would be hidden; its times are not_told; or ranks without a capture may have kept it (unseen).
    """

    endpoint: int
    collectives: int
    late_share: float | None
    last_share: float | None
    median_ns: int | None
    p99_ns: int | None
    caused_wait_ns: int | None
    verdict: Verdict
    cause: Cause
    steadiness: Steadiness | None = None
    since_ns: int | None = None
    relative_to: list[int] | None = None
    perhaps_last: int = 0
    perhaps_ns: int | None = None
    node: int | None = None  # as of RankEntry
    told: Told = field(default_factory=Told)
    detectable_ns: int | None = None
    own_share: float | None = None
    late_ns: int | None = None
    late_most_ns: int | None = None
    late_bound: Literal["exact", "at_least"] | None = None
    confidence: float | None = None
    address: str | None = None  # the endpoint's, or the node's first
    together: list[int] = field(default_factory=list)
    unjudged: Unjudged | None = None


@dataclass(slots=True)
class Parts:
    """Where a step's time went, ns; keys are endpoints (``in_node``: nodes), as text.

    What is unexplained is no rank's, link's or node's that anything in the capture shows."""

    work: dict[str, int] = field(default_factory=dict)
    library: int = 0
    transfer: int = 0
    network: int = 0
    credit: int = 0
    in_node: dict[str, int] = field(default_factory=dict)
    unexplained: int = 0


@dataclass(slots=True)
class Account:
    """The critical path of a job's typical step; ``parts`` add up to ``step_ns``.

    ``group``: that of the step's last collective. ``waited``: of the work of these endpoints, what they
    worked longer than their peers, who waited. ``unexplained_share``: of the time of all steps.
    ``exposed_ns``: of ``step_ns``, communication that no work hides.
    """

    group: int
    steps: int
    step_ns: int
    parts: Parts
    waited: dict[str, int] = field(default_factory=dict)
    unexplained_share: float = 0.0
    exposed_ns: int = 0


@dataclass(slots=True)
class Edge:
    """Lateness of ``to`` minus that of ``from_``, told on one clock alone. ``from`` in JSON."""

    from_: int
    to: int
    collectives: int
    median_ns: int
    error_ns: int | None


@dataclass(slots=True)
class WhatIf:
    """Step time, and what it would be without the lateness of ``endpoint``.

    The median of steps; the mean for an endpoint that is late now and then only.
    """

    endpoint: int
    step_ns: int
    step_without_ns: int


@dataclass(slots=True)
class Steps:
    """What a job repeats: a training step, a generated token. Times are medians over ``count`` of them.

    ``collectives``: how many operations of one endpoint make a step. ``kind`` is decode or prefill where
    the structure shows it, else None; ``layers`` and ``tokens_per_s`` are told of decode alone.
    """

    endpoints: list[int]
    count: int
    collectives: int
    step_ns: int
    p99_ns: int
    start_ns: int
    end_ns: int
    kind: Literal["decode", "prefill"] | None = None
    layers: int | None = None
    tokens_per_s: float | None = None


@dataclass(slots=True)
class Pipeline:
    """A chain of stages, the first one first; per stage how long it works for one microbatch, in the median.

    None where no packet shows it: what a stage computes without sending. ``late``: stages that work longer
    than the others as a habit. Of ``steps`` that tell, ``late_steps`` are those in which a stage worked
    longer than it does, or its peers, beyond chance; by ``late_step_ns`` in the median.
    """

    stages: list[int]
    schedule: Literal["gpipe", "1f1b", "forward", "interleaved"] | None
    microbatches: int | None
    forward_ns: list[int | None]
    backward_ns: list[int | None]
    idle_share: list[float | None]
    late: list[int] = field(default_factory=list)
    steps: int = 0
    late_steps: list[int] = field(default_factory=list)
    late_step_ns: list[int | None] = field(default_factory=list)


@dataclass(slots=True)
class Transfer:
    """Pages that ``src`` wrote into the memory of ``dst``, or ``dst`` read from that of ``src``, in one go.

    ``page_bytes``: the size of most pages, None where less than half have one. ``busy_ns``: how long some
    page was under way; ``bits_per_s`` over that time. ``likely``: what the bytes are, as far as what follows
    speaks for it. ``first_token_ns``: when ``dst`` entered its next collective;
    ``wait_before_first_token_ns``: how long it had done nothing before, from the transfer's start at the
    earliest; None where it had not waited. ``path``: what the network did to it. ``why`` says what
    ``likely`` and the wait rest on."""

    id: int
    src: int
    dst: int
    verb: Literal["write", "read"]
    start_ns: int
    end_ns: int
    bytes: int
    pages: int
    page_bytes: int | None
    busy_ns: int
    bits_per_s: float | None
    retransmitted: int
    ecn_marked: int
    path: Literal["slow", "lossy", "marked"] | None
    likely: Literal["kv_cache"] | None
    first_token_ns: int | None
    wait_before_first_token_ns: int | None
    complete: bool
    why: str


@dataclass(slots=True)
class Request:
    """What a client asked on ``flow`` and what came back; None where it was not seen.

    ``sent_ns``: first packet of the prompt; ``first_ns``, ``last_ns``: first answer left, last one was there.
    ``tokens``: bursts of the answer; ``gap_ns``, ``gap_p99_ns``: between them. ``held_ns``: by lost packets.
    ``steps``: of the job's steps, those that ended between the first and the last answer; None without steps.
    ``complete`` False: it began before or ended after the capture.
    """

    id: int
    flow: int
    client: int
    server: int
    prompt_bytes: int | None
    answer_bytes: int
    sent_ns: int | None
    first_ns: int | None
    last_ns: int | None
    tokens: int
    gap_ns: int | None
    gap_p99_ns: int | None
    held_ns: int
    steps: int | None
    complete: bool


@dataclass(slots=True)
class Evidence:
    """Frames ``packets`` (first and last, counted from 1 as Wireshark does) of a capture.

    ``unopenable``: why no file can be opened at them; else None.
    """

    capture: int
    packets: tuple[int, int]
    filter: str
    unopenable: str | None = None


@dataclass(slots=True)
class Part:
    """A finding that another one explains."""

    condition: str
    endpoints: list[int]
    summary: str
    confidence: float | None = None  # None in results from before it was kept
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(slots=True)
class Finding:
    """A named condition, with what else would explain it and what to do about it.

    ``cost_ns``: what it took, in the unit of its condition (docs/runbook.md), None where that is not told;
    ``cost_share``: of the time that it affected, which severity follows from. ``consists_of``: what it
    explains, and what is no finding of its own for that.
    """

    id: int
    condition: str
    runbook: str
    endpoints: list[int]
    start_ns: int | None
    end_ns: int | None
    severity: Severity
    confidence: float
    summary: str
    advice: str
    alternatives: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    cost_ns: int | None = None
    cost_share: float | None = None
    consists_of: list[Part] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)  # of ``endpoints``


@dataclass(slots=True)
class Judged:
    """Whether a condition was found, was not, or could not be judged, and why not.

    ``reason`` also says what of it could not be, where it is not found."""

    condition: str
    state: Literal["found", "not_found", "not_judged"]
    reason: str | None = None


class Rows(list[T]):
    """A list of the result that is a table, too, with the columns of ``--parquet`` (docs/queries.md)."""

    __slots__ = ("name", "of")

    def __init__(self, rows: Iterable[T] = (), name: str = "", of: Sequence[Collective] = ()) -> None:
        super().__init__(rows)
        self.name, self.of = name, of

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (list(self), self.name, self.of)

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table``. Raises MissingError where pyarrow is not installed."""
        return _reports("parquet").table_of(self)

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``, of types that know missing values. Raises MissingError without pandas."""
        return _reports("frames").to_pandas(self)

    def to_polars(self) -> Any:
        """A ``polars.DataFrame``. Raises MissingError where polars is not installed."""
        return _reports("frames").to_polars(self)


@dataclass(slots=True, repr=False)
class Analysis:
    """A whole result. ``start_ns``, ``end_ns``: what the captures tied to the reference clock span."""

    captures: list[CaptureInfo] = field(default_factory=list)
    clocks: list[Clock] = field(default_factory=list)
    endpoints: list[Endpoint] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    lateness: list[Lateness] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    what_if: list[WhatIf] = field(default_factory=list)
    steps: list[Steps] = field(default_factory=list)
    accounts: list[Account] = field(default_factory=list)
    pipelines: list[Pipeline] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    attribution: list[Attribution] = field(default_factory=list)
    all_reduce_what_if: list[AllReduceWhatIf] = field(default_factory=list)
    tax: list[Tax] = field(default_factory=list)
    loss_tax: list[LossTax] = field(default_factory=list)
    decode: list[Decode] = field(default_factory=list)
    network_cost: list[NetworkCost] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    start_ns: int | None = None
    end_ns: int | None = None
    messages: Any = field(default=None, metadata={"saved": False})
    """All messages (``message_list.Messages``) where they were asked for; no part of the format."""

    def __repr__(self) -> str:
        """``<Analysis: 27 collectives of 4 endpoints; late: 10.77.0.3 (node2)>``."""
        late = [name_of(self.endpoints[r.endpoint]) for r in self.lateness if r.verdict == "late"]
        calls = count(sum(each.op != "send_recv" for each in self.collectives), "collective")
        of = count(len(self.lateness), "endpoint")
        return f"<Analysis: {calls} of {of}; late: {listed(late) if late else 'none'}>"

    def __setattr__(self, name: str, value: Any) -> None:
        """Lists are tables, too."""
        object.__setattr__(self, name, Rows(value, name) if type(value) is list else value)

    @property
    def entries(self) -> Rows[RankEntry]:
        """The ``ranks`` of all collectives, one after the other: a table with a column ``collective``."""
        return Rows((entry for each in self.collectives for entry in each.ranks), "entries", self.collectives)

    @property
    def plot(self) -> Any:
        """The page's own figures: ``plot.timeline()``, ``.lateness()``, ``.ring(collective)``."""
        return _reports("html.notebook").Figures(self)

    def _repr_html_(self) -> str:
        """The first screen of the page, for notebooks."""
        screen: str = _reports("html.notebook").first_screen(self)
        return screen


def _reports(name: str) -> Any:
    """What shows a result, loaded when it is asked for: nothing here knows it."""
    return import_module(f"dpuflow.reports.{name}")
