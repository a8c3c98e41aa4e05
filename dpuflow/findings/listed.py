"""Requests as the result lists them, the roles that endpoints have by them, and its lists of figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpuflow.figures import (
    list_all_reduce_what_if,
    list_attribution,
    list_decode,
    list_loss_tax,
    list_network_cost,
    list_operations,
    list_tax,
)
from dpuflow.results import Request
from dpuflow.schema.rows import NEVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.findings.case import Case


def list_figures(case: Case) -> None:
    """Give the result the figures that need no judgement (``figures``)."""
    result, inferred = case.result, case.inferred
    result.operations = list(list_operations(result))
    result.attribution = list(list_attribution(result))
    result.all_reduce_what_if = list(list_all_reduce_what_if(result))
    result.tax = list(list_tax(result))
    result.loss_tax = list(list_loss_tax(inferred.steps, inferred.entries, case.held_by_losses))
    result.decode = list(list_decode(inferred.steps, inferred.tokens, case.instances, inferred.entries))
    result.network_cost = list(list_network_cost(case.exchanges))


_COLUMNS = ("prompt_bytes", "answer_bytes", "sent_ns", "first_ns", "last_ns", "tokens", "held_ns", "whole")


def list_requests(case: Case) -> None:
    """Give the result its requests, and its endpoints their roles."""
    requests, result = case.requests, case.result
    ranks = {end for group in result.groups for end in group.endpoints}
    for client in set(requests.connections.client.tolist()) - ranks:
        result.endpoints[client].role = "client"
    for server in set(requests.connections.server.tolist()):
        result.endpoints[server].role = "front_end"
    result.requests = list(_rows(case))
    if requests.shared:
        result.limits.append(
            f"{requests.shared} client connection{'s are' if requests.shared > 1 else ' is'} shared by"
            f" several"
            " streams (HTTP/2): their requests cannot be told apart and are not listed."
        )


def _rows(case: Case) -> Iterator[Request]:
    requests, entries = case.requests, case.inferred.entries
    ends = [np.sort(entries.leave_ns[each.ends]) for each in case.inferred.steps]
    steps = max(ends, key=len, default=None)
    columns = {
        name: getattr(requests, name).tolist()
        for name in (
            "prompt_bytes",
            "answer_bytes",
            "sent_ns",
            "first_ns",
            "last_ns",
            "tokens",
            "held_ns",
            "whole",
        )
    }
    gap, p99 = requests.gap_ns.tolist(), requests.gap_p99_ns.tolist()
    client, server = requests.client.tolist(), requests.server.tolist()
    flow = requests.connections.flow[requests.connection].tolist()
    for number in range(len(requests)):
        row = {name: values[number] for name, values in columns.items()}
        known = steps is not None and NEVER not in (row["first_ns"], row["last_ns"])
        passed = (
            np.searchsorted(steps, (row["first_ns"], row["last_ns"])) if known and steps is not None else None
        )
        yield Request(
            id=number,
            flow=flow[number],
            client=client[number],
            server=server[number],
            prompt_bytes=row["prompt_bytes"] or None,
            answer_bytes=row["answer_bytes"],
            sent_ns=_known(row["sent_ns"]),
            first_ns=_known(row["first_ns"]),
            last_ns=_known(row["last_ns"]),
            tokens=row["tokens"],
            gap_ns=None if gap[number] != gap[number] else round(gap[number]),
            gap_p99_ns=None if p99[number] != p99[number] else round(p99[number]),
            held_ns=row["held_ns"],
            steps=None if passed is None else int(passed[1] - passed[0]),
            complete=row["whole"],
        )


def _known(value: int) -> int | None:
    return None if value == NEVER else value
