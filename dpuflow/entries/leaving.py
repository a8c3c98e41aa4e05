"""First acts in; when each rank had all that it needed, and had left, out.

Three things end a rank's part: its last input is there, its own data has left (or, where it is sent again or
read by the peer, is known to have come), and of NCCL's its last slot can be filled. For MPI over RoCE a
message is complete when its receiver's adapter acknowledges it (InfiniBand volume 1, 9.7.5). Where a
processor does the adapter's work, as in Soft-RoCE, packets lie in its queue before that for as long as it is
busy: a rank that seems to have had all it needed still waits for its own host. Counted as its own work, that
would make late ranks of busy hosts. libfabric's sends end with their ACK, too: the call waits for that.

NCCL's GPU fills slots of its staging buffer and goes on; the proxy thread sends them when a credit is there
and the connection's turn has come (NCCL 2.30, src/transport/net.cc sendProxyProgress). A GPU carries out
operations of several communicators on several streams, and several transfers as one (src/group.cc
ncclGroupEnd): of two kinds of operations of which one ever began while the other was going on, the latter
never says when a rank entered the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.ordering import distinct, key_numbers, median_of, order_within
from dpuflow.entries.inputs import SLOTS, lines_of, messages_ahead
from dpuflow.entries.reactions import law_of
from dpuflow.entries.relative import previous_row
from dpuflow.entries.rows import FAR_BEYOND, Rule
from dpuflow.exchanges.build import there_ns
from dpuflow.framing import MPI_NONBLOCKING
from dpuflow.schema.rows import NEVER, NONE32, MessageFlag, Op, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.arrays.ordering import Picked
    from dpuflow.entries.acts import Acts
    from dpuflow.entries.places import Places
    from dpuflow.entries.rows import Entries
    from dpuflow.matching import Instance


class Leaves(NamedTuple):
    """By row of Entries, whose columns of the same names these are."""

    leave_ns: Ints
    idle_ns: Ints
    gone_ns: Ints
    fed: Bools
    last: Ints
    acked_ns: Ints
    left_ns: Ints
    """When it can have left at the earliest: of ranks that fill slots, or sockets' buffers, and go when the
    last was free and their input there, for something else may have kept what they send. NEVER: not before
    what came before."""
    far: Bools
    """Ranks beyond the captures, where not all nodes were captured."""


def last_acts(places: Places, acts: Acts) -> Leaves:
    """When each rank had left, with what is known from its own messages and its peers'."""
    picked, total = places.picked, len(places)
    sender, receiver = places.sender, places.receiver
    there = there_ns(picked)
    came = np.full(total, NEVER, np.int64)
    np.maximum.at(came, receiver, there)
    last = np.full(total, NONE32, np.int64)
    ends = (there != NEVER) & (there == came[receiver])
    last[receiver[ends]] = picked["data"][ends]
    fed = came != NEVER
    far = _far(places)
    sent, heard, again = _sent(places, far)
    leave = np.where(fed, np.maximum(came, heard), came)
    done = _of_nodes(places, leave)
    # Who gets no input has left when its last data has, by NCCL sooner: when that was in the staging buffer.
    # So it may have with who passes on what it received: its first message left when its credit had come.
    unfed = (acts.enter_ns != NEVER) & ((leave == NEVER) | (acts.rule == Rule.AFTER_INPUT))
    stages = unfed[sender] & _fills_slots(picked)
    gone, freed, staged = sent.copy(), np.full(total, NEVER), np.zeros(total, bool)
    if stages.any():
        rows = np.flatnonzero(stages)
        np.maximum.at(freed, sender[rows], slot_free_ns(picked, places.of, rows))
        gone[sender[rows]] = np.maximum(acts.enter_ns, freed)[sender[rows]]
        staged[sender[rows]] = True
    # A socket takes what is sent as soon as the peer has allowed it, megabytes ahead of a slow link.
    mine = unfed[sender] & (picked["wire"] >= Wire.GLOO_HELLO) & ~stages
    handed, socket = acts.enter_ns.copy(), np.zeros(total, bool)
    np.maximum.at(handed, sender[mine], picked["grant_arrived_ns"][mine])
    socket[sender[mine]] = True
    # NCCL's rank is done with what it sends when that is in the staging buffer, long before a slow link is.
    filled = filled_ns(picked, places.instances, places.of, sender, total)
    # What it then sends waits until the adapter has heard of what it had to send again.
    own = np.maximum(np.minimum(sent, filled), again)
    # What was announced and not seen to come it still had to get: when it was done is not known.
    lacking = np.zeros(total, bool)
    begun = (picked["offer_ns"] != NEVER) | (picked["data_ns"] != NEVER)
    lacking[receiver[begun & (there == NEVER) & ~far[receiver]]] = True
    acked = np.full(total, NEVER, np.int64)
    np.maximum.at(acked, sender, picked["acked_ns"])
    left = np.maximum(np.where(leave == NEVER, gone, leave), acts.enter_ns)
    return Leaves(
        leave_ns=left,
        idle_ns=np.where(lacking, NEVER, np.maximum(np.maximum(done, own), acts.enter_ns)),
        gone_ns=own,
        fed=fed,
        last=last,
        acked_ns=acked,
        left_ns=np.where(staged, np.maximum(freed, leave), np.where(socket, np.maximum(handed, leave), left)),
        far=far,
    )


def _far(places: Places) -> Bools:
    beyond = (not i.was_captured(e) for i in places.instances for e in i.order)
    return np.fromiter(beyond, bool, len(places))


def _sent(places: Places, far: Bools) -> tuple[Ints, Ints, Ints]:
    """By row when all the rank's data had left; when it had heard that its peers had read theirs; and when
    what it sent again was acknowledged."""
    picked, sender = places.picked, places.sender
    sent = np.full(len(places), NEVER, np.int64)
    # What arrived from a rank without a capture of its own may have left as early as its first packet.
    begun = far[sender] & (picked["data_ns"] != NEVER)
    np.maximum.at(sent, sender, np.where(begun, picked["data_ns"], picked["data_end_ns"]))
    # Data sent again is not done with until it is acknowledged. Other ACKs may come at leisure.
    resent = picked["retransmitted"] > 0
    again = np.full(len(places), NEVER, np.int64)
    np.maximum.at(again, sender[resent], picked["acked_ns"][resent])
    # Who lets its peer read goes on when it hears that it has.
    let = (picked["wire"] == Wire.ROCE_READ) & (picked["op"] != Op.UNKNOWN)
    let |= (picked["wire"] == Wire.TAGGED_DONE) & (picked["acked_ns"] != NEVER)
    heard = np.full(len(places), NEVER, np.int64)
    np.maximum.at(heard, sender[let], picked["acked_ns"][let])
    return np.maximum(np.maximum(sent, heard), again), heard, again


def _of_nodes(places: Places, leave: Ints) -> Ints:
    """When ranks that share nodes with others can have left at the latest; at the earliest into ``leave``.

    Most of what such a rank receives comes over NVLink. It has not left before it sent its last; nor long
    after the last data of its whole node had come or left, for all of its GPUs pass on every channel.
    """
    railed = [number for number, instance in enumerate(places.instances) if instance.placement.nodes]
    if not railed:
        return leave
    mine = np.isin(places.of, railed)
    np.maximum.at(leave, places.sender[mine], places.picked["data_ns"][mine])
    latest: Ints = leave.copy()
    for number in railed:
        rows = slice(*places.offsets[number : number + 2].tolist())
        nodes = np.array(places.instances[number].placement.nodes)
        for node in distinct(nodes):
            latest[rows][nodes == node] = latest[rows][nodes == node].max()
    return latest


def left_before(entries: Entries, places: Places, leaves: Leaves, send_at: Ints) -> tuple[Ints, Ints]:
    """``since_ns`` and ``since_act``: no rank enters before it has left what it did before.

    ``send_at``: of each row which exchange's sending its first act is.
    """
    at = not_beside(entries, places, _called_before(entries, places))
    left = _left_ns(entries, places, leaves, send_at)
    for _ in range(SLOTS):  # several in a row that nothing tells of
        left = np.where((left == NEVER) & (at >= 0), left[at], left)
    before = np.where(at >= 0, left[at], NEVER)
    entered = np.where(entries.enter_ns != NEVER, entries.enter_ns, entries.leave_ns)  # it had by then
    shown = np.where((at >= 0) & leaves.fed[at], leaves.last[at], NONE32)
    return np.where(before <= entered, before, NEVER), shown


def _called_before(entries: Entries, places: Places) -> Ints:
    """``previous_row``, but of ranks that only receive not what they only received in other groups.

    Both may have lain there when they called the one, then the other, nobody knows which.
    """
    before = previous_row(entries)
    silent, last = entries.enter_ns == NEVER, before
    if not (silent & (before >= 0) & silent[before]).any():
        return before
    ranks = _kinds(places.instances)[1][entries.collective]
    for _ in range(SLOTS):
        last = np.where((last >= 0) & silent & silent[last] & (ranks != ranks[last]), before[last], last)
    return last


def _left_ns(entries: Entries, places: Places, leaves: Leaves, send_at: Ints) -> Ints:
    """``left_ns``; of ranks that fill slots and go also by their first message, if nothing else kept it.

    It did if the message left soon, in round trips or the worst hand-over, after that; else the slot had been
    filled no more than such a hand-over before.
    """
    picked, out = places.picked, leaves.left_ns.copy()
    rows = np.flatnonzero((out != entries.leave_ns) & (send_at >= 0))
    rows = rows[_fills_slots(picked)[send_at[rows]]]
    trips = (picked["acked_ns"] - picked["data_end_ns"])[picked["acked_ns"] != NEVER] if len(rows) else []
    if not len(trips):
        return np.asarray(out, np.int64)
    worst = float(np.nan_to_num(law_of(entries, np.zeros(len(out), np.int64)).worst_ns[0], nan=0.0))
    kept = _kept_until_ns(picked, send_at[rows])
    free = entries.enter_ns[rows] - kept > max(FAR_BEYOND * float(median_of(trips)), worst)
    rows = rows[free | (kept == NEVER)]
    out[rows] = np.maximum(out[rows], entries.leave_ns[rows] - round(worst))
    return np.asarray(out, np.int64)


def _kept_until_ns(picked: Picked, sends: Ints) -> Ints:
    """For each of ``sends``, places in ``picked``, until when something else than its rank may have kept it.

    Its credit; its connection's turn, which comes when the message before it is acknowledged; the data that
    its adapter was sending, or sends again until it is acknowledged. NEVER where there was none of these.
    """
    data = np.flatnonzero((picked["wire"] == Wire.ROCE_WRITE_IMM) & (picked["data_ns"] != NEVER))
    again = picked["retransmitted"] > 0
    ended = np.where(again, np.maximum(picked["data_end_ns"], picked["acked_ns"]), picked["data_end_ns"])
    start, out = picked["data_ns"], picked["grant_arrived_ns"][sends]
    for key, ends in ((lines_of(picked), picked["acked_ns"]), (picked["src"].astype(np.int64), ended)):
        order = data[np.lexsort((start[data], key[data]))]
        same = key[order[1:]] == key[order[:-1]]
        before = np.full(len(picked), NEVER)
        before[order[1:][same]] = ends[order[:-1][same]]
        out = np.maximum(out, np.minimum(before[sends], start[sends]))
    return np.asarray(out, np.int64)


def as_acknowledged(entries: Entries, places: Places) -> tuple[Ints, Ints]:
    """``leave_ns`` and ``idle_ns`` no sooner than the ACKs that the library waits for.

    An ACK may stand for several messages and leave after the rank has gone on: who enters its next collective
    has left. What bounds entries from below (``since_ns``) rests on arrivals and stays as it is.
    """
    picked, sender, receiver = places.picked, places.sender, places.receiver
    wire = picked["wire"]
    mpi = (picked["op"] != Op.UNKNOWN) & (wire >= Wire.ROCE_SEND) & (wire <= Wire.ROCE_SEND_IMM)
    if not mpi.any():
        return entries.leave_ns, entries.idle_ns
    leave = entries.leave_ns.copy()
    np.maximum.at(leave, receiver[mpi], picked["taken_ns"][mpi])
    holds = mpi & ((picked["flags"] & MessageFlag.HOLDS_SENDER) != 0)
    np.maximum.at(leave, sender[holds], picked["acked_ns"][holds])
    last = previous_row(entries)
    rows = np.flatnonzero((last >= 0) & (entries.enter_ns != NEVER))
    limit = np.full(len(leave), FAR)
    limit[last[rows]] = entries.enter_ns[rows]
    leave = np.maximum(entries.leave_ns, np.minimum(leave, limit))
    return leave, np.where(entries.idle_ns != NEVER, np.maximum(entries.idle_ns, leave), NEVER)


def not_beside(entries: Entries, places: Places, last: Ints) -> Ints:
    """``last``, each row's previous collective (-1: none), and -1 where its rank need not have left it.

    What came before that is no stand-in: how long ranks work would be reckoned from there.
    """
    if not len(last):
        return last
    last = _came_back(last, nonblocking(places)[entries.collective])
    kind, ranks = _kinds(places.instances)
    kind, ranks = kind[entries.collective], ranks[entries.collective]
    known, apart = (last >= 0) & (entries.leave_ns[last] != NEVER), ranks != ranks[last]
    pair = kind[last] * (int(kind.max()) + 1) + kind
    proof = known & apart & (entries.enter_ns != NEVER) & (entries.enter_ns < entries.leave_ns[last])
    doubt = apart & np.isin(pair, distinct(pair[proof]))
    # Of a rank that only receives, what came before the same peer's last had ended may be one with it.
    transfer = np.array([i.op == Op.SEND_RECV for i in places.instances], bool)[entries.collective]
    grouped = transfer & transfer[last] & ~apart & (entries.enter_ns == NEVER)
    doubt |= grouped & (_first_inputs(places) < entries.leave_ns[last])
    # NCCL's receivers announce nothing over sockets; stages of a pipeline call them while they send.
    streamed = np.zeros(len(places.instances), bool)
    streamed[places.of[places.picked["wire"] == Wire.NCCL_DATA]] = True
    doubt |= transfer & streamed[entries.collective] & (entries.enter_ns == NEVER)
    return np.where(known & doubt, -1, last)


def _came_back(last: Ints, nonblocking: Bools) -> Ints:
    """``last``, or the last one before that whose call came back when it was done.

    Who calls a non-blocking one goes on at once.
    """
    before = np.r_[np.where(nonblocking, last, np.arange(len(last))), -1]
    while (further := before[before]).tolist() != before.tolist():
        before = further
    return np.asarray(before[last], np.int64)


def nonblocking(places: Places) -> Bools:
    """Which collectives are Open MPI's non-blocking ones, by their tags: their ranks work on meanwhile, and
    what came in waits for their next call of the library."""
    wire, found = places.picked["wire"], np.zeros(len(places.instances), bool)
    mine = (wire >= Wire.OB1_MATCH) & (wire <= Wire.OB1_OTHER) & (places.picked["op"] == Op.UNKNOWN)
    found[places.of[mine & (places.picked["tag"].astype(np.int32) <= MPI_NONBLOCKING)]] = True
    return found


def _kinds(instances: Sequence[Instance]) -> tuple[Ints, Ints]:
    """Of each collective numbers of its kind, which all groups of a job share, and of its ranks."""
    # A transfer is one of many that a call may start at once, whatever their sizes and whichever way they go.
    each = [(i, i.op == Op.SEND_RECV) for i in instances]
    kind = key_numbers((i.op, None if one else i.size, len(i.order)) for i, one in each)
    return kind, key_numbers((*i.order, -1) if one else tuple(sorted(i.order)) for i, one in each)


def _first_inputs(places: Places) -> Ints:
    """When the first data was there by row; far in the future where none was."""
    there = there_ns(places.picked)
    out = np.full(len(places), FAR)
    known = there != NEVER
    np.minimum.at(out, places.receiver[known], there[known])
    return out


def filled_ns(picked: Picked, instances: Sequence[Instance], of: Ints, sender: Ints, total: int) -> Ints:
    """For each of ``total`` rows when the last slot that its rank filled was free.

    NEVER where none had to be; far in the future for ranks of collectives whose slots are not known. ``of``
    and ``sender``: collective, and row of Entries, of each of ``picked``.
    """
    depth = np.fromiter((messages_ahead(i) for i in instances), np.int64, len(instances))[of]
    known = (depth > 0) & _fills_slots(picked)
    out = np.full(total, NEVER)
    out[sender[~known]] = FAR
    for ahead in distinct(depth[known]).tolist():
        rows = np.flatnonzero(known & (depth == ahead))
        np.maximum.at(out, sender[rows], slot_free_ns(picked, of, rows, ahead))
    return out


def _fills_slots(picked: Picked) -> Bools:
    """Messages that NCCL's GPU leaves in its staging buffer, for the proxy thread to send."""
    writes = (picked["wire"] == Wire.ROCE_WRITE_IMM) & (picked["grant_ns"] != NEVER)
    fills: Bools = writes | (picked["wire"] == Wire.NCCL_DATA)
    return fills


def slot_free_ns(picked: Picked, of: Ints, rows: Ints, slots: int = SLOTS) -> Ints:
    """When the slot of each message was free again, as the ACK (or leaving) of the one in it before shows.

    NEVER where it had been free from the start: the GPU filled it some time after entering. ``slots``: of so
    many messages.
    """
    line, start = picked["connection"][rows].astype(np.int64), picked["data_ns"][rows]
    order = order_within(start, of[rows])
    order = order[order_within(np.zeros_like(order), line[order])]
    ordered, before = rows[order], order[:-slots]
    free = np.full(len(rows), NEVER)
    same = (line[order][slots:] == line[before]) & (of[ordered[slots:]] == of[rows[before]])
    emptied = rows[before[same]]
    # A socket has taken a message when it leaves (src/transport/net_socket.cc): nobody waits for its ACK.
    socket = picked["wire"][emptied] == Wire.NCCL_DATA
    free[order[slots:][same]] = np.where(socket, picked["data_end_ns"][emptied], picked["acked_ns"][emptied])
    return free
