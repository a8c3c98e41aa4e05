"""The agent's door under attack: slow and many clients, probes meanwhile, two agents, root left behind."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_http import make_certificate, serving
from agent_worlds import board

from dpuflow.agent import connection, door
from dpuflow.agent.config import Api
from dpuflow.agent.config import History as Settings
from dpuflow.agent.folder import claim, release
from dpuflow.agent.history import History
from dpuflow.agent.log import Log
from dpuflow.cli import run
from dpuflow.errors import DpuflowError


@contextlib.contextmanager
def crowd(port: int, count: int, said: bytes, hosts: int = 1) -> Iterator[list[socket.socket]]:
    """So many clients, from ``hosts`` addresses, that have said this and say no more."""
    made = []
    for k in range(count):
        client = socket.socket()
        client.bind((f"127.0.0.{2 + k % hosts}", 0))
        with contextlib.suppress(ConnectionError):
            client.connect(("127.0.0.1", port))
            client.sendall(said)
        made.append(client)
    try:
        yield made
    finally:
        for client in made:
            client.close()


def answer(port: int, path: str = "/healthz", source: str = "127.0.0.1") -> bytes:
    """The first bytes that a client gets."""
    with socket.create_connection(("127.0.0.1", port), timeout=30, source_address=(source, 0)) as client:
        client.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
        return client.recv(64)


def open_ones(clients: list[socket.socket]) -> int:
    """How many are still connected."""
    count = 0
    for client in clients:
        client.setblocking(False)
        try:
            count += bool(client.recv(1000))
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


HALF = b"GET /api/v1/groups HTTP/1.1\r\nHost: localhost\r\n"


def test_one_address_cannot_take_all_connections() -> None:
    """300 unfinished connections of one client made /healthz answer 503, and kubelet restart the agent."""
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with crowd(port, 300, HALF) as clients:
            assert answer(port).startswith(b"HTTP/1.1 200")
            assert open_ones(clients) <= door.PER_ADDRESS


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2"], ids=["another", "a crowd's own"])
def test_who_comes_is_answered_whatever_crowd_asks_nothing(source: str) -> None:
    """400 unfinished requests of 8 addresses had probes answered by 503, for as long as new ones came; one's
    own address with 64 of them was reset."""
    api = Api(listen="127.0.0.1:0", health="127.0.0.1:0")
    with serving(board(), api) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        health = running.parts.probes.address[1]  # type: ignore[union-attr]
        with crowd(port, 400, HALF, hosts=8), crowd(health, 400, HALF, hosts=8), crowd(health, 200, HALF):
            for _ in range(5):
                assert answer(port, source=source).startswith(b"HTTP/1.1 200")
                assert answer(health, source=source).startswith(b"HTTP/1.1 200")
            assert answer(health, "/readyz").startswith(b"HTTP/1.1 ")
            assert answer(health, "/api/v1/groups").startswith(b"HTTP/1.1 404")


def trickle(client: socket.socket, over: threading.Event) -> None:
    """A byte of a header now and then, for ever: slowloris."""
    with contextlib.suppress(OSError):
        while not over.wait(0.1):
            client.sendall(b"x")


def test_slowloris_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends a byte now and then never finishes, and is let go as one who sends none."""
    monkeypatch.setattr(connection, "REQUEST_S", 0.5)
    over = threading.Event()
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with crowd(port, 40, HALF + b"X-A: ") as clients:
            for client in clients:
                threading.Thread(target=trickle, args=(client, over), daemon=True).start()
            for client in clients:
                client.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    assert client.recv(1000) == b""
            over.set()
        assert answer(port).startswith(b"HTTP/1.1 200")
    assert 2 * 2.5 <= 5.0 == connection.HANDSHAKE_S


def test_handshakes_that_never_end_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS: what has not shaken hands is no connection yet, and was left a minute."""
    from dpuflow.agent import server

    monkeypatch.setattr(server, "HANDSHAKE_S", 0.5)
    cert, key = make_certificate(tmp_path, "agent")
    with serving(board(), Api(listen="127.0.0.1:0", tls_cert=cert, tls_key=key)) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with crowd(port, 50, b"\x16\x03\x01") as clients:
            for client in clients:
                client.settimeout(30)
                with contextlib.suppress(ConnectionError):
                    while client.recv(1000):
                        pass
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain, trusting.wrap_socket(plain):
            pass


def test_who_is_being_answered_is_not_put_out_for_who_comes() -> None:
    """An event stream goes on, whatever crowd comes."""
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        stream = b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with crowd(port, 2, stream, hosts=2) as streams:
            for client in streams:
                client.settimeout(30)
                assert client.recv(64).startswith(b"HTTP/1.1 200")
            with crowd(port, 600, HALF, hosts=20):
                assert answer(port).startswith(b"HTTP/1.1 200")
                assert open_ones(streams) == 2


FLOODED = """
import gc, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from agent_http import make_certificate, serving
from agent_worlds import board
from dpuflow.agent.config import Api
from dpuflow.agent.usage import restrain_allocator
restrain_allocator()
cert, key = make_certificate(Path(sys.argv[2]), "agent")
with serving(board(), Api(listen="127.0.0.1:0", tls_cert=cert, tls_key=key)) as running:
    print(running.parts.server.address[1], flush=True)
    sys.stdin.read(1)
"""


def test_handshakes_that_never_end_take_no_memory_without_bound(tmp_path: Path) -> None:
    """1,500 within seconds took 560 MiB, and the agent left packets out for want of memory."""
    command = [sys.executable, "-c", FLOODED, str(Path(__file__).parent), str(tmp_path)]
    flooded = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert flooded.stdout is not None

    def taken() -> int:
        """MiB, at the most so far."""
        status = Path(f"/proc/{flooded.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) >> 10

    try:
        port = int(flooded.stdout.readline())
        before = taken()
        for _ in range(5):
            with crowd(port, 300, b"\x16\x03\x01", hosts=50):
                time.sleep(0.5)
        assert taken() - before < 200
    finally:
        flooded.communicate("x")


def test_who_does_not_take_the_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one after the other, and no answer read: what the server holds for such a client ends."""
    monkeypatch.setattr(connection, "REQUEST_S", 0.3)
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(30)
            client.connect(("127.0.0.1", port))
            request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
            with pytest.raises(OSError, match=r"reset|pipe"):
                client.sendall(request * 100_000)
        assert answer(port).startswith(b"HTTP/1.1 200")


def drip(clients: list[socket.socket], over: threading.Event, every_s: float, count: int) -> None:
    """All read so much now and then, and no more."""
    while not over.wait(every_s):
        for client in clients:
            with contextlib.suppress(OSError):
                client.recv(count, socket.MSG_DONTWAIT)


def test_who_takes_the_answer_drop_by_drop_is_cut_and_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 connections that read 512 B a second were kept, and /healthz beside them had no answer."""
    monkeypatch.setattr(connection, "REQUEST_S", 1.0)
    over = threading.Event()
    with serving(board()) as running, contextlib.ExitStack() as closing:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        clients = []
        for k in range(300):
            client = closing.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.bind((f"127.0.0.{2 + k % 8}", 0))
            client.connect(("127.0.0.1", port))
            with contextlib.suppress(OSError):
                client.sendall(b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 30)
            clients.append(client)
        dripping = threading.Thread(target=drip, args=(clients, over, 0.2, 200))
        dripping.start()
        try:
            for _ in range(5):
                start_s = time.monotonic()
                assert answer(port).startswith(b"HTTP/1.1 200")
                assert time.monotonic() - start_s < 5
            end_s = time.monotonic() + 30
            while ended(clients) < len(clients):
                assert time.monotonic() < end_s
                time.sleep(0.2)
        finally:
            over.set()
            dripping.join()


def ended(clients: list[socket.socket]) -> int:
    """How many connections the server has ended, whatever is still to be read."""
    states = [client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for client in clients]
    return sum(state != 1 for state in states)  # TCP_ESTABLISHED


def test_who_takes_a_large_answer_over_a_slow_link_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the rate that is asked for."""
    monkeypatch.setattr(connection, "REQUEST_S", 0.5)
    request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(board()) as running, socket.socket() as client:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(30)
        client.connect(("127.0.0.1", port))
        client.sendall(request * 6 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        got = b""
        while part := client.recv(4096):
            got += part
            time.sleep(len(part) / (4 * connection.LEAST_TAKEN))
        assert got.count(b"HTTP/1.1 200") == 7
        assert got.endswith(b"}")


def test_a_bad_request_behind_a_good_one_is_no_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Both were answered at once, which ended in an exception in the log. Found by fuzzing."""
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                client.sendall(b"GET /api/v1/groups HTTP/1.1\r\nHost: localhost\r\n\r\n\0\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    while client.recv(1000):
                        pass
        assert answer(port, "/api/v1/groups").startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_two_agents_on_one_history_are_refused(tmp_path: Path) -> None:
    """They merged and removed each other's files."""
    settings, log = Settings(directory=str(tmp_path / "history")), Log(stream=io.StringIO())
    first = History(settings, "node0", log)
    with pytest.raises(DpuflowError, match="another agent already writes the history of node0 there"):
        History(settings, "node0", log)
    History(settings, "node1", log).close()  # another node's, on a common disk
    first.close()
    History(settings, "node0", log).close()


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Status and words of ``dpuflow agent --check``."""

    def check(text: str, *more: str) -> str:
        file = tmp_path / "agent.yaml"
        file.write_text("capture: {interfaces: [lo]}\n" * ("capture" not in text) + text)
        status = run(["agent", "--config", str(file), "--check", *more])
        out, err = capsys.readouterr()
        return f"{status}: {out}{err}"

    return check


def test_check_tells_of_interfaces_and_folders(reachable: Path, checked: Callable[..., str]) -> None:
    assert checked(f"history: {{directory: {reachable}}}\n").endswith("agent.yaml: OK\n")
    said = checked("capture: {interfaces: [lo, nosuch0]}\n")
    assert said.startswith("1: ")
    assert "capture.interfaces: nosuch0: no such interface" in said
    new = reachable / "a" / "b"
    said = checked(f"history: {{directory: {new}}}\n")
    assert said.startswith(f"0: history.directory: {new} does not exist; the agent will create it")
    assert not list(reachable.iterdir())
    (file := reachable / "file").touch()
    said = checked(f"history: {{directory: {file}/b}}\n")
    assert said.startswith("1: ")
    assert f"{file}: Not a directory" in said
    for folder in ("/proc/x", "/sys", "/dev/null"):
        assert checked(f"history: {{directory: {folder}}}\n").startswith("1: ")
    assert 'history.directory: "" is no folder' in checked('history: {directory: ""}\n')


def test_check_tells_of_addresses_that_cannot_be_listened_at(
    reachable: Path, checked: Callable[..., str]
) -> None:
    text = f"history: {{directory: {reachable}}}\nlog: {{level: error}}\n"

    def said(listen: str, health: str = "off") -> str:
        return checked(
            f"{text}node: node0\napi: {{listen: '{listen}', health: '{health}', insecure: true}}\n"
        )

    assert said("127.0.0.1:9433", "127.0.0.1:9434").startswith("0: ")
    assert "api.health: is the same address and port as api.listen" in said("[::1]:9433", "[::1]:9433")
    assert said("0.0.0.0:9433", "127.0.0.1:9433").startswith("1: ")
    assert "192.0.2.1:9433: Cannot assign requested address" in said("192.0.2.1:9433")
    with door.Door(("127.0.0.1", 9433), 1):
        assert "api.listen: 127.0.0.1:9433: Address already in use" in said("127.0.0.1:9433")
        held = claim(str(reachable), "node0")
        assert said("127.0.0.1:9433").startswith(
            "0: "
        )  # an agent with this history runs: the port is its own
        release(held)
        assert said("127.0.0.1:9433").startswith("1: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="root may become somebody")
def test_check_asks_for_the_user_that_the_agent_becomes(reachable: Path, checked: Callable[..., str]) -> None:
    """To root everything is writable."""
    (reachable / "notes").touch()
    text = f"history: {{directory: {reachable}}}\n"
    assert "holds notes, which is not a history's" in checked(text, "--user", "nobody")
    assert checked(text, "--user", "root").startswith("0: ")
    reachable.chmod(0o700)
    said = checked(f"history: {{directory: {reachable}/history}}\n", "--user", "nobody")
    assert "cannot be used as nobody: " in said
    assert "Permission denied" in said
    assert [path.name for path in reachable.iterdir()] == ["notes"]
    assert os.geteuid() == 0


DROPPED = """
import os, sys, threading
from dpuflow.agent.capabilities import become, drop_all
def held():
    lines = open("/proc/thread-self/status").read().splitlines()
    return [l.split()[1] for l in lines if l.startswith(("CapPrm", "CapEff", "CapBnd", "NoNewPrivs"))]
print(become("nobody", [sys.argv[1]]), os.getuid(), os.getgroups(), *held())
threading.Thread(target=lambda: (drop_all(), print(*held()))).start()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone has anything to give up")
def test_root_is_left_behind(tmp_path: Path) -> None:
    """Started by hand as root, the agent kept all capabilities while it served HTTP."""
    done = subprocess.run(
        [sys.executable, "-c", DROPPED, str(tmp_path / "history")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    main, serving_thread = done.stdout.splitlines()
    name, uid, groups, permitted, effective, bounding, no_new = main.split()
    assert (name, groups, no_new) == ("nobody", "[]", "1")
    assert uid != "0"
    wanted = 1 << 12 | 1 << 13 | 1 << 38 | 1 << 39
    assert int(permitted, 16) == int(effective, 16)
    assert int(permitted, 16) | wanted == wanted
    assert int(bounding, 16) | wanted == wanted
    assert serving_thread.split()[:2] == ["0" * 16] * 2
    assert (tmp_path / "history").stat().st_uid == int(uid)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that users other than root may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


HANDED = """
import sys
from dpuflow.agent.capabilities import become
try:
    print(become("nobody", [sys.argv[1]]))
except Exception as error:
    print(type(error).__name__, error)
"""


def handed_over(folder: Path) -> str:
    """What an agent says that root has started with this folder for its history."""
    command = [sys.executable, "-c", HANDED, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def owners(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_uid for path in [folder, *folder.iterdir()]}


NOBODY = 65534
SEGMENT = "node0-20261121T163000Z-1-2.dpuflow"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone has any to hand over")
def test_a_folder_with_others_files_is_not_handed_over(reachable: Path) -> None:
    """``directory: /etc`` gave nobody the password file."""
    (reachable / "shadow").write_text("secret")
    (reachable / SEGMENT).write_text("")
    assert "holds shadow, which is not a history's, and is not handed over to nobody" in handed_over(
        reachable
    )
    assert set(owners(reachable).values()) == {0}
    reachable.chmod(0o777)
    assert handed_over(reachable) == "nobody"  # who may write there anyway; all in it stays whose it is
    assert set(owners(reachable).values()) == {0}


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone has any to hand over")
def test_a_history_is_handed_over_file_by_file(reachable: Path) -> None:
    own = [
        SEGMENT,
        SEGMENT + ".new",
        SEGMENT + ".damaged",
        "findings.jsonl",
        "findings.jsonl.1",
        ".node0.lock",
    ]
    for name in own:
        (reachable / name).write_text("")
    (reachable / "lost+found").mkdir()
    assert handed_over(reachable) == "nobody"
    assert owners(reachable) == {**dict.fromkeys([reachable.name, *own], NOBODY), "lost+found": 0}
    (reachable / "notes").write_text("")  # in a folder that is nobody's already
    (reachable / (SEGMENT + ".new")).unlink()
    (reachable / (SEGMENT + ".new")).write_text("")
    assert handed_over(reachable) == "nobody"
    assert owners(reachable)["notes"] == 0
    assert owners(reachable)[SEGMENT + ".new"] == NOBODY


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_others_stay_who_they_are() -> None:
    from dpuflow.agent.capabilities import become

    assert become() is None


def test_a_kill_in_the_middle_of_a_write_leaves_no_file_unreadable(tmp_path: Path) -> None:
    """200 kills while segments are written: whatever has its final name is whole."""
    from dpuflow.store.columns import load_tables
    from dpuflow.store.segments import named_segments

    source = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4" / "node0.pcap.gz"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(source), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    kills = [int(line) for line in writer.stdout]
    assert writer.wait() == 0
    assert len(kills) == 200
    files = named_segments(str(tmp_path))
    assert len(files) > 20
    for file in files:
        assert len(load_tables(file.path).messages) > 0


WRITES = """
import os, random, signal, sys, time
from dpuflow.ingest import ingest
from dpuflow.store.columns import save_tables
from dpuflow.store.segments import segment_name
tables = ingest([sys.argv[1]], "node0")
draw = random.Random(1)
for k in range(200):
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        for n in range(1000):
            os.write(tell, b".")
            at = 1_000_000 * k + n
            save_tables(tables, os.path.join(sys.argv[2], segment_name("node0", at, at + 1)), durable=True)
        os._exit(0)
    for _ in range(draw.randrange(1, 4)):  # in its first, second or third write, however slow the machine
        os.read(told, 1)
    time.sleep(draw.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)
    print(k)
"""


def test_time_is_not_asked_of_clients() -> None:
    """A request of a healthy client is served at once beside a crowd."""
    with serving(board()) as running:
        port = running.parts.server.address[1]  # type: ignore[union-attr]
        with crowd(port, 60, HALF, hosts=6):
            start = time.process_time()
            for _ in range(20):
                assert answer(port).startswith(b"HTTP/1.1 200")
            assert time.process_time() - start < 10


def test_check_tells_of_a_user_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["agent", "--check", "--user", "nobody-of-this-name"]) == 1
    assert "no such user: nobody-of-this-name" in capsys.readouterr().err
