"""Captures as sources of bytes: ``open_capture`` finds out what a file is and in which order files go."""

from __future__ import annotations

from os.path import isfile
from pathlib import PurePath

from dpuflow.capture.base import CaptureSource

__all__ = ["CaptureSource", "open_capture"]

_ENDINGS = (".gz", ".zst", ".pcap", ".pcapng", ".cap", ".dmp")


def open_capture(files: list[str], *, vantage: str | None = None, id: int = 0) -> CaptureSource:
    """One vantage point's capture in one or several files ("-": standard input).

    Several files are taken as one rotated capture, in order of their first stamps. The vantage
    point's name is the first file's, without endings, where none is given. Raises FormatError,
    CaptureError, DpuflowError.
    """
    from dpuflow.capture.pcapfile import open_file

    if len(files) == 1:
        opened = [open_file(files[0])]
        return CaptureSource(id, vantage or _name_of(files[0]), list(files), opened)
    stamps: list[tuple[bool, int, int]] = []
    opened = []
    for k, name in enumerate(files):
        file = open_file(name)
        stamps.append((file.first_ns is None, file.first_ns or 0, k))
        if name == "-" or not isfile(name):  # a pipe can be read but once
            opened.append(file)
        else:
            file.bytes.close()
    ordered = [files[k] for _, _, k in sorted(stamps)]
    return CaptureSource(id, vantage or _name_of(files[0]), ordered, opened)


def _name_of(file: str) -> str:
    """A file's name without folder and endings."""
    if file == "-":
        return "stdin"
    name = PurePath(file).name
    while (ending := PurePath(name).suffix.lower()) in _ENDINGS and len(name) > len(ending):
        name = name[: -len(ending)]
    return name
