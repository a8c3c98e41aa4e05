"""Mirroring by Open vSwitch, ovs-vswitchd.conf.db(5): the one that does not take the eSwitch from OVS.

A mirror copies every packet of a port, as it has no filter of protocols; its output port carries nothing else
meanwhile. Other mirrors of the bridge stay.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dpuflow.errors import OptionError
from dpuflow.live.mirror.base import Step, run
from dpuflow.live.mirror.tc import need, receiver

if TYPE_CHECKING:
    from dpuflow.live.mirror.base import MirrorPlan


class OvsMirror:
    """Both directions of a port of a bridge, to another port of it."""

    def steps(self, plan: MirrorPlan) -> list[Step]:
        """Raises OptionError, MissingError, DpuflowError."""
        need(plan, "source", "to")
        if plan.peer:
            raise OptionError("--peer applies to tc and sample only: OVS knows the path")
        bridge = plan.bridge or _bridge_of(plan.source)
        name = f"dpuflow-{os.getpid()}"
        make = (
            *("--", "--id=@from", "get", "port", plan.source),
            *("--", "--id=@to", "get", "port", plan.to),
            *("--", "--id=@mirror", "create", "mirror", f"name={name}"),
            *("select-src-port=@from", "select-dst-port=@from", "output-port=@to"),
            *("--", "add", "bridge", bridge, "mirrors", "@mirror"),
        )
        remove = (
            *("--", "--id=@mirror", "get", "mirror", name),
            *("--", "remove", "bridge", bridge, "mirrors", "@mirror"),
        )
        return [
            *receiver(plan),
            Step(
                ("ovs-vsctl", "add-port", bridge, plan.to),
                ("ovs-vsctl", "--if-exists", "del-port", bridge, plan.to),
                unless=("ovs-vsctl", "port-to-br", plan.to),
            ),
            Step(("ovs-vsctl", *make), ("ovs-vsctl", *remove)),
        ]


def _bridge_of(port: str) -> str:
    """Raises OptionError, MissingError."""
    asked = run(("ovs-vsctl", "--timeout=5", "port-to-br", port))
    if asked.returncode:
        raise OptionError(f"{port}: not a port of an OVS bridge ({' '.join(asked.stderr.split())})")
    return asked.stdout.strip()
