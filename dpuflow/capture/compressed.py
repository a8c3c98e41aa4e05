"""Compressed files as chunks of plain bytes; what comes before damage is kept. RFC 1952, RFC 8878."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, BinaryIO, Final

from dpuflow.capture.base import Damage
from dpuflow.errors import MissingError

if TYPE_CHECKING:
    from collections.abc import Iterator

GZIP: Final = b"\x1f\x8b"
ZSTD: Final = b"\x28\xb5\x2f\xfd"
CHUNK: Final = 1 << 18


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
            try:
                out = member.decompress(chunk, CHUNK)
            except zlib.error as error:
                raise Damage(f"the gzip data is damaged ({error})") from None
            chunk = member.unconsumed_tail
            yield out
            if not chunk and not member.eof:
                chunk = file.read(CHUNK)
        chunk = (member.unused_data or file.read(CHUNK)).lstrip(b"\0") or file.read(CHUNK)
        if chunk and not GZIP.startswith(chunk[:2]):
            raise Damage("something that is not gzip follows the gzip data")


def unzstd(file: BinaryIO, head: bytes) -> Iterator[bytes]:
    """All frames of a zstd file. Raises Damage, or MissingError without the package."""
    try:
        import zstandard
    except ImportError:
        raise MissingError("reading .zst files needs the package zstandard: pip install zstandard") from None
    chunk = head or file.read(CHUNK)
    while chunk:
        frame = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        while not frame.eof:
            if not chunk:
                raise Damage("the zstd data is cut short")
            try:
                yield frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise Damage(f"the zstd data is damaged ({error})") from None
            chunk = b"" if frame.eof else file.read(CHUNK)
        chunk = frame.unused_data or file.read(CHUNK)
