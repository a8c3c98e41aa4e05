"""Point-to-point transfers in, pipelines out: the stages, their schedule, and how long each stage works.

A stage works from the arrival of its input (or from what it last sent, if that was later) to the
offer of its output. A stage that waits for input is starved, one whose output is not asked for is
blocked: neither is at fault. What a stage computes without sending shows in no packet: the forward
pass of the last stage and the backward pass of the first, unless its next message follows from it.

Schedules: GPipe (Huang et al., 2019) sends all microbatches forward, then all backward; 1F1B
(PipeDream, Narayanan et al., 2019) alternates, so that an end stage's message follows from both. Interleaved
(Megatron-LM, Narayanan et al., 2021): each stage has several parts of the model, and the last one hands all
but the last part's data on to the first. There ends have inputs of two kinds, and are compared with replicas
only.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from dpuflow.arrays import FAR
from dpuflow.arrays.components import connected
from dpuflow.arrays.ordering import distinct, median_of
from dpuflow.arrays.stretches import Covered
from dpuflow.entries import AT_ONCE
from dpuflow.matching.model import RARE, TWICE
from dpuflow.schema.rows import NEVER, Op
from dpuflow.verdicts.receivers import worked_since
from dpuflow.verdicts.steps import REPEATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpuflow.arrays import Bools, Ints
    from dpuflow.entries import Entries
    from dpuflow.matching import Instance

FORWARD, BACKWARD = 0, 1
TWO_STEPS: Final = 1.5
"""So many times as many transfers as usual are no one step's."""
QUEUED: Final = 8
"""Inputs that lie before a stage, at most: its predecessor runs so far ahead."""
AHEAD: Final = 2
"""Inputs that the last stage has at its first answer in 1F1B, at most."""
ROUNDS: Final = 4
"""Parts of a model that a stage of an interleaved pipeline has, at most: data goes round as often."""
Schedule = Literal["gpipe", "1f1b", "forward", "interleaved"]


class Work(NamedTuple):
    """The sends of one stage in one direction, in order of time; what is compared between stages.

    ``own_ns`` is NEVER where a send does not tell what was worked for it, ``unit`` -1 outside the steps.
    """

    rows: Ints  # of Entries: the sender's
    own_ns: Ints
    most_ns: Ints  # the same at the most, where its receiver may have held it; else NEVER
    blocked_ns: Ints  # for so much of own_ns it may have waited for its last data to leave
    unit: Ints  # the step each belongs to, else a running number
    after: Ints  # row of Entries that it follows from: input or last send; -1: neither


class Pipeline(NamedTuple):
    """One chain of stages, the first one first.

    ``work[stage][way]``: None where that stage sends nothing that way. ``schedule`` is gpipe, 1f1b, forward
    (nothing flows back), interleaved or None. ``ends`` are places of ends without a capture of their own:
    they may have inputs from others, and what they work is not told.
    """

    stages: list[int]
    schedule: Schedule | None
    microbatches: int | None  # in a step
    work: list[list[Work | None]]
    ends: frozenset[int] = frozenset()


def find_pipelines(
    instances: Sequence[Instance], entries: Entries, step: Ints, taken: Ints
) -> list[Pipeline]:
    """Chains of endpoints that hand data on one to the next. ``step`` as of ``find_steps``, ``taken`` of
    ``taken_until``.

    Stars are no pipelines, nor rings but of interleaved ones; nor is a chain in which some neighbours
    exchanged fewer than three transfers, or none whose times are known.
    """
    edges: dict[tuple[int, int], list[int]] = {}
    captured: set[int] = set()
    for number, instance in enumerate(instances):
        alone = instance.op == Op.SEND_RECV and len(instance.order) == 2 and not instance.view.inside
        if alone and instance.complete:
            edges.setdefault((instance.order[0], instance.order[1]), []).append(number)
            captured.update(filter(instance.was_captured, instance.order))
    read = {edge: _Edge(found, entries, taken) for edge, found in edges.items() if len(found) >= REPEATS}
    books = {edge: book for edge, book in read.items() if len(book.rows)}
    neighbours: dict[int, set[int]] = {}
    for src, dst in books:
        neighbours.setdefault(src, set()).add(dst)
        neighbours.setdefault(dst, set()).add(src)
    chains: list[list[int]] = []
    opened: list[list[int]] = []
    for part in connected(books, lambda edge: edge):
        ends = sorted({end for edge in part for end in edge})
        if max(len(neighbours[end]) for end in ends) > 2:
            continue
        chain = [end for end in ends if len(neighbours[end]) == 1][:1]
        while chain and (further := neighbours[chain[-1]] - set(chain[-2:])):
            chain.append(further.pop())
        if chain:
            chains.append(chain)
        elif ring := _opened({edge: len(books[edge].rows) for edge in part}):
            opened.append(ring)
    busy = _in_collectives(instances, entries)
    found = [
        *(_pipeline(chain, books, busy, step) for chain in sorted(chains)),
        *(_pipeline(chain, books, busy, step, interleaved=True) for chain in opened),
    ]
    return [each._replace(ends=_open_ends(each.stages, captured)) for each in found]


def _opened(sends: Mapping[tuple[int, int], int]) -> list[int]:
    """The stages of an interleaved pipeline, in order, by how often each of a ring sends to each; or none.

    Data that goes round ``v`` times goes ``v - 1`` times from the last stage to the first, and comes back as
    often; it goes ``v`` times over each link between.
    """
    links = sorted({(min(edge), max(edge)) for edge in sends}, key=lambda link: sends.get(link, 0))
    both = [(sends.get((a, b), 0), sends.get((b, a), 0)) for a, b in links]
    fewer, most = both[0], max(both[-1])
    even = all(min(pair) >= (1 - 1 / (2 * ROUNDS)) * most for pair in both[1:])
    # Neighbours on a ring some of whose transfers were not read: more rounds than there are, were it rounds.
    even &= 0 < min(fewer) <= max(fewer) <= (1 - 1 / (ROUNDS + 0.5)) * most
    if len(links) < REPEATS or not even:
        return []
    chain, rest = [links[0][0]], set(links[1:])
    while following := [link for link in rest if chain[-1] in link]:
        rest.remove(following[0])
        chain.append(sum(following[0]) - chain[-1])
    return chain


def _open_ends(stages: Sequence[int], captured: set[int]) -> frozenset[int]:
    return frozenset(place for place in (0, len(stages) - 1) if stages[place] not in captured)


class _Edge:
    """The transfers from one stage to another, by the time they were offered."""

    def __init__(self, numbers: list[int], entries: Entries, taken: Ints) -> None:
        rows = entries.offsets[np.array(numbers)]  # the sender's; the receiver's is the next one
        seen = (entries.enter_ns[rows] != NEVER) & (entries.leave_ns[rows + 1] != NEVER)
        rows = rows[seen]
        self.rows = rows[np.argsort(entries.enter_ns[rows], kind="stable")]
        self.by_arrival = rows[np.argsort(entries.leave_ns[rows + 1], kind="stable")]
        self.sent_ns = entries.enter_ns[self.rows]
        self.credit_ns = entries.credit_ns[self.rows]
        self.gone_ns = entries.idle_ns[self.rows]
        self.arrived_ns = entries.leave_ns[self.by_arrival + 1]
        self.taken_ns = taken[self.by_arrival + 1]
        self.unit = self.unit_of_arrival = np.arange(len(rows))
        self.in_steps = self.emptied = False

    def number(self, flushed_ns: Ints, step: Ints) -> None:
        """Number each transfer's step: by when the pipeline was empty, else as ``step`` says."""
        self.emptied = len(flushed_ns) >= REPEATS
        if self.emptied:
            self.unit = np.searchsorted(flushed_ns, self.sent_ns, "left")
            self.unit_of_arrival = np.searchsorted(flushed_ns, self.arrived_ns, "left")
        elif (step[self.rows] >= 0).any():
            self.unit, self.unit_of_arrival = step[self.rows], step[self.by_arrival]
        else:
            return
        self.in_steps = True


def _in_collectives(instances: Sequence[Instance], entries: Entries) -> Callable[[int], Covered]:
    """The time that each endpoint spent within collectives of several ranks: not worked by itself."""
    tied = np.array([i.op != Op.SEND_RECV for i in instances], bool)
    mine = tied[entries.collective] & (entries.enter_ns != NEVER) & (entries.leave_ns != NEVER)

    def of(endpoint: int) -> Covered:
        rows = (own := entries.of[endpoint])[mine[own]]
        return Covered(np.stack([entries.enter_ns[rows], entries.leave_ns[rows]]))

    return of


def _pipeline(
    chain: list[int],
    edges: dict[tuple[int, int], _Edge],
    busy: Callable[[int], Covered],
    step: Ints,
    interleaved: bool = False,
) -> Pipeline:
    if _lead(chain[-1], chain[-2], edges) > _lead(chain[0], chain[1], edges):
        chain = chain[::-1]
    forward = [edges.get(pair) for pair in pairwise(chain)]
    backward = [edges.get((later, earlier)) for earlier, later in pairwise(chain)]
    flushed_ns = _flushes(forward[0], backward[0])
    for book in (*forward, *backward):
        if book is not None:
            book.number(flushed_ns, step)
    schedule = "interleaved" if interleaved else _schedule(forward[-1], backward[-1])
    emptied = len(flushed_ns) >= REPEATS or None in (forward[0], backward[0])
    work: list[list[Work | None]] = []
    for place, stage in enumerate(chain):
        # For each way: what the stage sends on, and what that follows from.
        out = (forward[place] if place < len(forward) else None, backward[place - 1] if place else None)
        into = (forward[place - 1] if place else None, backward[place] if place < len(backward) else None)
        work.append([_work(way, out, into, schedule, emptied, busy(stage)) for way in (FORWARD, BACKWARD)])
    microbatches = _microbatches(forward[0] or backward[0]) if emptied and not interleaved else None
    return Pipeline(chain, schedule, microbatches, work)


def _work(
    way: int,
    out: tuple[_Edge | None, _Edge | None],
    into: tuple[_Edge | None, _Edge | None],
    schedule: Schedule | None,
    emptied: bool,
    busy: Covered,
) -> Work | None:
    """What a stage did for each of its sends one way; ``busy``: when it was in collectives.

    ``emptied``: it is known when the pipeline was empty. Else an end may have waited for the next step.
    """
    book, source = out[way], into[way]
    if book is None:
        return None
    since, after, gone = _last_act(book, [each for each in out if each is not None])
    number = book.unit
    known = np.ones(len(number), bool)
    if source is None and schedule == "1f1b":  # an end: what comes back is worked on, and the next
        source = into[1 - way]
    elif source is None and schedule == "gpipe":  # one after the other, the first after a pause
        known = np.r_[False, (number[1:] == number[:-1]) & (number[1:] >= 0)]
    elif source is None:
        known[:] = schedule not in (None, "interleaved")
    if source is not None:
        since, after, known = _since_input(book, source, since, after, into[way] is None)
    known &= (since != NEVER) & (emptied or into[way] is not None)
    held = _held(book, since)
    within = busy.before(book.sent_ns) - busy.before(since)
    if source is None:  # nor what follows a collective: a step's first
        known &= within == 0
    own = np.maximum(book.sent_ns - since - within, 0)
    told, most = np.where(known & ~held, own, NEVER), np.where(known & held, own, NEVER)
    blocked = np.clip(np.minimum(gone, book.sent_ns) - np.maximum(since, 0), 0, own)
    after = np.where(known & (within == 0), after, -1)
    return Work(book.rows, told, most, np.where(since != NEVER, blocked, 0), number, after)


def _last_act(book: _Edge, books: Sequence[_Edge]) -> tuple[Ints, Ints, Ints]:
    """When the stage had last sent on any of ``books`` before each send of ``book``, and what; and when all
    that it had sent until then had left. NEVER without."""
    acts, acted, gone = (
        np.concatenate([getattr(b, name) for b in books]) for name in ("sent_ns", "rows", "gone_ns")
    )
    order = np.argsort(acts, kind="stable")
    before = np.searchsorted(acts[order], book.sent_ns, "left") - 1
    columns = acts[order], acted[order], np.maximum.accumulate(gone[order])
    since, after, left = (np.where(before >= 0, each[before], NEVER) for each in columns)
    return since, after, left


def _since_input(
    book: _Edge, source: _Edge, since: Ints, after: Ints, at_end: bool
) -> tuple[Ints, Ints, Bools]:
    """The same where a send follows from an input of ``source``, if that came later; and where that is known.

    ``at_end``: of an end of the pipeline, whose input is what comes back within the same step.
    """
    arrived, of = _inputs(source, book, since)
    after = np.where(arrived > since, source.by_arrival[np.maximum(of, 0)] + 1, after)
    since = np.maximum(since, arrived)
    known = arrived != NEVER
    taken = np.where(known, source.taken_ns[np.maximum(of, 0)], NEVER) if known.any() else arrived
    since = worked_since(since, taken, book.sent_ns, known)
    if at_end:
        known &= (of >= 0) & (source.unit_of_arrival[of] == book.unit)
    return since, after, known


def _lead(end: int, inner: int, edges: dict[tuple[int, int], _Edge]) -> float:
    """How many transfers an end has sent more than it has received, on average: the first stage leads."""
    out, back = edges.get((end, inner)), edges.get((inner, end))
    if out is None or back is None:
        return float(out is not None) - float(back is not None)
    sent = np.arange(1, len(out.sent_ns) + 1)
    return float(np.mean(sent - np.searchsorted(back.arrived_ns, out.sent_ns, "right")))


def _flushes(forward: _Edge | None, backward: _Edge | None) -> Ints:
    """When all that the first stage had sent was answered: the pipeline is empty, a step has ended.

    What is sent once beside (PyTorch's stages tell each other shapes) or was not captured shifts the count:
    as empty as it is again and again.
    """
    if forward is None or backward is None:
        return np.zeros(0, np.int64)
    out = np.arange(1, len(backward.rows) + 1)
    waiting = np.searchsorted(forward.sent_ns, backward.arrived_ns, "right") - out
    level, times = np.unique(waiting, return_counts=True)
    empty = level[times >= REPEATS].min(initial=waiting.max())
    flushed: Ints = backward.arrived_ns[waiting == empty]
    # Where messages are missing the count drifts, and some steps would be read as one: from there on, too.
    sends = np.bincount(np.searchsorted(flushed, forward.sent_ns, "left"))
    several = sends > TWO_STEPS * median_of(sends)
    ends = max(sends[0], sends[-1]) > TWICE * TWO_STEPS * median_of(sends)
    return flushed[:0] if ends or several[1:-1].sum() > RARE * len(sends) else flushed


def _schedule(forward: _Edge | None, backward: _Edge | None) -> Schedule | None:
    """By how many microbatches have reached the last stage before it first answers in a step: all in GPipe,
    two in 1F1B, where the stage before it runs one ahead."""
    if forward is None or backward is None:
        return "forward"
    waiting, whole = [], []
    for number in distinct(backward.unit[backward.unit >= 0]).tolist() if backward.in_steps else ():
        inputs = forward.arrived_ns[forward.unit_of_arrival == number]
        first = backward.sent_ns[backward.unit == number].min()
        waiting.append(int((inputs <= first).sum()))
        whole.append(len(inputs))
    if not whole or median_of(whole) < 2:
        return None
    if median_of(waiting) >= median_of(whole):
        return "gpipe"
    return "1f1b" if median_of(waiting) <= max(AHEAD, (median_of(whole) - 1) // 2) else None


def _held(book: _Edge, since: Ints) -> Bools:
    """Sends that left as soon as their receiver allowed it: of these it is not told how long they took.

    Of others the credit comes at any time of the work, so few of these are taken for such.
    """
    soon = book.credit_ns < AT_ONCE * (book.sent_ns - since)
    return np.asarray((book.credit_ns != NEVER) & soon, np.bool_)


def _inputs(source: _Edge, book: _Edge, acted: Ints) -> tuple[Ints, Ints]:
    """When the input of each send of ``book`` had arrived (NEVER: not told), and which one it is.

    The k-th send follows from the k-th input, of its step where steps end in an empty pipeline and most have
    as many of both: so messages that are missing cost their step. Else what a stage holds back (the warm-up
    of 1F1B) or what came before the capture began shifts all alike: by as much as most sends allow, or less
    where inputs wait in a queue. Then the stage's work, since that input or since its last act (``acted``),
    is most even.
    """
    sent = book.sent_ns
    if not len(source.arrived_ns) or not len(sent):
        return np.full(len(sent), NEVER), np.full(len(sent), -1)
    order = np.arange(len(sent))
    had = np.searchsorted(source.arrived_ns, sent, "right") - 1
    if source.emptied and book.emptied:
        of = _same_place(source.unit_of_arrival, book.unit)
        known = (of >= 0) & (of <= had)
        if 2 * known.sum() > len(known):
            return np.where(known, source.arrived_ns[of], NEVER), np.where(known, of, -1)
    most = int(np.floor(np.quantile(had - order, 0.05)))
    least = max(min(most, 0), most - QUEUED)
    best = NEVER, np.full(len(sent), NEVER), order
    for shift in range(most, least - 1, -1):
        of = order + shift
        known = (of >= 0) & (of <= had)
        arrived = np.where(known, source.arrived_ns[np.where(known, of, 0)], NEVER)
        own = (sent - np.maximum(arrived, acted))[known]
        uneven = int(median_of(np.abs(own - median_of(own)))) if len(own) else FAR
        if best[0] == NEVER or uneven < best[0]:
            best = uneven, arrived, np.where(known, of, -1)
    return best[1], best[2]


def _same_place(units: Ints, of: Ints) -> Ints:
    """For each element of unit ``of`` the one of ``units`` at the same place of its unit, where both have as
    many; else -1. Units are numbers from 0, in order; -1: in none."""
    mine, theirs = np.flatnonzero(of >= 0), np.flatnonzero(units >= 0)
    own, other = of[mine], units[theirs]
    low, high = (np.searchsorted(other, own, side) for side in ("left", "right"))
    first, last = (np.searchsorted(own, own, side) for side in ("left", "right"))
    alike = high - low == last - first
    found = np.full(len(of), -1)
    found[mine[alike]] = theirs[(low + np.arange(len(own)) - first)[alike]]
    return found


def _microbatches(edge: _Edge | None) -> int | None:
    """Transfers of a step over one link."""
    if edge is None or not edge.in_steps:
        return None
    return int(median_of(np.bincount(edge.unit[edge.unit >= 0])))
