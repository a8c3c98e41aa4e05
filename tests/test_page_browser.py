"""The page in a real browser: nothing is loaded or complained of, it fits, keys work, names stay names."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from browser import PROGRAM, Browser, chromium
from scripted_results import collective, job
from test_loading import EVIL, rich_job

from dpuflow.reports.html import page
from dpuflow.results import Endpoint, RankEntry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dpuflow.results import Analysis

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here")
WIDTHS = (360, 1280, 2560)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def shown(browser: Browser, result: Analysis, folder: Path, **how: Any) -> None:
    file = folder / "page.html"
    file.write_text(page(result), encoding="utf-8")
    browser.open(file, **how)


def complaints(browser: Browser) -> list[dict[str, Any]]:
    """What the page logged, threw, or was refused by its policy."""
    kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    return [each for each in browser.said if each.get("method") in kinds]


def many_ranks(ranks: int = 130) -> Analysis:
    """So many ranks of long addresses, a collective that they are all in."""
    result = job(late_ms=5)
    result.endpoints = [Endpoint(i, f"fe80::5054:ff:fe00:{i:x}", [""], None, i) for i in range(ranks)]
    call = collective(0, [0.1] * 4)
    call.ranks = [
        RankEntry(i, call.start_ns + i, call.end_ns, i, 9, "exact", "none", "w") for i in range(ranks)
    ]
    result.collectives = [call]
    result.groups[0].endpoints = list(range(ranks))
    return result


@pytest.mark.parametrize("make", [rich_job, many_ranks])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_and_nothing_is_complained_of(
    browser: Browser, tmp_path: Path, width: int, scheme: str, make: Any
) -> None:
    shown(browser, make(), tmp_path, width=width, scheme=scheme)
    browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value("[...document.querySelectorAll('svg')].every(each => each.clientWidth > 0)")
    asked = [
        e["params"]["request"]["url"] for e in browser.said if e.get("method") == "Network.requestWillBeSent"
    ]
    assert [each for each in asked if not each.startswith("file:")] == []
    assert complaints(browser) == []


def test_the_first_screen_has_verdict_time_line_and_findings(browser: Browser, tmp_path: Path) -> None:
    shown(browser, rich_job(), tmp_path, width=1280, height=800)
    for part in ("h1", ".timeline .band", ".worst li"):
        box = browser.value(f"document.querySelector({part!r}).getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] < box["bottom"] <= 800, part


def test_five_thousand_ranks_fit_on_a_page(browser: Browser, tmp_path: Path) -> None:
    result = many_ranks(5000)
    result.flows = [replace(result.flows[0], id=i, src=i % 5000, dst=(i + 1) % 5000) for i in range(20_000)]
    result.lateness = [replace(result.lateness[2 if i == 2 else 0], endpoint=i) for i in range(5000)]
    result.collectives = [replace(result.collectives[0], id=i) for i in range(40)]
    shown(browser, result, tmp_path)
    assert (tmp_path / "page.html").stat().st_size < 12 << 20
    assert "4,800 endpoints that caused less wait are in the JSON only." in browser.value(
        "document.body.innerText"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """WCAG 2's contrast of 4.5, of every element that has text of its own."""
    shown(browser, rich_job(), tmp_path, scheme=scheme)
    pale = browser.value("""(() => {
      const parts = text => text.match(/[\\d.]+/g).map(Number);
      const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = each => {
        for (; each; each = each.parentElement) {
          const colour = parts(getComputedStyle(each).backgroundColor);
          if (colour.length === 3 || colour[3] > 0) return colour;
        }
      };
      const poor = [];
      for (const each of document.querySelectorAll("main *")) {
        if (![...each.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
        const style = getComputedStyle(each), inSvg = each.namespaceURI.endsWith("svg");
        const [a, b] = [parts(inSvg ? style.fill : style.color), behind(each)].map(light);
        if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) poor.push(each.outerHTML.slice(0, 80));
      }
      return poor;
    })()""")
    assert [each for each in pale if not each.startswith("<title")] == []


def test_a_screen_reader_has_a_name_for_everything_it_stops_at(browser: Browser, tmp_path: Path) -> None:
    shown(browser, rich_job(), tmp_path)
    stops = {"link", "button", "img", "image", "region", "table", "navigation", "main"}
    named: list[tuple[str, str]] = []
    for _ in range(50):  # the browser makes its tree when it has the time
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        named = [
            (n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")
        ]
        if "table" in {role for role, _ in named}:
            break
        time.sleep(0.1)
    assert [role for role, name in named if role in stops - {"main"} and not name] == []
    assert {"heading", "table", "navigation"} <= {role for role, _ in named}


def test_the_keyboard_reads_cells_and_copies_filters(browser: Browser, tmp_path: Path) -> None:
    shown(browser, rich_job(), tmp_path)
    browser.value("document.querySelector('svg.heat').focus()")
    browser.press("ArrowDown", "ArrowRight")
    assert "late" in browser.value("document.querySelector('.readout').textContent")
    browser.value("document.querySelector('button[data-copy]').focus()")
    browser.press("Enter")
    said = "new Promise(done => setTimeout(() => done(document.querySelector('button').textContent), 300))"
    assert browser.value(said) in ("Copied", "Selected")
    assert complaints(browser) == []


def test_names_stay_names(browser: Browser, tmp_path: Path) -> None:
    result = rich_job()
    for each in result.endpoints:
        each.address = each.label = EVIL
    result.findings[0].evidence[0].filter = '"><img src=x onerror="document.title=\'run\'">'
    shown(browser, result, tmp_path)
    assert browser.value("document.images.length") == 0
    assert "dpuflow" in browser.value("document.title")
    assert complaints(browser) == []


def test_without_its_script_the_page_still_says_everything(browser: Browser, tmp_path: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown(browser, rich_job(), tmp_path)
        assert len(browser.picture()) > 10_000
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_it_prints_on_a4(browser: Browser, tmp_path: Path) -> None:
    shown(browser, rich_job(), tmp_path)
    browser.call("Emulation.setEmulatedMedia", media="print")
    printed = browser.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)["data"]
    browser.call("Emulation.setEmulatedMedia", media="")
    assert printed.startswith("JVBERi0")  # %PDF-
