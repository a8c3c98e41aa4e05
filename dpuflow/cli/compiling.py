"""Where kernels are not compiled yet: commands do without for little, else say what is waited for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from dpuflow.kernels import when_compiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow import Vantage

    Progress = Callable[[str, int, int], None]

COMPILING: Final = "dpuflow: compiling its kernels for this processor, once; about a minute on two cores ..."
LARGE: Final = (
    "dpuflow: these captures are large, so they wait until dpuflow's kernels are compiled for this processor:"
    " once, about a minute on two cores ..."
)
PLAINLY: Final = (
    "dpuflow: not compiled yet, so this runs as plain Python; compiling in the background for the next time"
    " (once, a minute or two)"
)
SMALL_BYTES: Final = 32 << 20
"""Of packets that plain Python reads in less time than compiling takes: some 30 us a packet."""
PACKED: Final = 8
"""How much smaller packet headers are compressed, about."""


def once(sentence: str) -> Callable[[int, float], None]:
    """What says ``sentence`` the first time that it is called, for ``when_compiling``."""
    left = [sentence]

    def say(number: int, seconds: float) -> None:
        if left:
            click.echo(left.pop(), err=True)

    return say


def mind_compiling(vantages: list[Vantage], workers: int = 1, progress: Progress | None = None) -> None:
    """Before captures are read: where nothing is compiled do without for little, else say what is awaited.

    ``progress``: who is told; None: nobody.
    """
    from dpuflow.kernels import _ready

    when_compiling.clear()
    undecided = _ready.undecided()
    if undecided and _small(vantages):
        if _ready.run_plainly() and progress is not None:
            click.echo(PLAINLY, err=True)
        return
    if workers > 1:  # each of them compiles, and none says so
        if undecided and progress is not None:
            click.echo(LARGE, err=True)
        return
    after = _kernel_after_parsing(vantages)
    when_compiling.append(lambda number, seconds: _ready.compile_beside(*after))
    if progress is not None:
        show = progress
        stage = "compiling kernel {} (once for this processor), seconds"
        when_compiling.append(once(LARGE))
        when_compiling.append(lambda number, seconds: show(stage.format(number), int(seconds), 0))


def _small(vantages: list[Vantage]) -> bool:
    """Whether their files are together no more than ``SMALL_BYTES``, about.

    Of a pipe nobody knows: it is read at once, and goes on with compiled kernels when they are there.
    """
    total = 0
    for name in (name for vantage in vantages for name in vantage.files if os.path.isfile(name)):
        total += os.path.getsize(name) * (PACKED if name.endswith((".gz", ".zst")) else 1)
    return total <= SMALL_BYTES


def _kernel_after_parsing(vantages: list[Vantage]) -> tuple[str, str]:
    """Which kernel the first capture needs once its packets are parsed, by a look at the file's beginning."""
    from dpuflow.capture.pcapfile import open_file
    from dpuflow.errors import DpuflowError

    tcp, roce = ("dpuflow.kernels.tcp", "follow"), ("dpuflow.kernels.roce", "scan")
    name = vantages[0].files[0]
    if not os.path.isfile(name):  # a pipe can be read but once
        return roce
    try:
        opened = open_file(name)
    except (DpuflowError, OSError):
        return roce
    head = opened.bytes.window(0, 1 << 16).tobytes()
    opened.bytes.close()
    # UDP port 4791 or RoCEv1's EtherType. A wrong guess costs time, nothing else.
    return roce if head.count(b"\x12\xb7") + head.count(b"\x89\x15") > len(head) >> 10 else tcp
