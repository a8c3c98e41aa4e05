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
        "Half of all prompts find two or more before them, and each of these adds to the time to first"
        " answer, with 99.9 % confidence.",
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
        "A pause longer than any with a prompt open, and than chance gives by the others without one; most of"
        " those who had asked ask again after it.",
        "The pauses, of the captured time.",
        "Look in front of the service: load balancer, gateway, clients. The ranks have nothing to do.",
        ("clients that ask less", "a gateway or load balancer that holds requests back"),
        ("requests", "operations"),
    ),
    Condition(
        "session_skew",
        NORTH_SOUTH,
        "One front end answers more than its share of requests, or one connection receives more than its"
        " share"
        " of tokens.",
        "More than random assignment of the same requests gives, with 99.9 % confidence over all of them.",
        f"What its requests waited longer for their first answer than those of the others: {_OF_REQUESTS}.",
        "Look at the balancer's rule (sticky sessions, prefix routing) and at what that client asks for.",
        ("routing by prefix on purpose", "one client with much longer answers"),
        ("requests",),
        explains=("admission_backlog",),
    ),
    Condition(
        "ingress_loss",
        NORTH_SOUTH,
        "Segments of prompts were sent again.",
        "More than one in ten thousand, and more than one.",
        f"What prompts took longer than others of that size: {_OF_REQUESTS}.",
        "Check the way from the clients: gateway, wide area network, the front end's port.",
        ("a client's own network", "reordering"),
        ("requests",),
        why="a prompt lost whole is seen only when it comes again, so that its wait is not counted",
    ),
    Condition(
        "egress_loss",
        NORTH_SOUTH,
        "Segments of answers were sent again.",
        "More than one in ten thousand, and more than one.",
        f"What tokens came later than the usual gap: {_OF_REQUESTS}.",
        "Check the way to the clients; the fabric between the ranks is another one.",
        ("a client's own network", "reordering"),
        ("requests",),
    ),
    Condition(
        "egress_backlog",
        NORTH_SOUTH,
        "Tokens leave at a slower pace than decode steps end: answers fall behind while steps do not.",
        "Each token's delay behind its step: a hundredth of the time of answers, and lasting from token to"
        " token with 99.9 % confidence.",
        f"How far answers fell behind: {_OF_REQUESTS}.",
        "Look at the front end's process: detokenising, serialising, its threads and its socket buffers.",
        ("copies from device to host that are slow (output_bottleneck)", "a front end short of CPU"),
        ("requests", "operations", "front_end"),
        explains=("egress_jitter", "output_bottleneck", "admission_backlog"),
    ),
    Condition(
        "egress_jitter",
        NORTH_SOUTH,
        "Tokens come unevenly behind the decode steps that bring them.",
        "Each token's delay behind its step, against the one before: a hundredth of the time of answers.",
        f"What tokens came later behind their steps than the ones before: {_OF_REQUESTS}.",
        "Look at the front end's threads and at batching of writes (Nagle, HTTP chunking).",
        ("a front end short of CPU", "writes that are batched on purpose"),
        ("requests", "operations", "front_end"),
    ),
    Condition(
        "early_completion",
        NORTH_SOUTH,
        "Answers that began together end apart, and no new one takes a free place until the last one is done,"
        " though prompts wait.",
        "Every one of three batches or more refills only when it is empty.",
        "Places that stood empty: of the time of all places.",
        "Turn on continuous (in-flight) batching, or batch requests of like length.",
        ("few clients, so that no prompt waits",),
        ("requests",),
        explains=("admission_backlog",),
    ),
    Condition(
        "saturation",
        NORTH_SOUTH,
        "A front end's port carries as much as it ever does, and answers are acknowledged later while it"
        " does.",
        "Acknowledgments in milliseconds at 90 % or more of the port's own ceiling against the others', with"
        " 99.9 % confidence.",
        f"What answers were acknowledged later: {_OF_REQUESTS}.",
        "Move clients' traffic off the port that the ranks use, or give it a priority of its own.",
        ("a burst of other traffic on the same port",),
        ("requests",),
        explains=("congestion",),
    ),
)
