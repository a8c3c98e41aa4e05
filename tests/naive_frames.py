"""Simulated RoCE packets one by one, as ``kernels.simulated`` makes them: columns, then records."""

from __future__ import annotations

import struct
import zlib

from dpuflow.schema.simulated import CTS, LENGTH, PACKETS, READ, REPLIES, RESPONSE, WRITE_IMM
from dpuflow.synth.world import Played
from dpuflow.wire import headers as wire

REPLY_NAMES = {9: "RC_ACKNOWLEDGE", 10: "CNP", 11: "RC_ATOMIC_ACKNOWLEDGE"}
NAMES = {3: "RC_SEND_", 4: "RC_FETCH_ADD", 5: "RC_READ_REQUEST", 6: "RC_READ_RESPONSE_"}
CODES = {opcode.name: opcode.code for opcode in wire.OPCODES.values()}
FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def code_of(kind: int, first: bool, last: bool) -> int:
    """The operation code of a message's packet."""
    name = NAMES.get(kind, "RC_WRITE_")
    if name.endswith("_"):
        name += "ONLY" if first and last else "FIRST" if first else "LAST" if last else "MIDDLE"
        name += "_IMM" * (kind == WRITE_IMM and last)
    return CODES[name]


def packet(played: Played, event: dict[str, int], place: int) -> dict[str, int]:
    """The ``place``-th packet of an event, as PACKETS has it."""
    found = dict.fromkeys(PACKETS, 0)
    found |= {name: event[name] for name in ("flow", "received")}
    found |= {"identity": event["identity"] + place, "back": event["reply"]}
    if event["reply"]:
        cells = played.trace.replies.cells()[event["row"]].tolist()
        reply = dict(zip(REPLIES, cells, strict=True))
        psn, msn = reply["psn"] & wire.PSN_MASK, reply["msn"] & wire.PSN_MASK
        told = {"psn": psn, "msn": msn, "syndrome": reply["syndrome"], "message": -1}
        return found | told | {"code": CODES[REPLY_NAMES[reply["kind"]]]}
    message = row_of(played, event["row"])
    kind, mtu, every = message["kind"], played.flows[event["flow"]].mtu, played.scenario.machine.ack_packets
    size = 0 if kind == READ else message["bytes"]
    packets = max(1, -(-size // mtu))
    at = event["first"] + place
    last = at + 1 == packets
    assert kind < LENGTH
    found["code"] = code_of(kind, at == 0, last)
    found["psn"] = message["psn"] + at & wire.PSN_MASK
    found["payload"] = size - at * mtu if last else mtu
    found["message"] = event["row"]
    if kind == RESPONSE:
        found |= {"syndrome": 0x1F, "msn": message["value"] & wire.PSN_MASK}
    elif last or (every and kind < READ and (message["psn"] + at + 1) % every == 0):
        found["ask"] = 1
    found["marked"] = int(place >= event["count"] - event["marked"])
    return found


def row_of(played: Played, row: int) -> dict[str, int]:
    """One row of MESSAGES."""
    table = played.trace.messages
    return dict(zip(table.columns, table.cells()[row].tolist(), strict=True))


def told_by(played: Played, row: int) -> list[dict[str, int]]:
    """A message's rows of ENTRIES."""
    table = played.trace.entries
    rows = (dict(zip(table.columns, cells, strict=True)) for cells in table.cells().tolist())
    return [each for each in rows if each["message"] == row]


def payload_of(played: Played, columns: dict[str, int], pool: bytes) -> bytes:
    """A packet's payload, its own first bytes in place of the pool's."""
    from dpuflow.synth.transport import LAYOUTS

    size, opcode = columns["payload"], wire.OPCODES[columns["code"]]
    body = bytearray(pool[:size])
    if opcode.operation != wire.OP_WRITE:
        return bytes(body)
    message, told = row_of(played, columns["message"]), told_by(played, columns["message"])
    layout = LAYOUTS[played.scenario.nccl.version]
    whole = size % layout.entry == 0 and 0 < size <= 8 * layout.entry
    if whole and message["kind"] == CTS:
        count = size // layout.entry
        own = [message | {"tag": played.tags[columns["flow"]]}]
        for place, each in enumerate((told or own)[:count]):
            entry = bytearray(layout.entry)
            struct.pack_into("<Q", entry, 0, each["target"])
            entry[layout.size_at : layout.size_at + layout.size_bytes] = each["room"].to_bytes(
                layout.size_bytes, "little"
            )
            struct.pack_into("<I", entry, layout.rkeys_at, each["key"])
            struct.pack_into("<I", entry, layout.requests_at, count)
            struct.pack_into("<I", entry, layout.tag_at, each["tag"])
            struct.pack_into("<Q", entry, layout.number_at, message["value"])
            body[place * layout.entry : (place + 1) * layout.entry] = entry
    elif opcode.place & wire.FIRST and told and not whole:
        body[:] = b"".join(struct.pack("<I", each["room"]) for each in told)[:size]
    elif opcode.place & wire.FIRST:
        for at, factor in zip((0, 8), FACTORS, strict=True):
            if at + 4 <= size:
                struct.pack_into("<I", body, at, (message["target"] + 1) * factor >> 32 & 0xFFFFFFFF)
    return bytes(body)


def extended(columns: dict[str, int], message: dict[str, int]) -> bytes:
    """The headers behind the BTH."""
    headers, found = wire.OPCODES[columns["code"]].headers, b""
    if headers & wire.RETH:
        found += struct.pack(">QII", message["va"], message["rkey"], message["bytes"])
    if headers & wire.ATOMIC:
        found += struct.pack(">QIQQ", message["va"], message["rkey"], message["value"], 0)
    if headers & wire.AETH:
        found += struct.pack(">I", columns["syndrome"] << 24 | columns["msn"])
    found += bytes(8 * bool(headers & wire.ATOMIC_ACK))
    if headers & wire.IMM:
        found += struct.pack(">I", message["value"])
    return found + bytes(16 * bool(headers & wire.CNP_PAD))


def frame(played: Played, columns: dict[str, int], pool: bytes) -> bytes:
    """A packet's frame: Ethernet, IPv4, UDP, BTH, extended headers, payload, ICRC."""
    ends, flow = played.ends[columns["flow"]], played.flows[columns["flow"]]
    back, received = columns["back"], columns["received"] == 1
    (src, dst), pair = (
        (ends.src, ends.dst)[:: -1 if back else 1],
        ends.reply_pair if back else ends.queue_pair,
    )
    ports = (flow.src, flow.dst)[:: -1 if back else 1]
    near = played.network.near(flow.src, flow.dst)
    to = dst.mac if near or received else played.network.gateway(ports[0])
    by = src.mac if near or not received else played.network.gateway(ports[1])
    nccl, notice = played.scenario.nccl, columns["code"] == wire.CNP_OPCODE
    traffic = nccl.traffic_class & 0xFC | (0 if back or not nccl.ecn else 2)
    if notice:
        traffic = 48 << 2 | 2
    elif columns["marked"] and received and not back:
        traffic |= 3
    payload = payload_of(played, columns, pool)
    payload += bytes(-len(payload) & 3)
    bth = struct.pack(
        ">BBHIHBB", columns["code"], 0x40 | (-columns["payload"] & 3) << 4, 0xFFFF,
        pair | (0x40000000 if notice else 0), columns["ask"] << 15 | columns["psn"] >> 16,
        columns["psn"] >> 8 & 0xFF, columns["psn"] & 0xFF,
    )  # fmt: skip
    message = {} if columns["message"] < 0 else row_of(played, columns["message"])
    inner = bth + extended(columns, message) + payload
    udp = struct.pack(">HHHH", ends.udp_port, 4791, 8 + len(inner) + 4, 0)
    ttl = 255 - 3 * (received and not near)
    ip = struct.pack(
        ">BBHHHBBH", 0x45, traffic, 28 + len(inner) + 4, columns["identity"] & 0xFFFF, 0x4000, ttl, 17, 0
    )
    ip += src.ip.packed + dst.ip.packed
    total = sum(struct.unpack(">10H", ip))
    total = (total & 0xFFFF) + (total >> 16)
    ip = ip[:10] + struct.pack(">H", ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF) + ip[12:]
    covered = bytearray(ip + udp + inner)
    for at in (1, 8, 10, 11, 26, 27, 32):
        covered[at] = 0xFF
    icrc = struct.pack("<I", zlib.crc32(covered, zlib.crc32(b"\xff" * 8)))
    return to + by + b"\x08\x00" + ip + udp + inner + icrc


def record(stamp_ns: int, whole: bytes, snaplen: int, truncate: int) -> bytes:
    """A pcap record of a frame: what a mirror cut of it counts for its length; what is not kept is not."""
    seen = whole[:truncate] if truncate else whole
    kept = seen[:snaplen] if snaplen else seen
    cut = len(kept) < len(whole)
    head = struct.pack("<IIII", stamp_ns // 10**9, stamp_ns % 10**9, len(kept), len(seen))
    return head + (kept if not cut else kept[: len(whole) - 4].ljust(len(kept), b"\0"))
