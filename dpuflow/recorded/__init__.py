"""What a job's own software recorded of its collectives, and how far that agrees with what the packets show.

``read`` tells the kind of a file: Kineto's traces (``kineto``), PyTorch's Flight Recorder (``flight``),
NCCL's log (``nccllog``), its Inspector's lines (``inspector``). ``compare`` lays a rank's calls beside the
collectives of the result. Nothing here changes the result: it is two accounts of one thing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.errors import DpuflowError, FormatError
from dpuflow.recorded.compare import Agreement, compare, together
from dpuflow.recorded.read import read_recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dpuflow.results import Analysis

__all__ = ["Agreement", "compare", "read_recorded", "say_agreement", "together"]


def say_agreement(result: Analysis, files: Iterable[str], say: Callable[[str], object]) -> None:
    """Say of each rank of each file how far it agrees, and of all together who was last; a bad file, or one
    of another job, is raised when the others are done."""
    bad: Exception | None = None
    told: list[Agreement] = []
    for file in files:
        try:
            found = [compare(result, each) for each in read_recorded(file)]
            if all(not each.both and each.only_captures for each in found):
                calls = sum(each.only_file for each in found)
                raise FormatError(
                    file,
                    f"cannot be aligned with the captures: too few of its {calls:,} calls match the operation"
                    f" and size of a run of collectives of {', '.join(each.who for each in found)}"
                    " (another job, another time, or too few calls)",
                )
        except (DpuflowError, OSError) as error:
            bad = bad or error
            continue
        told += found
        for each in found:
            say(str(each))
    whole = together(told)
    if whole is not None:
        say(whole)
    if bad is not None:
        raise bad
