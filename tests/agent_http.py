"""A running set of outlets on a free port, and clients to ask it with."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3

from dpuflow.agent import outlets
from dpuflow.agent.board import Board
from dpuflow.agent.config import Api, Config, Metrics, Webhook


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    """Outlets and where they listen."""

    parts: outlets.Outlets
    url: str
    pool: urllib3.PoolManager

    def get(self, path: str, **headers: str) -> Answer:
        got = self.pool.request(
            "GET", self.url + path, headers=headers, retries=False, timeout=60, redirect=False
        )
        return Answer(got.status, {name.lower(): value for name, value in got.headers.items()}, got.data)

    def events(self, path: str = "/api/v1/events", **headers: str) -> urllib3.BaseHTTPResponse:
        return self.pool.request(
            "GET", self.url + path, headers=headers, retries=False, timeout=60, preload_content=False
        )


@contextmanager
def serving(
    board: Board, api: Api | None = None, webhooks: list[Webhook] | None = None, **more: Any
) -> Iterator[Running]:
    """Outlets of ``board``; the address is 127.0.0.1 and a free port unless ``api`` names one.

    Nobody has to wait for a turn unless ``limited``.
    """
    limited = more.pop("limited", False)
    config = Config(
        api=api or Api(listen="127.0.0.1:0"),
        webhooks=webhooks or [],
        metrics=more.pop("metrics", Metrics(nic_counters=False)),
        **more,
    )
    parts = outlets.start(board, config)
    assert parts.server is not None
    for part in (parts.server, parts.probes):
        if part is not None and not limited:
            part.door.unbound()
    scheme = "https" if config.api.tls_cert else "http"
    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    pool = urllib3.PoolManager(maxsize=8, cert_reqs=ssl.CERT_NONE)
    try:
        yield Running(parts, f"{scheme}://127.0.0.1:{parts.server.address[1]}", pool)
    finally:
        parts.close()
        pool.clear()


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for localhost and its key, by openssl."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return str(cert), str(key)
