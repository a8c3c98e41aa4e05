"""What endpoints and captures are called in texts: rank where it is known, address always."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpuflow.quantities import name_of, node_name

if TYPE_CHECKING:
    from dpuflow.results import Analysis, Evidence


class Names:
    """Names of the endpoints and captures of one result."""

    def __init__(self, result: Analysis) -> None:
        self._endpoints = {endpoint.id: endpoint for endpoint in result.endpoints}
        self._captures = {capture.id: capture for capture in result.captures}
        self._together = {row.endpoint: row.together for row in result.lateness if row.together}
        self._nodes = {row.endpoint: row.node for row in result.lateness if row.node is not None}

    def long(self, endpoint: int) -> str:
        """``rank 2 (10.0.0.3, node2 GPU 0)``, or the address alone; of a node its first one."""
        if endpoint in self._nodes:
            return self._node(endpoint)
        return name_of(self._endpoints[endpoint])

    def short(self, endpoint: int) -> str:
        """``rank 2``, or the address with its node, ``10.0.0.3 (node2)``."""
        if endpoint in self._nodes or self._endpoints[endpoint].rank is None:
            return self.long(endpoint)
        return f"rank {self._endpoints[endpoint].rank}"

    def shortest(self, endpoint: int) -> str:
        """``rank 2``, or the address alone, where there is room for no more."""
        row = self._endpoints[endpoint]
        return row.address if row.rank is None and endpoint not in self._nodes else self.short(endpoint)

    def unit(self, endpoint: int, *, long: bool = False) -> str:
        """The same, or the node with those of its ranks that were late together: ``node1 (ranks 4 to 7)``."""
        if endpoint in self._together:
            return node_name([self._endpoints[end] for end in self._together[endpoint]])
        return self.long(endpoint) if long else self.short(endpoint)

    def short_of(self, endpoint: int, width: int) -> str:
        """The longest name that fits ``width`` characters, cut in the middle where none does."""
        for name in (self.long(endpoint), self.shortest(endpoint)):
            if len(name) <= width:
                return name
        half = (width - 2) // 2
        return f"{name[:half]}..{name[-half:]}"

    def _node(self, endpoint: int) -> str:
        """``a GPU of node 10.0.0.3``: which one shows in no packet."""
        return f"a GPU of node {self._endpoints[endpoint].address}"

    def unopenable(self) -> list[str]:
        """Of each capture whose packets no file holds, why not."""
        return [said for each in self._captures.values() if (said := each.unopenable)]

    def where(self, evidence: Evidence) -> str:
        """``See packets 120 to 161 of node2:``, or why Wireshark cannot open them."""
        capture = self._captures[evidence.capture]
        if capture.unopenable:
            return f"{capture.unopenable}; the filter for a capture of the same traffic:"
        first, last = evidence.packets
        frames = f"packet {first}" if first == last else f"packets {first} to {last}"
        return f"See {frames} of {capture.vantage}, in Wireshark:"
