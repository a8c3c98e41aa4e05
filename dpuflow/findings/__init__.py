"""The result in, named conditions with evidence and advice out.

``build`` has those of ranks and captures, ``network`` those of the network.
"""

from collections.abc import Sequence
from typing import TypeVar

from dpuflow.findings.build import build_findings

End = TypeVar("End")


def about(condition: str, endpoints: Sequence[End]) -> Sequence[End]:
    """Of a finding's endpoints those that it is about: who is late or stopped, where the fault is."""
    if condition in ("straggler", "hang"):
        return endpoints
    return endpoints[-1:] if condition == "congestion" else endpoints[:1]


__all__ = ["about", "build_findings"]
