"""Lines of NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,COLL in, each rank's collectives out, without times."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dpuflow.recorded.calls import NCCL_BYTES, Call, Recorded, op_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_INIT = re.compile(r"comm (0x[0-9a-f]+) rank (\d+) n[Rr]anks (\d+)")
_CALL = re.compile(
    r"^(\S+?):(\d+):\d+ .*NCCL INFO (\w+): opCount (\w+) sendbuff \S+ recvbuff \S+ (?:acc \S+ )?"
    r"(?:count|bytes) (\d+) datatype (\d+) .*comm (0x[0-9a-f]+)"
)


def read_log(file: str, lines: Iterable[str]) -> list[Recorded]:
    """One for each rank that the log is of; several processes may write to one file.

    Communicators number their ranks anew: a process's rank is that in its largest one.
    """
    ranks: dict[tuple[str, str, str], tuple[int, int]] = {}
    calls: list[tuple[tuple[str, str, str], str, int, int | None]] = []
    for line in lines:
        process = line.split(":", 2)[:2]
        init = _INIT.search(line)
        if init is not None and len(process) == 2:
            ranks.setdefault((process[0], process[1], init[1]), (int(init[2]), int(init[3])))
        call = _CALL.match(line)
        op = None if call is None else op_of(call[3])
        if call is None or op is None:
            continue
        size = NCCL_BYTES[int(call[6])] if int(call[6]) < len(NCCL_BYTES) else None
        calls.append(((call[1], call[2], call[7]), op, int(call[5]), size))
    found: dict[int | None, Recorded] = {}
    largest: dict[tuple[str, str], tuple[int, set[int]]] = {}
    for (host, process_id, _), (number, of) in ranks.items():
        most, several_of = largest.get((host, process_id), (0, set[int]()))
        if of >= most:
            largest[host, process_id] = of, {number} | (several_of if of == most else set())
    for comm, op, count, size in calls:
        rank, several = ranks.get(comm, (None, None))
        _, own_ranks = largest.get(comm[:2], (0, set[int]()))
        if len(own_ranks) == 1:  # else a process of several ranks
            (rank,) = own_ranks
        if size is not None and op == "reduce_scatter":  # NCCL counts what one rank receives
            size = None if several is None else size * several
        own = found.setdefault(rank, Recorded(file, "a log of NCCL", rank))
        own.calls.append(Call(op, None if size is None else count * size))
    return list(found.values())
