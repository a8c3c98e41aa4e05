"""Message counts on captures of real Gloo and Open MPI runs, against what their algorithms must send."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dpuflow.ingest import ingest
from dpuflow.schema.rows import Op, Role, Wire
from dpuflow.schema.tables import CaptureTables

Edge = tuple[int, int]  # rank that sends, rank that receives


@cache
def tables(case: Path, node: str) -> CaptureTables:
    return ingest([str(case / f"{node}.pcap.gz")])


def ranks(case: Path, capture: CaptureTables) -> np.ndarray:
    """Rank of each endpoint."""
    nodes = json.loads((case / "meta.json").read_text())["nodes"]
    rank = {int.from_bytes(bytes(map(int, n["ip"].split("."))), "big"): n["rank"] for n in nodes}
    low = capture.endpoints["addr_lo"] & np.uint64(0xFFFFFFFF)
    return np.array([rank.get(int(a), -1) for a in low])


def data(case: Path, node: str, op: Op, roles: tuple[Role, ...] = (Role.DATA,)) -> dict[Edge, Counter]:
    """For each edge the messages of an operation: (role, tag or sequence number, bytes) -> how many."""
    capture = tables(case, node)
    rank = ranks(case, capture)
    found: dict[Edge, Counter] = {}
    for m in capture.messages[capture.messages["op"] == op]:
        if m["role"] in roles:
            flow = capture.flows[m["flow"]]
            mpi = m["wire"] in (Wire.OB1_MATCH, Wire.OB1_RNDV, Wire.OB1_PUT)
            key = int(m["role"]), int(m["sub"] if mpi else m["tag"]), int(m["bytes"] + m["announces"])
            found.setdefault((int(rank[flow["src"]]), int(rank[flow["dst"]])), Counter())[key] += 1
    return found


def nodes(case: Path) -> list[str]:
    return sorted(p.name.split(".")[0] for p in case.glob("node*.pcap.gz"))


def collectives(case: Path) -> int:
    return len(json.loads((case / "truth.json").read_text())["collectives"])


RING = ["gloo_allreduce_256k_n4_none", "gloo_allreduce_1m_n4_offload_late0", "gloo_allreduce_4k_n4_random",
        "net_loss_gloo_allreduce_256k_n4_node1", "net_slowlink_gloo_allreduce_256k_n4_node2",
        "gloo_allreduce_256k_n2_late1"]  # fmt: skip


@pytest.mark.parametrize("name", RING)
def test_gloo_ring_all_reduce(shared: Path, name: str) -> None:
    case = shared / "captures/tcp" / name
    meta = json.loads((case / "meta.json").read_text())
    n, size = meta["world_size"], meta["ops"][0]["bytes"]
    segments = 2 * n
    for node in nodes(case):
        me = int(node[4:])
        found = data(case, node, Op.ALL_REDUCE)
        assert set(found) == {(me, (me - 1) % n), ((me + 1) % n, me)}
        for edge in found.values():
            # Reduce-scatter and all-gather: n - 1 steps of two segments each.
            assert len(edge) == collectives(case)
            assert set(edge.values()) == {2 * 2 * (n - 1)}
            assert {length for _, _, length in edge} == {size // segments}


@pytest.mark.parametrize(
    "name", [*RING, "gloo_alltoall_256k_n4_late1", "gloo_ddp_n4_rotating", "gloo_mixed_n4_random"]
)
def test_both_ends_saw_the_same_gloo_messages(shared: Path, name: str) -> None:
    case = shared / "captures/tcp" / name
    roles = (Role.DATA, Role.OFFER, Role.GRANT)
    for op in (Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BARRIER, Op.ALL_GATHER, Op.BROADCAST):
        seen = [data(case, node, op, roles) for node in nodes(case)]
        for node, edges in enumerate(seen):
            for (src, dst), count in edges.items():
                other = dst if src == node else src
                assert seen[other][src, dst] == count
                for (role, tag, length), k in count.items():
                    if role == Role.DATA:
                        assert count[int(Role.OFFER), tag, length] == k
                        assert seen[node][dst, src][int(Role.GRANT), tag, length] == k


def test_gloo_all_gather_and_broadcast(shared: Path) -> None:
    case = shared / "captures/tcp/gloo_allgather_256k_n4_late3"
    for node in nodes(case):
        me = int(node[4:])
        found = data(case, node, Op.ALL_GATHER)
        assert set(found) == {(me, (me + 1) % 4), ((me - 1) % 4, me)}
        for edge in found.values():
            assert sum(edge.values()) == collectives(case) * 3 * 2
            assert {length for _, _, length in edge} == {262144 // 2}
    case = shared / "captures/tcp/gloo_broadcast_256k_n4_late0"
    edges = {edge for node in nodes(case) for edge in data(case, node, Op.BROADCAST)}
    assert edges == {(0, 1), (0, 2), (1, 3)}


@pytest.mark.parametrize("name", ["mpi_allreduce_ring_256k_n4_late2", "mpi_allreduce_recdbl_64k_n4_late1",
                                  "mpi_allgather_ring_64k_n4_late1"])  # fmt: skip
def test_open_mpi_rendezvous_are_whole(shared: Path, name: str) -> None:
    case = shared / "captures/tcp" / name
    op = Op.ALL_GATHER if "allgather" in name else Op.ALL_REDUCE
    for node in nodes(case):
        capture = tables(case, node)
        m = capture.messages[capture.messages["op"] == op]
        way = np.where(m["role"] == Role.GRANT, capture.flows["peer"][m["flow"]], m["flow"])
        transfers: dict[tuple, Counter] = {}
        for row, flow in zip(m, way, strict=True):
            transfers.setdefault((int(flow), int(row["context"]), int(row["sub"])), Counter())[
                int(row["wire"])
            ] += 1
        # The capture ends while the last few are under way.
        whole = Counter(
            {int(w): 1 for w in (Wire.OB1_RNDV, Wire.OB1_PUT_REQUEST, Wire.OB1_PUT, Wire.OB1_FIN)}
        )
        last = {flow: max(sub for f, _, sub in transfers if f == flow) for flow in set(way.tolist())}
        for (flow, _, sub), wires in transfers.items():
            assert wires == whole or (sub == last[flow] and wires <= whole), (node, flow, sub)


def test_open_mpi_eager_all_to_all(shared: Path) -> None:
    case = shared / "captures/tcp/mpi_alltoall_pairwise_128k_n4_late3"
    seen = [data(case, node, Op.ALL_TO_ALL) for node in nodes(case)]
    for node, edges in enumerate(seen):
        assert len(edges) == 6
        for (src, dst), count in edges.items():
            assert {length for *_, length in count} == {32768}
            # The captures end at slightly different moments.
            other = seen[dst if src == node else src][src, dst]
            assert count <= other or other <= count
            assert len(count) >= 24
