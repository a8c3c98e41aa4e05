"""Windows over an endless capture: the collectives that one analysis of the whole finds, each once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feeding import pieces

from bench.accuracy.midjob import cut
from dpuflow.agent.config import Windows as Settings
from dpuflow.agent.stream import Stream
from dpuflow.agent.tracker import Tracker
from dpuflow.agent.windows import Windows
from dpuflow.analysis import analyze
from dpuflow.ingest import ingest
from dpuflow.messages.growing import Growing
from dpuflow.results import Analysis
from dpuflow.schema.tables import Vantage
from dpuflow.synth.case import write_case
from dpuflow.synth.observe import epoch_ns
from dpuflow.synth.scenario import parse_scenario

TRACES = Path(__file__).resolve().parents[1] / "traces"
FILES = sorted(TRACES.glob("*/node0.pcap.gz"))
NAMES = [path.parent.name for path in FILES]


def rows(analysis: Analysis) -> list[tuple[Any, ...]]:
    """Collectives with addresses in place of ids."""
    address = [endpoint.address for endpoint in analysis.endpoints]
    return [
        (
            c.op, c.algorithm, c.bytes, c.wire_bytes, c.start_ns, c.end_ns,
            tuple(sorted(address[r.endpoint] for r in c.ranks)),
        )
        for c in analysis.collectives
    ]  # fmt: skip


@cache
def whole_of(path: Path) -> list[tuple[Any, ...]]:
    """Collectives of one analysis of the whole capture."""
    return rows(analyze([Vantage("x", (str(path),))], threads=1))


def live(path: Path, settings: Settings) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Collectives as they are settled, and how many messages are held after each step."""
    stream, windows = Stream("x"), Windows(settings)
    found, held, now = [], [], 0

    def step(until_ns: int) -> None:
        taken = stream.snapshot(until_ns)
        settled = windows.step(taken.tables(), taken.counts(), until_ns)
        stream.forget(settled.before_ns)
        found.extend(rows(settled.analysis))
        held.append(stream.held())

    step_ns = round(settings.step * 1e9)
    for now, form, piece in pieces(path, step_ns):
        stream.feed(form, piece)
        step(now)
    for more_s in (1.0, 2.0, 3.5, settings.span / 2, settings.span + 1.0):
        step(now + round(more_s * 1e9))
    return found, held


@pytest.mark.parametrize("path", FILES, ids=NAMES)
@pytest.mark.parametrize("step_s", [0.3, 1.0])
def test_each_collective_is_published_once_and_as_the_whole_capture_has_it(path: Path, step_s: float) -> None:
    found, _ = live(path, Settings(step=step_s))
    whole = whole_of(path)
    assert len(found) == len(set(found))
    assert sorted(found, key=str) == sorted(whole, key=str)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_what_is_held_is_bounded_by_the_span(path: Path) -> None:
    whole = whole_of(path)
    found, held = live(path, Settings(step=0.25, span=2.0, settle=0.5, longest=10.0, messages=100))
    assert held[-1] <= 100
    assert len(found) == len(set(found))
    # One in twenty, or the three that windows of a hundred messages leave out of a short capture.
    assert abs(len(found) - len(whole)) <= max(0.05 * len(whole), 3)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_messages_are_the_same_however_often_finished_ones_are_let_go(path: Path) -> None:
    whole = ingest([str(path)])
    stream, gone = Stream("x"), []
    for now, form, piece in pieces(path, 100_000_000):
        stream.feed(form, piece)
        tables = stream.snapshot(now).tables()
        before_ns = now - 2_000_000_000
        gone.append(tables.messages[tables.messages["last_ns"] < before_ns])
        stream.forget(np.full(len(tables.flows), before_ns))
    end = stream.snapshot(0).tables()
    # A burst that nothing has ended yet is in each snapshot: of those the last one counts.
    every = np.concatenate([*gone, end.messages])[::-1]
    key = np.stack([every[name].astype(np.int64) for name in ("flow", "first_ns", "seq", "wire")], axis=1)
    every = every[np.unique(key, axis=0, return_index=True)[1]]
    for table in (every, whole.messages):
        table.sort(order=["flow", "first_ns", "seq", "wire", "seq_end"])
    for name in ("flow", "first_ns", "last_ns", "acked_ns", "seq", "seq_end", "bytes", "packets", "role"):
        assert (every[name] == whole.messages[name]).all(), name
    for name in ("packets", "bytes", "retransmitted", "missing", "nak", "peer"):
        assert (end.flows[name] == whole.flows[name]).all(), name
    assert end.endpoints.tolist() == whole.endpoints.tolist()


def test_what_comes_while_a_snapshot_is_read_goes_on() -> None:
    """Words of entries were shared: while one thread read them they could not grow, and the agent ended."""
    first, *rest = (
        (form, piece) for _, form, piece in pieces(TRACES / "nccl-allreduce-n2/node0.pcap.gz", 10**8)
    )
    stream = Stream("x")
    stream.feed(*first)
    held = [vars(builder).values() for builder in stream.snapshot(0)._builders]
    views = [each.rows[:] for values in held for each in values if isinstance(each, Growing)]
    assert len(views) == 4
    for form, piece in rest:
        stream.feed(form, piece)


def shared(one: object, other: object, name: str = "") -> Iterator[str]:
    """What changes in place and is the same in both, by its name."""
    for part, value in vars(one).items():
        theirs = getattr(other, part)
        ours = type(value).__module__.startswith(("dpuflow.messages.", "dpuflow.packets."))
        if value is theirs and (ours or isinstance(value, (list, dict, set))):
            yield name + part
        elif ours and hasattr(value, "__dict__"):
            yield from shared(value, theirs, f"{name}{part}.")


def test_a_snapshot_has_lists_of_its_own() -> None:
    """One thread reads it while another goes on: a window was lost, first bytes of SENDs were those since."""
    stream = Stream("x")
    for name in ("nccl-allreduce-n2", "nccl-sockets-tpdp-n4"):
        for _, form, piece in pieces(TRACES / name / "node0.pcap.gz", 10**12):
            stream.feed(form, piece)
    builders = (stream._roce, stream._tcp)
    for live, taken in zip(builders, stream.snapshot(0)._builders, strict=True):
        assert {*shared(live, taken)} <= {"hidden"}  # which is made anew each time


def test_who_comes_while_a_snapshot_is_read_is_none_of_its_business() -> None:
    """A window was lost: the snapshot numbered the directions of RoCE that had come since as its own."""
    roce, tcp = (TRACES / name / "node0.pcap.gz" for name in ("nccl-allreduce-n2", "mpi-iallreduce-n4"))
    ((_, form, job),), ((_, _, other),) = pieces(roce, 10**12), pieces(tcp, 10**12)
    moved, at = job.copy(), 0
    while at < len(moved):
        moved[at + 16 + 26], moved[at + 16 + 30] = 77, 77  # the first byte of either address
        at += 16 + int.from_bytes(moved[at + 8 : at + 12].tobytes(), "little")
    stream = Stream("x")
    stream.feed(form, job)
    stream.feed(form, other)  # flows that the messages of RoCE have not met yet
    before, taken = stream.snapshot(0).tables(), stream.snapshot(0)
    stream.feed(form, moved)
    after = taken.tables()
    for name in ("flows", "messages", "endpoints"):
        assert getattr(after, name).tolist() == getattr(before, name).tolist(), name
    assert len(stream.snapshot(0).tables().flows) > len(before.flows)


@pytest.mark.parametrize("hours", [-1, 1])
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_clock_that_is_set_loses_nothing(path: Path, hours: int) -> None:
    """In the middle of the job, by an hour; what is held moves along."""
    step_ns = hours * 3600 * 10**9
    settings = Settings(step=0.3)
    stream, windows, found = Stream("x"), Windows(settings), []
    moved, now = 0, 0

    def step(until_ns: int) -> None:
        taken = stream.snapshot(until_ns)
        settled = windows.step(taken.tables(), taken.counts(), until_ns)
        stream.forget(settled.before_ns)
        found.extend((*row[:4], row[4] - moved, row[5] - moved, row[6]) for row in rows(settled.analysis))

    parts = list(pieces(path, 300_000_000))
    for number, (end, form, piece) in enumerate(parts):
        if number == len(parts) // 2:
            stream.shift(step_ns)
            windows.shift(step_ns)
            moved = step_ns
        now = end + moved
        stream.feed(form, shifted(piece, moved // 10**9))
        step(now)
    for more_s in (1.0, 2.0, 3.5, 5.0, 11.0):
        step(now + round(more_s * 1e9))
    whole = whole_of(path)
    assert sorted(found, key=str) == sorted(whole, key=str)


def shifted(piece: Any, seconds: int) -> Any:
    """Records of a pcap file stamped so much later."""
    moved, at = piece.copy(), 0
    while at + 16 <= len(moved):
        words = moved[at : at + 16].view("<u4")
        words[0] = int(words[0]) + seconds
        at += 16 + int(words[2])
    return moved


def test_flows_that_are_over_are_forgotten_and_those_that_go_on_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames are numbered anew meanwhile, too; messages stay what they are."""
    from dpuflow.agent import stream as module

    monkeypatch.setattr(module, "FEW_FLOWS", 2)
    monkeypatch.setattr(module, "MOST_FRAMES", 1000)
    captures = {file: ingest([str(file)]) for file in FILES}
    other, path = sorted(FILES, key=lambda file: captures[file].info.first_ns or 0)[:2]
    whole = captures[path]
    stream, gone = Stream("x"), []
    for _, form, piece in pieces(other, 10**9):  # another job before, with flows of its own
        stream.feed(form, piece)
    tables = stream.snapshot(0).tables()
    stream.forget(np.full(len(tables.flows), 1 << 62))
    before = stream.held_flows()
    for now, form, piece in pieces(path, 100_000_000):
        stream.feed(form, piece)
        tables = stream.snapshot(now).tables()
        before_ns = now - 1_000_000_000
        gone.append(tables.messages[tables.messages["last_ns"] < before_ns])
        stream.forget(np.full(len(tables.flows), before_ns))
        stream.forget_flows(tables, now, 500_000_000)
    assert stream.held_flows() < before + len(whole.flows)
    every = np.concatenate([*gone, stream.snapshot(0).tables().messages])
    for name in ("first_ns", "last_ns", "seq", "bytes", "role", "tag", "sub"):
        ours = np.sort(every[name][np.isin(every["first_ns"], whole.messages["first_ns"])])
        assert set(whole.messages[name].tolist()) <= set(ours.tolist()), name
    assert stream.info.packets <= 2000 + 20000


TCP_JOBS = [path for path in FILES if path.parent.name in ("gloo-allreduce-n4", "mpi-allreduce-n4")]


def torn(path: Path, stream: Stream) -> None:
    """Half a capture into ``stream``, every twentieth packet left out: what was on its way never ends."""
    ((_, form, data),) = pieces(path, 10**12)
    starts, at = [], 0
    while at < len(data):
        starts.append(at)
        at += 16 + int.from_bytes(data[at + 8 : at + 12].tobytes(), "little")
    half = len(starts) // 2
    bounds = [*starts, at]
    stream.feed(form, np.concatenate([data[bounds[n] : bounds[n + 1]] for n in range(half) if n % 20]))


@pytest.mark.parametrize("path", TCP_JOBS, ids=lambda path: path.parent.name)
def test_messages_that_never_end_keep_no_flow_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of jobs that were killed hundreds of flows more were kept each hour, with a message on its way."""
    from dpuflow.agent import stream as module

    monkeypatch.setattr(module, "FEW_FLOWS", 1)
    (other,) = {*TCP_JOBS} - {path}
    second, whole = 10**9, ingest([str(other)])
    stream = Stream("x")
    torn(path, stream)
    last_ns = int(stream.snapshot(0).tables().flows["last_ns"].max())
    stream.forget(np.full(stream.held_flows(), 1 << 62))
    assert stream._tcp is not None
    used = stream._tcp.in_use(np.zeros(stream.held_flows(), bool)).sum()
    waiting = int(stream._tcp._counts[stream._tcp._state.SLOTS_USED])
    assert used
    assert waiting
    for later_s, left in ((2, int(used)), (9, int(used)), (11, 0)):
        tables = stream.snapshot(0).tables()
        stream.forget(np.full(stream.held_flows(), 1 << 62))
        stream.forget_flows(tables, last_ns + later_s * second, second)
        assert left <= stream.held_flows() <= 2 * left + 2  # and their other directions, and the last one
    left = int(stream._tcp._streams["held_count"][: stream.held_flows()].sum())  # of the last one
    assert stream._tcp._counts[stream._tcp._state.SLOTS_USED] == left < waiting
    for _, form, piece in pieces(other, second):  # what follows is read as ever, in the slots given up
        stream.feed(form, piece)
    again = stream.snapshot(0).tables()
    names = ["first_ns", "last_ns", "seq", "bytes", "wire"]
    told, expected = ({*map(tuple, each.messages[names].tolist())} for each in (again, whole))
    assert expected <= told


def test_of_the_bootstraps_of_old_jobs_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpuflow.messages import setups as module

    monkeypatch.setattr(module, "MOST_IDLE", 1)
    path = TRACES / "nccl-sockets-tpdp-n4" / "node0.pcap.gz"
    stream = Stream("x")
    for _, form, piece in pieces(path, 10**9):
        stream.feed(form, piece)
    assert stream._tcp is not None
    tables = stream.snapshot(0).tables()
    assert len(tables.members)
    before = len(stream._tcp.setups.in_use())
    stream._tcp.setups.release(np.ones(stream.held_flows(), bool), stream._reader.flows)
    after = stream._tcp.setups.in_use()
    assert 0 < len(after) <= 2 < before


def test_a_message_that_never_ends_holds_no_heads_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of SENDs' first bytes was kept for all that came after it."""
    stream, asked = Stream("x"), []
    for _, form, piece in pieces(TRACES / "nccl-allreduce-n2" / "node0.pcap.gz", 10**9):
        stream.feed(form, piece)
    assert stream._roce is not None
    lanes = stream._roce._lanes
    monkeypatch.setattr(stream._roce._heads, "forget", asked.append)
    last_ns = int(stream._reader.flows["last_ns"].max())
    lanes["open"] = 0
    lanes["open"][0], lanes["first_frame"][0], lanes["last_ns"][0] = 1, 3, last_ns
    stream.forget(np.full(stream.held_flows(), last_ns - 10**8))
    stream.forget(np.full(stream.held_flows(), last_ns + 1))
    assert asked == [3, None]


@pytest.mark.parametrize("compute_ms", [30, 100])
def test_a_rank_that_turns_late_is_told_within_five_seconds(tmp_path: Path, compute_ms: int) -> None:
    """By the agent of its own node, in the capture's own time, at default settings."""
    iterations = round(10_000 / compute_ms)
    scenario = parse_scenario(
        f"cluster: {{nodes: 2}}\njob: {{kind: loop, iterations: {iterations}, compute_us: {compute_ms}000,"
        " ops: [{op: all_reduce, bytes: 4KiB}]}\n"
        f"faults: [{{kind: gpu_late, rank: 1, us: {compute_ms}000, from_iteration: {iterations // 2}}}]\n",
        "a.yaml",
    )
    write_case(scenario, str(tmp_path))
    truth = json.loads((tmp_path / "truth.json").read_text())
    turned_ns = sorted(min(c["enter_ns"]) for c in truth["collectives"])[iterations // 2]
    stream, windows, tracker = Stream("x"), Windows(Settings()), Tracker(1.5, 10.0, 60.0)
    told = []
    for now, form, piece in pieces(next(tmp_path.glob("*1.pcap*")), 1_000_000_000):
        stream.feed(form, piece)
        taken = stream.snapshot(now)
        settled = windows.step(taken.tables(), taken.counts(), now)
        stream.forget(settled.before_ns)
        told += [(now, state) for state in tracker.step(settled.analysis, now)]
    (now, first), *_ = [(now, state) for now, state in told if state.condition == "straggler"]
    assert first.addresses == ("10.0.0.2",)
    assert 0 < now - turned_ns < 5_000_000_000
    assert abs(first.since_ns - turned_ns) < 2 * compute_ms * 1_000_000


def test_each_transfer_is_published_once(tmp_path: Path) -> None:
    """Caches of some requests a second, longer than what is held at a time."""
    scenario = parse_scenario(
        "cluster: {nodes: 2, link_gbps: 10}\njob: {kind: prefill_decode, requests: 24, kv_bytes: 1MiB,"
        " prefill_us: 200000, tokens: 2, layers: 1}\nobservation: {only: [1]}\n",
        "a.yaml",
    )
    write_case(scenario, str(tmp_path))
    path = next(tmp_path.glob("*1.pcap*"))
    settings = Settings(step=0.25, span=2.0, settle=0.5, longest=10.0, messages=100)
    stream, windows, now = Stream("x"), Windows(settings), 0
    told: list[tuple[int, int, int]] = []

    def step(until_ns: int) -> None:
        taken = stream.snapshot(until_ns)
        settled = windows.step(taken.tables(), taken.counts(), until_ns)
        stream.forget(settled.before_ns)
        told.extend((row.start_ns, row.end_ns, row.bytes) for row in settled.analysis.transfers)

    for now, form, piece in pieces(path, 250_000_000):
        stream.feed(form, piece)
        step(now)
    for more_s in (1.0, 2.0, 5.0):
        step(now + round(more_s * 1e9))
    whole = analyze([Vantage("x", (str(path),))], threads=1)
    assert len(whole.transfers) == 24
    assert told == [(row.start_ns, row.end_ns, row.bytes) for row in whole.transfers]


JOINED = """
name: joined
cluster: {nodes: 4}
nccl: {channels: 1}
observation: {vantages: switch, compress: false}
job: {kind: loop, iterations: 90, compute_us: 20000, ops: [{op: all_reduce, bytes: 256KiB}]}
faults: [{kind: gpu_late, rank: 2, us: 2000}]
"""


def test_a_capture_that_begins_in_mid_job_names_the_late_rank(tmp_path: Path) -> None:
    """As an agent's always does: from its first window with whole operations on."""
    scenario = parse_scenario(JOINED, "joined.yaml")
    captures = write_case(scenario, str(tmp_path))
    begin_ns = epoch_ns(scenario)
    cut(tmp_path, captures, begin_ns, [(begin_ns + 701_000_000, begin_ns + 10**12)])
    stream, windows = Stream("x"), Windows(Settings(step=0.25, span=2.0))
    told: list[Analysis] = []
    for now, form, piece in pieces(tmp_path / captures[0].name, 250_000_000):
        stream.feed(form, piece)
        taken = stream.snapshot(now)
        settled = windows.step(taken.tables(), taken.counts(), now)
        stream.forget(settled.before_ns)
        told.append(settled.analysis)
    named = [
        {end.address for end in analysis.endpoints for row in analysis.lateness
         if row.endpoint == end.id and row.verdict == "late"}
        for analysis in told
    ]  # fmt: skip
    assert len(told) >= 4
    assert named[-1] == {"10.0.0.3"}
    assert set().union(*named) == {"10.0.0.3"}
    assert {(str(c.op), c.bytes, len(c.ranks)) for a in told for c in a.collectives if c.complete} == {
        ("all_reduce", 256 << 10, 4)
    }
