"""Small figures of many values: percentiles and shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[int], share: float) -> int | None:
    """The smallest value that at least ``share`` of all do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def share_of(part: int, whole: int) -> float | None:
    """``part`` of ``whole``; None of nothing."""
    return round(part / whole, 6) if whole else None
