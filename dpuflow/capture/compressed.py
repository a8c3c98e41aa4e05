"""Compressed files as chunks of plain bytes; what comes before damage is kept. RFC 1952, RFC 8878."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO, Final

from dpuflow.capture.base import Damage
from dpuflow.errors import MissingError

if TYPE_CHECKING:
    import zlib
    from collections.abc import Iterator
else:
    try:  # the same functions, at 1.8 times zlib's pace
        from zlib_ng import zlib_ng as zlib
    except ImportError:
        import zlib

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
SKIPPABLE: Final = b"\x2a\x4d\x18"  # after a byte of 0x50 to 0x5f
CHUNK: Final = 1 << 18
PIECE: Final = (
    1 << 8
)  # of zstd: four bytes may give a block of 128 KiB (RFC 8878, 3.1.1.2.2), so 8 MiB at most
WINDOW: Final = 1 << 26  # of zstd: what a frame may ask to keep in memory, as all levels up to 21 do


def plain(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    """The bytes as they are."""
    yield head
    while chunk := file.read(CHUNK):
        yield chunk


def gunzip(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    """All members of a gzip file. Raises Damage."""
    chunk = head or file.read(CHUNK)
    while chunk:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            if not chunk:
                raise Damage("the gzip data is cut short")
            before = member.copy()
            try:
                out = member.decompress(chunk, CHUNK)
            except zlib.error as error:
                yield _until_damage(before, chunk)
                raise Damage(f"the gzip data is damaged ({error})") from None
            chunk = member.unconsumed_tail
            yield out
            if not chunk and not member.eof:
                chunk = file.read(CHUNK)
        chunk = (member.unused_data or file.read(CHUNK)).lstrip(b"\0") or file.read(CHUNK)
        if chunk and not GZIP.startswith(chunk[:2]):
            raise Damage("something that is not gzip follows the gzip data")


def _until_damage(member: zlib._Decompress, chunk: bytes) -> bytes:
    """What a damaged chunk gives before the damage: fed by bytes, for an error takes back a call's output."""
    out = bytearray()
    with suppress(zlib.error):
        for at in range(len(chunk)):
            out += member.decompress(chunk[at : at + 1])
    return bytes(out)


def is_zstd(head: bytes) -> bool:
    """Whether a file that starts so is zstd's; it may start with a skippable frame, as pzstd's do."""
    return head == ZSTD or (head[:1] >= b"\x50" and head[:1] <= b"\x5f" and head[1:] == SKIPPABLE)


def unzstd(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    """All frames of a zstd file. Raises Damage, or MissingError without the package."""
    try:
        import zstandard
    except ImportError:
        raise MissingError("reading .zst files needs the package zstandard: pip install zstandard") from None
    rest = memoryview(head or file.read(CHUNK))
    out: list[bytes] = []
    size = 0
    while rest:
        frame = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
        while not frame.eof:
            if not rest:
                yield b"".join(out)
                raise Damage("the zstd data is cut short")
            try:
                out.append(frame.decompress(rest[:PIECE]))
            except zstandard.ZstdError as error:
                yield b"".join(out)
                raise Damage(f"the zstd data is damaged, or needs a window above 64 MiB ({error})") from None
            size += len(out[-1])
            if size >= CHUNK:
                yield b"".join(out)
                out, size = [], 0
            rest = rest[len(rest[:PIECE]) - len(frame.unused_data) :] or memoryview(file.read(CHUNK))
    yield b"".join(out)
