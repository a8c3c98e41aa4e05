"""Run the agent for a long time between two network namespaces, and print what it uses.

    soak.py MINUTES [--flap] [--beside] [CONFIG LINE...]
    soak.py --fast HOURS                     # hours of packets in minutes, without root: soak_fast.py

Jobs of Open MPI come and go (two ranks, one of them late now and then), captures of other jobs are replayed
between them with addresses and queue pairs of their own each time, and with --flap the link goes down and up
every two minutes. All of it by the clock, so that each quarter of an hour has the same load, however busy the
machine is. First come FILLED captures without a pause, so that what is bounded by number (flows that are
idle, series) is full before the quarters that are compared. Needs root; without mpicc and mpirun captures
alone are replayed. Prints a line every 30 s and the summary at the end.

With --beside two more agents capture the same, and are begun anew every quarter of an hour. What the first
one uses is then told as a share of what each new one uses for the same packets in the same seconds: other
work on the machine makes CPU seconds longer for all alike, so the share shows what an agent's age costs, and
how far the two new ones differ what is chance.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE / "tests" / "root"))

from network import Pair, run  # noqa: E402
from send import renamed  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


SLOT_S = 45.0
KINDS = ((0, 200), (25, 500), (0, 1000), (25, 200), (0, 500))
"""Jobs in turn, one in each slot: ms that a rank is late, and steps. Four rounds are a quarter of an hour."""
FILLED = 100
BEGUN_S, SETTLED_S = 900.0, 150.0
"""How long the agent beside runs, and from which age on it is compared: start-up and first jobs are over."""


class Jobs(threading.Thread):
    """A job in each slot, until stopped; counts what they did by their own logs."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        super().__init__(daemon=True)
        self.pair, self.folder, self.stopped = pair, folder, threading.Event()
        self.operations = self.runs = self.replayed = self.failed = self.missed = 0
        self.program = folder / "job"
        self.has_mpi = bool(shutil.which("mpicc") and shutil.which("mpirun"))
        if not self.has_mpi:
            print("no mpicc or mpirun: captures are replayed, no job runs")
            return
        source = HERE / "tests" / "root" / "job.c"
        subprocess.run(["mpicc", "-O1", "-o", str(self.program), str(source)], check=True)
        self.remote = folder / "remote"
        self.remote.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {pair.b} sh -c "$*"\n')
        self.remote.chmod(0o755)

    def run(self) -> None:
        draw = random.Random(1)
        for _ in range(FILLED):
            if not self.stopped.is_set():
                self.replay(draw, rate=8000)
        start_s, slot = time.monotonic(), 0
        while not self.stopped.wait(max(start_s + slot * SLOT_S - time.monotonic(), 0)):
            if self.has_mpi:
                self.job(*KINDS[slot % len(KINDS)])
            self.replay(draw)
            now = int((time.monotonic() - start_s) / SLOT_S)
            self.missed += now - slot
            slot = now + 1

    def job(self, late_ms: int, steps: int) -> None:
        settings = {
            "plm_rsh_agent": str(self.remote), "btl": "tcp,self", "btl_tcp_if_include": "10.77.0.0/24",
            "oob_tcp_if_include": "10.77.0.0/24",
        }  # fmt: skip
        mca = [word for name, value in settings.items() for word in ("--mca", name, value)]
        hosts = ["-H", "10.77.0.1,10.77.0.2", "-np", "2", "--map-by", "node"]
        command = [
            "mpirun",
            "--allow-run-as-root",
            *mca,
            *hosts,
            str(self.program),
            "1",
            str(late_ms),
            str(steps),
        ]
        inside = ["ip", "netns", "exec", self.pair.a, *command]
        self.runs += 1
        try:
            done = subprocess.run(inside, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:  # it began while the link was down; the next one may do better
            self.failed += 1
            return
        self.failed += done.returncode != 0
        self.operations += len(re.findall(r"^enter 1 ", done.stderr, re.MULTILINE))

    def replay(self, draw: random.Random, rate: int = 2000) -> None:
        """A capture of NCCL, from other addresses and queue pairs than the last time."""
        file = self.folder / "replay.pcap"
        file.write_bytes(renamed(HERE / "traces" / "nccl-allreduce-n2" / "node0.pcap.gz", draw))
        with contextlib.suppress(AssertionError, subprocess.SubprocessError):  # the link is down
            self.replayed += self.pair.send(self.pair.a, "west", file, rate=rate)


def used(pid: int) -> tuple[float, float, list[float], int, int]:
    """CPU seconds of the agent and of the process of its API, own memory of each (MiB, neither ring nor
    files); of the agent resident MiB, threads and open files."""
    beside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ticks, own = 0, []
    for process in (pid, *beside):
        stat = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(stat[11]) + int(stat[12])
        status = Path(f"/proc/{process}/status").read_text()
        own.append(int(status.partition("RssAnon:")[2].split()[0]) / 1024)
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 2**20
    threads = len(os.listdir(f"/proc/{pid}/task"))
    return ticks / TICKS, resident, own, threads, len(os.listdir(f"/proc/{pid}/fd"))


class Beside:
    """An agent of the same configuration, begun anew every BEGUN_S, and CPU of both from its SETTLED_S on."""

    def __init__(self, pair: Pair, folder: Path, lines: list[str], number: int) -> None:
        self.pair, self.folder, self.name = pair, folder, f"beside{number}"
        self.config = folder / f"{self.name}.yaml"
        text = "\n".join(lines).replace("/history", f"/{self.name}")
        self.config.write_text(text.replace(":9477", f":{9477 + number}"))
        self.pairs: list[tuple[float, float]] = []
        self.agent: subprocess.Popen[bytes] | None = None
        self.began_s, self.from_s = 0.0, None  # type: float, tuple[float, float] | None

    def look(self, now_s: float, of_first_s: float) -> None:
        """Count what both have used ``now_s`` after the start, the first one ``of_first_s`` of CPU."""
        if self.agent is None or now_s >= self.began_s + BEGUN_S:
            self.close()
            shutil.rmtree(self.folder / self.name, ignore_errors=True)
            self.agent = begin(self.pair, self.config, self.folder / f"{self.name}.log")
            self.began_s, self.from_s = now_s, None
            return
        if now_s < self.began_s + SETTLED_S:
            return
        mine_s = used(self.agent.pid)[0]
        if self.from_s is None:
            self.from_s = (of_first_s, mine_s)
            self.pairs.append((0.0, 0.0))
            return
        self.pairs[-1] = (of_first_s - self.from_s[0], mine_s - self.from_s[1])

    def close(self) -> None:
        if self.agent is not None:
            self.agent.terminate()
            self.agent.wait(60)

    def summary(self) -> None:
        for number, (first_s, new_s) in enumerate(self.pairs, 1):
            print(
                f"{self.name}: time {number}: {first_s:.1f} s of CPU, a new one's {new_s:.1f} s"
                f" ({first_s / max(new_s, 1e-3):.3f})"
            )


def begin(pair: Pair, config: Path, log: Path) -> subprocess.Popen[bytes]:
    """An agent in the second namespace."""
    command = [sys.executable, "-m", "dpuflow", "agent", "--config", str(config)]
    with log.open("ab") as errors:
        return subprocess.Popen(
            ["ip", "netns", "exec", pair.b, *command],
            stderr=errors,
            env=os.environ | {"PYTHONPATH": str(HERE)},
        )


def main() -> None:
    if sys.argv[1] == "--fast":
        os.execv(sys.executable, [sys.executable, str(HERE / "tools" / "soak_fast.py"), *sys.argv[2:]])
    words = [word for word in sys.argv[1:] if word not in ("--flap", "--beside")]
    minutes, flap = float(words[0]), "--flap" in sys.argv
    folder = Path(tempfile.mkdtemp(prefix="dpuflow-soak-"))
    folder.chmod(0o755)  # the agent leaves root
    config = folder / "agent.yaml"
    lines = [
        f"history: {{directory: {folder}/history, keep_size: 64MiB}}", "api: {listen: 127.0.0.1:9477}",
        "log: {format: json, status: 5s, level: debug}", *words[1:],
    ]  # fmt: skip
    config.write_text("\n".join(lines) + "\n")
    pair = Pair()
    beside: list[Beside] = []
    try:
        pair.give_addresses()
        agent = begin(pair, config, folder / "log")
        if "--beside" in sys.argv:
            beside = [Beside(pair, folder, lines, number) for number in (1, 2)]
        time.sleep(3)
        jobs = Jobs(pair, folder)
        jobs.start()
        watch(agent, jobs, pair, minutes, flap, folder, beside)
        jobs.stopped.set()
        jobs.join(120)
        time.sleep(15)
        agent.terminate()
        status = agent.wait(60)
        summarise(folder, jobs, status)
        for each in beside:
            each.summary()
    finally:
        for each in beside:
            each.close()
        pair.close()


def watch(
    agent: subprocess.Popen[bytes],
    jobs: Jobs,
    pair: Pair,
    minutes: float,
    flap: bool,
    folder: Path,
    beside: list[Beside],
) -> None:
    """Print a line every 30 s; with ``flap`` take the link down for a second every two minutes."""
    start, rows = time.monotonic(), []
    before = (start, used(agent.pid)[0])
    while time.monotonic() - start < 60 * minutes:
        time.sleep(30)
        if flap and len(rows) % 4 == 3:
            run("ip", "-n", pair.b, "link", "set", "east", "down")
            time.sleep(1)
            run("ip", "-n", pair.b, "link", "set", "east", "up")
        if agent.poll() is not None:
            print(f"the agent ended with {agent.returncode}: see {folder}/log")
            return
        cpu, resident, own, threads, files = used(agent.pid)
        now = time.monotonic()
        rows.append([now - start, (cpu - before[1]) / (now - before[0]), resident, sum(own)])
        before = (now, cpu)
        for new in beside:
            new.look(now - start, cpu)
        each = " + ".join(f"{size:.1f}" for size in own)
        print(
            f"{rows[-1][0] / 60:6.1f} min  cpu {100 * rows[-1][1]:5.1f} %  rss {resident:6.1f} MiB,"
            f" own {rows[-1][3]:6.1f} ({each})  threads {threads}  files {files}"
            f"  jobs {jobs.runs} ({jobs.failed} failed, {jobs.missed} slots missed)"
            f"  operations {jobs.operations}  replayed {jobs.replayed}",
            flush=True,
        )
    shares = [row[1] for row in rows]
    half = len(rows) // 2
    print(
        f"cpu: mean {100 * sum(shares) / len(shares):.1f} %, most {100 * max(shares):.1f} % of a core (30 s)"
    )
    for name, sizes in (("rss", [row[2] for row in rows]), ("own", [row[3] for row in rows])):
        third, last = sizes[half : half + half // 2], sizes[half + half // 2 :]
        print(
            f"{name}: first {sizes[0]:.1f}, most {max(sizes):.1f}, last {sizes[-1]:.1f} MiB; mean of the"
            f" third quarter {sum(third) / max(len(third), 1):.1f}, of the last"
            f" {sum(last) / len(last):.1f} MiB"
        )


def summarise(folder: Path, jobs: Jobs, status: int) -> None:
    """What the agent's own log says."""
    events = [json.loads(line) for line in (folder / "log").read_text().splitlines() if line.startswith("{")]
    health = [event for event in events if event["event"] == "status"]
    lags = sorted(event["lag_s"] for event in health)
    print(f"agent ended with {status}; {len(events)} lines of log")
    if lags:
        print(f"lag: median {lags[len(lags) // 2]:.2f} s, most {lags[-1]:.2f} s")
        last = health[-1]
        print(f"losses: {last['losses']}; errors {last['errors']}; degraded {last['degraded']}")
        print(
            f"held: messages {max(e['held_messages'] for e in health)}, flows"
            f" {max(e['held_flows'] for e in health)} at most; {last['collectives']} collectives published"
        )
        print(f"history: {last['history_bytes'] / 2**20:.1f} MiB")
    kinds: dict[str, int] = {}
    for event in events:
        kinds[event["event"]] = kinds.get(event["event"], 0) + 1
    print(
        f"events: {kinds}; jobs {jobs.runs}, operations {jobs.operations}, replayed packets {jobs.replayed}"
    )
    for event in events:
        if event["level"] == "error" or event["event"] == "traceback":
            print(f"{event['level']}: {event['text']}")
    print(f"log and history: {folder}")


if __name__ == "__main__":
    main()
