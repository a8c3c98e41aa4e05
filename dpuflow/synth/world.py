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
from dpuflow.synth.scenario import CrossTraffic, Flap, Loss, Nvlink, Pause, Service
from dpuflow.synth.seeds import stream
from dpuflow.synth.segments import Streams
from dpuflow.synth.served import FrontEnd, Served, build_service, draw_requests, replica_of
from dpuflow.synth.setup import before_the_job
from dpuflow.synth.sizes import protocols
from dpuflow.synth.sockets import Socket
from dpuflow.synth.timing import Timing
from dpuflow.synth.trace import Trace
from dpuflow.synth.transport import LAYOUTS, Connection, Link, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


def play(scenario: Scenario) -> Played:
    """Simulate. The same scenario gives the same result."""
    engine, trace, network = Engine(), Trace(), Network(scenario)
    machine, nccl = scenario.machine, scenario.nccl
    timing = Timing.of(machine)
    acks, pace = stream(scenario.seed, "acks"), stream(scenario.seed, "pace")
    cluster = scenario.cluster
    ecn_bytes = (cluster.ecn_kib or 0.0) * 1024
    queue_bytes = cluster.queue_kib * 1024
    rules = Rules(
        mtu=cluster.mtu,
        latency_ns=network.latency_ns,
        losses=network.losses,
        may_lose=any(isinstance(fault, (Loss, Flap)) for fault in scenario.faults) or not cluster.pfc,
        down=network.down(),
        ack_ns=lambda: timing.draw_ack(acks),
        ack_packets=machine.ack_packets,
        repeat_share=timing.repeat_share,
        coalesce=machine.ack_coalesce,
        timeout_ns=nccl.timeout_ns,
        queue_bytes=queue_bytes,
        packet_ns=(lambda: timing.draw_packet(pace)) if timing.packet_ns else None,
        turn_ns=(lambda: timing.draw_turn(pace)) if timing.turn_ns else None,
        pause=(queue_bytes / 2, queue_bytes / 4) if cluster.pfc else None,
        marking=Marking(ecn_bytes, 4 * ecn_bytes, 0.1) if ecn_bytes and nccl.ecn else None,
        random=stream(scenario.seed, "marks"),
    )
    fabric = Fabric(engine, trace, rules)
    settings = Settings(
        LAYOUTS[nccl.version], nccl.qps_per_connection, nccl.splits, nccl.adaptive_routing,
        nccl.registered, nccl.transport == "socket", nccl.pxn,
        nccl.shared_comms and nccl.pxn and cluster.gpus_per_node > 1, nccl.match_by == "id",
        protocols(nccl.buffsize, nccl.ll_buffsize, nccl.ll128_buffsize),
        {fault.node: 1 / fault.gbyte_s for fault in scenario.faults if isinstance(fault, Nvlink)},
    )  # fmt: skip
    gpus = [
        Gpu(rank, port.node, port, engine, timing, stream(scenario.seed, "gpu", rank))
        for rank, port in enumerate(network.ports)
    ]
    groups: dict[tuple[int, ...], Communicator] = {}

    def on_rail(src: Gpu, dst: Gpu) -> Gpu:
        """The GPU of ``src``'s node that owns the NIC on ``dst``'s rail: itself, or the first that has it."""
        rails = len(network.nics) // cluster.nodes
        if src.port.number % rails == dst.port.number % rails:
            return src
        share = cluster.gpus_per_node // rails
        return gpus[src.node * cluster.gpus_per_node + dst.port.number % rails * share]

    def group(members: Sequence[int]) -> Communicator:
        key = tuple(members)
        if key not in groups:
            groups[key] = Communicator(
                [gpus[i] for i in key], engine, fabric, settings, nccl.channels, on_rail
            )
        return groups[key]

    endpoints: dict[tuple[int, int], Endpoint] = {}

    def endpoint(src: int, dst: int, manner: Manner) -> Endpoint:
        key = (src, dst)
        if key not in endpoints:
            draw = stream(scenario.seed, "cache", *key, manner.read)
            endpoints[key] = Endpoint(gpus[src], gpus[dst], manner, engine, fabric, draw)
        return endpoints[key]

    meshes: dict[tuple[int, ...], Mesh] = {}

    def mesh(members: Sequence[int], queue_pairs: int, atomic: bool) -> Mesh:
        key = tuple(members)
        if key not in meshes:
            meshes[key] = Mesh([gpus[i] for i in key], engine, fabric, queue_pairs, atomic)
        return meshes[key]

    sessions = _sessions(scenario, network, engine, fabric)
    builder = Builder(scenario, group, endpoint, mesh)
    if isinstance(scenario.job, Service):
        asked = draw_requests(scenario)
        fronts: dict[int, FrontEnd] = {}
        for number, session in enumerate(sessions):
            assert isinstance(session, Served)
            replica = replica_of(scenario, number)
            draw = stream(scenario.seed, "front", replica)
            session.serve(asked[number], fronts.setdefault(replica, FrontEnd(scenario.job, engine, draw)))
        build_service(scenario.job, builder, asked)
    else:
        build(scenario, builder)
    works, programs = builder.works, builder.programs
    ranks = [
        Rank(gpus[rank], program, engine, machine.run_ahead, stream(scenario.seed, "rank", rank))
        for rank, program in programs.items()
    ]
    for begin in (*(rank.start for rank in ranks), *(session.start for session in sessions)):
        engine.at(0.0, begin)
    for fault in scenario.faults:
        if isinstance(fault, (CrossTraffic, Pause)):
            for port in (port for port in network.nics if port.node == fault.node):
                for i in range(fault.times):
                    begin_ns = (fault.at_us + i * fault.every_us) * 1e3
                    if isinstance(fault, Pause):
                        engine.at(begin_ns, fabric.hold, port, fault.us * 1e3)
                    else:
                        engine.at(begin_ns, fabric.share, port, 8.0 / fault.gbps, begin_ns + fault.us * 1e3)
    engine.run()
    assert all(work.leave_ns.keys() == work.plan.shares.keys() for work in works), "somebody still waits"
    links = [link for each in groups.values() for link in each.links()]
    pairs: list[tuple[Flow, Flow]] = []
    tags = [0] * len(fabric.flows)
    for connection in connections_of(links):
        tags[connection.grants.number] = connection.src.rank
        pairs.append((connection.data[0], connection.grants))
        for flow in connection.data[1:]:
            pairs.append((flow, fabric.connect(flow.dst, flow.src, connection.ignore, connection.ignore)))
            tags.append(0)
    for link in (link for link in links if isinstance(link, Socket)):
        flow = link.flow
        pairs.append((flow, fabric.connect(flow.dst, flow.src, link.ignore, link.ignore)))
        tags.append(0)
    for each in endpoints.values():
        pairs += zip(each.flows, each.backs, strict=True)
    for lane in (lane for each in meshes.values() for lane in each.lanes()):
        for flow in lane.flows:
            pairs.append((flow, fabric.connect(flow.dst, flow.src, lane.ignore, lane.ignore)))
            tags.append(0)
    services, partners = {}, {}
    for session in sessions:
        pairs.append((session.up, session.down))
        up, down = session.up.number, session.down.number
        services[up], services[down] = (0, SERVICE), (SERVICE, 0)
        partners[up], partners[down] = down, up
    ends = network.ends(pairs, services)
    requests = sorted((r for session in sessions for r in session.requests), key=lambda r: r.sent_ns)
    return Played(
        scenario, network, trace, ends, fabric.flows, tags, links, works, builder.transfers, requests,
        partners, _communicators(scenario.ranks, groups), engine.now,
    )  # fmt: skip


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
