"""The ways of mirroring by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpuflow.errors import OptionError
from dpuflow.live.mirror.ovs import OvsMirror
from dpuflow.live.mirror.tc import TcMirror, TcSample, TcSoftware

if TYPE_CHECKING:
    from dpuflow.live.mirror.base import Provider

PROVIDERS: Final[dict[str, type[Provider]]] = {
    "tc": TcMirror,
    "sample": TcSample,
    "tc-software": TcSoftware,
    "ovs": OvsMirror,
}


def provider(name: str) -> Provider:
    """The one of that name. Raises OptionError."""
    if name not in PROVIDERS:
        raise OptionError(f"{name!r} is no way of mirroring: {', '.join(PROVIDERS)}")
    return PROVIDERS[name]()
