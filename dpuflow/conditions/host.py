"""Rows: what a node's own bus and host do. Most are seen indirectly."""

from __future__ import annotations

from typing import Final

from dpuflow.conditions.row import INDIRECT, PCIE, Condition

_OF_RANKS = "rank-seconds, of the time of all ranks"

ROWS: Final = (
    Condition(
        "input_starvation",
        PCIE,
        "A prompt is at its front end while the ranks stand still, and the first collective after it comes"
        " later than it used to.",
        "from one prompt on, every such delay is more than twice the longest one before,"
        " in an order that chance makes once in a thousand times at the most.",
        f"These delays beyond the usual: {_OF_RANKS}.",
        "Look at copies from host to device: pinned memory, NUMA placement, a bus shared with the NIC.",
        ("a host short of CPU", "a scheduler that waits to fill a batch", "a tokeniser that is slow"),
        ("requests", "operations"),
        observability=INDIRECT,
        why="tokenising, scheduling and copies all lie between the prompt and the first collective",
    ),
    Condition(
        "output_bottleneck",
        PCIE,
        "What egress_backlog shows, where neither loss nor a full port on the way to the clients explains"
        " it.",
        "egress_backlog is reported.",
        "as for egress_backlog.",
        "Look at copies from device to host and at the front end's process.",
        ("a front end short of CPU",),
        ("requests", "operations", "front_end"),
        observability=INDIRECT,
        why="detokenising and writing to the socket look the same",
        told_as="egress_backlog",
    ),
    Condition(
        "launch_latency",
        PCIE,
        "In each step all ranks together pause between operations for longer than they used to.",
        "from one step on, every step's pauses are more than twice as long as any earlier step's,"
        " in an order that chance makes once in a thousand times at the most.",
        f"The pauses beyond the usual: {_OF_RANKS}.",
        "Look at kernel launches: CUDA graphs, host threads, interpreter pauses.",
        (
            "work that grew on all ranks alike",
            "a scheduler's pause between tokens",
            "clocks that were lowered",
        ),
        ("steps",),
        observability=INDIRECT,
        why="work that grew on all ranks alike looks the same",
    ),
    Condition(
        "node_skew",
        PCIE,
        "All ranks of one node are late together, and those of other nodes are not.",
        "each of the node's ranks is judged late, and no rank elsewhere.",
        f"What the others waited: {_OF_RANKS}.",
        "Find the node's GPU that is late first: its own clocks, temperature and input, from the host; then"
        " look at what the node's ranks share: host, bus, power and cooling, its NVLink domain.",
        ("a shard or stage that the node's ranks have in common", "a slow or busy host"),
        ("nodes", "operations"),
        explains=("straggler", "p2p_throttling"),
        why="this takes a NIC for each GPU, as GPUs behind one NIC are reported as one straggler",
    ),
    Condition(
        "pcie_saturation",
        PCIE,
        "A node answers RDMA READs later than the other nodes do. Only the first READ of a transfer counts,"
        " and only where the node was sending nothing else.",
        "its median delay is more than three times that of the other nodes (99.9 % confidence).",
        "The extra delay of these answers: message-seconds, of the time that transfers were under way.",
        "Look at the host's bus: link width and speed, devices that share it, the NIC's own stall counters.",
        ("a host short of memory bandwidth", "a congested path back"),
        ("reads",),
        commands=(
            "`lspci -vv -s ADDRESS | grep LnkSta`: width and speed of the NIC's slot",
            "`ethtool -S IF | grep -E 'pci_stalled|pci_signal'`: how often the NIC waited for the bus",
        ),
        observability=INDIRECT,
        why="a slow host memory answers as slowly as a full bus",
    ),
    Condition(
        "p2p_throttling",
        PCIE,
        "Data that passes through a node waits there for longer than at other nodes, although its receiver"
        " has granted credit and its connection is idle.",
        "that time, of the median message beyond what passing on takes at the least, is more than twice that"
        " of any other node.",
        f"That time, one message after the other, beyond the other nodes' median: {_OF_RANKS}.",
        "Look at the links between the node's GPUs: topology, NVLink errors, peer-to-peer access.",
        ("GPUs behind the node's first that are late themselves", "a larger shard on that node"),
        ("within",),
        commands=("`nvidia-smi topo -m`, `nvidia-smi nvlink -e`: paths between GPUs, errors of NVLink",),
        observability=INDIRECT,
        explains=("straggler",),
        why="a late GPU inside the node holds its output back in the same way",
    ),
    Condition(
        "pinned_memory_shortage",
        PCIE,
        "Pages of transfers between the same two endpoints get smaller, so that it takes more writes for the"
        " same bytes.",
        "from one point on, pages have less than half the bytes of the same pair's earlier pages,"
        " in an order that chance makes once in a thousand times at the most.",
        "What transfers took longer for their bytes than before, of the time that transfers were under way.",
        "Look at registered (pinned) memory limits and at fragmentation of the cache's pages.",
        ("another model or page size since then",),
        ("transfers",),
        observability=INDIRECT,
        why="an engine configured to use smaller pages looks the same",
    ),
    Condition(
        "host_cpu",
        PCIE,
        "All ranks of a node are late together, and so are the credits that they grant.",
        "each of the node's ranks is judged late with the cause `host`, and no rank elsewhere.",
        f"What the others waited: {_OF_RANKS}.",
        "Look at the node's processes and cores: pinning, other jobs, interrupts, interpreter pauses.",
        ("a bus that is full",),
        ("nodes", "operations"),
        explains=("straggler", "node_skew"),
        observability=INDIRECT,
        why="a full bus delays credits and data alike",
    ),
    Condition(
        "registration_churn",
        PCIE,
        "Memory keys that are new for each operation or transfer, which begins later than those of known"
        " keys.",
        "in the later half of a rank's collectives or bulk transfers of a kind most name a key to its memory"
        " that is new, and these begin later (99.9 % confidence) than those with known keys: of its peers at"
        " the same time, else its own.",
        "What these began later, of the captured time: the most that it can be, where computing goes on"
        " meanwhile.",
        "Register buffers once and keep them: registration caches, fixed pools. The host's own counters of"
        " registered memory show it.",
        ("buffers that are used once on purpose", "a rank that is late for another reason", "a busy host"),
        ("keys",),
        explains=("straggler", "credit_starvation", "launch_latency", "host_cpu", "node_skew"),
        observability=INDIRECT,
        why="what else a host does before it uses a new buffer looks the same",
    ),
    Condition(
        "decode_early_stop",
        PCIE,
        "What early_completion shows, at the GPUs: ranks of one replica stop while its peers go on.",
        "early_stop_skew is reported.",
        "as for early_stop_skew.",
        "As for early_stop_skew.",
        (),
        ("replicas",),
        observability=INDIRECT,
        why="what a GPU stops computing shows in its collectives alone",
        told_as="early_stop_skew",
    ),
)
