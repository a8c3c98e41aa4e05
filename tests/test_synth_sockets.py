"""NCCL over TCP: one stream of sizes and payloads, right checksums, and a window that closes."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from synth_worlds import loop, played, records, settings

from dpuflow.schema.simulated import LENGTH, SEGMENT_ACK, STREAM
from dpuflow.synth.case import write_case
from dpuflow.synth.sockets import WINDOW, Socket
from dpuflow.synth.stream import SEGMENT

SOCKET = settings(nccl={"transport": "socket"})


def test_streams_hold_sizes_and_payloads_in_a_row() -> None:
    world = played("op: all_reduce, bytes: 3MiB", SOCKET)
    messages = world.trace.messages.read()
    assert set(messages["kind"].tolist()) == {LENGTH, STREAM}
    for flow in {int(f) for f in messages["flow"]}:
        mine = messages["flow"] == flow
        begins, sizes = messages["va"][mine], messages["bytes"][mine]
        assert begins[0] == 0
        assert (begins[1:] == (begins + sizes)[:-1]).all()
        lengths = messages["value"][mine & (messages["kind"] == LENGTH)]
        assert (
            lengths[lengths > 0].tolist() == messages["bytes"][mine & (messages["kind"] == STREAM)].tolist()
        )


def test_a_late_receiver_closes_the_window() -> None:
    late = settings(faults=[{"kind": "slow_host", "rank": 1, "us": 3000}], machine={"run_ahead": 1})
    world = played("op: broadcast, bytes: 32MiB, channels: 1", SOCKET + late, iterations=1)
    replies = world.trace.replies.read()
    assert set(replies["kind"].tolist()) == {SEGMENT_ACK}
    (flow,) = {number for number in set(replies["flow"].tolist()) if world.flows[number].dst.number == 1}
    mine = replies["flow"] == flow
    assert int(replies["msn"][mine].min()) << 8 < WINDOW // 4
    assert int(replies["msn"][mine].max()) << 8 > WINDOW - (1 << 20)
    bursts, messages = world.trace.bursts.read(), world.trace.messages.read()
    sent = int(messages["bytes"][messages["flow"] == flow].sum())
    sizes = (messages["flow"] == flow) & (messages["kind"] == LENGTH)
    assert sent == (32 << 20) + 4 * int(sizes.sum())
    assert (bursts["rx_end_ns"] >= 0).all()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("socket")
    whole = settings(observation={"snaplen": 0, "compress": False})
    write_case(loop("op: all_reduce, bytes: 100003", SOCKET + whole), str(folder))
    return sorted(folder.glob("*.pcap"))


def test_tshark_finds_every_checksum_right_and_no_gap(files: list[Path]) -> None:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    for file in files:
        shown = subprocess.run(
            ["tshark", "-r", str(file), "-o", "ip.check_checksum:TRUE", "-o", "tcp.check_checksum:TRUE",
             "-T", "fields", "-e", "ip.checksum.status", "-e", "tcp.checksum.status",
             "-e", "_ws.expert.message"],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert len(shown) == len(records(file)) > 100
        assert set(shown) == {"1\t1\t"}


def test_the_stream_can_be_read_message_by_message(files: list[Path]) -> None:
    """As a receiver does: a size, so many bytes, a size."""
    streams: dict[bytes, bytes] = {}
    for _, frame in records(files[0]):
        if frame[26:30] == bytes((10, 0, 0, 1)) and len(frame) > 66:
            streams[frame[34:38]] = streams.get(frame[34:38], b"") + frame[66:]
    assert len(streams) == 2  # channels
    for stream in streams.values():
        at, sizes = 0, []
        while at < len(stream):
            (size,) = struct.unpack_from("<i", stream, at)
            sizes.append(size)
            at += 4 + size
        assert at == len(stream)
        assert len(sizes) == 2 * 12  # 2 iterations of 2 (4 - 1) chunks of 2 slices
        assert max(sizes) > SEGMENT


def test_sockets_connect_nodes_alone() -> None:
    inside = settings(nccl={"transport": "socket"}, cluster={"nodes": 2, "gpus_per_node": 4})
    world = played("op: all_reduce, bytes: 1MiB", inside)
    links = [link for link in world.links if isinstance(link, Socket)]
    assert links
    assert all(link.src.node != link.dst.node for link in links)
