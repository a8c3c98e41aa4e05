"""Collectives in; a row for each (collective, rank), and where exchanges begin and end among them, out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.lateness.needs import build_needs
from dpuflow.schema import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.collectives import Instance
    from dpuflow.lateness.needs import Needs
    from dpuflow.ordering import Picked
    from dpuflow.tables import Rows

FAR = int(np.iinfo(np.int64).max)
_TABLE = 32  # words a row that a table may take instead of a search


@dataclass
class Places:
    """``collective`` and ``endpoint`` are by row, ``offsets[i]:offsets[i + 1]`` the rows of collective i;
    ``of`` (its collective), ``sender`` and ``receiver`` (their rows) by exchange of ``needs``.
    """

    instances: Sequence[Instance]
    collective: NDArray[np.int64]
    endpoint: NDArray[np.int64]
    offsets: NDArray[np.int64]
    needs: Needs
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]

    @property
    def picked(self) -> Picked:
        """The exchanges of all collectives."""
        return self.needs.picked

    @property
    def of(self) -> NDArray[np.int64]:
        """The collective of each exchange."""
        return self.needs.collective

    @property
    def copied(self) -> NDArray[np.bool_]:
        """Exchanges of broadcasts: what is passed on keeps its bytes."""
        broadcast = (i.op == Op.BROADCAST for i in self.instances)
        return np.fromiter(broadcast, bool, len(self.instances))[self.of]

    def earliest_of_all(
        self, rows: NDArray[np.int64], times: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same of sends; where an adapter serves several ranks, of the one that came last."""
        best, where = self.earliest(rows, times)
        base = np.r_[0, np.cumsum([len(i.rows) for i in self.instances])]
        for number, instance in enumerate(self.instances):
            if instance.parts is None:
                continue
            mine = np.arange(base[number], base[number + 1])
            mine = mine[times[mine] != NEVER]
            order = np.lexsort((times[mine], instance.parts[mine - base[number]]))
            first = mine[order][np.r_[True, np.diff(instance.parts[mine - base[number]][order]) != 0]]
            for each in first[np.argsort(times[first], kind="stable")].tolist():
                best[rows[each]], where[rows[each]] = times[each], each
        return best, where

    def __len__(self) -> int:
        return len(self.collective)

    def earliest(
        self, rows: NDArray[np.int64], times: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The earliest of each row's times (FAR without), and which of them it is (-1)."""
        from dpuflow.kernels import ordering

        best = np.full(len(self), FAR)
        where = np.full(len(self), -1, np.int64)
        ordering.earliest(times, rows, best, where)
        return best, where


def build_places(exchanges: Rows, instances: Sequence[Instance]) -> Places:
    """Rows for every rank of every collective, and the dependencies among its exchanges."""
    offsets = np.zeros(len(instances) + 1, np.int64)
    offsets[1:] = np.cumsum([len(instance.order) for instance in instances])
    collective = np.repeat(np.arange(len(instances)), np.diff(offsets))
    endpoint = np.fromiter((e for i in instances for e in i.order), np.int64, int(offsets[-1]))
    needs = build_needs(exchanges, instances)
    find = _Finder(collective, endpoint)
    sender = find(needs.collective, needs.picked["src"])
    receiver = find(needs.collective, needs.picked["dst"])
    return Places(instances, collective, endpoint, offsets, needs, sender, receiver)


class _Finder:
    """Finds the row of (collective, endpoint)."""

    def __init__(self, collective: NDArray[np.int64], endpoint: NDArray[np.int64]) -> None:
        self.width = int(endpoint.max(initial=0)) + 1
        key = collective * self.width + endpoint
        self.order = np.argsort(key)
        self.keys = key[self.order]
        self.rows: NDArray[np.int64] | None = None
        if len(key) and self.keys[-1] < _TABLE * len(key):  # little room for what is quicker
            self.rows = np.zeros(int(self.keys[-1]) + 1, np.int64)
            self.rows[key] = np.arange(len(key))

    def __call__(self, collective: NDArray[np.int64], endpoint: NDArray[np.uint32]) -> NDArray[np.int64]:
        key = collective * self.width + endpoint.astype(np.int64)
        if self.rows is not None:
            return self.rows[key]
        return np.asarray(self.order[np.searchsorted(self.keys, key)], np.int64)
