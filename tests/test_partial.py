"""One rank's view of a collective: algorithms placed around it explain exactly the edges that it sees."""

from __future__ import annotations

import pytest

from dpuflow.matching.hypotheses import Hypothesis, _is_among, _may_be
from dpuflow.matching.recognise import Contact, placements
from dpuflow.schedules.algorithms import ALGORITHMS, Algorithm
from dpuflow.schedules.graph import edge_sizes, first_acts, plan, schedule
from dpuflow.schema.rows import Op


def contacts_of(algorithm: Algorithm, n: int, seat: int) -> list[Contact]:
    """What rank ``seat`` sees, endpoints numbered 100 and up, in order of the schedule."""
    counts = edge_sizes(algorithm, n, 0)
    seen = dict.fromkeys((s.src, s.dst) for s in schedule(algorithm, n, 0) if seat in (s.src, s.dst))
    return [Contact(100 + src, 100 + dst, len(counts[src, dst])) for src, dst in seen]


NAMES = [(a, n) for a in ALGORITHMS if not a.rooted for n in (4, 6, 8, 16) if a.fits(n)]


@pytest.mark.parametrize(("algorithm", "n"), NAMES, ids=lambda v: getattr(v, "name", v))
def test_a_rank_is_placed_where_it_sees_what_it_saw(algorithm: Algorithm, n: int) -> None:
    for seat in range(n):
        contacts = contacts_of(algorithm, n, seat)
        ends = {end for c in contacts for end in c[:2]}
        if len(ends) == n:
            continue  # everyone was seen: nothing to place
        me = 100 + seat
        found = [
            order
            for other, order, _ in placements(algorithm.op, contacts, frozenset({me}))
            if other is algorithm and len(order) == n
        ]
        assert found
        for order in found:
            assert order.count(me) == 1
            assert {end for end in order if end >= 0} == ends
            edges = edge_sizes(algorithm, n, 0)
            seen = {
                (order[s], order[d]): len(sizes)
                for (s, d), sizes in edges.items()
                if me in (order[s], order[d])
            }
            assert seen == {(c.src, c.dst): c.messages for c in contacts}


def test_inputs_that_come_in_another_order_do_not_hide_the_schedule() -> None:
    """Recursive doubling of four: the second partner may be there long before the first one."""
    doubling = next(a for a in ALGORITHMS if (a.op, a.name) == (Op.ALL_REDUCE, "recursive_doubling"))
    for seat in range(4):
        seen = contacts_of(doubling, 4, seat)
        late = [c for c in seen if c.src == 100 + seat] + [c for c in seen if c.dst == 100 + seat][::-1]
        orders = [o for a, o, _ in placements(doubling.op, late, frozenset({100 + seat})) if a is doubling]
        first = next(c.dst for c in seen if c.src == 100 + seat)
        assert any(len(o) == 4 and o.index(first) == o.index(100 + seat) ^ 1 for o in orders)


def test_more_than_one_captured_rank_is_not_placed() -> None:
    ring = next(a for a in ALGORITHMS if a.name == "ring")
    assert not list(placements(ring.op, contacts_of(ring, 6, 2), frozenset({101, 102})))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.op.token}-{a.name}")
def test_a_plan_of_captured_ranks_has_their_edges_only(algorithm: Algorithm) -> None:
    n = next(n for n in (5, 8) if algorithm.fits(n))
    captured = frozenset({1})
    part, whole = plan(algorithm, n, 0, captured), plan(algorithm, n, 0)
    assert set(part.edges) == {edge for edge in whole.edges if 1 in edge}
    assert part.messages == sum(
        int(count) for edge, count in zip(whole.edges, whole.counts, strict=True) if 1 in edge
    )
    at, needs = part.needs
    assert len(needs) == at[2] - at[1]  # only the captured rank is asked when it sent
    assert set(part.free.tolist()) <= captured


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.op.token}-{a.name}")
def test_first_acts(algorithm: Algorithm) -> None:
    n = next(n for n in (5, 8) if algorithm.fits(n))
    sends, inputs = first_acts(algorithm, n, 0)
    for rank in range(n):
        mine = [s for s in schedule(algorithm, n, 0) if rank in (s.src, s.dst)]
        first = min(s.step for s in mine)
        out = [s.dst for s in mine if s.step == first and s.src == rank]
        assert sends.get(rank) == (out[0] if out else None)
        assert inputs.get(rank, frozenset()) == {s.src for s in mine if s.step == first and s.dst == rank}


@pytest.mark.parametrize("n", [3, 8, 33])
def test_what_is_kept_of_a_seat_tells_what_the_whole_schedule_tells(n: int) -> None:
    """Schedules were walked anew for each numbering, in each analysis: a sixth of an agent's CPU."""
    told: set[bool] = set()
    for algorithm in ALGORITHMS:
        if not algorithm.fits(n):
            continue
        for seat in (0, n // 2):
            order = tuple(7 if at == seat else -at - 1 for at in range(n))
            hypothesis = Hypothesis(algorithm, order, 0, 1, frozenset({7}))
            seen = frozenset(hypothesis.edges)
            messages = hypothesis.plan.messages
            for edges, most in (
                (seen, messages),
                (seen, messages - 1),
                (frozenset(sorted(seen)[1:]), messages),
            ):
                may = _may_be(edges, hypothesis, most)
                assert may == _is_among(edges, (algorithm, order, 0), hypothesis.near, most)[0]
                told.add(may)
    assert told == {False, True}
