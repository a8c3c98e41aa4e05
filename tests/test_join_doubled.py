"""Captures that hold each packet twice, and such as only look so."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import naive_parse
import numpy as np
import pytest
from worlds import World

from dpuflow.analysis import analyze
from dpuflow.ingest import ingest
from dpuflow.join import count_once
from dpuflow.join.doubled import LEAST
from dpuflow.schema.tables import Vantage

TRACE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"


def twice(raw: bytes, delay_ns: int = 3_000) -> bytes:
    """A capture with each record a second time, so much later."""
    nano = raw[:4] == struct.pack("<I", 0xA1B23C4D)
    records, start = [], 24
    for record in naive_parse.records(raw):
        seconds, fraction, kept, size = struct.unpack_from("<4I", raw, start)
        now = seconds * 10**9 + fraction * (1 if nano else 1000)
        data = raw[start + 16 : start + 16 + kept]
        records += [(now, kept, size, data), (now + delay_ns, kept, size, data)]
        start = record.end
    parts = [struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 1)]
    for now, kept, size, data in sorted(records, key=lambda r: r[0]):
        parts.append(struct.pack("<4I", now // 10**9, now % 10**9, kept, size) + data)
    return b"".join(parts)


def test_a_mirror_of_both_directions_shows_no_loss(tmp_path: Path) -> None:
    raw = gzip.decompress((TRACE / "node2.pcap.gz").read_bytes())
    (tmp_path / "once.pcap").write_bytes(raw)
    (tmp_path / "twice.pcap").write_bytes(twice(raw))
    results = [analyze([Vantage("tap", (str(tmp_path / f"{n}.pcap"),))]) for n in ("once", "twice")]
    once, both = results
    assert both.captures[0].packets == 2 * once.captures[0].packets
    assert [f.packets for f in both.flows] == [f.packets for f in once.flows]
    assert sum(f.retransmitted for f in both.flows) <= 2
    assert [f.condition for f in both.findings] == [f.condition for f in once.findings]
    assert [(c.op, c.algorithm, c.bytes) for c in both.collectives] == [
        (c.op, c.algorithm, c.bytes) for c in once.collectives
    ]
    assert not any("twice" in text for text in once.limits)
    assert any("tap: nearly every packet is in this capture twice" in text for text in both.limits)


def test_true_retransmissions_among_the_copies_are_left() -> None:
    (tables,) = World(2).ring(20).captures("node0")
    packets = tables.messages["packets"].copy()
    tables.messages["retransmitted"] = packets
    tables.messages["retransmitted"][3] += 2  # one packet, sent again once
    tables.flows["retransmitted"] = np.bincount(tables.messages["flow"], tables.messages["retransmitted"])
    (counted,), said = count_once([tables])
    assert len(said) == 1
    assert counted.messages["retransmitted"].tolist() == [0, 0, 0, 1] + [0] * (len(packets) - 4)
    assert counted.flows["retransmitted"].sum() == 1
    assert (tables.messages["retransmitted"][:3] == packets[:3]).all()  # what came in is as it was


@pytest.mark.parametrize("why", ["few", "rnr", "thrice", "half"])
def test_what_only_looks_doubled_is_left_alone(why: str) -> None:
    (tables,) = World(2).ring(LEAST // 2 - 1 if why == "few" else 20).captures("node0")
    tables.messages["retransmitted"] = tables.messages["packets"] * (2 if why == "thrice" else 1)
    if why == "half":
        tables.messages["retransmitted"][::2] = 0
    if why == "rnr":
        tables.flows["rnr"][0] = len(tables.messages)
    (counted,), said = count_once([tables])
    assert counted is tables
    assert said == []


def test_real_captures_are_not_doubled() -> None:
    tables = [ingest([str(path)]) for path in sorted(TRACE.glob("node*.pcap.gz"))]
    assert count_once(tables) == (tables, [])
