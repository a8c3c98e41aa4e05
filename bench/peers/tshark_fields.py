"""Peer: ``tshark -T fields``: the command that is timed, and its output as the common fields."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from bench.peers._main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.checksum import Fields

_FIELDS: Final = (
    *("frame.time_epoch", "ip.src", "ip.dst", "udp.srcport", "udp.dstport", "frame.len", "udp.length"),
    *("ip.dsfield.ecn", "infiniband.bth.opcode", "infiniband.bth.a", "infiniband.bth.se", "infiniband.bth.m"),
    *("infiniband.bth.padcnt", "infiniband.bth.destqp", "infiniband.bth.psn"),
)


def command(path: str, packets: int = 0) -> list[str]:
    """The command line; ``packets``: stop after so many, 0 for all."""
    words = ["tshark", "-n", "-r", path, "-T", "fields"]
    for name in _FIELDS:
        words += ["-e", name]
    return [*words, "-c", str(packets)] if packets else words


def _number(text: str) -> int:
    """A flag is 1 or 0, from Wireshark 4.2 on True or False."""
    return text == "True" if text in ("True", "False") else int(text, 0)


def _ipv4(text: str) -> int:
    a, b, c, d = map(int, text.split("."))
    return a << 24 | b << 16 | c << 8 | d


def read(path: str, packets: int = 0) -> Iterator[Fields]:
    """The packets of a capture of RoCEv2 over IPv4, all or the first ``packets``."""
    with subprocess.Popen(
        command(path, packets), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            time, src, dst, *numbers = line.rstrip("\n").split("\t")
            seconds, _, fraction = time.partition(".")
            sport, dport, wire, udp, ecn, opcode, ack, solicited, mig, pad, qp, psn = map(_number, numbers)
            flags = ack | solicited << 3 | mig << 4 | pad << 5
            yield (int(seconds) * 1_000_000_000 + int(fraction), _ipv4(src), _ipv4(dst), sport, dport,
                   wire, udp, ecn, opcode, flags, qp, psn)  # fmt: skip


if __name__ == "__main__":
    main(read)
