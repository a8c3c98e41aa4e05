"""The trace, read back with Perfetto's own protobuf: slices, nesting, arrows and times are the result's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_results import T0, collective, job, messages
from test_html import EVIL, PAGES
from test_loading import rich_job

from dpuflow.analysis import analyze_marked
from dpuflow.cli import run
from dpuflow.message_list import UNKNOWN
from dpuflow.reports.json import write_json
from dpuflow.reports.perfetto import write_perfetto
from dpuflow.reports.perfetto.packets import varint, varints
from dpuflow.results import Analysis, Request, Steps

pb = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
    reason="perfetto decodes the traces: make setup installs it",
)  # fmt: skip
BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


TRACE = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4"


class Read:
    """A trace with its interned texts looked up."""

    def __init__(self, result: Analysis, folder: Path) -> None:
        file = folder / "trace.perfetto"
        write_perfetto(result, str(file))
        self.tracks: dict[int, Any] = {}
        self.events: list[tuple[int, Any, str, dict[str, Any]]] = []
        self.counts: dict[int, list[tuple[int, int]]] = {}
        names: dict[int, str] = {}
        keys: dict[int, str] = {}
        texts: dict[int, str] = {}
        for packet in pb.Trace.FromString(file.read_bytes()).packet:
            assert packet.trusted_packet_sequence_id == 1
            interned = packet.interned_data
            names |= {each.iid: each.name for each in interned.event_names}
            keys |= {each.iid: each.name for each in interned.debug_annotation_names}
            texts |= {each.iid: each.str.decode() for each in interned.debug_annotation_string_values}
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks
                assert not track.parent_uuid or track.parent_uuid in self.tracks
                self.tracks[track.uuid] = track
            if packet.HasField("track_event"):
                event = packet.track_event
                assert event.track_uuid in self.tracks
                notes = {}
                for each in event.debug_annotations:
                    kind = each.WhichOneof("value")
                    value = getattr(each, kind)
                    notes[keys[each.name_iid]] = texts[value] if kind == "string_value_iid" else value
                if event.type == COUNTER:
                    self.counts.setdefault(event.track_uuid, []).append(
                        (packet.timestamp, event.counter_value)
                    )
                    continue
                name = names[event.name_iid] if event.type != END else ""
                self.events.append((packet.timestamp, event, name, notes))

    def slices(self) -> list[tuple[int, int, int, str, dict[str, Any]]]:
        """(track, begin, end, name, notes); fails where slices of a track overlap or do not end."""
        open_: dict[int, tuple[int, str, dict[str, Any]]] = {}
        done, last = [], {}
        for at, event, name, notes in self.events:
            track = event.track_uuid
            if event.type == BEGIN:
                assert track not in open_
                assert at >= last.get(track, 0)
                open_[track] = at, name, notes
            elif event.type == END:
                begin, name, notes = open_.pop(track)
                assert at >= begin
                last[track] = at
                done.append((track, begin, at, name, notes))
        assert not open_
        return done


@pytest.mark.parametrize("name", PAGES)
def test_every_entry_is_a_slice_with_the_jsons_times(name: str, tmp_path: Path) -> None:
    result = PAGES[name]()
    read = Read(result, tmp_path)
    found = Counter(
        (
            n["collective"],
            begin,
            end,
            n.get("lateness_ns"),
            n.get("error_ns"),
            n["bound"],
            n["cause"],
            n["why"],
        )
        for _, begin, end, _, n in read.slices()
        if "bound" in n
    )
    assert found == Counter(
        (each.id, e.enter_ns, e.leave_ns, e.lateness_ns, e.error_ns, e.bound, e.cause, e.why)
        for each in result.collectives
        for e in each.ranks
        if e.enter_ns is not None
    )
    instants = [(n["id"], name) for _, event, name, n in read.events if event.type == INSTANT]
    assert instants == [(each.id, each.condition) for each in result.findings]


def test_a_bound_is_named_so(tmp_path: Path) -> None:
    for bound in ("at_most", "at_least"):
        names = {name for _, _, _, name, notes in Read(PAGES[bound](), tmp_path).slices() if "bound" in notes}
        assert len(names) == 1
        assert {"at_most": "before", "at_least": "after"}[bound] in names.pop()


@pytest.mark.parametrize("make", [rich_job, lambda: with_messages()])
def test_every_arrow_has_both_ends(make: Any, tmp_path: Path) -> None:
    read = Read(make(), tmp_path)
    starts = [flow for _, event, _, _ in read.events for flow in event.flow_ids]
    ends = [flow for _, event, _, _ in read.events for flow in event.terminating_flow_ids]
    assert starts
    assert sorted(starts) == sorted(ends)
    assert len(set(starts)) == len(starts)


def test_operations_at_the_same_time_have_tracks_of_their_own(tmp_path: Path) -> None:
    result = rich_job()
    for each in result.collectives[:3]:
        for entry in each.ranks:
            entry.enter_ns, entry.leave_ns = result.collectives[0].start_ns, result.collectives[3].end_ns
    assert len(Read(result, tmp_path).slices()) > 40


def test_names_are_names(tmp_path: Path) -> None:
    result = rich_job()
    result.endpoints[1].label = EVIL
    result.endpoints[1].node = 1
    names = [track.process.process_name or track.name for track in Read(result, tmp_path).tracks.values()]
    assert any("<script>" in name for name in names)
    assert not any("\x1b" in name for name in names)


TIMES = st.integers(T0, T0 + 300)
SPANS = st.lists(st.tuples(TIMES, st.integers(0, 90)), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=SPANS, transfers=SPANS, moved=SPANS, asked=SPANS)
def test_whatever_overlaps_is_nested_and_dated(
    calls: list[tuple[int, int]], transfers: list[tuple[int, int]], moved: list[tuple[int, int]],
    asked: list[tuple[int, int]], tmp_path: Path,
) -> None:  # fmt: skip
    """Slices of one track never overlap, arrows have both ends, times are the result's to the nanosecond."""
    result = rich_job()
    result.collectives = []
    for number, (begin, long) in enumerate(calls):
        call = collective(number, [0.0] * 4)
        call.start_ns, call.end_ns, call.phases = begin, begin + long, []
        for entry in call.ranks:
            entry.enter_ns, entry.leave_ns = begin + entry.endpoint * long // 4, begin + long
        result.collectives.append(call)
    example = result.transfers[0]
    result.transfers = [
        replace(example, id=n, start_ns=begin, end_ns=begin + long)
        for n, (begin, long) in enumerate(transfers)
    ]
    result.requests = [
        Request(n, 0, 0, 1, 9, 9, begin, begin + long // 2, begin + long, 3, 1, 2, 0, None, True)
        for n, (begin, long) in enumerate(asked)
    ]
    result.messages = messages([(begin, begin + long) for begin, long in moved])
    read = Read(result, tmp_path)
    found = Counter((begin, end, name) for _, begin, end, name, _ in read.slices())
    assert Counter({key: n for key, n in found.items() if key[2] == "all_reduce"}) == Counter(
        (begin, end, "all_reduce")
        for each in result.collectives
        for begin, end in [(each.start_ns, each.end_ns), *((e.enter_ns, e.leave_ns) for e in each.ranks)]
    )
    assert all(found[begin, begin + long, f"request {n}"] == 1 for n, (begin, long) in enumerate(asked))
    assert sum(n for key, n in found.items() if key[2] == "data") == 2 * len(moved)
    for name in ("flow_ids", "terminating_flow_ids"):
        arrows = [arrow for _, event, _, _ in read.events for arrow in getattr(event, name)]
        assert sorted(arrows) == list(range(1, len(transfers) + len(moved) + 1))


def with_messages() -> Analysis:
    result = rich_job()
    result.messages = messages([(T0, T0 + 10), (T0 + 5, T0 + 50), (T0 + 100, T0 + 100)])
    return result


def test_counters_say_what_is_under_way(tmp_path: Path) -> None:
    read = Read(with_messages(), tmp_path)
    counts = {read.tracks[track].name: rows for track, rows in read.counts.items()}
    assert counts == {
        "a GPU of node 10.0.0.1 bytes in flight": [
            (T0, 100), (T0 + 5, 200), (T0 + 30, 100), (T0 + 70, 0), (T0 + 100, 100), (T0 + 120, 0)
        ],
        "a GPU of node 10.0.0.1 credits outstanding": [
            (T0 - 5, 1), (T0, 1), (T0 + 5, 0), (T0 + 95, 1), (T0 + 100, 0)
        ],
        "a GPU of node 10.0.0.1 marked packets": [(T0 + 50, 1)],
    }  # fmt: skip
    units = {read.tracks[track].name: read.tracks[track].counter.unit for track in read.counts}
    assert set(units.values()) == {2, 3}  # counts and bytes
    assert [name for name, unit in units.items() if unit == 3] == ["a GPU of node 10.0.0.1 bytes in flight"]


def test_messages_of_a_capture_are_those_of_the_result(tmp_path: Path) -> None:
    """At both ends, by flow, with the frames that hold them."""
    result = analyze_marked([str(file) for file in sorted(TRACE.glob("node*.pcap.gz"))], messages=True)[0]
    read = Read(result, tmp_path)
    rows = [(track, notes) for track, _, _, _, notes in read.slices() if "first_frame" in notes]
    assert len(rows) == 2 * len(result.messages) == 2 * sum(flow.messages for flow in result.flows)
    for flow in result.flows:
        where = result.messages["flow"] == flow.id
        assert int(where.sum()) == flow.messages
        assert set(result.messages["src"][where]) <= {flow.src}
    of_calls = result.messages["collective"] != UNKNOWN
    assert sum(call.wire_bytes for call in result.collectives) == int(
        result.messages["bytes"][of_calls & (result.messages["role"] == 0)].sum()
    )
    assert all(1 <= notes["first_frame"] <= notes["last_frame"] for _, notes in rows)


def test_each_step_is_a_slice(tmp_path: Path) -> None:
    result = job()
    first, last = result.collectives[0], result.collectives[-1]
    result.steps = [Steps([0, 1, 2, 3], 9, 1, 40, 50, first.start_ns, last.end_ns, "decode", 2, 25.0)]
    found = [(b, e) for _, b, e, name, _ in Read(result, tmp_path).slices() if name.startswith("token ")]
    ends = [call.end_ns for call in result.collectives]
    assert found == list(pairwise(ends))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_columns_of_numbers_are_those_of_single_ones(values: list[int]) -> None:
    made = varints(np.array(values, np.int64))
    assert [bytes(row[kept]) for row, kept in zip(*made, strict=True)] == [varint(n) for n in values]


def test_numbers_are_base_128() -> None:
    assert [varint(n) for n in (0, 127, 128, 300)] == [b"\0", b"\x7f", b"\x80\x01", b"\xac\x02"]
    assert varint(-1) == b"\xff" * 9 + b"\x01"


def test_report_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "result.json", tmp_path / "trace"
    write_json(rich_job(), str(file))
    assert run(["report", str(file), "--perfetto", str(target)]) == 0
    assert pb.Trace.FromString(target.read_bytes()).packet
    assert run(["report", str(file), "--perfetto", "/dev/full"]) == 1
    assert capsys.readouterr().err == "dpuflow: /dev/full: No space left on device\n"
