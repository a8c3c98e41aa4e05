"""Where the agent's parts meet: windows of settled results in; metrics, API, webhooks and the log read them.

One thread writes (``publish``); any number read. What was published never changes: readers get frozen objects
and may keep them. Nothing here waits for a reader.
"""

from __future__ import annotations

import pickle
import threading
import zlib
from collections import deque
from collections.abc import Mapping  # noqa: TC003  (types of Health's fields are read at run time, for OpenAPI)
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from dpuflow.agent.rolling import Rolled
from dpuflow.results import Analysis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dpuflow.agent.rolling import GroupState, LatenessState
    from dpuflow.results import Finding
    from dpuflow.results.tokens import Severity

T = TypeVar("T")

EventKind = Literal["window", "finding_opened", "finding_changed", "finding_closed", "health"]
Fidelity = Literal["packets", "messages", "sampled"]

KEPT_WINDOWS: Final = 600
KEPT_ROWS: Final = 150_000
"""Rows of all windows' analyses that are kept (a rank in a collective, an edge, a group, ...), 400 to 500
bytes each: windows of large groups are fewer."""
FRESH: Final = 30
"""Windows that are kept as they are. Of older ones only what answers over many windows ask for is; the rest,
which is said again by each window of the span, is packed: it took 30 kB a window, packed it takes 3."""
LASTING: Final = (
    "endpoints", "groups", "collectives", "transfers", "edges", "what_if", "steps", "pipelines",
    "network_cost", "start_ns", "end_ns",
)  # fmt: skip
QUEUE: Final = 1000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one endpoint sent another within one window; addresses as text. The numbers are increments."""

    src: str
    dst: str
    transport: Literal["roce", "tcp"]
    packets: int = 0
    bytes: int = 0  # transport payload, retransmissions included
    messages: int = 0
    retransmitted: int = 0
    out_of_order: int = 0
    missing: int = 0  # acknowledged, yet never captured
    ecn_marked: int = 0
    cnp: int = 0
    nak: int = 0
    rnr: int = 0
    zero_window: int = 0
    spurious: int = 0  # of those retransmitted, what the receiver had already (TCP)


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause frames of one sender within one window; ``priority`` is None for plain pause (802.3, 31B)."""

    src_mac: str
    priority: int | None
    frames: int
    quanta: int  # sum of the times asked for, in units of 512 bit times


@dataclass(frozen=True, slots=True)
class Window:
    """What one step of the agent newly settled; times are wall clock (Unix) ns.

    ``analysis.collectives`` and ``transfers`` are those that this window settled: each is in one window
    only. The rest of ``analysis`` (lateness, findings, edges, steps, pipelines, limits) is what the whole
    span still held in memory comes to at this moment; ``flows`` is empty, ``traffic`` has the counters. Ids
    are positions in this analysis and mean nothing in another one: addresses are what lasts. ``late``:
    (collective id, endpoint id) of entries beyond their group's noise. ``counted``: the wait charged to
    each entry whose lateness is known, in rank-nanoseconds; None: as ``rolling.counted_of`` tells from the
    collectives.
    """

    number: int
    start_ns: int
    end_ns: int
    analysis: Analysis
    late: frozenset[tuple[int, int]] = frozenset()
    traffic: tuple[Traffic, ...] = ()
    pauses: tuple[Pause, ...] = ()
    losses: Mapping[str, int] = field(default_factory=dict)  # schema_ring.COUNTER_NAMES, nic.NIC_NAMES
    fidelity: Fidelity = "packets"
    counted: Mapping[tuple[int, int], int] | None = None


@dataclass(frozen=True, slots=True)
class FindingState:
    """A finding as it stands. ``id`` stays as long as the condition lasts; addresses name endpoints."""

    id: str
    condition: str
    addresses: tuple[str, ...]
    severity: Severity
    since_ns: int  # onset, as told when it was opened
    first_ns: int  # end of the window that opened it
    last_ns: int  # end of the last window that confirmed it
    active: bool
    finding: Finding  # as the last confirming window had it
    labels: tuple[str | None, ...] = ()  # host and GPU of each address, from the rank map
    ranks: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Health:
    """How the agent itself fares. Shares are of one core, of the memory ceiling, of the ring."""

    time_ns: int = 0
    uptime_s: float = 0.0
    cpu_share: float = 0.0
    cpu_limit: float = 0.0
    rss_bytes: int = 0
    memory_limit: int = 0
    lag_s: float = 0.0  # now minus the end of what is settled
    ring_used_share: float | None = None  # None: the backend does not tell
    packet_rate: float = 0.0
    message_rate: float = 0.0
    bit_rate: float = 0.0
    collectives: int = 0  # published since the start
    held_messages: int = 0
    held_flows: int = 0
    losses: Mapping[str, int] = field(default_factory=dict)  # since the start of the agent
    fidelity: Fidelity = "packets"
    sample: float = 0.0  # one in 2^sample pairs of hosts is followed
    degraded: str | None = None  # a sentence; None: full fidelity
    interfaces: Mapping[str, bool] = field(default_factory=dict)  # name -> being captured from
    history_bytes: int = 0
    history_oldest_ns: int | None = None
    history_writing: bool = True
    clock_steps: int = 0
    generation: int = 1  # of the configuration: grows with each reload that was taken
    errors: Mapping[str, int] = field(default_factory=dict)  # kind -> how often


@dataclass(frozen=True, slots=True)
class Event:
    """Something that subscribers hear of; of the fields below only that of its kind is set."""

    kind: EventKind
    time_ns: int
    window: Window | None = None
    finding: FindingState | None = None
    health: Health | None = None


class Subscription:
    """A bounded queue of events. A reader that is too slow loses the oldest, counted in ``missed``."""

    def __init__(self, board: Board, size: int) -> None:
        self._board = board
        self._events: deque[Event] = deque(maxlen=size)
        self._ready = threading.Condition()
        self._closed = False
        self.missed = 0

    def get(self, timeout_s: float | None = None) -> Event | None:
        """The next event, or None after ``timeout_s`` or once closed."""
        with self._ready:
            self._ready.wait_for(lambda: self._events or self._closed, timeout_s)
            return self._events.popleft() if self._events else None

    def __iter__(self) -> Iterator[Event]:
        """Events until the subscription or the board is closed."""
        while (event := self.get()) is not None:
            yield event

    def put(self, event: Event) -> None:
        """Add an event; for the board."""
        with self._ready:
            self.missed += len(self._events) == self._events.maxlen
            self._events.append(event)
            self._ready.notify()

    @property
    def closed(self) -> bool:
        """Whether no more events will come."""
        return self._closed

    def close(self) -> None:
        """End it; a waiting reader returns at once."""
        self._board._forget(self)
        with self._ready:
            self._closed = True
            self._ready.notify_all()


class Board:
    """The agent's present state: the last windows, rolled statistics, findings, health."""

    def __init__(self, windows: int = KEPT_WINDOWS) -> None:
        self._lock = threading.Lock()
        self._windows: deque[Window] = deque(maxlen=windows)
        self._rows: deque[int] = deque()  # of each window
        self._packed: dict[int, bytes] = {}  # of windows that are fresh no more, the rest of the analysis
        self._rolled = Rolled()
        self._findings: dict[str, FindingState] = {}
        self._health = Health()
        self._subscribers: list[Subscription] = []
        self._errors: dict[str, int] = {}

    def keep(self, windows: int) -> None:
        """Hold so many windows at most from now on."""
        with self._lock:
            while len(self._windows) > windows:
                self._forget_oldest()
            self._windows = deque(self._windows, maxlen=windows)

    def publish(self, window: Window, findings: tuple[FindingState, ...] = ()) -> None:
        """Add a window and the findings that opened, changed or closed with it."""
        before = self.latest()
        if before is not None:
            window = replace(window, analysis=_shared(window.analysis, before.analysis))
        events = [Event("window", window.end_ns, window=window)]
        with self._lock:
            if len(self._windows) == self._windows.maxlen:
                self._forget_oldest()
            self._windows.append(window)
            self._rows.append(_rows(window.analysis))
            self._pack()
            self._rolled.add(window)
            held = sum(self._rows)
            while held > KEPT_ROWS and len(self._windows) > 1:
                held -= self._forget_oldest()
            for state in findings:
                events.append(Event(self._kind(state), window.end_ns, finding=state))
                self._findings[state.id] = state
            self._drop_old_findings()
        self._tell(events)

    def take(self, event: Event) -> None:
        """An event of another board, which this one follows."""
        if event.window is not None:
            self.publish(event.window)
        elif event.health is not None:
            self.report(event.health)
        elif event.finding is not None:
            with self._lock:
                self._findings[event.finding.id] = event.finding
                self._drop_old_findings()
            self._tell([event])

    def report(self, health: Health) -> None:
        """Replace the health; the errors noted here are added to its own."""
        with self._lock:
            self._health = health
        self._tell([Event("health", health.time_ns, health=self.health())])

    def count_error(self, kind: str) -> None:
        """Count a failure of one of the agent's parts, such as "webhook"; it shows in the health."""
        with self._lock:
            self._errors[kind] = self._errors.get(kind, 0) + 1

    def latest(self) -> Window | None:
        """The last window, None before the first."""
        with self._lock:
            return self._windows[-1] if self._windows else None

    def windows(self, n: int | None = None) -> list[Window]:
        """The last ``n`` windows (all that are held), oldest first."""
        with self._lock:
            held = list(self._windows)
        return held if n is None else held[max(len(held) - n, 0) :]

    def analysis(self, number: int | None = None) -> Analysis | None:
        """The whole analysis of a window, None: of the last one; None where it is not held."""
        with self._lock:
            found = next((each for each in self._windows if each.number == number), None)
            if number is None and self._windows:
                found = self._windows[-1]
            packed = None if found is None else self._packed.get(found.number)
        if found is None:
            return None
        if packed is None:
            return found.analysis
        return replace(found.analysis, **pickle.loads(zlib.decompress(packed)))

    def groups(self) -> list[GroupState]:
        """The groups seen in the held windows, most recently active first."""
        with self._lock:
            held = self._rolled.copy()
        return held.groups()

    def lateness(self) -> list[LatenessState]:
        """Each endpoint over the held windows, the one that cost most first."""
        with self._lock:
            held = self._rolled.copy()
        return held.lateness()

    def findings(self, active_only: bool = True) -> list[FindingState]:
        """Findings, newest first; those that are over for a while, too, unless ``active_only``."""
        with self._lock:
            states = list(self._findings.values())
        states.sort(key=lambda state: -state.first_ns)
        return [state for state in states if state.active or not active_only]

    def health(self) -> Health:
        """How the agent fares, as of its last second or so."""
        with self._lock:
            errors = dict(self._health.errors)
            for kind, count in self._errors.items():
                errors[kind] = errors.get(kind, 0) + count
            return replace(self._health, errors=errors)

    def subscribe(self, size: int = QUEUE) -> Subscription:
        """Events from now on."""
        made = Subscription(self, size)
        with self._lock:
            self._subscribers.append(made)
        return made

    def close(self) -> None:
        """End all subscriptions."""
        with self._lock:
            subscribers = list(self._subscribers)
        for each in subscribers:
            each.close()

    def _pack(self) -> None:
        """Of the window that is fresh no more, what each window says again."""
        if len(self._windows) <= FRESH:
            return
        window = self._windows[-1 - FRESH]
        lasting = {name: getattr(window.analysis, name) for name in LASTING}
        rest = {
            each.name: list(value) if isinstance(value, list) else value
            for each in fields(window.analysis)
            if each.name not in LASTING and (value := getattr(window.analysis, each.name))
        }
        self._packed[window.number] = zlib.compress(pickle.dumps(rest), 1)
        self._windows[-1 - FRESH] = replace(window, analysis=Analysis(**lasting))

    def _forget_oldest(self) -> int:
        """Let the oldest window go; how many rows it had."""
        window = self._windows.popleft()
        self._packed.pop(window.number, None)
        self._rolled.forget(window)
        return self._rows.popleft()

    def _forget(self, subscription: Subscription) -> None:
        with self._lock:
            if subscription in self._subscribers:
                self._subscribers.remove(subscription)

    def _tell(self, events: list[Event]) -> None:
        with self._lock:
            subscribers = list(self._subscribers)
        for event in events:
            for each in subscribers:
                each.put(event)

    def _kind(self, state: FindingState) -> EventKind:
        if not state.active:
            return "finding_closed"
        known = self._findings.get(state.id)
        return "finding_changed" if known is not None and known.active else "finding_opened"

    def _drop_old_findings(self) -> None:
        """Of findings that are over, keep the last thousand."""
        over = [state for state in self._findings.values() if not state.active]
        over.sort(key=lambda state: state.last_ns)
        for state in over[: max(len(over) - QUEUE, 0)]:
            del self._findings[state.id]


def _shared(analysis: Analysis, before: Analysis) -> Analysis:
    """The analysis; what it names as the window ``before`` did is kept once for both: most never changes."""
    return replace(
        analysis,
        endpoints=_kept_once(analysis.endpoints, before.endpoints),
        groups=_kept_once(analysis.groups, before.groups),
    )


def _kept_once(rows: list[T], before: list[T]) -> list[T]:
    """The rows, those of ``before`` in place of their equals."""
    return [old if new == old else new for new, old in zip_longest(rows, before[: len(rows)])]


def _rows(analysis: Analysis) -> int:
    """How many rows an analysis has, those within its collectives included."""
    lists = (getattr(analysis, each.name) for each in fields(analysis))
    rows = sum(len(each) for each in lists if isinstance(each, list))
    rows += sum(len(c.ranks) + len(c.phases) for c in analysis.collectives)
    return rows + sum(len(group.endpoints) for group in analysis.groups)
