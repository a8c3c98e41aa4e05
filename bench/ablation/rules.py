"""The rules that can be switched off: functions that change collectives, entries, causes or verdicts.

A rule stands for its function with nothing to say: a mask that marks no row, a table that is handed on as it
came, a time that is not known. A name that is no function any more fails a test.
"""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.ablation.switch import Rule
from dpuflow.schema.rows import NEVER
from dpuflow.verdicts.coverage import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Callable

    Neutral = Callable[[Any, tuple[Any, ...]], Any]


def _no(result: Any, args: tuple[Any, ...]) -> Any:
    """Marks no row; adds nothing."""
    return (
        tuple(np.zeros_like(each) for each in result) if isinstance(result, tuple) else np.zeros_like(result)
    )


def _never(result: Any, args: tuple[Any, ...]) -> Any:
    return np.full_like(result, NEVER)


def _blank(times: Any) -> Any:
    return np.full_like(times, NEVER)


def _given(place: int = 0) -> Neutral:
    """Hands on its argument number ``place``."""
    return lambda result, args: args[place]


def _says(value: Any) -> Neutral:
    return lambda result, args: value


def _none_of(place: int) -> Neutral:
    """Finds nothing, and leaves all of its argument number ``place`` over."""
    return lambda result, args: ([], args[place])


def _but(**columns: Callable[[Any], Any]) -> Neutral:
    """The same with some columns blank."""

    def made(result: Any, args: tuple[Any, ...]) -> Any:
        new = {name: blank(getattr(result, name)) for name, blank in columns.items()}
        return replace(result, **new) if is_dataclass(result) else result._replace(**new)

    return made


def _of(room: str, table: list[tuple[str, Neutral, str]]) -> list[Rule]:
    return [
        Rule(f"{room}.{module}:{name}", neutral) for module, neutral, names in table for name in names.split()
    ]


ENTRIES: Final = _of("entries", [
    ("blockers", _but(until_ns=_blank), "missing_before behind_own_data inputs_and_offers"),
    ("blockers", _no, "before_leaving first_on_connection sent_again"),
    ("blockers", lambda result, args: (np.zeros_like(result[0]), result[1]), "held_senders"),
    ("dating", _given(), "_undated"),
    ("blockers", _no, "least_work_ns"),
    ("blockers", _but(rows=np.zeros_like), "credited"),
    ("dating", _no, "_stalled _own_answers"),
    ("margins", _no, "ways clocks late_stamps receiving_ns room by_proxies by_threads"),
    ("reactions", lambda result, args: result[:0], "granted_data_ns"),
    ("reactions", lambda result, args: result[:0], "_behind_own_data"),
    ("queues", _but(rows=np.zeros_like), "queued_rows"),
    ("heard", lambda result, args: args[0].heard, "likely_entries"),
    ("relative", lambda result, args: args[1].lateness_ns, "cautious"),
    ("leaving", lambda result, args: (np.full_like(result[0], NEVER), result[1]), "left_before"),
    ("leaving", lambda result, args: (args[0].leave_ns, args[0].idle_ns), "as_acknowledged"),
    ("leaving", _given(1), "_of_nodes"),
    ("dating", _no, "_early_ns _sent_again"),
    ("leaving", _given(2), "not_beside"),
    ("relative", _given(1), "claim"),
])  # fmt: skip

VERDICTS: Final = _of("verdicts", [
    ("waits", _never, "unread_until left_before left_any"),
    ("waits", _says(frozenset()), "busy_elsewhere never_captured"),
    ("waits", _but(rows=np.zeros_like, partly=np.zeros_like), "seen_from_beside"),
    ("bulk", _says([]), "find_bulk"),
    ("bulk", _given(), "_awaited _slow _named"),
    ("causes", _given(1), "_left"),
    ("causes", _no, "_held_peers _granted_late"),
    ("causes", lambda result, args: (args[2], np.zeros_like(result[1])), "_against_usual"),
    ("causes", _no, "_by_unread"),
    ("causes", _never, "_earliest"),
    ("links", _no, "slow_rows _held_back"),
    ("waits", _but(rows=np.zeros_like), "find_overlap"),
    ("waits", _no, "_same_before"),
    ("excess", lambda result, args: args[:2], "with_stages"),
    ("pipelines", _says([]), "find_pipelines"),
    ("stages", _says([]), "replicas_of"),
    ("judgement", _given(), "doubt"),
    ("coverage", _given(), "doubt_untold"),
    ("coverage", _says(float(HIDDEN)), "_usual_at_most"),
    ("units", _given(), "without_chance"),
    ("units", _says(False), "comes_again"),
    ("units", _says({}), "usual_rows"),
    ("units", _says(None), "onset_row"),
    ("chance", _says(None), "onset_of"),
    ("links", _no, "excused_ns"),
    ("steps", lambda result, args: ([], np.full_like(result[1], -1)), "find_steps"),
])  # fmt: skip

MATCHING: Final = _of("matching", [
    ("buffers", _given(), "sharing_told_apart"),
    ("buffers", _given(), "without_flags"),
    ("calls", _given(1), "without_pages"),
    ("program", lambda result, args: list(args[1]), "composed"),
    ("calls", _none_of(1), "put_instances"),
    ("repeated", _says([]), "repeated_instances"),
    ("sockets", _none_of(1), "socket_instances"),
    ("structured", _none_of(1), "p2p_instances"),
    ("structured", _given(), "_without_rings"),
    ("structured", _says(False), "_sends_unasked"),
    ("calls", lambda result, args: ([], list(args[1])), "calls_over_rails"),
    ("credited", _given(), "_put_together"),
    ("credited", lambda result, args: [args[0]], "in_turn"),
    ("sockets", _says([]), "spoken"),
    ("credited", _given(), "_apart"),
    ("rings", _says(None), "ring open_ring"),
    ("rings", lambda result, args: (args[0], result[1]), "_by_content"),
    ("rings", _says(True), "meet"),
    ("layouts", _says(None), "chain"),
    ("layouts", _says(None), "pat_of"),
    ("layouts", _says(None), "trees trees_by_rail _passed_up"),
    ("lanes", _says({}), "passed_on"),
    ("lanes", _says(None), "unchanged"),
    ("meanings", _says(None), "contrast_of"),
    ("structured", _says([]), "_one_after_the_other _channels"),
    ("structured", lambda result, args: [each for channel in args[0] for each in channel], "_merged"),
    ("structured", lambda result, args: ([], list(args[1])), "_told_apart"),
    ("calls", _says(([], [])), "at_all"),
    ("calls", _says([]), "cliques"),
    ("calls", lambda result, args: ([], args[1]), "rounds_of"),
    ("calls", _says(False), "_answers"),
    ("parts", lambda result, args: np.zeros_like(result), "_registered"),
    ("credited", _says(False), "_stopped"),
    ("credited", _says([]), "_coarser _finer"),
    ("program", _given(1), "in_program_order"),
    ("program", _says([]), "read_processes"),
    ("shared_addresses", _says(False), "shares_addresses"),
    ("recognise", _says(()), "placements"),
    ("recognise", _says(0), "_untimely"),
    ("tagged", lambda result, args: [args[0]], "_rings"),
    ("tagged", _says({}), "_habits"),
    ("tagged", _says(False), "_shared"),
    ("sockets", _says([]), "_repeated"),
    ("sockets", _given(), "_apart"),
    ("sequenced", _says(np.zeros(0, np.int64)), "scan_rows"),
    ("tagged", _says(np.zeros(0, np.int64)), "nonblocking_rows"),
    ("streams", lambda result, args: [args[1]], "sessions"),
    ("lanes", _says(-1), "_usual"),
    ("sequenced", _says([]), "cut_streams"),
    ("layouts", _says(None), "_in_order _known"),
])  # fmt: skip

RULES: Final = [
    *ENTRIES,
    *VERDICTS,
    *MATCHING,
    Rule("matching:_may_go_on", _says(False)),
    Rule("matching:_unnamed", _says([])),
    Rule("matching.recognise:mark_at_once", _says(None), changes_arguments=True),
]
