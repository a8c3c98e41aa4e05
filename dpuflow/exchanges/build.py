"""TRANSFER rows in, EXCHANGE rows out: each transfer of data with its offer, grant and completion.

A library that announces its data (Gloo's SEND_READY, ob1's RNDV) or waits for a credit (Gloo's
RECV_READY, ob1's PUT request, NCCL's clear-to-send) spreads one transfer over several messages.
What belongs together is told by the library's own match key where the wire shows one, else by
order: the i-th grant of a connection pays for the i-th data message; of a capture that begins in mid-job
addresses tell which data was granted before it (``kernels.turns``). What peers put into each other's memory
unasked is one exchange up to its flag (``flagged``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays.ordering import Picked, distinct
from dpuflow.exchanges.bunches import bunched
from dpuflow.exchanges.flagged import joined_puts
from dpuflow.exchanges.pieces import cut, whole
from dpuflow.exchanges.stripes import bundled, striped
from dpuflow.schema.rows import EXCHANGE, NEVER, NONE32, TRANSFER, MessageFlag, Op, Role, Wire
from dpuflow.wire.headers import PSN_BITS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpuflow.schema.tables import Rows

    Bools = NDArray[np.bool_]

_FAR = np.iinfo(np.int64).max
_NEGATIVE = 1 << 31  # MPI tags of a library's own, as unsigned numbers
PSN_HALF = 1 << (PSN_BITS - 1)
"""As many packets further on a PSN is another round's: a sender never has more unacknowledged."""
_TAGGED = (Wire.TAGGED, Wire.TAGGED_DONE)


def build_exchanges(transfers: Rows, columns: Rows | Picked | None = None) -> Rows:
    """Link messages into exchanges. ``columns``: those of ``transfers``, where they have been copied out.

    Messages of TCP are linked where a library's framing names their operation; RoCE's and NCCL's all are.
    Returns the EXCHANGE rows in order of their first sign.
    """
    TRANSFER.check(transfers)
    columns = Picked.transfers(transfers) if columns is None else columns
    wire, role = columns["wire"], columns["role"]
    named = columns["op"] != Op.UNKNOWN
    roce = (wire >= Wire.ROCE_SEND) & (wire <= Wire.ROCE_SEND_IMM) & ~named
    roce |= wire == Wire.NCCL_DATA
    # Of an operation that nothing here knows (MPI_Exscan) the numbers count: they are no lost messages.
    numbered = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & ~named
    if numbered.any():
        numbered &= columns["tag"] >= _NEGATIVE
    keyed = np.flatnonzero((named | numbered | np.isin(wire, _TAGGED)) & (role != Role.CONTROL))
    plain = np.flatnonzero(roce & ((role == Role.DATA) | (role == Role.GRANT)))
    bursts = _unframed(transfers, wire)
    pieces = [EXCHANGE.zeros(0)]
    if len(keyed):
        rows = transfers[keyed]
        back = (rows["role"] == Role.GRANT) | _says_read(rows)
        src = np.where(back, rows["dst"], rows["src"])
        framed = _sorted(_fill(rows, src, _link(rows, src, _sent_before(transfers, rows, src)), keyed))
        framed["order"], direction = _running_number(framed["connection"], framed["src"])
        _mark_cut(framed, direction)
        pieces.append(framed)
    if len(plain):
        pieces.append(_in_order(transfers, plain, int(columns["connection"].max()) + 1))
    if len(bursts):
        rows = transfers[bursts]
        pieces.append(_fill(rows, rows["src"], np.arange(len(rows)), bursts))
        pieces[-1]["order"], _ = _running_number(rows["connection"], rows["src"])
    return _sorted(np.concatenate(pieces)) if len(pieces) > 2 else pieces[-1]


def there_ns(exchanges: Rows | Picked) -> NDArray[np.int64]:
    """When the receiver had all the data of each exchange; NEVER where it was not seen to arrive.

    What an MPI library READs is there when it says so, and what ob1 PUTs when the sender's FIN says so (a FIN
    that is lost keeps its receiver for a timeout); anything else when it arrived.
    """
    told = (exchanges["op"] != Op.UNKNOWN) & (exchanges["wire"] == Wire.ROCE_READ)
    told |= exchanges["wire"] == Wire.OB1_PUT
    there = exchanges["arrived_end_ns"]
    return np.where(told & (there != NEVER), np.maximum(there, exchanges["taken_ns"]), there)


def announced(transfers: Rows, exchanges: Rows) -> NDArray[np.int64]:
    """Bytes that the grant of each exchange allowed, 0 where none was seen or it did not say."""
    found = np.zeros(len(exchanges), np.int64)
    seen = exchanges["grant"] != NONE32
    found[seen] = transfers["announces"][exchanges["grant"][seen]]
    return found


def granted_at(transfers: Rows, exchanges: Rows) -> NDArray[np.int64]:
    """Address that the grant of each exchange named, modulo 2**62; -1 where none was seen."""
    found = np.full(len(exchanges), -1, np.int64)
    seen = exchanges["grant"] != NONE32
    found[seen] = transfers["va"][exchanges["grant"][seen]] & np.uint64((1 << 62) - 1)
    return found


def _unframed(transfers: Rows, wire: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Bursts on connections of which nothing but bursts is known."""
    burst = wire == Wire.TCP_BURST
    if not burst.any():
        return np.zeros(0, np.int64)
    framed = np.zeros(int(transfers["connection"].max()) + 1, bool)
    framed[transfers["connection"][~burst]] = True
    return np.flatnonzero(burst & ~framed[transfers["connection"]])


def _sorted(exchanges: Rows) -> Rows:
    """In order of their first sign."""
    first = np.full(len(exchanges), _FAR)
    for name in ("offer_ns", "grant_ns", "data_ns"):
        np.minimum(first, np.where(exchanges[name] == NEVER, _FAR, exchanges[name]), out=first)
    return exchanges[np.argsort(first, kind="stable")]


def _in_order(transfers: Rows, part: NDArray[np.int64], connections: int) -> Rows:
    """Exchanges of messages without keys, in order of their first sign (``kernels.turns``)."""
    transfers, part = bunched(transfers, part)
    facts = _survey(transfers, part, connections)
    for needed, made in ((cut, whole), (striped, bundled)):
        if needed(facts[0], facts[1]):
            joined, turns = made(transfers, part)
            if joined is not transfers:
                transfers, part, facts = joined, turns, _survey(joined, turns, connections)
    return joined_puts(_pay(transfers, part, facts))


def _survey(transfers: Rows, part: NDArray[np.int64], connections: int) -> NDArray[np.int64]:
    """Entries and WRITEs of each direction of a connection, and the number of its first entry: three rows."""
    from dpuflow.kernels.turns import survey

    facts = np.zeros((3, 2 * connections), np.int64)
    survey(transfers, part, np.full(2 * connections, -1), facts)
    return facts


def _pay(transfers: Rows, part: NDArray[np.int64], facts: NDArray[np.int64]) -> Rows:
    """The exchanges; ``facts``: see ``_survey``."""
    from dpuflow.kernels.turns import DATA, LOOKED, early, pay

    _, written, first = facts
    head, tail, latest = np.full((3, len(first)), -1)
    unpaid, begun = np.zeros((2, len(first)), np.int64)
    # Entries are counted from 1: where the first one was captured, all were.
    doubtful = (first > 1) & (written > 0)
    if doubtful.any():
        line = np.where(doubtful, np.cumsum(doubtful) - 1, -1)
        looked = np.full((int(doubtful.sum()), DATA + 1, LOOKED + 1), -1)
        early(transfers, part, line, latest, looked, np.empty(LOOKED, np.int64), unpaid)
        latest[:] = -1
    out = EXCHANGE.zeros(len(part))
    after = np.empty(len(part), np.int64)
    count = pay(transfers, part, unpaid, first, begun, head, tail, latest, unpaid.copy(), after, out)
    return out[:count]


def _sent_before(transfers: Rows, rows: Rows, src: NDArray[np.uint32]) -> NDArray[np.int64]:
    """How many packets the sender of each row's data (``src``) had sent on its connection when the row was.

    0 where it sent too few for its PSNs to come round. What is READ has its requester's PSNs.
    """
    out = np.zeros(len(rows), np.int64)
    back = (transfers["wire"] == Wire.ROCE_READ) & (transfers["role"] == Role.DATA)
    key = 2 * transfers["connection"].astype(np.int64) + ((transfers["src"] > transfers["dst"]) ^ back)
    for each in np.flatnonzero(np.bincount(key, transfers["packets"]) >= PSN_HALF).tolist():
        mine = transfers[key == each]
        sent = np.r_[0, np.cumsum(mine["packets"].astype(np.int64))]
        of = 2 * rows["connection"].astype(np.int64) + (src == np.maximum(rows["src"], rows["dst"])) == each
        out[of] = sent[np.searchsorted(mine["sent_ns"], rows["sent_ns"][of])]
    return out


def _link(rows: Rows, src: NDArray[np.uint32], sent: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of its exchange for each row: same match key, same turn within that key.

    ``sent``: packets that had been sent before (``_sent_before``).
    """
    wire = rows["wire"]
    ob1 = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER)
    # Parts share their message's number.
    whole = ((wire >= Wire.ROCE_SEND) & (wire <= Wire.ROCE_SEND_IMM)) | np.isin(wire, _TAGGED)
    keyed = ob1 | whole | ((wire >= Wire.GLOO_DATA) & (wire <= Wire.GLOO_RECV_READY))
    key = [np.where(keyed, rows[name], 0) for name in ("sub", "tag", "op", "context")]
    columns = (*key, src, rows["connection"])
    order = np.lexsort((rows["sent_ns"], *columns))
    new = np.ones(len(order), bool)
    new[1:] = False
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    group = np.cumsum(new) - 1
    starts = np.flatnonzero(new)

    # A turn: the how-manieth message of its role under this key. One RNDV may be answered by several
    # PUTs; there a message belongs to the latest head before it (ob1 sequence numbers wrap at 2^16).
    role = rows["role"][order]
    turn = np.zeros(len(order), np.int64)
    for each in distinct(role):
        mine = role == each
        turn[mine] = _count_within(mine, starts, group)[mine]
    head = (role == Role.OFFER) | (wire[order] == Wire.OB1_MATCH)
    # An MPI message on RoCE is named by the PSN of its first packet, which comes round after 2^24 others.
    round_ = np.cumsum(np.r_[0, np.diff(sent[order]) >= PSN_HALF])
    round_ -= round_[starts][group]
    turn = np.where(whole[order], np.where(wire[order] == Wire.TAGGED, 0, round_), turn)
    turn = np.where(ob1[order], np.maximum(_count_within(head, starts, group), 0), turn)

    pair = group * (int(turn.max()) + 1) + turn
    _, inverse = np.unique(pair, return_inverse=True)
    number = np.empty(len(order), np.int64)
    number[order] = inverse
    return number


def _says_read(rows: Rows) -> NDArray[np.bool_]:
    """Rows by which a receiver says that it has read what was offered."""
    wires = (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM, Wire.TAGGED_DONE)
    return np.asarray((rows["role"] == Role.DONE) & np.isin(rows["wire"], wires), np.bool_)


def _count_within(
    mark: NDArray[np.bool_], starts: NDArray[np.int64], group: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many marks stand before or at each place within its group, less one."""
    total = np.cumsum(mark)
    before: NDArray[np.int64] = total[starts] - mark[starts]
    return np.asarray(total - before[group] - 1, np.int64)


class _Marks(NamedTuple):
    """Which rows are what of their exchange."""

    offer: Bools
    grant: Bools
    data: Bools
    says_read: Bools
    read: Bools  # whose header was read, not inferred


def _fill(rows: Rows, src: NDArray[np.uint32], number: NDArray[np.int64], where: NDArray[np.int64]) -> Rows:
    """The EXCHANGE rows for rows numbered ``number``; ``where`` are their TRANSFER rows."""
    out = EXCHANGE.zeros(int(number.max()) + 1)
    role = rows["role"]
    offer, grant = role == Role.OFFER, role == Role.GRANT
    read = (rows["flags"] & MessageFlag.HIDDEN) == 0
    data = (role == Role.DATA) | (role == Role.BURST)
    data |= _synchronous(rows, number, offer & read, grant, data)
    marks = _Marks(offer, grant, data, _says_read(rows), read)
    _fill_times(out, rows, number, marks)
    out["bytes"] = _sizes(rows, number, marks, len(out))
    for name in ("retransmitted", "ecn_marked"):
        out[name] = np.bincount(number, rows[name], len(out))
    out["packets"] = np.bincount(number[data], rows["packets"][data], len(out))
    # What is the same in all rows of an exchange: rows without it (0) give way to those with it.
    for name in ("connection", "context", "tag", "sub", "op"):
        np.maximum.at(out[name], number, rows[name])
    out["src"][number] = src
    out["dst"][number] = np.where(grant | marks.says_read, rows["src"], rows["dst"])
    wire = rows["wire"]
    for mask in (grant, offer, data, (data | marks.says_read) & (wire == Wire.TAGGED_DONE)):
        out["wire"][number[mask]] = wire[mask]
    np.bitwise_or.at(out["flags"], number, rows["flags"])
    out["seen"] = 0xFF
    seen = rows["seen"]
    against = src == rows["dst"]
    np.bitwise_and.at(out["seen"], number, np.where(against, (seen & 1) << 1 | seen >> 1 & 1, seen))
    for name, mask in (("offer", offer), ("grant", grant), ("data", data)):
        out[name] = NONE32
        np.minimum.at(out[name], number[mask], where[mask].astype(np.uint32))
    return out


def _fill_times(out: Rows, rows: Rows, number: NDArray[np.int64], marks: _Marks) -> None:
    """All times of EXCHANGE rows."""
    for name in EXCHANGE.dtype.names or ():
        if name.endswith("_ns"):
            out[name] = NEVER

    def earliest(name: str, mask: Bools, times: NDArray[np.int64]) -> None:
        use = mask & (times != NEVER)
        low = np.full(len(out), _FAR)
        np.minimum.at(low, number[use], times[use])
        out[name] = np.where(low == _FAR, NEVER, low)

    def latest(name: str, mask: Bools, times: NDArray[np.int64]) -> None:
        high = np.full(len(out), NEVER)
        np.maximum.at(high, number[mask], times[mask])
        out[name] = high

    data, says_read = marks.data, marks.says_read
    for name, mask in (("offer", marks.offer), ("grant", marks.grant)):
        earliest(f"{name}_ns", mask, rows["sent_ns"])
        earliest(f"{name}_arrived_ns", mask, rows["arrived_end_ns"])
    earliest("data_ns", data, rows["sent_ns"])
    earliest("arrived_ns", data, rows["arrived_ns"])
    latest("arrived_end_ns", data, rows["arrived_end_ns"])
    # A sender that says so knows that its data has come (UCX's puts). That was on its way no longer.
    known = data & (rows["wire"] == Wire.TAGGED_DONE)
    latest("data_end_ns", data & ~known, rows["sent_end_ns"])
    latest("acked_ns", data, np.where(known, rows["sent_end_ns"], rows["acked_ns"]))
    taken = rows["taken_ns"]
    put = rows["wire"] == Wire.OB1_PUT
    if put.any():  # complete for its receiver when the sender's FIN has come, not when it is acknowledged
        taken = np.where(put, NEVER, taken)
        puts, fins = _finished(rows)
        taken[puts] = rows["arrived_end_ns"][fins]
    latest("taken_ns", data, taken)
    if says_read.any():  # it says when the receiver had all; the sender learns from it what an ACK would tell
        # libfabric hands a message on when its own word has been acknowledged (rxm_rndv_rx_finish).
        holds = (rows["flags"] & MessageFlag.HOLDS_SENDER) != 0
        said = np.where(holds, np.maximum(rows["sent_ns"], rows["acked_ns"]), rows["sent_ns"])
        latest("taken_ns", data | says_read, np.where(says_read, said, rows["taken_ns"]))
        # TCP acknowledges at leisure: there the sender knows when the word has come.
        tcp = rows["wire"] == Wire.TAGGED_DONE
        heard = np.maximum(rows["arrived_end_ns"], np.where(tcp, NEVER, rows["taken_ns"]))
        latest("acked_ns", data | says_read, np.where(says_read, heard, rows["acked_ns"]))


def _sizes(rows: Rows, number: NDArray[np.int64], marks: _Marks, count: int) -> NDArray[np.float64]:
    """Bytes of each of ``count`` exchanges, as announced, or allowed, or seen."""
    offer, grant, data, _, read = marks
    carried = np.bincount(number[data], rows["bytes"][data], count)
    announced, granted, inferred = np.zeros((3, count), np.uint64)
    guessed = (offer | grant) & ~read
    for most, mask in ((announced, offer & read), (granted, grant & read), (inferred, guessed)):
        np.maximum.at(most, number[mask], rows["announces"][mask])
    # What the sender announced counts before what was seen of it: frames of it may lie in a gap. Gloo's
    # DATA comes in one piece, and its receiver may grant more than there is.
    wire = rows["wire"]
    gloo = np.bincount(number, (wire >= Wire.GLOO_DATA) & (wire <= Wire.GLOO_RECV_READY), count) > 0
    whole = gloo & (np.bincount(number, data & read, count) > 0)
    told = np.where(granted > 0, granted, inferred)
    seen = np.where(whole | (told == 0), carried, told)
    return np.where(announced > 0, announced, seen)


def _finished(rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """ob1's PUTs with the FIN that ends each: rows of both.

    Keys of FINs are pointers, which are used again; what counts is that PUT and FIN take turns on their flow.
    """
    part = np.flatnonzero((rows["wire"] == Wire.OB1_PUT) | (rows["wire"] == Wire.OB1_FIN))
    part = part[np.lexsort((rows["seq"][part], rows["src"][part], rows["connection"][part]))]
    fin = rows["wire"][part] == Wire.OB1_FIN
    same = (rows["connection"][part][1:] == rows["connection"][part][:-1]) & (
        rows["src"][part][1:] == rows["src"][part][:-1]
    )
    turn = ~fin[:-1] & fin[1:] & same
    twice = same & (fin[1:] == fin[:-1])
    turn[1:] &= ~twice[:-1]
    turn[:-1] &= ~twice[1:]
    first = np.flatnonzero(turn)
    return part[first], part[first + 1]


def _synchronous(rows: Rows, number: NDArray[np.int64], offer: Bools, grant: Bools, data: Bools) -> Bools:
    """Offers of ob1 that hold all the data there is, and were acknowledged: its synchronous sends.

    Its barriers let ranks go with them (mca_pml_ob1_send_request_start_rndv, no PUT request for what fits).
    """
    alone = np.zeros(int(number.max()) + 1, bool)
    alone[number[grant & (rows["wire"] == Wire.OB1_OTHER)]] = True
    alone[number[data]] = False
    whole = offer & (rows["wire"] == Wire.OB1_RNDV) & (rows["bytes"] >= rows["announces"])
    return np.asarray(whole & alone[number], np.bool_)


def _mark_cut(exchanges: Rows, direction: NDArray[np.int64]) -> None:
    """Flag what began before or ended after the capture although each message seen is whole.

    A library that announces its data or waits for a grant does so every time. So data without that,
    earlier than any of the same ``direction`` that has it, began before the capture. Transfers without
    data, announced after all that has data, end after it.
    """
    wire, count = exchanges["wire"], len(exchanges)
    gloo = (wire >= Wire.GLOO_DATA) & (wire <= Wire.GLOO_RECV_READY)
    framed = gloo | ((wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER))
    offer, data = exchanges["offer_ns"], exchanges["data_ns"]
    begun = (offer != NEVER) & ((exchanges["grant_ns"] != NEVER) | ~gloo) | (wire == Wire.OB1_MATCH)
    ended = data != NEVER
    first = np.full(count, _FAR)
    np.minimum.at(first, direction[begun & ended], data[begun & ended])
    exchanges["flags"][framed & ended & ~begun & (data < first[direction])] |= np.uint8(
        MessageFlag.STARTS_BEFORE
    )
    # Gloo's grants run ahead of their transfers, so these go by tag and offer; what was not offered is last.
    turn = np.where(offer != NEVER, offer, np.where(ended, data, _FAR))
    tag = np.where(gloo, exchanges["tag"], 0)
    place = np.empty(count, np.int64)
    place[np.lexsort((turn, tag, direction))] = np.arange(count)
    last = np.full(count, -1)
    np.maximum.at(last, direction[ended], place[ended])
    exchanges["flags"][framed & ~ended & (place > last[direction])] |= np.uint8(MessageFlag.ENDS_AFTER)


def _running_number(
    connection: NDArray[np.uint32], src: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each row the count of earlier rows with the same connection and source, and that pair's number."""
    order = np.lexsort((src, connection))
    same = np.zeros(len(order), bool)
    same[1:] = (connection[order][1:] == connection[order][:-1]) & (src[order][1:] == src[order][:-1])
    starts = np.flatnonzero(~same)
    group = np.cumsum(~same) - 1
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order)) - starts[group]
    pair = np.empty(len(order), np.int64)
    pair[order] = group
    return number, pair
