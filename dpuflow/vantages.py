"""Vantage points from names of files and folders.

In: what a user names: files, folders, vantage points. Out: ``Vantage``, one a place. A file is one vantage
point; rotated files of one capture are one together. A folder is an agent's history, or holds captures.
"""

from __future__ import annotations

import os
import re
from datetime import datetime, timezone
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from dpuflow.errors import FormatError
from dpuflow.schema.tables import Vantage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpuflow.store.segments import Segment

_SUFFIXES: Final = re.compile(r"\.(pcapng|pcap|cap|ntar|dpuflow|gz|zst)$", re.IGNORECASE)
_CAPTURE: Final = re.compile(
    r"(?P<stem>.+)\.(?P<kind>pcapng|pcap|cap|ntar|dpuflow)(?P<number>\d*)(?:\.(?:gz|zst))?", re.IGNORECASE
)
"""A capture's name. tcpdump -C writes ``x.pcap``, ``x.pcap1``, ``x.pcap2``."""
_ROTATED: Final = re.compile(
    r"(?P<stem>.+?)[-_.](?:\d{5}(?:[-_]\d{14})?|\d{8}[-_T]?\d{6}Z?|\d{4}-\d\d-\d\d[-_T]\d\d[-_:]?\d\d[-_:]?\d\d"
    r"|\d{10})"
)
"""A stem with the number or the time that dpuflow (-00001), dumpcap (_00001_20261122214637) and tcpdump -G
(as strftime was told) add: other numbers name nodes."""


def vantages_of(
    captures: Sequence[str | os.PathLike[str] | Vantage],
    since_ns: int | None = None,
    until_ns: int | None = None,
) -> list[Vantage]:
    """One vantage point for each file, those of each folder, and those given as such.

    Files are called by their names without suffixes, with as much of the path as tells them apart.
    ``since_ns``, ``until_ns``: of an agent's history only that time. Raises FormatError for a folder in which
    there is nothing to read.
    """
    texts = [os.fspath(each) for each in captures if not isinstance(each, Vantage)]
    files = [text for text in texts if not os.path.isdir(text)]
    rotated: list[tuple[str, tuple[str, ...]]] = []
    histories: list[tuple[str, list[Segment]]] = []
    for folder in (text for text in texts if os.path.isdir(text)):
        segments = _segments(folder, since_ns, until_ns)
        histories += [(folder, segments)] if segments else []
        rotated += [] if segments else _captures(folder)
        if not segments and (since_ns is not None or until_ns is not None):
            raise FormatError(
                folder,
                "holds captures, no agent's history: no span of it can be chosen (--since and --until)",
            )
    names = names_of([*files, *(stem for stem, _ in rotated)])
    several = [*((file,) for file in files), *(parts for _, parts in rotated)]
    found = [Vantage(name, parts, named=False) for name, parts in zip(names, several, strict=True)]
    found += _histories(histories)
    return [*found, *(each for each in captures if isinstance(each, Vantage))]


def names_of(files: Sequence[str]) -> list[str]:
    """What files are called: no suffixes, and as much of the path as tells them apart."""
    paths = [PurePath("stdin" if file == "-" else _stem(file)) for file in files]
    names = [path.name for path in paths]
    depth = 1
    while len(set(names)) < len(names) and depth < max(len(path.parts) for path in paths):
        depth += 1
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def _stem(file: str) -> str:
    while (shorter := _SUFFIXES.sub("", file)) not in ("", file) and PurePath(shorter).name:
        file = shorter
    return file


def _captures(folder: str) -> list[tuple[str, tuple[str, ...]]]:
    """The captures that lie in a folder by their stems, rotated ones joined in their order. Raises
    FormatError."""
    kept: dict[str, list[tuple[int, str]]] = {}
    for name in sorted(os.listdir(folder)):
        match = _CAPTURE.fullmatch(name)
        if match is None or not os.path.isfile(os.path.join(folder, name)):
            continue
        rotated = _ROTATED.fullmatch(match["stem"])
        stem = rotated["stem"] if rotated else match["stem"]
        kept.setdefault(stem, []).append((int(match["number"] or 0), os.path.join(folder, name)))
    if not kept:
        raise FormatError(
            folder,
            "contains neither captures (*.pcap, *.pcapng, *.dpuflow, .gz, .zst) nor an agent's history",
        )
    return [
        (os.path.join(folder, stem), tuple(file for _, file in sorted(files))) for stem, files in kept.items()
    ]


def _segments(folder: str, since_ns: int | None, until_ns: int | None) -> list[Segment]:
    """The part of an agent's history that is asked for; none where the folder holds none."""
    from dpuflow.store.segments import between, named_segments, widest

    nodes: dict[tuple[str, str], list[Segment]] = {}
    for segment, machine in _machines(named_segments(folder)):
        nodes.setdefault((segment.vantage, machine), []).append(segment)
    every = [segment for mine in nodes.values() for segment in widest(mine)]
    chosen = between(every, since_ns, until_ns)
    if every and not chosen:
        first, last = min(s.start_ns for s in every), max(s.end_ns for s in every)
        raise FormatError(folder, f"has nothing from that time, only {_time(first)} to {_time(last)}")
    return chosen


def _machines(segments: Sequence[Segment]) -> list[tuple[Segment, str]]:
    """Segments of one folder with the machine of each; where a file does not say, is older or damaged, that
    of the only other one of its name."""
    from dpuflow.store.columns import machine_of

    told = {segment.path: machine_of(segment.path) for segment in segments}
    known: dict[str, set[str]] = {}
    for segment in segments:
        known.setdefault(segment.vantage, set()).update({told[segment.path]} - {""})
    return [
        (s, told[s.path] or (next(iter(known[s.vantage])) if len(known[s.vantage]) == 1 else ""))
        for s in segments
    ]


def _histories(histories: Sequence[tuple[str, Sequence[Segment]]]) -> list[Vantage]:
    """One vantage point a node: folders of one node are joined, nodes of one name are told apart."""
    nodes: dict[tuple[str, str], list[str]] = {}
    folders: dict[tuple[str, str], str] = {}
    for folder, segments in histories:
        for segment, machine in _machines(segments):
            machine = machine or folder  # nothing says it: the folder may
            nodes.setdefault((segment.vantage, machine), []).append(segment.path)
            folders.setdefault((segment.vantage, machine), folder)
    count = {name: sum(other == name for other, _ in nodes) for name, _ in nodes}
    alike = [key for key in nodes if count[key[0]] > 1]
    apart = dict(zip(alike, names_of([os.path.join(folders[key], key[0]) for key in alike]), strict=True))
    if len(set(apart.values())) < len(apart):  # in one folder
        apart = {key: f"{key[0]}@{key[1][:8]}" for key in alike}
    return [Vantage(apart.get(key, key[0]), tuple(files), named=False) for key, files in nodes.items()]


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
