"""A case folder: captures, truth.json and meta.json of a played scenario (docs/scoring.md, docs/synth.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpuflow.synth.conditions import conditions
from dpuflow.synth.observe import Capture, capture, epoch_ns, vantages
from dpuflow.synth.scenario import GpuLate, Late, Scenario, SlowHost
from dpuflow.synth.world import Played, play

if TYPE_CHECKING:
    from dpuflow.synth.caches import Transfer
    from dpuflow.synth.ranks import Work
    from dpuflow.synth.requests import Request


def write_case(scenario: Scenario, folder: str) -> list[Capture]:
    """Play ``scenario`` and write its case into ``folder``, which is made if need be. Raises OSError."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    played = play(scenario)
    captures = [capture(played, node, target) for node in vantages(scenario)]
    _write(target / "truth.json", _truth(played))
    _write(target / "meta.json", _meta(played, captures))
    return captures


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _truth(played: Played) -> dict[str, Any]:
    begin_ns = epoch_ns(played.scenario)
    begun = sorted(
        (work for work in played.works if work.enter_ns), key=lambda work: min(work.enter_ns.values())
    )
    works = [work for work in begun if work.finished]
    return {
        "case": played.scenario.name,
        "what": played.scenario.about,
        "clock": "node 0's",
        "collectives": [
            _collective(begin_ns, number, work, played.scenario.ranks) for number, work in enumerate(works)
        ],
        "unfinished": [
            {
                "op": work.operation.op,
                "bytes": work.operation.bytes or None,
                "ranks": sorted(work.plan.shares),
                "entered": sorted(work.enter_ns),
            }
            for work in begun
            if not work.finished
        ],
        "requests": [_request(begin_ns, request) for request in played.requests],
        "transfers": [_transfer(begin_ns, transfer, works) for transfer in played.transfers],
        "conditions": _conditions(begin_ns, played.scenario, begun),
    }


def _conditions(begin_ns: int, scenario: Scenario, begun: list[Work]) -> list[dict[str, Any]]:
    """Conditions with the times between which they last, on node 0's clock."""
    first = {work.iteration: min(work.enter_ns.values()) for work in reversed(begun)}
    rows = conditions(scenario, first)
    for row in rows:
        for key in ("from_ns", "to_ns"):
            row[key] = None if row[key] is None else begin_ns + round(row[key])
    return rows


def _request(begin_ns: int, request: Request) -> dict[str, Any]:
    return {
        "client": request.client,
        "session": request.session,
        "prompt_bytes": request.prompt,
        "tokens": request.tokens,
        **{
            f"{name}_ns": _stamp(begin_ns, getattr(request, f"{name}_ns"))
            for name in ("sent", "arrived", "first", "last")
        },
    }


def _transfer(begin_ns: int, transfer: Transfer, works: list[Work]) -> dict[str, Any]:
    """One cache, its receiver's first operation after it, and how long that had waited, if it had."""
    ends = transfer.endpoint
    assert transfer.told_ns is not None, "a transfer never happened"
    assert transfer.wanted_ns is not None
    assert transfer.start_ns is not None
    rank = ends.dst.rank
    known = max(transfer.told_ns, transfer.wanted_ns)
    first = min((w.enter_ns[rank] for w in works if w.enter_ns.get(rank, -1.0) >= known), default=None)
    waited = first is not None and transfer.wanted_ns < transfer.told_ns
    wait = first - max(transfer.start_ns, transfer.wanted_ns) if waited and first is not None else None
    return {
        "iter": transfer.iteration,
        "op": "read" if ends.manner.read else "write",
        "from": ends.src.rank,
        "to": ends.dst.rank,
        "bytes": transfer.size,
        "page_bytes": min(ends.manner.page, transfer.size),
        "offered_ns": _stamp(begin_ns, transfer.offered_ns),
        "start_ns": _stamp(begin_ns, transfer.start_ns),
        "end_ns": _stamp(begin_ns, transfer.end_ns),
        "wanted_ns": _stamp(begin_ns, transfer.wanted_ns),
        "first_token_ns": None if first is None else _stamp(begin_ns, first),
        "wait_before_first_token_ns": None if wait is None else round(wait),
    }


def _stamp(begin_ns: int, time_ns: float | None) -> int:
    assert time_ns is not None, "it never happened"
    return begin_ns + round(time_ns)


def _collective(begin_ns: int, number: int, work: Work, ranks: int) -> dict[str, Any]:
    def by_rank(values: dict[int, float], default: int | None) -> list[int | None]:
        found: list[int | None] = [None] * ranks
        for rank in work.plan.shares:
            found[rank] = begin_ns + round(values[rank]) if default is None else round(values.get(rank, 0.0))
        return found

    row = {
        "seq": number,
        "iter": work.iteration,
        "op": work.operation.op,
        "bytes": work.operation.bytes or None,
        # A single transfer has no algorithm.
        "algorithm": None if work.operation.op == "send_recv" else work.plan.algorithm,
        "enter_ns": by_rank(work.enter_ns, None),
        "leave_ns": by_rank(work.leave_ns, None),
        "injected_ns": by_rank(work.injected_ns, 0),
        "held_ns": [round(work.held_ns[rank]) if rank in work.held_ns else None for rank in range(ranks)],
        "fed": [
            rank
            for rank, share in sorted(work.plan.shares.items())
            if any(link.wired for link, _ in share.receives)
        ],
        "ranks": sorted(work.plan.shares),
        "protocol": work.plan.protocol,
        **work.extra,
    }
    if work.operation.op in ("broadcast", "reduce"):
        row["root"] = work.operation.root
    return row


def _meta(played: Played, captures: list[Capture]) -> dict[str, Any]:
    scenario = played.scenario
    of_node = {each.node: each for each in captures}
    nodes = [
        {
            "node": port.node,
            "rank": rank,
            "ip": str(address.ip),
            "ips": [str(address.ip)],
            "mac": address.mac.hex(":"),
            "capture": of_node[port.node].name if port.node in of_node else None,
        }
        for rank, port in enumerate(played.network.ports)
        for address in (played.network.addresses[port.number],)
    ]
    return {
        "case": scenario.name,
        "what": scenario.about,
        "software": {"stack": f"nccl-net_{scenario.nccl.transport}-{scenario.nccl.version}"},
        "world_size": scenario.ranks,
        "nodes": nodes,
        "clocks": [
            {
                "capture": each.name,
                "offset_ns": each.clock.offset_ns,
                "drift_ppb": each.clock.drift_ppb,
                "at_node0_ns": each.clock.epoch_ns,
            }
            for each in captures
        ],
        "captures": [
            {"capture": each.name, "packets": each.packets, "missed": each.missed, "passed": each.passed}
            for each in captures
        ],
        "snaplen": scenario.observation.snaplen,
        "sample": scenario.observation.sample,
        "truncate": scenario.observation.truncate or None,
        "path_mtu_roce": scenario.cluster.mtu,
        "fault": _fault(scenario),
        "pauses": _pauses(played),
        "seed": scenario.seed,
    }


def _pauses(played: Played) -> list[dict[str, int]]:
    """How often and how long the switch stopped each NIC."""
    pauses = played.trace.pauses.read()
    found = []
    for port in played.network.nics:
        mine = pauses["port"] == port.number
        if mine.any():
            total = int((pauses["until_ns"][mine] - pauses["from_ns"][mine]).sum())
            found.append({"rank": played.network.ports.index(port), "times": int(mine.sum()), "ns": total})
    return found


def _fault(scenario: Scenario) -> dict[str, Any]:
    """The faults in the form that scoring knows: of ranks one, of the network a list."""
    late = [fault for fault in scenario.faults if isinstance(fault, Late)]
    network = [
        {"kind": _kind(fault), **vars(fault)} for fault in scenario.faults if not isinstance(fault, Late)
    ]
    compute: dict[str, Any] | None = None
    if len(late) > 1:
        compute = {"kind": "two", "ms_by_rank": {str(f.rank): f.us / 1e3 for f in late if f.rank is not None}}
    elif late:
        fault = late[0]
        compute = {"kind": fault.mode, "ms": fault.us / 1e3, "cause": _CAUSES[type(fault)]}
        if fault.rank is not None:
            compute["rank"] = fault.rank
        if fault.from_iteration:
            compute["from_iter"] = fault.from_iteration
    return {"compute": compute, "network": network or None}


_CAUSES: dict[type[Late], str] = {GpuLate: "compute", SlowHost: "host"}


def _kind(fault: Any) -> str:
    from dpuflow.synth.scenario import Fault

    return next(name for name, kind in Fault.KINDS.items() if type(fault) is kind)
