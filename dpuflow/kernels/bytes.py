"""Numbers in captured bytes, where the byte order is known only at run time."""

from __future__ import annotations

from dpuflow.kernels._jit import be16, be32, inner, le16, le32


@inner
def u16(data, at, swapped):  # type: ignore[no-untyped-def]
    """16 bits in the file's own byte order."""
    return be16(data, at) if swapped else le16(data, at)


@inner
def u32(data, at, swapped):  # type: ignore[no-untyped-def]
    """32 bits in the file's own byte order."""
    return be32(data, at) if swapped else le32(data, at)


@inner
def mac(data, at):  # type: ignore[no-untyped-def]
    """An Ethernet address as a 48-bit number."""
    return (be32(data, at) << 16) | be16(data, at + 4)
