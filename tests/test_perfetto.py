"""The trace, read back with Perfetto's own protobuf: slices, nesting, arrows and times are the result's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_html import EVIL, PAGES
from test_loading import rich_job

from dpuflow.cli import run
from dpuflow.reports.json import write_json
from dpuflow.reports.perfetto import write_perfetto
from dpuflow.reports.perfetto.packets import varint
from dpuflow.results import Analysis

pb = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2",
    reason="perfetto decodes the traces: make setup installs it",
)  # fmt: skip
BEGIN, END, INSTANT = 1, 2, 3


class Read:
    """A trace with its interned texts looked up."""

    def __init__(self, result: Analysis, folder: Path) -> None:
        file = folder / "trace.perfetto"
        write_perfetto(result, str(file))
        self.tracks: dict[int, Any] = {}
        self.events: list[tuple[int, Any, str, dict[str, Any]]] = []
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


def test_every_arrow_has_both_ends(tmp_path: Path) -> None:
    read = Read(rich_job(), tmp_path)
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
