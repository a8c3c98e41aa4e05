"""Captures of one direction alone, as mirrors of a port's ingress and filters make them: a sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from dpuflow.arrays.ordering import is_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.schema.tables import CaptureTables

LEAST: Final = 20
"""Packets: a handful may be the end of what was said before."""


def one_way(captures: Sequence[CaptureTables]) -> list[str]:
    """What is wrong with captures in which nobody is answered."""
    return [
        f"{tables.info.vantage}: only one direction of the traffic was captured, so most entry times are"
        " unknown. Capture both: mirror ingress and egress of a switch port, or check the capture filter."
        for tables in captures
        if _is_one_way(tables)
    ]


def _is_one_way(tables: CaptureTables) -> bool:
    flows = tables.flows[tables.flows["packets"] > 0]
    if int(flows["packets"].sum()) < LEAST:
        return False
    src, dst = flows["src"].astype(np.int64), flows["dst"].astype(np.int64)
    return not bool(is_in(dst << 32 | src, src << 32 | dst).any())
