"""A scenario played: from its settings to what was on the wire and when each rank entered and left."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dpuflow.synth.caches import Endpoint
from dpuflow.synth.cluster import Ends, Network
from dpuflow.synth.congestion import Marking
from dpuflow.synth.engine import Engine
from dpuflow.synth.fabric import Fabric
from dpuflow.synth.flows import Rules
from dpuflow.synth.frames import Framer
from dpuflow.synth.gpu import Gpu
from dpuflow.synth.groups import Communicator
from dpuflow.synth.identities import identities
from dpuflow.synth.jobs import Builder, build
from dpuflow.synth.onesided import Mesh
from dpuflow.synth.packets import at_ports
from dpuflow.synth.pooled import Pool, Pooled
from dpuflow.synth.ranks import Rank, Work
from dpuflow.synth.requests import SERVICE, Session
from dpuflow.synth.scenario import CrossTraffic, Flap, Loss, Nvlink, Pause, Service, SlowLink, SlowPcie, Stop
from dpuflow.synth.seeds import stream
from dpuflow.synth.segments import Streams
from dpuflow.synth.served import FrontEnd, Served, build_service, draw_requests, replica_of
from dpuflow.synth.setup import before_the_job
from dpuflow.synth.sizes import protocols
from dpuflow.synth.sockets import Socket
from dpuflow.synth.timing import Timing, lognormal
from dpuflow.synth.trace import Trace
from dpuflow.synth.transport import LAYOUTS, Connection, Link, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from random import Random

    import numpy as np
    from numpy.typing import NDArray

    from dpuflow.synth.caches import Manner, Transfer
    from dpuflow.synth.conversations import Frame
    from dpuflow.synth.flows import Flow, Port
    from dpuflow.synth.requests import Request
    from dpuflow.synth.scenario import Scenario


@dataclass
class Played:
    """What happened."""

    scenario: Scenario
    network: Network
    trace: Trace
    ends: list[Ends]  # by flow
    flows: list[Flow]
    tags: list[int]  # by flow: rank of the sender of the data its clear-to-send entries ask for
    links: list[Link]
    works: list[Work]
    transfers: list[Transfer]
    requests: list[Request]
    partners: dict[int, int]  # streams that are two ways of one connection, both ways
    communicators: list[tuple[int, ...]]  # ranks of each, that of all first
    end_ns: float

    @cached_property
    def identities(self) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        """Of IP headers: see ``identities.identities``."""
        return identities(self)

    @cached_property
    def framer(self) -> Framer:
        """Makes the frames of all captures."""
        return Framer(self, self.scenario.observation.snaplen)

    @cached_property
    def streams(self) -> Streams:
        """What the ends of TCP connections knew of each other."""
        return Streams(self)

    @cached_property
    def at_ports(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """By node what passes its ports: see ``packets.at_ports``."""
        return at_ports(self)

    @cached_property
    def prelude(self) -> list[Frame]:
        """What set the job up, before time 0."""
        return before_the_job(self)

    @property
    def connections(self) -> list[Connection | Pool]:
        """Links over RoCE; what several share once."""
        return connections_of(self.links)


def connections_of(links: Sequence[Link]) -> list[Connection | Pool]:
    """Those over RoCE that ``links`` go over, each once."""
    found = (link.pool if isinstance(link, Pooled) else link for link in links)
    return list(dict.fromkeys(each for each in found if isinstance(each, (Connection, Pool))))


class _Software:
    """What jobs are built from, each made when it is first asked for."""

    def __init__(self, scenario: Scenario, network: Network, engine: Engine, fabric: Fabric) -> None:
        self._scenario, self._network, self._engine, self._fabric = scenario, network, engine, fabric
        self._settings = _settings(scenario)
        timing = Timing.of(scenario.machine)
        self.gpus = [
            Gpu(rank, port.node, port, engine, timing, _noise(scenario, "gpu", rank))
            for rank, port in enumerate(network.ports)
        ]
        self.groups: dict[tuple[int, ...], Communicator] = {}
        self.endpoints: dict[tuple[int, int], Endpoint] = {}
        self.meshes: dict[tuple[int, ...], Mesh] = {}

    def _on_rail(self, src: Gpu, dst: Gpu) -> Gpu:
        """The GPU of ``src``'s node that owns the NIC on ``dst``'s rail: itself, or the first that has it."""
        cluster = self._scenario.cluster
        rails = len(self._network.nics) // cluster.nodes
        if src.port.number % rails == dst.port.number % rails:
            return src
        share = cluster.gpus_per_node // rails
        return self.gpus[src.node * cluster.gpus_per_node + dst.port.number % rails * share]

    def group(self, members: Sequence[int]) -> Communicator:
        """The communicator of these ranks."""
        key = tuple(members)
        if key not in self.groups:
            self.groups[key] = Communicator(
                [self.gpus[i] for i in key], self._engine, self._fabric, self._settings,
                self._scenario.nccl.channels, self._on_rail,
            )  # fmt: skip
        return self.groups[key]

    def endpoint(self, src: int, dst: int, manner: Manner) -> Endpoint:
        """What moves caches between two ranks."""
        key = (src, dst)
        if key not in self.endpoints:
            draw = stream(self._scenario.seed, "cache", *key, manner.read)
            ends = self.gpus[src], self.gpus[dst]
            self.endpoints[key] = Endpoint(*ends, manner, self._engine, self._fabric, draw)
        return self.endpoints[key]

    def mesh(self, members: Sequence[int], queue_pairs: int, atomic: bool) -> Mesh:
        """The queue pairs of one-sided operations among these ranks."""
        key = tuple(members)
        if key not in self.meshes:
            gpus = [self.gpus[i] for i in key]
            self.meshes[key] = Mesh(gpus, self._engine, self._fabric, queue_pairs, atomic)
        return self.meshes[key]

    def links(self) -> list[Link]:
        """Of all communicators."""
        return [link for each in self.groups.values() for link in each.links()]

    def pairs(self) -> tuple[list[tuple[Flow, Flow]], dict[int, int]]:
        """Flows that are two ways of one connection, and ``Played.tags`` of those that carry grants.

        What only carries data gets its way back here.
        """
        pairs: list[tuple[Flow, Flow]] = []
        tags: dict[int, int] = {}

        def answered(flow: Flow, ignore: Callable[[Flow], None]) -> tuple[Flow, Flow]:
            return flow, self._fabric.connect(flow.dst, flow.src, ignore, ignore)

        links = self.links()
        for connection in connections_of(links):
            tags[connection.grants.number] = connection.src.rank
            pairs.append((connection.data[0], connection.grants))
            pairs += [answered(flow, connection.ignore) for flow in connection.data[1:]]
        pairs += [answered(link.flow, link.ignore) for link in links if isinstance(link, Socket)]
        for each in self.endpoints.values():
            pairs += zip(each.flows, each.backs, strict=True)
        for mesh in self.meshes.values():
            pairs += [answered(flow, lane.ignore) for lane in mesh.lanes() for flow in lane.flows]
        return pairs, tags


def play(scenario: Scenario) -> Played:
    """Simulate. The same scenario gives the same result."""
    engine, trace, network = Engine(), Trace(), Network(scenario)
    fabric = Fabric(engine, trace, _rules(scenario, network))
    software = _Software(scenario, network, engine, fabric)
    sessions = _sessions(scenario, network, engine, fabric)
    builder = Builder(scenario, software.group, software.endpoint, software.mesh)
    if isinstance(scenario.job, Service):
        _serve(scenario, scenario.job, builder, sessions, engine)
    else:
        build(scenario, builder)
    works = builder.works
    ranks = [
        Rank(
            software.gpus[rank], program, engine, scenario.machine.run_ahead,
            stream(scenario.seed, "rank", rank),
        )
        for rank, program in builder.programs.items()
    ]  # fmt: skip
    for begin in (*(rank.start for rank in ranks), *(session.start for session in sessions)):
        engine.at(0.0, begin)
    _begin_faults(scenario, network, engine, fabric)
    engine.run()
    stops = any(isinstance(fault, Stop) for fault in scenario.faults)
    assert stops or all(work.finished for work in works), "somebody still waits"
    pairs, tags = software.pairs()
    services, partners = {}, {}
    for session in sessions:
        pairs.append((session.up, session.down))
        up, down = session.up.number, session.down.number
        services[up], services[down] = (0, SERVICE), (SERVICE, 0)
        partners[up], partners[down] = down, up
    requests = sorted((r for session in sessions for r in session.requests), key=lambda r: r.sent_ns)
    return Played(
        scenario, network, trace, network.ends(pairs, services), fabric.flows,
        [tags.get(flow.number, 0) for flow in fabric.flows], software.links(), works, builder.transfers,
        requests, partners, _communicators(scenario.ranks, software.groups), engine.now,
    )  # fmt: skip


def _noise(scenario: Scenario, *purpose: object) -> Random:
    """For times that the machine's profile draws."""
    again = scenario.machine.draw
    return stream(scenario.seed, *purpose, *([f"draw {again}"] if again else []))


def _rules(scenario: Scenario, network: Network) -> Rules:
    """How the scenario's network behaves."""
    machine, cluster, nccl = scenario.machine, scenario.cluster, scenario.nccl
    timing = Timing.of(machine)
    acks, pace = _noise(scenario, "acks"), _noise(scenario, "pace")
    ecn_bytes = (cluster.ecn_kib or 0.0) * 1024
    queue_bytes = cluster.queue_kib * 1024
    return Rules(
        mtu=cluster.mtu,
        latency_ns=network.latency_ns,
        losses=network.losses,
        may_lose=any(isinstance(fault, (Loss, Flap)) for fault in scenario.faults) or not cluster.pfc,
        down=network.down(),
        delay_ns=network.delays(),
        patience_ns=network.patience_ns(),
        ack_ns=lognormal(acks, timing.ack_ns, timing.ack_spread),
        ack_packets=machine.ack_packets,
        repeat_share=timing.repeat_share,
        coalesce=machine.ack_coalesce,
        timeout_ns=nccl.timeout_ns,
        queue_bytes=queue_bytes,
        packet_ns=lognormal(pace, timing.packet_ns, timing.packet_spread) if timing.packet_ns else None,
        turn_ns=lognormal(pace, timing.turn_ns, timing.turn_spread) if timing.turn_ns else None,
        pause=(queue_bytes / 2, queue_bytes / 4) if cluster.pfc else None,
        marking=Marking(ecn_bytes, 4 * ecn_bytes, 0.1) if ecn_bytes and nccl.ecn else None,
        random=stream(scenario.seed, "marks"),
    )


def _settings(scenario: Scenario) -> Settings:
    """NCCL's, as the scenario has them."""
    nccl = scenario.nccl
    return Settings(
        layout=LAYOUTS[nccl.version],
        queue_pairs=nccl.qps_per_connection,
        split=nccl.splits,
        routed=nccl.adaptive_routing,
        registered=nccl.registered,
        sockets=nccl.transport == "socket",
        pxn=nccl.pxn,
        shared=nccl.shared_comms and nccl.pxn and scenario.cluster.gpus_per_node > 1,
        by_id=nccl.match_by == "id",
        protocols=protocols(nccl.buffsize, nccl.ll_buffsize, nccl.ll128_buffsize),
        nvlink={fault.node: 1 / fault.gbyte_s for fault in scenario.faults if isinstance(fault, Nvlink)},
    )


def _serve(
    scenario: Scenario, job: Service, builder: Builder, sessions: Sequence[Session], engine: Engine
) -> None:
    """Give each session what it will ask, each replica its front end, and the ranks their programs."""
    asked = draw_requests(scenario)
    fronts: dict[int, FrontEnd] = {}
    for number, session in enumerate(sessions):
        assert isinstance(session, Served)
        replica = replica_of(scenario, number)
        draw = stream(scenario.seed, "front", replica)
        session.serve(asked[number], fronts.setdefault(replica, FrontEnd(job, engine, draw)))
    build_service(job, builder, asked)


def _begin_faults(scenario: Scenario, network: Network, engine: Engine, fabric: Fabric) -> None:
    """What does not last for the whole job comes at its time."""
    for fault in scenario.faults:
        if isinstance(fault, SlowPcie):
            for port in (port for port in network.nics if port.node == fault.node):
                port.answer_ns += fault.us * 1e3
        if isinstance(fault, SlowLink) and fault.from_us:
            engine.at(fault.from_us * 1e3, network.slow_down, fault)
        if isinstance(fault, SlowLink) and fault.until_us:
            engine.at(fault.until_us * 1e3, network.speed_up, fault)
        for us in (fault.from_us, fault.until_us) if isinstance(fault, Loss) else ():
            if us:
                engine.at(us * 1e3, network.now_lost, us)
        if not isinstance(fault, (CrossTraffic, Pause)):
            continue
        for port in (port for port in network.nics if port.node == fault.node):
            for i in range(fault.times):
                begin_ns = (fault.at_us + i * fault.every_us) * 1e3
                if isinstance(fault, Pause):
                    engine.at(begin_ns, fabric.hold, port, fault.us * 1e3)
                else:
                    engine.at(begin_ns, fabric.share, port, 8.0 / fault.gbps, begin_ns + fault.us * 1e3)


def _communicators(ranks: int, groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All ranks' first, from which the others are split."""
    every = tuple(range(ranks))
    return [every, *(key for key in groups if key != every and len(key) > 1)]


def _sessions(scenario: Scenario, network: Network, engine: Engine, fabric: Fabric) -> list[Session]:
    """Those of all clients with the front end."""
    clients, job = scenario.clients, scenario.job
    served = isinstance(job, Service)
    kind = Served if served else Session

    def front(session: int) -> Port:
        if not isinstance(job, Service):
            return network.ports[clients.node * scenario.cluster.gpus_per_node]
        return network.ports[replica_of(scenario, session) * (job.tp or scenario.ranks)]

    return [
        kind(
            (host, number), (port, front(host * clients.sessions + number)), clients, engine, fabric,
            stream(scenario.seed, "client", host, number),
        )
        for host, port in enumerate(network.clients)
        for number in range(clients.sessions)
    ]  # fmt: skip
