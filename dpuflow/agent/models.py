"""What the API and webhooks say, as types: the rows of the result format with the agent's additions.

In: the board's objects. Out: dataclasses that ``msgspec`` turns into JSON and into the schemas of the OpenAPI
document. Rows keep the names and meanings of ``dpuflow.analysis/1`` (docs/analysis.md); ids are positions in
the lists of the same answer. Keys that the format lacks come after its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dpuflow.agent.board import Health
from dpuflow.agent.tally import group_name
from dpuflow.results import SHOWN, Collective, Endpoint, Finding, Pipeline, Steps, Told, Transfer, WhatIf
from dpuflow.results.figures import NetworkCost
from dpuflow.results.tokens import Algorithm, Cause, OpToken, Steadiness, Unjudged, Verdict
from dpuflow.schema.rows import ANALYSIS_ID

if TYPE_CHECKING:
    from dpuflow.agent.board import FindingState, Window
    from dpuflow.agent.rolling import GroupState, LatenessState
    from dpuflow.results import Analysis

NOTICE_ID = "dpuflow.notice/1"

Fidelity = Literal["packets", "messages", "sampled"]
FindingEvent = Literal["finding_opened", "finding_changed", "finding_closed"]


@dataclass(slots=True)
class Operation:
    """How often a group did an operation."""

    op: OpToken
    algorithm: Algorithm
    count: int


@dataclass(slots=True)
class GroupRow:
    """A group. ``name`` is the same at every agent and after every restart, and the label of its metrics."""

    id: int
    endpoints: list[int]
    kind: Literal["tp", "dp", "pp", "ep"] | None
    name: str
    collectives: int | None = None
    wire_bytes: int | None = None
    operations: list[Operation] = field(default_factory=list)
    last_ns: int | None = None
    median_ns: int | None = None


@dataclass(slots=True)
class CollectiveRow(Collective):
    """A collective; ``key`` is what ``after`` takes, ``late`` lists endpoints beyond the group's noise."""

    key: str = ""
    window: int = 0
    late: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TransferRow(Transfer):
    """A transfer of one-sided pages; ``key`` is what ``after`` takes."""

    key: str = ""
    window: int = 0


@dataclass(slots=True)
class LatenessRow:
    """One endpoint over the windows held; the verdict is that of the window ending at ``judged_ns``."""

    endpoint: int
    collectives: int
    late_share: float | None
    last_share: float | None
    median_ns: int | None
    p99_ns: int | None
    caused_wait_ns: int | None
    verdict: Verdict
    cause: Cause
    steadiness: Steadiness | None
    since_ns: int | None
    relative_to: list[int] | None
    perhaps_last: int
    perhaps_ns: int | None
    node: int | None
    told: Told
    detectable_ns: int | None
    own_share: float | None
    late_ns: int | None
    late_most_ns: int | None
    late_bound: Literal["exact", "at_least"] | None
    confidence: float | None
    address: str | None
    together: list[int]
    unjudged: Unjudged | None
    judged_ns: int


class EdgeRow(msgspec.Struct, rename={"from_": "from"}):
    """Lateness of ``to`` minus that of ``from``, told on one clock alone."""

    from_: int
    to: int
    collectives: int
    median_ns: int
    error_ns: int | None


@dataclass(slots=True)
class FindingRow(Finding):
    """A finding. ``key`` stays the same as long as the condition lasts; ``since_ns`` is its onset."""

    key: str = ""
    active: bool = True
    since_ns: int | None = None
    first_ns: int = 0
    last_ns: int = 0


@dataclass(slots=True)
class WindowRow:
    """A window in short: the time that it newly settled, and what was in it."""

    number: int
    start_ns: int
    end_ns: int
    collectives: int
    late: int
    packets: int
    bytes: int
    losses: dict[str, int]
    fidelity: Fidelity
    retransmitted: int = 0
    ecn_marked: int = 0


class Groups(msgspec.Struct, kw_only=True):
    """The groups seen in the windows held, most recently active first."""

    schema: str = ANALYSIS_ID
    endpoints: list[Endpoint]
    groups: list[GroupRow]


class Collectives(msgspec.Struct, kw_only=True):
    """Collectives in the order in which they were settled.

    ``next`` goes into ``after`` for those that follow, now or later; ``more`` tells whether there are any
    yet; ``missed`` that some between ``after`` and the first one here are held no longer.
    """

    schema: str = ANALYSIS_ID
    endpoints: list[Endpoint]
    groups: list[GroupRow]
    collectives: list[CollectiveRow]
    next: str | None
    more: bool
    missed: bool


class Transfers(msgspec.Struct, kw_only=True):
    """Transfers of one-sided pages (KV caches among them), paged as ``Collectives`` are."""

    schema: str = ANALYSIS_ID
    endpoints: list[Endpoint]
    transfers: list[TransferRow]
    next: str | None
    more: bool
    missed: bool


class LatenessAnswer(msgspec.Struct, kw_only=True):
    """Who was late over the windows from ``start_ns`` to ``end_ns``, the costliest first."""

    schema: str = ANALYSIS_ID
    start_ns: int | None
    end_ns: int | None
    endpoints: list[Endpoint]
    lateness: list[LatenessRow]
    edges: list[EdgeRow]


class StepsAnswer(msgspec.Struct, kw_only=True):
    """What jobs repeat, that without a rank's lateness, and pipelines: of the last window that has any."""

    schema: str = ANALYSIS_ID
    end_ns: int | None
    endpoints: list[Endpoint]
    steps: list[Steps]
    what_if: list[WhatIf]
    pipelines: list[Pipeline]


class NetworkCostAnswer(msgspec.Struct, kw_only=True):
    """What messages took over the windows held: of each pair and size the last window that has any.

    ``end_ns`` is when the last window ended, so that ``last_ns`` tells how old a row is.
    """

    schema: str = ANALYSIS_ID
    end_ns: int | None
    endpoints: list[Endpoint]
    network_cost: list[NetworkCost]


class Findings(msgspec.Struct, kw_only=True):
    """Findings, newest first."""

    schema: str = ANALYSIS_ID
    endpoints: list[Endpoint]
    findings: list[FindingRow]


class Windows(msgspec.Struct, kw_only=True):
    """The windows held, newest first."""

    windows: list[WindowRow]


class Notice(msgspec.Struct, kw_only=True):
    """What webhooks and events say of a finding. ``finding.endpoints`` are places in ``endpoints``."""

    schema: str = NOTICE_ID
    event: FindingEvent
    time_ns: int
    sender: str
    endpoints: list[Endpoint]
    finding: FindingRow


class State(msgspec.Struct, kw_only=True):
    """Whether the agent is alive or ready, and why not."""

    status: Literal["ok", "failing"]
    reasons: list[str] = []


@dataclass(frozen=True, slots=True)
class HealthAnswer(Health):
    """How the agent itself fares: all that the board has of it, and who listens."""

    version: str = ""
    sender: str = ""
    event_clients: int = 0
    webhooks: dict[str, dict[str, int]] = field(default_factory=dict)  # by name: outcomes, retries, queued


class Problem(msgspec.Struct, kw_only=True):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str | None = None


class Endpoints:
    """The list of endpoints of one answer: an id for each address, in the order of first mention."""

    def __init__(self) -> None:
        self.rows: list[Endpoint] = []
        self._ids: dict[str, int] = {}

    def id(self, address: str, rank: int | None = None, label: str | None = None) -> int:
        """The id of ``address``; what is known of it is filled in."""
        at = self._ids.setdefault(address, len(self.rows))
        if at == len(self.rows):
            self.rows.append(Endpoint(at, address, [address]))
        row = self.rows[at]
        row.rank = rank if rank is not None else row.rank
        row.label = label if label is not None else row.label
        return at

    def of(self, analysis: Analysis, number: int) -> int:
        """The id here of endpoint ``number`` of ``analysis``."""
        known = analysis.endpoints[number]
        at = self.id(known.address, known.rank, known.label)
        self.rows[at].addresses = known.addresses
        self.rows[at].mac = known.mac
        return at


def group_row(state: GroupState, number: int, endpoints: Endpoints) -> GroupRow:
    """A group of the board as a row of an answer."""
    return GroupRow(
        id=number,
        endpoints=[
            endpoints.id(address, rank) for address, rank in zip(state.addresses, state.ranks, strict=True)
        ],
        kind=state.kind,  # type: ignore[arg-type]
        name=group_name(state.addresses),
        collectives=state.collectives,
        wire_bytes=state.bytes,
        operations=[Operation(*each) for each in state.operations],  # type: ignore[arg-type]
        last_ns=state.last_ns,
        median_ns=state.median_ns,
    )


def lateness_row(state: LatenessState, endpoints: Endpoints) -> LatenessRow:
    """An endpoint of the board as a row of an answer."""
    others = state.relative_to
    return LatenessRow(
        endpoint=endpoints.id(state.address, state.rank, state.label),
        collectives=state.collectives,
        late_share=state.late_share,
        last_share=state.last_share,
        median_ns=state.median_ns,
        p99_ns=state.p99_ns,
        caused_wait_ns=state.caused_wait_ns,
        verdict=state.verdict,
        cause=state.cause,
        steadiness=state.steadiness,
        since_ns=state.since_ns,
        relative_to=None if others is None else [endpoints.id(address) for address in others],
        perhaps_last=state.perhaps_last,
        perhaps_ns=state.perhaps_ns,
        node=None,
        told=state.told,
        detectable_ns=state.detectable_ns,
        own_share=state.own_share,
        late_ns=state.late_ns,
        late_most_ns=state.late_most_ns,
        late_bound=state.late_bound,
        confidence=state.confidence,
        address=state.address,
        together=[endpoints.id(address) for address in state.together],
        unjudged=state.unjudged,
        judged_ns=state.judged_ns,
    )


def finding_row(state: FindingState, number: int, endpoints: Endpoints) -> FindingRow:
    """A finding of the board as a row of an answer."""
    inner = state.finding
    ranks = state.ranks or (None,) * len(state.addresses)
    labels = state.labels or (None,) * len(state.addresses)
    return FindingRow(
        id=number,
        condition=state.condition,
        runbook=inner.runbook,
        endpoints=[endpoints.id(*each) for each in zip(state.addresses, ranks, labels, strict=True)],
        start_ns=inner.start_ns,
        end_ns=inner.end_ns,
        severity=state.severity,
        confidence=inner.confidence,
        summary=inner.summary,
        advice=inner.advice,
        alternatives=inner.alternatives,
        evidence=inner.evidence[:SHOWN],
        key=state.id,
        active=state.active,
        since_ns=state.since_ns,
        first_ns=state.first_ns,
        last_ns=state.last_ns,
    )


def window_row(window: Window) -> WindowRow:
    """A window in short."""
    return WindowRow(
        number=window.number,
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        collectives=len(window.analysis.collectives),
        late=len(window.late),
        packets=sum(row.packets for row in window.traffic),
        bytes=sum(row.bytes for row in window.traffic),
        losses=dict(window.losses),
        fidelity=window.fidelity,
        retransmitted=sum(row.retransmitted for row in window.traffic),
        ecn_marked=sum(row.ecn_marked for row in window.traffic),
    )


def notice(event: FindingEvent, time_ns: int, state: FindingState, sender: str) -> Notice:
    """What is said of a finding."""
    endpoints = Endpoints()
    row = finding_row(state, 0, endpoints)
    return Notice(event=event, time_ns=time_ns, sender=sender, endpoints=endpoints.rows, finding=row)


def _plain(value: Any) -> Any:
    """A NumPy number as Python's: what the encoder does not know itself."""
    return value.item()


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def to_json(value: object) -> bytes:
    """JSON without line breaks."""
    return _ENCODER.encode(value)
