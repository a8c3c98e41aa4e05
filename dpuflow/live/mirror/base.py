"""What every way of mirroring is: steps, each with what undoes it; and running them so that nothing stays.

Before a step is taken, what undoes it is written to a file in RUN_FOLDER. It is undone at the end, whatever
ends it; after a crash by the next start or by ``dpuflow doctor --clean``. Filters whose notes are gone are
found by what they are (``strays``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from dpuflow.errors import DpuflowError, MissingError, OptionError

if TYPE_CHECKING:
    import socket
    from types import TracebackType

RUN_FOLDER: Final = "/run/dpuflow"
_TIMEOUT_S: Final = 20

_HINTS: Final = (
    ("not on same switch HW", "the copies' receiver must belong to the same card and port"),
    ("both uplink", "copies cannot go from one uplink to the other"),
    ("Exclusivity flag on", "another filter has that priority already"),
    ("qdisc kind is unknown", "this kernel has no clsact"),
    ("Failed to load TC action module", "this kernel lacks that tc action"),
    ("TC classifier not found", "this kernel lacks that tc classifier: use tc-software"),
    ("Operation not permitted", "needs root or CAP_NET_ADMIN"),
)
"""Words of the kernel's, and what they mean here."""


@dataclass(frozen=True)
class MirrorPlan:
    """What is to be copied, and where to. ``peer``: where ``source`` forwards to, if the rule must say so."""

    source: str
    to: str = ""
    peer: str = ""
    receiver: str = ""
    bridge: str = ""
    protocols: tuple[str, ...] = ("roce",)
    rate: int = 1000
    group: int = 55776
    truncate: int = 128


@dataclass(frozen=True)
class Step:
    """One command, and the command that undoes it.

    ``unless``: not taken where this command's output has ``has`` in it (or it succeeds, where that is empty).
    ``absent``: refused where this command's output has ``has`` in it: somebody else's would be undone.
    ``still``: undone only if none of these commands prints anything.
    ``device``: the interface whose filters are then this mirror's, which others are told (``strays``).
    """

    do: tuple[str, ...]
    undo: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    has: str = ""
    still: tuple[tuple[str, ...], ...] = ()
    device: str = ""


class Commands(Protocol):
    """A way of mirroring that commands set up."""

    def steps(self, plan: MirrorPlan) -> list[Step]:
        """What is to be done, in order. Raises OptionError for what cannot be."""
        ...


def run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a command. Raises MissingError where there is none of that name."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise MissingError(f"command not found: {command[0]}, which this kind of mirror needs") from None
    except subprocess.TimeoutExpired:
        raise DpuflowError(f"{shlex.join(command)}: no answer in {_TIMEOUT_S} s") from None


def explain(command: tuple[str, ...], said: str) -> DpuflowError:
    """What a command that failed has said, in one sentence."""
    text = " ".join(said.split()) or "it failed without a message"
    hint = next((f": {meaning}" for word, meaning in _HINTS if word in said), "")
    return DpuflowError(f"{shlex.join(command)}: {text}{hint}")


def dry_run(steps: list[Step]) -> list[str]:
    """The steps as lines for a shell, and those that undo them."""
    lines = []
    for step in steps:
        lines.append(shlex.join(step.do) + (f"  # unless {step.has or 'so'} already" if step.unless else ""))
    undone = [step for step in reversed(steps) if step.undo]
    lines += ["# at the end:", *(shlex.join(step.undo) for step in undone)]
    return lines


class CommandMirror:
    """Steps taken while the block runs."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self._taken: list[Step] = []
        self._held: dict[str, socket.socket] = {}
        self.warnings: list[str] = []
        self.undone: list[str] = []

    def lines(self) -> list[str]:
        """The commands, and those that undo them."""
        return dry_run(self._steps)

    def __enter__(self) -> CommandMirror:
        """Take the steps. Raises OptionError, MissingError, DpuflowError; all is undone then."""
        self._file = run_folder() / f"mirror-{os.getpid()}.json"
        self.undone = clean()
        try:
            for step in self._steps:
                self._take(step)
        except BaseException:
            self._undo()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo them."""
        self._undo()

    def _take(self, step: Step) -> None:
        if step.unless:
            asked = run(step.unless)
            if step.has in asked.stdout if step.has else asked.returncode == 0:
                return
        if step.absent and step.has in run(step.absent).stdout:
            raise DpuflowError(f"{shlex.join(step.do)}: something else has {step.has.strip()} there")
        if step.device and step.device not in self._held:
            from dpuflow.live.mirror.strays import claim

            self._held[step.device] = claim(step.device)
        if step.undo:
            self._taken.append(step)
            self._save()
        done = run(step.do)
        if done.returncode:
            if step.undo:
                self._taken.pop()
            raise explain(step.do, done.stderr or done.stdout)

    def _save(self) -> None:
        """So that whoever comes next can undo it."""
        saved = {
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "network": network(),
            "taken": [asdict(step) for step in self._taken],
        }
        fresh = self._file.with_suffix(".new")
        try:
            fresh.write_text(json.dumps(saved), encoding="utf-8")
            fresh.replace(self._file)
        except OSError as error:
            raise DpuflowError(f"{fresh}: {error.strerror}; mirroring needs it") from None

    def _undo(self) -> None:
        self.warnings += undo(self._taken)
        self._taken = []
        self._file.unlink(missing_ok=True)
        for held in self._held.values():
            held.close()
        self._held = {}


def undo(taken: list[Step]) -> list[str]:
    """Undo steps, the last one first; what could not be undone, in words."""
    warnings = []
    for step in reversed(taken):
        with contextlib.suppress(DpuflowError):
            if any(run(command).stdout.strip() for command in step.still):
                continue  # others have come to use it
        try:
            done = run(step.undo)
            if done.returncode:
                warnings.append(f"not undone: {explain(step.undo, done.stderr or done.stdout)}")
        except DpuflowError as error:
            warnings.append(f"not undone: {error}")
    return warnings


def run_folder() -> Path:
    """Where what is to be undone is noted; made if need be. Raises OptionError."""
    folder = Path(os.environ.get("DPUFLOW_RUN") or RUN_FOLDER)
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{folder}: {error.strerror}; DPUFLOW_RUN may name another folder") from None
    return folder


def leftovers() -> list[tuple[Path, list[Step]]]:
    """What dead processes have left in this network namespace."""
    found = []
    folder = Path(os.environ.get("DPUFLOW_RUN") or RUN_FOLDER)
    for file in sorted(folder.glob("mirror-*.json")):
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            if started(saved["pid"]) == saved["started"] or saved["network"] != network():
                continue
            steps = [_step(each) for each in saved["taken"]]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append((file, steps))
    return found


def clean() -> list[str]:
    """Undo what dead processes have left; what that was, in words."""
    said = []
    for file, steps in leftovers():
        undo(steps)
        file.unlink(missing_ok=True)
        said += [shlex.join(step.do) for step in steps]
    from dpuflow.live.mirror.strays import strays

    unnoted = strays()
    undo(unnoted)
    return said + [shlex.join(step.do) for step in unnoted]


def _step(saved: dict[str, object]) -> Step:
    def words(value: object) -> tuple[str, ...]:
        return tuple(map(str, value)) if isinstance(value, list) else ()

    still = saved.get("still")
    return Step(
        words(saved["do"]), words(saved["undo"]),
        still=tuple(words(each) for each in still) if isinstance(still, list) else (),
    )  # fmt: skip


def started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks: tells it from another one of the same number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def network() -> int:
    """This network namespace's number."""
    return os.stat("/proc/self/ns/net").st_ino
