"""``dpuflow mirror`` on the real kernel: u32 and mirred between namespaces; what is there before stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

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
    _, said = process.communicate(timeout=30)
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
    process.communicate(timeout=30)
    assert process.returncode == 0
    import dpkt

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
    process.communicate(timeout=30)
    assert pair.rules() == before
    run(*inside, "qdisc", "del", "dev", "east", "clsact")
    process = pair.mirror(*WORDS)
    started(process)
    run(*inside, "filter", "add", "dev", "east", "ingress", *theirs)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert pair.rules().split() == before.split()
    run(*inside, "filter", "add", "dev", "east", "egress", "protocol", "ip", "pref", "55776", "u32",
        "match", "u32", "0", "0")  # fmt: skip
    before = pair.rules()
    process = pair.mirror(*WORDS)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "something else has pref 55776 there" in said
    assert pair.rules() == before


def test_after_a_kill_the_next_one_or_doctor_undoes_it(pair: Monitored) -> None:
    before = pair.rules()
    for cleaner in (("doctor", "--clean"), ("mirror", *WORDS, "--", "true")):
        process = pair.mirror(*WORDS)
        started(process)
        process.kill()
        process.communicate(timeout=30)
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


def test_a_commands_status_and_what_the_kernel_lacks(pair: Monitored) -> None:
    before = pair.rules()
    process = pair.mirror(*WORDS, "--", "sh", "-c", "exit 7")
    process.communicate(timeout=30)
    assert process.returncode == 7
    process = pair.mirror("tc", "--from", "east", "--peer", "m1", "--to", "m0")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.startswith("dpuflow: tc filter add dev east ingress")  # no flower here, or no hardware
    assert said.count("\n") == 1
    assert pair.rules() == before
    assert not os.listdir(pair.folder)
