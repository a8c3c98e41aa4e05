"""PXN: sends of a node's GPUs that share connections and go together, and all_to_alls of these."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synth_worlds import loop, played, records, settings

import dpuflow
from dpuflow.exchanges.build import build_exchanges
from dpuflow.exchanges.bunches import bunched, requested
from dpuflow.results import Analysis
from dpuflow.schema.rows import NEVER, NONE32, TRANSFER, Role, Wire
from dpuflow.schema.simulated import CTS, WRITE, WRITE_IMM
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import Scenario


def analysed(scenario: Scenario, folder: Path) -> Analysis:
    captures = write_case(scenario, str(folder))
    return dpuflow.analyze([dpuflow.Vantage(c.name, (str(folder / c.name),)) for c in captures])


def world(nodes: int, gpus: int, **more: object) -> str:
    nccl = {"channels": 2, **more.pop("nccl", {})}  # type: ignore[dict-item]
    return settings(cluster={"nodes": nodes, "gpus_per_node": gpus, "link_gbps": 400}, nccl=nccl, **more)


@pytest.mark.parametrize(
    ("nodes", "gpus", "size", "nccl"),
    [
        (2, 4, "1MiB", {}),
        (3, 2, "768KiB", {"version": "2.18"}),  # entries of 32 bytes: two are as long as one later
        (2, 3, "1536KiB", {"qps_per_connection": 2, "split_data_on_qps": False}),
    ],
)
def test_all_to_alls_of_nodes(
    nodes: int, gpus: int, size: str, nccl: dict[str, object], tmp_path: Path
) -> None:
    """One collective a call; which GPU of a node was late shows in no packet, and nobody is cleared."""
    fault = [{"kind": "gpu_late", "rank": gpus, "us": 300}]
    result = analysed(
        loop(f"op: all_to_all, bytes: {size}", world(nodes, gpus, nccl=nccl, faults=fault), 8), tmp_path
    )
    truth = json.loads((tmp_path / "truth.json").read_text())["collectives"]
    assert [(c.op, c.bytes) for c in result.collectives] == [("all_to_all", t["bytes"]) for t in truth]
    assert {len(c.ranks) for c in result.collectives} == {nodes * gpus}
    ids = {e.address: e.id for e in result.endpoints}
    meta = json.loads((tmp_path / "meta.json").read_text())
    rank_of = {ids[node["ip"]]: node["rank"] for node in meta["nodes"]}
    assert {row.verdict for row in result.lateness} == {"unknown"}
    assert any("PXN" in sentence for sentence in result.limits)
    for collective, true in zip(result.collectives, truth, strict=True):
        first = min(true["enter_ns"])
        for row in collective.ranks:
            late = true["enter_ns"][rank_of[row.endpoint]] - first
            assert row.bound != "exact"
            if row.bound == "at_least":
                assert row.lateness_ns is not None
                assert row.lateness_ns <= late + 1_000
            if row.bound == "at_most":
                assert row.lateness_ns is not None
                assert row.lateness_ns >= late - 1_000


def test_calls_with_few_slots_are_cut_where_entries_come_together(tmp_path: Path) -> None:
    """Eight senders share sixteen slots: two each, which are empty one message after another."""
    text = world(2, 8, nccl={"channels": 4})
    result = analysed(loop("op: all_to_all, bytes: 16MiB", text, 5), tmp_path)
    assert [(c.op, c.bytes) for c in result.collectives] == [("all_to_all", 16 << 20)] * 5
    assert not [row for row in result.lateness if row.verdict == "late"]


def test_sends_of_several_go_together() -> None:
    """An entry for each sender in one WRITE, so many WRITEs, and their sizes behind them."""
    done = played("op: all_to_all, bytes: 1MiB", world(2, 4), iterations=1)
    messages, entries = done.trace.messages.read(), done.trace.entries.read()
    for connection in done.connections:
        kinds = messages["kind"][messages["flow"] == connection.data[0].number].tolist()
        size = messages["bytes"][messages["flow"] == connection.data[0].number].tolist()
        assert kinds == [WRITE] * 4 + [WRITE_IMM] + kinds[5:]
        assert kinds.count(WRITE) == 4 * kinds.count(WRITE_IMM)
        assert {size[i] for i, kind in enumerate(kinds) if kind == WRITE_IMM} == {16}
        grants = np.flatnonzero(messages["flow"] == connection.grants.number)
        assert set(messages["kind"][grants].tolist()) == {CTS}
        assert set(messages["bytes"][grants].tolist()) == {4 * 64}
        mine = np.isin(entries["message"], grants)
        # Every entry names the sender whose message it asks for.
        node = connection.nic.node if hasattr(connection, "nic") else -1
        assert set(entries["tag"][mine].tolist()) == set(range(4 * node, 4 * node + 4))
        assert len(set(entries["target"][mine].tolist())) <= 16
    alone = played("op: all_to_all, bytes: 1MiB", world(2, 4, nccl={"shared_comms": False}), iterations=1)
    assert not len(alone.trace.entries.read()["message"])


def test_the_sizes_are_written_behind_a_group(tmp_path: Path) -> None:
    text = world(2, 2, observation={"snaplen": 0, "compress": False, "vantages": "nodes"})
    captures = write_case(loop("op: all_to_all, bytes: 256KiB", text, 1), str(tmp_path))
    bodies = [
        frame[54 + 16 + 4 : -4]
        for _, frame in records(tmp_path / captures[0].name)
        if frame[42] == 0x0B and len(frame) == 54 + 16 + 4 + 8 + 4
    ]
    assert bodies
    assert {tuple(np.frombuffer(body, "<u4").tolist()) for body in bodies} == {(32_768, 32_768)}


def test_bunches_of_messages() -> None:
    """WRITEs and behind them as many sizes are one message; anything else stays what it is."""
    rows = TRANSFER.zeros(8)
    for name in ("acked_ns", "taken_ns"):
        rows[name] = NEVER
    rows["src"], rows["dst"], rows["role"] = 1, 2, Role.DATA
    rows["wire"] = (
        [Wire.ROCE_WRITE] * 3 + [Wire.ROCE_WRITE_IMM] + [Wire.ROCE_WRITE] * 2 + [Wire.ROCE_WRITE_IMM] * 2
    )
    rows["bytes"] = [100, 100, 100, 12, 100, 100, 12, 300]
    rows["sent_ns"] = rows["arrived_ns"] = np.arange(8) * 10
    rows["sent_end_ns"] = rows["arrived_end_ns"] = np.arange(8) * 10 + 5
    joined, part = bunched(rows, np.arange(8))
    assert part.tolist() == [0, 4, 5, 6, 7]  # three sizes behind two WRITEs are none
    assert (joined["bytes"][0], joined["wire"][0]) == (300, Wire.ROCE_WRITE_IMM)
    assert (joined["sent_ns"][0], joined["arrived_end_ns"][0]) == (0, 35)
    exchanges = build_exchanges(rows)
    assert requested(rows, exchanges).tolist()[0] == 3
    assert (exchanges["grant"] == NONE32).all()
    _, left = bunched(rows[4:], np.arange(4))
    assert left.tolist() == [0, 1, 2, 3]
