"""Who may talk to the agent: bearer tokens and TLS, from files that are read again on reload.

In: file names from the configuration. Out: a guard around an ASGI application, a TLS context. Without a token
file everybody who reaches the address may read; the configuration refuses that beyond this machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import ssl
from typing import TYPE_CHECKING, Final

from dpuflow.errors import OptionError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from dpuflow.agent.config import Config

LOCAL_NAMES: Final = frozenset({b"localhost", b"ip6-localhost"})
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""For probes, which have no token to send: they say ok or why not, and name no address."""

_LEAST_TOKEN: Final = 16  # characters: fewer can be tried out


def read_secret(file: str, what: str) -> bytes:
    """The one line in ``file``. Raises OptionError, naming ``what``; the text never holds the secret."""
    try:
        with open(file, "rb") as stream:
            text = stream.read(65536).strip()
    except OSError as error:
        raise OptionError(f"{what}: {file}: {error.strerror}") from None
    if not text or b"\n" in text:
        raise OptionError(f"{what}: {file}: must contain exactly one line, the secret")
    return text


def read_token(file: str, what: str) -> bytes:
    """The token in ``file``: visible ASCII, not too short. Raises OptionError."""
    token = read_secret(file, what)
    if len(token) < _LEAST_TOKEN or not all(33 <= byte <= 126 for byte in token):
        raise OptionError(f"{what}: {file}: a token needs at least {_LEAST_TOKEN} printable ASCII characters")
    return token


def make_tls(cert: str, key: str) -> ssl.SSLContext:
    """A server's context, TLS 1.2 or later. Raises OptionError, naming the file."""
    for name, file in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise OptionError(f"api.{name}: {file}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        reason = error.reason or "not PEM"  # which OpenSSL has no name for
        raise OptionError(
            f"api.tls_cert: {cert} and api.tls_key: {key} are not a matching certificate and key: {reason}"
        ) from None
    return context


def read_certificates(file: str, what: str) -> None:
    """Whether ``file`` holds certificates to trust. Raises OptionError."""
    try:
        ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        raise OptionError(f"{what}: {file}: contains no PEM certificate") from None
    except OSError as error:
        raise OptionError(f"{what}: {file}: {error.strerror}") from None


def check_files(config: Config) -> None:
    """Whether all files can be used that ``config`` names for access. Raises OptionError."""
    if config.api.token_file is not None:
        read_token(config.api.token_file, "api.token_file")
    if config.api.tls_cert is not None and config.api.tls_key is not None:
        make_tls(config.api.tls_cert, config.api.tls_key)
    for number, hook in enumerate(config.webhooks):
        if hook.token_file is not None:
            read_token(hook.token_file, f"webhooks[{number}].token_file")
        if hook.secret_file is not None:
            read_secret(hook.secret_file, f"webhooks[{number}].secret_file")
        if hook.ca_file is not None:
            read_certificates(hook.ca_file, f"webhooks[{number}].ca_file")


class Guard:
    """Lets requests through that carry the token; answers 401 to the others.

    Tokens are compared in constant time, as bytes of any length. ``token`` may be replaced at any time; None
    lets everything through.
    """

    def __init__(self, app: ASGIApp, token: bytes | None, any_host: bool = False) -> None:
        """``any_host``: something else protects the address, and may be asked by any name."""
        self._app = app
        self.token = token
        self.any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        from dpuflow.agent.answers import problem

        if not self.meant(scope):
            answer = problem(421, "without a token, only requests to an address or localhost are answered")
            await answer(scope, receive, send)
            return
        if self.allows(scope):
            await self._app(scope, receive, send)
            return
        answer = problem(401, "bearer token required: Authorization: Bearer TOKEN")
        answer.headers["WWW-Authenticate"] = 'Bearer realm="dpuflow"'
        answer.headers["Connection"] = "close"  # who has no token holds no connection
        await answer(scope, receive, send)

    def meant(self, scope: Scope) -> bool:
        """Whether the request was meant for this server, so far as it can be told.

        A page of another site that a browser on this machine shows may have its own name point here (DNS
        rebinding): then the request carries that name, and no token. An address belongs to no site.
        """
        if self.any_host or self.token is not None:
            return True
        given = [value for name, value in scope["headers"] if name == b"host"]
        return all(_names_this(host) for host in given)

    def allows(self, scope: Scope) -> bool:
        """Whether the request carries the token."""
        if self.token is None:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.token)


def _names_this(host: bytes) -> bool:
    """Whether a Host header is an address or a name of this machine's loopback; with or without a port."""
    name = re.sub(rb":\d*$", b"", host.strip()).lower().rstrip(b".")
    if name in LOCAL_NAMES:
        return True
    try:
        ipaddress.ip_address(name.removeprefix(b"[").removesuffix(b"]").decode("ascii"))
    except ValueError:
        return False
    return True
