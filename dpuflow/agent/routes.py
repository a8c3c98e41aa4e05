"""The table of the API's routes: what each takes, what it answers, and how it gets that from the board."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from starlette.exceptions import HTTPException

from dpuflow import __version__, results
from dpuflow.agent import models
from dpuflow.agent.config import Config, public
from dpuflow.agent.tally import group_name
from dpuflow.quantities import whole_number
from dpuflow.results import Collective
from dpuflow.results.tokens import CONDITIONS, OpToken, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dpuflow.agent.board import Board, Window
    from dpuflow.agent.events import Stream
    from dpuflow.results.figures import NetworkCost

Condition = Literal[CONDITIONS]  # type: ignore[valid-type]
SEVERITIES: Final = ("info", "warning", "critical")


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class CollectivesQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which collectives; without ``after`` and ``since_ns`` the last ones."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="how many at most")] = 100
    after: Annotated[str | None, msgspec.Meta(description="only those after this one: a `key` or `next`")] = (
        None
    )
    since_ns: Annotated[int | None, msgspec.Meta(description="only those that ended then or later")] = None
    group: Annotated[str | None, msgspec.Meta(description="only those of the group of this name")] = None
    op: Annotated[OpToken | None, msgspec.Meta(description="only this operation")] = None


class TransfersQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which transfers; without ``after`` and ``since_ns`` the last ones."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="how many at most")] = 100
    after: Annotated[str | None, msgspec.Meta(description="only those after this one: a `key` or `next`")] = (
        None
    )
    since_ns: Annotated[int | None, msgspec.Meta(description="only those that ended then or later")] = None
    verb: Annotated[Literal["write", "read"] | None, msgspec.Meta(description="only these")] = None


class FindingsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which findings."""

    state: Annotated[Literal["active", "all"], msgspec.Meta(description="all: those that are over, too")] = (
        "active"
    )
    condition: Annotated[Condition | None, msgspec.Meta(description="only this condition")] = None
    min_severity: Annotated[Severity, msgspec.Meta(description="least severity")] = "info"


class WindowsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which windows."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000, description="how many at most")] = 60


class EventsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which events."""

    events: Annotated[
        str | None, msgspec.Meta(description="only these kinds, with commas in between; all without it")
    ] = None
    last_event_id: Annotated[
        str | None, msgspec.Meta(description="go on after this event, as the header Last-Event-ID says")
    ] = None


@dataclass
class Context:
    """What handlers see. ``stale_s``: older results than this are too old to act on."""

    board: Board
    run: str
    sender: str
    config: Config = field(default_factory=Config)
    stream: Stream | None = None
    webhooks: Callable[[], dict[str, dict[str, int]]] = dict

    @property
    def stale_s(self) -> float:
        """Three spans: by then all that a verdict rests on is old."""
        return 3 * self.config.windows.span


@dataclass(frozen=True)
class ApiRoute:
    """One path. ``handler`` gets the context, the parsed query and the path's parameters.

    ``answer`` None: text of the type ``media``, or JSON that is described elsewhere.
    """

    path: str
    summary: str
    answer: type | None
    handler: Callable[..., Any] | None
    query: type[msgspec.Struct] = Nothing
    failing: tuple[int, ...] = ()  # statuses besides 200, 400, 401 and 500
    media: str = "application/json"


def groups(context: Context, _: Nothing) -> models.Groups:
    """The groups held."""
    endpoints = models.Endpoints()
    states = context.board.groups()
    rows = [models.group_row(state, number, endpoints) for number, state in enumerate(states)]
    return models.Groups(endpoints=endpoints.rows, groups=rows)


def collectives(context: Context, query: CollectivesQuery) -> models.Collectives:
    """Collectives, a page of them."""
    windows = context.board.windows()
    begin, missed = _begin(context, query.after, windows)
    found = list(_matching(windows, query, begin))
    page = found[: query.limit]
    if query.after is None and query.since_ns is None:
        page = found[-query.limit :]
    more = bool(found) and page[-1] is not found[-1]
    answer = models.Collectives(
        endpoints=[], groups=[], collectives=[], next=query.after, more=more, missed=missed
    )
    endpoints = models.Endpoints()
    known: dict[tuple[int, int], int] = {}
    names: dict[str, int] = {}
    for window, collective in page:
        analysis = window.analysis
        place = (window.number, collective.group)
        if place not in known:
            group = analysis.groups[collective.group]
            members = [endpoints.of(analysis, member) for member in group.endpoints]
            name = _name(window, collective.group)
            known[place] = names.setdefault(name, len(answer.groups))
            if known[place] == len(answer.groups):
                answer.groups.append(models.GroupRow(known[place], members, group.kind, name))
        row = {each.name: getattr(collective, each.name) for each in fields(Collective)}
        row["id"] = len(answer.collectives)
        row["group"] = known[place]
        row["root"] = None if collective.root is None else endpoints.of(analysis, collective.root)
        row["ranks"] = [
            replace(rank, endpoint=endpoints.of(analysis, rank.endpoint)) for rank in collective.ranks
        ]
        late = [endpoints.of(analysis, who) for at, who in sorted(window.late) if at == collective.id]
        key = f"{context.run}-{window.number}-{collective.id}"
        answer.collectives.append(models.CollectiveRow(**row, key=key, window=window.number, late=late))
        answer.next = key
    answer.endpoints = endpoints.rows
    return answer


def _begin(context: Context, after: str | None, windows: list[Window]) -> tuple[tuple[int, int], bool]:
    """The (window, id) behind which to begin, and whether some were missed before it."""
    if after is None:
        return (-1, -1), False
    run, _, place = after.partition("-")
    number, _, at = place.partition("-")
    in_window, row = whole_number(number), whole_number(at)
    if not run or in_window is None or row is None:
        raise HTTPException(400, f"after: {after!r:.60} is no key")
    if run != context.run:  # of a run before this one: all that is held is new
        return (-1, -1), True
    held = windows[0].number if windows else 0
    return (in_window, row), in_window < held - 1


def _matching(
    windows: list[Window], query: CollectivesQuery, begin: tuple[int, int]
) -> Iterator[tuple[Window, Collective]]:
    for window in windows:
        if window.number < begin[0]:
            continue
        for collective in window.analysis.collectives:
            if (
                (window.number, collective.id) > begin
                and (query.op is None or collective.op == query.op)
                and (query.since_ns is None or collective.end_ns >= query.since_ns)
                and (query.group is None or _name(window, collective.group) == query.group)
            ):
                yield window, collective


def transfers(context: Context, query: TransfersQuery) -> models.Transfers:
    """Transfers, a page of them."""
    windows = context.board.windows()
    begin, missed = _begin(context, query.after, windows)
    found = [
        (window, transfer)
        for window in windows
        for transfer in window.analysis.transfers
        if (window.number, transfer.id) > begin
        and (query.since_ns is None or transfer.end_ns >= query.since_ns)
        and query.verb in (None, transfer.verb)
    ]
    first = len(found) - query.limit if query.after is None and query.since_ns is None else 0
    page = found[max(0, first) :][: query.limit]
    endpoints = models.Endpoints()
    rows: list[models.TransferRow] = []
    for window, transfer in page:
        row = {each.name: getattr(transfer, each.name) for each in fields(results.Transfer)}
        row["id"] = len(rows)
        row["src"], row["dst"] = (endpoints.of(window.analysis, end) for end in (transfer.src, transfer.dst))
        key = f"{context.run}-{window.number}-{transfer.id}"
        rows.append(models.TransferRow(**row, key=key, window=window.number))
    return models.Transfers(
        endpoints=endpoints.rows,
        transfers=rows,
        next=rows[-1].key if rows else query.after,
        more=bool(page) and page[-1] is not found[-1],
        missed=missed,
    )


def _name(window: Window, group: int) -> str:
    analysis = window.analysis
    return group_name(analysis.endpoints[member].address for member in analysis.groups[group].endpoints)


def lateness(context: Context, _: Nothing) -> models.LatenessAnswer:
    """Who was late."""
    endpoints = models.Endpoints()
    rows = [models.lateness_row(state, endpoints) for state in context.board.lateness()]
    windows = context.board.windows()
    edges = []
    last = _last(windows, lambda analysis: analysis.edges)
    for edge in last.analysis.edges if last else ():
        assert last is not None
        ends = [endpoints.of(last.analysis, end) for end in (edge.from_, edge.to)]
        edges.append(models.EdgeRow(ends[0], ends[1], edge.collectives, edge.median_ns, edge.error_ns))
    return models.LatenessAnswer(
        start_ns=windows[0].start_ns if windows else None,
        end_ns=windows[-1].end_ns if windows else None,
        endpoints=endpoints.rows,
        lateness=rows,
        edges=edges,
    )


def _last(windows: list[Window], wanted: Callable[[results.Analysis], object]) -> Window | None:
    """The last window whose analysis has what is wanted: one in which nothing happened tells nothing."""
    return next((each for each in reversed(windows) if wanted(each.analysis)), None)


def steps(context: Context, _: Nothing) -> models.StepsAnswer:
    """What jobs repeat."""
    endpoints = models.Endpoints()
    last = _last(context.board.windows(), lambda analysis: analysis.steps or analysis.pipelines)
    analysis = last.analysis if last else results.Analysis()

    def ids(numbers: list[int]) -> list[int]:
        return [endpoints.of(analysis, number) for number in numbers]

    return models.StepsAnswer(
        end_ns=last.end_ns if last else None,
        endpoints=endpoints.rows,
        steps=[replace(row, endpoints=ids(row.endpoints)) for row in analysis.steps],
        what_if=[replace(row, endpoint=ids([row.endpoint])[0]) for row in analysis.what_if],
        pipelines=[replace(row, stages=ids(row.stages), late=ids(row.late)) for row in analysis.pipelines],
    )


def network_cost(context: Context, _: Nothing) -> models.NetworkCostAnswer:
    """What the network charged of late for a message of a size."""
    endpoints = models.Endpoints()
    windows = context.board.windows()
    found: dict[tuple[int, int, int], NetworkCost] = {}
    for window in reversed(windows):
        for row in window.analysis.network_cost:
            src, dst = (endpoints.of(window.analysis, end) for end in (row.src, row.dst))
            found.setdefault((src, dst, row.bytes_up_to), replace(row, src=src, dst=dst))
    return models.NetworkCostAnswer(
        end_ns=windows[-1].end_ns if windows else None,
        endpoints=endpoints.rows,
        network_cost=[found[key] for key in sorted(found)],
    )


def findings(context: Context, query: FindingsQuery) -> models.Findings:
    """Findings."""
    endpoints = models.Endpoints()
    least = SEVERITIES.index(query.min_severity)
    states = [
        state
        for state in context.board.findings(active_only=query.state == "active")
        if query.condition in (None, state.condition) and SEVERITIES.index(state.severity) >= least
    ]
    rows = [models.finding_row(state, number, endpoints) for number, state in enumerate(states)]
    return models.Findings(endpoints=endpoints.rows, findings=rows)


def windows(context: Context, query: WindowsQuery) -> models.Windows:
    """The windows in short."""
    held = context.board.windows(query.limit)
    return models.Windows(windows=[models.window_row(window) for window in reversed(held)])


def window(context: Context, _: Nothing, number: str) -> bytes:
    """One window's whole analysis."""
    from dpuflow.reports.json import json_lines

    wanted = None if number == "latest" else whole_number(number)
    if wanted is None and number != "latest":
        raise HTTPException(400, f"{number!r:.60} is no window's number, and not latest either")
    found = context.board.analysis(wanted)
    if found is None:
        raise HTTPException(404, f"window {number} is not held; /api/v1/windows lists those that are")
    return "".join(json_lines(found)).encode()


def health(context: Context, _: Nothing) -> models.HealthAnswer:
    """How the agent fares."""
    held = context.board.health()
    values = {each.name: getattr(held, each.name) for each in fields(held)}
    return models.HealthAnswer(
        version=__version__,
        sender=context.sender,
        event_clients=context.stream.clients if context.stream else 0,
        webhooks=context.webhooks(),
        **values,
    )


def config(context: Context, _: Nothing) -> dict[str, Any]:
    """The configuration in force."""
    return public(context.config)


def healthz(context: Context, _: Nothing) -> models.State:
    """Alive: the agent's own loop runs."""
    quiet = time.monotonic() - context.stream.heard if context.stream else 0.0
    reasons = []
    if quiet > context.stale_s:
        reasons.append(f"the agent has not reported for {quiet:.0f} s")
    return models.State(status="failing" if reasons else "ok", reasons=reasons)


def readyz(context: Context, _: Nothing) -> models.State:
    """Ready: what the API says is about now."""
    reasons = healthz(context, Nothing()).reasons
    held = context.board.health()
    if context.board.latest() is None:
        reasons.append("no window has been settled yet")
    elif held.lag_s > context.stale_s:
        reasons.append(f"results are {held.lag_s:.0f} s behind")
    if held.time_ns and not any(held.interfaces.values()):  # none at all is none, too
        reasons.append("no interface is being captured from")
    return models.State(status="failing" if reasons else "ok", reasons=reasons)


ROUTES: Final = (
    ApiRoute("/api/v1/groups", "Groups in the windows held", models.Groups, groups),
    ApiRoute(
        "/api/v1/collectives", "Recent collectives, page by page", models.Collectives, collectives,
        CollectivesQuery,
    ),
    ApiRoute(
        "/api/v1/transfers", "Recent transfers of one-sided pages (KV caches), page by page",
        models.Transfers, transfers, TransfersQuery,
    ),
    ApiRoute("/api/v1/lateness", "Who was late in the windows held", models.LatenessAnswer, lateness),
    ApiRoute("/api/v1/steps", "What jobs repeat: steps, tokens, pipelines", models.StepsAnswer, steps),
    ApiRoute(
        "/api/v1/network_cost", "What messages of each size took between each pair, of late",
        models.NetworkCostAnswer, network_cost,
    ),
    ApiRoute("/api/v1/findings", "Findings that hold, or all", models.Findings, findings, FindingsQuery),
    ApiRoute("/api/v1/windows", "The windows held, in short", models.Windows, windows, WindowsQuery),
    ApiRoute(
        "/api/v1/windows/{number}", "One window's whole analysis, as `dpuflow analyze --json` writes it",
        None, window, failing=(404,),
    ),
    ApiRoute("/api/v1/health", "How the agent itself fares", models.HealthAnswer, health),
    ApiRoute("/api/v1/config", "The configuration in force, without secrets", None, config),
    ApiRoute("/healthz", "Whether the agent is alive", models.State, healthz, failing=(503,)),
    ApiRoute("/readyz", "Whether its results are about now", models.State, readyz, failing=(503,)),
    ApiRoute(
        "/api/v1/events",
        "What happens, as it happens: server-sent events. `event` is window (data: WindowRow), "
        "finding_opened, finding_changed, finding_closed (data: Notice), health (data: "
        'HealthAnswer) or missed (data: {"missed": how many, null where that is not known})',
        None, None, EventsQuery, failing=(503,), media="text/event-stream",
    ),
    ApiRoute("/api/v1/openapi.json", "This document", None, None),
    ApiRoute("/metrics", "Prometheus metrics (docs/metrics.md)", None, None, media="text/plain"),
)  # fmt: skip
