"""The report for people: who was late, how often, by how much, at what cost, how sure, and what is unseen.

In: an ``Analysis``. Out: text of 60 to 200 columns (docs/report.md says what each line means).
What was counted in the captures stands apart from what was inferred from it.
"""

from __future__ import annotations

import sys
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING, Final, TextIO

from dpuflow.conditions import TABLE
from dpuflow.quantities import (
    count,
    duration,
    entry_times,
    late_by,
    listed,
    percent,
    rank_seconds,
    size,
    three_digits,
)
from dpuflow.reports.headline import STUCK
from dpuflow.reports.layout import Paint, columns_of, lines_of, table, width, wrap
from dpuflow.reports.names import Names
from dpuflow.reports.output import naming
from dpuflow.reports.sampled import sampled_lines
from dpuflow.reports.tidy import tidied
from dpuflow.reports.verdict import verdict_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dpuflow.results import Analysis, Finding, Lateness, Part, Pipeline, Steps, Transfer

MOST_ROWS = 16
"""Endpoints in the table; the JSON has them all."""
MOST_FINDINGS = 8
_COLUMNS: Final = (
    ("endpoint", 0), ("verdict", 0), ("own", 0), ("inherited", 0), ("last", 90), ("of", 90),
    ("caused wait", 75),
)  # fmt: skip
"""Columns of the table, and how wide a terminal must be for each."""
HEADINGS: Final = tuple(name for name, _ in _COLUMNS)

_SEVERITY_STYLE = {"critical": "bad", "warning": "warn", "info": "bold"}


def write_text(
    result: Analysis, stream: TextIO | None = None, color: bool | None = None, columns: int | None = None
) -> None:
    """Print the report to ``stream`` (standard output).

    ``color`` None: where it is a terminal. ``columns`` None: as wide as the terminal, else 100.
    """
    stream = sys.stdout if stream is None else stream
    paint = Paint.suits(stream) if color is None else Paint(color)
    with lines_of(columns or columns_of(stream)):
        text = "\n".join(text_lines(result, paint)) + "\n"
    encoding = stream.encoding or "utf-8"  # names from captures may not fit the terminal's encoding
    with naming(getattr(stream, "name", "the report").replace("<stdout>", "standard output")):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def text_lines(result: Analysis, paint: Paint | None = None) -> Iterator[str]:
    """The report, line by line."""
    paint = paint or Paint(False)
    result = tidied(result)
    names = Names(result)
    yield from verdict_lines(result, names, paint)
    yield ""
    yield from _section("Observed", _observed(result), paint)
    yield from _section("Inferred", _inferred(result), paint)
    sampled = list(sampled_lines(result, names, paint))
    if sampled:
        yield ""
        yield from sampled
    if result.lateness:
        yield ""
        yield from _endpoint_table(result, names, paint)
    if result.findings:
        yield ""
        yield from _findings(result, names, paint)
    if result.limits:
        yield ""
        yield paint("What these captures cannot show", "bold")
        for sentence in result.limits:
            yield wrap(sentence, "  - ", "    ")


def _section(title: str, sentences: list[str], paint: Paint) -> Iterator[str]:
    text = wrap("; ".join(sentences) + ".", f"{title}  ", " " * (len(title) + 2))
    yield text.replace(title, paint(title, "bold"), 1)


def _observed(result: Analysis) -> list[str]:
    """What was counted, in phrases."""
    captures = result.captures
    phrases = [f"{count(sum(c.packets for c in captures), 'packet')} in {count(len(captures), 'capture')}"]
    if result.start_ns is not None and result.end_ns is not None:
        phrases[0] += f" over {duration(result.end_ns - result.start_ns)}"
    transports = Counter(flow.transport for flow in result.flows)
    kinds = [
        f"{number:,} {'RoCE' if kind == 'roce' else 'TCP'}" for kind, number in sorted(transports.items())
    ]
    if kinds:
        phrases.append(
            f"{listed(kinds)} {'flow' if len(result.flows) == 1 else 'flows'} with"
            f" {count(sum(flow.messages for flow in result.flows), 'message')}"
        )
    for attribute, what in (
        ("retransmitted", "packet{} retransmitted"),
        ("ecn_marked", "packet{} marked by ECN"),
        ("nak", "NAK{}"),
        ("rnr", "receiver-not-ready NAK{}"),
    ):
        number = sum(getattr(flow, attribute) or 0 for flow in result.flows)
        if number:
            phrases.append(f"{number:,} {what.format('' if number == 1 else 's')}")
        if attribute == "retransmitted" and (spurious := sum(flow.spurious or 0 for flow in result.flows)):
            phrases[-1] += f" ({spurious:,} spuriously)"
    phrases.append(_losses(result))
    skipped: Counter[str] = Counter()
    for capture in captures:
        skipped.update(capture.skipped)
    if skipped.total():
        reasons = [
            f"{number:,} {_reason(token)}" if len(skipped) > 1 else _reason(token)
            for token, number in skipped.most_common()
        ]
        phrases.append(f"{count(skipped.total(), 'packet')} skipped ({listed(reasons, 4)})")
    partial = sum(not capture.complete for capture in captures)
    if partial:
        phrases.append(f"{count(partial, 'capture')} cut short or damaged")
    return phrases


def _reason(token: str) -> str:
    """``other EtherType``, ``cut IP``: why packets were skipped, in words."""
    names = {"ethertype": "EtherType", "ip": "IP", "udp": "UDP", "bth": "BTH", "roce": "RoCE"}
    return " ".join(names.get(word, word) for word in token.split("_"))


def _losses(result: Analysis) -> str:
    known = [c.lost_packets for c in result.captures if c.lost_packets is not None]
    if sum(known):
        return f"{count(sum(known), 'packet')} lost by the capture"
    if not known:
        return "capture loss unknown (the files do not say)"
    silent = len(result.captures) - len(known)
    return "no capture loss" + (f" ({silent} of the files do not say)" if silent else "")


def _inferred(result: Analysis) -> list[str]:
    """What was concluded, in phrases."""
    kinds = Counter((c.op, c.algorithm, c.bytes) for c in result.collectives if c.op != "send_recv")
    phrases = [count(kinds.total(), "collective")]
    if kinds:
        phrases[0] += f" in {count(len(result.groups), 'group')}{_kinds(result)}: " + listed([
            f"{number:,} {'unidentified' if op == 'unknown' else op}"
            + (f" of {size(nbytes)}" if nbytes else "")
            + ("" if algorithm == "unknown" else f" ({algorithm})")
            for (op, algorithm, nbytes), number in kinds.most_common()
        ], 4)  # fmt: skip
    transfers = len(result.collectives) - kinds.total()
    if transfers:
        phrases.append(count(transfers, "transfer") + " outside collectives")
    partial = sum(not c.complete for c in result.collectives)
    if partial:
        phrases.append(f"{partial:,} only partly captured")
    bounds: Counter[str] = Counter(entry.bound for c in result.collectives if c.complete for entry in c.ranks)
    if bounds:
        phrases.append(
            entry_times(*(bounds[bound] for bound in ("exact", "at_least", "at_most", "unobservable")))
        )
    steps = Counter(_steps(each) for each in result.steps if each.collectives > 1 or each.count > 1)
    phrases += [
        text if number == 1 else f"{text} (the same in {number} groups)" for text, number in steps.items()
    ]
    phrases += [_pipeline(each) for each in result.pipelines]
    phrases += _transfers(result)
    phrases.append(_clocks(result))
    return phrases


def _kinds(result: Analysis) -> str:
    """`` (2 tp, 2 dp)``: what the groups are, where the structure shows it."""
    kinds = Counter(group.kind for group in result.groups if group.kind is not None)
    return f" ({listed([f'{number} {kind}' for kind, number in kinds.items()])})" if kinds else ""


def _steps(steps: Steps) -> str:
    """``19 steps of 7 operations, 48.1 ms each``, in the median."""
    what = {"decode": "token", "prefill": "prompt"}.get(steps.kind or "", "step")
    of = count(steps.collectives, "operation")
    text = f"{count(steps.count, what)} of {of}, {duration(steps.step_ns)} each in the median"
    if steps.tokens_per_s is not None:
        text += f" ({three_digits(steps.tokens_per_s)} tokens/s, {count(steps.layers or 0, 'layer')})"
    return text


def _transfers(result: Analysis) -> Iterator[str]:
    """``20 bulk one-sided WRITEs of 16 MiB in pages of 64 KiB, 97 Gbit/s: KV caches likely``, by kind."""
    kinds: dict[tuple[str, bool], list[Transfer]] = {}
    for each in result.transfers:
        kinds.setdefault((each.verb, each.likely is not None), []).append(each)
    for (verb, likely), mine in kinds.items():
        what = count(len(mine), f"bulk one-sided {verb.upper()} transfer")
        text = f"{what} of {size(round(median(each.bytes for each in mine)))}"
        page = Counter(each.page_bytes for each in mine).most_common(1)[0][0]
        text += f" in pages of {size(page)}" if page else ""
        rates = [each.bits_per_s for each in mine if each.bits_per_s is not None]
        text += f", {three_digits(median(rates) / 1e9)} Gbit/s" if rates else ""
        if likely:
            text += ": KV caches likely, for decoding began after them"
        waits = [e.wait_before_first_token_ns for e in mine if e.wait_before_first_token_ns is not None]
        if waits:
            text += (
                f"; for {len(waits):,} of them the receiver waited, {duration(round(median(waits)))} until"
            )
            text += " its first token"
        yield text


def _pipeline(pipeline: Pipeline) -> str:
    """Stages, schedule, and what each works for a microbatch."""
    schedule = {"gpipe": "GPipe", "1f1b": "1F1B", "forward": "forward only"}.get(pipeline.schedule or "", "")
    of = f" ({schedule})" if schedule else ""
    parts = [f"a pipeline of {len(pipeline.stages)} stages{of}"]
    if pipeline.microbatches:
        parts.append(f"{count(pipeline.microbatches, 'microbatch', 'microbatches')} a step")
    for way, times in (("forward", pipeline.forward_ns), ("backward", pipeline.backward_ns)):
        if any(time is not None for time in times):
            parts.append(f"{way} {', '.join(duration(time) for time in times)}")
    return "; ".join(parts)


def _clocks(result: Analysis) -> str:
    others = [clock for clock in result.clocks if not clock.reference]
    if len(result.clocks) < 2:
        return "one clock"
    islands = len(result.clocks) - len(others)
    apart = f"{islands} islands of clocks that nothing ties together; " if islands > 1 else ""
    parts = []
    for method, words in (("trusted", "trusted"), ("estimated", "estimated"), ("none", "not tied")):
        chosen = [clock for clock in others if clock.method == method]
        if chosen:
            errors = [clock.error_ns for clock in chosen if clock.error_ns is not None]
            parts.append(f"{len(chosen)} {words}" + (f" to +-{duration(max(errors))}" if errors else ""))
    return f"{apart}clocks: {listed(parts)}" if parts else apart.removesuffix("; ")


def worst_first(rows: Sequence[Lateness]) -> list[Lateness]:
    """Late endpoints first, those that cost most before the others."""
    order = {"late": 0, "intermittent": 1, "unknown": 2, "on_time": 3}
    return sorted(rows, key=lambda row: (order[row.verdict], -(row.caused_wait_ns or 0), row.endpoint))


def _endpoint_table(result: Analysis, names: Names, paint: Paint) -> Iterator[str]:
    rows = worst_first(result.lateness)
    shown = rows[:MOST_ROWS]
    chosen = [number for number, (_, least) in enumerate(_COLUMNS) if width() >= least]
    header = [_COLUMNS[number][0] for number in chosen]
    figures = [[figures_of(row)[number - 1] for number in chosen[1:]] for row in shown]
    widths = [max(map(len, column)) + 2 for column in zip(header[1:], *figures, strict=True)]
    room = min(width() - sum(widths), 48)
    cells = [[names.short_of(row.endpoint, room), *each] for row, each in zip(shown, figures, strict=True)]
    lines = table(header, cells, left=(0, 1))
    yield paint(lines[0], "dim")
    styles = {"late": "bad", "intermittent": "warn"}
    for row, line in zip(shown, lines[1:], strict=True):
        yield paint(line, styles[row.verdict]) if row.verdict in styles else line
    if len(rows) > len(shown):
        rest = Counter(row.verdict.replace("_", " ") for row in rows[MOST_ROWS:])
        yield f"and {len(rows) - MOST_ROWS} more: {listed([f'{n} {v}' for v, n in rest.most_common()])}"


def figures_of(row: Lateness) -> list[str]:
    """What the table says of an endpoint: a text for each of ``HEADINGS`` but the first, its name."""
    by = "" if row.late_ns is None else f", {late_by(row).replace('at least ', '>=')}"
    return [
        row.verdict.replace("_", " "),
        f"{percent(row.own_share)}{by if mostly_own(row) else ''}",
        f"{percent(inherited(row))}{'' if mostly_own(row) else by}",
        percent(row.last_share),
        f"{row.collectives:,}",
        duration(row.caused_wait_ns),
    ]


def inherited(row: Lateness) -> float | None:
    """The share of collectives that it entered late as its inputs came late."""
    return (
        None if row.late_share is None or row.own_share is None else max(row.late_share - row.own_share, 0.0)
    )


def mostly_own(row: Lateness) -> bool:
    """Whether what it was late by (``late_ns``) was mostly its own doing, not inherited."""
    return (row.own_share or 0.0) >= (inherited(row) or 0.0)


def by_severity(findings: Sequence[Finding]) -> list[Finding]:
    """Critical ones first, of each severity what stops the job, then what costs most, then the surest."""
    order = {"critical": 0, "warning": 1, "info": 2}

    def place(each: Finding) -> tuple[float, ...]:
        cost = each.cost_share or 0.0
        return order[each.severity], each.condition not in STUCK, -cost, -each.confidence, each.id

    return sorted(findings, key=place)


def _findings(result: Analysis, names: Names, paint: Paint) -> Iterator[str]:
    findings = by_severity(result.findings)
    yield paint("Findings", "bold")
    for finding in findings[:MOST_FINDINGS]:
        yield from _finding(finding, names, paint)
    if len(findings) > MOST_FINDINGS:
        yield f"  and {len(findings) - MOST_FINDINGS} more (the JSON has them all)"


def _finding(finding: Finding, names: Names, paint: Paint) -> Iterator[str]:
    head = f"{finding.severity}: {finding.condition} ({percent(finding.confidence)} sure)"
    text = wrap(f"{head}. {finding.summary}", "  ", "    ")
    yield text.replace(head, paint(head, _SEVERITY_STYLE[finding.severity]), 1)
    if finding.advice:
        yield wrap(f"What to do: {finding.advice}", "    ", "      ")
    if finding.alternatives:
        yield wrap(f"Other explanations: {'; '.join(finding.alternatives)}", "    ", "      ")
    yield from _where(finding, names, "    ")
    if not finding.evidence:
        yield "    No packets to open: none shows it by itself."
    for part in finding.consists_of:
        yield wrap(f"With it: {part_head(part)}. {part.summary}", "    ", "      ")
        yield from _where(part, names, "      ")


def cost_words(condition: str) -> tuple[Callable[[float], str], str]:
    """How a finding's cost is written, and what it is: ``0.7 rank-seconds`` waited, ``12.5 ms`` lost."""
    row = TABLE.get(condition)
    waited = condition in (*STUCK, "straggler", "node_skew", "host_cpu")
    return rank_seconds if row is not None and row.of_ranks else duration, "waited" if waited else "lost"


def part_head(part: Part) -> str:
    """``packet_loss (90 % sure)``: a finding that another one explains."""
    sure = "" if part.confidence is None else f" ({percent(part.confidence)} sure)"
    return f"{part.condition}{sure}"


def _where(found: Finding | Part, names: Names, indent: str) -> Iterator[str]:
    """The first packets that show it."""
    for evidence in found.evidence[:1]:
        yield wrap(names.where(evidence), indent, indent + "  ")
        yield f"{indent}  {evidence.filter}"
