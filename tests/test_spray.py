"""Packets that take many paths and overtake each other: nothing is lost, and nobody is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpuflow.ingest import ingest
from dpuflow.schema.rows import MessageFlag
from tests.test_hosts import played

RING = {
    "kind": "loop",
    "iterations": 8,
    "ops": [{"op": "all_reduce", "bytes": 4 << 20}, {"op": "all_to_all", "bytes": 1 << 20}],
}
CACHES = {"kind": "prefill_decode", "mode": "read", "requests": 6, "kv_bytes": 1 << 20}
MANY_PATHS: dict[str, Any] = {"nodes": 4, "spray": 64, "spray_us": 20}


@pytest.mark.parametrize(
    ("cluster", "job", "faults"),
    [
        ({"nodes": 4, "spray": 8}, RING, []),
        (MANY_PATHS, RING, []),
        ({"nodes": 4, "spray": 8}, {"kind": "decode", "tokens": 10}, []),
        (MANY_PATHS, {"kind": "experts", "steps": 4}, []),
        ({"nodes": 4}, RING, [{"kind": "reorder", "share": 0.02, "us": 20}]),
    ],
)
def test_overtaking_is_no_loss(
    tmp_path: Path, cluster: dict[str, Any], job: dict[str, Any], faults: list[dict[str, Any]]
) -> None:
    straight = played(tmp_path / "straight", {"seed": 3, "cluster": {"nodes": 4}, "job": job})
    result = played(tmp_path / "many", {"seed": 3, "cluster": cluster, "job": job}, *faults)
    assert not [row.summary for row in result.findings if row.severity != "info"]
    assert not sum(flow.retransmitted for flow in result.flows)
    assert [(c.op, c.algorithm, c.bytes) for c in result.collectives] == [
        (c.op, c.algorithm, c.bytes) for c in straight.collectives
    ]


def test_messages_are_the_same_on_either_side(tmp_path: Path) -> None:
    """Of READs, too, whose answers come out of order."""
    played(tmp_path, {"seed": 3, "cluster": MANY_PATHS, "job": CACHES})
    there, here = (ingest([str(tmp_path / f"node{node}.pcap.gz")], f"node{node}") for node in (0, 2))
    found = []
    for tables in (there, here):
        src, dst = (tables.endpoints["addr_lo"][tables.flows[end]] & 0xFF for end in ("src", "dst"))
        mine = tables.messages[((src == 1) & (dst == 3))[tables.messages["flow"]]]
        assert len(mine)
        assert not (mine["flags"] & MessageFlag.GAP).any()
        columns = [tables.flows["dest_qp"][mine["flow"]], *(mine[name] for name in ("bytes", "va", "rkey"))]
        found.append((np.sort(np.stack(columns, axis=1), axis=0), mine["flags"] & MessageFlag.REORDERED))
    assert np.array_equal(found[0][0], found[1][0])
    assert not found[0][1].any()
    assert found[1][1].any()


def test_what_is_lost_on_the_way_is_told(tmp_path: Path) -> None:
    fault = {"kind": "loss", "share": 0.002, "src": 1}
    result = played(tmp_path, {"seed": 3, "cluster": {"nodes": 4, "spray": 8}, "job": RING}, fault)
    (finding,) = [row for row in result.findings if row.severity != "info"]
    assert finding.condition == "packet_loss"
    assert result.endpoints[finding.endpoints[0]].address == "10.0.0.2"
