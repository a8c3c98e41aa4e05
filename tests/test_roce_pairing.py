"""Which flows belong together, where several queue pairs join the same two endpoints."""

from __future__ import annotations

import random
import struct

import pytest

from dpuflow.schema.rows import NEVER, NONE32, Pairing, Wire
from tests.blocks import Script
from tests.naive_pairing import udp_port

A, B = 0, 1
PAIRS = [(101, 201), (102, 202), (103, 203), (104, 204)]  # QP at A, QP at B


def names(flows) -> dict[int, int]:
    """Destination QP of each flow from A -> that of its peer, None without."""
    return {
        int(f["dest_qp"]): int(flows["dest_qp"][f["peer"]]) if f["peer"] != NONE32 else None
        for f in flows
        if f["src"] == A
    }


def lockstep(messages: int, jitter_ns: int, seed: int = 0, **more) -> Script:
    """All pairs send the same messages with the same PSNs at about the same time; each is acknowledged."""
    rng = random.Random(seed)
    script = Script()
    for k in range(messages):
        for at_a, at_b in PAIRS:
            t = 100_000 * k + rng.randint(0, jitter_ns)
            script.message(t, A, B, at_b, 4 * k, 4)
            script.ack(t + 10_000 + rng.randint(0, 100), B, A, at_a, 4 * k + 3)
    for p in script.packets:
        for name, value in more.items():
            setattr(p, name, value(p))
    script.packets.sort(key=lambda p: p.time_ns)
    return script


def test_pairs_that_cannot_be_told_apart_stay_unknown():
    messages, flows = lockstep(100, jitter_ns=500).run()
    assert len(messages) == 400
    assert set(names(flows).values()) == {None}
    assert (flows["pairing"] == Pairing.UNKNOWN).all()
    assert (messages["acked_ns"] == NEVER).all()


@pytest.mark.parametrize("seed", range(10))
def test_jitter_tells_pairs_apart(seed):
    messages, flows = lockstep(100, jitter_ns=300_000, seed=seed).run(rows=100)
    found = names(flows)
    right = {b: a for a, b in PAIRS}
    assert all(peer is None or peer == right[qp] for qp, peer in found.items())
    assert found == right
    assert (messages["acked_ns"] != NEVER).all()


def test_source_ports_tell_pairs_apart():
    ports = {qp: udp_port(a, b) for a, b in PAIRS for qp in (a, b)}
    messages, flows = lockstep(20, 500, sport=lambda p: ports[p.qp]).run()
    assert names(flows) == {b: a for a, b in PAIRS}
    assert (flows["pairing"] == Pairing.UDP_PORT).all()
    assert (messages["acked_ns"] != NEVER).all()


def test_udp_port_as_the_kernel_computes_it():
    # From a capture of Soft-RoCE: QP 17 at both ends used port 49441, 24 at both 49728.
    assert udp_port(17, 17) == 49441
    assert udp_port(24, 24) == 49728
    assert udp_port(3, 5) == udp_port(5, 3)


@pytest.mark.parametrize("seed", range(8))
def test_different_psns_tell_pairs_apart(seed):
    rng = random.Random(seed)
    script = Script()
    psn = {b: rng.randrange(1 << 24) for _, b in PAIRS}
    for k in range(60):
        at_a, at_b = rng.choice(PAIRS)
        psn[at_b] = script.message(10_000 * k, A, B, at_b, psn[at_b], rng.randint(1, 5))
        script.ack(10_000 * k + 2_000, B, A, at_a, psn[at_b] - 1)
    messages, flows = script.run()
    assert names(flows) == {b: a for a, b in PAIRS}
    assert (messages["acked_ns"] - messages["first_ns"] == 2_000).all()


def mad(attribute: int, body: bytes) -> bytes:
    """A communication management MAD."""
    return bytes([1, 7, 2, 3]) + bytes(12) + struct.pack(">H", attribute) + bytes(6) + body


def test_handshake_names_the_pairs():
    script = Script()
    for k, (at_a, at_b) in enumerate(PAIRS):
        request = struct.pack(">I28xI", 7000 + k, at_a << 8)
        reply = struct.pack(">II4xI", 9000 + k, 7000 + k, at_b << 8)
        more = {"payload": 256, "src_qp": 1}
        script.add(10 * k, A, B, 1, "UD_SEND_ONLY", 2 * k, data=mad(0x10, request), **more)
        script.add(10 * k + 5, B, A, 1, "UD_SEND_ONLY", 2 * k, data=mad(0x13, reply), **more)
    script.packets += lockstep(20, 500).packets
    messages, flows = script.run(rows=16)
    set_up = messages[messages["wire"] == Wire.ROCE_CM]
    assert set_up["tag"].tolist() == [0x10, 0x13] * 4
    assert {qp: peer for qp, peer in names(flows).items() if qp > 1} == {b: a for a, b in PAIRS}
    data = flows[flows["dest_qp"] > 1]
    assert (data["pairing"] == Pairing.HANDSHAKE).all()
    assert (messages["acked_ns"][messages["wire"] == Wire.ROCE_WRITE] != NEVER).all()


def test_cut_handshake_names_nothing():
    script = Script()
    cut = mad(0x10, b"")[:20], mad(0x10, bytes(34)), mad(0x13, bytes(14)), mad(0x13, bytes(40))
    for data in (b"", b"\1", *cut):
        script.add(0, A, B, 1, "UD_SEND_ONLY", 0, data=data, src_qp=len(data))
    messages, flows = script.run()
    assert len(messages) == 6
    assert flows["peer"].tolist() == [NONE32]


def test_a_single_exchange_is_paired_as_the_only_one():
    script = Script()
    script.message(0, A, B, 201, 0, 1, kind="UC_SEND")
    script.message(0, B, A, 101, 0, 1, kind="UC_SEND")
    _, flows = script.run()
    assert flows["pairing"].tolist() == [Pairing.ONLY] * 2


def test_acks_of_another_pair_are_not_taken_for_ones_own():
    """The capture holds the data of one pair and the ACKs of another."""
    script = Script()
    for k in range(50):
        script.message(10_000 * k, A, B, 201, 4 * k, 4)
        script.ack(10_000 * k + 1_000, B, A, 102, 0x5000 + 4 * k)
    messages, flows = script.run()
    assert flows["peer"].tolist() == [NONE32, NONE32]
    assert (messages["acked_ns"] == NEVER).all()
