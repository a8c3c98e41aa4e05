"""Events of NCCL's example profiler plugin (``NCCL_PROFILE_DUMP_FILE``) in, the rank's collectives out.

The plugin writes a file for each communicator and rank (ext-profiler/example/print_event.cc): a Chrome trace,
whose collectives begin when the host enqueues them and end when the network is done with them. So their times
are not laid beside the captures'. Each function has sequence numbers of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dpuflow.recorded.calls import Call, Recorded, op_of

if TYPE_CHECKING:
    from collections.abc import Sequence

BYTES: Final = {
    "ncclInt8": 1, "ncclUint8": 1, "ncclInt32": 4, "ncclUint32": 4, "ncclInt64": 8, "ncclUint64": 8,
    "ncclFloat16": 2, "ncclFloat32": 4, "ncclFloat64": 8, "ncclBfloat16": 2, "ncclFloat8e4m3": 1,
    "ncclFloat8e5m2": 1,
}  # fmt: skip
"""Bytes of an element (ncclDatatypeToString)."""
_COUNTED: Final = ("all_reduce", "all_gather", "broadcast", "reduce")
"""Operations whose count is that of the buffer that the result tells; of others it is a share of that."""


def is_profile(events: Sequence[Any]) -> bool:
    """Whether these are events of that plugin."""
    return any(isinstance(each, dict) and each.get("cat") == "COLL" for each in events)


def read_profile(file: str, events: Sequence[Any]) -> Recorded:
    """The calls of one rank, in order. Raises LookupError, TypeError and ValueError."""
    found: list[tuple[float, Call]] = []
    ranks: set[int] = set()
    for each in events:
        if each.get("cat") != "COLL" or each.get("ph") != "b":
            continue
        told, op = each["args"], op_of(str(each["name"]))
        ranks.add(int(told["Rank"]))
        if op is None:
            continue
        element = BYTES.get(str(told["Datatype"]))
        size = int(told["Count"]) * element if element is not None and op in _COUNTED else None
        found.append((float(each["ts"]), Call(op, size)))
    if len(ranks) > 1:
        raise ValueError(f"it is of several ranks ({', '.join(map(str, sorted(ranks)))})")
    found.sort(key=lambda pair: pair[0])
    return Recorded(file, "events of NCCL's profiler plugin", min(ranks, default=None), [c for _, c in found])
