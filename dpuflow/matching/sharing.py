"""GPUs that share an adapter, told apart by the ranks that NCCL's clear-to-send entries name.

In: collectives and the entries that allowed their messages. Out: the same, with the GPU behind the sender's
adapter of each message where all ranks' own messages are seen. An entry's tag is the rank whose data it
asks for, whichever adapter sends it (NCCL 2.30, src/transport/net.cc recvProxyProgress). It ends 94 to 126
bytes into an IPv4 frame, by version: shorter records do not hold it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dpuflow.schema.rows import NONE32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from dpuflow.matching.model import Instance
    from dpuflow.schema.tables import Rows


def sharing_told_apart(instances: Sequence[Instance], exchanges: Rows, transfers: Rows) -> list[Instance]:
    """Collectives of more ranks than endpoints, with ``parts`` where every rank sent something of its own."""
    hidden = [i.near is None and i.ranks > len(i.order) and not i.inside for i in instances]
    if not any(hidden):
        return list(instances)
    return [
        replace(instance, parts=_parts(instance, exchanges, transfers)) if several else instance
        for instance, several in zip(instances, hidden, strict=True)
    ]


def _parts(instance: Instance, exchanges: Rows, transfers: Rows) -> NDArray[np.int64] | None:
    """The rank behind each message, None where not every rank of every endpoint is among them."""
    grants = exchanges["grant"][instance.rows]
    if (grants == NONE32).any():
        return None
    rank: NDArray[np.int64] = transfers["tag"][grants].astype(np.int64)
    src = exchanges["src"][instance.rows].astype(np.int64)
    pairs = np.unique(np.stack([src, rank], axis=1), axis=0)
    # A rank is behind one adapter; and all of them are seen. Without a tag all would be rank 0.
    if len(pairs) != instance.ranks or len(np.unique(pairs[:, 1])) != instance.ranks:
        return None
    return rank
