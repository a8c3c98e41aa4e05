"""One message of a schedule, and the powers of two that schedules are made of."""

from __future__ import annotations

from typing import NamedTuple


class Send(NamedTuple):
    """One message of a schedule. Ranks are positions in the group, 0 to n - 1."""

    step: int
    src: int
    dst: int
    size: float  # bytes; a fraction where the buffer does not divide evenly


def power_below(n: int) -> int:
    """The largest power of two that is not above ``n``."""
    return 1 << (n.bit_length() - 1)


def is_power(n: int) -> bool:
    """Whether ``n`` is a power of two, 2 at least."""
    return n >= 2 and n & (n - 1) == 0
