"""API and metrics in a process of their own: it may do nothing, follows the board, comes back, and ends."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import agent_worlds
import msgspec
import pytest

from dpuflow.agent import outside
from dpuflow.agent.board import Board, FindingState, Health, Window
from dpuflow.agent.config import Api, Capture, Config, Webhook
from dpuflow.agent.log import Log
from dpuflow.agent.outside import Outside
from dpuflow.agent.service import Service
from dpuflow.agent.usage import memory
from dpuflow.errors import MissingError, OptionError
from dpuflow.results import Analysis, Finding

CONFIG = Config(api=Api(listen="127.0.0.1:9487", health="127.0.0.1:9488"))
SERVED = Config(api=Api(listen="127.0.0.1:9489"))


@pytest.fixture
def board() -> Board:
    return Board()


def asked(port: int, path: str) -> dict[str, object]:
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return dict(msgspec.json.decode(answer.read()))


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if what():
                return
        except OSError:
            pass
        assert time.monotonic() < end
        time.sleep(0.05)


def finding() -> FindingState:
    told = Finding(0, "straggler", "r", [], 0, None, "warning", 0.9, "it is late", "look", [], [])
    return FindingState("f1", "straggler", ("10.0.0.1",), "warning", 1, 2, 3, True, told)


def test_it_may_do_nothing_and_follows_the_board(board: Board) -> None:
    outside = Outside(board, CONFIG, Log(stream=io.StringIO()))
    try:
        status = Path(f"/proc/{outside.pid}/status").read_text()
        assert outside.pid not in (None, os.getpid())
        assert set(re.findall(r"Cap(?:Inh|Prm|Eff|Amb):\s+(\w+)", status)) == {"0" * 16}
        assert re.findall(r"NoNewPrivs:\s+(\d)", status) == ["1"]
        board.publish(Window(7, 1, 2, Analysis()), (finding(),))
        board.report(Health(time_ns=5, collectives=3))
        until(lambda: asked(9487, "/api/v1/health")["collectives"] == 3)
        rows = asked(9487, "/api/v1/windows")["windows"]
        assert [row["number"] for row in rows] == [7]  # type: ignore[attr-defined]
        (row,) = asked(9487, "/api/v1/findings")["findings"]  # type: ignore[misc]
        assert row["summary"] == "it is late"
        assert asked(9488, "/healthz")["status"] == "ok"
        assert outside.cpu_s() > 0
        assert memory().own > 0
        asked(9487, "/api/v1/lateness")
        asked(9487, "/api/v1/groups")
        # What it does not need is not loaded: it was 8 MiB of 33, which count as the agent's.
        assert "numpy" not in Path(f"/proc/{outside.pid}/maps").read_text()
    finally:
        outside.close()
    assert outside.pid is None
    with pytest.raises(OSError, match="refused"):
        asked(9488, "/healthz")


def test_killed_it_comes_back(board: Board) -> None:
    log = io.StringIO()
    outside = Outside(board, SERVED, Log(stream=log))
    try:
        before, used_s = outside.pid, outside.cpu_s()
        assert before is not None
        os.kill(before, signal.SIGKILL)

        def back() -> bool:
            board.report(Health(collectives=4))
            return asked(9489, "/api/v1/health")["collectives"] == 4

        until(back)
        assert outside.pid != before
        assert outside.cpu_s() >= used_s
        assert "starting another" in log.getvalue()
    finally:
        outside.close()


def test_what_cannot_be_served_is_told_here(board: Board) -> None:
    outside = Outside(board, SERVED, Log(stream=io.StringIO()))
    try:
        with pytest.raises(OptionError, match=r"api.listen: 127.0.0.1:9489: Address already in use"):
            Outside(board, SERVED, Log(stream=io.StringIO()))
        with pytest.raises(OptionError, match=r"api.token_file: /none: No such file"):
            outside.reload(Config(api=Api(listen="127.0.0.1:9489", token_file="/none")))
        assert asked(9489, "/healthz")
        outside.reload(CONFIG)
        assert outside.places == {"api": ("127.0.0.1", 9487), "health": ("127.0.0.1", 9488)}
        assert asked(9487, "/healthz")
    finally:
        outside.close()


def test_a_reload_that_lacks_a_package_changes_nothing(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the process: a package is loaded when the first webhook comes."""
    hidden = outside._CODE.replace("import sys;", "import sys; sys.modules['urllib3'] = None;")
    monkeypatch.setattr(outside, "_CODE", hidden)
    log = io.StringIO()
    parts = Outside(board, SERVED, Log(stream=log))
    try:
        before = parts.pid
        told = Config(api=CONFIG.api, webhooks=[Webhook(url="http://127.0.0.1:9/")])
        with pytest.raises(MissingError, match=r"the agent needs urllib3: run pip install '.\[agent\]'"):
            parts.reload(told)
        assert asked(9489, "/healthz")
        parts.reload(CONFIG)
        assert asked(9487, "/healthz")
        assert (parts.pid, log.getvalue()) == (before, "")
    finally:
        parts.close()


def test_nothing_is_begun_for_nothing(board: Board) -> None:
    outside = Outside(board, Config(api=Api(listen="off")), Log(stream=io.StringIO()))
    try:
        assert outside.pid is None
        outside.reload(SERVED)
        assert outside.pid is not None
    finally:
        outside.close()


def test_windows_are_held_by_the_process_that_is_asked_for_them() -> None:
    """The agent held them, too: ten minutes of results twice."""
    config = Config(capture=Capture(interfaces=["lo"]), api=SERVED.api)
    service = Service(config, Log(stream=io.StringIO()))
    service._start_outlets()
    try:
        for number in range(3):
            service.board.publish(agent_worlds.window(number))
        assert [each.number for each in service.board.windows()] == [2]
        until(lambda: len(asked(9489, "/api/v1/collectives?since_ns=0")["collectives"]) == 12)  # type: ignore[arg-type]
    finally:
        service.close()
