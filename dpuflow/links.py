"""How fast data really moved between each pair of endpoints, and which links are slow.

A message's pace is the time from its first to its last packet over its bytes: the sender had the
data and the credit, so what stretches a message is the path. Measured at both ends, the longer of
the two counts: a shaper shows before the tap at one end and behind it at the other. Messages are
compared with their like only (same operation, same size), for libraries send different kinds of
messages in different ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness import Entries
    from dpuflow.tables import Rows

SLOW_FACTOR = 3.0
"""A link whose messages usually take this many times as long as their like is slow."""
FEWEST = 8
"""Messages it takes to speak of a link's pace."""


@dataclass
class Links:
    """One row per (src, dst) that carried data, as parallel arrays."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    pace_ns: NDArray[np.float64]  # median time per byte
    stretch: NDArray[np.float64]  # median of the messages' time over that of their like
    lost_ns: NDArray[np.float64]  # time beyond that of their like, all messages together
    messages: NDArray[np.int64]
    slow: NDArray[np.bool_]


def measure_links(exchanges: Rows, instances: Sequence[Instance]) -> Links:
    """Pace of each link from the exchanges that are part of a collective and span several packets."""
    from dpuflow.kernels import links as kernels

    part = np.zeros(len(exchanges), np.uint8)
    for instance in instances:
        part[instance.rows] = 1
    columns, grain = np.empty((5, int(np.count_nonzero(part))), np.int64), np.zeros(1, np.int64)
    columns = columns[:, : kernels.durations(exchanges, part, columns, grain)]
    took, nbytes, src, dst = (columns[k] for k in (kernels.TOOK, kernels.BYTES, kernels.SRC, kernels.DST))
    kind = _classes(columns[kernels.OP], nbytes)
    like = _medians(took, kind)[kind]
    stretch = took / np.maximum(like + grain[0], 1.0)

    link = _classes(src, dst)
    # Floating-point numbers that are not negative are in the same order as their bits.
    median = _medians(stretch.view(np.int64), link).view(np.float64)
    count = np.bincount(link, minlength=len(median))
    middle, at = np.zeros(len(median), np.int64), np.flatnonzero(stretch == median[link])[::-1]
    middle[link[at]] = at  # of several the first one, which is assigned last
    lost = np.bincount(link, took - like, len(median)).astype(np.float64)
    order = np.lexsort((dst[middle], src[middle]))
    middle = middle[order]
    return Links(
        src[middle],
        dst[middle],
        took[middle] / np.maximum(nbytes[middle].astype(np.float64), 1),
        stretch[middle],
        lost[order],
        count[order],
        (count[order] >= FEWEST) & (stretch[middle] >= SLOW_FACTOR),
    )


def _classes(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pairs of values, numbered."""
    from dpuflow.kernels import links as kernels

    of = np.empty(len(first), np.int64)
    kernels.classes(first, second, np.full(1 << (2 * len(first)).bit_length(), -1), of)
    return of


def _medians(values: NDArray[np.int64], of: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lower median of each class's values; ``of`` is their class."""
    from dpuflow.kernels import links as kernels

    count = np.bincount(of)
    out = np.zeros(len(count), np.int64)
    kernels.medians(values, of, np.cumsum(count) - count, np.empty_like(values), out)
    return out


def slow_rows(links: Links, entries: Entries) -> NDArray[np.bool_]:
    """Rows of Entries whose endpoint received or sent over a slow link in some collective."""
    touched = np.unique(np.concatenate([links.src[links.slow], links.dst[links.slow]]))
    return np.isin(entries.endpoint, touched)
