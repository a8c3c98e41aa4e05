"""``dpuflow top``: screens as text, keys, an agent that goes away and comes back, a real terminal."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import agent_worlds
import pytest
from agent_http import serving
from scripted_results import job
from test_loading import EVIL, rich_job, text_of

from dpuflow.agent.config import Api
from dpuflow.cli import run
from dpuflow.reports.top.screen import KEYS, SORTS, View, screen
from dpuflow.reports.top.seen import Seen, line_of, seen_of
from dpuflow.reports.top.sources import Agent, files
from dpuflow.reports.top.terminal import pressed

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
TMUX = shutil.which("tmux")


def text(seen: Seen, view: View | None = None, width: int = 80, height: int = 24) -> str:
    return "\n".join(line.text for line in screen(seen, view or View(), width, height))


@pytest.fixture
def late() -> Seen:
    return seen_of(job(late_ms=5), "result.json")


def test_a_screen(late: Seen) -> None:
    lines = text(late).split("\n")
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    (row,) = [line for line in lines if line.startswith(">")]
    assert row.startswith("> rank 2 (10.0.0.3)")
    assert " late " in row
    assert row.rstrip().endswith("\u2588")
    assert "waited" in text(late).split("endpoint")[0]  # who waits for whom stands above the table
    assert lines[-1] == KEYS


@pytest.mark.parametrize("height", [1, 7, 8, 24, 60])
@pytest.mark.parametrize("width", [1, 39, 40, 60, 80, 200])
@pytest.mark.parametrize("opened", [False, True])
def test_any_size(width: int, height: int, opened: bool) -> None:
    lines = text(seen_of(rich_job(), "x"), View(opened=opened), width, height).split("\n")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_bounds_do_not_look_like_measurements(late: Seen) -> None:
    worst = next(each for each in late.ranks if each.row.verdict == "late")
    bound = replace(worst, row=replace(worst.row, late_bound="at_least"))
    for ascii_only, full, light in ((False, "\u2588", "\u2591"), (True, "#", "-")):
        view = View(ascii=ascii_only)
        shown = [text(replace(late, ranks=(each,)), view) for each in (worst, bound)]
        assert [full * 5 in each for each in shown] == [True, False]
        assert [light * 5 in each for each in shown] == [False, True]
        assert [">=" in each for each in shown] == [False, True]
    assert line_of(replace(late, ranks=(bound,))).count("at least") == 1


def test_what_is_not_known_is_no_nought(late: Seen) -> None:
    row = replace(late.ranks[0].row, verdict="unknown", late_ns=None, median_ns=0)
    shown = text(replace(late, ranks=(replace(late.ranks[0], row=row),)))
    assert " 0 ns" not in shown.split("unknown")[1][:12]


def test_keys(late: Seen) -> None:
    view = View()
    for key in ("s", "j", "p", "\n"):
        assert pressed(view, key, late)
    assert (view.sort, view.chosen, view.paused, view.opened) == (SORTS[1], 1, True, True)
    assert "likely cause" in text(late, view)
    for key in ("/", *"10.0.0.2", "\n"):
        pressed(view, key, late)
    assert [each.name for each in view.ranks(late)] == ["rank 1 (10.0.0.2)"]
    pressed(view, "\x1b", late)
    assert len(view.ranks(late)) == len(late.ranks)
    assert not pressed(view, "q", late)


def test_every_order_has_every_rank(late: Seen) -> None:
    for sort in SORTS:
        assert sorted(e.name for e in View(sort).ranks(late)) == sorted(e.name for e in late.ranks)
    assert View("waited").ranks(late)[0].row.verdict == "late"


def test_the_filter_is_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    seen, view = seen_of(rich_job(), "x"), View()
    pressed(view, "c", seen)
    assert view.note == next(e.filter for f, _ in seen.findings for e in f.evidence)
    assert capsys.readouterr().out.startswith("\033]52;c;")


def test_names_steer_no_terminal() -> None:
    result = rich_job()
    for each in result.endpoints:
        each.label = EVIL + "\x1b[2J\u202e"
    result.findings[0].summary = "\x1b]0;x\a"
    shown = text(seen_of(result, "x"), View(opened=True)) + line_of(seen_of(result, "x"))
    assert not set("\x1b\a\u202e") & set(shown)


def test_an_agent_is_asked() -> None:
    with serving(agent_worlds.board()) as running:
        seen = Agent(running.url).look()
    assert seen.away is None
    assert [each.row.verdict for each in seen.ranks if each.end.rank == 1] == ["late"]
    assert "waited 0.16 rank-seconds for rank 1 (10.0.0.2, node1 gpu0)" in " ".join(seen.waits())
    assert {"45 retransmitted", "750 ECN-marked"} <= set(seen.health)
    for part in ("25 % of a core", "10 LOST", "p1 is not captured from", "decode of 25 ms", "straggler"):
        assert part in text(seen) + line_of(seen)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_an_agent_that_goes_away_is_told_and_comes_back() -> None:
    port = free_port()
    agent = Agent(f"http://127.0.0.1:{port}")
    assert "no answer" in str(agent.look().away)
    for _ in range(2):
        with serving(agent_worlds.board(), Api(listen=f"127.0.0.1:{port}")):
            seen = eventually(agent.look, lambda seen: seen.away is None)
            assert len(seen.ranks) == 3
        seen = eventually(agent.look, lambda seen: seen.away is not None)
        assert len(seen.ranks) == 3  # what was last known stays on the screen
        assert "still asking" in text(seen)


def eventually(look: Callable[[], Seen], wanted: Callable[[Seen], bool]) -> Seen:
    until = time.monotonic() + 20
    while not wanted(seen := look()):
        assert time.monotonic() < until, seen
        time.sleep(0.05)
    return seen


@pytest.mark.parametrize("body", [b"[]", b"{}", b"{", b"\xff", b'{"endpoints": 3}', None])
def test_what_is_no_agent_is_told(body: bytes | None) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        said = str(Agent(f"http://127.0.0.1:{server.server_port}").look().away)
        server.shutdown()
    assert "no answer" in said
    assert body is not None or "a fleet has none: name one of its agents" in said


def test_a_saved_result_is_looked_at_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    source = files(str(file))
    assert "No such file" in str(source.look().away)
    for late_ms, late in ((0, 0), (5, 1)):
        file.write_text(text_of(job(late_ms=late_ms)))
        seen = eventually(source.look, lambda seen: not seen.away and len(seen.waits()) == late)  # noqa: B023
        assert len(seen.ranks) == 4
    file.write_text("{")
    assert "not JSON" in str(eventually(source.look, lambda seen: seen.away is not None).away)


def test_plain_is_a_line_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    file.write_text(text_of(job(late_ms=5)))
    assert run(["top", str(file), "--plain", "--count", "2", "--every", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("late: rank 2 (10.0.0.3)" in line for line in lines)


def test_what_is_not_there_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", str(tmp_path), "--replay", "10"]) == 1
    assert "holds no agent's history" in capsys.readouterr().err
    assert run(["top", "http://127.0.0.1:1", "--replay", "10"]) == 2
    capsys.readouterr()
    assert run(["top", "nosuch0"]) == 1
    assert capsys.readouterr().err == "dpuflow: nosuch0: no such interface, folder or file, and no URL\n"


class Terminal:
    """A terminal of tmux's with ``dpuflow top`` in it."""

    def __init__(self, arguments: list[str], folder: Path, **environment: str) -> None:
        self.base = [str(TMUX), "-S", str(folder / "socket"), "-f", "/dev/null"]
        setting = [f"{key}={value}" for key, value in environment.items()]
        command = ["env", *setting, sys.executable, "-m", "dpuflow", "top", *arguments]
        self.tmux("new-session", "-d", "-x", "80", "-y", "24", *command)

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run([*self.base, *arguments], capture_output=True, text=True, cwd=ROOT)
        return done.stdout

    def until(self, wanted: str, *flags: str) -> str:
        until = time.monotonic() + 30
        while wanted not in (shown := self.tmux("capture-pane", "-p", *flags)):
            assert time.monotonic() < until, shown
            time.sleep(0.1)
        return shown


@pytest.mark.skipif(TMUX is None, reason="no tmux here")
@pytest.mark.parametrize("colour", [True, False])
def test_a_real_terminal(tmp_path: Path, colour: bool) -> None:
    file = tmp_path / "result.json"
    file.write_text(text_of(job(late_ms=5)))
    terminal = Terminal([str(file)], tmp_path, LC_ALL="C.UTF-8", **({} if colour else {"NO_COLOR": "1"}))
    try:
        shown = terminal.until("> rank 2 (10.0.0.3)")
        assert shown.rstrip("\n").split("\n") == [
            line.rstrip() for line in text(seen_of(job(late_ms=5), str(file)), width=79).split("\n")
        ]
        assert ("\x1b[31m" in terminal.tmux("capture-pane", "-p", "-e").replace(";", "m\x1b[")) == colour
        terminal.tmux("send-keys", "Enter")
        terminal.until("likely cause")
        terminal.tmux("send-keys", "p")
        terminal.until("PAUSED")
        terminal.tmux("resize-window", "-x", "60", "-y", "20")
        terminal.until("likely cause")
        terminal.tmux("send-keys", "q")
        until = time.monotonic() + 20
        while terminal.tmux("list-sessions") and time.monotonic() < until:
            time.sleep(0.1)
        assert terminal.tmux("list-sessions") == ""
    finally:
        terminal.tmux("kill-server")


def test_a_thousand_ranks_take_little(tmp_path: Path) -> None:
    """A look and a screen of 1,000 ranks, which ``SHARE`` of a core is then waited for."""
    result = job(late_ms=5)
    result.endpoints = [
        replace(result.endpoints[2], id=i, address=f"10.1.{i // 250}.{i % 250}") for i in range(1000)
    ]
    result.lateness = [replace(result.lateness[2], endpoint=i) for i in range(1000)]
    result.groups[0].endpoints = list(range(1000))
    result.collectives, result.flows, result.findings = [], [], []
    seen = seen_of(result, "x")
    began = time.thread_time()
    for _ in range(10):
        screen(seen, View(), 80, 24)
    assert (time.thread_time() - began) / 10 < 0.05
    assert json.dumps(line_of(seen))
