"""The result in, named conditions with evidence and cost out (``conditions`` has what each rests on).

``build`` runs the detectors, one module a family: ``ranks``, ``hang``, ``bulk``, ``slow``, ``losses``,
``marks``, ``credit``, ``taken`` (of the captures). ``case`` is what they read, ``needs`` what each needs.
"""

from collections.abc import Sequence
from typing import TypeVar

End = TypeVar("End")

_ABOUT_ALL = (
    "straggler", "hang", "node_skew", "host_cpu", "desync", "early_stop_skew", "registration_churn",
)  # fmt: skip


def about(condition: str, endpoints: Sequence[End]) -> Sequence[End]:
    """Of a finding's endpoints those that it is about: who is late or stopped, where the fault is."""
    if condition in _ABOUT_ALL:
        return endpoints
    return endpoints[-1:] if condition == "congestion" else endpoints[:1]


__all__ = ["about"]
