"""Written cases: same seed, same bytes; tshark and the ICRC find nothing wrong; score reads them."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from synth_worlds import loop, records, settings

import dpuflow
from dpuflow.packets.icrc import icrc_of
from dpuflow.scoring.score import score_files
from dpuflow.synth.case import write_case
from dpuflow.synth.scenario import parse_scenario

WHOLE = settings(observation={"snaplen": 0, "compress": False})
OPS = {
    "simple": ("op: all_reduce, bytes: 100003", ""),
    "2.18": ("op: all_reduce, bytes: 64KiB", settings(nccl={"version": "2.18"})),
    "acks": ("op: all_reduce, bytes: 2MiB", settings(machine={"ack_packets": 16})),
    "ll": ("op: all_reduce, bytes: 64KiB, protocol: ll", ""),
    "small mtu": ("op: all_to_all, bytes: 100001", settings(cluster={"mtu": 256, "nodes": 3})),
    "routed": ("op: all_reduce, bytes: 1MB", settings(nccl={"adaptive_routing": True})),
    "congestion": ("op: all_to_all, bytes: 16MiB",
                   settings(cluster={"ecn_kib": 64}, faults=[{"kind": "slow_link", "node": 1, "gbps": 10}])),
    "reads": ("", settings(job={"kind": "prefill_decode", "mode": "read", "requests": 2,
                                  "kv_bytes": 100_001})),
    "reads with notices": ("", settings(job={"kind": "prefill_decode", "mode": "read", "requests": 3,
                                             "notice": "send", "prefill_us": 200, "kv_bytes": 700_001,
                                             "page_bytes": 20_000})),
    "reads lost": ("", settings(job={"kind": "prefill_decode", "mode": "read", "requests": 3,
                                     "notice": "send", "kv_bytes": 700_001, "page_bytes": 100_000},
                                nccl={"timeout": 8}, faults=[{"kind": "loss", "share": 0.01}])),
    "layers with notices": ("", settings(job={"kind": "prefill_decode", "layerwise": True, "requests": 2,
                                              "notice": "send", "kv_bytes": 300_000, "page_bytes": 4096})),
    "atomics": ("", settings(job={"kind": "experts", "steps": 1, "layers": 1, "tokens": 5})),
    "atomics lost": ("", settings(job={"kind": "experts", "steps": 2, "layers": 1, "tokens": 5},
                                  nccl={"timeout": 8}, faults=[{"kind": "loss", "share": 0.01}])),
    "pxn": ("op: all_to_all, bytes: 600001", settings(cluster={"nodes": 2, "gpus_per_node": 4})),
    "doubling": ("op: all_reduce, bytes: 100001, algorithm: doubling", ""),
    "loss": ("op: all_reduce, bytes: 1MiB",
             settings(nccl={"timeout": 8}, faults=[{"kind": "loss", "share": 0.01}])),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(OPS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    op, more = OPS[request.param]
    scenario = loop(op, more + WHOLE) if op else parse_scenario(more + WHOLE, "test.yaml")
    write_case(scenario, str(folder))
    return folder


def test_every_icrc_is_right(case: Path) -> None:
    for file in sorted(case.glob("*.pcap")):
        results = [icrc_of(frame) for _, frame in records(file)]
        assert len(results) > 100
        assert all(result is not None and result.ok for result in results)


def test_tshark_has_no_complaint(case: Path) -> None:
    if shutil.which("tshark") is None:
        pytest.skip("tshark is not installed")
    for file in sorted(case.glob("*.pcap")):
        shown = subprocess.run(
            ["tshark", "-r", str(file), "-T", "fields", "-e", "infiniband.bth.opcode", "-e", "_ws.malformed",
             "-e", "_ws.expert.message", "-e", "ip.checksum.status", "-o", "ip.check_checksum:TRUE"],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        assert len(shown) == len(records(file))
        for line in shown:
            opcode, *complaints = line.split("\t")
            assert opcode
            assert complaints == ["", "", "1"]


def test_stamps_are_in_order_and_both_ends_saw_the_same_frames(case: Path) -> None:
    seen: dict[str, list[bytes]] = {}
    for file in sorted(case.glob("*.pcap")):
        stamps = [stamp for stamp, _ in records(file)]
        assert stamps == sorted(stamps)
        for _, frame in records(file):
            # What the network may change: addresses, TTL and header checksum, and the mark of congestion.
            fixed = frame[12:15] + frame[16:22] + frame[23:24] + frame[26:]
            own = int(file.stem.removeprefix("node")) + 1 == int.from_bytes(frame[28:30], "big")
            side = "sent" if own else "received"
            seen.setdefault(side, []).append(fixed)
    lost = Counter(seen["sent"])
    lost.subtract(seen["received"])
    assert min(lost.values()) == 0  # nothing came that nobody sent
    faults = json.loads((case / "meta.json").read_text())["fault"]["network"] or []
    assert (max(lost.values()) > 0) == any(fault["kind"] == "loss" for fault in faults)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    noisy = settings(
        faults=[{"kind": "gpu_late", "us": 50, "mode": "random"}, {"kind": "loss", "share": 0.001}],
        observation={"loss": 0.01, "vantages": "both", "clocks": {"offset_us": 50, "drift_ppm": 5}},
        nccl={"timeout": 8},
    )
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_case(loop("op: all_reduce, bytes: 1MiB", noisy + f"seed: {seed}\n"), str(tmp_path / name))
    first, again, other = (content(tmp_path / name) for name in "abc")
    assert first == again
    assert all(first[name] != other[name] for name in first)


def test_what_is_written_is_read_and_scored(tmp_path: Path) -> None:
    late = settings(faults=[{"kind": "gpu_late", "rank": 2, "us": 500}],
                    observation={"clocks": {"offset_us": 3000, "drift_ppm": 10}})  # fmt: skip
    write_case(loop("op: all_reduce, bytes: 1MiB", late, iterations=12), str(tmp_path))
    files = sorted(tmp_path.glob("node*.pcap.gz"))
    result = dpuflow.analyze([dpuflow.Vantage(file.name, (str(file),)) for file in files])
    dpuflow.write_json(result, str(tmp_path / "r.json"))
    (score,) = score_files([(str(tmp_path / "r.json"), str(tmp_path))], 100_000, 250_000)
    figures = score.figures()
    assert (figures["found_share"], figures["invented_share"], figures["op_right"]) == (1.0, 0.0, 1.0)
    assert (figures["algorithm_right"], figures["bytes_right"], figures["verdicts_right"]) == (1.0, 1.0, 1)
    assert score.late_hits == 12
    assert max(score.clock_errors_ns) < 2000


def test_vantage_points_are_those_asked_for(tmp_path: Path) -> None:
    some = settings(observation={"only": [0, 3], "vantages": "both", "compress": False, "snaplen": 64})
    captures = write_case(loop("op: all_reduce, bytes: 1MiB", some), str(tmp_path))
    assert [capture.name for capture in captures] == ["node0.pcap", "node3.pcap", "central.pcap"]
    assert {file.name for file in tmp_path.iterdir()} == {c.name for c in captures} | {
        "truth.json",
        "meta.json",
    }
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert [node["capture"] for node in meta["nodes"]] == ["node0.pcap", None, None, "node3.pcap"]
    central = records(tmp_path / "central.pcap")
    assert max(len(frame) for _, frame in central) == 64
    assert len(central) == captures[2].packets > captures[0].packets


def with_lengths(path: Path) -> list[tuple[int, int, bytes]]:
    """Stamp, stated length and bytes of every record."""
    data, at, found = path.read_bytes(), 24, []
    while at < len(data):
        seconds, nanos, kept, length = struct.unpack_from("<IIII", data, at)
        found.append((seconds * 10**9 + nanos, length, data[at + 16 : at + 16 + kept]))
        at += 16 + kept
    return found


def observed(tmp_path: Path, **observation: object) -> list[tuple[int, int, bytes]]:
    more = settings(observation={"compress": False, "snaplen": 0, **observation})
    write_case(loop("op: all_reduce, bytes: 1MiB", more), str(tmp_path))
    return with_lengths(tmp_path / "node0.pcap")


def test_a_mirror_that_cuts_frames_hides_how_long_they_were(tmp_path: Path) -> None:
    whole, cut = observed(tmp_path / "a"), observed(tmp_path / "b", truncate=70)
    kept = observed(tmp_path / "c", snaplen=70)
    assert len(whole) == len(cut) == len(kept)
    for (stamp, length, frame), mirrored, snapped in zip(whole, cut, kept, strict=True):
        assert mirrored == (stamp, min(length, 70), frame[:70])
        assert snapped == (stamp, length, frame[:70])


def test_a_sample_is_part_of_the_whole(tmp_path: Path) -> None:
    whole, some = observed(tmp_path / "a"), observed(tmp_path / "b", sample=8)
    frames = Counter(frame for _, _, frame in whole)
    frames.subtract(frame for _, _, frame in some)
    assert min(frames.values()) == 0
    assert len(whole) / 8 * 0.7 < len(some) < len(whole) / 8 * 1.3
    meta = json.loads((tmp_path / "b" / "meta.json").read_text())
    assert meta["sample"] == 8
    of_node = meta["captures"][0]
    assert (of_node["packets"], of_node["missed"], of_node["passed"]) == (
        len(some),
        0,
        len(whole) - len(some),
    )
    result = dpuflow.analyze([dpuflow.Vantage("node0", (str(tmp_path / "b" / "node0.pcap"),))])
    assert not [row for row in result.lateness if row.verdict in ("late", "intermittent")]
    assert not result.transfers
