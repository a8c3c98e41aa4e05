"""Framing of RoCE SENDs: the first bytes of each message in, what its library says of it out.

Two libraries under MPI are read, both with integers in the sender's (little-endian) order:

- libfabric's rxm (prov/rxm/src/rxm.h, struct rxm_pkt): 32 bytes of control header (version 4, type, u32
  segment number, u64 connection, u64 message id), 32 bytes of operation header (version 2, operation: 1
  tagged; u64 size; u64 data; u64 tag: its low half the MPI tag, then two bits of Open MPI's, 1 a synchronous
  send, 2 its acknowledgment (ompi/mca/mtl/ofi/mtl_ofi_types.h), then the context). Types: 0 eager,
  1 segment, 2 rendezvous request (its data may be read at the u64 address that follows), 3 it was read, 4
  and 5 atomics, 6 credit, 7 where to write, 8 it was written; 3, 7 and 8 repeat the message id.
- UCX's tag protocol on reliable connections (ucp/tag/eager.h, ucp/rndv/rndv.h): one byte of active-message
  id in the low five bits; 1 set-up, 2 only, 3 first, 4 middle, 6 only and synchronous (u64 tag, two ids), 8
  its acknowledgment (the id); 9 ready to send (u64 tag, two ids, u64
  address, u64 size), 10 it was read (the offer's id), 11 ready to receive (the offer's id, its own, u64
  address, u64 size), 16 it was written. Open MPI's tag: 24 bits MPI tag, 20 rank, 20 context.

Every fragment of a message gets the same number, so that it counts as one transfer: one more than the PSN of
its first packet, as all captures see it.
What is read or written for a rendezvous gets its offer's (``rendezvous``). The first message of a connection
is marked where the capture holds the beginning (CM handshake, UCX's set-up).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from dpuflow.framing import MPI_TAG
from dpuflow.messages.rendezvous import Said, link_rendezvous
from dpuflow.schema.rows import NONE32, Kind, MessageFlag, Op, Pairing, Role, Wire
from dpuflow.wire import headers as wire

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Block, Rows

HEAD: Final = 72
RXM_HEADER, RXM_VERSION, RXM_OP_VERSION = 64, 4, 2
RXM_EAGER, RXM_SEGMENT, RXM_OFFER, RXM_READ, RXM_GRANT, RXM_LAST = 0, 1, 2, 3, 7, 8
UCX_WIREUP, UCX_ONLY, UCX_FIRST, UCX_MIDDLE, UCX_SYNC, UCX_SYNC_ACK = 1, 2, 3, 4, 6, 8
UCX_OFFER, UCX_READ, UCX_GRANT, UCX_WRITTEN = 9, 10, 11, 16
UCX_HEADER: Final = {UCX_ONLY: 9, UCX_FIRST: 25, UCX_MIDDLE: 17, UCX_SYNC: 25}
UCX_OFFER_BYTES, UCX_GRANT_BYTES = 41, 33
UCX_ANSWERS: Final = (10, 18)
"""Bytes of an answer: id and status, or these and a size (as captured from UCX 1.13)."""
UCX_ADDRESSES: Final = 1 << 57
"""Addresses and sizes of memory are smaller on every processor in use (five levels of pages)."""
SYNC_ACK: Final = 2
MOST: Final = 1 << 16
"""Ranks and contexts from here on are no MPI job's: other payload that looks alike."""
UNDERSTOOD: Final = 0.9
"""A flow is framed if this share of its messages reads as such; the rest is the library's own traffic."""

_STARTS = np.zeros(256, bool)
for _code, _opcode in wire.OPCODES.items():
    _STARTS[_code] = (
        _opcode.operation == wire.OP_SEND and bool(_opcode.place & wire.FIRST) and _opcode.transport != "UD"
    )


class SendHeads:
    """Keeps the first bytes of every SEND message, as far as captured, and reads them at the end."""

    def __init__(self) -> None:
        self._keys: list[NDArray[np.int64]] = []
        self._frames: list[NDArray[np.int64]] = []
        self._lengths: list[NDArray[np.uint16]] = []
        self._heads: list[NDArray[np.uint8]] = []
        self._forgot = False

    def feed(self, block: Block) -> None:
        """Take in one block."""
        columns, n = block.columns, block.rows
        starts = _STARTS[columns["opcode"][:n]]
        if not starts.any():
            return
        kind = columns["kind"][:n]
        at = np.flatnonzero(starts & ((kind == Kind.ROCE_V2) | (kind == Kind.ROCE_V1)))
        if not len(at):
            return
        length = np.minimum(columns["data_len"][at], HEAD)
        place = columns["data_at"][at].astype(np.int64)[:, None] + np.arange(HEAD)
        heads = block.data[np.minimum(place, len(block.data) - 1)]
        heads[np.arange(HEAD) >= length[:, None]] = 0
        self._keys.append(_key(columns["flow"][at], columns["psn"][at]))
        self._frames.append(columns["frame"][at].astype(np.int64))
        self._lengths.append(length.astype(np.uint16))
        self._heads.append(heads)

    def copy(self) -> SendHeads:
        """One that stays as this is now."""
        other = SendHeads()
        other._keys, other._frames = list(self._keys), list(self._frames)
        other._lengths, other._heads = list(self._lengths), list(self._heads)
        other._forgot = self._forgot
        return other

    def forget(self, before_frame: int | None) -> None:
        """Let go of what came before that frame; None: of everything."""
        if not self._frames:
            return
        self._forgot = True
        frames = np.concatenate(self._frames)
        keep = frames >= before_frame if before_frame is not None else np.zeros(len(frames), bool)
        self._keys = [np.concatenate(self._keys)[keep]]
        self._lengths = [np.concatenate(self._lengths)[keep]]
        self._heads = [np.concatenate(self._heads)[keep]]
        self._frames = [frames[keep]]
        if not keep.any():
            self._keys, self._frames, self._lengths, self._heads = [], [], [], []

    def keep_flows(self, place: NDArray[np.int64]) -> None:
        """Follow the reader in forgetting flows: ``place`` is each one's new row, -1 if gone."""
        for n, keys in enumerate(self._keys):
            flow = place[keys >> wire.PSN_BITS]
            kept = flow >= 0
            self._keys[n] = (flow[kept] << wire.PSN_BITS) | (keys[kept] & wire.PSN_MASK)
            self._frames[n], self._lengths[n] = self._frames[n][kept], self._lengths[n][kept]
            self._heads[n] = self._heads[n][kept]

    def renumber(self, frames: int) -> None:
        """Take ``frames`` off all numbers of frames."""
        self._frames = [np.maximum(each - frames, 0) for each in self._frames]

    def read(self, rows: Rows, flows: Rows) -> None:
        """Fill role, op, context, tag, sub and bytes of the MESSAGE rows whose framing is understood."""
        if not self._frames:
            return
        sends, heads, lengths, headless = self._found(rows)
        lacking = np.zeros(len(flows), bool)
        lacking[rows["flow"][headless]] = True
        flow = rows["flow"][sends]
        bounds = np.flatnonzero(np.r_[True, flow[1:] != flow[:-1], True]) if len(flow) else np.zeros(1, int)
        read: list[tuple[NDArray[np.int64], _Told]] = []
        for low, high in pairwise(bounds.tolist()):
            mine = sends[low:high]
            gaps = (rows["flags"][mine] & MessageFlag.GAP) != 0
            lossy = bool(gaps.any()) or bool(lacking[flow[low]])
            nbytes = rows["bytes"][mine].astype(np.int64)
            told = _understood(rows, mine, _Heads(nbytes, heads[low:high], lengths[low:high], gaps, lossy))
            if told is not None:
                read.append((mine, told))
        understood = np.zeros(len(flows), bool)
        understood[[int(rows["flow"][mine[0]]) for mine, _ in read]] = True
        rows["flags"][headless[understood[rows["flow"][headless]]]] |= np.uint8(MessageFlag.HIDDEN)
        begun = flows["pairing"] == Pairing.HANDSHAKE
        set_up = [rows["flow"][mine[0]] for mine, told in read if told.aside.any()]
        begun[set_up] = True
        peers = flows["peer"][set_up]
        begun[peers[peers != NONE32]] = True
        said = []
        for mine, told in read:
            _apply(rows, mine, told, bool(begun[rows["flow"][mine[0]]]) and not self._forgot)
            speaks = told.good & np.isin(told.role, (Role.OFFER, Role.GRANT, Role.DONE))
            said.append((mine[speaks], told.address[speaks], told.ident[speaks]))
        if said:
            link_rendezvous(rows, flows, Said(*(np.concatenate(each) for each in zip(*said, strict=True))))

    def _found(
        self, rows: Rows
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint16], NDArray[np.int64]]:
        """SENDs by flow and time, with their first bytes and how many those are; those without any."""
        keys, frames = np.concatenate(self._keys), np.concatenate(self._frames)
        order = np.lexsort((frames, keys))
        keys, frames = keys[order], frames[order]
        sends = np.flatnonzero(
            np.isin(rows["wire"], (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM)) & (rows["role"] == Role.DATA)
        )
        # Its first packet is the last with its PSN up to the message's end: PSNs come round again, and a
        # first packet that was lost came again behind others.
        key = _key(rows["flow"][sends], rows["seq"][sends])
        known, number = np.unique(keys, return_inverse=True)
        which = np.minimum(np.searchsorted(known, key), len(known) - 1)
        end = (which << 32) | rows["last_frame"][sends].astype(np.int64)
        at = np.searchsorted((number << 32) | frames, end, "right") - 1
        kept = (known[which] == key) & (at >= 0)
        kept &= number[at] == which
        headless = sends[~kept & ((rows["flags"][sends] & MessageFlag.GAP) != 0)]
        sends, found = sends[kept], order[at[kept]]
        in_time = np.lexsort((rows["first_ns"][sends], rows["flow"][sends]))
        found = found[in_time]
        heads, lengths = np.concatenate(self._heads), np.concatenate(self._lengths)
        return sends[in_time], heads[found], lengths[found], headless


def _key(flow: NDArray[np.generic], psn: NDArray[np.generic]) -> NDArray[np.int64]:
    return (flow.astype(np.int64) << wire.PSN_BITS) | (psn.astype(np.int64) & wire.PSN_MASK)


class _Heads(NamedTuple):
    """The messages of one flow, in order of time."""

    nbytes: NDArray[np.int64]
    heads: NDArray[np.uint8]  # first bytes of each
    lengths: NDArray[np.uint16]  # how many of them were captured
    gaps: NDArray[np.bool_]  # which lack packets; what their headers say of them holds all the same
    lossy: bool  # so may some whose headers were missed


class _Told:
    """What the messages of one flow say; arrays over them, in order of time."""

    def __init__(self, good: NDArray[np.bool_]) -> None:
        self.good = good
        self.aside = np.zeros(len(good), bool)  # a library's own, that says nothing for or against it
        self.tag = np.zeros(len(good), np.int64)  # MPI tag, signed
        self.context = np.zeros(len(good), np.int64)
        self.begins = np.ones(len(good), bool)  # first fragment of a message
        self.header = np.zeros(len(good), np.int64)  # bytes of framing
        self.missing = np.zeros(len(good), np.int64)  # bytes that were not captured, by what headers say
        self.role = np.full(len(good), int(Role.DATA), np.uint8)
        self.announces = np.zeros(len(good), np.uint64)  # bytes of the data that an offer or grant speaks of
        self.address = np.zeros(len(good), np.uint64)  # where that data may be read or written; 0 if not told
        self.ident = np.zeros(len(good), np.uint64)  # of the offer that is made or answered
        self.holds = False  # the call that sends them returns when they are acknowledged


def _integer(heads: NDArray[np.uint8], at: int, size: int) -> NDArray[np.uint64]:
    raw = np.zeros((len(heads), 8), np.uint8)
    raw[:, :size] = heads[:, at : at + size]
    return raw.view("<u8").reshape(-1)


def _cut(heads: NDArray[np.uint8], lengths: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Messages of rxm whose tag, at the end of its header, was not captured."""
    known = (heads[:, 0] == RXM_VERSION) & (heads[:, 1] <= RXM_LAST) & (heads[:, 32] == RXM_OP_VERSION)
    return np.asarray(known & (lengths > RXM_HEADER // 2) & (lengths < RXM_HEADER), np.bool_)


def _understood(rows: Rows, mine: NDArray[np.int64], seen: _Heads) -> _Told | None:
    """What the rows ``mine`` say by the library that explains them; flags those that it cannot tell."""
    for reader in (_rxm, _ucx):
        told = reader(seen)
        if told.good.any() and told.good.sum() >= UNDERSTOOD * (~told.aside).sum():
            told.holds = reader is _rxm
            if seen.lossy:  # what names a fragment that was missed is told by who saw that
                unread = mine[~told.good & ~told.aside]
                rows["flags"][unread] |= np.uint8(MessageFlag.HIDDEN | MessageFlag.GAP)
            return told
    cut = _cut(seen.heads, seen.lengths)
    if cut.sum() >= UNDERSTOOD * len(mine):
        rows["flags"][mine[cut]] |= np.uint8(MessageFlag.HIDDEN)
    return None


def _rxm(seen: _Heads) -> _Told:
    nbytes, heads, lengths, gaps, lossy = seen
    kind, number = heads[:, 1], _integer(heads, 4, 4)
    size = _integer(heads, 40, 8)
    good = (lengths >= RXM_HEADER) & (heads[:, 0] == RXM_VERSION) & (heads[:, 32] == RXM_OP_VERSION)
    tagged = heads[:, 34] <= 1
    missing = size.astype(np.int64) - (nbytes - RXM_HEADER)
    eager = (kind == RXM_EAGER) & ((missing == 0) | (gaps & (missing > 0))) & tagged
    segment = (kind == RXM_SEGMENT) & (size > (nbytes - RXM_HEADER).clip(0).astype(np.uint64)) & tagged
    offer = (kind == RXM_OFFER) & tagged
    own = (kind > RXM_OFFER) & (kind <= RXM_LAST)
    told = _Told(good & (eager | segment | offer | own))
    told.role[offer] = Role.OFFER
    told.role[own] = Role.CONTROL
    told.role[kind == RXM_GRANT], told.role[kind == RXM_READ] = Role.GRANT, Role.DONE
    told.announces[offer] = size[offer]
    told.ident = _integer(heads, 16, 8)
    speaks = offer | (kind == RXM_GRANT)
    told.address[speaks] = _integer(heads, RXM_HEADER, 8)[speaks]
    told.tag = _integer(heads, 56, 4).astype(np.uint32).view(np.int32).astype(np.int64)
    above = _integer(heads, 60, 4)
    told.context = ((above & 0xFFFFFFF) >> 2).astype(np.int64)
    told.role[eager & (above & 3 == SYNC_ACK)] = Role.CONTROL
    told.begins = (kind != RXM_SEGMENT) | (number == 0)
    told.header[:] = RXM_HEADER
    told.missing[eager] = missing[eager]
    carried = nbytes - RXM_HEADER
    # Ids come round again: a message begins with its first segment, or where that was missed.
    follows = (told.ident[1:] == told.ident[:-1]) & (number[1:] == number[:-1] + 1)
    new = (number == 0) | np.r_[True, ~follows]
    begin = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
    if lossy:  # of which message it is was told by the first
        told.good &= ~segment | (number[begin] == 0)
    of = np.where(segment & told.good, begin, -1)
    lacks = np.zeros(len(of), np.int64)
    np.add.at(lacks, of[of >= 0], -carried[of >= 0])
    told.missing += _missing(of, carried, lacks + size.astype(np.int64), gaps)
    return told


def _ucx(seen: _Heads) -> _Told:
    nbytes, heads, lengths, gaps, lossy = seen
    kind = heads[:, 0] & 0x1F
    tag = _integer(heads, 1, 8)
    total, ident = _integer(heads, 9, 8), _integer(heads, 17, 8)
    sane = ((tag >> np.uint64(20)) & np.uint64(0xFFFFF) < MOST) & (tag & np.uint64(0xFFFFF) < MOST)
    only = sane & (kind == UCX_ONLY) & (lengths >= 9) & (nbytes >= 9)
    only |= sane & (kind == UCX_SYNC) & (lengths >= 25) & (nbytes >= 25)
    first = sane & (kind == UCX_FIRST) & (lengths >= 25) & (nbytes >= 25)
    # A middle fragment names its message by the id that the first one gave.
    latest = np.maximum.accumulate(np.where(first, np.arange(len(kind)), -1))
    middle = (kind == UCX_MIDDLE) & (lengths >= 17) & (latest >= 0) & (ident[latest] == tag)
    # Fragments must add up to what the first one announced, but for a message that the end cut off.
    whole = np.zeros(len(kind), np.int64)
    np.add.at(whole, latest[first | middle], (nbytes - np.where(first, 25, 17))[first | middle])
    missing = total.astype(np.int64) - whole
    short = first & (missing != 0)
    short[latest[-1:]] &= missing[latest[-1:]] < 0
    # Where packets are missing all that is left of a fragment may be: ids name its message all the same.
    short &= (missing < 0) | (not lossy)
    offer = sane & (kind == UCX_OFFER) & (lengths >= UCX_OFFER_BYTES)
    # One byte makes a message an answer: its length, or what it tells, must be an answer's, too.
    grant = (kind == UCX_GRANT) & (lengths >= UCX_GRANT_BYTES)
    grant &= (_integer(heads, 17, 8) < UCX_ADDRESSES) & (_integer(heads, 25, 8) < UCX_ADDRESSES)
    own = np.isin(kind, (UCX_READ, UCX_WRITTEN, UCX_SYNC_ACK)) & np.isin(nbytes, UCX_ANSWERS)
    told = _Told(only | ((first | middle) & ~short[latest]) | offer | grant | own)
    told.aside = kind == UCX_WIREUP
    told.role[offer], told.role[grant], told.role[own] = Role.OFFER, Role.GRANT, Role.CONTROL
    told.role[own & (kind == UCX_READ)] = Role.DONE
    told.ident[own] = _integer(heads, 1, 8)[own]
    for mask, places in ((offer, (17, 25, 33)), (grant, (1, 17, 25))):
        for values, at in zip((told.ident, told.address, told.announces), places, strict=True):
            values[mask] = _integer(heads, at, 8)[mask]
    tag = np.where(middle, tag[latest], tag)
    signed = (tag >> np.uint64(40)).astype(np.int64)
    told.tag = np.where(signed >= 1 << 23, signed - (1 << 24), signed)
    told.context = (tag & np.uint64(0xFFFFF)).astype(np.int64)
    told.begins = ~middle
    for each, header in UCX_HEADER.items():
        told.header[kind == each] = header
    carried = nbytes - np.where(first, UCX_HEADER[UCX_FIRST], UCX_HEADER[UCX_MIDDLE])
    told.missing[:] = _missing(np.where(first | middle, latest, -1), carried, missing, gaps)
    return told


def _missing(
    of: NDArray[np.int64], carried: NDArray[np.int64], lacks: NDArray[np.int64], gaps: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Bytes that fragments with holes lack: all but a message's last one are as long as any of the flow.

    ``of``: each fragment's message, by the place of its first one, -1 for what is no fragment; ``carried``:
    what was seen of its data; ``lacks``: by place of first ones what the whole message lacks.
    """
    out = np.zeros(len(of), np.int64)
    most = int(carried[of >= 0].max(initial=0))
    left = lacks.clip(0)
    for at in np.flatnonzero(gaps & (of >= 0)).tolist():
        out[at] = min(int(left[of[at]]), most - int(carried[at]))
        left[of[at]] -= out[at]
    return out


def _apply(rows: Rows, mine: NDArray[np.int64], told: _Told, begun: bool) -> None:
    good, at = told.good, mine[told.good]
    ops = np.full(len(mine), int(Op.UNKNOWN))
    for tag, op in MPI_TAG.items():
        ops[told.tag == tag] = int(op)
    ops[told.tag >= 0] = int(Op.SEND_RECV)
    named = good & ((told.role == Role.DATA) | (told.role == Role.OFFER))  # others: by what they answer
    ops[~named] = int(Op.UNKNOWN)
    rows["op"][at] = ops[good]
    rows["role"][at], rows["announces"][at] = told.role[good], told.announces[good]
    begin = np.maximum.accumulate(np.where(told.begins & named, np.arange(len(mine)), 0))
    number = (rows["seq"][mine[begin]] & np.uint64(wire.PSN_MASK)) + np.uint64(1)  # 0 is no number
    for name, values in (("context", told.context), ("tag", told.tag), ("sub", number)):
        rows[name][at] = np.where(named, values, 0)[good].astype(np.uint32)
    if begun:
        rows["flags"][mine[np.flatnonzero(named)[:1]]] |= np.uint8(MessageFlag.OPENING)
    if told.holds:
        rows["flags"][at] |= np.uint8(MessageFlag.HOLDS_SENDER)
    carried = (rows["bytes"][at].astype(np.int64) - told.header[good] + told.missing[good]).clip(0)
    rows["bytes"][at] = np.where(told.role[good] == Role.DATA, carried, 0)
