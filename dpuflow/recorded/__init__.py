"""What a job's own software recorded of its collectives, and how far that agrees with what the packets show.

``read`` tells the kind of a file: Kineto's traces (``kineto``), PyTorch's Flight Recorder (``flight``),
NCCL's log (``nccllog``), its Inspector's lines (``inspector``). ``compare`` lays a rank's calls beside the
collectives of the result. Nothing here changes the result: it is two accounts of one thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.errors import DpuflowError
from dpuflow.recorded.compare import Agreement, compare
from dpuflow.recorded.read import read_recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpuflow.results import Analysis

__all__ = ["Agreement", "compare", "read_recorded", "say_agreement"]


def say_agreement(result: Analysis, files: Iterable[str], say: Callable[[str], object]) -> None:
    """Say of each rank of each file how far it agrees; a bad file is raised when the others are done."""
    bad: Exception | None = None
    for file in files:
        try:
            for each in read_recorded(file):
                say(str(compare(result, each)))
        except (DpuflowError, OSError) as error:
            bad = bad or error
    if bad is not None:
        raise bad
