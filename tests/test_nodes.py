"""``dpuflow capture --on``: one window on all nodes, their files, and what becomes of nodes that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpuflow.errors import OptionError
from dpuflow.live import sync
from dpuflow.live.nodes import command_for, split_nodes

PROJECT = Path(__file__).resolve().parents[1]

SSH = """#!/bin/sh
# ssh -o BatchMode=yes NODE LINE: the node's words, here.
shift 2; NODE=${1#*@}; export NODE
echo "Welcome to $NODE"
case $NODE in down*) echo "ssh: connect to host $NODE port 22: Connection refused" >&2; exit 255 ;; esac
exec sh -c "$2"
"""
DPUFLOW = """#!{python}
# A node's dpuflow whose capture notes its window; node "ahead" has a clock of its own.
import json, os, sys, time
node = os.environ["NODE"]
if node == "old":
    sys.exit("No such option: --as-node")
from dpuflow.live import node as served
real = time.time_ns
served.time.time_ns = lambda: real() + (7_000_000_000 if node == "ahead" else 0)
def take(path, watcher, stopped):
    if node == "slow":  # its programs take long to load
        time.sleep(1)
        open(os.environ["ATTACHED"], "w").close()
    with open(path, "w") as file:
        began = real()
        watcher.started(None)
        try:
            while not stopped():
                time.sleep(0.01)
                if node == "breaks":
                    print("dpuflow: eth2: the interface is gone", file=sys.stderr)
                    raise SystemExit(1)
                if node == "vanishes":
                    os._exit(9)
        finally:
            json.dump({{"began": began, "ended": real(), "words": sys.argv[1:]}}, file)
served.serve(take, ".pcapng.zst", open(0, "rb", buffering=0), sys.stdout.buffer)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A PATH with the made-up ssh and dpuflow."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("ssh", SSH), ("dpuflow", DPUFLOW.format(python=sys.executable))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(PROJECT)}


def start(environment: dict[str, str], *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dpuflow", "capture", *more],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )  # fmt: skip


def test_all_nodes_have_one_window_whatever_their_clocks_show(
    environment: dict[str, str], tmp_path: Path
) -> None:
    job = tmp_path / "job"
    process = start(
        environment, "--on", "node1,root@ahead", "--on", "node3", "-i", "eth2", "-w", str(job),
        "--duration", "0.5", "--filter", "roce and (host 10.0.0.1 or host 10.0.0.2)", "--promiscuous",
    )  # fmt: skip
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    files = [job / f"{name}.pcapng.zst" for name in ("node1", "ahead", "node3")]
    assert out.split() == ["dpuflow", "analyze", *map(str, files)]
    windows = [json.loads(file.read_text()) for file in files]
    begins, ends = ([window[key] for window in windows] for key in ("began", "ended"))
    assert max(ends) - min(ends) < 5_000_000_000  # the clock that is 7 s ahead did not move its window
    assert min(ends) - max(begins) > 450_000_000  # all have all of it
    for window in windows:
        assert window["words"] == [
            "capture", "--interface", "eth2", "--filter", "roce and (host 10.0.0.1 or host 10.0.0.2)",
            "--promiscuous", "--as-node",
        ]  # fmt: skip
    told = [line for line in said.splitlines() if line.startswith("root@ahead: clock ")]
    assert " ms ahead of this machine's (+-" in told[0]


def test_nodes_that_fail_are_named_and_the_rest_goes_on(environment: dict[str, str], tmp_path: Path) -> None:
    job = tmp_path / "job"
    process = start(
        environment, "--on", "node1,down2,old,breaks,vanishes", "-i", "eth2", "-w", str(job),
        "--duration", "0.2",
    )  # fmt: skip
    out, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert out.split()[2:] == [str(job / "node1.pcapng.zst"), str(job / "breaks.pcapng.zst")]
    assert "down2: FAILED: ssh: connect to host down2 port 22: Connection refused" in said
    assert "old: FAILED: No such option: --as-node" in said
    assert "breaks: FAILED: eth2: the interface is gone" in said
    assert "vanishes: FAILED: exited with status 9" in said
    assert (
        said.splitlines()[-1] == "dpuflow: no complete capture from down2, old, breaks, vanishes; see above"
    )
    assert sorted(path.name for path in job.iterdir()) == ["breaks.pcapng.zst", "node1.pcapng.zst"]


def test_the_window_begins_when_all_nodes_capture(environment: dict[str, str], tmp_path: Path) -> None:
    attached = tmp_path / "attached"
    process = start(
        environment | {"ATTACHED": str(attached)},
        "--on", "node1,slow", "-i", "eth2", "-w", str(tmp_path / "job"), "--duration", "0.2",
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("capturing on node1, slow"):
            break
    assert attached.exists()
    process.communicate(timeout=120)
    ends = [json.loads(file.read_text())["ended"] for file in (tmp_path / "job").iterdir()]
    assert min(ends) > attached.stat().st_mtime_ns


def test_ctrl_c_ends_the_window_on_all_and_collects(environment: dict[str, str], tmp_path: Path) -> None:
    job = tmp_path / "job"
    process = start(environment, "--on", "node1,node2", "-i", "eth2", "-w", str(job))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("capturing on node1, node2"):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 0
    for name in ("node1", "node2"):
        assert json.loads((job / f"{name}.pcapng.zst").read_text())["ended"]


def test_no_node_answers(environment: dict[str, str], tmp_path: Path) -> None:
    """Each is named, and no empty folder stays."""
    process = start(environment, "--on", "down1,down2", "-i", "eth2", "-w", str(tmp_path / "job"))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    refused = "FAILED: ssh: connect to host {0} port 22: Connection refused"
    *each, last = said.splitlines()
    assert sorted(each) == [f"{name}: {refused.format(name)}" for name in ("down1", "down2")]
    assert last == "dpuflow: no node answered"
    assert not (tmp_path / "job").exists()


def test_a_node_that_fails_is_named_before_the_window(environment: dict[str, str], tmp_path: Path) -> None:
    """A capture of an hour that lacks a node can be begun anew at once."""
    process = start(
        environment, "--on", "node1,down2", "-i", "eth2", "-w", str(tmp_path), "--duration", "0.5", "--quiet"
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("down2: FAILED: ssh: connect")
    assert not list(tmp_path.glob("*.pcapng.zst"))  # the window goes on
    process.communicate(timeout=120)


def test_what_a_node_that_has_gone_did_not_take_is_not_tried_again() -> None:
    """At the very end it was, and the last line was a BrokenPipeError."""
    script = """
import subprocess, sys
from pathlib import Path
from dpuflow.live.nodes import Node
node = Node("n", Path("f"), subprocess.Popen(["true"], stdin=subprocess.PIPE))
node.process.wait()
try:
    node.tell("attach")
except BrokenPipeError:
    print("gone")
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", script],  # else silent before 3.13
        capture_output=True, text=True, check=True, cwd=PROJECT,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("gone\n", "")


def test_ways_to_run_a_command() -> None:
    words = ["dpuflow", "capture", "--filter", "qp 17"]
    line = "dpuflow capture --filter 'qp 17'"
    assert command_for("ssh {node} sudo -n {line}", "n1", words) == ["ssh", "n1", "sudo", "-n", line]
    assert command_for("kubectl exec -i pod-{node} -- {command}", "n1", words) == [
        "kubectl", "exec", "-i", "pod-n1", "--", *words
    ]  # fmt: skip
    for wrong in ("ssh {node}", "ssh {line}", "ssh '{node} {line}"):
        with pytest.raises(OptionError, match="--over"):
            command_for(wrong, "n1", words)


def test_nodes_are_named_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="twice"):
        split_nodes(("node1,root@node1",), tmp_path, ".x")
    with pytest.raises(OptionError, match="needs node names"):
        split_nodes((" , ",), tmp_path, ".x")
    assert [n.file.name for n in split_nodes(("a/b, c",), tmp_path, ".x")] == ["a_b.x", "c.x"]


PMC = """sending: GET TIME_STATUS_NP
	b8cef6.fffe.5ba0cc-0 seq 0 RESPONSE MANAGEMENT TIME_STATUS_NP
		master_offset              -12
		ingress_time               1700000000000000000
		gmPresent                  true
		gmIdentity                 b8cef6.fffe.5ba0aa
"""
CHRONY = "A9FEA97B,169.254.169.123,4,1700000000.1,-0.000012345,0.1,0.1,1,0,0.1,0.0004,0.00005,64.0,Normal\n"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"pmc": PMC, "chronyc": CHRONY}, "PTP: -12 ns from its grandmaster b8cef6.fffe.5ba0aa"),
        ({"pmc": PMC.replace("true", "false"), "chronyc": CHRONY},
         "NTP: chronyd, -12.3 us from 169.254.169.123, within 250 us"),
        ({"chronyc": CHRONY.replace("Normal", "Not synchronised")}, "NTP: chronyd is not synchronised"),
    ],
    ids=["ptp", "chrony", "chrony-alone"],
)  # fmt: skip
def test_state_of_a_clock(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str], said: str) -> None:
    monkeypatch.setattr(sync, "_ask", lambda name, *more: answers.get(name, ""))
    assert sync.clock_state() == said


def test_state_of_a_clock_as_the_kernel_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_ask", lambda *command: "")
    assert sync.clock_state().startswith(("synchronised, within ", "not synchronised"))
