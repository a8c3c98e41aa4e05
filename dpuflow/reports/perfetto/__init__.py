"""``--perfetto``: the result as a trace for ui.perfetto.dev: a track of slices for each rank, findings.

In: an ``Analysis``. Out: Perfetto's protobuf. Times are the JSON's to the nanosecond.
"""

from __future__ import annotations

from dpuflow.reports.perfetto.trace import write_perfetto

__all__ = ["write_perfetto"]
