"""Small scenarios for the simulator's tests, and their traces as plain rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from dpuflow.synth.scenario import Scenario, parse_scenario
from dpuflow.synth.world import Played, play

LOOP = """
name: test
job: {{kind: loop, iterations: {iterations}, compute_us: 200, ops: [{{{op}}}]}}
"""


def loop(op: str, more: str = "", iterations: int = 2) -> Scenario:
    """The operation ``op`` (a YAML flow mapping's inside) again and again; ``more`` are further keys."""
    return parse_scenario(LOOP.format(op=op, iterations=iterations) + more, "test.yaml")


class Row(NamedTuple):
    """One message as it was on the wire."""

    flow: int
    kind: int
    size: int
    psn: int
    value: int
    sent_ns: int  # its first packet
    came_ns: int  # its last one; -1 never


def messages_of(played: Played) -> list[Row]:
    """All messages, with when they were first sent and first whole at the receiver."""
    messages, bursts = played.trace.messages.read(), played.trace.bursts.read()
    mtu = played.scenario.cluster.mtu
    sent: dict[int, int] = {}
    came: dict[int, int] = {}
    for row, first, count, tx, rx in zip(
        *(bursts[name].tolist() for name in ("message", "first", "count", "tx_ns", "rx_end_ns")), strict=True
    ):
        if first == 0:
            sent.setdefault(row, tx)
        packets = max(1, -(-int(messages["bytes"][row]) // mtu))
        if first + count == packets and rx >= 0:
            came[row] = rx if row not in came else min(rx, came[row])
    columns = [messages[name].tolist() for name in ("flow", "kind", "bytes", "psn", "value")]
    return [
        Row(*cells, sent_ns=sent[i], came_ns=came.get(i, -1))
        for i, cells in enumerate(zip(*columns, strict=True))
    ]


def records(path: Path) -> list[tuple[int, bytes]]:
    """Stamp and bytes of every record of a plain little-endian nanosecond pcap."""
    import struct

    data, at, found = path.read_bytes(), 24, []
    assert data[:4] == struct.pack("<I", 0xA1B23C4D)
    while at < len(data):
        seconds, nanos, kept, _ = struct.unpack_from("<IIII", data, at)
        found.append((seconds * 10**9 + nanos, data[at + 16 : at + 16 + kept]))
        at += 16 + kept
    return found


def played(op: str, more: str = "", iterations: int = 2) -> Played:
    """``loop``, played."""
    return play(loop(op, more, iterations))


def settings(**values: Any) -> str:
    """Top-level keys as YAML flow mappings."""
    import json

    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())
