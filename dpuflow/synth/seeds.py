"""Random numbers of a scenario: one independent stream for each purpose, so that a fault added here does not
change what is drawn there.
"""

from __future__ import annotations

import zlib
from random import Random

import numpy as np


def stream(seed: int, *purpose: object) -> Random:
    """For draws one at a time."""
    return Random(f"{seed}/{'/'.join(map(str, purpose))}")


def columns(seed: int, *purpose: object) -> np.random.Generator:
    """For draws by the column."""
    return np.random.default_rng([seed, zlib.crc32("/".join(map(str, purpose)).encode())])
