"""The slow twin of the RoCE kernels: one connection, all packets in memory, by definition.

It knows which flow answers which, and takes a capture that lost nothing (packets may come again and
out of order, and the capture may start or end within a message).
"""

from __future__ import annotations

from dpuflow.schema.rows import NEVER, MessageFlag
from dpuflow.wire import headers as wire
from tests.blocks import CODES, Packet


def _nearest(psn: int, near: int) -> int:
    """The number with the low 24 bits ``psn`` that is nearest to ``near``."""
    return min(((near >> 24) + k << 24 | psn for k in (-1, 0, 1)), key=lambda x: abs(x - near))


def messages_of(packets: list[Packet], data: tuple[int, int, int], acks: tuple[int, int, int]) -> list[dict]:
    """Messages of the requests on flow ``data``, acknowledged on flow ``acks``; in order of PSN."""
    seen: dict[int, tuple[int, Packet]] = {}  # PSN -> first sighting
    again: list[tuple[int, Packet, bool]] = []  # PSN, packet, whether the receiver had asked for it
    asked: int | None = None
    covered: list[tuple[int, int]] = []  # time, end of what is acknowledged
    top: int | None = None
    start = 0
    for p in packets:
        key = (p.src, p.dst, p.qp)
        if key == data:
            if top is None:
                top = start = p.psn + 2**24
            psn = _nearest(p.psn, top)
            top = max(top, psn + 1)
            if psn < start or psn in seen:
                again.append((psn, p, asked is not None and psn >= asked))
            else:
                seen[psn] = (p.time_ns, p)
        elif key == acks and top is not None and p.name == "RC_ACKNOWLEDGE":
            end = _nearest(p.psn, top - 1) + 1
            covered.append((p.time_ns, end if p.syndrome < 0x20 else end - 1))
            if p.syndrome >= 0x20:
                asked = end - 1
            elif asked is not None and end > asked:
                asked = None
    messages: list[dict] = []
    for psn in sorted(seen):
        place = wire.OPCODES[CODES[seen[psn][1].name]].place
        if place & wire.FIRST or not messages:
            messages.append({"psns": [], "started": bool(place & wire.FIRST), "ended": False})
        messages[-1]["psns"].append(psn)
        messages[-1]["ended"] = bool(place & wire.LAST)
    return [_describe(m, seen, again, covered) for m in messages]


def _describe(m: dict, seen: dict, again: list, covered: list) -> dict:
    psns = m["psns"]
    first, last = seen[psns[0]][1], seen[psns[-1]][1]
    repeats = [(p, asked) for psn, p, asked in again if psns[0] <= psn <= psns[-1]]
    acked = next((t for t, end in covered if m["ended"] and end > psns[-1]), NEVER)
    # Of a whole message only what was asked for counts: the rest came in vain.
    counting = [p.time_ns for p, asked in repeats if asked or not m["ended"]]
    times = [seen[n][0] for n in psns] + [t for t in counting if acked == NEVER or t < acked]
    told = "WRITE" in first.name and m["started"]
    flags = 0 if m["started"] else MessageFlag.STARTS_BEFORE
    flags |= 0 if m["ended"] else MessageFlag.ENDS_AFTER
    flags |= 0 if psns[-1] - psns[0] + 1 == len(psns) else MessageFlag.GAP
    size = first.length if told else sum(seen[n][1].payload for n in psns)
    return {
        "seq": psns[0],
        "packets": len(psns),
        "bytes": size,
        "rkey": first.rkey if told else 0,
        "first_ns": min(seen[n][0] for n in psns),
        "last_ns": max(times),
        "acked_ns": acked,
        "retransmitted": len(repeats),
        "tag": last.imm if m["ended"] and last.name.endswith("IMM") else 0,
        "flags": flags,
    }
