"""Random connections through the kernels and through their slow twin."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dpuflow.schema.rows import NEVER, MessageFlag
from tests.blocks import CODES, Packet, Script
from tests.naive_roce import messages_of
from tests.test_roce import QA, QB, A, B, exchange

if TYPE_CHECKING:
    from collections.abc import Sequence

DATA, ACKS = (A, B, QB), (B, A, QA)
FIELDS = (
    "seq",
    "packets",
    "bytes",
    "rkey",
    "first_ns",
    "last_ns",
    "acked_ns",
    "retransmitted",
    "tag",
    "flags",
)


def sent(rng: random.Random, start: int, kinds: Sequence[str] = ("RC_WRITE", "RC_SEND")) -> list[Packet]:
    """Packets of random messages in order of PSN; times are set later."""
    script = Script()
    psn = start
    for k in range(rng.randint(20, 60)):
        kind = rng.choice(kinds)
        imm = rng.choice([None, k + 1])
        packets, last = rng.choice([1, 1, 2, 3, 9]), rng.randint(1, 9)
        psn = script.message(0, A, B, QB, psn, packets, kind=kind, imm=imm, last=last, rkey=k + 1)
    return script.packets


def on_the_wire(rng: random.Random, packets: list[Packet], shuffle: bool) -> list[Packet]:
    """The same with packets sent again, captured twice and out of order."""
    out: list[Packet] = []
    at = 0
    while at < len(packets):
        out.append(packets[at])
        if rng.random() < 0.05:
            out.append(packets[at])
        if rng.random() < 0.02:
            at = max(at - rng.randint(0, 12), 0)  # go back
        else:
            at += 1
    if shuffle:
        for _ in range(len(out) // 20):
            i = rng.randrange(len(out) - 4)
            j = i + rng.randint(1, 3)
            out[i], out[j] = out[j], out[i]
    return out


def stamped(
    rng: random.Random, packets: list[Packet], start: int, first_ns: int, naks: float = 0.1
) -> list[Packet]:
    """Copies with rising times, and ACKs of what has come without a hole, a share of them ``naks``."""
    out: list[Packet] = []
    seen: set[int] = set()
    whole, time_ns = start, first_ns
    for p in packets:
        time_ns += rng.randint(1, 1000)
        out.append(Packet(**{**p.__dict__, "time_ns": time_ns}))
        seen.add(p.psn)
        while whole & 0xFFFFFF in seen and whole - start < len({q.psn for q in packets}):
            whole += 1
        if whole > start and rng.random() < 0.3:
            time_ns += rng.randint(1, 1000)
            back = rng.choice([0, 0, 0, 5]) if whole - 5 > start else 0
            nak = rng.random() < naks
            psn = whole if nak else whole - 1 - back
            syndrome = 0x60 if nak else 0x1F
            out.append(Packet(time_ns, B, A, QA, "RC_ACKNOWLEDGE", psn & 0xFFFFFF, syndrome=syndrome))
    return out


def equals_its_twin(rng: random.Random, script: Script) -> tuple[np.ndarray, np.ndarray, list[dict]]:
    """Messages and flows of the script, and the slow twin's messages, which are found to be the same.

    Of messages that were parted late, when they began is left out: that was not noted.
    """
    expected = messages_of(script.packets, DATA, ACKS)
    messages, flows = script.run(rng.choice([1, 10, 64, 10_000]))
    messages = messages[flows["dest_qp"][messages["flow"]] == QB]
    messages = messages[np.argsort(messages["seq"], kind="stable")]
    assert len(messages) == len(expected)
    for got, wanted in zip(messages, expected, strict=True):
        values = {name: int(got[name]) for name in FIELDS}
        assert values["first_ns"] <= values["last_ns"]
        if values["flags"] & MessageFlag.REORDERED:
            values["flags"] -= MessageFlag.REORDERED
            values["first_ns"] = wanted["first_ns"]
        assert values == wanted
    assert flows["missing"].sum() == 0
    return messages, flows, expected


@pytest.mark.parametrize("seed", range(60))
def test_random_connection_equals_its_twin(seed):
    rng = random.Random(seed)
    script = Script()
    start = rng.choice([0, 7, 0xFFFFC0, 0x800000, 0xFFFFFF])
    psn = exchange(script, 10, start=start) & 0xFFFFFF
    script.packets += stamped(rng, on_the_wire(rng, sent(rng, psn), shuffle=seed % 2 == 1), psn, 1_000_000)
    if seed % 3 == 0:
        script.packets = script.packets[rng.randint(0, 4) : -rng.randint(1, 9)]
    messages, flows, expected = equals_its_twin(rng, script)
    for got, wanted in zip(messages, expected, strict=True):
        assert wanted["first_ns"] <= got["first_ns"] <= wanted["last_ns"]
    # What was sent again, apart from packets from before the capture's first
    again = sum(int(m["retransmitted"]) for m in messages)
    assert again <= flows["retransmitted"].sum() <= again + 30


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [40, 200])
def test_packets_that_take_many_paths(seed, width):
    """So far out of order that dozens of holes are open: messages are whole, and nothing was sent again."""
    rng = random.Random(seed)
    script = Script()
    psn = exchange(script, 10, start=rng.choice([0, 7, 0xFFFFC0, 0x800000, 0xFFFFFF])) & 0xFFFFFF
    packets = sent(rng, psn, ("RC_WRITE",))
    place = {at: at + rng.uniform(0, width) * (at > 0) for at in range(len(packets))}
    packets = [packets[at] for at in sorted(place, key=lambda at: place[at])]
    script.packets += stamped(rng, packets, psn, 1_000_000, naks=0.0)
    _, flows, _ = equals_its_twin(rng, script)
    assert not flows["retransmitted"].any()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("kinds", "width"), [(("RC_WRITE", "RC_SEND"), 4), (("RC_WRITE",), 6)])
@pytest.mark.parametrize("seed", range(20))
def test_packets_all_out_of_order(seed, kinds, width, again):
    """Every packet up to ``width`` places from its own, so that ends and beginnings of messages swap."""
    rng = random.Random(seed)
    script = Script()
    psn = exchange(script, 10, start=rng.choice([0, 7, 0xFFFFC0, 0x800000, 0xFFFFFF])) & 0xFFFFFF
    packets = sent(rng, psn, kinds)
    if again:
        packets = on_the_wire(rng, packets, shuffle=False)
    place = {at: at + rng.uniform(0, width) for at in range(len(packets))}
    packets = [packets[at] for at in sorted(place, key=lambda at: place[at])]
    script.packets += stamped(rng, packets, psn, 1_000_000)
    equals_its_twin(rng, script)


@pytest.mark.parametrize("seed", range(30))
def test_lost_by_the_capture(seed):
    """Every message's packets and the missing ones add up to what was sent, whatever is lost."""
    rng = random.Random(seed)
    script = Script()
    total = 3 * 200
    psn = exchange(script, 200, start=0xFFFF00, packets=3)
    exchange(script, 1, start=psn, packets=1, first_ns=10_000_000)
    data = [p for p in script.packets[40:-2] if p.src == A]
    lost = {id(p) for p in data if rng.random() < 0.1}
    script.packets = [p for p in script.packets if id(p) not in lost]
    messages, flows = script.run(rng.choice([5, 100]))
    messages = messages[flows["dest_qp"][messages["flow"]] == QB]
    assert int(messages["packets"].sum()) + len(lost) == total + 1
    assert flows["missing"][0] == len(lost)
    assert flows["retransmitted"].sum() == flows["out_of_order"].sum() == 0
    whole = messages[messages["flags"] == 0]
    hurt = {(p.psn - 0xFFFF00) % 2**24 // 3 for p in data if id(p) in lost}
    assert len(whole) == 201 - len(hurt)
    assert (messages["acked_ns"] != NEVER).all()


@pytest.mark.parametrize("seed", range(40))
def test_packets_that_make_no_sense(seed):
    """Any opcode after any other: every packet is counted, and where blocks end makes no difference."""
    rng = random.Random(seed)
    script = Script()
    usual = rng.sample(list(CODES), rng.randint(1, 6))
    for k in range(400):
        src = rng.randint(0, 1)
        script.add(
            10 * k,
            src,
            rng.choice([1 - src, 1 - src, src]),
            rng.choice([1, 5, 6]),
            rng.choice(usual if rng.random() < 0.9 else list(CODES)),
            rng.choice([k, k // 2, rng.randrange(1 << 24), 0xFFFFF0 + k, 7]),
            payload=rng.choice([0, 64, 1024]),
            length=rng.choice([None, 0, 64, 4096]),
            syndrome=rng.choice([0x1F, 0x60, 0x20]),
            data=bytes(rng.randint(0, 70)),
        )
    messages, flows = script.run(1000)
    again, _ = script.run(7)
    assert sorted(messages.tolist()) == sorted(again.tolist())
    assert flows["messages"].sum() == len(messages)
    assert flows["packets"].sum() == 400
    assert (messages["last_ns"] >= messages["first_ns"]).all()
    assert (messages["seq_end"] > messages["seq"]).all()
