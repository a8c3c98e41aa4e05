"""Rows: clients and front ends."""

from __future__ import annotations

from typing import Final

from dpuflow.conditions.row import NORTH_SOUTH, Condition

_OF_REQUESTS = "request-seconds, of the time that all requests were open"

ROWS: Final = (
    Condition(
        "admission_backlog",
        NORTH_SOUTH,
        "Prompts that arrive while others wait for their first answer wait longer themselves.",
        "half of all prompts find two or more waiting before them, and each of these adds to the time to"
        " first answer (99.9 % confidence).",
        f"What that rise adds up to: {_OF_REQUESTS}.",
        "Look at the scheduler's queue and its admission limits, and at prefill capacity; then at the balance"
        " between front ends.",
        ("longer prompts that happen to come together", "a prefill that blocks decoding"),
        ("requests",),
    ),
    Condition(
        "ingress_starvation",
        NORTH_SOUTH,
        "Ranks stand still while no prompt is open, for longer than such pauses were before.",
        "a pause is longer than any pause with a prompt open, and longer than chance makes the pauses without"
        " one; and most clients that had asked before it ask again after it.",
        "The pauses, of the captured time.",
        "Look in front of the service: load balancer, gateway, clients. The ranks have nothing to do.",
        ("clients that ask less", "a gateway or load balancer that holds requests back"),
        ("requests", "operations"),
    ),
    Condition(
        "session_skew",
        NORTH_SOUTH,
        "One front end answers more than its share of requests, or one connection receives more than its"
        " share of tokens.",
        "the share is more than random assignment of the same requests gives, with 99.9 % confidence over all"
        " that are compared.",
        f"What its requests waited longer for their first answer than those of the others: {_OF_REQUESTS}.",
        "Look at the balancer's rule (sticky sessions, prefix routing) and at what that client asks for.",
        ("routing by prefix on purpose", "one client with much longer answers"),
        ("requests",),
        explains=("admission_backlog",),
    ),
    Condition(
        "ingress_loss",
        NORTH_SOUTH,
        "Segments of prompts were retransmitted.",
        "more than one segment was retransmitted, and more than one in ten thousand.",
        f"What prompts took longer than others of that size: {_OF_REQUESTS}.",
        "Check the way from the clients: gateway, wide area network, the front end's port.",
        ("a client's own network", "reordering"),
        ("requests",),
        why="a prompt lost whole is seen only when it is retransmitted, so that its wait is not counted",
    ),
    Condition(
        "egress_loss",
        NORTH_SOUTH,
        "Segments of answers were retransmitted.",
        "more than one segment was retransmitted, and more than one in ten thousand.",
        f"How much later than the usual gap tokens came: {_OF_REQUESTS}.",
        "Check the path to the clients, not the fabric between the ranks.",
        ("a client's own network", "reordering"),
        ("requests",),
    ),
    Condition(
        "egress_backlog",
        NORTH_SOUTH,
        "Tokens leave at a slower pace than decode steps end: answers fall behind while steps do not.",
        "in answers that lost nothing, the delays of tokens behind their steps come to a hundredth of the"
        " time, and last from token to token (99.9 % confidence).",
        f"How far answers fell behind: {_OF_REQUESTS}.",
        "Look at the front end's process: detokenising, serialising, its threads and its socket buffers.",
        ("copies from device to host that are slow (output_bottleneck)", "a front end short of CPU"),
        ("requests", "operations", "front_end"),
        explains=("egress_jitter", "output_bottleneck", "admission_backlog"),
    ),
    Condition(
        "egress_jitter",
        NORTH_SOUTH,
        "Tokens leave at uneven delays after the decode steps that produce them.",
        "in answers that lost nothing, what tokens are delayed behind their steps beyond the token before"
        " comes to a hundredth of the time.",
        f"How much later after their steps than the token before tokens left: {_OF_REQUESTS}.",
        "Look at the front end's threads and at batching of writes (Nagle, HTTP chunking).",
        ("a front end short of CPU", "writes that are batched on purpose"),
        ("requests", "operations", "front_end"),
    ),
    Condition(
        "early_completion",
        NORTH_SOUTH,
        "Answers that began together end apart, and no new one takes a free place until the last one is done,"
        " though prompts wait.",
        "there are three batches or more, and each of them is refilled only when it is empty.",
        "Places that stood empty: of the time of all places.",
        "Turn on continuous (in-flight) batching, or batch requests of like length.",
        ("few clients, so that no prompt waits",),
        ("requests",),
        explains=("admission_backlog",),
    ),
    Condition(
        "saturation",
        NORTH_SOUTH,
        "Answers queue for a link to the clients that carries no more.",
        "most tokens that left before the one ahead of them had arrived are acknowledged at one pace, in ns"
        " a byte, within a tenth, and did not leave at that pace.",
        f"How much later the last token of each answer was acknowledged than one that nothing was ahead of:"
        f" {_OF_REQUESTS}.",
        "Look at the rate of the path to these clients (gateway, uplink, the front end's port), and at what"
        " answers carry beside their text.",
        ("a client's own slow link", "a rate limit in front of the clients (policer, proxy)"),
        ("requests", "front_end"),
        explains=("congestion", "egress_backlog", "egress_jitter"),
    ),
)
