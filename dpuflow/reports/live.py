"""A live capture in words: the line that is written over every second, and the summary at the end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from types import TracebackType

    from dpuflow.live.capture import LiveCapture, Status, Summary

_WORDS = {
    "folded": "folded into runs",
    "not_wanted": "filtered out",
    "sampled_out": "sampled out",
    "fragment": "non-first IP fragments, skipped",
    "cut": "too short for their headers, skipped",
    "ring_full": "LOST: ring full (use a larger --buffer, a filter or a smaller --snaplen)",
    "unreadable": "LOST: bytes not readable by the program",
    "no_stamp": "timestamped by the kernel (no NIC timestamp)",
    "rx_missed_errors": "LOST in the NIC: out of receive buffers (enlarge its ring: ethtool -G)",
    "rx_fifo_errors": "LOST in the NIC: queue overflow",
    "rx_dropped": "dropped by the interface (rx_dropped), possibly after capture",
    "rx_crc_errors": "CRC errors (rx_crc_errors)",
    "rx_errors": "receive errors (rx_errors)",
}


class LiveLine:
    """Call ``show`` every second; the line is wiped at the end. No line where stderr is no terminal."""

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._over = self._stream.isatty()
        self._shown = 0

    def started(self, capture: LiveCapture) -> None:
        """Say that packets are being taken, and how."""
        if self._enabled:
            names = ", ".join(interface.name for interface in capture.backend.interfaces)
            self._stream.write(f"capturing on {names} ({capture.backend.name}, {capture.backend.hooks})\n")
            self._stream.flush()

    def show(self, status: Status) -> None:
        """Write the line again."""
        if self._enabled and self._over:
            text = status_line(status)
            self._stream.write(f"\r{text:<{self._shown}}")
            self._stream.flush()
            self._shown = len(text)

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write(f"\r{'':<{self._shown}}\r")
            self._stream.flush()


def status_line(status: Status) -> str:
    """Rates of the last second, and what has been lost in all."""
    return (
        f"{status.packet_rate:,.0f} packets/s  {status.message_rate:,.0f} messages/s"
        f"  {status.bit_rate / 1e9:.3f} Gb/s  {status.flows:,} flows"
        f"  {status.packets:,} packets, {status.lost:,} lost"
    )


def summary_lines(summary: Summary, warnings_only: bool = False) -> list[str]:
    """What was captured, left out and lost, for each interface, then the warnings."""
    lines = []
    status = summary.status
    if not warnings_only:
        lines.append(
            f"{status.packets:,} packets in {status.seconds:.1f} s ({status.bytes:,} bytes on the wire,"
            f" {status.messages:,} RoCE messages, about {status.flows:,} flows), {status.lost:,} lost"
        )
        for name, counters in zip(summary.interfaces, summary.counters, strict=True):
            lines.append(f"  {name}: {counters['seen']:,} seen, {counters['captured']:,} captured")
            lines += [f"    {counters[key]:,} {words}" for key, words in _WORDS.items() if counters[key]]
    elif status.lost:
        lines.append(f"warning: {status.lost:,} packets were lost")
    return lines + [f"warning: {text}" for text in summary.warnings]
