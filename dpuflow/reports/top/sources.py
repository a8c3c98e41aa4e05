"""Where ``top`` looks: an agent's API, a saved result, a folder of captures or of an agent's history.

In: a URL or a name. Out: ``Seen``, again and again. An agent that is away is told, and asked again.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from dpuflow.errors import DpuflowError, OptionError
from dpuflow.quantities import count, duration, percent, size
from dpuflow.reports.tidy import clean
from dpuflow.reports.top.seen import Seen, findings_of, jobs_of, ranks_of, seen_of
from dpuflow.schema.ring import LOSSES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpuflow.results import Analysis

PATIENCE_S: Final = 5.0
MOST_BYTES: Final = 64 << 20
REPLAYED_NS: Final = 60 * 10**9
SHARE: Final = 0.04
"""Of a core: looking takes no more than this, so what takes longer is looked at less often."""


class Source(Protocol):
    """``look`` returns what is seen now; the one before where nothing could be new."""

    def look(self) -> Seen:
        """What is seen now."""


class Agent:
    """The API of an agent (docs/api.md)."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        # An agent is a neighbour: a proxy for the way out does not know it.
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._last = Seen(self.url)
        self._answered_s = time.monotonic()
        self._next_s = 0.0

    def look(self) -> Seen:
        """What the agent says, or what it said before and since when it is away."""
        began_s, worked_s = time.monotonic(), time.thread_time()
        if began_s < self._next_s:
            return self._last
        try:
            self._last, self._answered_s = self._look(), time.monotonic()
            self._next_s = began_s + (time.thread_time() - worked_s) / SHARE
        except (OSError, ValueError, DpuflowError, RecursionError) as error:
            cause = getattr(error, "reason", error)
            reason = clean(str(getattr(cause, "strerror", None) or cause) or type(error).__name__, 120)
            if getattr(error, "code", None) == 404:
                reason = "no agent's API is at this address; a fleet has none: name one of its agents"
            since = duration(int((time.monotonic() - self._answered_s) * 1e9))
            return replace(self._last, away=f"no answer for {since}: {reason}; still asking")
        return self._last

    def _look(self) -> Seen:
        from dpuflow.loading import rows_of
        from dpuflow.results import Endpoint, Finding, Lateness, Steps

        def rows(answer: dict[str, Any], kind: type, key: str) -> list[Any]:
            return rows_of(kind, answer.get(key), self.url)

        late, groups, steps = (self._ask(name) for name in ("lateness", "groups", "steps"))
        found, health, windows = (self._ask(name) for name in ("findings", "health", "windows"))
        address = [each.address for each in rows(groups, Endpoint, "endpoints")]
        members = tuple(frozenset(address[end] for end in group["endpoints"]) for group in groups["groups"])
        begin, end = late.get("start_ns"), late.get("end_ns")
        return Seen(
            self.url,
            ranks_of(rows(late, Lateness, "lateness"), rows(late, Endpoint, "endpoints")),
            members,
            jobs_of(rows(steps, Steps, "steps")),
            findings_of(rows(found, Finding, "findings"), rows(found, Endpoint, "endpoints")),
            (*_health(health), *_network(windows)),
            None if begin is None or end is None else end - begin,
        )

    def _ask(self, name: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/api/v1/{name}", headers=self._headers)
        with self._open(request, timeout=PATIENCE_S) as answer:
            value = json.loads(answer.read(MOST_BYTES))
        if not isinstance(value, dict):
            raise ValueError("not an agent's answer")
        return value


def _health(told: dict[str, Any]) -> tuple[str, ...]:
    """How the agent fares: what it takes, misses and gave up."""
    losses = told.get("losses") or {}
    lost = sum(losses.get(name) or 0 for name in LOSSES)
    said = [f"agent: {percent(told.get('cpu_share'))} of a core", size(told.get("rss_bytes"))]
    said += [f"{duration((told.get('lag_s') or 0) * 1e9)} behind", f"{losses.get('seen') or 0:,} packets"]
    said += [f"{lost:,} LOST"] if lost else ["none lost"]
    down = [clean(name) for name, there in (told.get("interfaces") or {}).items() if not there]
    said += [f"{name} is not captured from" for name in down]
    said += [clean(str(told["degraded"]))] if told.get("degraded") else []
    errors = sum((told.get("errors") or {}).values())
    return (*said, *([count(errors, "error")] if errors else []))


def _network(told: dict[str, Any]) -> list[str]:
    """What the windows held say of loss and marks; nothing where an older agent does not tell."""
    held = told.get("windows") or []
    said = (("retransmitted", "retransmitted"), ("ecn_marked", "ECN-marked"))
    return [f"{sum(row[key] for row in held):,} {word}" for key, word in said
            if held and all(key in row for row in held)]  # fmt: skip


class Files:
    """A saved result, or a folder that is analysed again when its files have changed."""

    def __init__(self, name: str, read: Callable[[], Analysis]) -> None:
        self.name, self._read = name, read
        self._stamp: object = None
        self._last = Seen(name, health=("reading",))
        self._next_s = 0.0

    def look(self) -> Seen:
        """What the files say."""
        began = time.monotonic()
        if began < self._next_s:
            return self._last
        try:
            stamp = _stamp(self.name)
            if stamp != self._stamp:
                self._last, self._stamp = seen_of(self._read(), self.name), stamp
                self._next_s = time.monotonic() + (time.monotonic() - began) / SHARE
        except (OSError, DpuflowError) as error:
            said = getattr(error, "strerror", None) or str(error)
            return replace(self._last, away=f"{clean(said, 200)}; still looking")
        return self._last


def _stamp(name: str) -> object:
    """What changes when a file does."""
    names = [entry.path for entry in os.scandir(name)] if os.path.isdir(name) else [name]
    return sorted((each, os.stat(each).st_mtime_ns, os.stat(each).st_size) for each in names)


def files(name: str) -> Files:
    """A result where ``name`` is a file, else captures."""
    from dpuflow import analyze, load

    return Files(name, lambda: analyze([name]) if os.path.isdir(name) else load(name))


class Replay:
    """An agent's history as it went, ``speed`` times as quick; at each moment the last ``REPLAYED_NS``."""

    def __init__(self, folder: str, speed: float) -> None:
        from dpuflow.store.segments import list_segments

        self._folder, self._speed = folder, speed
        self._ends = sorted({each.end_ns for each in list_segments(folder)})
        if not self._ends:
            raise OptionError(f"--replay: {folder} holds no agent's history")
        self._begin_ns = min(each.start_ns for each in list_segments(folder))
        self._began_s: float | None = None
        self._shown_ns = 0
        self._last = Seen(folder, health=("reading",))

    def look(self) -> Seen:
        """What was known at that moment."""
        from dpuflow import analyze
        from dpuflow.vantages import vantages_of

        now_s = time.monotonic()
        self._began_s = now_s if self._began_s is None else self._began_s
        at_ns = self._ends[0] + int((now_s - self._began_s) * self._speed * 1e9)
        until_ns = max((end for end in self._ends if end <= at_ns), default=self._ends[0])
        if until_ns != self._shown_ns:
            since_ns = max(until_ns - REPLAYED_NS, self._begin_ns)
            seen = seen_of(analyze(vantages_of([self._folder], since_ns, until_ns)), self._folder)
            at, last = (
                f"{datetime.fromtimestamp(ns // 10**9):%H:%M:%S}" for ns in (until_ns, self._ends[-1])
            )
            over = (
                ", its end" if until_ns == self._ends[-1] else f" of {last}, {self._speed:g} times as quick"
            )
            self._last, self._shown_ns = replace(seen, health=(f"replay: {at}{over}", *seen.health)), until_ns
        return self._last
