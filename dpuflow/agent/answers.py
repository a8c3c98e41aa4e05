"""HTTP answers of the agent: JSON, errors as problem details (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.responses import Response

from dpuflow.agent.models import Problem, to_json

if TYPE_CHECKING:
    from starlette.requests import Request


def answer(value: object, status: int = 200) -> Response:
    """``value`` as JSON; not to be cached, as it is about this moment."""
    return Response(
        to_json(value), status, headers={"Cache-Control": "no-store"}, media_type="application/json"
    )


def problem(status: int, detail: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An error as a problem detail."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return Response(to_json(body), status, headers, "application/problem+json")


async def failed(request: Request, error: Exception) -> Response:
    """What Starlette raised (no such path, no such method), and the API itself, as a problem detail."""
    assert isinstance(error, HTTPException)
    made = problem(error.status_code, error.detail)
    made.headers.update(error.headers or {})
    return made
