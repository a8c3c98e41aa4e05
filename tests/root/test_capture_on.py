"""``dpuflow capture --on`` for real: two namespaces as nodes, and this machine by a real sshd on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from network import ENVIRONMENT, run, until_passed_on
from readings_live import packets_of

BIN = Path(sys.executable).parent
PATH = {"PATH": f"{BIN}:{os.environ['PATH']}"}


@pytest.fixture
def nodes(programs: None) -> Iterator[list[str]]:
    """Two namespaces whose interfaces, both named eth0, are joined: 10.79.0.1 and 10.79.0.2."""
    names = [f"dpuflow-on{k}-{os.getpid()}" for k in (1, 2)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            run("ip", "-n", name, "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def capture(*more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dpuflow", "capture", *more],
        env=ENVIRONMENT | PATH, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def count(file: Path) -> int:
    """Packets of a compressed file."""
    plain = file.with_suffix("")
    with file.open("rb") as packed, plain.open("wb") as out:
        zstandard.ZstdDecompressor().copy_stream(packed, out)
    return len(packets_of(plain))


def until_it_captures(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("capturing on "):
            return said
    pytest.fail(said)


TALK = """
import socket, sys, time
if sys.argv[1] == "listen":
    with socket.create_server(("10.79.0.2", 5001)) as server:
        peer, _ = server.accept()
        while peer.recv(65536): pass
else:
    for _ in range(100):
        try: peer = socket.create_connection(("10.79.0.2", 5001)); break
        except OSError: time.sleep(0.1)
    for _ in range(50): peer.sendall(bytes(1000)); time.sleep(0.005)
"""


def test_both_nodes_have_what_went_between_them(nodes: list[str], tmp_path: Path) -> None:
    process = capture(
        "--on", ",".join(nodes), "--over", "ip netns exec {node} {command}", "-i", "eth0",
        "-w", str(tmp_path / "job"), "--protocol", "tcp",
    )  # fmt: skip
    said = until_it_captures(process)
    talk = [
        subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-c", TALK, role])
        for name, role in ((nodes[1], "listen"), (nodes[0], "send"))
    ]
    assert [each.wait(timeout=120) for each in talk] == [0, 0]
    until_passed_on()
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 0, said + rest
    assert all(f"{name}: clock agrees with" in said for name in nodes)
    files = [tmp_path / "job" / f"{name}.pcapng.zst" for name in nodes]
    assert out.split() == ["dpuflow", "analyze", *map(str, files)]
    counts = [count(file) for file in files]
    assert counts[0] == counts[1] > 50
    done = subprocess.run(
        [sys.executable, "-m", *out.split()], env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "2 captures" in done.stdout


@pytest.fixture
def sshd(programs: None, tmp_path: Path) -> Iterator[list[str]]:
    """A real sshd of this test alone, its files in a folder; ssh's options to reach it."""
    server = shutil.which("sshd")
    if not server or not shutil.which("ssh"):
        pytest.skip("no ssh and sshd (packages openssh-client, openssh-server)")
    for name in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "passwd").write_text(
        Path("/etc/passwd").read_text() + "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"
    )
    config = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": tmp_path / "host", "PidFile": "none",
        "AuthorizedKeysFile": tmp_path / "user.pub", "StrictModes": "no", "UsePAM": "no",
        "PasswordAuthentication": "no", "PermitRootLogin": "yes",
        "SetEnv": f"PATH={PATH['PATH']} PYTHONPATH={ENVIRONMENT['PYTHONPATH']}",
    }  # fmt: skip
    (tmp_path / "config").write_text("".join(f"{key} {value}\n" for key, value in config.items()))
    # Its own user and folder are there for it alone: in a mount namespace.
    start = f"mount -t tmpfs tmpfs /run && mkdir /run/sshd && mount --bind {tmp_path}/passwd /etc/passwd && "
    start += f"exec {server} -D -e -f {tmp_path}/config"
    process = subprocess.Popen(["unshare", "-m", "sh", "-c", start], stderr=(tmp_path / "log").open("w"))
    try:
        for _ in range(600):
            if "Server listening" in (tmp_path / "log").read_text():
                break
            time.sleep(0.1)
        else:
            pytest.skip(f"sshd does not start here: {(tmp_path / 'log').read_text().strip()[-200:]}")
        yield [
            "ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR",
            "-F", "none", "-p", str(port), "-i", str(tmp_path / "user"),
        ]  # fmt: skip
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_over_a_real_ssh(sshd: list[str], tmp_path: Path) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    process = capture(
        "--on", f"{user}@127.0.0.1,{user}@localhost", "--over", f"{' '.join(sshd)} {{node}} {{line}}",
        "-i", "lo", "--protocol", "tcp", "-w", str(tmp_path / "job"), "--duration", "1.5",
        "--filter", "host 127.0.0.1",
    )  # fmt: skip
    out, said = process.communicate(timeout=120)
    assert process.returncode == 2  # --filter says it all
    process = capture(
        "--on", f"{user}@127.0.0.1,{user}@localhost", "--over", f"{' '.join(sshd)} {{node}} {{line}}",
        "-i", "lo", "-w", str(tmp_path / "job"), "--duration", "3", "--filter", "tcp and host 127.0.0.1",
    )  # fmt: skip
    said = until_it_captures(process)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        while process.poll() is None:  # on a busy machine the programs are attached late
            sender.sendall(bytes(500))
            receiver.recv(500)
            time.sleep(0.01)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 0, said + rest
    files = [tmp_path / "job" / f"{name}.pcapng.zst" for name in ("127.0.0.1", "localhost")]
    assert out.split()[2:] == [str(file) for file in files]
    assert min(count(file) for file in files) > 20


def test_a_broken_connection_leaves_nothing_behind(nodes: list[str], tmp_path: Path) -> None:
    """Killed here, so that nobody tells the nodes to end: their input ends, and so do they."""
    marker = f"10.79.{os.getpid() % 250}.9"
    process = capture(
        "--on", ",".join(nodes), "--over", "ip netns exec {node} {command}", "-i", "eth0",
        "-w", str(tmp_path / "job"), "--host", marker,
    )  # fmt: skip
    until_it_captures(process)
    process.kill()
    process.wait()
    for _ in range(300):
        left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if marker.encode() in _read(p)]
        if not left:
            return
        time.sleep(0.2)
    pytest.fail(f"still running: {left}")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
