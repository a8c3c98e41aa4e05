"""The OpenAPI 3.1 document of the API, made from its table of routes (docs/openapi.json is this one).

``python -m dpuflow.agent.openapi`` writes it to standard output.
"""

from __future__ import annotations

import re
import sys
from http import HTTPStatus
from typing import Any

import msgspec

from dpuflow import __version__
from dpuflow.agent import models
from dpuflow.agent.access import OPEN_PATHS
from dpuflow.agent.routes import ROUTES, ApiRoute

_AT = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """The whole document."""
    queries = list(dict.fromkeys(route.query for route in ROUTES))
    answers = [route.answer for route in ROUTES if route.answer is not None]
    said = [models.Problem, models.Notice, models.WindowRow]
    _, schemas = msgspec.json.schema_components([*queries, *answers, *said], ref_template=_AT)
    paths = {route.path: {"get": _operation(route, schemas)} for route in ROUTES}
    for query in queries:
        del schemas[query.__name__]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dpuflow agent",
            "version": __version__,
            "summary": "Who was late, and why, as one node's traffic shows it",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:9477"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content = {"schema": {"$ref": _AT.format(name=route.answer.__name__)}}
    elif route.media != "application/json":
        content = {"schema": {"type": "string"}}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    in_query = [
        {
            "name": name,
            "in": "query",
            "description": schema.get("description", ""),
            "schema": {key: value for key, value in schema.items() if key != "description"},
        }
        for name, schema in schemas[route.query.__name__]["properties"].items()
    ]
    responses = {"200": {"description": "the answer", "content": {route.media: content}}}
    usual = () if route.path in OPEN_PATHS else (401, 421)
    for status in sorted({400, 500, *usual, *route.failing}):
        responses[str(status)] = _failing(route, status)
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", route.path.removeprefix("/api/v1")).strip("_"),
        "summary": route.summary,
        "parameters": in_path + in_query,
        "responses": responses,
    }
    if route.path in OPEN_PATHS:
        operation["security"] = []
    return operation


def _failing(route: ApiRoute, status: int) -> dict[str, Any]:
    if route.path in OPEN_PATHS and status == HTTPStatus.SERVICE_UNAVAILABLE:
        body = {"application/json": {"schema": {"$ref": _AT.format(name="State")}}}
    else:
        body = {"application/problem+json": {"schema": {"$ref": _AT.format(name="Problem")}}}
    return {"description": HTTPStatus(status).phrase, "content": body}


def text() -> str:
    """The document as docs/openapi.json holds it."""
    return msgspec.json.format(msgspec.json.encode(document()), indent=1).decode() + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
