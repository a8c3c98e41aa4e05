"""Captures in which every packet stands twice, as mirrors of both directions of all ports make them, and
captures of several nodes merged into one: tables in, the same out with each packet counted once.

The copies look like retransmissions. But loss does not repeat message after message, packet for packet,
exactly once; what does is a receiver that is never ready, and it says so by RNR NAKs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.schema.tables import CaptureTables

LEAST: Final = 20
"""Messages: were each sent again as likely as not, 3/4 of so many would be in 2 % of captures, and no job
works under such loss."""
_HALVED: Final = {
    "flows": ("packets", "bytes", "ecn_marked", "cnp", "nak", "rnr", "zero_window", "spurious"),
    "endpoints": ("packets_out", "packets_in"),
}


def count_once(captures: Sequence[CaptureTables]) -> tuple[list[CaptureTables], list[str]]:
    """All captures, those that hold each packet twice counted once; a sentence on each of these."""
    doubled = [is_doubled(tables) for tables in captures]
    counted = [_once(tables) if twice else tables for tables, twice in zip(captures, doubled, strict=True)]
    said = [
        f"{tables.info.vantage}: nearly every packet is in this capture twice: a mirror of both directions of"
        " all its ports, or merged captures. Copies are not counted as retransmissions, but real ones are"
        " harder to recognise. Mirror one direction, keep each node's capture in a file of its own, or remove"
        " the copies (editcap -d)."
        for tables, twice in zip(captures, doubled, strict=True)
        if twice
    ]
    return counted, said


def is_doubled(tables: CaptureTables) -> bool:
    """Whether of three messages in four every packet came exactly twice."""
    messages = tables.messages
    if len(messages) < LEAST:
        return False
    again = np.ascontiguousarray(messages["retransmitted"])
    if 4 * np.count_nonzero(again) < 3 * len(messages):
        return False
    twice = np.count_nonzero(again == messages["packets"])
    return bool(4 * twice >= 3 * len(messages) and 4 * tables.flows["rnr"].sum() < len(messages))


def _once(tables: CaptureTables) -> CaptureTables:
    """Each packet and each retransmission was seen twice: n packets, r times sent again, as n + 2 r more."""
    messages = tables.messages.copy()
    messages["retransmitted"] = _again(messages["retransmitted"], messages["packets"])
    flows, endpoints = tables.flows.copy(), tables.endpoints.copy()
    packets = np.bincount(tables.messages["flow"], tables.messages["packets"], len(flows))
    flows["retransmitted"] = _again(flows["retransmitted"], packets)
    for rows, names in ((flows, _HALVED["flows"]), (endpoints, _HALVED["endpoints"])):
        for name in names:
            rows[name] = (rows[name] + 1) // 2
    return replace(tables, messages=messages, flows=flows, endpoints=endpoints)


def _again(seen: NDArray[np.generic], packets: NDArray[np.generic]) -> NDArray[np.int64]:
    """How often packets were truly sent again."""
    return np.maximum(seen.astype(np.int64) - packets.astype(np.int64), 0) // 2
