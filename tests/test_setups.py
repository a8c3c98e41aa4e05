"""NCCL's set-up sockets: tshark accepts what is written, the analysis reads it; nonsense pairs nothing."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from feeding import pieces
from synth_worlds import loop, played, settings

from dpuflow.agent.stream import Stream
from dpuflow.ingest import ingest
from dpuflow.messages.bootstrap import Talk, messages_of, read_bootstrap
from dpuflow.messages.exchange import read_exchange, version_number
from dpuflow.messages.setups import MOST_BOOTSTRAP, Bytes, SetupStreams
from dpuflow.schema.rows import Framing, Pairing, Role, Transport, Wire
from dpuflow.schema.tables import CaptureTables
from dpuflow.store.columns import load_tables, save_tables
from dpuflow.synth.case import write_case
from dpuflow.synth.keys.cluster import VERSIONS
from dpuflow.synth.scenario import parse_scenario
from dpuflow.synth.world import Played, play
from dpuflow.wire import nccl as nw

ALL_REDUCE = "op: all_reduce, bytes: 64k"


def case(folder: Path, snaplen: int = 0, ops: str = ALL_REDUCE, **parts: object) -> Played:
    """A job of three nodes with its set-up captured; written to ``folder``."""
    nccl = {"setup": True, **parts.pop("nccl", {})}  # type: ignore[dict-item]
    observation = {"snaplen": snaplen, "compress": False}
    scenario = loop(ops, settings(nccl=nccl, observation=observation, **parts))
    write_case(scenario, str(folder))
    return play(scenario)


def pairs_of(tables: CaptureTables) -> set[tuple[int, int]]:
    return set(zip(tables.setups["src_qp"].tolist(), tables.setups["dst_qp"].tolist(), strict=True))


def true_pairs(world: Played, node: int) -> set[tuple[int, int]]:
    """Queue pairs (sender's, receiver's) of the connections that a node has."""
    return {
        (world.ends[flow.number].reply_pair, world.ends[flow.number].queue_pair)
        for link in world.connections
        for flow in link.data
        if node in (flow.src.node, flow.dst.node)
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("snaplen", [0, 128])
def test_queue_pairs_and_ranks_are_read_from_one_node(tmp_path: Path, version: str, snaplen: int) -> None:
    world = case(tmp_path, snaplen, nccl={"version": version}, cluster={"nodes": 5})
    tables = ingest([str(tmp_path / "node1.pcap")])
    assert pairs_of(tables) == true_pairs(world, 1)
    roce = tables.flows[tables.flows["transport"] == Transport.ROCE]
    assert len(roce)
    assert (roce["pairing"] == Pairing.HANDSHAKE).all()
    assert tables.members["rank"].tolist() == [0, 1, 2, 3, 4]
    assert (tables.members["ranks"] == 5).all()
    addresses = [0xFFFF << 32 | int(a.ip) for a in world.network.addresses]
    assert tables.members["addr_lo"].tolist() == addresses
    assert len(set(tables.members["host"].tolist())) == 5
    since = {"2.18": 218, "2.20": 220, "2.25": 224, "2.29": 227, "2.30": 230}[version]
    assert (tables.setups["since"] == since).all()
    if not snaplen:
        told = {link.fifo_va: link.fifo_rkey for link in world.connections}
        for row in tables.setups:
            assert told[int(row["entries_va"])] == int(row["entries_rkey"])
            assert row["addressed"] == 3
            assert row["mtu"] == 4096


def test_several_queue_pairs_of_a_connection_and_several_nics(tmp_path: Path) -> None:
    world = case(
        tmp_path, nccl={"qps_per_connection": 4}, cluster={"nodes": 2, "gpus_per_node": 2}
    )  # fmt: skip
    tables = ingest([str(tmp_path / "node0.pcap")])
    assert pairs_of(tables) == true_pairs(world, 0)
    for number in np.unique(tables.setups["connection"]).tolist():
        mine = tables.setups[tables.setups["connection"] == number]
        assert mine["place"].tolist() == [0, 1, 2, 3]
    roce = tables.flows[tables.flows["transport"] == Transport.ROCE]
    # ACKs alone, and queue pairs without any message, make flows too: all are told.
    assert (roce["pairing"] == Pairing.HANDSHAKE).all()
    # Two ranks of a node share the address of its sockets.
    assert tables.members["rank"].tolist() == [0, 1, 2, 3]
    assert len(np.unique(tables.members["addr_lo"])) == len(np.unique(tables.members["host"])) == 2


def test_smaller_communicators_have_rings_of_their_own(tmp_path: Path) -> None:
    text = """
job: {kind: training, tp: 2, steps: 1, tp_bytes: 64k, bucket_bytes: 64k}
cluster: {nodes: 4}
nccl: {setup: true}
observation: {compress: false}
"""
    write_case(parse_scenario(text, "test"), str(tmp_path))
    members = ingest([str(tmp_path / "node0.pcap")]).members
    sizes = {int(m["magic"]): int(m["ranks"]) for m in members}
    assert sorted(sizes.values()) == [2, 2, 4]


def test_traffic_that_sets_up_is_no_message_of_the_job(tmp_path: Path) -> None:
    case(tmp_path)
    tables = ingest([str(tmp_path / "node0.pcap")])
    over_tcp = tables.flows["transport"][tables.messages["flow"]] == Transport.TCP
    assert over_tcp.any()
    assert (tables.messages["wire"][over_tcp] == Wire.NCCL_SETUP).all()
    assert (tables.messages["role"][over_tcp] == Role.CONTROL).all()
    spoke = np.unique(tables.messages["flow"][over_tcp])
    assert (tables.flows["framing"][spoke] == Framing.NCCL).all()


def test_data_sockets_begin_with_their_handshake(tmp_path: Path) -> None:
    case(tmp_path, nccl={"transport": "socket"})
    tables = ingest([str(tmp_path / "node0.pcap")])
    wires = set(np.unique(tables.messages["wire"]).tolist())
    assert wires == {Wire.NCCL_SETUP, Wire.NCCL_HELLO, Wire.NCCL_DATA}
    hello = tables.messages[tables.messages["wire"] == Wire.NCCL_HELLO]
    data = tables.messages[tables.messages["wire"] == Wire.NCCL_DATA]
    assert set(hello["flow"].tolist()) == set(data["flow"].tolist())


def test_without_the_setting_nothing_is_added() -> None:
    assert played(ALL_REDUCE).prelude == []


def test_all_of_it_lies_before_the_job_and_each_word_after_what_it_needs() -> None:
    scenario = loop(ALL_REDUCE, settings(nccl={"setup": True}, cluster={"nodes": 6}))
    frames = play(scenario).prelude
    assert max(frame.rx_ns for frame in frames) < 0
    assert all(frame.rx_ns > frame.tx_ns for frame in frames)
    again = play(scenario).prelude
    assert [(f.tx_ns, f.rx_ns, f.leaves, f.comes) for f in frames] == [
        (f.tx_ns, f.rx_ns, f.leaves, f.comes) for f in again
    ]
    # No side acknowledges what has not come.
    sent: dict[bytes, list[tuple[int, int]]] = {}
    for frame in sorted(frames, key=lambda f: f.tx_ns):
        way, back = (
            frame.leaves[26:38],
            frame.leaves[30:34] + frame.leaves[26:30] + frame.leaves[36:38] + frame.leaves[34:36],
        )
        seq, ack = (int.from_bytes(frame.leaves[at : at + 4], "big") for at in (38, 42))
        flags, header = frame.leaves[47], (frame.leaves[46] >> 4) * 4
        end = seq + len(frame.leaves) - 34 - header + (1 if flags & 3 else 0) & 0xFFFFFFFF
        if flags & 16:
            there = [upto for upto, at in sent.get(back, []) if at <= frame.tx_ns]
            assert ack in there, "acknowledged too early"
        sent.setdefault(way, []).append((end, frame.rx_ns))


@pytest.mark.skipif(shutil.which("tshark") is None, reason="needs tshark")
@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_tshark_has_no_complaint(tmp_path: Path, transport: str) -> None:
    case(tmp_path, nccl={"transport": transport}, cluster={"nodes": 3, "nodes_per_leaf": 2})
    for name in ("node0", "node2"):
        done = subprocess.run(
            ["tshark", "-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-r",
             str(tmp_path / f"{name}.pcap"), "-q", "-z", "expert,warn"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "Warn" not in done.stdout
        assert "Errors" not in done.stdout


def test_column_files_keep_what_was_told(tmp_path: Path) -> None:
    case(tmp_path)
    tables = ingest([str(tmp_path / "node0.pcap")])
    save_tables(tables, str(tmp_path / "a.dpuflow"))
    again = load_tables(str(tmp_path / "a.dpuflow"))
    assert (again.setups == tables.setups).all()
    assert (again.members == tables.members).all()
    assert len(again.setups)
    assert len(again.members)


def test_the_real_exchange_of_2_21_is_read(shared: Path) -> None:
    """Cut at 62 bytes of payload: the numbers are there, the addresses are not."""
    folder = shared / "captures" / "roce" / "nccl-ar-n2-256k-clean"
    if not folder.exists():
        pytest.skip("needs the shared captures")
    for name in ("node0", "node1", "central"):
        tables = ingest([str(folder / f"{name}.pcap.gz")])
        assert pairs_of(tables) == {(39, 41), (40, 40)}
        assert (tables.setups["since"] == 220).all()
        roce = tables.flows[tables.flows["transport"] == Transport.ROCE]
        assert (roce["pairing"] == Pairing.HANDSHAKE).all()
        assert {(int(f["dest_qp"]), int(tables.flows["dest_qp"][f["peer"]])) for f in roce} == {
            (39, 41), (41, 39), (40, 40),
        }  # fmt: skip


# -- bytes alone -------------------------------------------------------------------------------


def told(data: bytes, known: int | None = None) -> Bytes:
    """A stream of which the first ``known`` bytes were captured."""
    stream = Bytes(0, MOST_BOOTSTRAP)
    stream.put(0, len(data), data if known is None else data[:known])
    return stream


def metadata(layout: nw.Exchange, numbers: list[int], address: int) -> bytearray:
    word = bytearray(layout.size)
    for place, number in enumerate(numbers):
        at = layout.pair_at + place * layout.pair_bytes
        word[at : at + 4] = number.to_bytes(4, "little")
    word[layout.gid_at : layout.gid_at + 16] = bytes(10) + b"\xff\xff\x0a\x00\x00" + bytes([len(numbers)])
    word[layout.rkey_at : layout.rkey_at + 4] = (77).to_bytes(4, "little")
    word[layout.mtu_at] = 3
    word[layout.address_at : layout.address_at + 8] = address.to_bytes(8, "little")
    return word


def exchange(layout: nw.Exchange, ours: bytes, theirs: bytes) -> tuple[bytes, bytes]:
    shake = nw.MAGIC.to_bytes(8, "little") + (4).to_bytes(4, "little")
    client = shake + bytes(layout.props) + ours + (1).to_bytes(4, "little")
    return client, bytes(layout.props) + theirs


@pytest.mark.parametrize("layout", nw.EXCHANGES, ids=lambda layout: layout.since)
def test_each_version_is_told_by_its_length(layout: nw.Exchange) -> None:
    ours, theirs = metadata(layout, [9, 10, 11], 0x7000), metadata(layout, [7, 5, 6], 0)
    client, server = exchange(layout, bytes(ours), bytes(theirs))
    found = read_exchange(told(client), told(server))
    assert found is not None
    assert found.since == version_number(layout.since)
    assert [pair[:2] for pair in found.pairs] == [(9, 7), (10, 5), (11, 6)]
    assert (found.mtu, found.entries_va, found.pairs[0].rkey) == (1024, 0x7000, 77)
    assert found.pairs[0].src_gid == (0, 0xFFFF0A000003)
    # Half of it is none; the last word may be missing.
    assert read_exchange(told(client[:-4]), told(server)) is not None
    for cut in (5, layout.size // 2, len(server) - 1):
        assert read_exchange(told(client), told(server[:cut])) is None
    # Where the snap length leaves the first queue pair, that one is told.
    first = layout.props + layout.pair_at + 24
    cut_off = read_exchange(told(client, nw.HANDSHAKE + first), told(server, first))
    assert cut_off is not None
    assert cut_off.pairs[0] == (9, 7, None, None, 0)


def test_lengths_tell_versions_apart() -> None:
    assert len({layout.client_bytes for layout in nw.EXCHANGES}) == len(nw.EXCHANGES)
    assert len({layout.server_bytes for layout in nw.EXCHANGES}) == len(nw.EXCHANGES)


@pytest.mark.parametrize("seed", range(60))
def test_nonsense_raises_nothing_and_names_nobody(seed: int) -> None:
    """Random bytes, cut and torn, as exchange and as bootstrap; lengths of real ones now and then."""
    draw = random.Random(seed)
    sizes = [layout.client_bytes for layout in nw.EXCHANGES]
    sizes += [layout.server_bytes for layout in nw.EXCHANGES] + [16 + hello.size for hello in nw.HELLOS]

    def torn() -> Bytes:
        size = draw.choice([draw.randrange(1, 5000), draw.choice(sizes)])
        stream = Bytes(draw.randrange(1 << 32), draw.choice([64, 8192]))
        for _ in range(draw.randrange(1, 6)):
            at = draw.randrange(size)
            length = draw.randrange(1, size - at + 1)
            stream.put(stream.base + at & 0xFFFFFFFF, length, draw.randbytes(draw.randrange(length + 1)))
        stream.put(stream.base + size - 1 & 0xFFFFFFFF, 1, b"")
        return stream

    one, other = torn(), torn()
    found = read_exchange(one, other)
    for pair in found.pairs if found is not None else ():
        assert 0 < pair.src_qp < 1 << 24
        assert 0 < pair.dst_qp < 1 << 24
    messages_of(one, draw.randrange(20))
    members, _ = read_bootstrap(
        {0: Talk(one, other, True), 1: Talk(other, None, True), 2: Talk(one, None, False)}
    )
    assert members == []


def test_two_sizes_of_one_communicator_are_believed_neither() -> None:
    def hello(rank: int, ranks: int) -> Talk:
        layout = nw.HELLOS[-1]
        word = bytearray(layout.size)
        word[:4], word[4:8] = rank.to_bytes(4, "little"), ranks.to_bytes(4, "little")
        word[layout.root_address_at : layout.root_address_at + 8] = b"\2\0\x12\x34\x0a\0\0\1"
        shake = b"unknown!" + (1).to_bytes(4, "little")
        return Talk(told(shake + len(word).to_bytes(4, "little") + bytes(word)), None, True)

    members, understood = read_bootstrap({0: hello(0, 4), 1: hello(1, 4)})
    assert [member[4:] for member in members] == [(0, 4), (1, 4)]
    assert understood == {0, 1}
    assert read_bootstrap({0: hello(0, 4), 1: hello(1, 8)})[0] == []


def test_ports_used_again_are_read_again(tmp_path: Path) -> None:
    """A flow whose SYN comes again begins anew; its older queue pairs stay told."""
    case(tmp_path, cluster={"nodes": 2})
    data = (tmp_path / "node0.pcap").read_bytes()
    (tmp_path / "twice.pcap").write_bytes(data + data[24:])
    once, twice = ingest([str(tmp_path / "node0.pcap")]), ingest([str(tmp_path / "twice.pcap")])
    assert pairs_of(once) == pairs_of(twice)


def fed(path: Path, step_ns: int = 10**9) -> Iterator[Stream]:
    """A stream that takes in a capture piece by piece, as it is after each."""
    stream = Stream("node1")
    for _, form, records in pieces(path, step_ns):
        stream.feed(form, records)
        yield stream


def followed_by(stream: Stream) -> SetupStreams:
    assert stream._tcp is not None
    return stream._tcp.setups


def test_other_protocols_are_not_followed_for_good() -> None:
    """Gloo's messages begin like a socket's type; a capture of weeks must not keep what they carry."""
    path = Path(__file__).resolve().parents[1] / "traces" / "gloo-allreduce-n4" / "node0.pcap.gz"
    *_, stream = fed(path)
    assert followed_by(stream)._kept == 0


def test_idle_streams_are_let_go_of_unless_they_name_ranks(tmp_path: Path) -> None:
    case(tmp_path, cluster={"nodes": 3})
    *_, stream = fed(tmp_path / "node1.pcap")
    followed, flows = followed_by(stream), stream._reader.flows
    nonsense = Bytes(0, MOST_BOOTSTRAP)
    nonsense.put(0, 12, random.Random(1).randbytes(8) + nw.BOOTSTRAP.to_bytes(4, "little"))
    at = int(np.flatnonzero(flows["transport"] == Transport.ROCE)[0])
    followed._streams[at], followed._clients[at] = nonsense, nw.BOOTSTRAP
    before = followed.finish(flows)[1]
    followed.release(np.ones(len(flows), bool), flows)
    assert at not in followed._streams
    assert len(before) == 3
    assert followed.finish(flows)[1].tolist() == before.tolist()


def test_a_copy_is_not_changed_by_what_comes_later(tmp_path: Path) -> None:
    case(tmp_path, cluster={"nodes": 3})
    taken = []
    for stream in fed(tmp_path / "node1.pcap", 100_000):
        if stream._tcp is not None and len(taken) < 60:
            copied = followed_by(stream).copy()
            kept = {flow: bytes(each.data) for flow, each in copied._streams.items()}
            taken.append((copied, kept))
    assert len({len(kept) for _, kept in taken}) > 2
    for copied, kept in taken:
        assert {flow: bytes(each.data) for flow, each in copied._streams.items()} == kept
