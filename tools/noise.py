"""How noisy hosts are, case by case: from entering to the first packet, gaps, acknowledgments, repetitions.

    python tools/noise.py CASE...

A case is a folder with captures of net_ib traffic (clear-to-send entries and WRITEs over RoCE), truth.json
and meta.json, as docs/scoring.md has them: the real ones, or what ``dpuflow synth`` writes. For each the 5th,
25th, 50th, 75th and 95th percentile are printed, so that the noise of simulated hosts can be held against
that of real ones (docs/synth.md).
"""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

ROCE = 4791
WRITES = range(6, 12)
ENDS = (8, 9, 10, 11)
ENTRY = 64
"""Bytes of the largest clear-to-send entry."""


def packets(path: Path) -> dict[str, Ints]:
    """Columns of the RoCE packets over IPv4 of a pcap file; stamps in ns."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    unit = {b"\x4d\x3c\xb2\xa1": 1, b"\xd4\xc3\xb2\xa1": 1000}[raw[:4]]
    rows, at = [], 24
    while at + 16 <= len(raw):
        seconds, part, kept, length = struct.unpack_from("<IIII", raw, at)
        frame = raw[at + 16 : at + 16 + kept]
        at += 16 + kept
        if frame[12:14] != b"\x08\x00" or frame[23] != 17 or frame[36:38] != ROCE.to_bytes(2, "big"):
            continue
        word = struct.unpack_from(">II", frame, 26)
        bth = frame[42:54]
        pair, psn = int.from_bytes(bth[5:8], "big"), int.from_bytes(bth[9:12], "big")
        rows.append((seconds * 10**9 + part * unit, *word, bth[0], pair, psn, length))
    table = np.array(rows, np.int64).reshape(-1, 7)
    return dict(zip(("ns", "src", "dst", "code", "pair", "psn", "length"), table.T, strict=True))


def quantiles(values: NDArray[np.float64], digits: int) -> str:
    """Five of them, as text."""
    if not len(values):
        return "-"
    return " / ".join(f"{value:.{digits}f}" for value in np.percentile(values, (5, 25, 50, 75, 95)))


def gaps_us(table: dict[str, Ints], mine: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Between the packets of messages, those of ``mine``."""
    found = []
    for pair in np.unique(table["pair"][mine]):
        rows = np.flatnonzero(mine & (table["pair"] == pair))
        inside = np.isin(table["code"][rows[1:]], (7, 8, 9)) & (np.diff(table["psn"][rows]) == 1)
        found.append(np.diff(table["ns"][rows])[inside] / 1e3)
    return np.concatenate(found) if found else np.zeros(0)


def acknowledged_ms(table: dict[str, Ints], me: int, data: NDArray[np.bool_]) -> NDArray[np.float64]:
    """From the last packet of a message to the first ACK of it, at its receiver."""
    found = []
    for other in np.unique(table["src"][data & (table["dst"] == me)]):
        ends = data & (table["src"] == other) & np.isin(table["code"], ENDS)
        acks = (table["src"] == me) & (table["dst"] == other) & (table["code"] == 17)
        for pair in np.unique(table["pair"][ends]):
            told: dict[int, int] = {}
            mine = np.flatnonzero((ends & (table["pair"] == pair)) | acks)
            for row in mine.tolist():
                psn = int(table["psn"][row])
                if table["code"][row] != 17:
                    told[psn] = int(table["ns"][row])
                elif psn in told:
                    found.append((int(table["ns"][row]) - told.pop(psn)) / 1e6)
    return np.array(found)


def entered_ms(table: dict[str, Ints], me: int, data: NDArray[np.bool_], enter_ns: list[int]) -> Any:
    """From each entry to the rank's first packet of data after it."""
    sent = table["ns"][data & (table["src"] == me)]
    place = np.searchsorted(sent, enter_ns)
    return np.array([(sent[at] - t) / 1e6 for t, at in zip(enter_ns, place, strict=True) if at < len(sent)])


def report(case: Path) -> None:
    """Print the figures of one case, all nodes together."""
    truth, meta = (json.loads((case / f"{name}.json").read_text()) for name in ("truth", "meta"))
    clocks = {clock["capture"]: clock for clock in meta["clocks"]}
    parts: dict[str, list[NDArray[np.float64]]] = {}
    repeated = total = 0
    for node in meta["nodes"]:
        if node["capture"] is None:
            continue
        table = packets(case / node["capture"])
        me = int.from_bytes(bytes(map(int, node["ip"].split("."))), "big")
        data = np.isin(table["code"], WRITES) & (table["length"] != 58 + 16 + ENTRY)
        clock = clocks[node["capture"]]
        enter_ns = []
        for row in truth["collectives"]:
            true_ns = row["enter_ns"][node["rank"]]
            drift = (true_ns - clock["at_node0_ns"]) * clock["drift_ppb"] / 1e9
            enter_ns.append(round(true_ns + clock["offset_ns"] + drift))
        for name, values in (
            ("entering to first data, ms", entered_ms(table, me, data, enter_ns)),
            ("gaps in messages, sender, us", gaps_us(table, data & (table["src"] == me))),
            ("gaps in messages, receiver, us", gaps_us(table, data & (table["dst"] == me))),
            ("message's end to ACK, ms", acknowledged_ms(table, me, data)),
        ):
            parts.setdefault(name, []).append(values)
        mine = data & (table["src"] == me)
        keys = np.stack([table["pair"][mine], table["psn"][mine]], axis=1)
        total += len(keys)
        repeated += len(keys) - len(np.unique(keys, axis=0))
    print(case.name)
    for name, values in parts.items():
        print(f"  {name:<32} {quantiles(np.concatenate(values), 2)}")
    print(f"  {'packets sent again':<32} {repeated / max(1, total):.2%}")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        report(Path(argument))
