"""Rows: ranks and the network between them, and the captures themselves."""

from __future__ import annotations

from typing import Final

from dpuflow.conditions.row import CAPTURE, EAST_WEST, RDMA, STOPPED, SWITCH, Condition

_OF_RANKS = "rank-seconds, of the time of all ranks"
_PORT = "Check the link's negotiated rate and width, shaping and policing, cable and port errors"

ROWS: Final = (
    Condition(
        "straggler",
        EAST_WEST,
        "A rank enters collectives late by its own doing, and its peers wait.",
        "its lateness stands out from the noise of its group's entries, or from its peers' work in the same"
        " steps (docs/theory/verdicts.md).",
        f"What a step would be shorter by, else what peers waited: {_OF_RANKS}.",
        "Compare the rank's work with its peers' first: layers, shard and batch sizes, input lengths, tokens"
        " routed to its experts; then its host: data loading, garbage collection, checkpoints, other jobs;"
        " then power and clock limits. Move the rank to another GPU: lateness that stays with the rank is its"
        " work, lateness that stays with the GPU is the machine. Where ranks are late in turn, nothing is"
        " wrong with any one of them.",
        ("a larger shard, stage or batch", "a busy host", "a GPU that is throttled"),
        ("operations",),
        explains=("pipeline_bubble", "p2p_throttling", "credit_starvation"),
        commands=("`nvidia-smi -q -d PERFORMANCE,CLOCK`: clocks, and what holds them down",),
    ),
    Condition(
        "pipeline_bubble",
        EAST_WEST,
        "Stages of a pipeline stand idle for longer than their schedule asks for.",
        "stages stand idle for longer than their schedule's own bubble, by stages and microbatches.",
        f"The idle time beyond that: {_OF_RANKS}.",
        "Balance the stages (layers, embedding and head), or use more microbatches a step.",
        ("one stage with more work", "transfers between stages that nothing hides"),
        ("pipelines",),
    ),
    Condition(
        "load_skew",
        EAST_WEST,
        "One member receives more than an even share of the bytes of all_to_all operations.",
        "its mean over the operations is above an even share, with 99.9 % confidence over all members whose"
        " messages are all seen (three at least).",
        "What the extra bytes take at the link's usual pace, of the captured time.",
        "Look at the router's balance (auxiliary loss, capacity factor) and at where hot experts are placed.",
        ("a data set that favours some experts",),
        ("all_to_alls",),
        explains=("straggler", "congestion", "slow_link"),
    ),
    Condition(
        "congestion",
        EAST_WEST,
        "Switches marked packets (ECN), receivers asked senders to slow down (CNP), or messages to one"
        " receiver were held on the way while those to others were not, and some came through meanwhile.",
        "marked messages take longer than unmarked ones of the same pair and size (95 % confidence); or"
        " messages to one receiver are held on the way for more than three times the median of the other"
        " receivers.",
        "What marked messages took longer, or were held on the way, as far as it lies on the critical path of"
        " steps: of the captured time. What the port carried meanwhile at its own pace is taken off.",
        "Look at the switch port towards the receiver (the last of the finding's endpoints): its queue marks."
        " Spread the load.",
        (
            "incast",
            "other traffic on that port",
            "a receiver that pauses it (PFC)",
            "a marking threshold set too low",
        ),
        (),
        explains=("credit_starvation",),
        commands=(
            f"{RDMA}: at the receiver `np_ecn_marked_roce_packets`, `np_cnp_sent`, at the senders"
            " `rp_cnp_handled`",
            f"{SWITCH}: ECN marks and drops of the queue towards the receiver",
        ),
    ),
    Condition(
        "head_of_line",
        EAST_WEST,
        "A port stands still though messages wait for it: nothing comes through to a receiver and then all at"
        " once, or messages to several receivers stand still at one NIC at the same time.",
        "before a receiver, messages are held beyond their pair's usual scatter, for more than three times"
        " the median of the other receivers, and nothing comes through for most of that time (where nine"
        " tenths of them are ECN-marked, a queue held them: that is congestion); or at a NIC nothing begins"
        " or ends for three times as long as all that is under way would take at its pace.",
        "The standstills, as far as they lie on the critical path of steps: of the captured time.",
        "Look for who pauses the switch (PFC counters of the ports): one slow receiver stops all that its"
        " senders send. Consider other priorities, or ECN that sets in earlier.",
        ("a NIC that stalls on its own bus", "a shaper of the sending host", "other traffic on that port"),
        ("roce",),
        explains=("congestion", "head_of_line", "credit_starvation"),
        commands=(
            "`ethtool -S IF | grep -E 'pause|discard'`: who sends pauses (`tx_prioN_pause`), who is stopped"
            " by them (`rx_prioN_pause_duration`, in us)",
            f"{SWITCH}: pauses received, port by port, towards the one that sends them",
        ),
    ),
    Condition(
        "packet_loss",
        EAST_WEST,
        "Packets are retransmitted that the receiver lacked, or whose acknowledgment was lost; what it"
        " had already (tail probes, reordering, late acknowledgments, the rest of a go-back-N) is left"
        " out.",
        "more than one in ten thousand of a flow's packets is lost, or loss delayed a sender's messages for"
        " 1 % of the captured time or more. Of RoCE from one end alone: as often as the receiver asked again"
        " (NAK).",
        "The time of that delay, as far as it lies on the critical path of steps, or in steps"
        " longer than chance makes any: of the captured time.",
        "Check the path's error and drop counters (port, cable, switch queue) before any GPU; on RoCE also"
        " whether the priority is lossless all the way (PFC, ECN).",
        ("a port or cable that corrupts frames", "a queue that overflows", "reordering"),
        (),
        explains=("kv_transfer_bottleneck",),
        commands=(
            "`ethtool -S IF | grep -E 'discard|crc|symbol|out_of_buffer'`: `rx_crc_errors_phy` is a bad link,"
            " `rx_discards_phy` a NIC without buffers",
            f"{RDMA}: at the receiver `out_of_sequence`, at the sender `packet_seq_err`,"
            " `local_ack_timeout_err`",
            "`nstat -az TcpRetransSegs` (TCP)",
            f"{SWITCH}: drops and errors of each port on the path",
        ),
    ),
    Condition(
        "credit_starvation",
        EAST_WEST,
        "The sender had data and the receiver did not take it: receiver-not-ready NAKs, TCP windows of zero,"
        " or NCCL's clear-to-send entries that come when the data waits already.",
        "there is any refusal; or a receiver's credits come later than its peers'.",
        "What operations waited for credits on their critical path: of the captured time.",
        "Look at the receiver's host, not at the sender or the link: is its process running and reading, are"
        " its buffers and receive queues large enough, is its memory bandwidth or PCIe busy.",
        ("a receiver that was late itself", "receive buffers set too small", "a busy host"),
        (),
        commands=(
            f"{RDMA}: at the sender `rnr_nak_retry_err`, at the receiver `out_of_buffer`",
            "at the receiver `nstat -az TcpExtTCPToZeroWindowAdv`, `ss -tmi` (TCP)",
        ),
    ),
    Condition(
        "kv_transfer_bottleneck",
        EAST_WEST,
        "Endpoints stand idle while pages come, and go on when these are there (disaggregated inference).",
        "there are three such waits or more, and they come to a hundredth of the time.",
        "The waits from the first page to the last, of the receivers' time; long pauses between pages are the"
        " sender's own.",
        "Where most of the wait lay before the first page, look at the sender: it still computed, or handed"
        " the cache on late (of a READ also at the receiver, which may have asked late). Between pages: at"
        " who posts them, the sender of a WRITE, the reader of a READ. With pages under way: at the path, if"
        " lossy, marked or slow; else move caches layer by layer, over more links, or make them smaller."
        " After the last page: at how the receiver learns that they are there.",
        ("memory or PCIe of either host", "a transfer engine with too few pages under way"),
        ("transfers",),
    ),
    Condition(
        "early_stop_skew",
        EAST_WEST,
        "One of several alike replicas stops its operations while the others go on.",
        "it is silent for twice the longest pause that it made before, while the capture goes on.",
        f"The silence: {_OF_RANKS}.",
        "Look at how requests are given to replicas, and whether that one still gets any.",
        ("a replica that was drained on purpose", "sequences that end early"),
        ("replicas",),
        explains=("decode_early_stop",),
    ),
    Condition(
        "slow_link",
        STOPPED,
        "Data takes three times as long as between other endpoints, leaves its node late, or comes through a"
        " receiver's port at a third of the other ports' pace whenever messages queue for it.",
        "messages take three times as long as those of the same operation and size on the other links; or a"
        " port passes queued messages at a third of the median pace of the other ports. A link or port that"
        " turned slow is judged by what came since, a port also against itself before.",
        "What messages took longer, as far as it lies on the critical path of steps: of the captured time.",
        f"{_PORT}, at both ends, and other jobs on the path.",
        ("a busy receiver host that cannot take data faster", "traffic of another job"),
        ("links",),
        explains=(
            "congestion",
            "head_of_line",
            "packet_loss",
            "kv_transfer_bottleneck",
            "slow_link",
            "credit_starvation",
        ),
        commands=(
            "`ethtool IF | grep -E 'Speed|Lanes'`: the rate that both ends agreed on",
            "`ethtool -S IF | grep -E 'pause|discard|crc|symbol|link_down'`",
            "`tc -s qdisc show dev IF`: a shaper of the host",
            f"{SWITCH}: speed, errors, policers and shapers of the port",
        ),
    ),
    Condition(
        "hang",
        STOPPED,
        "Some ranks never entered the last operation, though captures go on for longer than the group ever"
        " took between two.",
        "nothing happens for twice the longest time from one operation of the group to the next.",
        "All of the time since then: critical; what the others wait, in rank-seconds.",
        "Take stacks of the processes named first: they are stopped, wait for something else, or run another"
        " operation than their peers; those that wait show the same stack.",
        ("ranks that disagree on which operation comes next",),
        ("operations", "pairs"),
        explains=("straggler", "credit_starvation", "early_stop_skew", "ingress_starvation"),
    ),
    Condition(
        "desync",
        STOPPED,
        "Ranks of one group carry out another operation than their peers, or the same one with other sizes,"
        " and neither is ever finished.",
        "ranks that did the same before now do different things.",
        "All of the time since then: critical; what the others wait, in rank-seconds.",
        "Compare what these processes call, in which order and with which sizes: a branch that only some"
        " ranks take, an uneven last batch, parameters that differ.",
        ("ranks that disagree on which operation comes next",),
        ("operations", "pairs"),
        explains=("straggler", "credit_starvation", "early_stop_skew", "ingress_starvation"),
    ),
    Condition(
        "capture_loss",
        CAPTURE,
        "The capture itself misses packets.",
        "any packet is missing; a warning above one in ten thousand.",
        "None of the job's time.",
        "Keep fewer bytes of each packet (128), use a larger buffer, or capture messages instead of packets.",
        ("traffic that took another interface of the same node",),
    ),
    Condition(
        "clock_untied",
        CAPTURE,
        "Nothing ties a capture's clock to the others', and its messages are left out.",
        "a capture is not tied.",
        "None of the job's time.",
        "Capture traffic between such a node and another that is captured too (docs/troubleshooting.md).",
    ),
)
