"""The join on real captures: one clock, clocks shifted on purpose, and clocks of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dpuflow.ingest import ingest
from dpuflow.join import join
from dpuflow.schema.rows import NEVER, Seen
from dpuflow.schema.tables import CaptureTables

BOTH = Seen.AT_SENDER | Seen.AT_RECEIVER


def read_case(case: Path) -> list[CaptureTables]:
    files = sorted(case.glob("node*.pcap.gz")) + sorted(case.glob("central.pcap.gz"))
    return [ingest([str(file)], file.name.split(".")[0], number) for number, file in enumerate(files)]


def shift(tables: CaptureTables, offset_ns: int, drift: float, origin_ns: int) -> None:
    """Put a capture on a clock of its own."""

    def moved(time: np.ndarray) -> np.ndarray:
        return np.where(
            time == NEVER, time, time + offset_ns + np.rint((time - origin_ns) * drift).astype("i8")
        )

    for rows, names in (
        (tables.messages, ("first_ns", "last_ns", "acked_ns")),
        (tables.flows, ("first_ns", "last_ns")),
    ):
        for name in names:
            rows[name] = moved(rows[name])
    for name in ("first_ns", "last_ns"):
        setattr(tables.info, name, int(moved(np.array([getattr(tables.info, name)]))[0]))


@pytest.mark.parametrize("case", ["gloo_alltoall_256k_n4_late1", "gloo_allreduce_256k_n4_random_central"])
def test_one_clock(shared: Path, case: str) -> None:
    captures = read_case(shared / "captures" / "tcp" / case)
    joined = join(captures)
    assert joined.local[:4] == [[0], [1], [2], [3]]
    assert all(not rows for rows in joined.local[4:])
    assert all(c.method == "trusted" for c in joined.clocks[1:])
    whole = joined.transfers["seen"] == BOTH
    assert whole.mean() > 0.99
    assert (joined.transfers["arrived_ns"] >= joined.transfers["sent_ns"])[whole].mean() > 0.99
    assert joined.flows["messages"].sum() <= sum(t.flows["messages"].sum() for t in captures) // 2 + 10


@pytest.mark.parametrize("case", ["gloo_alltoall_256k_n4_late1", "mpi_allgather_ring_64k_n4_late1"])
def test_clocks_shifted_on_purpose_are_found_again(shared: Path, case: str) -> None:
    captures = read_case(shared / "captures" / "tcp" / case)[:4]
    before = join(captures)
    shifts = [(0, 0.0), (700_000_000, 30e-6), (-1_000_000_000, -50e-6), (2_000, 50e-6)]
    origin_ns = captures[0].info.first_ns
    assert origin_ns is not None
    for tables, (offset_ns, drift) in zip(captures, shifts, strict=True):
        shift(tables, offset_ns, drift, origin_ns)
    after = join(captures)
    for clock, (offset_ns, drift) in zip(after.clocks, shifts, strict=True):
        assert clock.offset_ns == pytest.approx(offset_ns, abs=5_000)
        assert clock.drift_ppb == pytest.approx(drift * 1e9, abs=5_000)
    assert len(after.transfers) == len(before.transfers)
    moved = after.transfers["arrived_ns"] - after.transfers["sent_ns"]
    kept = before.transfers["arrived_ns"] - before.transfers["sent_ns"]
    assert abs(np.median(moved) - np.median(kept)) < 5_000


@pytest.mark.parametrize(
    "case", ["nccl-ar-n3-96k-quiet-random", "ar-ring-n2-64k-late1-5ms", "perftest-read-bw"]
)
def test_clocks_of_virtual_machines(shared: Path, case: str) -> None:
    folder = shared / "captures" / "roce" / case
    truth = {c["capture"]: c for c in json.loads((folder / "meta.json").read_text())["clocks"]}
    joined = join(read_case(folder))
    assert all(c.method == "estimated" for c in joined.clocks[1:])
    assert not joined.local[-1]
    middle_ns = int(np.median(joined.transfers["sent_ns"]))
    first_ns = joined.captures[0].first_ns
    assert first_ns is not None
    for clock, info in zip(joined.clocks[1:], joined.captures[1:], strict=True):
        true = truth.get(f"{info.vantage}.pcap.gz")
        if true is None:  # the switch
            continue
        assert clock.offset_ns is not None
        assert clock.drift_ppb is not None
        assert clock.error_ns is not None
        found = clock.offset_ns + clock.drift_ppb * 1e-9 * (middle_ns - first_ns)
        expected = true["offset_ns"] + true["drift_ppb"] * 1e-9 * (middle_ns - true["at_node0_ns"])
        assert abs(found - expected) < clock.error_ns
    assert (joined.transfers["seen"] == BOTH).mean() > 0.98
    assert (joined.transfers["arrived_ns"] > joined.transfers["sent_ns"]).mean() > 0.98


def from_frame(tables: CaptureTables, frame: int, step_ns: int, rate: float) -> None:
    """Set the capture's clock when packet ``frame`` comes, and let it run at another rate from there on."""
    rows = tables.messages
    begin_ns = int(rows["first_ns"][rows["first_frame"] >= frame].min())
    after = {
        "first_ns": rows["first_frame"] >= frame,
        "last_ns": rows["last_frame"] >= frame,
        "acked_ns": rows["acked_ns"] >= begin_ns,
    }
    for name, later in after.items():
        since = np.rint((rows[name] - begin_ns) * rate).astype("i8")
        rows[name] = np.where(later & (rows[name] != NEVER), rows[name] + step_ns + since, rows[name])
    tables.info.disordered += step_ns < 0


@pytest.mark.parametrize("stepped", [0, 1])
@pytest.mark.parametrize(
    ("step_ns", "rate"),
    [(10**7, 0.0), (-(10**7), 0.0), (10**9, 0.0), (-(10**9), 0.0), (0, 500e-6), (0, -500e-6)],
)
@pytest.mark.parametrize(
    "case",
    ["tcp/mpi_allgather_ring_64k_n4_late1", "roce/ag-ring-n4-64k-late2-10ms", "roce/nccl-ar-n2-256k-clean"],
)
def test_clocks_that_are_set_or_slewed_in_mid_capture(
    shared: Path, case: str, step_ns: int, rate: float, stepped: int
) -> None:
    """Every message is still one transfer, and took as long as it did."""
    captures = read_case(shared / "captures" / case)[:4]
    before = join(captures)
    frame = int(np.quantile(captures[stepped].messages["first_frame"], 0.45))
    from_frame(captures[stepped], frame, step_ns, rate)
    after = join(captures)
    assert len(after.transfers) == pytest.approx(len(before.transfers), rel=0.005)
    key = ["connection", "src", "seq", "role", "wire"]
    took = []
    for joined in (before, after):
        rows = joined.transfers[np.lexsort([joined.transfers[name] for name in key])]
        rows = rows[rows["seen"] == BOTH]
        took.append({tuple(r[key].item()): int(r["arrived_ns"] - r["sent_ns"]) for r in rows})
    common = took[0].keys() & took[1].keys()
    assert len(common) > 0.99 * len(took[0])
    off = np.abs([took[1][each] - took[0][each] for each in common])
    errors = [
        max((c.error_ns if c.tied_ns is None else c.tied_ns) or 0 for c in j.clocks) for j in (before, after)
    ]
    assert np.percentile(off, 99) < sum(errors) + 5_000
    if step_ns and stepped:
        said = " ".join(clock.why for clock in after.clocks) + " ".join(after.limits)
        assert "it was set by" in said
    if step_ns == -(10**9):  # by less than the pause before it no stamp falls behind
        assert any("set back in mid-capture" in text for text in after.limits)


@pytest.mark.parametrize("captured", [4, 3])
def test_what_was_lost_behind_the_tap_arrived_when_it_was_acknowledged(shared: Path, captured: int) -> None:
    """Node 3's capture shows all packets of messages of which its host then dropped some: timeouts."""
    case = shared / "captures/roce/nccl-net-loss-n4-128k"
    transfers = join(read_case(case)[:captured]).transfers
    lossy = transfers[transfers["retransmitted"] > 0]
    assert len(lossy) > 40
    late_ns = lossy["acked_ns"] - lossy["arrived_end_ns"]
    assert np.abs(late_ns).max() < 200_000_000  # a timeout is a second
    assert (lossy["acked_ns"] - lossy["sent_ns"]).max() > 1_000_000_000
    # A reliable connection delivers in order, so no message of it ends before one that was sent before it.
    for connection in np.unique(lossy["connection"]):
        mine = transfers[(transfers["connection"] == connection) & (transfers["retransmitted"] > 0)]
        ends = mine["arrived_end_ns"][np.argsort(mine["seq"], kind="stable")]
        assert (np.diff(ends) > -100_000_000).all()
