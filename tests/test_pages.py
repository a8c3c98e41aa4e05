"""Caches that several endpoints hand to one, or one to several, are no reduce and no broadcast."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth_worlds import settings

import dpuflow
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario


@pytest.mark.parametrize("notice", ["hidden", "send"])
@pytest.mark.parametrize(("nodes", "prefill"), [(6, 4), (4, 3)])
def test_caches_that_meet_are_transfers(tmp_path: Path, nodes: int, prefill: int, notice: str) -> None:
    job = {"kind": "prefill_decode", "prefill": prefill, "requests": 4, "kv_bytes": 4 << 20, "tokens": 2}
    text = settings(cluster={"nodes": nodes}, job={**job, "notice": notice})
    write_case(parse_scenario(text, "test.yaml"), str(tmp_path))
    files = sorted(tmp_path.glob("node*"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    assert {row.op for row in result.collectives} == {"all_reduce"}
    assert sum(row.bytes for row in result.transfers) == 4 * prefill * (4 << 20)
    decode = {f"10.0.0.{node + 1}" for node in range(prefill, nodes)}
    assert {result.endpoints[row.dst].address for row in result.transfers} == decode
    assert not [row for row in result.lateness if row.verdict in ("late", "intermittent")]


def test_a_write_that_nothing_announces_takes_part_where_its_receiver_goes_on() -> None:
    """Rings of plain WRITEs (their receivers poll) remain collectives."""
    import numpy as np

    from dpuflow.matching.calls import without_pages
    from dpuflow.schema.rows import EXCHANGE, NONE32, Op, Wire

    def ways(*pairs: tuple[int, int]) -> list[int]:
        rows = np.zeros(len(pairs), EXCHANGE.dtype)
        rows["src"], rows["dst"] = np.array(pairs).T
        rows["connection"] = np.arange(len(pairs))
        rows["wire"], rows["op"], rows["grant"] = Wire.ROCE_WRITE, Op.UNKNOWN, NONE32
        rows["bytes"] = 65536
        kept: list[int] = without_pages(rows, np.arange(len(pairs))).tolist()
        return kept

    assert ways((0, 1), (1, 2), (2, 0)) == [0, 1, 2]
    assert ways((0, 1), (1, 2)) == [0, 1]  # part of one, seen from node 1
    assert ways((0, 2), (1, 2)) == []
    assert ways((2, 0), (2, 1)) == []


@pytest.mark.parametrize("seed", range(12))
def test_ways_cut_at_once_are_those_cut_one_by_one(seed: int) -> None:
    import numpy as np

    from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, Op, Wire
    from dpuflow.verdicts.pages import IDLE, cut_pieces, page_ways

    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 200))
    rows = np.zeros(count, EXCHANGE.dtype)
    rows["src"], rows["dst"] = rng.integers(0, 3, count), rng.integers(3, 5, count)
    rows["connection"], rows["order"] = rows["src"] * 5 + rows["dst"], np.arange(count)
    rows["wire"], rows["op"], rows["grant"], rows["grant_ns"] = Wire.ROCE_WRITE, Op.UNKNOWN, NONE32, NEVER
    rows["data_ns"] = np.cumsum(rng.choice([1, 2, 400, 90_000], count))
    rows["data_end_ns"] = rows["data_ns"] + rng.integers(1, 300, count)
    rows["arrived_end_ns"] = np.where(rng.random(count) < 0.3, NEVER, rows["data_end_ns"] + 50)
    rows["bytes"] = rng.choice([64, 4096, 8192], count, p=[0.1, 0.6, 0.3])
    ways = page_ways(rows, [])
    nothing = np.zeros(0, np.int64)
    cuts = cut_pieces(rows, ways, [nothing] * len(ways))
    told = [[part.tolist() for part in np.split(*cut)] for cut in cuts]
    for way, parts in zip(ways, told, strict=True):
        own = rows[way]
        assert np.median(own["bytes"]) > 512
        begin, end = (
            own["data_ns"],
            np.where(own["arrived_end_ns"] != NEVER, own["arrived_end_ns"], own["data_end_ns"]),
        )
        gap = begin[1:] - np.maximum.accumulate(end)[:-1]
        usual = float((end - begin).min()) + float(np.median(np.diff(np.sort(end)))) if len(way) > 1 else 0.0
        cut = np.flatnonzero(gap > IDLE * usual) + 1
        assert parts == [part.tolist() for part in np.split(way, cut)]


@pytest.mark.parametrize("far", [0, 1 << 62])
@pytest.mark.parametrize("seed", range(12))
def test_the_largest_so_far_is_that_within_a_piece(seed: int, far: int) -> None:
    import numpy as np

    from dpuflow.verdicts.pages import so_far

    rng = np.random.default_rng(seed)
    piece = np.sort(rng.integers(0, 5, 40))
    values = rng.integers(-1000 - far, 1000 + far, 40)
    wanted = [values[(piece == piece[at]) & (np.arange(40) <= at)].max() for at in range(40)]
    assert so_far(values, piece).tolist() == wanted
    assert not len(so_far(values[:0], piece[:0]))


@pytest.mark.parametrize("seed", range(12))
def test_pieces_laid_out_some_at_a_time_are_those_laid_out_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from dpuflow.schema.rows import EXCHANGE, NEVER, Wire
    from dpuflow.verdicts import bulk, pages

    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 120))
    rows = np.zeros(count, EXCHANGE.dtype)
    rows["src"], rows["wire"], rows["grant_ns"] = rng.integers(0, 3, count), Wire.ROCE_WRITE, NEVER
    rows["data_ns"] = np.cumsum(rng.choice([1, 2, 400], count))
    rows["data_end_ns"] = rows["arrived_end_ns"] = rows["data_ns"] + rng.integers(1, 300, count)
    rows["bytes"] = rng.choice([4096, 8192], count)
    cuts = np.unique(rng.integers(0, count, 9))
    pieces = np.split(np.arange(count), cuts)
    whole, chosen = bulk._made(rows, [(np.arange(count), cuts)])
    assert chosen.tolist() == [number for number, piece in enumerate(pieces) if len(piece) > 1]
    monkeypatch.setattr(pages, "TOGETHER", 10)
    parts, _ = bulk._made(rows, [(np.arange(count), cuts)])
    assert str(whole.listed()) == str(parts.listed())
    for each, number in zip(whole.listed(), chosen.tolist(), strict=True):
        own = rows[np.sort(pieces[number])]
        assert each.rows.tolist() == sorted(pieces[number].tolist())
        assert (each.start_ns, each.end_ns) == (own["data_ns"].min(), own["arrived_end_ns"].max())
        assert each.bytes == own["bytes"].sum()
        sizes = {int(size): int((own["bytes"] == size).sum()) for size in (8192, 4096)}
        usual = max(sizes, key=lambda size: (sizes[size], -size))
        assert each.page_bytes == (usual if 2 * sizes[usual] >= len(own) else None)


@pytest.mark.parametrize("seed", range(12))
def test_who_carries_pages_on_a_slow_path_is_told_entry_by_entry(seed: int) -> None:
    from types import SimpleNamespace

    import numpy as np

    from dpuflow.arrays.ordering import Places
    from dpuflow.verdicts.bulk import Bulk, fed_rows

    rng = np.random.default_rng(seed)
    entries = SimpleNamespace(
        endpoint=rng.integers(0, 3, 40), enter_ns=rng.integers(0, 60, 40), collective=np.arange(40)
    )
    entries.of = Places(entries.endpoint)
    transfers = []
    for src, start, length, slow in rng.integers([0, 0, -3, 0], [3, 60, 12, 2], (25, 4)).tolist():
        span = start, start + length  # clocks may put an end before its begin
        transfers.append(
            Bulk(src, 9, False, np.zeros(0, np.int64), *span, 1, 1, 1, 0, 0, True, 0, slow=bool(slow))
        )
    wanted = [
        any(each.slow and each.src == end and each.start_ns <= at <= each.end_ns for each in transfers)
        for end, at in zip(entries.endpoint, entries.enter_ns, strict=True)
    ]
    assert fed_rows(transfers, entries).carrying.tolist() == wanted
