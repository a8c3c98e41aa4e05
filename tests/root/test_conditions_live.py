"""A service between network namespaces to which one thing after another happens, beside an agent on the front
end's node: each is told once, from when it began, closed once it is over, and nothing else is told."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network import FIRST, HERE, Star, run
from test_agent_live import Agent, running
from test_live_job import gloo_library

pytestmark = pytest.mark.long

RANKS, CLIENTS, BYTES = 3, 2, 1 << 16
LATE_NS = 2_000_000
SEVERE = ("warning", "critical")
BEFORE_S = 2  # what the machine itself does to a step: the onset is told to within that


Sent = tuple[float, dict[tuple[str, str], int]]
"""When it was, and what ``retransmitted`` said."""


@pytest.fixture
def star(programs: None) -> Iterator[Star]:
    for command in ("iptables", "tc"):
        if not shutil.which(command):
            pytest.skip(f"no {command} (packages iptables, iproute2)")
    try:
        made = Star(RANKS + CLIENTS)
    except AssertionError as error:
        pytest.skip(f"no bridge of network namespaces here: {error}")
    yield made
    made.close()


@contextlib.contextmanager
def serving(star: Star, folder: Path) -> Iterator[None]:
    """Ranks and clients at work while the block runs; a rank's orders are in ``folder``."""
    (folder / "store").mkdir()
    started = []
    program = (*FIRST, sys.executable, str(HERE / "service.py"))
    try:
        for n in range(RANKS):
            (folder / f"orders{n}").write_text("")
            where = (star.address(n), str(folder / "store"), str(folder / f"orders{n}"), str(BYTES))
            with (folder / f"rank{n}").open("wb") as said:
                started.append(
                    star.start(n, *program, "rank", gloo_library(), str(n), str(RANKS), *where, stderr=said)
                )
        waited = time.monotonic() + 60
        while not (folder / "rank0").read_bytes().startswith(b"enter"):
            assert time.monotonic() < waited, (folder / "rank0").read_text()
            time.sleep(0.1)
        started += [star.start(RANKS + n, *program, "client", star.address(0)) for n in range(CLIENTS)]
        yield
        assert [each.poll() for each in started] == [None] * len(started)
    finally:
        for each in started:
            each.send_signal(signal.SIGKILL)
            each.wait(60)


@contextlib.contextmanager
def losing(star: Star, hosts: tuple[int, ...], share: float) -> Iterator[None]:
    """What comes to ``hosts`` is lost at random."""
    rule = ("-p", "tcp", "-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")
    for n in hosts:
        run("ip", "netns", "exec", star.hosts[n], "iptables", "-A", "INPUT", *rule)
    yield
    for n in hosts:
        run("ip", "netns", "exec", star.hosts[n], "iptables", "-F", "INPUT")


@contextlib.contextmanager
def ordered(folder: Path, rank: int, order: str) -> Iterator[None]:
    """A rank does as it is told."""
    (folder / f"orders{rank}").write_text(order)
    yield
    (folder / f"orders{rank}").write_text("")


@contextlib.contextmanager
def shaped(star: Star, rate: str) -> Iterator[None]:
    """The switch's port to the first host is slow."""
    port = ("dev", "p0", "root")
    run("ip", "netns", "exec", star.switch, "tc", "qdisc", "add", *port, "tbf", "rate", rate, "burst", "16kb",
        "limit", "4mb")  # fmt: skip
    yield
    run("ip", "netns", "exec", star.switch, "tc", "qdisc", "del", *port)


def retransmitted(star: Star) -> dict[tuple[str, str], int]:
    """Segments that ranks' own kernels have sent again, by source and destination."""
    counts: dict[tuple[str, str], int] = {}
    ranks = [star.address(n) for n in range(RANKS)]
    for n, address in enumerate(ranks):
        # A line of addresses, and an indented one of what there is to be told.
        told = run("ip", "netns", "exec", star.hosts[n], "ss", "-tinO").splitlines()
        for peer in ranks:
            found = [each for each in told if f"{peer}:" in each]
            again = [int(each[1]) for line in found if (each := re.search(r"retrans:\d+/(\d+)", line))]
            counts[address, peer] = sum(again)
    return counts


def test_each_of_five_conditions_opens_and_closes_once(star: Star, tmp_path: Path) -> None:
    gloo_library()
    happening = {
        "straggler": (lambda: ordered(tmp_path, 0, "80"), [star.address(0)]),
        "packet_loss": (lambda: losing(star, (1,), 0.02), [star.address(0), star.address(1)]),
        "egress_loss": (lambda: losing(star, (3, 4), 0.05), [star.address(n) for n in (0, 3, 4)]),
        "slow_link": (lambda: shaped(star, "10mbit"), [star.address(1), star.address(0)]),
        "hang": (lambda: ordered(tmp_path, 2, "stop"), [star.address(2)]),
    }
    began: dict[str, float] = {}
    again: list[Sent] = []
    config = "capture: {interfaces: [eth]}\nlimits: {cpu: 200%}\n"
    with running(star, tmp_path, config) as agent, serving(star, tmp_path):
        agent.wait(lambda: agent.status()["collectives"] >= 100)
        for condition, (fault, _) in happening.items():
            again.append((time.time(), retransmitted(star)))
            with fault():
                began[condition] = time.time()
                agent.wait(lambda name=condition: told(agent, "finding", name, *SEVERE), 120)
            agent.wait(lambda name=condition: told(agent, "finding_closed", name), 120)
            time.sleep(5)
        again.append((time.time(), retransmitted(star)))
        assert not agent.events("analysis_failed", "capture_failed", "degraded")
    machine = [
        each["id"]
        for each in told(agent, "finding")
        if late_by_itself(tmp_path, each, began) or lost_by_itself(each, began, again)
    ]
    print(f"late or lost because the machine was busy, by what ranks and kernels tell: {len(machine)}")
    for event in ("finding", "finding_closed"):
        found = [each["condition"] for each in told(agent, event) if each["id"] not in machine]
        assert found == list(happening)
    # What a condition costs is seen as it goes on: it may open as information and be raised.
    for each in told(agent, "finding", None, *SEVERE):
        if each["id"] in machine:
            continue
        since_s = each["since_ns"] / 1e9 - began[each["condition"]]
        soon_s = each["time_ns"] / 1e9 - began[each["condition"]]
        print(f"{each['condition']}: told {soon_s:.1f} s after it began, since {since_s:+.2f} s")
        assert set(each["addresses"]) <= set(happening[each["condition"]][1])
        assert -BEFORE_S < since_s < soon_s


def late_by_itself(folder: Path, finding: dict[str, Any], began: dict[str, float]) -> bool:
    """Whether a rank that nothing was done to was late by its own log, a few times: the machine did that."""
    if finding["condition"] != "straggler" or abs(finding["since_ns"] / 1e9 - began["straggler"]) < BEFORE_S:
        return False
    steps: dict[str, dict[str, int]] = {}
    for n in range(RANKS):
        for rank, step, at in re.findall(r"enter (\d+) (\d+) (\d+)", (folder / f"rank{n}").read_text()):
            steps.setdefault(step, {})[f"10.78.0.{int(rank) + 1}"] = int(at)
    during = [
        entered
        for entered in steps.values()
        if len(entered) == RANKS and finding["since_ns"] <= max(entered.values()) <= finding["time_ns"]
    ]
    (who,) = finding["addresses"]
    return sum(entered[who] - min(entered.values()) > LATE_NS for entered in during) >= 3


def lost_by_itself(
    finding: dict[str, Any],
    began: dict[str, float],
    again: list[Sent],
) -> bool:
    """Whether ranks' kernels did send segments again while nothing was dropped: acknowledgments were late."""
    if (
        finding["condition"] != "packet_loss"
        or abs(finding["since_ns"] / 1e9 - began["packet_loss"]) < BEFORE_S
    ):
        return False
    at_s, ends = finding["time_ns"] / 1e9, finding["addresses"]
    for (from_s, before), (until_s, after) in itertools.pairwise(again):
        if from_s <= at_s < until_s:
            return any(after[pair] > before[pair] for pair in after if set(pair) <= set(ends))
    return False


def told(agent: Agent, event: str, condition: str | None = None, *severities: str) -> list[dict[str, Any]]:
    """The first of these events of each finding; if ``severities`` are given, the first of one of them."""
    first: dict[str, dict[str, Any]] = {}
    for each in agent.events(event):
        if condition in (None, each["condition"]) and (not severities or each["severity"] in severities):
            first.setdefault(each["id"], each)
    return list(first.values())
