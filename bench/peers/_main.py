"""The command line of the peers written in Python: FILE PACKETS [check].

Without ``check`` the fields of the first PACKETS packets are decoded and dropped: that is timed.
With it they are added up, and the packets and their checksum are printed.
"""

from __future__ import annotations

import sys
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from bench.checksum import Checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.checksum import Fields


def checksum(packets: Iterator[Fields]) -> Checksum:
    """The checksum of all ``packets``."""
    total = Checksum()
    for fields in packets:
        total.add(fields)
    return total


def main(read: Callable[[str], Iterator[Fields]]) -> None:
    """Run one peer."""
    packets = islice(read(sys.argv[1]), int(sys.argv[2]))
    if sys.argv[3:] == ["check"]:
        total = checksum(packets)
        print(total.packets, total)
    else:
        deque(packets, maxlen=0)
