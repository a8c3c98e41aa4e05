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
    """One for each rank that the log is of; several processes may write to one file."""
    ranks: dict[tuple[str, str, str], tuple[int, int]] = {}
    found: dict[int | None, Recorded] = {}
    rank: int | None
    several: int | None
    for line in lines:
        process = line.split(":", 2)[:2]
        init = _INIT.search(line)
        if init is not None and len(process) == 2:
            ranks.setdefault((process[0], process[1], init[1]), (int(init[2]), int(init[3])))
        call = _CALL.match(line)
        op = None if call is None else op_of(call[3])
        if call is None or op is None:
            continue
        rank, several = ranks.get((call[1], call[2], call[7]), (None, None))
        size = NCCL_BYTES[int(call[6])] if int(call[6]) < len(NCCL_BYTES) else None
        if size is not None and op == "reduce_scatter":  # NCCL counts what one rank receives
            size = None if several is None else size * several
        own = found.setdefault(rank, Recorded(file, "a log of NCCL", rank))
        own.calls.append(Call(op, None if size is None else int(call[5]) * size))
    return list(found.values())
