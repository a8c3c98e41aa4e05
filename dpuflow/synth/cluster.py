"""Machines of a scenario: ports with addresses, ways between them, queue pair numbers and source ports."""

from __future__ import annotations

from collections import Counter
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, NamedTuple

from dpuflow.synth.flows import Flow, Port
from dpuflow.synth.losses import Losses
from dpuflow.synth.scenario import Flap, Loss, Reorder, SlowLink
from dpuflow.synth.seeds import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dpuflow.synth.scenario import Scenario


class Address(NamedTuple):
    """Of one port."""

    mac: bytes
    ip: IPv4Address


class Ends(NamedTuple):
    """What the headers of a flow say."""

    src: Address
    dst: Address
    queue_pair: int  # of the receiver
    reply_pair: int  # of the sender: where ACKs go
    udp_port: int
    ports: tuple[int, int] = (0, 0)  # of TCP: source and destination; 0: made of the queue pairs


class Network:
    """Ports of all NICs and of each rank, ways and losses."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        cluster = scenario.cluster
        ns_per_byte = 8.0 / cluster.link_gbps
        per_node = cluster.nics_per_node or cluster.gpus_per_node
        self.nics = [Port(i, i // per_node, ns_per_byte) for i in range(cluster.nodes * per_node)]
        share = cluster.gpus_per_node // per_node
        self.ports = [self.nics[rank // share] for rank in range(scenario.ranks)]  # by rank
        random = stream(scenario.seed, "addresses")
        vendor = bytes((0x02, random.randrange(256), random.randrange(256)))
        serials = random.sample(range(1 << 24), len(self.nics) + scenario.clients.hosts)
        self.addresses = [
            Address(
                vendor + serials[port.number].to_bytes(3, "big"),
                IPv4Address(f"10.{port.number % per_node}.{port.node >> 8}.{(port.node & 255)}") + 1,
            )
            for port in self.nics
        ]
        clients = scenario.clients.hosts
        beyond = -(-cluster.nodes // cluster.nodes_per_leaf) * cluster.nodes_per_leaf  # behind the spine
        self.clients = [Port(len(self.nics) + i, beyond + i, ns_per_byte) for i in range(clients)]
        self.addresses += [
            Address(
                vendor + serials[len(self.nics) + i].to_bytes(3, "big"), IPv4Address("172.16.0.0") + 10 + i
            )
            for i in range(clients)
        ]
        for fault in scenario.faults:
            if isinstance(fault, SlowLink) and not fault.from_us:
                self.slow_down(fault)
        leaves = -(-(beyond + clients) // cluster.nodes_per_leaf)
        self.gateways = [vendor + random.randrange(1 << 24).to_bytes(3, "big") for _ in range(leaves + 1)]
        """MAC address of each leaf switch, where what goes over the spine is routed."""
        self._near_ns = cluster.latency_us * 1e3
        self._far_ns = self._near_ns + cluster.hop_us * 1e3
        self._leaf = cluster.nodes_per_leaf
        self._losses: dict[tuple[int, int], Losses | None] = {}
        self._now_us = 0.0

    def slow_down(self, fault: SlowLink) -> None:
        """Links of a node, or of all clients, run at the fault's rate from now on."""
        for port in self._of(fault):
            if fault.where != "down":
                port.up_ns = 8.0 / fault.gbps
            if fault.where != "up":
                port.down_ns = 8.0 / fault.gbps

    def speed_up(self, fault: SlowLink) -> None:
        """They run at their own rate again."""
        for port in self._of(fault):
            port.up_ns = port.down_ns = 8.0 / self.scenario.cluster.link_gbps

    def _of(self, fault: SlowLink) -> list[Port]:
        """The ports whose links it slows."""
        return self.clients if fault.node == "client" else [p for p in self.nics if p.node == fault.node]

    def now_lost(self, us: float) -> None:
        """What is lost at that time, us from the start, is lost from now on."""
        self._now_us = us
        self._losses.clear()

    def near(self, src: Port, dst: Port) -> bool:
        """Whether both are under one leaf switch."""
        return src.node // self._leaf == dst.node // self._leaf

    def gateway(self, port: Port) -> bytes:
        """The MAC address of its leaf switch."""
        return self.gateways[port.node // self._leaf]

    def latency_ns(self, src: Port, dst: Port) -> float:
        """One way between two ports."""
        return self._near_ns if self.near(src, dst) else self._far_ns

    def delays(self) -> Callable[[Flow], float] | None:
        """What a packet takes longer than the latency: its path, and what holds it up; None: nothing ever."""
        cluster = self.scenario.cluster
        held = [fault for fault in self.scenario.faults if isinstance(fault, Reorder)]
        paths = cluster.spray if cluster.spray_us else 1
        if paths == 1 and not held:
            return None
        random = stream(self.scenario.seed, "paths")
        ways: dict[tuple[int, int], list[float]] = {}
        turns: Counter[int] = Counter()

        def longer(flow: Flow) -> float:
            took = sum(random.random() * fault.us * 1e3 for fault in held if random.random() < fault.share)
            if paths == 1 or flow.stream:  # TCP keeps to the path that its ports' hash chose
                return took
            way = (flow.src.number, flow.dst.number)
            if way not in ways:
                ways[way] = [random.random() * cluster.spray_us * 1e3 for _ in range(paths)]
            turns[flow.number] += 1
            return took + ways[way][turns[flow.number] % paths]

        return longer

    def patience_ns(self) -> float:
        """By when a packet that others overtook is there: twice as long as ways differ."""
        held = sum(fault.us for fault in self.scenario.faults if isinstance(fault, Reorder))
        return 2e3 * (self.scenario.cluster.spray_us + held)

    def losses(self, src: Port, dst: Port) -> Losses | None:
        """What is lost between the two nodes; None for nothing."""
        key = (src.node, dst.node)
        if key not in self._losses:
            kept = 1.0
            for fault in self.scenario.faults:
                if not isinstance(fault, Loss) or fault.from_us > self._now_us:
                    continue
                if fault.until_us and fault.until_us <= self._now_us:
                    continue
                here = fault.src in (None, key[0]) and fault.dst in (None, key[1])
                whose = self._whose(*key)
                if here and fault.traffic in ("all", whose, whose.partition("_")[2]):
                    kept *= 1.0 - fault.share
            random = stream(self.scenario.seed, "loss", *key)
            self._losses[key] = Losses(1.0 - kept, random) if kept < 1.0 else None
        return self._losses[key]

    def _whose(self, src: int, dst: int) -> str:
        """Whose traffic goes from node to node, as faults name it."""
        nodes = self.scenario.cluster.nodes
        return "from_clients" if src >= nodes else "to_clients" if dst >= nodes else "fabric"

    def down(self) -> Callable[[Port, float], bool] | None:
        """Whether a port's link is down at a time; None where none ever is."""
        spans: dict[int, list[tuple[float, float]]] = {}
        for fault in self.scenario.faults:
            if isinstance(fault, Flap):
                for i in range(fault.times):
                    begin = (fault.at_us + i * fault.every_us) * 1e3
                    spans.setdefault(fault.node, []).append((begin, begin + fault.us * 1e3))
        if not spans:
            return None
        return lambda port, now: any(begin <= now < end for begin, end in spans.get(port.node, ()))

    def ends(self, pairs: Sequence[tuple[Flow, Flow]], services: Mapping[int, tuple[int, int]]) -> list[Ends]:
        """Headers of all flows, by flow number. ``pairs``: the two directions of each queue pair.

        ``services``: TCP ports of flows to and from a service.
        """
        next_pair = {}
        for port in (*self.nics, *self.clients):
            random = stream(self.scenario.seed, "queue pairs", port.number)
            next_pair[port.number] = random.randrange(0x80, 0x4000)
        found: dict[int, Ends] = {}
        for there, back in pairs:
            number = {}
            for port in (there.src, there.dst):
                number[port.number] = next_pair[port.number]
                next_pair[port.number] += 1
            udp_port = source_port(number[there.src.number], number[there.dst.number])
            for flow in (there, back):
                src, dst = flow.src.number, flow.dst.number
                service = services.get(flow.number, (0, 0))
                found[flow.number] = Ends(
                    self.addresses[src], self.addresses[dst], number[dst], number[src], udp_port, service
                )
        return [found[i] for i in range(len(found))]


def source_port(one: int, other: int) -> int:
    """UDP source port of a queue pair, the same in both directions (rdma_calc_flow_label of the kernel)."""
    value = one * other
    value ^= value >> 20
    value ^= value >> 40
    label = value & 0xFFFFF
    return 0xC000 | ((label & 0x3FFF) ^ (label >> 14))
