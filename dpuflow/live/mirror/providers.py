"""The ways of mirroring by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from dpuflow.errors import OptionError
from dpuflow.live.mirror.base import CommandMirror, MirrorPlan
from dpuflow.live.mirror.bycard import DocaMirror
from dpuflow.live.mirror.ovs import OvsMirror
from dpuflow.live.mirror.tc import TcMirror, TcSample, TcSoftware

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from dpuflow.live.mirror.base import Commands


class Mirror(Protocol):
    """Copies while a block runs."""

    warnings: list[str]
    """What could not be undone at the end."""
    undone: list[str]
    """What a killed mirror had left, and was undone first."""

    def lines(self) -> list[str]:
        """What is done, and what undoes it, as lines for a shell."""
        ...

    def __enter__(self) -> Mirror:
        """Raises OptionError, MissingError, DpuflowError; all is undone then."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo it all."""
        ...


def _by(commands: type[Commands]) -> Callable[[MirrorPlan], Mirror]:
    return lambda plan: CommandMirror(commands().steps(plan))


PROVIDERS: Final[dict[str, Callable[[MirrorPlan], Mirror]]] = {
    "tc": _by(TcMirror),
    "sample": _by(TcSample),
    "ovs": _by(OvsMirror),
    "doca": DocaMirror,
    "tc-software": _by(TcSoftware),
}


def provider(name: str, plan: MirrorPlan) -> Mirror:
    """The way of that name, with nothing done yet. Raises OptionError, MissingError."""
    if name not in PROVIDERS:
        raise OptionError(f"{name!r} is not a kind of mirror: {', '.join(PROVIDERS)}")
    return PROVIDERS[name](plan)
