"""Files of a job's own software in, what they say of each rank out; a bad one is one sentence."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
from pickle import BYTEARRAY8
from typing import TYPE_CHECKING, Any, ClassVar, Final

from dpuflow.errors import FormatError
from dpuflow.recorded.flight import read_flight
from dpuflow.recorded.inspector import MARK, read_inspector
from dpuflow.recorded.kineto import read_kineto
from dpuflow.recorded.nccllog import read_log
from dpuflow.recorded.profiler import is_profile, read_profile

if TYPE_CHECKING:
    from dpuflow.recorded.calls import Recorded

LARGEST: Final = 1 << 30
"""Bytes: more of JSON would take tens of gigabytes of memory."""


class _Plain(pickle._Unpickler):
    """Dictionaries, lists, texts and numbers alone: whatever else a pickle names is refused.

    The one written in Python: the other makes room for as many objects as one opcode of five bytes claims.
    """

    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no dump of that kind has")


def read_recorded(file: str) -> list[Recorded]:
    """What ``file`` says, rank by rank. Raises FormatError, OSError."""
    size = os.stat(file).st_size
    if size > LARGEST:
        raise FormatError(file, f"{size:,} bytes are more than is read of such files ({LARGEST:,})")
    with open(file, "rb") as stream:
        data = stream.read()
    try:
        data = _unpacked(data)
        found = _read(file, data)
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, OSError, RecursionError, TypeError, ValueError
    ) as error:  # fmt: skip
        said = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
        raise FormatError(file, f"not whole, or of a version not known: {said}") from None
    if not any(each.calls for each in found):
        raise FormatError(file, "it holds no collective operation")
    return found


def _unpacked(data: bytes) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        whole = stream.read(LARGEST + 1)
    if len(whole) > LARGEST:
        raise ValueError(f"unpacked it is larger than {LARGEST:,} bytes")
    return whole


def _read(file: str, data: bytes) -> list[Recorded]:
    if data[:1] == b"\x80":  # a pickle of protocol 2 or later
        try:
            return [_dump(file, _Plain(io.BytesIO(data)).load())]
        except (pickle.UnpicklingError, struct.error, OverflowError, MemoryError, AssertionError) as error:
            raise ValueError(str(error) or "it ends early") from None
    if b"NCCL INFO" in data:
        return read_log(file, data.decode("utf-8", "replace").splitlines())
    if MARK in data[: 1 << 16]:
        return read_inspector(file, data.decode("utf-8", "replace").splitlines())
    if data.lstrip()[:1] in (b"{", b"["):
        return [_dump(file, json.loads(data))]
    raise FormatError(
        file, "neither a trace nor a dump of PyTorch, nor what NCCL logs or its Inspector writes"
    )


def _dump(file: str, value: Any) -> Recorded:
    if isinstance(value, list) and is_profile(value):
        return read_profile(file, value)
    if isinstance(value, list):  # a Chrome trace without its frame
        value = {"traceEvents": value}
    if isinstance(value, dict) and "traceEvents" in value:
        return read_kineto(file, value)
    if isinstance(value, dict) and "entries" in value:
        return read_flight(file, value)
    raise FormatError(file, "JSON, but neither a trace of PyTorch's profiler nor a Flight Recorder's dump")
