"""Notices of findings, posted to schedulers and inference controllers as they open, change and close.

In: a board's findings and the ``webhooks`` section. Out: HTTP POSTs of ``models.Notice``. Each receiver has a
bounded queue and a thread: its notices arrive in order, one at a time, and are tried again with growing,
jittered pauses; a slow or dead receiver holds up neither the agent nor the other receivers. Headers follow
the Standard Webhooks specification (webhook-id, the same in every try, is the idempotency key).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import random
import secrets
import threading
import time
import urllib.parse
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dpuflow import __version__
from dpuflow.agent import metricnames as names
from dpuflow.agent.access import read_certificates, read_secret, read_token
from dpuflow.agent.config import SEVERITIES
from dpuflow.agent.models import notice, to_json
from dpuflow.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import urllib3
    from prometheus_client.metrics_core import Metric as Family

    from dpuflow.agent.board import Board, FindingState
    from dpuflow.agent.config import Webhook as Settings
    from dpuflow.agent.models import FindingEvent

_log = logging.getLogger(__name__)

OUTCOMES: Final = ("delivered", "failed", "refused", "dropped")
_AGAIN: Final = frozenset({408, 425, 429, *range(500, 600)})
"""Answers that may be another one next time; to any other but 2xx, sending the same again is of no use."""

_PAUSE_S: Final = 0.5  # 1 s before the third try, then twice as long each time
_LONGEST_PAUSE_S: Final = 60.0
_JITTER_S: Final = 1.0  # is added, so that a thousand agents do not come back in step
_KNOWN: Final = 10_000  # findings remembered as told; the rules of findings keep far fewer open
_CLOSING_S: Final = 2.0


class _Queued(NamedTuple):
    id: str
    body: bytes
    what: str  # for the log


def start(board: Board, hooks: Iterable[Settings], sender: str) -> Webhooks:
    """Begin to post. Raises OptionError where a token, secret or certificate file cannot be used."""
    return Webhooks(board, list(hooks), sender)


class Webhooks:
    """All receivers, and the thread that hands them what the board tells."""

    def __init__(self, board: Board, hooks: list[Settings], sender: str) -> None:
        self._board = board
        self._sender = sender
        self._receivers = self._made(hooks, {})
        self._subscription = board.subscribe()
        self._thread = threading.Thread(target=self._follow, name="webhooks", daemon=True)
        self._thread.start()

    def reload(self, hooks: list[Settings]) -> None:
        """Take another list: receivers whose settings are the same keep what waits for them.

        Raises OptionError where a file of it cannot be used, and then changes nothing.
        """
        before = self._receivers
        self._receivers = self._made(hooks, before)
        for name, receiver in before.items():
            if self._receivers.get(name) is not receiver:
                receiver.close()

    def close(self) -> None:
        """Stop; what waits is counted as dropped."""
        self._subscription.close()
        self._thread.join(5)
        for receiver in self._receivers.values():
            receiver.close()

    def figures(self) -> dict[str, dict[str, int]]:
        """For each receiver: notices by outcome, retries, how many wait."""
        return {name: receiver.figures() for name, receiver in self._receivers.items()}

    def describe(self) -> Iterator[Family]:
        """Nothing, as with all collectors here."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """The figures as metrics, for the registry."""
        metrics = names.DELIVERIES, names.RETRIES
        sent, retries = (CounterMetricFamily(each.name, each.about, labels=each.labels) for each in metrics)
        queued = GaugeMetricFamily(names.QUEUED.name, names.QUEUED.about, labels=names.QUEUED.labels)
        for name, figures in self.figures().items():
            for outcome in OUTCOMES:
                sent.add_metric((name, outcome), figures[outcome])
            retries.add_metric((name,), figures["retries"])
            queued.add_metric((name,), figures["queued"])
        yield from (sent, retries, queued)

    def _made(self, hooks: list[Settings], before: dict[str, Receiver]) -> dict[str, Receiver]:
        made: dict[str, Receiver] = {}
        for hook in hooks:
            base = name = hook.name or urllib.parse.urlsplit(hook.url).netloc.rpartition("@")[2]
            number = 1
            while name in made:
                number += 1
                name = f"{base}-{number}"
            held = before.get(name)
            try:
                made[name] = held if held and held.settings == hook else Receiver(self._board, hook, name)
            except OptionError:
                for each in set(made.values()) - set(before.values()):
                    each.close()
                raise
        return made

    def _follow(self) -> None:
        for event in self._subscription:
            if event.finding is None:
                continue
            for receiver in self._receivers.values():
                try:
                    receiver.offer(event.kind, event.time_ns, event.finding, self._sender)  # type: ignore[arg-type]
                except Exception:
                    _log.exception("a notice could not be made")
                    self._board.count_error("webhook")


class Receiver:
    """One receiver: its filter, its queue, its thread."""

    def __init__(self, board: Board, settings: Settings, name: str) -> None:
        self.settings = settings
        self._board = board
        self._name = name
        self._counts = dict.fromkeys((*OUTCOMES, "retries"), 0)
        self._told: dict[str, None] = {}
        self._waiting: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._headers(b"", "")  # files that cannot be read are told now, not with the first finding
        self._pool = _make_pool(settings)
        self._thread = threading.Thread(target=self._work, name=f"webhook {name}", daemon=True)
        self._thread.start()

    def offer(self, event: FindingEvent, time_ns: int, state: FindingState, sender: str) -> None:
        """Queue a notice if the receiver wants it; the oldest one goes where there is no room.

        What it was told of, it is told the end of: then no filter applies. The first it hears of a finding
        (as when that has become more severe) is that it opened.
        """
        told = state.id in self._told
        if not told and (not state.active or not self._wants(state)):
            return
        event = event if told else "finding_opened"
        if state.active:
            self._told[state.id] = None
            if len(self._told) > _KNOWN:
                del self._told[next(iter(self._told))]
        else:
            self._told.pop(state.id, None)
        made = _Queued(
            f"msg_{secrets.token_hex(12)}",
            to_json(notice(event, time_ns, state, sender)),
            f"{event} {state.condition}",
        )
        with self._changed:
            if len(self._waiting) >= self.settings.queue:
                self._waiting.popleft()
                self._count("dropped")
            self._waiting.append(made)
            self._changed.notify()

    def figures(self) -> dict[str, int]:
        """Notices by outcome, retries, how many wait."""
        return {**self._counts, "queued": len(self._waiting)}

    def close(self) -> None:
        """Stop; what waits is dropped and counted."""
        self._stop.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(_CLOSING_S)
        with self._changed:
            for _ in self._waiting:
                self._count("dropped")
            self._waiting.clear()
        self._pool.clear()

    def _wants(self, state: FindingState) -> bool:
        conditions = self.settings.conditions
        severe = SEVERITIES.index(state.severity) >= SEVERITIES.index(self.settings.min_severity)
        return severe and (not conditions or state.condition in conditions)

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stop.is_set())
                if self._stop.is_set():
                    return
                head = self._waiting.popleft()
            try:
                outcome = self._deliver(head)
            except Exception as error:  # such as a token file that is gone
                _log.warning("webhook %s: %s: %s", self._name, head.what, error)
                outcome = "failed"
            self._count(outcome)

    def _count(self, outcome: str) -> None:
        self._counts[outcome] += 1
        if outcome != "delivered":
            self._board.count_error("webhook")

    def _deliver(self, head: _Queued) -> str:
        """Post until it is taken, refused, or ``give_up`` is over."""
        import urllib3

        end = time.monotonic() + self.settings.give_up
        retry = urllib3.Retry(
            total=None,
            backoff_factor=_PAUSE_S,
            backoff_max=_LONGEST_PAUSE_S,
            backoff_jitter=_JITTER_S,
            allowed_methods=None,
        )
        while True:
            response, error = None, None
            try:
                response = self._post(head)
            except urllib3.exceptions.HTTPError as failure:
                error = failure
            if response is not None and 200 <= response.status < 300:
                return "delivered"
            why = f"answered {response.status}" if response is not None else f"{error}"
            if response is not None and response.status not in _AGAIN:
                _log.warning("webhook %s: %s: %s", self._name, head.what, why)
                return "refused"
            retry = retry.increment("POST", self._name, response, error)
            asked = retry.get_retry_after(response) if response is not None else None
            # Retry tries again at once after the first failure (a connection that had been closed); so that a
            # thousand agents do not do so in step, they wait a little.
            pause = max(asked or 0.0, retry.get_backoff_time() or random.uniform(0, _JITTER_S))
            if time.monotonic() + pause > end or self._stop.wait(pause):
                _log.warning("webhook %s: %s: given up: %s", self._name, head.what, why)
                return "failed"
            self._counts["retries"] += 1

    def _post(self, head: _Queued) -> urllib3.BaseHTTPResponse:
        import urllib3

        return self._pool.request(
            "POST",
            self.settings.url,
            body=head.body,
            headers=self._headers(head.body, head.id),
            timeout=urllib3.Timeout(total=self.settings.timeout),
            retries=False,
            redirect=False,
        )

    def _headers(self, body: bytes, number: str) -> dict[str, str]:
        """Token and secret are read anew each time: whatever renews the files need not tell the agent."""
        settings = self.settings
        what = f"webhooks: {self._name}"
        stamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"dpuflow/{__version__}",
            "webhook-id": number,
            "webhook-timestamp": stamp,
            "Idempotency-Key": number,
        }
        if settings.token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(settings.token_file, what).decode()}"
        if settings.secret_file is not None:
            headers["webhook-signature"] = sign(read_secret(settings.secret_file, what), number, stamp, body)
        return headers


def sign(secret: bytes, number: str, stamp: str, body: bytes) -> str:
    """The signature of the Standard Webhooks specification: HMAC-SHA256 over id, timestamp and body.

    A secret that begins with ``whsec_`` is base64; any other is taken as it is. Raises OptionError.
    """
    if secret.startswith(b"whsec_"):
        try:
            secret = base64.b64decode(secret.removeprefix(b"whsec_"), validate=True)
        except binascii.Error:
            raise OptionError("webhooks: the secret after whsec_ is not base64") from None
    signed = f"{number}.{stamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()


def _make_pool(settings: Settings) -> urllib3.PoolManager:
    import urllib3  # late: most agents have no webhooks, and 2 MiB less without

    if settings.ca_file is None:
        return urllib3.PoolManager(num_pools=1, maxsize=1, cert_reqs="CERT_REQUIRED")
    read_certificates(settings.ca_file, "webhooks: ca_file")
    return urllib3.PoolManager(num_pools=1, maxsize=1, cert_reqs="CERT_REQUIRED", ca_certs=settings.ca_file)
