"""Interfaces that are renamed while they are captured from, and VLAN interfaces on top of others."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from network import Pair, run
from test_agent_live import running

from dpuflow.ingest import ingest


def test_a_renamed_interface_is_captured_from_as_before(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "a.pcapng"
    with pair.capturing(pair.b, "-i", "east", "-w", str(file), "--protocol", "any") as capture:
        sent = pair.send(pair.a, "west", *nccl, rate=20000)
        run("ip", "-n", pair.b, "link", "set", "east", "down")
        run("ip", "-n", pair.b, "link", "set", "east", "name", "orient")
        run("ip", "-n", pair.b, "link", "set", "orient", "up")
        time.sleep(1.5)  # it looks once a second whether the interface is there
        sent += pair.send(pair.a, "west", *nccl, rate=20000)
        assert capture.end() == 0, capture.said
    assert ingest([str(file)]).info.packets == sent


def test_the_agent_goes_on_with_a_renamed_interface(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    with running(pair, tmp_path, "capture: {interfaces: east}\n") as agent:
        sent = pair.send(pair.a, "west", *nccl, rate=20000)
        run("ip", "-n", pair.b, "link", "set", "east", "down")
        run("ip", "-n", pair.b, "link", "set", "east", "name", "orient")
        run("ip", "-n", pair.b, "link", "set", "orient", "up")
        sent += pair.send(pair.a, "west", *nccl, rate=20000)
        agent.wait(lambda: agent.status()["losses"].get("seen", 0) >= sent)
        assert agent.status()["interfaces"] == {"east": True}
        assert not agent.events("capture_failed")
        assert len(agent.events("capture_started")) == 1


def test_a_vlan_interface_has_its_own_packets(pair: Pair, nccl: list[Path], tmp_path: Path) -> None:
    """Its packets come without the tag, and those of the other VLANs do not."""
    kind = ("link", "add", "link", "west", "name", "probe", "type", "vlan", "id", "9")
    if pair.call(pair.a, "ip", *kind).returncode:
        pytest.skip("this kernel has no VLAN interfaces")
    for space, device, name in ((pair.a, "west", "west.7"), (pair.b, "east", "east.7")):
        run("ip", "-n", space, "link", "add", "link", device, "name", name, "type", "vlan", "id", "7")
        run("ip", "-n", space, "link", "set", name, "up")
    file = tmp_path / "a.pcapng"
    with pair.capturing(pair.b, "-i", "east.7", "-w", str(file)) as capture:
        pair.send(pair.a, "west", *nccl, rate=20000)
        sent = pair.send(pair.a, "west.7", *nccl, rate=20000)
        assert capture.end() == 0, capture.said
    tables = ingest([str(file)])
    assert tables.info.packets == sent
    assert len(tables.messages)
