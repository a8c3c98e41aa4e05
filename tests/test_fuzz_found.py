"""What fuzzing has found, each as a small case of its own."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import resource
import struct
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import shapes
from readings import read_bytes, read_file

import dpuflow
from dpuflow.agent.config import parse_config
from dpuflow.assemble import _seen_with
from dpuflow.entries import places, relative
from dpuflow.errors import FormatError, OptionError
from dpuflow.findings import losses
from dpuflow.identity.rankmap import read_rank_map
from dpuflow.ingest import ingest
from dpuflow.kernels import links
from dpuflow.kernels.tcp_state import LINK
from dpuflow.matching import Job, hypotheses, parts
from dpuflow.matching.model import Instance, InstanceView
from dpuflow.matching.sequenced import sequenced_instances
from dpuflow.messages import hidden_gloo
from dpuflow.messages.hidden_nccl import resolve_nccl
from dpuflow.messages.hidden_ob1 import Gap, Usage, fill
from dpuflow.messages.stretches import Solved
from dpuflow.recorded import read_recorded
from dpuflow.schedules.algorithms import ALGORITHMS
from dpuflow.schema import rows as schema
from dpuflow.schema.rows import Direction, Op, Wire
from dpuflow.verdicts import pipelines

SECTION = struct.pack("<IIIHHqI", 0x0A0D0D0A, 28, 0x1A2B3C4D, 1, 0, -1, 28)


def interface(link: int) -> bytes:
    return struct.pack("<IIHHII", 1, 20, link, 0, 0, 20)


def test_block_cut_short_in_a_compressed_file(tmp_path):
    """A block that is skipped by its length reached beyond the file's end; only plain files told."""
    raw = SECTION + interface(1) + struct.pack("<II", 0x0BAD, 400) + bytes(100)
    for name, content in (("plain.pcapng", raw), ("packed.pcapng.gz", gzip.compress(raw))):
        path = tmp_path / name
        path.write_bytes(content)
        info = read_file(path).info
        assert not info.complete, name
        (warning,) = info.warnings
        assert "the file ends inside a block at byte 448" in warning


def test_direction_is_each_packet_own():
    """In classic pcap a cooked packet without a direction got that of the packet before."""
    packet_types = (0, 3, 4, 3, 1, 7)
    raw = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 113)
    for packet_type in packet_types:
        cooked = struct.pack(">HHH8sH", packet_type, 1, 6, bytes(8), 0x0806)
        raw += struct.pack("<4I", 1, 0, 16, 16) + cooked
    inward, outward, unknown = Direction.INBOUND, Direction.OUTBOUND, Direction.UNKNOWN
    expected = [inward, unknown, outward, unknown, inward, unknown]
    assert read_bytes(raw).columns["direction"].tolist() == expected


def test_many_link_types():
    """65536 interfaces, each with a link type of its own, took many seconds."""
    raw = SECTION + b"".join(interface(link) for link in range(65536))
    start = time.process_time()
    assert read_bytes(raw).info.complete
    assert time.process_time() - start < 30


def test_sizes_far_apart_are_no_schedule():
    """A first message of one byte before one of 2**31: a ring of as many phases filled gigabytes."""
    rows = schema.EXCHANGE.zeros(4)
    rows["src"], rows["dst"] = [0, 1, 0, 1], [1, 0, 1, 0]
    rows["order"] = rows["sub"] = [0, 0, 1, 1]
    rows["bytes"] = [1, 1, 2**31, 2**31]
    rows["op"] = schema.Op.ALL_REDUCE
    for step, name in enumerate(
        ("offer_ns", "grant_ns", "data_ns", "data_end_ns", "arrived_ns", "arrived_end_ns")
    ):
        rows[name] = 1000 * np.arange(4) + step
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sequenced_instances(Job(rows, np.arange(2)), np.arange(4))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_small_segment_of_a_large_half_is_no_split_tree():
    """First messages of one byte and of 2**31 beside each other: as many segments as bytes took minutes."""
    rows = schema.EXCHANGE.zeros(3)
    rows["src"], rows["dst"] = [0, 0, 1], [1, 2, 2]
    rows["bytes"] = [1, 2**31, 1]
    rows["op"] = schema.Op.BROADCAST
    for step, name in enumerate(("data_ns", "data_end_ns", "arrived_ns", "arrived_end_ns")):
        rows[name] = 1000 * np.arange(3) + step
    for name in ("offer_ns", "grant_ns"):
        rows[name] = schema.NEVER
    start = time.process_time()
    sequenced_instances(Job(rows, np.arange(3)), np.arange(3))
    assert time.process_time() - start < 30


def anything(count: int) -> bool:
    """There is room for any number of messages."""
    return True


def test_a_sequence_number_that_leaps_is_not_filled():
    """A damaged number asked for 60,000 frames in a gap of some hundred bytes: hours of tries."""
    rows = schema.MESSAGE.zeros(4)
    rows["seq"] = [0, 100, 300, 400]
    rows["seq_end"] = [100, 300, 400, 500]
    rows["wire"] = [Wire.OB1_MATCH, Wire.UNKNOWN, Wire.UNKNOWN, Wire.OB1_MATCH]
    rows["sub"] = [7, 0, 0, 60_007]
    order = np.arange(4)
    start = time.process_time()
    for runs in ([order[1:2], order[2:3]], [order[1:2]] * 2000):
        gap = Gap(before=0, after=3, missing=59_999, runs=runs)
        assert list(fill(rows, gap, 0, Usage(rows, order, len(runs)), anything)) == [None] * len(runs)
    assert time.process_time() - start < 30


def test_a_gap_that_could_be_filled_in_many_ways_is_left():
    """Each run of a long gap could hold some frames: every way was tried, for a minute and more."""
    runs = 40
    rows = schema.MESSAGE.zeros(runs + 2)
    rows["seq"] = np.arange(runs + 2) * 1000
    rows["seq_end"] = rows["seq"] + 1000
    rows["wire"] = [Wire.OB1_MATCH, *[Wire.UNKNOWN] * runs, Wire.OB1_MATCH]
    rows["sub"] = [7, *[0] * runs, 8 + 10 * runs]
    order = np.arange(runs + 2)
    gap = Gap(before=0, after=runs + 1, missing=10 * runs, runs=list(order[1:-1, None]))
    start = time.process_time()
    assert list(fill(rows, gap, 0, Usage(rows, order, runs), anything)) == [None] * runs
    assert time.process_time() - start < 30


def test_gaps_of_thousands_of_frames_take_no_minutes():
    """Each way to spread 2,800 frames over two runs asked what each is: 198 messages took 31 s."""
    size, gaps = 60_000, 80
    kinds = [Wire.OB1_MATCH, Wire.UNKNOWN, Wire.OB1_FIN, Wire.UNKNOWN]
    lengths = [22, size, 32, size]
    rows = schema.MESSAGE.zeros(4 * gaps + 1)
    rows["wire"] = [*kinds * gaps, Wire.OB1_MATCH]
    ends = np.cumsum([*lengths * gaps, 22])
    rows["seq"], rows["seq_end"] = np.r_[0, ends[:-1]], ends
    rows["sub"][::4] = np.arange(gaps + 1) * 2801 % 65_536
    order = np.arange(len(rows))
    usage, start = Usage(rows, order, 2 * gaps), time.process_time()
    for k in range(gaps):
        runs = [order[4 * k + 1 : 4 * k + 2], order[4 * k + 3 : 4 * k + 4]]
        list(fill(rows, Gap(4 * k, 4 * k + 4, 2800, runs), 0, usage, anything))
    assert time.process_time() - start < 10


def test_messages_that_are_inferred_have_their_room():
    rows = schema.MESSAGE.zeros(3)
    rows["seq"], rows["seq_end"] = [0, 22, 22 + 220], [22, 22 + 220, 22 + 242]
    rows["wire"] = [Wire.OB1_MATCH, Wire.UNKNOWN, Wire.OB1_MATCH]
    rows["sub"] = [7, 0, 18]
    order = np.arange(3)
    gap = Gap(before=0, after=2, missing=10, runs=[order[1:2]])
    for room in (9, 10):
        (parts,) = fill(rows, gap, 0, Usage(rows, order, 1), lambda count, room=room: count <= room)
        assert (parts is None) == (room < 10)


@pytest.mark.parametrize(("missing", "filled"), [(10, 10), (100_000_000, 0)])
def test_a_gap_of_gigabytes_between_small_messages_takes_no_memory(missing: int, filled: int):
    """Of NCCL's sockets: as many messages of a neighbour's size as fill it took 900 MiB for 245 kB."""
    rows, link = schema.MESSAGE.zeros(3), np.zeros(3, LINK)
    ends = np.array([42, 42 * (1 + missing), 42 * (2 + missing)])
    rows["seq"], rows["seq_end"] = [0, *ends[:-1]], ends
    rows["wire"], rows["role"] = [Wire.NCCL_DATA, Wire.UNKNOWN, Wire.NCCL_DATA], schema.Role.DATA
    link["piece"][1] = 1
    flows = schema.FLOW.zeros(1)
    flows["framing"] = schema.Framing.NCCL
    solved = Solved(rows, link, 1000)
    tracemalloc.start()
    resolve_nccl(rows, link, flows, {0: np.arange(3)}, solved)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert solved.counts.resolved == filled
    assert solved.counts.too_many == (not filled)
    assert peak < 16 << 20  # kernels are loaded meanwhile


def test_a_stage_without_any_input_seen_is_no_crash():
    """All that a pipeline's link carried came after its capture had ended."""
    nothing = SimpleNamespace(arrived_ns=np.zeros(0, np.int64))
    book = SimpleNamespace(sent_ns=np.array([5, 9]))
    arrived, of = pipelines._inputs(nothing, book, np.array([schema.NEVER, schema.NEVER]))
    assert arrived.tolist() == [schema.NEVER] * 2
    assert of.tolist() == [-1, -1]


def test_a_rank_that_talks_to_itself():
    """Its linear all_to_all has no messages between ranks; how many there were was divided by none."""
    linear = next(a for a in ALGORITHMS if a.op == Op.ALL_TO_ALL and a.name == "linear")
    assert places._plan(linear, 1, 0, 1) is None


def test_errors_of_centuries():
    """What did not fit was told as an unseen time, with a warning of NumPy's in the middle of the verdict."""
    same, spread = np.zeros(3, np.int64), np.array([schema.NEVER, (1 << 63) - 1, 7])
    margins = SimpleNamespace(held_ns=np.array([3, 0, 4]), clock=same, clock_ns=same)
    entries = SimpleNamespace(endpoint=same, margins=margins)
    handed, clocks = relative._errors(entries, spread, np.array([2, 2, 2]))
    assert handed.tolist() == [schema.NEVER, 1 << 62, 7]
    assert clocks.tolist() == [0, 0, 0]


def tcp_frame(seq: int, claimed: int) -> bytes:
    """A record of an IPv4 TCP segment whose total length is 0, as offload leaves it, with Gloo's preamble."""
    body = struct.pack("<QQ", 32, 0) + bytes(24)
    tcp = struct.pack(">HHIIBBHHH", 1000, 2000, seq, 0, 5 << 4, 0x18, 1000, 0, 0)
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 0, 0, 0, 64, 6, 0, b"\n\0\0\1", b"\n\0\0\2")
    frame = bytes(12) + b"\x08\0" + ip + tcp + body
    return struct.pack("<4I", 1, 0, len(frame), claimed) + frame


def test_what_a_header_claims_takes_no_memory(tmp_path):
    """Records that claim 4 GiB, and segments far ahead of a hole: 22 GB of rows for one packet, before."""
    head = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 1)
    far = b"".join(tcp_frame(1000 + k * 600_000, 500_000) for k in range(2000))
    path = tmp_path / "claims.pcap"
    path.write_bytes(head + tcp_frame(0, 94) + far + tcp_frame(96, 0xFFFFFFFF))
    limit = 64 * path.stat().st_size + (64 << 20)
    tracemalloc.start()
    result = dpuflow.analyze([dpuflow.Vantage("a", (str(path),))])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert result.captures[0].skipped == {"malformed_ip": 1}
    assert peak < limit


def pickled(more: bytes) -> bytes:
    return pickle.dumps({"version": "2.4", "entries": []}, protocol=2)[:-1] + more + b"."


@pytest.mark.parametrize(
    "more",
    [
        b"r\xff\xff\xff\x3f",  # LONG_BINPUT: remember it as the 2**30th object
        b"\x96" + (1 << 40).to_bytes(8, "little"),  # BYTEARRAY8 of 1 TiB
        b"\x8e" + (1 << 40).to_bytes(8, "little"),  # BINBYTES8
        b"\x95" + b"\xff" * 8,  # FRAME
        b"\x8b" + b"\xff" * 4,  # LONG4 of a negative length
        b"(" * 50_000,
    ],
    ids=["memo", "bytearray", "bytes", "frame", "long", "marks"],
)
def test_a_pickle_that_claims_much_takes_no_memory(tmp_path, more):
    """Five bytes asked for 16 GiB, others ended in a traceback."""
    file = tmp_path / "nccl_trace_rank_1"
    file.write_bytes(pickled(more))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError):
        read_recorded(str(file))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("text", ['{"ts": 1e999, "dur": 1}', '{"ts": 1, "dur": 1e308}', "[" * 100_000])
def test_a_trace_with_absurd_numbers_is_one_sentence(tmp_path, text):
    if text[0] == "{":
        event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"}
        whole = json.dumps(event)[:-1] + ", " + text[1:]
        text = '{"traceEvents": [' + whole + "]}"
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(FormatError):
        read_recorded(str(file))


@pytest.mark.parametrize(
    "text", ["capture: " + "[" * 5000, "capture: " + "{a: " * 3000, f"limits: {{memory: {'9' * 5000}}}",
             f"windows: {{span: {'9' * 400}}}", "? |\n  a\n  b\n: 1\n"]
)  # fmt: skip
def test_a_configuration_that_is_none_is_one_sentence(text):
    with pytest.raises(OptionError) as told:
        parse_config(text, "agent.yaml")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["10.0.0.1: " + "[" * 5000, "10.0.0.1: " + "{a: " * 3000])
def test_a_rank_map_nested_without_end_is_one_sentence(tmp_path, text):
    file = tmp_path / "ranks.yaml"
    file.write_text(text)
    with pytest.raises(OptionError, match="not YAML"):
        read_rank_map(str(file))


def test_thousands_of_addresses_have_no_schedules_of_as_many_squared():
    """A star of 800 addresses took minutes and 450 MiB: each schedule it might be part of was laid out."""
    near, ranks = frozenset({0}), 800
    edges = frozenset((0, k) for k in range(1, ranks)) | frozenset((k, 0) for k in range(1, ranks))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for op in (Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.UNKNOWN):
        hypotheses._shapes(op, tuple(range(ranks)), edges, near, 4096)
    assert time.process_time() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150 << 10


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_grants_that_came_all_at_one_time_are_no_crash():
    """The usual time between two of them was the mean of none."""
    same = np.zeros(4, np.int64)
    sending = SimpleNamespace(
        rows=same, grants=same, arrivals=np.arange(4), sizes=same + 9, number=np.arange(4), idle=same,
        starts=same, slots=1,
    )  # fmt: skip
    maybe = parts.Parts._evidence(sending)[0]
    assert maybe.tolist()[0] == 0


def test_a_message_that_nobody_saw_arrive_is_not_held_up_for_centuries():
    """Sent again, never acknowledged: no time minus its sending was taken for when it was there."""
    never, sent = schema.NEVER, 1_700_000_000 * 10**9
    part = np.zeros(3, schema.TRANSFER.dtype)
    part["sent_ns"] = sent
    part["seen"] = [0, schema.Seen.AT_RECEIVER, schema.Seen.AT_RECEIVER]
    part["arrived_end_ns"] = [never, sent + 500, sent + 500]
    part["acked_ns"] = [never, never, sent + 10**7]
    columns = np.zeros((5, 3), np.int64)
    columns[links.FROM], columns[links.UNDER_WAY], columns[links.CARRIED] = sent, 100, 1 << 30
    columns[links.AGAIN] = 1

    class Sent:
        def __getitem__(self, sender):
            return np.arange(3)

        def columns(self, sender):
            return columns

    repeats = SimpleNamespace(without=lambda rows, again: again, answered_ns=10**6)
    joined = SimpleNamespace(transfers=part)
    case = SimpleNamespace(sent=Sent(), repeats=repeats, joined=joined, held_of={})
    since, until = losses.held_by_losses(case, 0)
    assert (until - sent).tolist() == [100, 500, 10**7]
    assert (until - since).tolist() == [0, 400, 10**7 - 100]


def test_pipelines_whose_transfers_have_no_times_are_none():
    """Which of two ends leads was the mean of nothing."""
    view, none = InstanceView(frozenset()), np.full(12, schema.NEVER)
    orders = [[0, 1], [1, 0]] * 3
    instances = [Instance(np.zeros(0, np.int64), Op.SEND_RECV, order, size=8, view=view) for order in orders]
    entries = SimpleNamespace(
        offsets=np.arange(0, 14, 2), enter_ns=none, leave_ns=none, idle_ns=none, credit_ns=none,
        collective=np.repeat(np.arange(6), 2), endpoint=np.concatenate(orders),
    )  # fmt: skip
    assert pipelines.find_pipelines(instances, entries, np.full(12, -1), none) == []


class Counted:
    """Entries of many collectives of two ranks; how often it was asked which are exact, each time of all."""

    def __init__(self, count: int) -> None:
        self.offsets = np.arange(0, 2 * count + 1, 2)
        self.endpoint = np.tile([0, 1], count)
        self.asked = 0

    @property
    def exact(self):
        self.asked += 1
        return self.endpoint == 0


def test_many_collectives_seen_in_part_do_not_take_their_square():
    """Two kinds of strangers in turns made 60 s of CPU of 40,000 packets."""
    entries, instance = (
        Counted(1000),
        SimpleNamespace(
            order=(0, 1), view=SimpleNamespace(near=0), hides_ranks=False, placement=SimpleNamespace(nodes=())
        ),
    )
    instances = [instance] * 1000
    assert _seen_with(instances, entries, np.ones(1000, bool)) == {0: [], 1: [0]}
    assert relative.short_of_ranks(entries, instances).all()
    assert entries.asked == 2


def test_each_message_of_a_stretch_is_looked_for_once(tmp_path, monkeypatch):
    """Ever more DATA were tried from the first on again: 22 s of CPU for a MB of cut segments."""
    asked = []
    pick = hidden_gloo.GlooConnection.pick_data
    monkeypatch.setattr(
        hidden_gloo.GlooConnection, "pick_data", lambda self, *given: asked.append(1) or pick(self, *given)
    )
    path = tmp_path / "a.pcap"
    path.write_bytes(shapes.capture(shapes.cut_segments(20_000, random.Random(1))))
    messages = ingest([str(path)]).messages
    assert 100 < len(asked) < 10 * len(messages)
