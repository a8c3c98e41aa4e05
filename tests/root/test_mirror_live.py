"""``dpuflow mirror`` on the real kernel: u32 and mirred between namespaces; what is there before stays."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dpkt
import pytest
from network import ENVIRONMENT, Pair, run
from readings_live import packets_of
from send import frames


class Monitored(Pair):
    """In ``b`` copies of ``east`` can go to ``m0``, and are read at ``m1``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.environment = ENVIRONMENT | {"DPUFLOW_RUN": str(folder)}
        self.folder = folder
        run("ip", "-n", self.b, "link", "add", "m0", "mtu", "9000", "type", "veth",
            "peer", "name", "m1", "mtu", "9000")  # fmt: skip
        for device in ("m0", "m1"):
            run("ip", "-n", self.b, "link", "set", device, "up")

    def mirror(self, *words: str, **more: object) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.b, sys.executable, "-m", "dpuflow", "mirror", *words]
        return subprocess.Popen(
            command,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
            **more,  # type: ignore[call-overload]
        )

    def rules(self) -> str:
        """All that is configured at ``east``, without counters."""
        shown = [
            run("ip", "netns", "exec", self.b, "tc", *what)
            for what in (
                ("qdisc", "show", "dev", "east"),
                ("filter", "show", "dev", "east", "ingress"),
                ("filter", "show", "dev", "east", "egress"),
            )
        ]
        return re.sub(r"\b8\d\d\b", "800", "\n".join(shown))  # u32 numbers its tables anew


@pytest.fixture
def pair(programs: None, tmp_path: Path) -> Iterator[Monitored]:
    try:
        made = Monitored(tmp_path / "run")
    except AssertionError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


WORDS = ("tc-software", "--from", "east", "--to", "m0", "--receiver", "m1")


def started(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("mirroring east"), line + process.stderr.read()


def test_copies_of_both_directions(
    pair: Monitored, nccl: list[Path], gloo: list[Path], tmp_path: Path
) -> None:
    before, file = pair.rules(), tmp_path / "x.pcapng"
    copies = ["-i", "m1", "-w", str(file), "--snaplen", "0", "--protocol", "any"]
    process = pair.mirror(
        *WORDS, "--protocol", "roce", "--", sys.executable, "-m", "dpuflow", "capture", *copies
    )
    started(process)
    assert process.stderr is not None
    assert "capturing on m1" in process.stderr.readline()
    there = pair.send(pair.a, "west", *nccl, *gloo, rate=20000)
    back = pair.send(pair.b, "east", *nccl, rate=20000)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert pair.rules() == before
    roce = [frame for frame in frames(nccl[0]) if frame[23] == 17 and frame[36:38] == b"\x12\xb7"]
    assert there > back > len(roce) > 1000
    assert [packet.data for packet in packets_of(file)] == roce + roce
    assert not list(pair.folder.iterdir())


def test_everything(pair: Monitored, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "x.pcap"
    process = pair.mirror(*WORDS, "--protocol", "any")
    started(process)
    with pair.tcpdump(pair.b, "m1", file, "-Q", "in"):
        sent = pair.send(pair.a, "west", *nccl, rate=20000)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 0
    with file.open("rb") as opened:
        assert [bytes(data) for _, data in dpkt.pcap.Reader(opened)] == frames(nccl[0])
    assert sent == len(frames(nccl[0]))


def test_what_others_have_stays(pair: Monitored) -> None:
    """Their qdisc, their filters; and where theirs came meanwhile, the qdisc as well."""
    inside = ("ip", "netns", "exec", pair.b, "tc")
    run(*inside, "qdisc", "add", "dev", "east", "clsact")
    theirs = ("protocol", "ip", "pref", "7", "u32", "match", "ip", "protocol", "1", "0xff")
    run(*inside, "filter", "add", "dev", "east", "ingress", *theirs)
    before = pair.rules()
    process = pair.mirror(*WORDS)
    started(process)
    assert "pref 55776" in pair.rules()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert pair.rules() == before
    run(*inside, "qdisc", "del", "dev", "east", "clsact")
    process = pair.mirror(*WORDS)
    started(process)
    run(*inside, "filter", "add", "dev", "east", "ingress", *theirs)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert pair.rules().split() == before.split()
    run(*inside, "filter", "add", "dev", "east", "egress", "protocol", "ip", "pref", "55776", "u32",
        "match", "u32", "0", "0")  # fmt: skip
    before = pair.rules()
    process = pair.mirror(*WORDS)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "something else has pref 55776 there" in said
    assert pair.rules() == before


def test_after_a_kill_the_next_one_or_doctor_undoes_it(pair: Monitored) -> None:
    before = pair.rules()
    for cleaner in (("doctor", "--clean"), ("mirror", *WORDS, "--", "true")):
        process = pair.mirror(*WORDS)
        started(process)
        process.kill()
        process.communicate(timeout=120)
        assert "pref 55776" in pair.rules()
        (left,) = pair.folder.iterdir()
        assert json.loads(left.read_text())["pid"] == process.pid
        told = subprocess.run(
            ["ip", "netns", "exec", pair.b, sys.executable, "-m", "dpuflow", "doctor"],
            env=pair.environment,
            capture_output=True,
            text=True,
        )
        assert "NO  mirrors" in told.stdout
        elsewhere = subprocess.run(
            [sys.executable, "-m", "dpuflow", "doctor", "--clean"],
            env=pair.environment,
            capture_output=True,
            text=True,
        )
        assert "east" not in elsewhere.stdout  # another network namespace
        done = subprocess.run(
            ["ip", "netns", "exec", pair.b, sys.executable, "-m", "dpuflow", *cleaner],
            env=pair.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert pair.rules() == before
        assert not list(pair.folder.iterdir())


def test_filters_of_a_killed_mirror_are_found_without_its_notes(pair: Monitored) -> None:
    """Killed in a container whose /run went with it, they copied on; the next mirror was refused."""
    inside = ["ip", "netns", "exec", pair.b]

    def dpuflow(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*inside, sys.executable, "-m", "dpuflow", *words]
        return subprocess.run(command, env=pair.environment, capture_output=True, text=True, timeout=120)

    theirs = ("protocol", "ip", "pref", "55778", "u32", "match", "ip", "protocol", "1", "0xff")
    run(*inside, "tc", "qdisc", "add", "dev", "east", "clsact")
    run(*inside, "tc", "filter", "add", "dev", "east", "ingress", *theirs)
    before = pair.rules()
    for cleaner in (("doctor", "--clean"), ("mirror", *WORDS, "--", "true")):
        process = pair.mirror(*WORDS)
        started(process)
        (notes,) = pair.folder.iterdir()
        notes.unlink()
        assert "ok  mirrors      none" in dpuflow("doctor").stdout  # it lives
        assert dpuflow("doctor", "--clean").stdout == "nothing was left behind\n"
        process.kill()
        process.communicate(timeout=120)
        assert "NO  mirrors      1 left behind" in dpuflow("doctor").stdout
        done = dpuflow(*cleaner)
        assert done.returncode == 0, done.stderr
        assert "tc filter add dev east egress protocol ip pref 55776 u32" in done.stdout + done.stderr
        assert pair.rules() == before


def test_a_commands_status_and_what_the_kernel_lacks(pair: Monitored) -> None:
    before = pair.rules()
    process = pair.mirror(*WORDS, "--", "sh", "-c", "exit 7")
    process.communicate(timeout=120)
    assert process.returncode == 7
    process = pair.mirror("tc", "--from", "east", "--peer", "m1", "--to", "m0")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.startswith("dpuflow: tc filter add dev east ingress")  # no flower here, or no hardware
    assert said.count("\n") == 1
    assert pair.rules() == before
    assert not os.listdir(pair.folder)


# -- Open vSwitch ---------------------------------------------------------------------------------


def schema_of(program: str) -> Path:
    """Of the same package, installed or unpacked."""
    places = (folder / "share/openvswitch/vswitch.ovsschema" for folder in Path(program).parents)
    return next(place for place in places if place.exists())


class Switch:
    """An Open vSwitch of its own, forwarding in user space, with ports p0, h0 and c0 in a namespace."""

    def __init__(self, space: str, folder: Path) -> None:
        self.space, self.folder = space, folder
        folder.mkdir()
        names = ("OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "OVS_SYSCONFDIR")
        self.environment = ENVIRONMENT | dict.fromkeys(names, str(folder)) | {"DPUFLOW_RUN": f"{folder}/run"}
        schema, database, socket = (
            str(schema_of(shutil.which("ovs-vswitchd") or "")),
            f"{folder}/db",
            f"{folder}/db.sock",
        )
        self.do("ovsdb-tool", "create", database, schema)
        common = ("--detach", "--no-chdir")
        self.do("ovsdb-server", database, f"--remote=punix:{socket}", *common, f"--pidfile={folder}/a.pid",
                f"--log-file={folder}/a.log")  # fmt: skip
        self.do("ovs-vsctl", "--no-wait", "init")
        self.do(
            "ovs-vswitchd",
            f"unix:{socket}",
            *common,
            f"--pidfile={folder}/b.pid",
            f"--log-file={folder}/b.log",
        )
        self.do(
            "ovs-vsctl", "--timeout=10", "add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"
        )
        for port in ("p0", "h0", "c0"):
            run("ip", "-n", space, "link", "add", port, "mtu", "9000", "type", "veth",
                "peer", "name", f"{port}x", "mtu", "9000")  # fmt: skip
            for device in (port, f"{port}x"):
                run("ip", "-n", space, "link", "set", device, "up")
        for port in ("p0", "h0"):
            self.do("ovs-vsctl", "--timeout=10", "add-port", "br0", port)

    def do(self, *command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.space, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self) -> tuple[str, str]:
        return (
            self.do("ovs-vsctl", "--columns=name,mirrors,ports", "list", "bridge"),
            self.do("ovs-vsctl", "--columns=name", "list", "mirror"),
        )

    def close(self) -> None:
        for name in ("b.pid", "a.pid"):
            file = self.folder / name
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)


@pytest.fixture
def switch(pair: Monitored, tmp_path: Path) -> Iterator[Switch]:
    if not shutil.which("ovs-vswitchd"):
        pytest.skip("no Open vSwitch (package openvswitch-switch)")
    made = Switch(pair.b, tmp_path / "ovs")
    yield made
    made.close()


def test_ovs_copies_and_is_as_before(
    pair: Monitored, switch: Switch, nccl: list[Path], tmp_path: Path
) -> None:
    theirs = (
        "--",
        "--id=@m",
        "create",
        "mirror",
        "name=theirs",
        "--",
        "add",
        "bridge",
        "br0",
        "mirrors",
        "@m",
    )
    switch.do("ovs-vsctl", *theirs)
    before, file = switch.state(), tmp_path / "x.pcap"
    every = frames(nccl[0])
    there = [frame for frame in every if frame[6:12] == every[0][6:12]][:3000]
    source = tmp_path / "there.pcap"
    with source.open("wb") as opened:
        writer = dpkt.pcap.Writer(opened, snaplen=1 << 16)
        for number, frame in enumerate(there):
            writer.writepkt(frame, number)
    process = subprocess.Popen(
        ["ip", "netns", "exec", pair.b, sys.executable, "-m", "dpuflow", "mirror", "ovs", "--from", "p0",
         "--to", "c0", "--receiver", "c0x"],
        env=switch.environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "mirroring p0 by ovs\n"
    produced = tmp_path / "h.pcap"
    with pair.tcpdump(pair.b, "c0x", file, "-Q", "in"), pair.tcpdump(pair.b, "h0x", produced, "-Q", "in"):
        time.sleep(0.5)
        pair.send(pair.b, "p0x", source, rate=4000)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    for captured in (file, produced):
        with captured.open("rb") as opened:
            found = [bytes(data) for _, data in dpkt.pcap.Reader(opened)]
        ours = [frame for frame in found if frame[6:12] == there[0][6:12]]
        # OVS forwards in user space here: out of order at first, and it may lose some on a busy machine.
        assert len(ours) > 0.9 * len(there)
        assert not Counter(ours) - Counter(there)
    assert switch.state() == before
    assert "not a port of an OVS bridge" in refused_by(pair, switch, "--from", "west", "--to", "c0")


def refused_by(pair: Monitored, switch: Switch, *words: str) -> str:
    done = subprocess.run(
        ["ip", "netns", "exec", pair.b, sys.executable, "-m", "dpuflow", "mirror", "ovs", *words],
        env=switch.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    return done.stderr
