"""Webhooks against real receivers: ones that fail, refuse, hang, check signatures."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from agent_http import make_certificate, serving
from agent_worlds import S, finding, window

from dpuflow.agent import webhook
from dpuflow.agent.board import Board, FindingState
from dpuflow.agent.config import Webhook
from dpuflow.errors import OptionError


@dataclass
class Post:
    """One request that a receiver got."""

    headers: dict[str, str]
    body: bytes
    time: float

    @property
    def what(self) -> tuple[str, str]:
        told = json.loads(self.body)
        return told["event"], told["finding"]["key"]


@dataclass
class Receiver:
    """A receiver that answers with the statuses in ``plan`` and then with ``usual``."""

    plan: list[int] = field(default_factory=list)
    usual: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    hold: Callable[[], object] | None = None
    posts: list[Post] = field(default_factory=list)
    url: str = ""

    def wait(self, count: int, seconds: float = 60) -> list[Post]:
        end = time.monotonic() + seconds
        while len(self.posts) < count:
            assert time.monotonic() < end, f"{len(self.posts)} posts, not {count}"
            time.sleep(0.01)
        return self.posts


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            made.posts.append(Post(headers, body, time.monotonic()))
            status = made.plan.pop(0) if made.plan else made.usual
            if made.hold is not None:
                made.hold()
            self.send_response(status)
            for name, value in {**made.headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    made.hold = None
    server.shutdown()
    server.server_close()


class Telling:
    """A board with webhooks; each call of ``tell`` publishes findings."""

    def __init__(self, *hooks: Webhook) -> None:
        self.board = Board()
        self.hooks = webhook.start(self.board, hooks, "dpu7")
        self._number = 0

    def tell(self, *findings: FindingState) -> None:
        self._number += 1
        self.board.publish(window(self._number), findings)

    def figures(self) -> dict[str, int]:
        (figures,) = self.hooks.figures().values()
        return figures

    def until(self, **wanted: int) -> None:
        end = time.monotonic() + 60
        while any(self.figures()[name] != count for name, count in wanted.items()):
            assert time.monotonic() < end, self.figures()
            time.sleep(0.01)


@pytest.fixture
def telling(receiver: Receiver) -> Iterator[Callable[..., Telling]]:
    made: list[Telling] = []

    def make(**settings: Any) -> Telling:
        made.append(Telling(Webhook(**{"url": receiver.url, **settings})))
        return made[-1]

    yield make
    for each in made:
        each.hooks.close()


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_PAUSE_S", 0.05)
    monkeypatch.setattr(webhook, "_JITTER_S", 0.05)


def test_a_receiver_that_fails_twice_gets_it_the_third_time(
    receiver: Receiver, telling: Callable[..., Telling]
) -> None:
    receiver.plan = [503, 500]
    made = telling()
    made.tell(finding())
    posts = receiver.wait(3)
    made.until(delivered=1)
    assert made.figures() == {
        "delivered": 1, "failed": 0, "refused": 0, "dropped": 0, "retries": 2, "queued": 0,
    }  # fmt: skip
    assert len({post.headers["webhook-id"] for post in posts}) == 1, "the same key in every try"
    assert len({post.body for post in posts}) == 1
    assert posts[0].headers["idempotency-key"] == posts[0].headers["webhook-id"]
    assert posts[2].time - posts[1].time >= 0.1  # twice the pause, and jitter
    assert made.board.health().errors == {}


def test_what_a_scheduler_needs_is_in_it(receiver: Receiver, telling: Callable[..., Telling]) -> None:
    telling().tell(finding())
    (post,) = receiver.wait(1)
    told = json.loads(post.body)
    assert post.headers["content-type"] == "application/json"
    assert (told["schema"], told["event"], told["sender"]) == ("dpuflow.notice/1", "finding_opened", "dpu7")
    row = told["finding"]
    assert (row["condition"], row["severity"], row["confidence"]) == ("straggler", "warning", 0.95)
    assert (row["since_ns"], row["first_ns"], row["last_ns"]) == (S, 2 * S, 3 * S)
    assert row["advice"] == "look at the GPU of node1"
    assert row["evidence"] == [
        {"capture": 0, "packets": [17, 42], "filter": "ip.src == 10.0.0.2", "unopenable": None}
    ]
    (endpoint,) = (told["endpoints"][each] for each in row["endpoints"])
    assert (endpoint["address"], endpoint["rank"], endpoint["label"]) == ("10.0.0.2", 1, "node1 gpu0")


def test_notices_of_a_finding_arrive_in_order_even_when_one_fails(
    receiver: Receiver, telling: Callable[..., Telling]
) -> None:
    receiver.plan = [503, 204, 503, 204]
    made = telling()
    made.tell(finding("a"), finding("b"))
    made.tell(finding("a", severity="critical"))
    made.tell(finding("a", active=False))
    posts = receiver.wait(6)
    heard = [post.what for post in posts]
    assert heard == [
        ("finding_opened", "a"), ("finding_opened", "a"),
        ("finding_opened", "b"), ("finding_opened", "b"),
        ("finding_changed", "a"),
        ("finding_closed", "a"),
    ]  # fmt: skip


def test_filters_by_condition_and_severity(receiver: Receiver, telling: Callable[..., Telling]) -> None:
    made = telling(conditions=["straggler", "packet_loss"], min_severity="warning")
    made.tell(finding("mild", severity="info"), finding("other", condition="congestion"), finding("a"))
    made.tell(finding("mild", severity="critical"))  # of which it has not heard: opened, for this receiver
    made.tell(finding("a", severity="info"))  # what it was told of, it is told the rest of
    made.tell(finding("a", active=False, severity="info"), finding("other", active=False))
    made.tell(finding("end", condition="packet_loss"))
    assert [post.what for post in receiver.wait(5)] == [
        ("finding_opened", "a"),
        ("finding_opened", "mild"),
        ("finding_changed", "a"),
        ("finding_closed", "a"),
        ("finding_opened", "end"),
    ]


@pytest.mark.parametrize("status", [400, 401, 404, 410, 302])
def test_an_answer_that_no_retry_mends_is_not_tried_again(
    receiver: Receiver, telling: Callable[..., Telling], status: int
) -> None:
    receiver.plan = [status]
    made = telling()
    made.tell(finding("a"), finding("b"))
    made.until(refused=1, delivered=1)
    assert [post.what[1] for post in receiver.posts] == ["a", "b"]
    assert made.board.health().errors == {"webhook": 1}


def test_retry_after_is_kept(receiver: Receiver, telling: Callable[..., Telling]) -> None:
    receiver.plan, receiver.headers = [429], {"Retry-After": "1"}
    telling().tell(finding())
    first, second = receiver.wait(2)
    assert second.time - first.time >= 1.0


def test_a_receiver_that_is_not_there_is_given_up_in_time(telling: Callable[..., Telling]) -> None:
    made = telling(url="http://127.0.0.1:9/hook", give_up=0.5)
    made.tell(finding())
    made.until(failed=1)
    assert made.figures()["retries"] >= 1
    assert made.board.health().errors == {"webhook": 1}


def test_a_receiver_that_hangs_holds_up_neither_the_agent_nor_others(receiver: Receiver) -> None:
    hanging = threading.Event()
    receiver.hold = hanging.wait
    fine = Receiver()
    made = Telling(
        Webhook(url=receiver.url, name="hangs", timeout=0.3, queue=3),
        Webhook(url="http://127.0.0.1:9/", name="dead", queue=3),
    )
    try:
        begin = time.monotonic()
        for number in range(200):
            made.tell(finding(f"f{number}"))
        assert time.monotonic() - begin < 30  # 200 times what the receiver is waited for: 60 s
        end = time.monotonic() + 60
        while made.hooks.figures()["hangs"]["dropped"] < 190 and time.monotonic() < end:
            time.sleep(0.01)
        figures = made.hooks.figures()
        for name in ("hangs", "dead"):
            assert figures[name]["queued"] <= 3
            assert 190 <= figures[name]["dropped"] <= 197
        hanging.set()
        receiver.hold = None
        newest = {"f197", "f198", "f199"}
        while not newest <= {post.what[1] for post in receiver.posts}:
            assert time.monotonic() < end, [post.what for post in receiver.posts]
            time.sleep(0.01)
    finally:
        hanging.set()
        begin = time.monotonic()
        made.hooks.close()
    assert time.monotonic() - begin < 30
    assert fine.posts == []


@pytest.mark.parametrize("fails", ["refused", "redirected", "not there", "slow"])
def test_no_log_holds_what_is_secret(
    receiver: Receiver,
    telling: Callable[..., Telling],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fails: str,
) -> None:
    """The path of a URL often is the key to a chat; a redirect would carry the token elsewhere."""
    secret, token = tmp_path / "secret", tmp_path / "token"
    secret.write_text("a hidden key of some length")
    token.write_text("hidden0123456789")
    other = Receiver()
    released = threading.Event()
    if fails == "slow":
        receiver.hold = released.wait
    receiver.plan = [302 if fails == "redirected" else 403]
    receiver.headers = {"Location": other.url}
    base = "http://127.0.0.1:9" if fails == "not there" else receiver.url.rsplit("/", 1)[0]
    made = telling(
        url=f"{base}/hidden/path?key=hidden", secret_file=str(secret), token_file=str(token),
        timeout=0.3, give_up=0.5,
    )  # fmt: skip
    made.tell(finding())
    try:
        made.until(**{"refused" if fails in ("refused", "redirected") else "failed": 1})
    finally:
        released.set()
    assert "webhook" in caplog.text
    assert "hidden" not in caplog.text
    assert other.posts == []


@pytest.mark.parametrize("kind", ["plain", "standard"])
def test_signature_and_token(
    receiver: Receiver, telling: Callable[..., Telling], tmp_path: Path, kind: str
) -> None:
    key = b"a secret of some length"
    secret, token = tmp_path / "secret", tmp_path / "token"
    secret.write_bytes(key if kind == "plain" else b"whsec_" + base64.b64encode(key))
    token.write_text("0123456789abcdef")
    telling(secret_file=str(secret), token_file=str(token)).tell(finding())
    (post,) = receiver.wait(1)
    assert post.headers["authorization"] == "Bearer 0123456789abcdef"
    signed = f"{post.headers['webhook-id']}.{post.headers['webhook-timestamp']}.".encode() + post.body
    made = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert post.headers["webhook-signature"] == f"v1,{made}"
    assert abs(int(post.headers["webhook-timestamp"]) - time.time()) < 60


def test_a_signature_as_the_specifications_example_has_it() -> None:
    body = b'{"test": 2432232314}'
    secret = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signature = webhook.sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", body)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_files_are_read_anew_and_one_that_is_gone_costs_a_notice_only(
    receiver: Receiver, telling: Callable[..., Telling], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    made = telling(token_file=str(token))
    token.write_text("fedcba9876543210")
    made.tell(finding("a"))
    receiver.wait(1)
    token.unlink()
    made.tell(finding("b"))
    made.until(failed=1)
    token.write_text("0000000000000000")
    made.tell(finding("c"))
    assert [post.headers["authorization"][7:11] for post in receiver.wait(2)] == ["fedc", "0000"]


def test_secrets_that_cannot_be_read_are_told_at_the_start(tmp_path: Path) -> None:
    for settings in (
        {"token_file": str(tmp_path / "none")},
        {"secret_file": str(tmp_path / "none")},
        {"ca_file": str(tmp_path / "none")},
    ):
        with pytest.raises(OptionError, match="No such file"):
            webhook.start(Board(), [Webhook(url="https://127.0.0.1/", **settings)], "here")
    bad = tmp_path / "bad"
    bad.write_text("whsec_%%%")
    with pytest.raises(OptionError, match="not base64"):
        webhook.start(Board(), [Webhook(url="https://127.0.0.1/", secret_file=str(bad))], "here")


def test_a_reload_keeps_what_waits_for_a_receiver_that_stays(receiver: Receiver) -> None:
    gate = threading.Event()
    receiver.hold = gate.wait
    stays = Webhook(url=receiver.url, name="stays")
    made = Telling(stays, Webhook(url="http://127.0.0.1:9/", name="goes"))
    try:
        made.tell(finding("a"), finding("b"))
        receiver.wait(1)
        made.hooks.reload([Webhook(url=receiver.url, name="stays"), Webhook(url=receiver.url, name="comes")])
        assert set(made.hooks.figures()) == {"stays", "comes"}
        gate.set()
        made.tell(finding("c"))
        heard = [post.what[1] for post in receiver.wait(4)]
        assert sorted(heard) == ["a", "b", "c", "c"]
    finally:
        gate.set()
        made.hooks.close()


def test_a_reload_that_cannot_be_changes_nothing(receiver: Receiver, tmp_path: Path) -> None:
    made = Telling(Webhook(url=receiver.url, name="stays"))
    try:
        threads = threading.active_count()
        with pytest.raises(OptionError, match="No such file"):
            made.hooks.reload(
                [
                    Webhook(url=receiver.url, name="stays"),
                    Webhook(url=receiver.url, name="new"),
                    Webhook(url=receiver.url, name="wrong", token_file=str(tmp_path / "none")),
                ]
            )
        assert set(made.hooks.figures()) == {"stays"}
        assert threading.active_count() == threads
        made.tell(finding())
        receiver.wait(1)
    finally:
        made.hooks.close()


def test_a_receiver_with_tls_is_trusted_by_its_certificate_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = make_certificate(tmp_path, "receiver")
    other, _ = make_certificate(tmp_path, "other")
    heard = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            heard.set()  # before the answer, which is all that delivery waits for
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"https://localhost:{server.server_address[1]}/"
    try:
        for trusted, outcome in ((other, "failed"), (None, "failed"), (cert, "delivered")):
            made = Telling(Webhook(url=url, ca_file=trusted, give_up=0.0))
            try:
                made.tell(finding())
                made.until(**{outcome: 1})
                assert heard.is_set() is (outcome == "delivered")
                # Not because of something else, as a name that is not resolved.
                assert ("certificate verify failed" in caplog.text) is (outcome == "failed")
                caplog.clear()
            finally:
                made.hooks.close()
    finally:
        server.shutdown()
        server.server_close()


def test_two_receivers_of_one_host_have_names_of_their_own_and_metrics(receiver: Receiver) -> None:
    host = receiver.url.split("/")[2]
    held = Board()
    hooks = [Webhook(url=receiver.url), Webhook(url=receiver.url + "?secret=1")]
    with serving(held, webhooks=hooks) as running:
        held.publish(window(0), (finding(),))
        receiver.wait(2)
        end = time.monotonic() + 60
        wanted = f'dpuflow_webhook_deliveries_total{{outcome="delivered",webhook="{host}-2"}} 1.0'
        while wanted not in (text := running.get("/metrics").body.decode()):
            assert time.monotonic() < end, text
        assert f'dpuflow_webhook_queued{{webhook="{host}"}} 0.0' in text
        assert set(running.get("/api/v1/health").json["webhooks"]) == {host, f"{host}-2"}
