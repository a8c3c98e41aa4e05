"""The order of the stages: captures of one job in, an ``Analysis`` out."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Final

from dpuflow.errors import FormatError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.identity.communicators import Communicator
    from dpuflow.identity.rankmap import Place
    from dpuflow.islands.analyse import Read
    from dpuflow.marks import Marks
    from dpuflow.matching import Instance
    from dpuflow.results import Analysis
    from dpuflow.schema.tables import CaptureInfo, CaptureTables, Joined, Rows, Vantage
    from dpuflow.verdicts import Inferred

    Progress = Callable[[str, int, int], None]
    """Called with (stage, done, total); total 0 where it is not known."""
    Capture = Vantage | str | os.PathLike[str]
    Captures = Capture | Sequence[Capture]


def analyze(
    vantages: Captures,
    *,
    clock: str = "auto",
    ranks: Mapping[str, Place] | None = None,
    names: Mapping[str, str] | None = None,
    threads: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Analysis:
    """Analyse the captures of one job, one ``Vantage`` a place with a clock of its own; a file is one.

    ``clock`` is "auto", "trust" or "estimate"; ``ranks`` maps addresses to ranks and GPUs, ``names`` to
    hosts' names, None: those of /etc/hosts; ``threads`` None takes as many as the machine has cores; with
    more ``workers`` than one captures are read by so many processes instead. Raises CaptureError,
    FormatError, OptionError and MissingError.
    """
    return analyze_marked(
        vantages,
        clock=clock,
        ranks=ranks,
        names=names,
        threads=threads,
        workers=workers,
        progress=progress,
        marked=False,
    )[0]


def analyze_marked(
    vantages: Captures,
    *,
    clock: str = "auto",
    ranks: Mapping[str, Place] | None = None,
    names: Mapping[str, str] | None = None,
    threads: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    marked: bool = True,
    messages: bool = False,
) -> tuple[Analysis, list[Marks]]:
    """The same, with the message and the collective of each packet; none unless ``marked``.

    ``messages``: the result has all messages as well.
    """
    from dpuflow.identity.rankmap import read_hosts
    from dpuflow.messages.stamps import near
    from dpuflow.schema.tables import Vantage
    from dpuflow.vantages import vantages_of

    one = isinstance(vantages, (str, os.PathLike, Vantage))
    chosen = vantages_of([vantages] if one else vantages)  # type: ignore[list-item,arg-type]
    if not chosen:
        raise OptionError("name at least one vantage point: there is nothing to analyse")

    left_out: list[str] = []
    if min(workers, len(chosen)) > 1:
        from dpuflow.keeping import read_by_workers

        captures, left_out = read_by_workers(chosen, workers, progress)
    else:
        captures = read_captures(chosen, threads or os.cpu_count() or 1, progress)
    for tables in captures:
        assert near(tables)  # whoever read it: no stage looks again
        tables.info.named = chosen[tables.info.id].named
    _refuse_other_links([tables.info for tables in captures])
    worked = analyze_tables(
        captures, clock=clock, ranks=ranks, names=read_hosts() if names is None else names, release=True,
        progress=progress, marked=marked,
        messages=messages,
    )  # fmt: skip
    worked.analysis.limits += left_out
    return worked.analysis, worked.marks


@dataclass
class Worked:
    """A result with what it was made of, for those who go on from there.

    Where clocks are islands, all but ``analysis`` are of the first, whose collectives are the first ones.
    """

    analysis: Analysis
    joined: Joined
    exchanges: Rows
    instances: Sequence[Instance]
    inferred: Inferred
    listed: list[int]
    """Of each collective of the result the instance that it is."""
    marks: list[Marks] = field(default_factory=list)
    """Of each capture what its packets belong to, where that was asked for."""


def analyze_tables(
    captures: list[CaptureTables],
    *,
    clock: str = "auto",
    ranks: Mapping[str, Place] | None = None,
    names: Mapping[str, str] | None = None,
    release: bool = False,
    progress: Progress | None = None,
    marked: bool = False,
    messages: bool = False,
) -> Worked:
    """The same of captures that have been read. Raises OptionError.

    ``release``: of their messages only what the result cites is kept once they are joined, in place.
    """
    from dpuflow.findings.nodes import fold_nodes
    from dpuflow.identity.communicators import communicators
    from dpuflow.identity.endpoints import endpoint_nodes
    from dpuflow.islands.analyse import read_islands
    from dpuflow.islands.merge import merged
    from dpuflow.join import count_once, join, left_out, one_way, set_aside_samples

    tell = _stages(progress)
    tell("joining")
    captures, doubled = count_once(captures)
    captures, sampled = set_aside_samples(captures)
    joined = join(captures, clock=clock)
    joined.limits += [*one_way(captures), *doubled, *sampled, *left_out(captures)]
    if release:
        for tables in captures:
            tables.messages = cited(tables.messages)
    told = communicators(captures, joined)
    nodes = endpoint_nodes(joined, ranks)
    tell("matching")
    reads = read_islands(joined, nodes, partial(_read, told=told, nodes=nodes, ranks=ranks))
    tell("judging")
    worked = [_worked(captures, each, nodes, ranks, names) for each in reads]
    ties = [each.ties[work.listed].tolist() for each, work in zip(reads, worked, strict=True)]
    of_nodes = [each.of_nodes for each in reads]
    marks: list[Marks] = []
    if marked:
        from dpuflow.islands.merge import numbers_of
        from dpuflow.marks import marks_of

        marks = marks_of(captures, worked, numbers_of(ties))
    result = fold_nodes(merged([each.analysis for each in worked], ties, of_nodes))
    for finding in result.findings:
        finding.addresses = [result.endpoints[end].address for end in finding.endpoints]
    if messages:
        from dpuflow.islands.merge import numbers_of
        from dpuflow.message_list import messages_of

        result.messages = messages_of(captures, worked, numbers_of(ties))
    return replace(worked[0], marks=marks, analysis=result)


def _read(
    joined: Joined,
    *,
    told: Sequence[Communicator],
    nodes: NDArray[np.int64],
    ranks: Mapping[str, Place] | None,
) -> Read:
    """The operations that captures on one time line saw, with when each rank came."""
    from dpuflow.entries import build_entries
    from dpuflow.exchanges.build import build_exchanges
    from dpuflow.identity.endpoints import endpoint_ranks
    from dpuflow.islands.analyse import Read
    from dpuflow.matching import count_untold

    known = endpoint_ranks(joined, ranks, told)
    exchanges = build_exchanges(joined.transfers, joined.columns)
    instances = _operations(joined, exchanges, told, nodes, known)
    home = nodes.tolist()
    several = {node for node, count in Counter(home).items() if count > 1}
    for instance in instances:
        # The ranks that it does not show may be at other NICs of its nodes, not behind these.
        if instance.hides_ranks and any(home[end] in several for end in instance.order):
            instance.view = replace(instance.view, apart=True)
    untold = count_untold(joined.columns, exchanges, instances)
    return Read(joined, exchanges, instances, build_entries(exchanges, instances), untold, known)


def _operations(
    joined: Joined,
    exchanges: Rows,
    told: Sequence[Communicator],
    nodes: NDArray[np.int64],
    known: Mapping[int, int],
) -> list[Instance]:
    """The operations among ``exchanges``; ``known``: the ranks of endpoints."""
    from dpuflow.exchanges.build import announced, granted_at
    from dpuflow.exchanges.bunches import requested
    from dpuflow.identity.endpoints import all_but_one, rank_order, seen_until, seen_whole
    from dpuflow.identity.processes import connection_ends
    from dpuflow.matching import Job, build_collectives
    from dpuflow.matching.buffers import buffers_of, sharing_told_apart, without_flags
    from dpuflow.matching.slots import whole_slots

    buffers = buffers_of(joined.transfers, exchanges)
    named = granted_at(joined.transfers, exchanges)
    job = Job(
        exchanges,
        rank_order(joined, known),
        seen_whole(joined, told),
        nodes,
        whole_slots(exchanges, announced(joined.transfers, exchanges), named),
        requested(joined.transfers, exchanges),
        seen_until(joined),
        buffers,
        connection_ends(joined),
        all_but_one(joined, told),
        named,
    )
    instances = build_collectives(job)
    instances = sharing_told_apart(instances, exchanges, joined.transfers)
    return without_flags(instances, exchanges, joined.transfers, buffers)


STAGES: Final = ("joining", "matching", "judging")
"""What is told of an analysis once captures are read."""


def _stages(progress: Progress | None) -> Callable[[str], None]:
    """What tells ``progress`` that a stage begins."""

    def tell(stage: str) -> None:
        if progress is not None:
            progress(stage, STAGES.index(stage) + 1, len(STAGES))

    return tell


def _worked(
    captures: list[CaptureTables],
    read: Read,
    nodes: NDArray[np.int64],
    ranks: Mapping[str, Place] | None,
    names: Mapping[str, str] | None,
) -> Worked:
    """The result of one island."""
    from dpuflow.assemble import Known, assemble
    from dpuflow.findings.build import build_findings
    from dpuflow.verdicts import infer

    joined, exchanges, instances = read.joined, read.exchanges, read.instances
    inferred = infer(joined, exchanges, instances, read.entries)
    result, listed = assemble(captures, read, inferred, Known(ranks, nodes, names))
    build_findings(captures, joined, exchanges, instances, inferred, result)
    return Worked(result, joined, exchanges, instances, inferred, listed)


CITED: Final = ("flow", "first_frame", "last_frame", "retransmitted", "rkey")


def cited(messages: Rows) -> Rows:
    """The columns of MESSAGE that results cite, in rows of their own: a fifth of the memory."""
    import numpy as np

    kept = np.empty(len(messages), [(name, messages.dtype[name]) for name in CITED])
    for name in CITED:
        kept[name] = messages[name]
    return kept


def _refuse_other_links(infos: Sequence[CaptureInfo]) -> None:
    """Raise FormatError for a capture of links that are not read."""
    for info in infos:
        if 0 < info.packets == info.skipped.get("unsupported_link_type"):
            raise FormatError(info.files[0], f"link type {info.link_type} cannot be read: capture Ethernet")


def read_captures(
    vantages: Sequence[Vantage], threads: int, progress: Progress | None
) -> list[CaptureTables]:
    """Read every capture: several at a time, or one with several threads."""
    from dpuflow.ingest import ingest

    meter = _Meter(len(vantages), progress)
    at_once = min(threads, len(vantages))
    if at_once <= 1:
        return [
            ingest(list(v.files), v.name, number, threads, meter.of(number))
            for number, v in enumerate(vantages)
        ]
    from concurrent.futures import ThreadPoolExecutor

    # Kernels give up the interpreter lock, so threads read captures side by side.
    with ThreadPoolExecutor(at_once, "dpuflow-read") as pool:
        jobs = [
            pool.submit(ingest, list(v.files), v.name, number, 1, meter.of(number))
            for number, v in enumerate(vantages)
        ]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            meter.stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(Exception):
    """Raised inside a reading thread when another one has failed or the user pressed Ctrl-C."""


class _Meter:
    """Adds up the bytes that several readers have read, and tells them when to stop."""

    def __init__(self, readers: int, progress: Progress | None) -> None:
        self.done = [0] * readers
        self.total: list[int | None] = [0] * readers
        self.progress = progress
        self.lock = Lock()
        self.stop = Event()

    def of(self, number: int) -> Callable[[int, int | None], None]:
        """The callback of reader ``number``."""

        def report(done: int, total: int | None) -> None:
            if self.stop.is_set():
                raise _Stopped
            with self.lock:
                self.done[number], self.total[number] = done, total
                if self.progress is not None:
                    known = [t for t in self.total if t is not None]
                    whole = sum(known) if len(known) == len(self.total) else 0
                    self.progress("reading", sum(self.done), whole)

        return report
