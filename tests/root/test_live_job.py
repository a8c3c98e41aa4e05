"""Live Open MPI and Gloo jobs with a late rank, captured and diagnosed in one command line, by their logs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from network import FIRST, HERE, Pair

pytestmark = pytest.mark.long

LATE_RANK, LATE_MS, STEPS = 1, 25, 24


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for command in ("mpicc", "mpirun"):
        if not shutil.which(command):
            pytest.skip(f"no {command} (packages openmpi-bin, libopenmpi-dev)")
    program = tmp_path_factory.mktemp("job") / "job"
    subprocess.run(["mpicc", "-O1", "-o", str(program), str(HERE / "job.c")], check=True)
    return program


def run_job(
    pair: Pair, job: Path, steps: int = STEPS, late_from: int = 0, late_ms: int = LATE_MS
) -> dict[int, list[int]]:
    """Rank 0 in namespace a, rank 1 in b; when each rank entered each operation, in ns."""
    agent = job.with_name("agent")  # in place of ssh: mpirun gives it the host and the command
    agent.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(FIRST)} ip netns exec {pair.b} sh -c "$*"\n')
    agent.chmod(0o755)
    settings = {
        "plm_rsh_agent": str(agent),
        "btl": "tcp,self",
        "btl_tcp_if_include": "10.77.0.0/24",
        "oob_tcp_if_include": "10.77.0.0/24",
    }
    mca = [word for name, value in settings.items() for word in ("--mca", name, value)]
    hosts = ["-H", "10.77.0.1,10.77.0.2", "-np", "2", "--map-by", "node"]
    rank = [str(job), str(LATE_RANK), str(late_ms), str(steps), str(late_from)]
    done = pair.call(pair.a, *FIRST, "mpirun", "--allow-run-as-root", *mca, *hosts, *rank)
    assert done.returncode == 0, done.stderr
    entered: dict[int, list[int]] = {0: [], 1: []}
    for rank, _, at in re.findall(r"enter (\d+) (\d+) (\d+)", done.stderr):
        entered[int(rank)].append(int(at))
    assert [len(times) for times in entered.values()] == [steps, steps]
    return entered


def gloo_library() -> str:
    """xoscar's binding of Gloo, by its path."""
    package = importlib.util.find_spec("xoscar")
    for place in (package.submodule_search_locations or []) if package is not None else []:
        for library in Path(place).glob("collective/xoscar_pygloo*.so"):
            return str(library)
    pytest.skip("no Gloo for Python (pip install --no-deps xoscar)")


def run_gloo(pair: Pair, store: Path) -> dict[int, list[int]]:
    """As ``run_job``, by Gloo."""
    store.mkdir()
    ranks = [
        pair.start(
            space, *FIRST, sys.executable, str(HERE / "gloo_job.py"), gloo_library(), str(rank), address,
            str(store), str(LATE_RANK), str(LATE_MS), str(STEPS), "65536",
        )
        for rank, space, address in ((0, pair.a, "10.77.0.1"), (1, pair.b, "10.77.0.2"))
    ]  # fmt: skip
    entered = []
    for rank in ranks:
        said = rank.communicate(timeout=300)[1].decode()
        assert rank.returncode == 0, said
        entered.append([int(at) for at in re.findall(r"enter \d+ \d+ (\d+)", said)])
    assert [len(times) for times in entered] == [STEPS, STEPS]
    return dict(enumerate(entered))


@pytest.mark.parametrize("mode", ["a pipe", "a column file"])
@pytest.mark.parametrize("stack", ["Open MPI", "Gloo"])
def test_the_late_rank_is_named_and_measured(
    pair: Pair, request: pytest.FixtureRequest, tmp_path: Path, mode: str, stack: str
) -> None:
    job = request.getfixturevalue("job") if stack == "Open MPI" else Path(gloo_library())
    pair.give_addresses()
    result = tmp_path / "x.json"
    dpuflow, columns = f"{sys.executable} -m dpuflow", tmp_path / "x.dpuflow"
    pid = tmp_path / "pid"
    # The capture's own shell becomes it, so that it can be ended when the job is over.
    capture = f"sh -c 'echo $$ > {pid}; exec {dpuflow} capture -i east \"$@\"' sh"
    line = {
        "a pipe": f"{capture} -w - | {dpuflow} analyze - --quiet --json {result}",
        "a column file": f"{capture} --mode messages -w {columns}"
        f" && {dpuflow} analyze {columns} --quiet --json {result}",
    }[mode]
    process = pair.start(pair.b, "sh", "-c", line)
    assert process.stderr is not None
    assert b"capturing on east" in process.stderr.readline()
    entered = run_job(pair, job) if stack == "Open MPI" else run_gloo(pair, tmp_path / "store")
    os.kill(int(pid.read_text()), signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    found = json.loads(result.read_text())
    assert len(found["collectives"]) == STEPS
    names = {row["id"]: row["address"] for row in found["endpoints"]}
    rows = {names[row["endpoint"]]: row for row in found["lateness"]}
    late, other = rows["10.77.0.2"], rows["10.77.0.1"]
    assert (late["verdict"], other["verdict"]) == ("late", "on_time")
    waits = [theirs - ours for ours, theirs in zip(entered[0], entered[1], strict=True)]
    assert late["median_ns"] == pytest.approx(statistics.median(waits), abs=5_000_000)
    (capture_row,) = found["captures"]
    assert capture_row["lost_packets"] == 0
