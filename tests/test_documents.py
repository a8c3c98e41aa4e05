"""README and docs: the commands that they show have these options, links lead somewhere."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import click
import pytest

import dpuflow
from dpuflow.agent.metricnames import METRICS
from dpuflow.cli.commands import dpuflow as command_line
from dpuflow.reports.meanings import MEANINGS
from dpuflow.reports.text import text_lines

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"\bdpuflow ([a-z]+)((?: +[^\s`|#&>;]+)+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_shown_have_these_options(page: Path) -> None:
    context = click.Context(command_line)
    for name, words in SHOWN.findall(page.read_text()):
        command = command_line.get_command(context, name)
        if command is None:
            continue  # prose: "dpuflow reads"
        own = words.split(" -- ")[0].split()
        if isinstance(command, click.Group):
            parts = {
                option
                for each in command.list_commands(context)
                for option in options(command, each, context)
            }
        else:
            parts = {option for each in command.params for option in each.opts}
        used = {word.split("=")[0].rstrip(".,:)'\"") for word in own if re.match(r"--?[A-Za-z]", word)}
        assert used <= parts | {"--help"}, f"dpuflow {name}{words}"


def test_the_verdict_shown_is_what_the_bundled_capture_gives() -> None:
    nodes = sorted((ROOT / "traces/gloo-allreduce-n4").glob("node*.pcap.gz"))
    verdict = " ".join(" ".join(islice(text_lines(dpuflow.analyze(nodes)), 9)).split())
    for page in ("README.md", "docs/report.md"):
        shown = re.search(r"(?:^    .+\n)+", (ROOT / page).read_text().partition("\n    LATE: ")[2], re.M)
        assert shown is not None
        for line in re.sub(r"\n {8,}", " ", shown.group()).splitlines():
            assert " ".join(line.split()) in verdict, page


def options(group: click.Group, name: str, context: click.Context) -> list[str]:
    command = group.get_command(context, name)
    assert command is not None
    return [option for each in command.params for option in each.opts]


def anchors(page: Path) -> set[str]:
    """Of each heading the link that code forges make."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", sorted((ROOT / "docs/theory").glob("*.md")), ids=lambda page: str(page.name))
def test_modules_that_rules_name_exist(page: Path) -> None:
    """``[`room/module.function`, ...]`` behind a rule says where it is carried out."""
    modules = {path.stem: path for path in (ROOT / "dpuflow").rglob("*.py")}
    for named in re.findall(r"\[((?:`[\w/.]+`(?:,\s)?)+)\](?!\()", page.read_text()):
        for word in re.findall(r"`([\w/.]+)`", named):
            module, _, function = word.rpartition("/")[2].partition(".")
            where = modules.get(module) or ROOT / "dpuflow" / module / "__init__.py"
            assert where.exists(), word
            assert not function or f"def {function}(" in where.read_text(), word


def test_how_a_wheels_completion_is_turned_on_is_said_where_it_is() -> None:
    """README names the files that setup.cfg puts into the environment."""
    places = re.findall(
        r"^(share/\S+) = deploy/(?:completion|man)/(\S+)$", (ROOT / "setup.cfg").read_text(), re.M
    )
    assert len(places) == 4
    readme = (ROOT / "README.md").read_text()
    for folder, _ in places:
        assert f"$VIRTUAL_ENV/{folder.removesuffix('/man1')}" in readme


def test_the_first_screen_has_a_way_for_a_job_that_is_slow_now() -> None:
    """The command that gave the verdict shown, then place, install, capture, analyse."""
    first = (ROOT / "README.md").read_text().partition("## Where to capture")[0]
    assert first.index("$ dpuflow analyze traces/") < first.index("LATE: ") < first.index("slow right now?")
    for word in (
        "#where-to-capture",
        "#install-on-nodes",
        "dpuflow capture --on",
        "dpuflow analyze job --html",
    ):
        assert word in first.partition("slow right now?")[2]


def test_what_is_unknown_is_called_so() -> None:
    """Not "not told": in pages, columns' meanings and metrics. Names in code are another matter."""
    pages = [re.sub(r"`[^`]*`", "", path.read_text()) for path in PAGES]
    texts = [*pages, *(note for table in MEANINGS.values() for note in table.values())]
    texts += [metric.about for metric in METRICS]
    stale = re.compile(
        r"not told\b(?! apart)|they were told|Told as|what is said of it"
        r"|(can|must) be told\b(?! apart)|came again"
    )
    assert [found.group() for text in texts if (found := stale.search(text))] == []
