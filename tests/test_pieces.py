"""Messages that NCCL cut over the queue pairs of a connection, put together."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from synth_worlds import loop, messages_of, settings

import dpuflow
from dpuflow.exchanges.build import build_exchanges
from dpuflow.exchanges.pieces import cut, whole
from dpuflow.schema.rows import NEVER, TRANSFER, Role, Wire
from dpuflow.schema.simulated import WRITE, WRITE_IMM
from dpuflow.synth.case import write_case
from dpuflow.synth.world import play

if TYPE_CHECKING:
    from pathlib import Path

    from dpuflow.schema.tables import Rows

SLOT = 1 << 20
SIZES = [SLOT, 1000, SLOT, 200_000, 0, 64, SLOT, 130] * 3


def traffic(
    pairs: int, base: int = 1 << 40, first: int = 7, *, routed: bool = False, by_id: bool = False
) -> Rows:
    """Entries on connection ``first``, pieces of SIZES on it and those after it; as net_ib posts them."""
    made = []
    for k, size in enumerate(SIZES):
        entry = TRANSFER.zeros(1)[0]
        entry["role"], entry["wire"], entry["announces"] = Role.GRANT, Wire.ROCE_WRITE, SLOT
        entry["connection"], entry["src"], entry["dst"], entry["sent_ns"] = first, 1, 0, 1000 * k
        entry["sub"] = k + 1
        made.append(entry)
        piece = ceil(ceil(size / pairs) / 128) * 128
        for i in range(pairs):
            data = TRANSFER.zeros(1)[0]
            data["role"], data["wire"], data["packets"] = Role.DATA, Wire.ROCE_WRITE_IMM, 1
            data["connection"], data["src"], data["dst"] = first + i, 0, 1
            data["sent_ns"], data["arrived_ns"] = 1000 * k + 500 + i, 1000 * k + 600 + i
            data["sent_end_ns"], data["arrived_end_ns"] = data["sent_ns"] + 50, data["arrived_ns"] + 50
            data["acked_ns"], data["taken_ns"] = 1000 * k + 800 + i, 1000 * k + 700 - i
            data["va"], data["bytes"] = base + k % 4 * SLOT + i * piece, max(0, min(piece, size - i * piece))
            data["tag"], data["seen"], data["ecn_marked"] = k if by_id else size, 3, i
            if routed and size > 8192:
                tail = data.copy()
                data["wire"], data["tag"], data["acked_ns"] = Wire.ROCE_WRITE, 0, NEVER
                tail["bytes"], tail["va"] = 0, 0
                made += [data, tail]
            else:
                made.append(data)
    return np.array(made, TRANSFER.dtype)


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("pairs", [2, 3, 4, 8])
def test_messages_are_whole_again(pairs: int, routed: bool, by_id: bool) -> None:
    rows = traffic(pairs, routed=routed, by_id=by_id)
    found = build_exchanges(rows)
    assert found["bytes"].tolist() == SIZES
    assert (found["wire"] == Wire.ROCE_WRITE_IMM).all()
    assert found["sub"].tolist() == list(range(1, len(SIZES) + 1))
    for k, each in enumerate(found):
        start = 1000 * k
        assert each["grant_ns"] == start
        # The first packet of any piece, and what comes last of all of them.
        assert (each["data_ns"], each["arrived_ns"]) == (start + 500, start + 600)
        assert (each["data_end_ns"], each["arrived_end_ns"]) == (start + 549 + pairs, start + 649 + pairs)
        assert (each["acked_ns"], each["taken_ns"]) == (start + 799 + pairs, start + 700)
        assert each["packets"] == pairs * (2 if routed and SIZES[k] > 8192 else 1)


def test_little_endian_immediates() -> None:
    rows = traffic(4)
    rows["tag"] = rows["tag"].byteswap()
    assert build_exchanges(rows)["bytes"].tolist() == SIZES


def test_what_was_not_seen_of_one_piece_is_not_known_of_the_message() -> None:
    rows = traffic(2)
    rows["acked_ns"][2] = NEVER
    found = build_exchanges(rows)
    assert found["acked_ns"][0] == NEVER
    assert found["acked_ns"][1] != NEVER


def test_the_ends_of_a_capture_cut_messages() -> None:
    """It begins behind the first piece of a message and ends before the last one of another."""
    rows = traffic(4)[2:-2]
    joined, part = whole(rows, np.arange(len(rows)))
    data = part[joined["role"][part] == Role.DATA]
    assert joined["bytes"][data].tolist() == SIZES[1:-1]


def test_channels_beside_each_other() -> None:
    """Two connections between the same endpoints in step, one's buffer right behind the other's."""
    rows = np.concatenate([traffic(4), traffic(4, base=(1 << 40) + 8 * SLOT, first=20)])
    rows = rows[np.argsort(rows["sent_ns"], kind="stable")]
    found = build_exchanges(rows)
    for connection in (7, 20):
        assert found["bytes"][found["connection"] == connection].tolist() == SIZES
    assert len(found) == 2 * len(SIZES)


def test_messages_in_turn_are_no_pieces() -> None:
    """Full slots side by side lie as pieces would, and carry the same immediate."""
    rows = traffic(1)
    data = np.flatnonzero(rows["role"] == Role.DATA)
    rows["bytes"][data] = rows["tag"][data] = SLOT
    rows["va"][data] = (1 << 40) + np.arange(len(data)) % 4 * SLOT
    rows["connection"][data] = 7 + np.arange(len(data)) % 2
    assert whole(rows, np.arange(len(rows)))[0] is rows


def test_pieces_that_do_not_add_up_are_left_alone() -> None:
    """A queue pair in the middle was not captured (a NIC of several ports)."""
    rows = traffic(4)
    rows = rows[rows["connection"] != 8]
    assert whole(rows, np.arange(len(rows)))[0] is rows


def test_whether_any_queue_pair_lacks_entries() -> None:
    assert cut(np.array([5, 0]), np.array([5, 5]))
    assert not cut(np.array([5, 0]), np.array([5, 0]))


SPLIT = {"split_data_on_qps": True}


@pytest.mark.parametrize(
    ("op", "keys", "told"),
    [
        ("op: all_reduce, bytes: 1000000", {"qps_per_connection": 2}, ("all_reduce", 1_000_000)),
        ("op: all_reduce, bytes: 96", {"qps_per_connection": 4, "channels": 1}, ("all_reduce", 96)),
        (
            "op: all_reduce, bytes: 2000000, algorithm: tree",
            {"qps_per_connection": 3, "adaptive_routing": True},
            ("all_reduce", 2_000_000),
        ),
        (
            "op: all_gather, bytes: 300000, protocol: ll",
            {"qps_per_connection": 8, "match_by": "id"},
            ("all_gather", 300_000),
        ),
        ("op: all_to_all, bytes: 400000", {"qps_per_connection": 2}, ("all_to_all", 400_000)),
    ],
)
def test_operations_of_split_messages(
    op: str, keys: dict[str, object], told: tuple[str, int], tmp_path: Path
) -> None:
    captures = write_case(loop(op, settings(nccl={**SPLIT, **keys}), iterations=6), tmp_path)
    result = dpuflow.analyze([dpuflow.Vantage(c.name, (str(tmp_path / c.name),)) for c in captures])
    assert [(str(c.op), c.bytes) for c in result.collectives] == [told] * 6
    assert not any("not matched to a collective" in limit for limit in result.limits)


def test_adaptive_routing_goes_by_the_whole_message() -> None:
    """64 KiB over eight queue pairs: no piece is above the threshold, the message is (ncclIbMultiSend)."""
    keys = {**SPLIT, "qps_per_connection": 8, "adaptive_routing": True, "channels": 1}
    rows = messages_of(play(loop("op: all_reduce, bytes: 131072", settings(nccl=keys, cluster={"nodes": 2}))))
    sizes = {(row.kind, row.size) for row in rows if row.kind in (WRITE, WRITE_IMM)}
    assert sizes == {(WRITE, 4096), (WRITE_IMM, 0)}
