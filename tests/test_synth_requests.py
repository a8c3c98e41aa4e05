"""Clients of an inference service: whole streams both ways, right sequence numbers, answers after prompts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from synth_worlds import records, settings

import dpuflow
from dpuflow.errors import OptionError
from dpuflow.schema.simulated import STREAM
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.world import play

JOB = {"kind": "decode", "tokens": 40, "layers": 2}
CLIENTS = {"hosts": 3, "sessions": 2, "requests": 3, "tokens": 8, "think_us": 1000, "first_token_us": 500}


def text(**keys: object) -> str:
    return settings(**{"job": JOB, "clients": CLIENTS, **keys})


@pytest.mark.parametrize("together", [True, False])
def test_every_prompt_has_its_answer(together: bool) -> None:
    world = play(parse_scenario(text(clients={**CLIENTS, "together": together}), "test.yaml"))
    assert len(world.requests) == 3 * 2 * 3
    for each in world.requests:
        assert each.arrived_ns is not None
        assert each.first_ns is not None
        assert each.last_ns is not None
        assert each.sent_ns < each.arrived_ns <= each.first_ns - 499e3 < each.first_ns < each.last_ns
        assert 4 <= each.tokens <= 8
    first = sorted(each.sent_ns for each in world.requests)[:6]
    assert (max(first) == min(first)) == together
    messages = world.trace.messages.read()
    for up, down in world.partners.items():
        mine = messages["flow"] == up
        assert (messages["kind"][mine] == STREAM).all()
        begins, sizes = messages["va"][mine], messages["bytes"][mine]
        assert (begins[1:] == (begins + sizes)[:-1]).all()
        assert world.partners[down] == up


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service")
    whole = {"snaplen": 0, "compress": False}
    write_case(parse_scenario(text(observation=whole), "test.yaml"), str(folder))
    return folder


def test_tshark_finds_no_gap_and_nothing_acknowledged_that_was_not_sent(case: Path) -> None:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    fields = ("tcp.checksum.status", "tcp.analysis.lost_segment", "tcp.analysis.ack_lost_segment",
              "tcp.analysis.retransmission", "tcp.analysis.out_of_order", "_ws.malformed")  # fmt: skip
    asked = [word for name in fields for word in ("-e", name)]
    command = ["tshark", "-r", str(case / "node0.pcap"), "-Y", "tcp", "-o", "tcp.check_checksum:TRUE"]
    done = subprocess.run([*command, "-T", "fields", *asked], capture_output=True, text=True, check=True)
    shown = done.stdout.splitlines()
    assert len(shown) > 400
    assert set(shown) == {"1\t\t\t\t\t"}


def test_streams_are_whole_and_go_to_the_service(case: Path) -> None:
    truth = json.loads((case / "truth.json").read_text())["requests"]
    up: dict[bytes, int] = {}
    down: dict[bytes, int] = {}
    for _, frame in records(case / "node0.pcap"):
        if frame[23] != 6:
            continue
        if frame[36:38] == (8000).to_bytes(2, "big"):
            up[frame[26:36]] = up.get(frame[26:36], 0) + len(frame) - 66
        else:
            assert frame[34:36] == (8000).to_bytes(2, "big")
            key = frame[30:34] + frame[26:30] + frame[36:38]
            down[key] = down.get(key, 0) + len(frame) - 66
    assert sum(up.values()) == sum(each["prompt_bytes"] for each in truth)
    assert sum(down.values()) == 180 * sum(each["tokens"] for each in truth)
    assert len(up) == len(down) == 6
    assert {key[:4] for key in up} == {bytes((172, 16, 0, 10 + i)) for i in range(3)}


def test_clients_are_no_ranks_and_nobody_is_blamed_for_them(case: Path) -> None:
    files = sorted(case.glob("node*.pcap"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    alone = play(parse_scenario(text(clients={"hosts": 0}), "test.yaml"))
    assert len(result.collectives) == len(alone.works)
    assert not [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    members = {result.endpoints[end].address for group in result.groups for end in group.endpoints}
    assert members == {f"10.0.0.{i}" for i in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"clients": {"hosts": 1, "node": 4}}, "clients.node: 4 is not one of the 4 nodes"),
    ],
)
def test_what_does_not_go_together_is_said(keys: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_scenario(text(**keys), "test.yaml")
