"""Who gets in: local by default, TLS and token for everybody else, both renewed without a restart."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from agent_http import make_certificate, serving
from agent_worlds import board

from dpuflow.agent import connection
from dpuflow.agent.access import Guard, read_token
from dpuflow.agent.config import Api, Config, parse_config
from dpuflow.errors import OptionError

TOKEN = "0123456789abcdef-token"


def refused(text: str) -> str:
    with pytest.raises(OptionError) as error:
        parse_config(text, "agent.yaml")
    return str(error.value)


@pytest.mark.parametrize("address", ["0.0.0.0:9477", "192.168.100.2:9477", "[::]:9477", "[2001:db8::1]:9477"])
def test_an_address_that_others_reach_needs_tls_and_token(address: str) -> None:
    text = f"api:\n  listen: '{address}'\n"
    wanted = (
        "agent.yaml:2: api.listen: other machines reach this address: give tls_cert, tls_key and token_file "
        "as well, or insecure: true where something else protects it"
    )
    assert refused(text) == wanted
    assert refused(text + "  token_file: t\n") == wanted
    assert refused(text + "  tls_cert: c\n  tls_key: k\n") == wanted
    parse_config(text + "  token_file: t\n  tls_cert: c\n  tls_key: k\n", "agent.yaml")
    assert parse_config(text + "  insecure: true\n", "agent.yaml").api.insecure


@pytest.mark.parametrize("address", ["127.0.0.1:9477", "[::1]:9477", "127.3.2.1:1", "off"])
def test_a_local_address_needs_neither(address: str) -> None:
    assert parse_config(f"api: {{listen: '{address}'}}\n", "agent.yaml").api.listen == address


def test_the_default_is_local() -> None:
    assert Config().api.listen == "127.0.0.1:9477"


def test_plain_http_to_another_machine_is_refused() -> None:
    text = "webhooks:\n  - url: http://scheduler.example.org/hook\n"
    assert refused(text).startswith("agent.yaml:2: webhooks[0].url: would send findings in plain text")
    parse_config(text + "    insecure: true\n", "agent.yaml")
    parse_config(text.replace("http:", "https:"), "agent.yaml")
    parse_config(text.replace("scheduler.example.org", "127.0.0.1:8080"), "agent.yaml")
    assert "not an http:// or https:// URL" in refused("webhooks:\n  - url: ftp://x/y\n")


def test_a_request_without_the_token_learns_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    api = Api(listen="127.0.0.1:0", token_file=str(file))
    with caplog.at_level(logging.DEBUG), serving(board(), api) as running:
        for headers in (
            {},
            {"authorization": "Bearer"},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": f"Bearer {TOKEN[:-1]}"},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": "Bearer \u00fc"},
        ):
            for path in ("/metrics", "/api/v1/groups", "/api/v1/events", "/api/v1/openapi.json", "/nothing"):
                answer = running.get(path, **headers)
                assert answer.status == 401, (path, headers)
                assert answer.headers["www-authenticate"] == 'Bearer realm="dpuflow"'
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["connection"] == "close"
                assert b"10.0.0" not in answer.body
        for path in ("/metrics", "/api/v1/groups"):
            assert running.get(path, authorization=f"Bearer {TOKEN}").status == 200
            assert running.get(path, authorization=f"bearer  {TOKEN} ").status == 200
        for path in ("/healthz", "/readyz"):  # probes have none
            assert running.get(path).status == 200
    assert TOKEN not in caplog.text


def test_two_authorizations_are_none() -> None:
    guard = Guard(lambda *_: None, TOKEN.encode())  # type: ignore[arg-type,return-value]
    header = (b"authorization", b"Bearer " + TOKEN.encode())
    assert guard.allows({"headers": [header]})
    assert not guard.allows({"headers": [header, header]})


class Kept(bytes):
    """To be compared by ``hmac.compare_digest`` alone: all else stops at the first difference."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared by ==")

    def __contains__(self, part: object) -> bool:
        raise AssertionError("searched")

    __ne__ = __lt__ = __gt__ = __eq__
    __hash__ = bytes.__hash__
    startswith = endswith = find = __contains__  # type: ignore[assignment]


def test_tokens_are_compared_in_constant_time() -> None:
    guard = Guard(lambda *_: None, Kept(TOKEN.encode()))  # type: ignore[arg-type,return-value]
    for given, allowed in ((TOKEN, True), (TOKEN[:-1], False), ("x" + TOKEN[1:], False), ("", False)):
        assert guard.allows({"headers": [(b"authorization", b"Bearer " + given.encode())]}) is allowed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must contain exactly one line"),
        ("short", "at least 16"),
        ("two\nlines of a token", "one line"),
        ("with a space in its middle", "printable ASCII"),
    ],
)
def test_a_token_file_that_is_none_is_one_sentence_without_its_text(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(OptionError) as error:
        read_token(str(file), "api.token_file")
    assert words in str(error.value)
    assert str(error.value).startswith(f"api.token_file: {file}: ")
    assert not text or text not in str(error.value)
    with pytest.raises(OptionError, match="No such file"):
        read_token(str(tmp_path / "none"), "api.token_file")


def subject(port: int) -> str:
    """The common name in the certificate that is shown now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain) as secure,
    ):
        assert secure.version() in ("TLSv1.2", "TLSv1.3")
        der = secure.getpeercert(binary_form=True)
        assert der is not None
        return "first" if b"first" in der else "second"


def test_certificate_and_token_are_read_again_on_reload(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "first")
    other_cert, other_key = make_certificate(tmp_path, "second")
    file = tmp_path / "token"
    file.write_text(TOKEN)
    api = Api(listen="127.0.0.1:0", token_file=str(file), tls_cert=cert, tls_key=key)
    with serving(board(), api) as running:
        config = running.parts._config
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        assert running.get("/api/v1/groups", authorization=f"Bearer {TOKEN}").status == 200
        assert subject(port) == "first"

        Path(key).write_text(Path(other_key).read_text())  # half of the change: refused, the old one stays
        with pytest.raises(OptionError, match="are not a matching certificate and key"):
            running.parts.reload(replace(config))
        assert subject(port) == "first"
        Path(key).write_text("no key")
        with pytest.raises(OptionError, match="are not a matching certificate and key: not PEM"):
            running.parts.reload(replace(config))
        Path(key).write_text(Path(other_key).read_text())

        Path(cert).write_text(Path(other_cert).read_text())
        file.write_text("fedcba9876543210-token")
        running.parts.reload(replace(config))
        assert subject(port) == "second"
        running.pool.clear()  # a connection that stands goes on with the certificate it began with
        assert running.get("/api/v1/groups", authorization=f"Bearer {TOKEN}").status == 401
        assert running.get("/api/v1/groups", authorization="Bearer fedcba9876543210-token").status == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_plain_text_and_old_tls_get_no_answer(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "first")
    with serving(board(), Api(listen="127.0.0.1:0", tls_cert=cert, tls_key=key)) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP/1.1 200" not in plain.recv(1000)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        except ValueError:
            pytest.skip("this OpenSSL cannot even ask for TLS 1.1")
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(plain)


@pytest.mark.parametrize("missing", ["cert", "key", "both wrong"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, missing: str) -> None:
    cert, key = make_certificate(tmp_path, "first")
    if missing == "both wrong":
        cert, key = key, cert
    else:
        Path(cert if missing == "cert" else key).unlink()
    with (
        pytest.raises(OptionError, match=r"^api\.tls_(cert|key): "),
        serving(board(), Api(listen="127.0.0.1:0", tls_cert=cert, tls_key=key)),
    ):
        pass


def until_closed(connected: socket.socket) -> None:
    while connected.recv(1000):
        pass


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", b"GET"])
@pytest.mark.parametrize("first", [False, True])
def test_clients_that_never_finish_a_request_are_let_go(
    monkeypatch: pytest.MonkeyPatch, said: bytes, first: bool
) -> None:
    monkeypatch.setattr(connection, "REQUEST_S", 0.1)
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
            if first:  # also on a connection that has served a whole one
                silent.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert silent.recv(1000).startswith(b"HTTP/1.1 200")
            silent.sendall(said)
            if first and not said:  # between two requests it may wait longer
                silent.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    until_closed(silent)
                return
            with contextlib.suppress(ConnectionResetError):
                until_closed(silent)
        assert running.get("/healthz").status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost", 200), ("LOCALHOST.:9477", 200), ("127.0.0.1:9477", 200), ("[::1]:9477", 200)),
        *(
            ("10.1.2.3", 200),
            ("rebound.example", 421),
            ("rebound.example:9477", 421),
            ("127.0.0.1.example", 421),
        ),
        *(("", 421), ("localhost.example", 421), ("::1 example", 421)),
    ],
)
def test_a_name_that_another_site_made_point_here_is_not_answered(host: str, status: int) -> None:
    with serving(board()) as running:
        assert running.get("/api/v1/groups", host=host).status == status
        assert running.get("/metrics", host=host).status == status


def test_where_a_token_or_something_else_protects_any_name_will_do(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with serving(board(), Api(listen="127.0.0.1:0", token_file=str(file))) as running:
        answer = running.get("/api/v1/groups", host="dpu7.example", authorization=f"Bearer {TOKEN}")
        assert answer.status == 200
        assert running.get("/api/v1/groups", host="dpu7.example").status == 401
    with serving(board(), Api(listen="127.0.0.1:0", insecure=True)) as running:
        assert running.get("/metrics", host="dpuflow.monitoring.svc").status == 200
