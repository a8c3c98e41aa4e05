"""What a link loses: packets at random, or all of them while a port is down."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random


class Losses:
    """Random loss. The distance to the next lost packet is drawn, not each packet's fate."""

    def __init__(self, share: float, random: Random) -> None:
        self._share, self._random = share, random
        self._left = self._draw()

    def _draw(self) -> int:
        if self._share >= 1.0:
            return 0
        return int(log(1.0 - self._random.random()) / log(1.0 - self._share))

    def first_lost(self, count: int) -> int:
        """Of ``count`` packets the place of the first that is lost; ``count`` if none is."""
        if self._left >= count:
            self._left -= count
            return count
        lost = self._left
        self._left = self._draw()
        return lost
