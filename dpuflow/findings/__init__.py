"""The result in, named conditions with evidence and advice out.

``build`` has those of ranks and captures, ``network`` those of the network.
"""

from dpuflow.findings.build import build_findings

__all__ = ["build_findings"]
