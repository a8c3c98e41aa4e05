"""What jobs record themselves: real files are read, and laid beside what the packets show."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import dpuflow
from dpuflow.cli import run
from dpuflow.errors import FormatError
from dpuflow.recorded import compare, read_recorded, say_agreement
from dpuflow.recorded.calls import Call, op_of
from dpuflow.recorded.compare import best_shift
from dpuflow.results import Analysis
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

SHARED = os.environ.get("DPUFLOW_SHARED", str(Path(__file__).resolve().parents[2] / "shared"))
KINETO = Path(SHARED) / "captures" / "public" / "torch-kineto-nccl"
SCENARIO = {
    "cluster": {"nodes": 4},
    "nccl": {"setup": True},  # the set-up tells who has which rank
    "job": {
        "kind": "loop",
        "iterations": 6,
        "ops": [{"op": "all_reduce", "bytes": 1 << 20}, {"op": "all_gather", "bytes": 65536}],
    },
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Analysis, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("recorded")
    write_case(parse_scenario(json.dumps(SCENARIO), "test"), str(folder))
    result = dpuflow.analyze([str(path) for path in sorted(folder.glob("*.pcap.gz"))])
    return result, json.loads((folder / "truth.json").read_text())["collectives"]


def trace(calls: list[dict[str, Any]], rank: int, ahead_ns: int = 0) -> dict[str, Any]:
    """What Kineto would have of these calls, on a clock of its own."""
    words = {"all_reduce": "allreduce", "all_gather": "allgather"}
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_X",
            "ts": (each["enter_ns"][rank] + ahead_ns) / 1e3,
            "dur": (each["leave_ns"][rank] - each["enter_ns"][rank]) / 1e3,
            "args": {
                "Collective name": words[each["op"]],
                "dtype": "Float",
                "In msg nelems": each["bytes"] // 4,
                "Out msg nelems": each["bytes"],
            },
        }
        for each in calls
    ]
    return {"distributedInfo": {"rank": rank}, "traceEvents": events}


@pytest.mark.parametrize("first", [0, 4])
def test_a_trace_of_the_same_job_agrees_whenever_it_began(
    tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]], first: int
) -> None:
    result, truth = job
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(trace(truth[first:], 2, ahead_ns=-7_000_000_000)))
    (recorded,) = read_recorded(str(file))
    told = compare(result, recorded)
    assert (told.rank, told.both, told.ops) == (2, len(truth) - first, len(truth) - first)
    assert (told.sizes, told.only_file, told.places) == (told.told_sizes, 0, 1 if not first else told.places)
    assert told.apart_ns is not None
    assert told.apart_ns < 100_000


def test_traces_of_several_ranks_tell_who_was_last_as_packets_do(tmp_path: Path) -> None:
    late = {"faults": [{"kind": "gpu_late", "rank": 1, "us": 300}]}
    write_case(parse_scenario(json.dumps(SCENARIO | late), "test"), str(tmp_path))
    result = dpuflow.analyze([str(path) for path in sorted(tmp_path.glob("*.pcap.gz"))])
    truth = json.loads((tmp_path / "truth.json").read_text())["collectives"]
    files = [tmp_path / f"trace{rank}.json" for rank in (0, 1, 3)]
    for rank, file in zip((0, 1, 3), files, strict=True):
        file.write_text(json.dumps(trace(truth, rank, ahead_ns=rank * 5_000_000_000)))
    said: list[str] = []
    say_agreement(result, map(str, files), said.append)
    assert len(said) == 4
    told = re.search(r"cover 12 collectives. In (\d+) of them .* the files agree in (\d+)\.", said[-1])
    assert told is not None
    assert told[1] == told[2]
    assert int(told[1]) >= 6  # each iteration's first, in which rank 1 is late
    # What a file says that has rank 3 late instead.
    entered = [each | {"enter_ns": [*each["enter_ns"][:3], each["enter_ns"][1] + 10**6]} for each in truth]
    files[2].write_text(json.dumps(trace(entered, 3)))
    say_agreement(result, map(str, files), said.append)
    assert f"In {told[1]} of them" in said[-1]
    assert "the files agree in 0." in said[-1]
    said.clear()
    say_agreement(result, [str(files[0])], said.append)
    assert len(said) == 1  # one rank alone was neither first nor last


def test_a_file_of_another_job_is_one_sentence(
    tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]]
) -> None:
    result, truth = job
    good, other = tmp_path / "good.json", tmp_path / "other.json"
    good.write_text(json.dumps(trace(truth, 2)))
    other.write_text(json.dumps(trace([each | {"bytes": 3 * each["bytes"]} for each in truth], 2)))
    said: list[str] = []
    sentence = r"other\.json.*cannot be aligned with the captures: .*another job, another time"
    with pytest.raises(FormatError, match=sentence) as error:
        say_agreement(result, [str(other), str(good)], said.append)
    assert "\n" not in str(error.value)
    assert len(said) == 1  # the good one is told all the same


def test_below_the_report_a_bad_file_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_case(parse_scenario(json.dumps(SCENARIO), "test"), str(tmp_path))
    captures = [str(path) for path in sorted(tmp_path.glob("*.pcap.gz"))]
    huge = tmp_path / "huge.json"
    with huge.open("wb") as stream:
        stream.truncate(4 << 30)
    assert run(["analyze", *captures, "--compare", str(huge)]) == 1
    out, said = capsys.readouterr()
    assert "NOBODY" in out
    assert said.count("\n") == 1
    assert "huge.json: 4,294,967,296 bytes are more than is read" in said


def test_a_flight_recorder_that_saw_another_operation(
    tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]]
) -> None:
    result, truth = job
    entries = [
        {
            "profiling_name": f"nccl:{each['op']}",
            "input_sizes": [[each["bytes"] // 2]],
            "input_dtypes": ["BFloat16"],
            "time_created_ns": each["enter_ns"][1],
        }
        for each in truth
    ]
    entries[5]["profiling_name"] = "nccl:broadcast"
    file = tmp_path / "nccl_trace_rank_1"
    file.write_bytes(pickle.dumps({"version": "2.4", "entries": entries}, protocol=2))
    (recorded,) = read_recorded(str(file))
    told = compare(result, recorded)
    assert (told.rank, told.both, told.ops) == (1, len(truth), len(truth) - 1)
    assert told.apart_ns is None  # ends were not recorded: nothing ties its clock


def test_a_log_of_nccl(tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]]) -> None:
    result, truth = job
    words = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
    lines = ["node3:42:42 [0] NCCL INFO ncclCommInitRank comm 0xabc rank 3 nranks 4 cudaDev 0 - Init START"]
    lines += [
        f"node3:42:97 [0] NCCL INFO {words[each['op']]}: opCount {n:x} sendbuff 0x1 recvbuff 0x2 count"
        f" {each['bytes'] // 2} datatype 9 op 0 root 0 comm 0xabc [nranks=4] stream 0x5"
        for n, each in enumerate(truth)
    ]
    file = tmp_path / "nccl.log"
    file.write_text("\n".join(lines))
    (recorded,) = read_recorded(str(file))
    told = compare(result, recorded)
    assert (told.rank, told.ops, told.sizes) == (3, len(truth), len(truth))
    said: list[str] = []
    say_agreement(result, [str(file)], said.append)
    assert f"the operation agrees in {len(truth)}" in said[0]


def test_a_log_names_ranks_by_the_largest_communicator(tmp_path: Path) -> None:
    """Tensor parallel groups number their ranks anew: those of two processes were taken for one rank's."""
    lines = []
    for rank in (1, 3):
        said = f"node:{rank}:9 [0] NCCL INFO"
        lines += [
            f"{said} ncclCommInitRank comm 0xa{rank} rank {rank} nranks 4 cudaDev 0 - Init START",
            f"{said} ncclCommSplit comm 0xb{rank} rank 1 nranks 2 cudaDev 0 - Init START",
        ]
        lines += [
            f"{said} AllReduce: opCount {n} sendbuff 0x1 recvbuff 0x2 count {64 * rank} datatype 9 op 0"
            f" root 0 comm 0x{kind}{rank} [nranks=4] stream 0x5"
            for n, kind in enumerate("ab")
        ]
    file = tmp_path / "nccl.log"
    file.write_text("\n".join(lines))
    told = {each.rank: [call.bytes for call in each.calls] for each in read_recorded(str(file))}
    assert told == {1: [128, 128], 3: [384, 384]}


def inspector(calls: list[dict[str, Any]], rank: int, *, verbose: bool) -> list[dict[str, Any]]:
    """What NCCL's Inspector would write of these calls."""
    words = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
    header = {"id": "0x7f8c", "rank": rank, "n_ranks": 4, "nnodes": 4}
    told = {"inspector_output_format_version": "v4.0", "hostname": "node", "pid": 42}
    found = []
    for each in calls:
        done: dict[str, Any] = {
            "coll": words[each["op"]],
            "coll_sn": sum(row["coll_perf"]["coll"] == words[each["op"]] for row in found),
            "coll_msg_size_bytes": each["bytes"],
        }
        if verbose:
            begin, end = (each[key][rank] // 1000 for key in ("enter_ns", "leave_ns"))
            kernels = [{"channel_id": 0, "kernel_start_ts": begin + 7, "kernel_stop_ts": end + 7}]
            done["event_trace_ts"] = {"coll_start_ts": begin, "coll_stop_ts": begin, "kernel_events": kernels}
        found.append({"header": header, "metadata": told, "coll_perf": done})
    return found


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("verbose", [True, False])
def test_lines_of_the_inspector(
    tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]], verbose: bool
) -> None:
    result, truth = job
    rows = inspector(truth, 2, verbose=verbose)
    rows.insert(1, {"header": rows[0]["header"], "metadata": rows[0]["metadata"], "dump_stats": {}})
    for row in rows[2:]:  # as from v4.4 on: what a dump's first line says holds for those behind it
        del row["header"], row["metadata"]
    file = tmp_path / "node-pid42.log"
    file.write_text(lines(rows))
    (recorded,) = read_recorded(str(file))
    told = compare(result, recorded)
    assert (told.rank, told.ops, told.sizes, told.only_file) == (2, len(truth), len(truth), 0)
    assert (told.apart_ns is not None) == verbose
    assert (told.apart_ns or 0) < 100_000


def test_what_the_inspector_skipped_is_not_laid_beside(
    tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]]
) -> None:
    result, truth = job
    rows = inspector(truth, 1, verbose=False)
    del rows[2]
    file = tmp_path / "node-pid42.log"
    file.write_text(lines(rows))
    (recorded,) = read_recorded(str(file))
    told = compare(result, recorded)
    # The gap shows at the next call of that function: what lies behind it.
    assert told.both == told.ops == told.sizes == len(truth) - 4


def test_sizes_of_the_inspector(tmp_path: Path) -> None:
    (row,) = inspector([{"op": "all_reduce", "bytes": 64}], 0, verbose=False)
    row["coll_perf"]["coll"] = "ReduceScatter"
    file = tmp_path / "node-pid42.log"
    file.write_text(lines([row]))
    (recorded,) = read_recorded(str(file))
    assert recorded.calls == [Call("reduce_scatter", 256)]  # it counts what one of four ranks receives


def profile(calls: list[dict[str, Any]], rank: int) -> str:
    """What NCCL's example profiler plugin would write of these calls (print_event.cc), proxies left out."""
    lines = ['{"name": "Group", "cat": "GROUP", "ph": "b", "id": 0, "pid": 7, "tid": 1, "ts": 1.0},']

    words = {"all_reduce": "AllReduce", "all_gather": "AllGather"}
    for number, each in enumerate(calls):
        size = each["bytes"]
        for phase, at, args in (
            ("b", min(each["enter_ns"]) - 5_000_000, {
                "SeqNum": number, "CommHash": 77, "Rank": rank, "Count": size // 4,
                "Datatype": "ncclFloat32", "Algorithm": "RING", "Protocol": "SIMPLE", "nChannels": 2,
            }),
            ("e", each["leave_ns"][rank], None),
        ):  # fmt: skip
            event = {"name": words[each["op"]], "cat": "COLL", "ph": phase, "id": number, "pid": 7, "tid": 1}
            event |= {"ts": at / 1e3} | ({} if args is None else {"args": args})
            lines.append(json.dumps(event) + ",")
    return "\n".join(["[", *lines, "{}]", ""])


def test_events_of_the_profiler_plugin(tmp_path: Path, job: tuple[Analysis, list[dict[str, Any]]]) -> None:
    result, truth = job
    file = tmp_path / "nccl_77_1.json"
    file.write_text(profile(truth, 1))
    (recorded,) = read_recorded(str(file))
    told = compare(result, recorded)
    assert (told.rank, told.both, told.ops, told.only_file) == (1, len(truth), len(truth), 0)
    assert told.sizes == told.told_sizes > 0
    assert told.apart_ns is None  # it begins when the host enqueued them
    file.write_text(file.read_text()[:-40])  # the process was killed
    with pytest.raises(FormatError, match="not whole"):
        read_recorded(str(file))


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs the shared captures")
@pytest.mark.parametrize(
    ("name", "rank", "calls"),
    [("nccl_data", 0, 21), ("world16_rank0", 0, 80), ("world2_rank1_df_index_resolver", 1, None)],
)
def test_real_traces_are_read(name: str, rank: int, calls: int | None) -> None:
    (recorded,) = read_recorded(str(KINETO / f"{name}.json.gz"))
    assert recorded.rank == rank
    assert calls is None or len(recorded.calls) == calls
    assert all(call.begin_ns is not None and call.end_ns is not None for call in recorded.calls)
    if name == "nccl_data":
        assert ("all_reduce", 4 * 6637568) in [(call.op, call.bytes) for call in recorded.calls]


def test_the_words_for_operations() -> None:
    told = {
        "nccl:_reduce_scatter_base": "reduce_scatter",
        "AllGather": "all_gather",
        "nccl:recv 0<-1": "send_recv",
    }
    assert {name: op_of(name) for name in told} == told
    assert op_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)") == "all_reduce"
    assert op_of("aten::add") is None


def test_in_a_job_that_repeats_itself_places_are_counted() -> None:
    seen = [Call("all_reduce", 64)] * 10
    assert best_shift(["all_reduce"] * 4, [64] * 4, seen) == (0, 7)
    assert best_shift(["all_reduce"] * 2, [64] * 2, seen) == (None, 0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither a trace"),
        (b'{"traceEvents": [', "not whole"),
        (b'{"traceEvents": []}', "no collective operation"),
        (b'{"entries": 5}', "not whole"),
        (
            b'{"metadata": {"inspector_output_format_version": "v4.0"}, "coll_perf": {}}',
            "line 1: key 'hostname'",
        ),
        (b'{"metadata": {"inspector_output_format_version": "v9"}, "coll_perf": {}}', "version v9"),
        (b'{"metadata": {"inspector_output_format_version": "v4.0"}}\n{"coll_pe', "line 2"),
        (b'{"other": 1}', "neither a trace"),
        (pickle.dumps(Path("x")), "no dump of that kind has"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:20], "not whole"),
    ],
    ids=[
        "empty",
        "cut",
        "no_operation",
        "wrong_type",
        "inspector",
        "its_version",
        "its_end",
        "other",
        "pickle",
        "cut_gzip",
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, data: bytes, said: str) -> None:
    file = tmp_path / "bad"
    file.write_bytes(data)
    with pytest.raises(FormatError, match=said) as error:
        read_recorded(str(file))
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
