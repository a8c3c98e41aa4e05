"""A scenario: what job runs on which cluster, what goes wrong, and what is captured. Read from YAML.

``keys`` declares what each part may say; docs/synth.md lists it.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import MISSING, dataclass
from importlib import resources

import yaml

from dpuflow.errors import OptionError
from dpuflow.settings import Reader, setting
from dpuflow.synth.keys.checks import contradiction
from dpuflow.synth.keys.cluster import PROTOCOLS, VERSIONS, Cluster, Machine, Nccl
from dpuflow.synth.keys.faults import (
    Churn,
    CrossTraffic,
    Desync,
    EarlyStop,
    Fault,
    Flap,
    GpuLate,
    Hang,
    Late,
    Loss,
    Nvlink,
    Pause,
    Reorder,
    SlowGpu,
    SlowHost,
    SlowInput,
    SlowLink,
    SlowPcie,
    SlowReceiver,
    Stop,
)
from dpuflow.synth.keys.jobs import (
    ALGORITHM_OF,
    ALGORITHMS,
    OPS,
    Decode,
    Experts,
    Job,
    Loop,
    Operation,
    PrefillDecode,
    Service,
    Training,
)
from dpuflow.synth.keys.observation import Clients, Clocks, Observation

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_OF",
    "OPS",
    "PROTOCOLS",
    "VERSIONS",
    "Churn",
    "Clients",
    "Clocks",
    "Cluster",
    "CrossTraffic",
    "Decode",
    "Desync",
    "EarlyStop",
    "Experts",
    "Fault",
    "Flap",
    "GpuLate",
    "Hang",
    "Job",
    "Late",
    "Loop",
    "Loss",
    "Machine",
    "Nccl",
    "Nvlink",
    "Observation",
    "Operation",
    "Pause",
    "PrefillDecode",
    "Reorder",
    "Scenario",
    "Service",
    "SlowGpu",
    "SlowHost",
    "SlowInput",
    "SlowLink",
    "SlowPcie",
    "SlowReceiver",
    "Stop",
    "Training",
    "parse_scenario",
    "read_scenario",
    "ready",
    "ready_text",
]


@dataclass(kw_only=True)
class Scenario:
    """All of it."""

    name: str = setting("scenario", "name of the case")
    about: str = setting("", "one sentence")
    seed: int = setting(1, "same seed, same bytes", low=0)
    cluster: Cluster = setting(Cluster(), "see below")
    nccl: Nccl = setting(Nccl(), "see below")
    machine: Machine = setting(Machine(), "see below")
    job: Job = setting(MISSING, "see below")
    clients: Clients = setting(Clients(), "see below")
    faults: list[Fault] = setting([], "see below")
    observation: Observation = setting(Observation(), "see below")

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.cluster.nodes * self.cluster.gpus_per_node


def read_scenario(file: str) -> Scenario:
    """A scenario from a YAML file or, where there is no such file, a ready one by name.

    Raises OptionError with file, line and key, OSError.
    """
    if file in ready():
        text = ready_text(file)
    elif not os.path.exists(file):
        raise OptionError(f"{file}: neither a file nor a ready scenario (dpuflow synth --list has those)")
    else:
        with open(file, encoding="utf-8") as stream:
            try:
                text = stream.read()
            except UnicodeDecodeError:
                raise OptionError(f"{file}: not YAML: not UTF-8 text") from None
    return parse_scenario(text, file)


def parse_scenario(text: str, name: str) -> Scenario:
    """A scenario from YAML text; ``name`` is what errors call it. Raises OptionError."""
    reader = Reader(name)
    root = reader.root(text)
    scenario = reader.build(Scenario, root, "")
    problem = contradiction(scenario)
    if problem is not None:
        key, reason = problem
        raise reader.fail(_locate(root, key), key, reason)
    return scenario


def ready_text(name: str) -> str:
    """The YAML of a ready scenario. Raises OptionError where there is none of that name."""
    known = ready()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise OptionError(f"{name}: no built-in scenario of that name" + (f"; {near[0]}?" if near else ""))
    return (resources.files("dpuflow.synth") / "ready" / f"{name}.yaml").read_text(encoding="utf-8")


def ready() -> dict[str, str]:
    """The ready scenarios: name -> the first comment line, which says what it is."""
    folder = resources.files("dpuflow.synth") / "ready"
    found = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".yaml"):
            first = entry.read_text(encoding="utf-8").split("\n", 1)[0]
            found[entry.name.removesuffix(".yaml")] = first.lstrip("# ")
    return dict(sorted(found.items()))


def _locate(root: yaml.Node, key: str) -> yaml.Node:
    """The node that ``key`` (a.b[1].c) names, or the nearest one above it that was written."""
    node = root
    for part in key.replace("[", ".").replace("]", "").split("."):
        below: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            below = next((value for name, value in node.value if name.value == part), None)
        elif isinstance(node, yaml.SequenceNode):
            below = node.value[int(part)]
        if below is None:
            return node
        node = below
    return node
