"""Several column files of one vantage point as one capture: what an agent's history is made of.

In: CaptureTables that follow each other in time, of one place and clock; or a folder of column files that are
named by their time. Out: one CaptureTables, as if it had been captured at once. Counters of flows are those
of each file alone, and add up.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.schema.rows import ENDPOINT, FLOW, NEVER, NONE32, Transport
from dpuflow.schema.tables import CaptureInfo, CaptureTables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Ints = NDArray[np.int64]

_NAME: Final = re.compile(r"(.+)-\d{8}T\d{6}Z-(\d{1,19})-(\d{1,19})\.dpuflow")
_SUMS: Final = (
    "packets", "bytes", "messages", "retransmitted", "out_of_order", "missing", "ecn_marked", "cnp", "nak",
    "rnr", "zero_window", "spurious",
)  # fmt: skip


class Segment(NamedTuple):
    """A column file that holds the messages which ended after ``start_ns`` and until ``end_ns``."""

    path: str
    vantage: str
    start_ns: int
    end_ns: int


def segment_name(vantage: str, start_ns: int, end_ns: int) -> str:
    """The file's name; people read the time in it, programs the nanoseconds."""
    start = datetime.fromtimestamp(start_ns // 10**9, timezone.utc)
    return f"{place_name(vantage)}-{start:%Y%m%dT%H%M%SZ}-{start_ns}-{end_ns}.dpuflow"


def place_name(vantage: str) -> str:
    """A vantage point's name as it stands in names of files, and in ``Segment``."""
    return re.sub(r"[^\w.-]", "_", vantage) or "node"


def is_segment_name(name: str) -> bool:
    """Whether files of that name are segments."""
    return _NAME.fullmatch(name) is not None


def named_segments(folder: str, suffix: str = "") -> list[Segment]:
    """Files of the folder that are named as segments, with ``suffix`` after it, by vantage point and time.

    Raises OSError.
    """
    found = []
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if match:
            found.append(Segment(os.path.join(folder, name), match[1], int(match[2]), int(match[3])))
    return sorted(found, key=lambda s: (s.vantage, s.start_ns, -s.end_ns))


def list_segments(folder: str) -> list[Segment]:
    """The folder's segments by vantage point and time; one that lies within another is left out. OSError."""
    return widest(named_segments(folder))


def widest(found: Sequence[Segment]) -> list[Segment]:
    """Of ``named_segments`` those that lie within no other of their vantage point."""
    kept: list[Segment] = []
    for segment in found:
        if kept and kept[-1].vantage == segment.vantage and segment.end_ns <= kept[-1].end_ns:
            continue  # it has been merged into the other
        kept.append(segment)
    return kept


def between(segments: Sequence[Segment], since_ns: int | None, until_ns: int | None) -> list[Segment]:
    """Those that hold anything of that time."""
    return [
        s
        for s in segments
        if (since_ns is None or s.end_ns >= since_ns) and (until_ns is None or s.start_ns <= until_ns)
    ]


def join_segments(parts: Sequence[CaptureTables]) -> CaptureTables:
    """One capture of ``parts``, which are in order of time; the first one names it."""
    if len(parts) == 1:
        return parts[0]
    endpoints, ends = _endpoints(parts)
    flows, rows = _flows(parts, ends)
    messages = []
    for part, of in zip(parts, rows, strict=True):
        moved = part.messages.copy()
        moved["flow"] = of[moved["flow"]] if len(moved) else moved["flow"]
        messages.append(moved)
    joined = np.concatenate(messages)
    if (np.diff(joined["last_ns"]) < 0).any():
        joined = joined[np.argsort(joined["last_ns"], kind="stable")]
    pauses = np.concatenate([part.pauses for part in parts])
    setups = np.unique(np.concatenate([part.setups for part in parts]))
    members = np.unique(np.concatenate([part.members for part in parts]))
    return CaptureTables(
        _info([part.info for part in parts]), endpoints, flows, joined, pauses, setups, members
    )


def only_flows(tables: CaptureTables, used: NDArray[np.bool_]) -> CaptureTables:
    """The tables with the flows that are True alone, and their opposites; messages must be of these."""
    flows, messages = tables.flows, tables.messages.copy()
    used = used.copy()
    peers = flows["peer"][used]
    used[peers[peers < len(flows)]] = True
    place = np.where(used, np.cumsum(used) - 1, -1)
    kept = flows[used].copy()
    peer = kept["peer"].astype(np.int64)
    known = peer < len(flows)
    kept["peer"][known] = place[peer[known]]
    kept["peer"][~known] = NONE32
    messages["flow"] = place[messages["flow"]]
    named = np.zeros(len(tables.endpoints), bool)
    named[kept["src"]] = named[kept["dst"]] = True
    moved = np.cumsum(named) - 1
    for name in ("src", "dst"):
        kept[name] = moved[kept[name]]
    endpoints = tables.endpoints[named].copy()
    for name, side in (("packets_out", "src"), ("packets_in", "dst")):
        endpoints[name] = 0
        np.add.at(endpoints[name], kept[side], kept["packets"])
    return replace(tables, endpoints=endpoints, flows=kept, messages=messages)


def _endpoints(parts: Sequence[CaptureTables]) -> tuple[Rows, list[Ints]]:
    """One row an address, and each part's rows in it."""
    every = np.concatenate([part.endpoints for part in parts])
    key = np.stack([every["addr_hi"], every["addr_lo"]], axis=1)
    _, first, of = np.unique(key, axis=0, return_index=True, return_inverse=True)
    of = of.reshape(-1).astype(np.int64)
    made = ENDPOINT.zeros(len(first))
    for name in ("addr_hi", "addr_lo"):
        made[name] = every[name][first]
    np.maximum.at(made["mac"], of, every["mac"])
    for name in ("packets_out", "packets_in"):
        np.add.at(made[name], of, every[name])
    return made, _split(of, [len(part.endpoints) for part in parts])


def _flows(parts: Sequence[CaptureTables], ends: list[Ints]) -> tuple[Rows, list[Ints]]:
    """One row a flow, and each part's rows in it."""
    every = np.concatenate([part.flows for part in parts])
    sizes = [len(part.flows) for part in parts]
    start = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    for name in ("src", "dst"):
        moved = [of[part.flows[name]] for part, of in zip(parts, ends, strict=True) if len(part.flows)]
        every[name] = np.concatenate(moved) if moved else every[name]
    ports = every["sport"].astype(np.int64) << 16 | every["dport"]
    detail = np.where(every["transport"] == Transport.TCP, ports, every["dest_qp"])
    columns = [every[name].astype(np.int64) for name in ("transport", "src", "dst")]
    key = np.stack([*columns, detail], axis=1)
    unique, of = np.unique(key, axis=0, return_inverse=True)
    of = of.reshape(-1).astype(np.int64)
    last = np.zeros(len(unique), np.int64)
    last[of] = np.arange(len(every))  # the last part knows most: its framing, and its peer
    made = every[last] if len(every) else FLOW.zeros(0)
    peer = every["peer"].astype(np.int64)
    known = peer != NONE32
    made["peer"] = NONE32
    made["peer"][of[known]] = of[(start + peer)[known]]
    made["pairing"][of[known]] = every["pairing"][known]
    framed = np.flatnonzero(every["framing"] > 0)
    made["framing"][of[framed]] = every["framing"][framed]
    for name in _SUMS:
        made[name] = 0
        np.add.at(made[name], of, every[name])
    for name, least in (("first_ns", True), ("rtt_min_ns", True), ("last_ns", False)):
        seen = every[name] != NEVER
        made[name] = np.iinfo(np.int64).max if least else NEVER
        (np.minimum if least else np.maximum).at(made[name], of[seen], every[name][seen])
        made[name][made[name] == np.iinfo(np.int64).max] = NEVER
    return made, _split(of, sizes)


def _split(of: Ints, sizes: list[int]) -> list[Ints]:
    return np.split(of, np.cumsum(sizes)[:-1])


def _info(infos: list[CaptureInfo]) -> CaptureInfo:
    first = infos[0]
    skipped: Counter[str] = Counter()
    for info in infos:
        skipped.update(info.skipped)

    def known(name: str) -> list[int]:
        return [value for info in infos if (value := getattr(info, name)) is not None]

    lost = known("lost_packets")
    return CaptureInfo(
        id=first.id,
        vantage=first.vantage,
        files=[file for info in infos for file in info.files],
        link_type=",".join(dict.fromkeys(link for i in infos for link in i.link_type.split(",") if link)),
        packets=sum(known("packets")),
        bytes=sum(known("bytes")),
        first_ns=min(known("first_ns"), default=None),
        last_ns=max(known("last_ns"), default=None),
        lost_packets=sum(lost) if lost else None,
        skipped=dict(skipped),
        complete=all(info.complete for info in infos),
        warnings=list(dict.fromkeys(warning for info in infos for warning in info.warnings)),
        disordered=sum(known("disordered")),
        machine=first.machine,
        snaplen_needed=max(known("snaplen_needed")),
    )
