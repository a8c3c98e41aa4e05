"""The result in, figures of it out: what operations took and why, what steps pay for communication and loss,
tokens for prompts, what another algorithm would gain, and what the network charges for a message of a size.

Nothing is judged here, and nothing is known of packets: ``operations``, ``whatif`` and ``jobs`` read the
result's lists, ``network`` and ``losses`` what was joined. Where a figure is not told it is None.
"""

from dpuflow.figures.jobs import list_decode, list_tax
from dpuflow.figures.losses import list_loss_tax
from dpuflow.figures.network import list_network_cost
from dpuflow.figures.operations import list_attribution, list_operations
from dpuflow.figures.whatif import list_all_reduce_what_if

__all__ = [
    "list_all_reduce_what_if",
    "list_attribution",
    "list_decode",
    "list_loss_tax",
    "list_network_cost",
    "list_operations",
    "list_tax",
]
