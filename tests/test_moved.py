"""Transfers told against transfers that were: matching, bytes, rates and waits by hand."""

from __future__ import annotations

from dpuflow.scoring.moved import Moved, score_transfers
from dpuflow.scoring.truth import TrueTransfer


def true(start_ns: int, wait_ns: int | None = None, **changes: object) -> TrueTransfer:
    values = {"src": 0, "dst": 1, "verb": "read", "start_ns": start_ns, "end_ns": start_ns + 100,
              "bytes": 4096, "page_bytes": 512, "wait_ns": wait_ns}  # fmt: skip
    return TrueTransfer(**{**values, **changes})  # type: ignore[arg-type]


def told(start_ns: int, wait_ns: int | None = None, **changes: object) -> dict[str, object]:
    values = {"src": 0, "dst": 1, "verb": "read", "start_ns": start_ns, "end_ns": start_ns + 100,
              "bytes": 4096, "page_bytes": 512, "wait_before_first_token_ns": wait_ns}  # fmt: skip
    return {**values, **changes}


def test_what_is_alike_is_right() -> None:
    score = score_transfers([true(0, 50), true(200)], [told(0, 57), told(200)])
    assert score == Moved(2, 2, 2, 2, 2, 1, 1, 0, [0, 0], [7])
    assert score.figures()["transfers_wait_error_median_ns"] == 7


def test_each_is_found_once_by_the_same_ends_and_verb() -> None:
    others = [told(0, verb="write"), told(0, src=2), told(0, dst=2), told(100)]
    assert score_transfers([true(0)], others).found == 0
    score = score_transfers([true(0), true(60)], [told(0, end_ns=160, bytes=8192)])
    assert (score.found, score.true, score.inferred, score.bytes_right) == (1, 2, 1, 0)
    assert score.rate_errors_ppm == [250_000]  # 8192 in 160 for 4096 in 100


def test_waits_that_were_none_count_against_it() -> None:
    score = score_transfers([true(0), true(200, 30)], [told(0, 5), told(200, page_bytes=1024)])
    assert (score.waits, score.waits_told, score.waits_false, score.pages_right) == (1, 0, 1, 1)


def test_without_true_transfers_nothing_is_asked() -> None:
    assert score_transfers([], [told(0)]).figures() == {}
    total = score_transfers([true(0)], [told(0)]) + score_transfers([true(0, 9)], [told(0, 9)])
    assert (total.true, total.waits, total.wait_errors_ns) == (2, 1, [0])
