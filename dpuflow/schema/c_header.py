"""``schema.ring`` as a C header: the records, enumerations and sizes that the eBPF programs include.

``python -m dpuflow.schema.c_header`` (``make headers``) writes bpf/dpuflow_schema.h again; a test compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.schema import ring as schema_ring
from dpuflow.schema.rows import Direction
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from enum import IntEnum

    from dpuflow.schema.rows import Record

PATH: Final = Path(__file__).resolve().parents[2] / "bpf" / "dpuflow_schema.h"
_TYPES: Final = {1: "__u8", 2: "__u16", 4: "__u32", 8: "__u64"}


def header_text() -> str:
    """The whole header."""
    numbers: dict[str, str | int] = {
        "SCHEMA": f"0x{schema_ring.layout_number():08x}U",
        "ROCE_V2_PORT": wire.ROCE_V2_PORT,
        "CNP_OPCODE": f"0x{wire.CNP_OPCODE:02x}",
        "MESSAGE_ENDS": f"0x{schema_ring.message_ends():08x}U",
        "MESSAGE_DATA": f"0x{schema_ring.message_parts()[0]:08x}U",
        "MESSAGE_MIDDLES": f"0x{schema_ring.message_parts()[1]:08x}U",
        **{name: getattr(schema_ring, name) for name in ("RUN_PACKETS", "RUN_NS", "RUN_HEAD", "MAX_FLOWS")},
        "TRANSPORTS": f"0x{sum(1 << (code >> 5) for code in wire.TRANSPORTS.values()):02x}U",
    }
    numbers |= {
        f"ETHERTYPE_{name}": f"0x{getattr(wire, f'ETHERTYPE_{name}'):04x}"
        for name in ("IPV4", "IPV6", "VLAN", "QINQ", "ROCE_V1", "MAC_CONTROL")
    }
    numbers |= {
        f"MAX_{name}": getattr(schema_ring, f"MAX_{name}") for name in ("HOSTS", "PORTS", "QPS", "VLANS")
    }
    numbers |= {name: getattr(schema_ring, name) for name in ("CELL_RECORD", "PHC_SPAN_NS")}
    numbers |= {f"CLASS_{k}": size for k, size in enumerate(schema_ring.SIZE_CLASSES)}
    parts = [
        "/* SPDX-License-Identifier: GPL-2.0-only */",
        "/* Made from dpuflow/schema/ring.py by `make headers`: change it there. */",
        "#ifndef DPUFLOW_SCHEMA_H",
        "#define DPUFLOW_SCHEMA_H",
        "",
        *(f"#define DPUFLOW_{name} {value}" for name, value in numbers.items()),
        "",
        *_enumeration("protocol", schema_ring.Protocol),
        *_enumeration("direction", Direction),
        *_enumeration("ring", schema_ring.RingKind),
    ]
    for record in schema_ring.RECORDS:
        parts += _structure(record)
    return "\n".join([*parts, "#endif", ""])


def _enumeration(name: str, values: type[IntEnum]) -> list[str]:
    lines = [f"\tDPUFLOW_{name.upper()}_{value.name} = {value.value}," for value in values]
    return [f"enum dpuflow_{name} {{", *lines, "};", ""]


def _structure(record: Record) -> list[str]:
    """The struct with its units, and asserts that a compiler lays it out as NumPy does."""
    name = f"struct dpuflow_{record.name}"
    lines = [f"/* {record.meaning} */", f"{name} {{"]
    asserts = [f'_Static_assert(sizeof({name}) == {record.dtype.itemsize}, "{record.name}");']
    for field in record.fields:
        kind = np.dtype(field.type)
        length = f"[{kind.shape[0]}]" if kind.shape else ""
        unit = f"{field.unit}: " if field.unit else ""
        lines.append(f"\t{_TYPES[kind.base.itemsize]} {field.name}{length}; /* {unit}{field.meaning} */")
        at = record.dtype.fields[field.name][1]  # type: ignore[index]
        asserts.append(
            f'_Static_assert(__builtin_offsetof({name}, {field.name}) == {at}, "{record.name}.{field.name}");'
        )
    return [*lines, "};", *asserts, ""]


if __name__ == "__main__":
    PATH.write_text(header_text(), encoding="utf-8")
