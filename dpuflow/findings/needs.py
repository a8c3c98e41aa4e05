"""What a condition needs to be judged at all: each need is a function from a case to why it is not met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpuflow.findings.passing import gpus_passed
from dpuflow.schema.rows import Op, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.findings.case import Case


def _operations(case: Case) -> str | None:
    # Stages of a pipeline are compared by what they send each other.
    if case.inferred.pipelines or any(instance.op != Op.SEND_RECV for instance in case.instances):
        return None
    return "no collective operation was recognised"


def _pairs(case: Case) -> str | None:
    # A pair that is left out from some time on looks as if it stood still.
    if not any(tables.info.skipped.get("sampled_out") for tables in case.captures):
        return None
    return "an agent short of CPU or memory left out some pairs of hosts: what looks stopped may be unseen"


def _tokens(case: Case) -> str | None:
    if any(each is not None for each in case.inferred.tokens):
        return None
    return "no decode steps were recognised"


def _nodes(case: Case) -> str | None:
    ranks = {row.endpoint for row in case.result.lateness}
    nodes = [case.result.endpoints[end].node for end in ranks]
    several = {node for node in nodes if node is not None and nodes.count(node) > 1}
    if (
        several
        and len({end if node is None else -1 - node for end, node in zip(ranks, nodes, strict=True)}) > 1
    ):
        return None
    return "no node among several is known to have several ranks"


def _reads(case: Case) -> str | None:
    return None if any(each.read for each in case.inferred.bulk) else "no bulk RDMA READ was captured"


def _within(case: Case) -> str | None:
    if any(gpus_passed(instance) for instance in case.instances):
        return None
    return "no ring passes through several GPUs each of three nodes or more"


def _steps(case: Case) -> str | None:
    if any(len(each.ends) > STEPS for each in case.inferred.steps):
        return None
    return f"no job of more than {STEPS} steps was recognised"


def _transfers(case: Case) -> str | None:
    return None if case.inferred.bulk else "no bulk one-sided transfer was captured"


def _pipelines(case: Case) -> str | None:
    return None if case.inferred.pipelines else "no pipeline was recognised"


def _all_to_alls(case: Case) -> str | None:
    if any(instance.op == Op.ALL_TO_ALL for instance in case.instances):
        return None
    return "no all_to_all was recognised"


def _roce(case: Case) -> str | None:
    if (case.joined.flows["transport"] == Transport.ROCE).any():
        return None
    return "no RoCE traffic was captured"


def _keys(case: Case) -> str | None:
    return None if case.keys.key.any() else "no memory key of a one-sided message was captured"


def _replicas(case: Case) -> str | None:
    groups = case.inferred.groups
    sizes = [len(members) for members in groups if len(members) > 1]
    apart = any(not set(a) & set(b) for a in groups for b in groups if len(a) == len(b) > 1)
    return None if len(sizes) > 1 and apart else "no two groups are alike and apart"


def _links(case: Case) -> str | None:
    links = case.inferred.links
    if len({*links.src.tolist(), *links.dst.tolist()}) != 2:
        return None
    return "only two endpoints: a path that is always slow in both directions has nothing to be compared with"


STEPS: Final = 6
"""So many on either side of a change tell what was usual, and that it changed for good: three each."""

NEEDS: Final[dict[str, Callable[[Case], str | None]]] = {
    "operations": _operations,
    "pairs": _pairs,
    "tokens": _tokens,
    "steps": _steps,
    "nodes": _nodes,
    "reads": _reads,
    "within": _within,
    "transfers": _transfers,
    "pipelines": _pipelines,
    "all_to_alls": _all_to_alls,
    "roce": _roce,
    "replicas": _replicas,
    "links": _links,
    "requests": lambda case: case.requests.why_not,
    "front_end": lambda case: case.requests.no_front_end,
    "keys": _keys,
}
