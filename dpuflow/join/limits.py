"""What the captures of a job cannot show, in sentences: endpoints without a capture, cut headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.arrays.ordering import distinct
from dpuflow.messages.cut_entries import NEEDED
from dpuflow.schema.rows import Framing, MessageFlag, Role, Transport, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.join.common import Common
    from dpuflow.schema.tables import CaptureTables


def limits_of(captures: Sequence[CaptureTables], common: Common) -> list[str]:
    """Sentences on what these captures cannot show."""
    limits = []
    for capture, sets in sorted(common.undecided.items()):
        names = " or ".join(address(common.endpoints[ends[0]]) for ends in sets)
        limits.append(
            f"{captures[capture].info.vantage} may sit at {names}: each takes part in all its packets, "
            "so whose clock and times it holds is unknown."
        )
    absent = _not_captured(common)
    if absent:
        shown = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        limits.append(
            f"Not captured at their own nodes: {shown}. "
            "What they sent was seen in transit or on arrival only; capture there, too."
        )
    limits += _cut_entries(captures)
    for tables in captures:
        limits += _cut_headers(tables)
    return limits


def _not_captured(common: Common) -> list[str]:
    """Addresses of endpoints that no capture sits at, if one sits at any."""
    local = {row for rows in common.local for row in rows}
    if not local:
        return []
    flows = common.flows
    # Clients of a service are known by plain streams alone: they are no nodes of the job.
    plain = (flows["transport"] == Transport.TCP) & np.isin(flows["framing"], (Framing.NONE, Framing.UNKNOWN))
    flows = flows[~plain] if (~plain).any() else flows
    ends = distinct(np.concatenate([flows["src"], flows["dst"]]).astype(np.int64))
    return [address(common.endpoints[row]) for row in ends if row not in local]


def _entries(tables: CaptureTables) -> NDArray[np.bool_]:
    """Which messages are NCCL's clear-to-send entries that the snap length cut off."""
    rows = tables.messages
    if not tables.info.snaplen_needed:
        return np.zeros(len(rows), np.bool_)
    cut = (rows["flags"] & np.uint8(MessageFlag.HIDDEN)) != 0
    return np.asarray(cut & (rows["role"] == Role.GRANT) & (rows["wire"] == Wire.ROCE_WRITE), np.bool_)


def _cut_entries(captures: Sequence[CaptureTables]) -> list[str]:
    """A sentence on NCCL's entries beyond the snap length, in all captures."""
    cut = [tables for tables in captures if tables.info.snaplen_needed]
    if not cut:
        return []
    number = sum(int(np.count_nonzero(_entries(tables))) for tables in cut)
    files = [file for tables in cut for file in tables.info.files]
    where = ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
    needed = max(tables.info.snaplen_needed for tables in cut)
    return [
        f"Raise the snap length to at least {needed} bytes: {number:,} of NCCL's clear-to-send entries lie"
        f" beyond it in {where}, behind {needed - NEEDED} bytes of headers, a mirror's"
        " tunnel included."
    ]


def _cut_headers(tables: CaptureTables) -> list[str]:
    """Sentences on messages whose headers a capture has not whole."""
    limits = []
    beyond = (tables.messages["flags"] & np.uint8(MessageFlag.HIDDEN)) != 0
    sends = beyond & np.isin(tables.messages["wire"], (Wire.ROCE_SEND, Wire.ROCE_SEND_IMM))
    sends &= (tables.messages["flags"] & np.uint8(MessageFlag.GAP)) == 0
    if sends.any():
        limits.append(
            f"{tables.info.vantage}: {np.count_nonzero(sends)} messages of libfabric are cut within their"
            " header, so that their operations and communicators are not known: capture with a snap"
            " length of 138 bytes or more."
        )
    hidden = int(np.count_nonzero(beyond & ~sends & ~_entries(tables)))
    if hidden:
        told = (
            "header was cut off by the snap length or lost; its"
            if hidden == 1
            else "headers were cut off by the snap length or lost; their"
        )
        limits.append(f"{tables.info.vantage}: {hidden} message {told} fields are inferred.")
    return limits


def address(endpoint: np.void) -> str:
    """The address of an ENDPOINT row as text."""
    import ipaddress

    value = (int(endpoint["addr_hi"]) << 64) | int(endpoint["addr_lo"])
    whole = ipaddress.IPv6Address(value)
    return str(whole.ipv4_mapped or whole)
