"""Collectives in; a row for each (collective, rank), and where exchanges begin and end among them, out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.entries.needs import build_needs
from dpuflow.entries.rows import FAR
from dpuflow.schema.rows import NEVER, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.needs import Needs
    from dpuflow.matching import Instance
    from dpuflow.schema.tables import Rows

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

    @property
    def transfers(self) -> NDArray[np.bool_]:
        """Rows of transfers from one rank to another."""
        transfer = (i.op == Op.SEND_RECV for i in self.instances)
        return np.fromiter(transfer, bool, len(self.instances))[self.collective]

    def earliest_of_all(
        self, rows: NDArray[np.int64], times: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same of sends; where an adapter serves several ranks, of the one that came last."""
        best, where = self.earliest(rows, times)
        base = np.r_[0, np.cumsum([len(i.rows) for i in self.instances])]
        for number, instance in enumerate(self.instances):
            if instance.placement.parts is None:
                continue
            mine = np.arange(base[number], base[number + 1])
            mine = mine[times[mine] != NEVER]
            order = np.lexsort((times[mine], instance.placement.parts[mine - base[number]]))
            first = mine[order][
                np.r_[True, np.diff(instance.placement.parts[mine - base[number]][order]) != 0]
            ]
            for each in first[np.argsort(times[first], kind="stable")].tolist():
                best[rows[each]], where[rows[each]] = times[each], each
        return best, where

    def __len__(self) -> int:
        return len(self.endpoint)

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


class Apart(NamedTuple):
    """Rows of ``Places``, one a process, in order of rows; ``sender`` and ``receiver`` are by exchange."""

    row: NDArray[np.int64]  # its row there
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]
    free: NDArray[np.bool_]  # its first message needs no input
    shares: NDArray[np.bool_]  # another process shares its address


def by_process(places: Places) -> Apart:
    """A row for each process where several share an endpoint, one for any other endpoint."""
    base = np.r_[0, np.cumsum([len(i.rows) for i in places.instances])]
    both = np.stack([places.sender, places.receiver])
    process = np.zeros_like(both)
    free: list[tuple[int, int]] = []
    more = [(row, 0) for row in np.setdiff1d(np.arange(len(places)), both).tolist()]
    for number, instance in enumerate(places.instances):
        first, mine = int(places.offsets[number]), slice(base[number], base[number + 1])
        if instance.placement.processes is None:
            free += [(first + row, 0) for row in instance.free_rows()]
            continue
        process[:, mine] = instance.placement.processes
        more += [(first + row, -1) for row in instance.view.blind]
        of = dict(
            zip(instance.placement.processes.ravel().tolist(), both[:, mine].ravel().tolist(), strict=True)
        )
        free += [(of[rank], rank) for rank in instance.view.free if rank in of]
    seen = np.stack([both.ravel(), process.ravel()], axis=1)
    pairs = np.concatenate([seen, np.array([*free, *more], np.int64).reshape(-1, 2)])
    rows, where = np.unique(pairs, axis=0, return_inverse=True)
    where = where.reshape(-1)
    unasked = np.zeros(len(rows), bool)
    unasked[where[len(seen) : len(seen) + len(free)]] = True
    sender, receiver = where[: len(seen)].reshape(2, -1)
    several = np.bincount(rows[:, 0], minlength=len(places)) > 1
    return Apart(rows[:, 0], sender, receiver, unasked, several[rows[:, 0]])


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
