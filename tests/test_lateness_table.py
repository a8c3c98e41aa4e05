"""The table of what can be shown of whom: the one in the docs is current, and entries keep to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collective_worlds import World, captured
from lateness_table import (
    EAGER,
    ENTRY,
    GLOO,
    NCCL,
    RENDEZVOUS,
    STACKS,
    lateness_of,
    markdown,
    roles_of,
    rows,
)

from dpuflow.entries import BOUNDS, RULES, Rule, build_entries, relate, weigh
from dpuflow.entries.rows import blank
from dpuflow.exchanges.build import build_exchanges
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schema.rows import NEVER, NONE32, Wire

MS = 1_000_000
DOCS = Path(__file__).resolve().parents[1] / "docs" / "theory" / "entries.md"
STYLES = {GLOO: "gloo", EAGER: "eager", RENDEZVOUS: "rendezvous", NCCL: "eager"}


def test_the_table_in_the_docs_is_current() -> None:
    text = DOCS.read_text()
    start, end = text.index("<!-- table:"), text.index("<!-- end of table -->")
    assert text[text.index("\n", start) + 1 : end].strip() == markdown()


def test_every_algorithm_has_its_rows() -> None:
    assert {(row.op, row.algorithm) for row in rows()} == {(a.op.token, a.name) for a in ALGORITHMS}
    assert {len(row.lateness) for row in rows()} == {len(STACKS)}
    assert {bound for row in rows() for bound in row.lateness} == {"exact", "bound", *BOUNDS} - {"at_least"}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.op.token}-{a.name}")
@pytest.mark.parametrize("stack", STACKS)
def test_entries_keep_to_the_table(algorithm: Algorithm, stack: str) -> None:
    """All ranks enter together, so that nobody acts long after what it may have waited for."""
    for n in (8, 6):
        if not algorithm.fits(n):
            continue
        world = World(STYLES[stack])
        for turn in range(4):
            world.play(algorithm, 1024 * n, {rank: (20 * turn + 1) * MS + rank for rank in range(n)})
        transfers = world.transfers()
        exchanges = build_exchanges(transfers)
        if stack == NCCL:  # credits run 5 ms ahead
            exchanges["wire"], exchanges["grant"] = Wire.ROCE_WRITE_IMM, exchanges["data"]
            exchanges["grant_ns"] = exchanges["data_ns"] - 5 * MS
            exchanges["grant_arrived_ns"] = exchanges["grant_ns"] + 20_000
        _, joined = captured(transfers, n)
        instances = world.instances(exchanges)
        entries = weigh(
            build_entries(exchanges, instances), exchanges, joined, instances, np.zeros(4, np.int64)
        )
        relative = relate(entries)
        roles = roles_of(algorithm, n)
        told = lateness_of(roles, stack)
        for row in np.flatnonzero(entries.collective > 0).tolist():
            role = roles[int(entries.endpoint[row])]
            rule = RULES[Rule(entries.rule[row])][0]
            assert rule == ENTRY[role][stack], (n, row, role)
            bound = BOUNDS[relative.bound[row]]
            if told[role] == "exact":
                assert bound == "exact"
            elif told[role] == "unobservable":
                assert relative.lateness_ns[row] == NEVER
            else:
                assert bound != "exact"
                assert told[role] == "bound" or bound in ("at_most", "unobservable")


def test_blank_entries_say_that_nothing_is_known() -> None:
    """Every column has a row for each rank, of at most 25: no time, no message, no span of time."""
    entries = blank(np.zeros(3, np.int64), np.arange(3), np.array([0, 3]))
    for table in (entries, entries.margins, entries.heard):
        columns = {name: column for name, column in vars(table).items() if isinstance(column, np.ndarray)}
        own = columns.keys() - {"offsets", "early_ns"}
        assert len(own) <= 25
        assert {len(columns[name]) for name in own} == {3}
    assert (entries.enter_ns == NEVER).all()
    assert (entries.act == NONE32).all()
    assert (entries.heard.by_act == NONE32).all()
    assert (entries.margins.spread_ns == NEVER).all()
    assert not entries.stalled_ns.any()
    assert not entries.margins.room_ns.any()
    assert entries.fed.dtype == bool
