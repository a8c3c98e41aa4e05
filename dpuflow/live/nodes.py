"""One capture on several nodes: this side starts it on each, gives all the same window, and collects.

In: nodes, and a command that runs words on one of them (ssh, srun, kubectl exec). Out: a file for each.
The other side is ``live/node``: it says hello, tells its wall clock when asked, attaches when told to, and
captures to a file of its own, which it sends when the window is over, so that nothing of it goes over the
job's network meanwhile. The window begins when all nodes capture: each file has all of it, and what its node
saw while others were attaching. A node ends as soon as its standard input does: so Ctrl-C here, or a
connection that breaks, ends it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dpuflow.errors import DpuflowError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OVER: Final = "ssh -o BatchMode=yes {node} {line}"
HELLO: Final = b"dpuflow-node "
"""What a line of a node's dpuflow begins with; what a login shell prints before is skipped."""
NOW: Final = b"now"
ATTACH: Final = b"attach"
"""What a node is asked: its clock; to begin its capture."""
_ANSWER_S: Final = 60.0
"""How long a node may take to answer: a connection, and Python's start on a busy machine."""
_ASKED: Final = 5  # readings of a node's clock; the quickest counts


@dataclass(eq=False)
class Node:
    """One node: how it stands, its clock, and its file once there."""

    name: str
    file: Path
    process: subprocess.Popen[bytes] | None = None
    clock: str = ""
    offset_ns: int = 0
    """Its wall clock minus this machine's, as far as the way there and back tells."""
    error_ns: int = 0
    failed: str | None = None
    came: bool = False
    """Its file has come."""
    said: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        """Its first failure counts."""
        self.failed = self.failed or reason
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.kill()

    def tell(self, text: str) -> None:
        """A line to its standard input."""
        assert self.process is not None
        assert self.process.stdin is not None
        # Not by its buffer: what a node that has gone did not take would be tried again at the very end.
        os.write(self.process.stdin.fileno(), text.encode() + b"\n")

    def stop(self) -> None:
        """End its window now: its input ends."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


def split_nodes(texts: tuple[str, ...], folder: Path, ending: str) -> list[Node]:
    """The nodes named, each once, with files of their names. Raises OptionError."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if not names:
        raise OptionError("--on needs node names, such as node1,node2")
    files = [re.sub(r"[^\w.+-]", "_", name.rpartition("@")[2]) for name in names]
    if len({*files}) < len(files):
        raise OptionError("--on names a node twice")
    return [Node(name, folder / (file + ending)) for name, file in zip(names, files, strict=True)]


def command_for(template: str, node: str, words: list[str]) -> list[str]:
    """The template's words; {command} becomes ``words``, {line} the same for a shell. Raises OptionError."""
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise OptionError(f"--over: {error}") from None
    if not {"{command}", "{line}"} & {*parts} or "{node}" not in template:
        raise OptionError("--over needs the words {node}, and {command} or {line}")
    made: list[str] = []
    for part in parts:
        made += (
            words
            if part == "{command}"
            else [part.replace("{node}", node).replace("{line}", shlex.join(words))]
        )
    return made


def capture_on(
    nodes: list[Node],
    template: str,
    words: list[str],
    duration_s: float | None,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Capture on all ``nodes`` with ``words``; returns when all have sent their files or failed.

    KeyboardInterrupt ends the window, a second one everything. What happens goes to ``say``, a line each;
    which node failed, and why, to ``warn`` at once. Raises OptionError, DpuflowError where no node answers.
    """
    for node in nodes:
        _start(node, command_for(template, node.name, words))
        if node.failed is not None:
            warn(f"{node.name}: FAILED: {node.failed}")
    try:
        _each(nodes, lambda node: _greet(node, say), warn)
        ready = [node for node in nodes if node.failed is None]
        if not ready:
            raise DpuflowError("no node answered" if len(nodes) > 1 else f"{nodes[0].name} did not answer")
        _each(ready, _attach, warn)
        ready = [node for node in ready if node.failed is None]
        if duration_s is not None:
            end_ns = time.time_ns() + round(duration_s * 1e9)
            for node in ready:
                with contextlib.suppress(OSError):
                    node.tell(json.dumps({"end_ns": end_ns + node.offset_ns}))
        if ready:
            say(f"capturing on {', '.join(node.name for node in ready)}")
        _each(ready, lambda node: _collect(node, say), warn, stop=ready)
    finally:
        for node in nodes:
            if node.process is not None and node.process.poll() is None:
                node.process.kill()


def _start(node: Node, command: list[str]) -> None:
    """Away from this terminal's Ctrl-C, which is this process's to hand on."""
    try:
        node.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        node.fail(f"{command[0]}: {error.strerror}")
        return
    threading.Thread(target=_listen, args=(node,), daemon=True).start()


def _listen(node: Node) -> None:
    """Keep what the node says in words."""
    assert node.process is not None
    assert node.process.stderr is not None
    for line in node.process.stderr:
        node.said.append(line.decode(errors="replace").strip())


def _each(
    nodes: list[Node],
    act: Callable[[Node], None],
    warn: Callable[[str], None],
    stop: list[Node] | None = None,
) -> None:
    """``act`` for all nodes at a time, to their ends; ``warn`` of those that fail; Ctrl-C then stops the
    nodes, a second one is raised."""

    waiting = [node for node in nodes if node.failed is None]

    def run(node: Node) -> None:
        try:
            act(node)
        except (OSError, ValueError, KeyError) as error:
            node.fail(_last_words(node) or str(error))
        finally:
            if node.failed is not None:
                warn(f"{node.name}: FAILED: {node.failed}")
            waiting.remove(node)

    for node in waiting[:]:
        threading.Thread(target=run, args=(node,), daemon=True).start()
    stopped = False
    while True:
        try:
            while waiting:  # not by join: interrupted, it takes threads for ended
                time.sleep(0.1)
            return
        except KeyboardInterrupt:
            if stopped or stop is None:
                raise
            stopped = True
            for node in stop:
                node.stop()


def _greet(node: Node, say: Callable[[str], None]) -> None:
    """Its hello, then its clock against this one: half of the quickest way there and back is the error."""
    with _in_time(node):
        node.clock = _answer(node)["clock"]
        best: tuple[int, int] | None = None
        for _ in range(_ASKED):
            before = time.time_ns()
            node.tell(NOW.decode())
            there = _answer(node)["now_ns"]
            after = time.time_ns()
            reading = ((after - before) // 2 + 1, there - (before + after) // 2)
            best = min(best or reading, reading)
        assert best is not None
        node.error_ns, node.offset_ns = best
    ahead = "ahead of" if node.offset_ns > 0 else "behind"
    against = f"is {abs(node.offset_ns) / 1e6:,.3f} ms {ahead} this machine's"
    if abs(node.offset_ns) <= node.error_ns:
        against = "agrees with this machine's"
    say(f"{node.name}: clock {against} (+-{node.error_ns / 1e6:,.3f} ms); {node.clock}")


def _attach(node: Node) -> None:
    """Until it takes packets."""
    with _in_time(node):
        node.tell(ATTACH.decode())
        _answer(node)


@contextlib.contextmanager
def _in_time(node: Node) -> Iterator[None]:
    """A node that does not answer has failed."""
    timer = threading.Timer(_ANSWER_S, lambda: node.fail(f"no answer within {_ANSWER_S:.0f} s"))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _answer(node: Node) -> dict[str, Any]:
    """The next line that is the node's dpuflow's. Raises ValueError at the end."""
    assert node.process is not None
    assert node.process.stdout is not None
    for line in node.process.stdout:
        if line.startswith(HELLO):
            found: dict[str, Any] = json.loads(line[len(HELLO) :])
            return found
    node.process.wait()
    time.sleep(0.1)  # what it says in words comes by another way
    raise ValueError(f"exited with status {node.process.returncode}")


def _collect(node: Node, say: Callable[[str], None]) -> None:
    """The rest of its output to its file."""
    size = _answer(node)["bytes"]
    assert node.process is not None
    assert node.process.stdout is not None
    part = node.file.with_name(node.file.name + ".part")
    with part.open("wb") as out:
        shutil.copyfileobj(node.process.stdout, out)
        came = out.tell()
    status = node.process.wait()
    if came != size:
        part.unlink()
        raise ValueError(f"{came:,} of {size:,} bytes received")
    part.replace(node.file)
    node.came = True
    for line in node.said:
        say(f"{node.name}: {line}")
    if status:
        node.fail(_last_words(node) or f"exited with status {status}")


def _last_words(node: Node) -> str:
    """Why it failed, by itself."""
    return next((line for line in reversed(node.said) if line), "").removeprefix("dpuflow: ")
