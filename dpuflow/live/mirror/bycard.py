"""Mirroring by DOCA Flow to a scalable function: for as long as the adapter's session stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.live.doca import find_card
from dpuflow.live.doca_session import Session, representor
from dpuflow.live.options import DocaOptions, LiveOptions

if TYPE_CHECKING:
    from types import TracebackType

    from dpuflow.live.mirror.base import MirrorPlan


class DocaMirror:
    """Copies while the block runs."""

    def __init__(self, plan: MirrorPlan) -> None:
        """Raises OptionError for what cannot be."""
        if not plan.to:
            raise OptionError("--to is required for this kind of mirror")
        self._to = representor(plan.to)
        self._options = LiveOptions(
            (plan.source,), protocols=plan.protocols, doca=DocaOptions(peer=plan.peer or "hpf")
        )
        self._peer = representor(self._options.doca.peer)
        self.warnings: list[str] = []
        self.undone: list[str] = []

    def lines(self) -> list[str]:
        """What is done, in words."""
        what = " and ".join(self._options.protocols)
        return [
            f"# DOCA Flow: a root pipe on {self._options.interfaces[0]}; what goes between the uplink and"
            f" {self._peer} of {what} also goes to {self._to}",
            "# at the end: the root pipe is removed, and the kernel's rules forward again",
        ]

    def __enter__(self) -> DocaMirror:
        """Raises OptionError, MissingError, DpuflowError; all is given back then."""
        _, address = find_card(self._options.interfaces[0])
        self._session = Session(self._options, address, self._to)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session.stop()
        except DpuflowError as trouble:
            self.warnings.append(str(trouble))
        try:
            self._session.close()
        except DpuflowError as trouble:
            self.warnings.append(str(trouble))
