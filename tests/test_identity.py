"""Addresses in text, ranks from hellos and rank maps, and the default numbering."""

from __future__ import annotations

import numpy as np
import pytest
from collective_worlds import World, algorithm_of, captured, run_job

from dpuflow.identity.endpoints import (
    address_text,
    addresses_of,
    endpoint_ranks,
    hosts_by_name,
    mac_text,
    rank_order,
)
from dpuflow.identity.rankmap import Place
from dpuflow.schema.rows import ENDPOINT, TRANSFER, Op, Role, Wire
from dpuflow.schema.tables import Joined

GID = 0xFE80_0000_0000_0000


def joined(hellos: list[tuple[int, int]], endpoints: int = 4, wire: Wire = Wire.OB1_HELLO) -> Joined:
    """A job of which only hellos were seen: (endpoint, claimed rank)."""
    world = World()
    run_job(world, algorithm_of(Op.ALL_REDUCE, "ring"), 64, [0, 1], 1)
    found = captured(world.transfers(), endpoints)[1]
    rows = TRANSFER.zeros(len(hellos))
    rows["role"], rows["wire"] = Role.CONTROL, wire
    rows["src"], rows["sub"] = [e for e, _ in hellos], [r for _, r in hellos]
    found.transfers = np.concatenate([rows, found.transfers])
    return found


@pytest.mark.parametrize(
    ("high", "low", "text"),
    [
        (0, 0xFFFF_0A4D_0001, "10.77.0.1"),
        (0, 0xFFFF_FFFF_FFFF, "255.255.255.255"),
        (GID, 0x0202_C9FF_FE4A_0001, "fe80::202:c9ff:fe4a:1"),
        (0, 1, "::1"),
        (1 << 48, 0xFFFF_0A4D_0001, "1::ffff:a4d:1"),  # only with a zero upper half it is IPv4
    ],
)
def test_address(high: int, low: int, text: str) -> None:
    row = ENDPOINT.zeros(1)
    row["addr_hi"], row["addr_lo"] = high, low
    assert address_text(row[0]) == text


def test_mac() -> None:
    assert mac_text(0x02_77_00_00_00_0A) == "02:77:00:00:00:0a"
    assert mac_text(0) is None


def test_ranks_from_hellos() -> None:
    assert endpoint_ranks(joined([(0, 2), (1, 0), (1, 0), (3, 1)]), None) == {0: 2, 1: 0, 3: 1}


def test_two_processes_behind_one_address_have_no_rank() -> None:
    assert endpoint_ranks(joined([(0, 2), (0, 3), (1, 0)]), None) == {1: 0}


def test_two_jobs_that_claim_the_same_ranks() -> None:
    assert endpoint_ranks(joined([(0, 0), (1, 1), (2, 0), (3, 1)]), None) == {}


def test_gloo_names_ranks_of_a_process_group_only() -> None:
    assert endpoint_ranks(joined([(0, 2), (1, 0)], wire=Wire.GLOO_HELLO), None) == {}


def test_a_rank_map_counts_before_hellos() -> None:
    places = {"10.0.0.1": Place(rank=7), "10.0.0.2": Place(host="b"), "10.9.9.9": Place(rank=1)}
    assert endpoint_ranks(joined([(0, 2), (1, 0)]), places) == {0: 7, 1: 0}


def test_a_rank_map_may_name_any_address_of_an_endpoint() -> None:
    found = joined([])
    found.addresses[1] = [3]
    assert addresses_of(found, 1) == ["10.0.0.2", "10.0.0.4"]
    assert endpoint_ranks(found, {"10.0.0.4": Place(rank=5)})[1] == 5


def test_default_numbering() -> None:
    """Ranks first, in order; who has none after them, by address."""
    found = joined([])
    found.endpoints["addr_lo"] = [40, 10, 30, 20]
    assert rank_order(found, {}).tolist() == [3, 0, 2, 1]
    assert rank_order(found, {2: 0, 0: 1}).tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        (["node0_rail0", "node0_rail1", "node1_rail0"], {"node0": [0, 1]}),
        (["g-7.mlx5_2", "g-7.mlx5_3", "g-8.mlx5_2", "g-8.mlx5_3"], {"g-7": [0, 1], "g-8": [2, 3]}),
        (["a01/eth2", "a01/eth3"], {"a01": [0, 1]}),
        (["node0", "node1", "node2"], {}),  # a node each
        (["lab-node0", "lab-node1"], {}),
        (["rail0", "rail1"], {}),  # of which node?
        (["rack1_switch2", "rack1_switch3"], {}),
        (["bf0", "bf1"], {}),
    ],
)
def test_captures_named_as_nics_of_a_host(names: list[str], hosts: dict[str, list[int]]) -> None:
    assert hosts_by_name(names) == hosts


@pytest.mark.parametrize("ranks", [{}, {2: 2}, {3: 3, 0: 0}])
def test_who_has_no_rank_takes_one_that_is_left(ranks: dict[int, int]) -> None:
    """A rank map of a few endpoints moves none of the others."""
    assert rank_order(joined([]), ranks).tolist() == [0, 1, 2, 3]
