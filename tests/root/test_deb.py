"""The Debian package on this very machine: installs, starts as its unit would, is removed, leaves nothing.

It changes the system, so it runs only where DPUFLOW_DEB names the package (``make deb-check``).
"""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path("/lib/systemd/system/dpuflow-agent.service")
LEFT = ("/usr/lib/dpuflow", "/usr/bin/dpuflow", "/etc/dpuflow", "/var/lib/dpuflow", "/var/cache/dpuflow")
TRACES = Path(__file__).resolve().parents[2] / "traces"


def run(*command: str, timeout: float = 3600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd="/")


SHARED = (
    "/usr/share/man/man1/dpuflow.1",
    "/usr/share/man/man1/dpuflow-analyze.1",
    "/usr/share/bash-completion/completions/dpuflow",
    "/usr/share/zsh/vendor-completions/_dpuflow",
    "/usr/share/fish/vendor_completions.d/dpuflow.fish",
)


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    package = os.environ.get("DPUFLOW_DEB")
    if not package:
        pytest.skip("DPUFLOW_DEB names no package: make deb-check does")
    if os.path.exists("/usr/lib/dpuflow"):
        pytest.skip("dpuflow is installed here already")
    done = run("apt-get", "-qq", "install", "-y", "--no-install-recommends", os.path.abspath(package))
    assert done.returncode == 0, done.stderr
    yield
    done = run("apt-get", "-qq", "purge", "-y", "dpuflow")
    assert done.returncode == 0, done.stderr
    assert not [path for path in LEFT if os.path.exists(path)]


def test_its_kernels_are_compiled(installed: None) -> None:
    kernels = Path("/usr/lib/dpuflow/dpuflow/kernels")
    assert [*kernels.glob("shipped-*.so"), *kernels.glob("__pycache__/kernels-*.so")]


def test_the_command_finds_the_late_rank(installed: None) -> None:
    files = sorted(str(path) for path in (TRACES / "gloo-allreduce-n4").glob("node*.pcap.gz"))
    done = run("dpuflow", "analyze", *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LATE: 10.77.0.3")


@pytest.mark.parametrize("file", SHARED)
def test_manual_pages_and_completions_are_where_they_are_looked_for(installed: None, file: str) -> None:
    assert [path for path in (Path(file), Path(f"{file}.gz")) if path.exists()]


def test_doctor_finds_the_programs(installed: None) -> None:
    said = run("dpuflow", "doctor").stdout
    assert "libbpf.so.1 found" in said
    assert "the eBPF programs load" in said


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def as_the_unit_starts_it(name: str) -> list[str]:
    """User, capabilities, no new privileges and a read-only system, by the tools of util-linux."""
    unit = service()
    rights = ",".join("+" + word.removeprefix("CAP_").lower() for word in unit["AmbientCapabilities"].split())
    drop = [
        "setpriv",
        *(f"--reuid={unit['User']}", f"--regid={unit['Group']}", "--clear-groups", "--no-new-privs"),
        *(f"--inh-caps=-all,{rights}", f"--ambient-caps=-all,{rights}", f"--bounding-set=-all,{rights}"),
        *shlex.split(unit["ExecStart"]),
    ]
    writable = ("/var/lib/dpuflow", "/var/cache/dpuflow")
    mounts = [f"mount --bind {path} {path}" for path in writable]
    mounts += ["mount -o remount,ro,bind /", "mount -t tmpfs tmpfs /tmp", f"exec {shlex.join(drop)}"]
    return ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-ec", "; ".join(mounts)]


def test_the_service_starts_as_its_unit_would_and_answers(installed: None, tmp_path: Path) -> None:
    name = f"dpuflow-deb-{os.getpid()}"
    assert run("ip", "netns", "add", name).returncode == 0
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    # The service has a /tmp of its own, and abstract names end with the network namespace.
    place = Path(f"/run/{name}")
    notify.bind(str(place))
    place.chmod(0o777)
    notify.settimeout(60)
    try:
        for command in ("link add a0 type veth peer name a1", "link set a0 up", "link set a1 up",
                        "link set lo up"):  # fmt: skip
            assert run("ip", "-n", name, *command.split()).returncode == 0
        Path("/etc/dpuflow/agent.yaml").write_text("capture:\n  interfaces: [a0]\n")
        environment = {**os.environ, "NOTIFY_SOCKET": str(place)}
        for entry in shlex.split(service()["Environment"]):
            key, _, value = entry.partition("=")
            environment[key] = value
        agent = subprocess.Popen(
            as_the_unit_starts_it(name), env=environment, stderr=subprocess.PIPE, text=True
        )
        try:
            try:
                assert b"READY=1" in notify.recv(4096)
            except TimeoutError:
                agent.kill()
                pytest.fail(f"it did not become ready: {agent.communicate()[1]}")
            status = Path(f"/proc/{agent.pid}/status").read_text()
            uid = next(line.split()[1] for line in status.splitlines() if line.startswith("Uid:"))
            assert int(uid) != 0
            ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9477/api/v1/health').read().decode())"
            end = time.monotonic() + 60
            said = run("ip", "netns", "exec", name, "python3", "-c", ask)
            while said.returncode and time.monotonic() < end:
                time.sleep(0.5)
                said = run("ip", "netns", "exec", name, "python3", "-c", ask)
            assert said.returncode == 0, said.stderr
            assert json.loads(said.stdout)
        finally:
            agent.send_signal(signal.SIGTERM)
            errors = agent.communicate(timeout=30)[1]
        assert agent.returncode == 0, errors
        attached = run("ip", "-n", name, "-d", "link", "show", "a0").stdout
        assert "xdp" not in attached
    finally:
        notify.close()
        place.unlink()
        run("ip", "netns", "delete", name)


def test_what_it_brings_of_others_is_listed(installed: None) -> None:
    """A CycloneDX list of every Python library inside, each with the version that is there."""
    listed = json.loads(Path("/usr/share/doc/dpuflow/sbom.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    named = {canonical(each["name"]): each["version"] for each in listed["components"]}
    there = {
        canonical(each.metadata["Name"]): each.version
        for each in importlib.metadata.distributions(path=["/usr/lib/dpuflow"])
    }
    assert there
    assert there.items() <= named.items()


def test_a_second_build_has_the_same_bytes(tmp_path: Path) -> None:
    """From a clone, with another umask, at another time; its kernels compiled anew."""
    package = Path(os.environ.get("DPUFLOW_DEB") or pytest.skip("DPUFLOW_DEB names no package"))
    checkout = Path(__file__).resolve().parents[2]
    changed = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"]
    if subprocess.run(changed, capture_output=True, text=True, check=True).stdout:
        pytest.skip("a clone lacks what is not committed here")
    subprocess.run(["git", "clone", "-q", "--no-local", str(checkout), str(tmp_path / "clone")], check=True)
    named = re.fullmatch(r"dpuflow_.*~(\w+)_(\w+)\.deb", package.name)
    assert named is not None
    own = {"PYTHONPATH": str(tmp_path / "clone"), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    subprocess.run(
        ["sh", "tools/deb.sh", *named.groups()], cwd=tmp_path / "clone", umask=0o077, check=True,
        env=os.environ | own | {"PYTHON": sys.executable}, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "clone/dist" / package.name).read_bytes() == package.read_bytes()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
