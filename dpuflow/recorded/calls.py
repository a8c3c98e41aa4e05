"""The row of a call that was recorded, and the words of PyTorch and NCCL for operations and element types."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

BYTES: Final = {
    "char": 1, "byte": 1, "bool": 1, "half": 2, "bfloat16": 2, "float": 4, "int": 4, "double": 8, "long": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "signed char": 1, "unsigned char": 1, "c10::half": 2, "short": 2,
}  # fmt: skip
"""Bytes of an element, by PyTorch's names of types (c10/core/ScalarType.h)."""
NCCL_BYTES: Final = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""The same by ncclDataType_t (nccl.h)."""
_WORDS: Final = (
    ("all_to_all", "alltoall"), ("reduce_scatter", "reducescatter"), ("all_gather", "allgather"),
    ("all_reduce", "allreduce"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("reduce", "reduce"),
    ("send_recv", "send"), ("send_recv", "recv"), ("gather", "gather"), ("scatter", "scatter"),
)  # fmt: skip


@dataclass
class Call:
    """One operation as a rank called it; times are on the file's clock, None where it has none."""

    op: str
    bytes: int | None
    begin_ns: int | None = None
    end_ns: int | None = None
    collective: int | None = None  # as the packets show it: its number in the result
    error_ns: int = 0  # of the entry by packets; 0 of a file's


@dataclass
class Recorded:
    """What a file says of one rank; ``kind`` names the file's format."""

    file: str
    kind: str
    rank: int | None
    calls: list[Call] = field(default_factory=list)


def op_of(name: str) -> str | None:
    """``nccl:_all_gather_base``, ``AllReduce`` and the like, in the result's word; None for others."""
    plain = re.sub(r"[^a-z]", "", name.lower().split("(")[0].removeprefix("nccl:"))
    return next((op for op, word in _WORDS if word in plain), None)


def bytes_of(op: str, sent: int | None, received: int | None, element: int | None) -> int | None:
    """The buffer as the result counts it (docs/analysis.md) of a call's elements, sent and received."""
    count = received if op == "broadcast" else sent
    return None if count is None or element is None else count * element
