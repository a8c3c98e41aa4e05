"""dpuflow reads packet captures of GPU jobs over RoCE and TCP and says which rank was late.

    >>> import dpuflow
    >>> result = dpuflow.analyze(["node0.pcap.gz", "node1.pcap.gz"])
    >>> [row.address for row in result.lateness if row.verdict == "late"]

The names of ``__all__`` are what users may import from here; they are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpuflow.analysis import analyze
    from dpuflow.errors import (
        CaptureError,
        DpuflowError,
        FormatError,
        MissingError,
        OptionError,
        TruthError,
    )
    from dpuflow.identity.rankmap import read_rank_map
    from dpuflow.loading import load
    from dpuflow.reports.json import write_json
    from dpuflow.reports.text import write_text
    from dpuflow.results import Analysis
    from dpuflow.schema.tables import Vantage
    from dpuflow.scoring.score import score_case

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "CaptureError",
    "DpuflowError",
    "FormatError",
    "MissingError",
    "OptionError",
    "TruthError",
    "Vantage",
    "__version__",
    "analyze",
    "load",
    "read_rank_map",
    "score_case",
    "write_json",
    "write_text",
]

_HOMES = {
    "Analysis": "results",
    "CaptureError": "errors",
    "DpuflowError": "errors",
    "FormatError": "errors",
    "MissingError": "errors",
    "OptionError": "errors",
    "TruthError": "errors",
    "Vantage": "schema.tables",
    "analyze": "analysis",
    "load": "loading",
    "read_rank_map": "identity.rankmap",
    "score_case": "scoring.score",
    "write_json": "reports.json",
    "write_text": "reports.text",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562), so that ``import dpuflow`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpuflow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dpuflow.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
