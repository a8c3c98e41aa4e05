"""A finding's packets as a capture of their own, with the verdict as comments.

In: a result (``dpuflow.analysis/1``, read from JSON) and the capture files that it names. Out: pcapng whose
section and packets say what was found, for Wireshark.
"""

from __future__ import annotations

import json
import os
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from dpuflow.errors import DpuflowError, FormatError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dpuflow.capture.base import CaptureFile

_SECTION, _INTERFACE, _PACKET = 0x0A0D0D0A, 1, 6
_COMMENT, _NAME, _RESOLUTION = 1, 2, 9
_READ = 4 << 20


class Frame(NamedTuple):
    """A captured packet; ``number`` counts from 1 as Wireshark does."""

    number: int
    time_ns: int
    link: int
    length: int
    data: bytes


def read_result(file: str) -> dict[str, Any]:
    """A result that ``analyze --json`` wrote. Raises FormatError, OSError."""
    from dpuflow.schema.rows import ANALYSIS_ID

    with open(file, encoding="utf-8") as stream:
        try:
            result = json.load(stream)
        except ValueError as error:
            raise FormatError(file, f"not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("schema") != ANALYSIS_ID:
        raise FormatError(file, f"not a result of dpuflow analyze --json ({ANALYSIS_ID})")
    return result


def finding_of(result: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The finding with the id ``name``, or the first one of that condition, of those that others explain as
    well. Raises OptionError."""
    found: list[dict[str, Any]] = result.get("findings", [])
    parts = [{"id": each["id"], **part} for each in found for part in each.get("consists_of", [])]
    for each in [*found, *parts]:
        if name in (str(each["id"]), each["condition"]):
            return each
    listed = [f"{each['id']} ({each['condition']})" for each in found]
    known = ", ".join([*listed, *(part["condition"] for part in parts)]) or "none"
    raise OptionError(f"no finding {name!r} in this result; it has: {known}")


def export_finding(result: Mapping[str, Any], name: str, target: str) -> int:
    """Write the packets of a finding's evidence to ``target`` (pcapng); how many.

    Raises OptionError, DpuflowError, FormatError, CaptureError, OSError.
    """
    finding = finding_of(result, name)
    evidence: list[dict[str, Any]] = finding.get("evidence", [])
    if not evidence:
        raise OptionError(f"finding {finding['id']} ({finding['condition']}) names no packets")
    sure = "" if finding.get("confidence") is None else f" ({finding['confidence']:.0%} sure)"
    said = f"dpuflow: {finding['condition']}{sure}: {finding['summary']}"
    parts = [_block(_SECTION, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1), [(_COMMENT, said.encode())])]
    interfaces: dict[tuple[int, int], int] = {}
    packets: list[bytes] = []
    for capture in sorted({each["capture"] for each in evidence}):
        info = result["captures"][capture]
        wanted = _wanted(info["files"], [each for each in evidence if each["capture"] == capture])
        for frame in frames(info["files"]):
            if frame.number not in wanted:
                continue
            if (capture, frame.link) not in interfaces:
                interfaces[capture, frame.link] = len(interfaces)
                parts.append(_interface(info["vantage"], frame.link))
            number = interfaces[capture, frame.link]
            comment = f"dpuflow: {finding['condition']}; packet {frame.number} of {info['vantage']}"
            packets.append(_packet(number, frame, comment))
    _write(target, parts, packets)
    return len(packets)


def _write(target: str, heads: Sequence[bytes], packets: Sequence[bytes]) -> None:
    """Blocks of pcapng to a file, as its name says: pcap as well, packed or not."""
    from dpuflow.live.output import format_of, packer
    from dpuflow.live.pcap import Pcap

    kind, packed = format_of(target)
    data = b"".join([*heads, *packets])
    if kind == "pcap":
        data = bytes(Pcap().convert(memoryview(data)))
    if packed:
        pack = packer(packed)[0]
        data = pack.compress(data) + pack.flush()
    with open(target, "wb") as file:
        file.write(data)


def _wanted(files: Sequence[str], evidence: Sequence[Mapping[str, Any]]) -> set[int]:
    """Numbers of the frames that the evidence speaks of: those of its range and of its flow."""
    from dpuflow.capture import open_capture
    from dpuflow.findings.evidence import flow_filter
    from dpuflow.packets.records import read_blocks

    _check_files(files)
    found: set[int] = set()
    reader = read_blocks(open_capture(list(files)))
    for block in reader:
        frames_of, flows = block.columns["frame"][: block.rows], block.columns["flow"][: block.rows]
        tables = SimpleNamespace(endpoints=reader.endpoints)
        for each in evidence:
            first, last = each["packets"]
            within = (frames_of >= first - 1) & (frames_of <= last - 1)
            if not within.any():
                continue
            mine = [
                number
                for number in set(flows[within].tolist())
                if number < len(reader.flows) and flow_filter(tables, reader.flows[number]) == each["filter"]  # type: ignore[arg-type]
            ]
            for frame, flow in zip(frames_of[within].tolist(), flows[within].tolist(), strict=True):
                if not mine or flow in mine:
                    found.add(frame + 1)
    return found


def _check_files(files: Sequence[str]) -> None:
    from dpuflow.store.columns import is_saved

    for file in files:
        if file in ("-", "live"):
            raise OptionError("the evidence was read from standard input: no file holds its packets")
        if is_saved(file):
            raise OptionError(f"{file}: a column file holds messages, not packets")
        if not os.path.exists(file):
            raise DpuflowError(f"{file}: the capture that this result was made from is gone")


def frames(files: Sequence[str]) -> Iterator[Frame]:
    """The packets of a vantage point's files in order. Raises FormatError, CaptureError, DpuflowError."""
    from dpuflow.capture import open_capture

    number = 0
    for file in open_capture(list(files)).open_files():
        try:
            for time_ns, link, length, data in _records(file):
                number += 1
                yield Frame(number, time_ns, link, length, data)
        finally:
            file.bytes.close()


def _records(file: CaptureFile) -> Iterator[tuple[int, int, int, bytes]]:
    """Stamp, link type, length on the wire and bytes of each packet, up to the end or to damage."""
    from dpuflow.kernels import columns as c

    pcapng = bool(file.format.form[c.F_PCAPNG])
    at: int | None = file.format.first_record
    while at is not None:
        data = file.bytes.window(at, at + _READ)
        step = 0
        while True:
            order = ">" if file.format.form[c.F_SWAPPED] else "<"
            found = _enhanced(file, data, step, order) if pcapng else _classic(file, data, step, order)
            if found is None:
                break
            step, record = found
            if record is not None:
                yield record
        at = at + step if step else None


def _classic(file: CaptureFile, data: Any, at: int, order: str) -> tuple[int, Any] | None:
    from dpuflow.kernels import columns as c

    header = int(file.format.form[c.F_HEADER])
    if at + header > len(data):
        return None
    seconds, rest, kept, length = struct.unpack_from(f"{order}4I", data.data, at)
    end = at + header + kept
    if end > len(data):
        return None
    row = file.format.interfaces[0]
    time_ns = seconds * 10**9 + rest * int(row[c.I_MULTIPLY])
    return end, (time_ns, int(row[c.I_LINK]), length, bytes(data[at + header : end]))


def _enhanced(file: CaptureFile, data: Any, at: int, order: str) -> tuple[int, Any] | None:
    from dpuflow.capture.base import Damage
    from dpuflow.capture.pcapng import stamp_ns
    from dpuflow.kernels import columns as c

    if at + 12 > len(data):
        return None
    kind, size = struct.unpack_from(f"{order}II", data.data, at)
    if kind != _PACKET:
        if kind in (2, 3):
            raise OptionError(f"{file.name}: packets in the obsolete blocks of pcapng cannot be exported")
        try:
            following = file.format.block(data, at)
        except Damage:
            return None
        return None if following is None else (following, None)
    if at + size > len(data):
        return None
    number, high, low, kept, length = struct.unpack_from(f"{order}5I", data.data, at + 8)
    row = [int(value) for value in file.format.interfaces[number]]
    time_ns = stamp_ns(high << 32 | low, row)
    return at + size, (time_ns, row[c.I_LINK], length, bytes(data[at + 28 : at + 28 + kept]))


def _interface(vantage: str, link: int) -> bytes:
    options = [(_NAME, vantage.encode()), (_RESOLUTION, b"\x09")]
    return _block(_INTERFACE, struct.pack("<HHI", link, 0, 0), options)


def _packet(interface: int, frame: Frame, comment: str) -> bytes:
    stamp = (frame.time_ns >> 32, frame.time_ns & 0xFFFFFFFF)
    body = struct.pack("<IIIII", interface, *stamp, len(frame.data), frame.length) + frame.data
    return _block(_PACKET, body + bytes(-len(frame.data) % 4), [(_COMMENT, comment.encode())])


def _block(kind: int, body: bytes, options: Sequence[tuple[int, bytes]]) -> bytes:
    """A pcapng block with its options, padded, and its length before and after."""
    for code, value in options:
        body += struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)
    body += bytes(4)
    size = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + size + body + size
