"""The HTTP API, version 1: what the board holds, as typed answers with the result format's names.

In: a ``Context`` and a registry of metrics. Out: an ASGI application, whose routes are the table
``routes.ROUTES``; ``openapi`` makes the OpenAPI document from the same. It is Starlette with msgspec's types:
28 MB and 0.1 s to load, where FastAPI takes 43 MB and 0.3 s (docs/api.md). Handlers run in a few threads, so
that the event stream goes on meanwhile.
"""

from __future__ import annotations

import gzip
import logging
import re
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import msgspec
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from dpuflow.agent.access import OPEN_PATHS
from dpuflow.agent.answers import answer, failed, problem
from dpuflow.agent.events import EVENT_KINDS
from dpuflow.agent.models import State, to_json
from dpuflow.agent.routes import ROUTES, EventsQuery
from dpuflow.agent.turns import BEGUN, SHARE, SPENT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prometheus_client import CollectorRegistry
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from dpuflow.agent.routes import ApiRoute, Context
    from dpuflow.agent.turns import Share

    P = ParamSpec("P")
    T = TypeVar("T")
    Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)

ROUTE: Final = "dpuflow.route"
_GZIP_FROM: Final = 1000  # bytes; below, a packet holds it anyway


def make_app(context: Context, registry: CollectorRegistry) -> Starlette:
    """The application, without its guard."""
    special: dict[str, Endpoint] = {
        "/api/v1/events": partial(_events, context),
        "/metrics": partial(_metrics, registry),
        "/api/v1/openapi.json": _openapi,
    }
    answering = {route.path: special.get(route.path) or _answering(context, route) for route in ROUTES}
    routes = [Route(path, _named(path, endpoint)) for path, endpoint in answering.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: failed})


def make_probes(context: Context) -> Starlette:
    """The probes alone, which name no address and take no token."""
    probes = [route for route in ROUTES if route.path in OPEN_PATHS]
    routes = [Route(route.path, _named(route.path, _answering(context, route))) for route in probes]
    return Starlette(routes=routes, exception_handlers={HTTPException: failed})


def _named(path: str, call: Endpoint) -> Endpoint:
    """``call``, telling in the scope which route it is (requests are counted by that); it always answers."""

    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE] = path
        try:
            return await call(request)
        except HTTPException:
            raise
        except Exception:
            _log.exception("no answer to GET %s", path)
            return problem(500, "internal error; see the agent's log")

    return endpoint


def _answering(context: Context, route: ApiRoute) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        query = _query(request, route.query)
        assert route.handler is not None
        value = await _in_thread(request, route.handler, context, query, **request.path_params)
        if isinstance(value, bytes):
            return Response(value, media_type="application/json", headers={"Cache-Control": "no-store"})
        failing = isinstance(value, State) and value.status == "failing"
        return await _in_thread(request, answer, value, 503 if failing else 200)

    return endpoint


def _query(request: Request, kind: type[Any]) -> Any:
    """The query as ``kind``; what it does not take is refused, not ignored."""
    try:
        return msgspec.convert(dict(request.query_params), kind, strict=False)
    except msgspec.ValidationError as error:
        raise HTTPException(400, f"query: {error}{_choices(kind, str(error))}") from None


def _choices(kind: type[Any], error: str) -> str:
    """What the parameter that ``error`` names may be, where that is a list."""
    named = re.search(r"`\$\.(\w+)`", error)
    for each in msgspec.inspect.type_info(kind).fields if named else ():  # type: ignore[attr-defined]
        if named is not None and each.name == named[1]:
            kinds = getattr(each.type, "type", each.type)  # without its description
            values = [v for one in getattr(kinds, "types", (kinds,)) for v in getattr(one, "values", ())]
            return f"; one of {', '.join(map(str, values))}" if values else ""
    return ""


async def _events(context: Context, request: Request) -> Response:
    query = _query(request, EventsQuery)
    kinds = frozenset(EVENT_KINDS) if query.events is None else frozenset(query.events.split(","))
    if unknown := kinds - set(EVENT_KINDS):
        raise HTTPException(400, f"events: {min(unknown)!r} is not one of {', '.join(EVENT_KINDS)}")
    stream = context.stream
    if stream is None or stream.clients >= context.config.api.max_clients:
        raise HTTPException(
            503, "too many clients of the event stream (api.max_clients)", {"Retry-After": "30"}
        )
    last_id = request.headers.get("last-event-id") or query.last_event_id
    return _Streamed(lambda scope, receive, send: stream.serve(scope, receive, send, last_id or None, kinds))


class _Streamed(Response):
    """An answer that something else sends."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


async def _metrics(registry: CollectorRegistry, request: Request) -> Response:
    try:
        encode, media = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):  # a version that is none
        encode, media = choose_encoder("")
    body = await _in_thread(request, encode, registry)
    headers = {"Content-Type": media, "Cache-Control": "no-store"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(body) > _GZIP_FROM:
        body = await _in_thread(request, gzip.compress, body, 1)
        headers["Content-Encoding"] = "gzip"
    return Response(body, headers=headers)


async def _openapi(request: Request) -> Response:
    return Response(_document(), media_type="application/json", headers={"Cache-Control": "no-store"})


@cache
def _document() -> bytes:
    """Made once: it takes 8 ms, for which nobody else is answered."""
    from dpuflow.agent.openapi import document

    return to_json(document())


async def _in_thread(request: Request, call: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """What ``call`` returns, from another thread; its CPU counts as that of the listener."""
    share: Share | None = request.scope.get(SHARE)

    first = request.scope.get(BEGUN) is None  # what has begun is brought to its end
    request.scope[BEGUN] = True

    def counted() -> T:
        if first and share is not None and share.owes():  # for calls that were handed over before this one
            raise HTTPException(429, SPENT, {"Retry-After": "10"})
        begun_s = time.thread_time()
        try:
            return call(*args, **more)
        finally:
            if share is not None:
                share.count(time.thread_time() - begun_s)

    return await run_in_threadpool(counted)
