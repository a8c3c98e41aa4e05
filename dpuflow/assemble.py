"""Arrays of the stages in, the result format's objects out. Nothing is inferred here."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from dpuflow.arrays.ordering import median_of
from dpuflow.entries import BOUNDS, RULES, Rule, gpus_within
from dpuflow.identity.endpoints import (
    address_text,
    addresses_of,
    captured_at,
    endpoint_nodes,
    hosts_by_name,
    mac_text,
)
from dpuflow.identity.rankmap import doubts_about
from dpuflow.outline import list_pipelines, list_steps, list_transfers, list_what_if
from dpuflow.results import (
    Account,
    Analysis,
    Collective,
    Endpoint,
    Flow,
    Group,
    Lateness,
    Parts,
    RankEntry,
    Told,
)
from dpuflow.schema.rows import NEVER, NONE32, Op, Transport
from dpuflow.verdicts.causes import CAUSES
from dpuflow.verdicts.edges import disagreements
from dpuflow.verdicts.parallelism import ring_phases
from dpuflow.verdicts.pauses import pause_sentences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from dpuflow.entries import Entries, Relative
    from dpuflow.identity.rankmap import Place
    from dpuflow.islands.analyse import Read
    from dpuflow.matching import Instance
    from dpuflow.results.tokens import (
        Algorithm,
        Bound,
        Cause,
        OpToken,
        Protocol,
        Steadiness,
        Unjudged,
        Verdict,
    )
    from dpuflow.schema.tables import CaptureTables, Joined
    from dpuflow.verdicts import Inferred
    from dpuflow.verdicts.accounts import Account as Found
    from dpuflow.verdicts.bulk import Bulk
    from dpuflow.verdicts.judgement import Judgement


class Known(NamedTuple):
    """What is known of endpoints beside what was read: their places, nodes, and hosts' names by address."""

    places: Mapping[str, Place] | None = None
    nodes: NDArray[np.int64] | None = None
    names: Mapping[str, str] | None = None


def assemble(
    captures: Sequence[CaptureTables], read: Read, inferred: Inferred, known: Known
) -> tuple[Analysis, list[int]]:
    """The result without findings, and of each of its collectives the instance that it is."""
    joined, instances = read.joined, read.instances
    collectives, listed = _collectives(captures, read, inferred)
    seen_with = _seen_with(instances, inferred.entries, inferred.short)
    kinds = zip(inferred.groups, inferred.kinds, strict=True)
    endpoints = _endpoints(joined, read.ranks, known)
    steps = list(list_steps(inferred.steps, inferred.tokens, inferred.entries))
    usual_ns = {frozenset(row.endpoints): row.step_ns for row in steps if row.kind is None}
    result = Analysis(
        captures=joined.captures,
        clocks=joined.clocks,
        endpoints=endpoints,
        flows=_flows(joined),
        groups=[Group(number, members, kind) for number, (members, kind) in enumerate(kinds)],
        collectives=collectives,
        lateness=[
            _lateness(j, seen_with.get(j.endpoint), inferred, address_text(joined.endpoints[j.endpoint]))
            for j in inferred.judgements
        ],
        edges=[measured.edge for measured in inferred.edges],
        what_if=list(list_what_if(inferred, instances)),
        steps=steps,
        accounts=[
            _account(each, endpoints, usual_ns.get(frozenset(each.endpoints), each.step_ns))
            for each in inferred.accounts
        ],
        pipelines=list(list_pipelines(inferred.pipelines, inferred.stages, inferred.entries)),
        transfers=list(list_transfers(inferred.bulk, inferred.entries)),
        limits=[
            *_limits(joined, read.untold - sum(len(each.rows) for each in inferred.bulk)),
            *_limits_of_bulk(inferred.bulk),
            *_limits_of_nodes(instances),
            *_limits_of_transfers(instances, inferred),
            *pause_sentences(inferred.work, [address_text(row) for row in joined.endpoints], joined.start_ns),
            *disagreements(joined, inferred.edges, inferred.entries),
        ],
        start_ns=joined.start_ns if joined.captures else None,
        end_ns=joined.end_ns if joined.captures else None,
    )
    if known.places is not None:
        result.limits += doubts_about(known.places, [endpoint.addresses for endpoint in result.endpoints])
    return result, listed


def _endpoints(joined: Joined, ranks: Mapping[int, int], known: Known) -> list[Endpoint]:
    found = []
    places, names = known.places or {}, known.names or {}
    node = endpoint_nodes(joined, known.places) if known.nodes is None else known.nodes
    captures = captured_at(joined)
    hosts = dict(captures)  # of a capture at several of a node's NICs
    for host, mine in hosts_by_name([capture.vantage for capture in joined.captures]).items():
        hosts.update((end, host) for capture in mine for end in joined.local[capture])
    several = np.bincount(node, minlength=len(node)) > 1
    for number, row in enumerate(joined.endpoints):
        addresses = addresses_of(joined, number)
        label = next((places[a].label for a in addresses if a in places), None)
        found.append(
            Endpoint(
                number,
                address_text(row),
                addresses,
                mac_text(int(row["mac"])),
                ranks.get(number),
                label or captures.get(number) or next((names[a] for a in addresses if names.get(a)), None),
                int(node[number]) if several[node[number]] else None,
                host=next((places[a].host for a in addresses if a in places), None) or hosts.get(number),
            )
        )
    return found


def _flows(joined: Joined) -> list[Flow]:
    table = joined.flows
    both = ("src", "dst", "packets", "bytes", "messages", "retransmitted", "ecn_marked")
    shared = zip(*(table[name].tolist() for name in both), strict=True)
    roce = zip(*(table[name].tolist() for name in ("dest_qp", "cnp", "nak", "rnr")), strict=True)
    tcp = zip(*(table[name].tolist() for name in ("sport", "dport", "spurious")), strict=True)
    is_roce = (table["transport"] == Transport.ROCE).tolist()
    return [
        Flow(n, src, dst, "roce", qp, None, packets, nbytes, messages, again, marked, cnp, nak, rnr)
        if known
        else Flow(
            n, src, dst, "tcp", None, (sport, dport), packets, nbytes, messages, again, marked,
            None, None, None, spurious,
        )
        for n, (known, (src, dst, packets, nbytes, messages, again, marked), (qp, cnp, nak, rnr),
                (sport, dport, spurious)) in enumerate(zip(is_roce, shared, roce, tcp, strict=True))
    ]  # fmt: skip


def _collectives(
    captures: Sequence[CaptureTables], read: Read, inferred: Inferred
) -> tuple[list[Collective], list[int]]:
    """All collectives that anything was seen of, and the instance number of each."""
    entries, relative = inferred.bounded.entries, inferred.bounded.relative
    every = _rank_entries(captures, read.joined, inferred)
    times = np.stack([relative.enter_ns, entries.leave_ns], axis=1)
    nbytes = read.exchanges["bytes"]
    phases = ring_phases(read.exchanges, read.instances)
    found: list[Collective] = []
    of: list[int] = []
    for number, instance in enumerate(read.instances):
        rows = slice(*entries.offsets[number : number + 2].tolist())
        seen = times[rows][times[rows] != NEVER]
        if not len(seen):
            continue
        of.append(number)
        found.append(
            Collective(
                id=len(found),
                group=int(inferred.group_of[number]),
                op=cast("OpToken", instance.op.token),
                algorithm=cast("Algorithm", instance.algorithm.name if instance.algorithm else "unknown"),
                alternatives=cast("list[Algorithm]", instance.alternatives),
                root=instance.root_endpoint,
                bytes=instance.size,
                wire_bytes=int(nbytes[instance.rows].sum()),
                start_ns=int(seen.min()),
                end_ns=int(seen.max()),
                confidence=instance.confidence,
                complete=bool(entries.whole[rows.start]),
                phases=phases[number],
                ranks=every[rows],
                op_alternatives=cast("list[OpToken]", [op.token for op in instance.alike]),
                protocol=cast("Protocol | None", instance.slicing.protocol),
                bytes_between=instance.slicing.between,
            )
        )
    return found, of


def _rank_entries(captures: Sequence[CaptureTables], joined: Joined, inferred: Inferred) -> list[RankEntry]:
    """One for each row of Entries."""
    entries, relative = inferred.bounded.entries, inferred.bounded.relative
    columns = (
        entries.endpoint, relative.enter_ns, entries.leave_ns, relative.lateness_ns, relative.error_ns,
        relative.bound, inferred.causes.cause, entries.whole,
    )  # fmt: skip
    rows = zip(*(column.tolist() for column in columns), strict=True)
    why = _reasons(captures, joined, entries, relative)
    return [
        RankEntry(
            endpoint=endpoint,
            enter_ns=_known(enter) if whole and bound != 3 else None,
            leave_ns=_known(leave),
            lateness_ns=_known(lateness) if whole else None,
            error_ns=_known(error) if whole and bound != 3 else None,
            bound=cast("Bound", BOUNDS[bound] if whole else "unobservable"),
            cause=cast("Cause", CAUSES[cause]),
            why=reason,
        )
        for (endpoint, enter, leave, lateness, error, bound, cause, whole), reason in zip(
            rows, why, strict=True
        )
    ]


def _known(value: int) -> int | None:
    return None if value == NEVER else value


def _reasons(
    captures: Sequence[CaptureTables], joined: Joined, entries: Entries, relative: Relative
) -> list[str]:
    """For each row of Entries the rule its entry rests on and the frame that shows it."""
    sentences = {int(rule): sentence for rule, (_, sentence) in RULES.items()}
    bounded = {int(rule) for rule, (bound, _) in RULES.items() if bound == "at_most"} | {Rule.LONG_AFTER}
    lower = relative.enter_ns < entries.enter_ns
    lower |= (entries.enter_ns == NEVER) & (relative.enter_ns != NEVER)
    since = np.where(lower, entries.since_act, NONE32)
    columns = (entries.rule, entries.act, entries.after, entries.stalled_ns, since)

    def reason(rule: int, act: int, after: int, stalled: int, left: int) -> str:
        if act == left == NONE32:
            return sentences[rule]
        packets = []
        if act != NONE32:
            packets.append(f"packet {_sent(captures, joined.transfers[act])}")
        if after != NONE32 and rule in bounded:
            packets.append(f"after {_arrived(captures, joined.transfers[after])}")
        if left != NONE32:  # shown by the act of a call before, else by what ended the one before
            shown = _sent if rule == Rule.QUEUED else _arrived
            packets.append(f"no earlier than {shown(captures, joined.transfers[left])}")
        later = f"; in mid-operation it held an input for {stalled / 1e6:.1f} ms" if stalled else ""
        return f"{sentences[rule]} ({', '.join(packets)}){later}"

    return [reason(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _sent(captures: Sequence[CaptureTables], transfer: np.void) -> str:
    """The first packet of a transfer where it was seen to be sent, as Wireshark counts."""
    tables = captures[int(transfer["capture"])]
    return f"{int(tables.messages['first_frame'][transfer['message']]) + 1} of {tables.info.vantage}"


def _arrived(captures: Sequence[CaptureTables], transfer: np.void) -> str:
    """The last packet of a transfer where it was seen to arrive."""
    tables = captures[int(transfer["arrival_capture"])]
    frame = int(tables.messages["last_frame"][transfer["arrival_message"]]) + 1
    return f"{frame} of {tables.info.vantage}"


def _seen_with(
    instances: Sequence[Instance], entries: Entries, short: NDArray[np.bool_]
) -> dict[int, list[int]]:
    """For endpoints of collectives that were seen in part: the endpoints that they are measured against."""
    found: dict[int, set[int]] = {}
    exact = entries.exact
    for number in np.flatnonzero(short).tolist():
        rows = slice(*entries.offsets[number : number + 2].tolist())
        dated = set(entries.endpoint[rows][exact[rows]].tolist())
        for endpoint in instances[number].order:
            found.setdefault(endpoint, set()).update(dated)
    return {endpoint: sorted(others - {endpoint}) for endpoint, others in found.items()}


def _lateness(j: Judgement, relative_to: list[int] | None, inferred: Inferred, address: str) -> Lateness:
    known = j.collectives > 0
    later = inferred.bounded.later_ns[inferred.entries.of[j.endpoint]]
    later = later[later != NEVER]
    told = inferred.told.get(j.endpoint)
    return Lateness(
        endpoint=j.endpoint,
        collectives=j.collectives,
        late_share=j.late_share if known else None,
        last_share=j.last_share if known else None,
        median_ns=j.median_ns if known else None,
        p99_ns=j.p99_ns if known else None,
        caused_wait_ns=j.caused_wait_ns if known else None,
        verdict=cast("Verdict", j.verdict),
        cause=cast("Cause", j.cause),
        steadiness=cast("Steadiness | None", j.steadiness),
        since_ns=j.since_ns,
        relative_to=relative_to,
        perhaps_last=len(later),
        perhaps_ns=round(float(median_of(later))) if len(later) else None,
        told=Told(told.exact, told.bounded, told.untold) if told else Told(),
        detectable_ns=j.detectable_ns,
        own_share=j.own_share if known else None,
        late_ns=j.amount.median_ns,
        late_most_ns=j.amount.most_ns,
        late_bound=j.amount.bound,
        # Such an endpoint is alone on its node.
        node=j.endpoint if j.late and _by_inner_gpus(j.endpoint, inferred) else None,
        confidence=j.confidence,
        address=address,
        unjudged=cast("Unjudged | None", j.unjudged if j.verdict == "unknown" else None),
    )


def _by_inner_gpus(endpoint: int, inferred: Inferred) -> bool:
    """Whether most of an endpoint's lateness is that of GPUs behind the one at the exit of its node."""
    entries, relative = inferred.entries, inferred.relative
    mine = entries.of[endpoint]
    late, bound = relative.lateness_ns[mine], relative.bound[mine]
    told = np.isin(bound, (BOUNDS.index("exact"), BOUNDS.index("at_least"))) & (late != NEVER)
    late = np.where(told, late, 0)
    return bool(2 * late[entries.rule[mine] == Rule.WITHIN].sum() > late.sum())


def _account(found: Found, endpoints: Sequence[Endpoint], step_ns: int) -> Account:
    """The account in the proportions of typical steps, of a step of ``step_ns``: the one that is told."""
    others = (found.library, found.transfer, found.network, found.credit, found.unexplained)
    ends = np.cumsum([0, *found.work.values(), *found.in_node.values(), *others], dtype=np.float64)
    scale = step_ns / max(found.step_ns, 1)
    told = np.diff((ends * scale).round().astype(np.int64)).tolist()  # adds up, whatever is rounded
    work = {str(endpoint): ns for endpoint, ns in zip(found.work, told, strict=False)}
    waited = {str(end): min(round(ns * scale), work.get(str(end), 0)) for end, ns in found.waited.items()}
    inside: dict[str, int] = {}
    for endpoint, ns in zip(found.in_node, told[len(work) :], strict=False):
        node = endpoints[endpoint].node
        name = str(endpoint if node is None else node)
        inside[name] = inside.get(name, 0) + ns
    library, transfer, network, credit, unexplained = told[-len(others) :]
    exposed = library + transfer + network + credit + sum(inside.values())
    parts = Parts(work, library, transfer, network, credit, inside, unexplained)
    return Account(found.group, found.steps, sum(told), parts, waited, found.hidden_share, exposed)


def _s(number: int) -> str:
    return "s" if number > 1 else ""


def _limits(joined: Joined, untold: int) -> list[str]:
    limits = list(joined.limits)
    if untold:
        limits.append(
            f"{untold:,} data message{'s were' if untold > 1 else ' was'} not matched to a collective:"
            " set-up, other traffic, or an unknown framing or pattern."
        )
    for capture in joined.captures:
        limits.extend(capture.warnings)
        if capture.lost_packets:
            limits.append(f"{capture.vantage}: the capture lost {capture.lost_packets:,} packets.")
    return limits


def _limits_of_bulk(bulk: Sequence[Bulk]) -> list[str]:
    """What is not told of bulk one-sided transfers."""
    if not bulk:
        return []
    cut = sum(not each.complete for each in bulk)
    return [
        f"{len(bulk)} bulk one-sided transfer{_s(len(bulk))}: packets do not say what the bytes"
        " are or which request they belong to; those that follow each other without a pause count as one"
        + (f"; {cut} began before or ended after the capture, or lack packets." if cut else ".")
    ]


def _limits_of_nodes(instances: Sequence[Instance]) -> list[str]:
    """What is not told of ranks that share nodes."""
    limits = _limits_of_hidden([i for i in instances if i.view.near is None and i.hides_ranks])
    handed = sum(i.view.inside and i.op == Op.SEND_RECV for i in instances)
    if handed:
        limits.append(
            f"{handed} transfer{_s(handed)} between adapters of one rail may carry data of"
            " any GPU of the sender's node (PXN), and be parts of one all_to_all of all: each sender's entry"
            " is a bound, and no rank is judged by it."
        )
    together = sum(i.view.inside and i.op == Op.ALL_TO_ALL for i in instances)
    if together:
        limits.append(
            f"{together} all_to_all{_s(together)} went between nodes on the receivers' rails"
            " (PXN), where all GPUs of a node send together: an entry is a bound, except where a node"
            " waited for one of its GPUs alone. What GPUs of one node send each other shows in no packet."
        )
    inside = sum(i.view.inside and i.op not in (Op.SEND_RECV, Op.ALL_TO_ALL) for i in instances)
    if inside:
        limits.append(
            f"{inside} collective{_s(inside)} went through trees or chains over nodes of"
            " several GPUs: what leaves a node may have waited for any of them, so each entry is a bound."
        )
    return limits


def _limits_of_hidden(instances: Sequence[Instance]) -> list[str]:
    """What is not told of ranks behind those that were seen."""
    hidden = [i for i in instances if not gpus_within(i)]
    if not hidden:
        return []
    ranks, endpoints = max(i.rank_count for i in hidden), max(len(i.order) for i in hidden)
    return [
        f"{len(hidden)} collective{_s(len(hidden))} had more ranks than endpoints (up to {ranks} ranks,"
        f" {endpoints} endpoints): the others hand their data on inside their nodes or share an adapter."
        " They may have been later, or the first."
    ]


def _limits_of_transfers(instances: Sequence[Instance], inferred: Inferred) -> list[str]:
    """What is not told of point-to-point transfers."""
    stages = inferred.stages
    linked = {frozenset(pair) for each in inferred.pipelines for pair in pairwise(each.stages)}
    outside = sum(i.op == Op.SEND_RECV and frozenset(i.order) not in linked for i in instances)
    limits = []
    if outside:
        limits.append(
            f"{outside} point-to-point transfer{'s belong' if outside > 1 else ' belongs'} to no"
            " pipeline: listed, but no rank is judged by them."
        )
    alone = sum(not stage.peers for stage in stages)
    if alone:
        limits.append(
            f"{alone} of {len(stages)} pipeline stages cannot be compared with another: compute"
            " that sends nothing is invisible."
        )
    return limits
