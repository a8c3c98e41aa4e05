"""The pairing kernel for the eye: which of the flows between two endpoints are each other's opposites."""

from __future__ import annotations

import numpy as np

from dpuflow.schema.rows import Pairing

Found = list[tuple[int, int, Pairing]]


def udp_port(qp: int, other_qp: int) -> int:
    """The kernel's UDP source port for a connection with flow label 0 (rdma_flow_label_to_udp_sport)."""
    v = qp * other_qp
    v ^= v >> 20
    v ^= v >> 40
    label = v & 0xFFFFF
    return 0xC000 | ((label & 0x3FFF) ^ (label >> 14))


def decide(flows, acks, conflicts, echoes, ours: list[int], theirs: list[int], last: bool) -> Found:
    """Pairs of ``ours`` and ``theirs``; ACKs of each flow, ``conflicts`` and ``echoes`` of each two."""
    grid = np.ix_(ours, theirs)
    acks = acks[ours][:, None] + acks[theirs][None, :]
    conflicts, echoes = ((each + each.T)[grid] for each in (conflicts, echoes))
    least = np.minimum(conflicts.min(axis=1)[:, None], conflicts.min(axis=0)[None, :])
    chance = (least + 3 * least**0.5).astype(np.int64).clip(acks // 16, acks // 2)
    excluded = conflicts > np.maximum(chance, 0 if last else 1)
    fits = ~excluded & (acks >= (1 if last else 8)) & (2 * echoes >= acks)
    found = [(ours[a], theirs[b], Pairing.ACKS) for a, b in clear_cut(fits, excluded)]
    rows, columns = left(ours, found), left(theirs, found)
    if not rows or not columns:
        return found
    grid = np.ix_(rows, columns)
    match = np.array([[_same_port(flows[a], flows[b]) for b in theirs] for a in ours])
    by_port = match[grid] & ~excluded[grid] & ((acks[grid] >= 2) | last)
    for a, b in clear_cut(by_port, ~by_port):
        found.append((ours[rows[a]], theirs[columns[b]], Pairing.UDP_PORT))
    rows, columns = left(ours, found), left(theirs, found)
    if last and ours != theirs and len(rows) == len(columns) == 1 and not excluded[rows[0], columns[0]]:
        found.append((ours[rows[0]], theirs[columns[0]], Pairing.ONLY))
    return found


def left(flows: list[int], found: Found) -> list[int]:
    """Places of those that are in no pair found."""
    taken = {flow for a, b, _ in found for flow in (a, b)}
    return [i for i, flow in enumerate(flows) if flow not in taken]


def _same_port(a, b) -> bool:
    """Whether both flows have the source port that the kernel derives from their two QPs."""
    return a["sport"] == b["sport"] == udp_port(int(a["dest_qp"]), int(b["dest_qp"]))


def clear_cut(fits, excluded) -> list[tuple[int, int]]:
    """Pairs that fit where every rival of one of the two is excluded, again and again."""
    excluded = excluded.copy()
    found: list[tuple[int, int]] = []
    while len(found) < min(fits.shape) and fits.any():
        open_ = ~excluded
        alone = fits & open_ & ((open_.sum(1) == 1)[:, None] | (open_.sum(0) == 1)[None, :])
        alone &= (alone.sum(1) == 1)[:, None] & (alone.sum(0) == 1)[None, :]  # two claims on one: neither
        new = [(a, b) for a, b in np.argwhere(alone).tolist()]
        if not new:
            break
        found += new
        for a, b in new:
            excluded[a, :] = True
            excluded[:, b] = True
    return found
