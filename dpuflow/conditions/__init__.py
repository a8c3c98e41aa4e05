"""What a finding may say: a table with one row a condition; docs/runbook.md is made from it (``make docs``).

The conditions come after the three groups of a study of what a DPU can detect in LLM inference (north-south
traffic, the PCIe bus as seen from its edge, east-west traffic); names and words are dpuflow's own. Nothing is
known here of packets or results, so that the agent's configuration and ``--help`` may list them.
"""

from typing import Final

from dpuflow.conditions import client, fabric, host
from dpuflow.conditions.row import Condition

TABLE: Final = {row.name: row for row in (*fabric.ROWS, *client.ROWS, *host.ROWS)}
"""By name, in the order in which findings are listed."""

__all__ = ["TABLE", "Condition"]
