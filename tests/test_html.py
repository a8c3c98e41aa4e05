"""The page: every number is the JSON's, no name breaks out of it, nothing is loaded, bounds show."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from scripted_results import MS, T0, collective, job
from test_loading import EVIL, RESULTS, rich_job, text_of

from dpuflow.cli import run
from dpuflow.loading import analysis_of
from dpuflow.quantities import duration, percent, rank_seconds, size
from dpuflow.reports.html import page
from dpuflow.reports.html.heat import MOST_COLUMNS, MOST_ROWS, class_limits
from dpuflow.reports.text import text_lines
from dpuflow.results import Analysis, Endpoint, Flow, Judged, Lateness, RankEntry

VOID = {"meta", "path", "rect", "line", "circle", "br", "hr"}


class Reader(HTMLParser):
    """Elements with their attributes and texts; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.data: list[tuple[str, str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        tag = self.open[-1] if self.open else ""
        self.texts.append((tag, data))
        if tag == "data":
            attributes = self.elements[-1][1]
            self.data.append((str(attributes["data-at"]), str(attributes["value"]), data))


def place_of(value: Any, at: str) -> Any:
    for key in at.split("/"):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def only(bound: str) -> Analysis:
    """A job of which every entry has this bound."""
    result = job()
    for each in result.collectives:
        for entry in each.ranks:
            entry.bound = bound  # type: ignore[assignment]
            if bound == "unobservable":
                entry.enter_ns = entry.lateness_ns = entry.error_ns = None
    return result


def one_rank() -> Analysis:
    result = job()
    result.endpoints, result.lateness = result.endpoints[:1], result.lateness[:1]
    result.flows, result.groups[0].endpoints = [], [0]
    for each in result.collectives:
        each.ranks = each.ranks[:1]
    return result


def apart() -> Analysis:
    result = job(late_ms=5)
    for number, clock in enumerate(result.clocks):
        clock.island = number % 2
    return result


def many_flows() -> Analysis:
    result = Analysis(endpoints=[Endpoint(i, f"10.0.0.{i}", [f"10.0.0.{i}"]) for i in range(100)])
    for i in range(5000):
        flow = Flow(i, i % 100, i * 7 % 100, "tcp", None, (i, 1), 5, 400, 6, 0, 0, None, None, None)
        result.flows.append(flow)
    return result


PAGES = {
    **RESULTS, "exact": lambda: only("exact"), "at_most": lambda: only("at_most"), "one_rank": one_rank,
    "at_least": lambda: only("at_least"), "unobservable": lambda: only("unobservable"), "apart": apart,
    "many_flows": many_flows,
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_every_number_is_the_jsons(name: str) -> None:
    result = PAGES[name]()
    value = json.loads(text_of(result))
    found = Reader(page(result)).data
    assert found or name in ("nothing_found", "empty", "many_flows")
    for at, exact, words in found:
        there = place_of(value, at)
        assert float(exact) == pytest.approx(there, abs=0), at
        spellings = [
            duration(there),
            percent(there),
            f"{there:,.0f}",
            f"\u00b1{duration(there)}",
            size(int(there)),
            rank_seconds(there),
        ]
        assert words.removeprefix(">=") in [*spellings, f"{there:g}"], at


@pytest.mark.parametrize("name", PAGES)
def test_the_page_says_what_the_terminal_says(name: str) -> None:
    result = PAGES[name]()
    texts = " ".join("".join(text for _, text in Reader(page(result)).texts).split())
    headline = re.split(r"(?<=\.)\s", " ".join("\n".join(text_lines(result)).split()))[0]
    assert headline in texts
    for sentence in result.limits:
        assert sentence in texts


def test_the_first_screen_answers_six_questions() -> None:
    """Who, since when, at what cost, how sure, why, and what was not seen."""
    result = job(late_ms=10)
    result.limits.append("Nor was this.")
    result.judged = [Judged("congestion", "not_judged", "no switch")]
    head = page(result).partition("<nav")[0]
    text = " ".join(" ".join(text for tag, text in Reader(head + "</main></body></html>").texts).split())
    for said in (
        "LATE: rank 2 (10.0.0.3)", "from the start", "cost : the others waited 0.3 rank-seconds",
        "confidence : 97 %", "likely cause : compute", "97 % sure, throughout",
        f"not seen : {result.limits[0]}", "1 more, 1 condition not judged",
    ):  # fmt: skip
        assert said in text, said
    result.findings[0].start_ns, result.findings[0].end_ns = T0 + 100 * MS, T0 + 200 * MS
    assert "sure, from 100 ms to 200 ms" in re.sub("<[^>]*>", "", page(result))


@pytest.mark.parametrize("name", PAGES)
def test_a_saved_result_gives_the_same_page(name: str) -> None:
    result = PAGES[name]()
    assert page(analysis_of(json.loads(text_of(result)), "x")) == page(result)


def test_no_name_becomes_markup() -> None:
    result = rich_job()
    for each in result.endpoints:
        each.address, each.label = EVIL, EVIL + "y" * 10_000
    result.captures[0].vantage = result.captures[0].files[0] = result.limits[0] = '"><img src=x onerror=1>'
    result.findings[0].summary = result.findings[0].evidence[0].filter = "</code><script>alert(2)</script>"
    result.collectives[0].ranks[0].why = "</script><svg onload=alert(3)>"
    text = page(result)
    reader = Reader(text)
    assert [tag for tag, _ in reader.elements].count("script") == 2
    assert not {"img", "a:x", "iframe", "object"} & {tag for tag, _ in reader.elements}
    assert not [key for _, attributes in reader.elements for key in attributes if key.startswith("on")]
    assert not set("\u202e\x1b\x00") & set(text)
    assert len(text) < len(page(rich_job())) + 150_000


def test_nothing_is_loaded_and_only_what_is_written_here_may_run() -> None:
    reader = Reader(page(rich_job()))
    (policy,) = [a["content"] for tag, a in reader.elements if "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    for element in ("style", "script"):
        text = [text for tag, text in reader.texts if tag == element][-1]
        assert f"{element}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" in policy
    for _, attributes in reader.elements:
        assert not {"src", "style"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith("#")
    style = next(text for tag, text in reader.texts if tag == "style")
    assert "url(" not in style
    assert "@import" not in style


def test_links_lead_somewhere() -> None:
    reader = Reader(page(rich_job()))
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {str(a["href"])[1:] for tag, a in reader.elements if tag == "a"} <= set(ids)


def test_bounds_do_not_look_like_measurements() -> None:
    shapes = {}
    for bound in ("exact", "at_most", "at_least", "unobservable"):
        text = page(only(bound))
        cells = re.search(r'<svg[^>]*class="heat.*?</svg>', text)
        shapes[bound] = re.sub(r".*?(<path.*)", r"\1", cells[0]) if cells else None
        assert f'class="stay {bound}"' in text or bound == "unobservable"
    assert len(set(shapes.values())) == 4
    assert shapes["unobservable"] is None


def test_clocks_that_nothing_ties_share_no_time_line() -> None:
    text = page(apart())
    assert 'class="band"' not in text
    assert text.count("no common time line") == 1
    assert 'class="lanes"' in text


def test_a_large_result_makes_a_small_page() -> None:
    result = job(late_ms=5)
    result.endpoints = [Endpoint(i, f"10.1.{i // 250}.{i % 250}", [""], None, i) for i in range(500)]
    result.lateness = [Lateness(i, 1, 0.0, 0.0, 0, 0, 0, "on_time", "none") for i in range(500)]
    row = RankEntry(0, 0, 1, 5000, 9, "exact", "none", "first own message of this rank")
    result.collectives = [collective(k, [0.1 * i for i in range(4)], start_ms=40 * k) for k in range(400)]
    for each in result.collectives:
        each.ranks = [
            RankEntry(i, each.start_ns + i, each.end_ns, i, 9, "exact", "none", row.why) for i in range(500)
        ]
    text = page(result)
    assert len(text) < 4 << 20
    assert f"about {400 / MOST_COLUMNS:.3g} to a column" in text
    assert f"about {500 / MOST_ROWS:.3g} to a row" in text
    assert "200 collectives with less lateness are in the JSON only" in text
    assert "300 endpoints that caused less wait are in the JSON only" in text


def test_colours_change_where_it_is_said() -> None:
    assert class_limits(9_000_000) == [30_000, 100_000, 300_000, 1_000_000, 3_000_000]
    assert class_limits(1) == [1]
    assert class_limits(10**15)[-1] <= 3 * 10**11


STYLE = (Path(__file__).resolve().parents[1] / "dpuflow/reports/html/page.css").read_text()
# Machado, Oliveira and Fernandes (2009), severity 1: on linear RGB.
DEFICIENCIES = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> list[float]:
    x, y, z = (
        sum(a * b for a, b in zip(row, rgb, strict=True)) / white
        for row, white in zip(
            [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]],
            (0.9505, 1.0, 1.089),
            strict=True,
        )
    )
    f = [max(t, 0) ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z)]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


@pytest.mark.parametrize("eyes", ["all", *DEFICIENCIES])
@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_differ_for_all_eyes(eyes: str, scheme: int) -> None:
    block = STYLE.split(":root {")[1 + scheme]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))

    def seen(name: str) -> list[float]:
        rgb = linear(colours[name])
        if eyes != "all":
            rgb = [sum(a * b for a, b in zip(row, rgb, strict=True)) for row in DEFICIENCIES[eyes]]
        return lab([min(max(part, 0), 1) for part in rgb])

    for names in (("w0", "w1", "w2", "w9", "moves", "rest"), ("h0", "h1", "h2", "h3", "h4", "h5")):
        for a, b in combinations(names, 2):
            apart = sum((p - q) ** 2 for p, q in zip(seen(a), seen(b), strict=True)) ** 0.5
            assert apart > 8, (a, b, apart)
    light = [seen(f"h{number}")[0] for number in range(6)]
    assert light in (sorted(light), sorted(light, reverse=True))


@pytest.mark.parametrize(
    "world", ["full", "folder"]
)  # fmt: skip
def test_a_page_that_cannot_be_written_is_one_sentence(
    world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text(text_of(rich_job()))
    target = "/dev/full" if world == "full" else str(tmp_path)
    assert run(["report", str(file), "--html", target]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"dpuflow: {target}: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]
